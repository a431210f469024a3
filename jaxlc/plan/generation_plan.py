"""Compiles the programs of generation ahead of time for absent GPUs: a prefill chunk and a decoding step."""

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import jax.numpy as jnp
from ml_collections import ConfigDict

from jaxlc.config import Config, ModelConfig
from jaxlc.core import scopes
from jaxlc.core.axes import CONTEXT, TENSOR
from jaxlc.core.errors import UserError
from jaxlc.core.flops import causal_pairs
from jaxlc.generation.cache import CacheLayout, layout_for, num_cached_heads
from jaxlc.generation.cached_step import CachedStep, abstract_params
from jaxlc.hlo.attention_kernels import AttentionKernelCall
from jaxlc.models import decoder
from jaxlc.plan import memory, summary
from jaxlc.plan.compile import on_gpus
from jaxlc.plan.compiled_program import CompiledProgram, compile_program
from jaxlc.plan.generation_result import GenerationPlan, ProgramPlan
from jaxlc.simulate.interval import time_interval
from jaxlc.simulate.roofline import Roofline
from jaxlc.simulate.time_model import DEFAULT_ROOFLINE, TimeModel, shape_of
from jaxlc.simulate.timed_ops import TimedOps
from jaxlc.simulate.timeline import Simulator
from jaxlc.simulate.topology import Topology, make_mesh
from jaxlc.step.mixed_precision import compute_dtype
from jaxlc.step.state import bytes_per_device
from jaxlc.step.step import build_step

CACHE_DTYPES = {"bf16": jnp.bfloat16, "fp16": jnp.float16, "fp32": jnp.float32}


@dataclass(frozen=True)
class CachedTimeModel(TimeModel):
    """Estimated time of a chunk of new tokens. The program does not contain the length of the cache that it reads."""

    step: CachedStep = field(kw_only=True)
    batch_size: int = field(kw_only=True)  # sequences, over all ranks
    num_past: int = field(kw_only=True)  # tokens of each sequence in the cache
    num_new: int = field(kw_only=True)  # tokens of each sequence, without padding

    def attention_flops(self, call: AttentionKernelCall) -> float:
        """FLOPs of the pairs of a query and a key that the mask leaves: two matrix products per pair.

        Calls over the cache compute the queries of a chunk and the keys of a rank, whose shares are equal up to a
        block; with a window, the queries of a rank and the keys of a window. Masked calls within a chunk are causal.
        """
        if not _reads_cache(call):
            return call.full_flops * (0.5 if call.is_masked else 1.0)
        model, shape = self._shape_of(call), self.step.mesh.shape
        num_heads = model.num_heads // shape[TENSOR]
        pairs = self.num_past * self.num_new
        if call.has_window:
            pairs = chunk_pairs(self.num_past, self.num_new, model.window)
        return 4.0 * model.head_dim * num_heads * self._local_batch_size * pairs / shape[CONTEXT]

    def attention_seconds(self, call: AttentionKernelCall) -> float:
        """The larger of the compute time and the time to read the cached keys and values once, as in decoding."""
        compute_seconds = super().attention_seconds(call)
        if not _reads_cache(call):
            return compute_seconds
        model, mesh = self._shape_of(call), self.step.mesh
        num_heads = num_cached_heads(model, mesh) // mesh.shape[TENSOR]
        num_tokens = self.num_past + self.num_new
        num_keys = num_tokens / mesh.shape[CONTEXT]
        if call.has_window:
            num_keys = min(num_tokens, model.window + self.num_new)
        values = 2.0 * self._local_batch_size * num_keys * num_heads * model.head_dim
        read_seconds = self.roofline.memory_seconds(self.gpus.device, values * self.step.cache_dtype.itemsize)
        return max(compute_seconds, read_seconds)

    def _shape_of(self, call: AttentionKernelCall) -> ModelConfig:
        return shape_of(call, self.config.model, self._local_batch_size / self.step.mesh.shape[TENSOR])

    @property
    def _local_batch_size(self) -> int:
        """Sequences on a rank."""
        return self.batch_size // self.step.padded_batch_size(1)


def _reads_cache(call: AttentionKernelCall) -> bool:
    return scopes.KV_CACHE in call.instruction.op_name.split("/")


def chunk_pairs(num_past: int, num_new: int, window: int | None) -> int:
    """Pairs of a new token and a token of its sequence, up to itself, that it attends to."""
    return causal_pairs(num_past + num_new, window) - causal_pairs(num_past, window)


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
    # The time of a run grows linearly with the tokens in the cache, so the mean run stands for all.
    num_chunks = -(-prompt_tokens // chunk_tokens)
    num_new = round(prompt_tokens / num_chunks)
    time_model = functools.partial(CachedTimeModel, gpus, config, roofline, step=step, batch_size=batch)
    decode_time = time_model(num_past=prompt_tokens + new_tokens // 2, num_new=1)
    chunk_time = time_model(num_past=(prompt_tokens - num_new) // 2, num_new=num_new)
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
        kernel_choice=_kernel_choice(step, layout, batch, {"prefill": chunk_tokens, "decode": step.decode_tokens}),
        weights_bytes=bytes_per_device(params),
        float32_params_bytes=bytes_per_device(stored),
        cache_bytes=bytes_per_device(step.abstract_cache(layout, batch)),
        device_capacity_bytes=gpus.device.memory_bytes,
        prefill=_program_plan(prefill, chunk_tokens, chunk_time, num_chunks),
        decode=_program_plan(decode, step.decode_tokens, decode_time),
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


def _kernel_choice(step: CachedStep, layout: CacheLayout, batch: int, num_tokens: dict[str, int]) -> str:
    """The kernels of programs with `num_tokens` tokens, and why they were selected."""
    return "; ".join(
        f"{program}, {what}: {kernel.name} ({kernel.reason})"
        for program, chunk_tokens in num_tokens.items()
        for what, kernel in step.kernels(layout, batch, chunk_tokens).items()
    )


def _program_plan(
    compiled: CompiledProgram, num_tokens: int, time_model: CachedTimeModel, num_runs: int = 1
) -> ProgramPlan:
    """The plan of a program for `num_tokens` tokens that runs `num_runs` times with the work of `time_model`."""
    simulator = Simulator(TimedOps(compiled.program, time_model))
    simulator.run(compiled.program.entry)
    by_kind = Counter()
    for (kind, _), seconds in simulator.seconds.items():
        by_kind[kind] += num_runs * seconds
    seconds = num_runs * simulator.now
    low, high = time_interval(time_model.roofline.time_scale, time_model.roofline.time_spread)
    return ProgramPlan(
        tokens=num_tokens,
        temp_bytes=compiled.temp_bytes,
        workspace_bytes=memory.workspace_bytes(compiled.program),
        nccl_bytes=memory.nccl_bytes(compiled.program.collectives),
        seconds=seconds,
        seconds_interval=(low * seconds, high * seconds),
        seconds_by_kind=dict(by_kind.most_common()),
        kernels=summary.kernels(compiled.program),
        largest=compiled.dump.largest(5),
    )
