"""Compiles the programs of generation ahead of time for absent GPUs: a prefill chunk and a decoding step."""

import dataclasses
from collections.abc import Callable, Iterator

import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from jaxlc.config import Config
from jaxlc.core.axes import CONTEXT, TENSOR
from jaxlc.core.errors import UserError
from jaxlc.generation.cache import layout_for, num_cached_heads
from jaxlc.generation.cached_attention import kernel_for
from jaxlc.generation.cached_step import CachedStep, abstract_params
from jaxlc.hlo import AnalyzedProgram
from jaxlc.models import decoder
from jaxlc.plan import memory, summary
from jaxlc.plan.cached_time import CachedTimeModel, CachedWork
from jaxlc.plan.compile import on_gpus
from jaxlc.plan.compiled_program import CompiledProgram, compile_program
from jaxlc.plan.generation_result import GenerationPlan, ProgramPlan
from jaxlc.simulate.interval import time_interval
from jaxlc.simulate.roofline import Roofline
from jaxlc.simulate.time_model import DEFAULT_ROOFLINE
from jaxlc.simulate.timed_ops import TimedOps
from jaxlc.simulate.timeline import Simulator
from jaxlc.simulate.topology import Topology, make_mesh
from jaxlc.step.mixed_precision import compute_dtype
from jaxlc.step.state import bytes_per_device
from jaxlc.step.step import build_step

CACHE_DTYPES = {"bf16": jnp.bfloat16, "fp16": jnp.float16, "fp32": jnp.float32}
_NUM_SIMULATED_CHUNKS = 5  # the time of a chunk is nearly linear in the number of earlier tokens


def plan_generation(
    config: ConfigDict | Config,
    gpus: Topology,
    starting: Callable[[str], None],
    *,
    prompt_tokens: int,
    new_tokens: int,
    batch_size: int = 1,
    cache_dtype: str = "",
    chunk_tokens: int = 0,
    roofline: Roofline = DEFAULT_ROOFLINE,
) -> GenerationPlan:
    """See `jaxlc.plan.plan_generation`. `starting` is called with the name of each program before it is compiled."""
    for name, value in dict(prompt_tokens=prompt_tokens, new_tokens=new_tokens, batch_size=batch_size).items():
        if value < 1:
            raise UserError(f"invalid value {value} for {name}: expected 1 or more")
    step = _step(on_gpus(config, gpus), gpus, cache_dtype)
    config, mesh = step.config, step.mesh
    stored = build_step(config, mesh).abstract_state.params
    params = abstract_params(stored, decoder.dims_of(config.model, config.lora), mesh, step.compute_dtype)
    layout = layout_for(prompt_tokens + new_tokens, mesh)
    batch = step.padded_batch_size(batch_size)

    def compiled(name: str, num_tokens: int) -> CompiledProgram:
        starting(f"{name} for {gpus}")
        lowered = step.lower(params, layout, batch_size=batch, num_tokens=num_tokens)
        return compile_program(
            lambda options: lowered.compile(compiler_options=options),
            config.precision.compute,
            problem="compilation of generation failed",
            advice="use fewer prompt tokens",
        )

    chunk_tokens = step.prefill_tokens(prompt_tokens, chunk_tokens)
    prefill, decode = compiled("a prefill chunk", chunk_tokens), compiled("a decoding step", step.decode_tokens)
    decoding = _work(step, batch, num_past=prompt_tokens + new_tokens // 2)  # at half of the new tokens
    time_model = CachedTimeModel(gpus, config, roofline, cached_work=decoding)
    return GenerationPlan(
        topology=str(gpus),
        num_devices=gpus.num_gpus,
        mesh=dict(mesh.shape),
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        batch_size=batch_size,
        cache_dtype=step.cache_dtype.name,
        cache_tokens=layout.max_tokens,
        compile_seconds=prefill.compile_seconds + decode.compile_seconds,
        kernel_choice=_kernel_choice(step),
        weights_bytes=bytes_per_device(params),
        float32_params_bytes=bytes_per_device(stored),
        cache_bytes=bytes_per_device(step.abstract_cache(layout, batch)),
        device_capacity_bytes=gpus.device.memory_bytes,
        prefill=_program_plan(prefill, chunk_tokens, time_model, list(_chunks(decoding, prompt_tokens, chunk_tokens))),
        decode=_program_plan(decode, step.decode_tokens, time_model, [decoding]),
    )


def _step(config: Config, gpus: Topology, cache_dtype: str) -> CachedStep:
    if cache_dtype and cache_dtype not in CACHE_DTYPES:
        raise UserError(f"invalid value {cache_dtype!r} for cache_dtype: expected {', '.join(CACHE_DTYPES)}")
    dtype = compute_dtype(config.precision.compute, "gpu")
    return CachedStep(
        config=config,
        mesh=make_mesh(gpus, config.mesh),
        compute_dtype=dtype,
        cache_dtype=jnp.dtype(CACHE_DTYPES.get(cache_dtype, dtype)),
    )


def _work(step: CachedStep, batch_size: int, num_past: int) -> CachedWork:
    """The work of one new token."""
    model, shape = step.config.model, step.mesh.shape
    return CachedWork(
        num_past=num_past,
        num_new=1,
        batch_size=batch_size // step.padded_batch_size(1),
        num_heads=model.num_heads // shape[TENSOR],
        num_kv_heads=num_cached_heads(model, step.mesh) // shape[TENSOR],
        head_dim=model.head_dim,
        num_ranks=shape[CONTEXT],
        window=model.window,
        cache_itemsize=step.cache_dtype.itemsize,
    )


def _chunks(work: CachedWork, prompt_tokens: int, chunk_tokens: int) -> Iterator[CachedWork]:
    for first in range(0, prompt_tokens, chunk_tokens):
        num_new = min(chunk_tokens, prompt_tokens - first)
        yield dataclasses.replace(work, num_past=first, num_new=num_new)


def _kernel_choice(step: CachedStep) -> str:
    config = step.config
    device = step.mesh.devices.flat[0]
    kernel = kernel_for(config.attention.kernel, device, dtype=step.compute_dtype, head_dim=config.model.head_dim)
    return f"{kernel.name} ({kernel.reason})"


def _program_plan(
    compiled: CompiledProgram, num_tokens: int, time_model: CachedTimeModel, works: list[CachedWork]
) -> ProgramPlan:
    """The plan of a program for `num_tokens` tokens that runs once for each of `works`.

    Some runs are simulated, among them the last one, which may have fewer new tokens; the others are interpolated.
    """
    last = len(works) - 1
    simulated = sorted({last} | {round(index) for index in np.linspace(0, max(0, last - 1), _NUM_SIMULATED_CHUNKS)})
    models = (dataclasses.replace(time_model, cached_work=works[index]) for index in simulated)
    runs = [_simulated(compiled.program, model) for model in models]

    def total(values: list[float]) -> float:
        return float(np.interp(np.arange(len(works)), simulated, values).sum())

    kinds = {kind for run in runs for kind, _ in run.seconds}
    by_kind = {
        kind: total([sum(seconds for (of, _), seconds in run.seconds.items() if of == kind) for run in runs])
        for kind in kinds
    }
    seconds = total([run.now for run in runs])
    low, high = time_interval(time_model.roofline.time_scale, time_model.roofline.time_spread)
    return ProgramPlan(
        tokens=num_tokens,
        temp_bytes=compiled.temp_bytes,
        workspace_bytes=memory.workspace_bytes(compiled.program),
        nccl_bytes=memory.nccl_bytes(compiled.program.collectives),
        seconds=seconds,
        seconds_interval=(low * seconds, high * seconds),
        seconds_by_kind=dict(sorted(by_kind.items(), key=lambda item: -item[1])),
        kernels=summary.kernels(compiled.program),
        largest=compiled.dump.largest(5),
    )


def _simulated(program: AnalyzedProgram, time_model: CachedTimeModel) -> Simulator:
    simulator = Simulator(TimedOps(program, time_model))
    simulator.run(program.entry)
    return simulator
