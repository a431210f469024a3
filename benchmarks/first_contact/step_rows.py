"""Parts steps, compile, memory and profile: the real training step of `jaxlc.train`. One process
per row.
"""

import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jaxlc.profile
from benchmarks.first_contact.attention_inputs import device_or_h100
from benchmarks.first_contact.rows import FLAGS_WITHOUT_TRITON, Row
from benchmarks.first_contact.sizes import Sizes
from jaxlc.config import Config, defaults, load, to_dict
from jaxlc.core import hardware
from jaxlc.hlo import analyze
from jaxlc.plan.packing_estimates import mix_of_lengths
from jaxlc.profile import trace_events
from jaxlc.runtime import compilation_cache
from jaxlc.runtime.start import start
from jaxlc.search.measure import measure_step, random_batch
from jaxlc.sharding.mesh import make_mesh
from jaxlc.simulate.packed_work import sequence_work
from jaxlc.simulate.time_model import TimeModel
from jaxlc.simulate.timeline import predict
from jaxlc.simulate.topology import has_gpu_compiler, topology
from jaxlc.step.step import build_step
from jaxlc.train.step_profiler import PROFILE_DIRECTORY, StepProfiler

# the kernel is chosen by "auto"
_ONE_DOCUMENT, _PACKED = dict(document_mask=False), dict(document_mask=True)
_NUM_TRACED, _NUM_WARM_UP = 3, 2
_NUM_KERNELS = 25  # of a trace, in a row
# Reads a config as JSON and prints the plan as JSON, without a GPU.
_PLAN = """
import json, sys
from jaxlc import plan
from jaxlc.config import from_dict
config, topology = json.load(sys.stdin)
result = plan.plan(from_dict(config), topology)
print(json.dumps(result.to_json()))
"""


def step_config(sizes: Sizes, preset: str, num_tokens: int, **sections: dict[str, Any]) -> Config:
    """One sequence per step on one device; `sections` override, such as memory=dict(remat="full")."""
    config = defaults()
    config.model.preset = preset
    config.data.seq_len = num_tokens
    config.runtime.simulated_devices = int(sizes.is_dry_run)
    for section, values in sections.items():
        config[section].update(values)
    return load(config)


def _documents(config: Config) -> Sequence[int]:
    """Lengths of the documents of a sequence: one, or about 14 of the lengths that `jaxlc plan`
    calls mix.
    """
    num_tokens = config.data.seq_len
    return (
        mix_of_lengths(np.random.default_rng(0), num_tokens).tolist()
        if config.attention.document_mask
        else ()
    )


def step_rows(sizes: Sizes) -> Iterator[Row]:
    fp8 = dict(precision=dict(compute="bf16" if sizes.is_dry_run else "fp8"))
    for num_tokens in sizes.step_tokens:
        for attention in (_ONE_DOCUMENT, _PACKED):
            for remat in sizes.remats:
                sections = dict(attention=attention, memory=dict(remat=remat))
                yield _step_row(
                    sizes, attention | dict(remat=remat, tokens=num_tokens), num_tokens, sections
                )
    first = sizes.step_tokens[0]
    for attention in (_ONE_DOCUMENT, _PACKED)[: sizes.num_masks]:
        labels = attention | dict(tokens=first, triton_gemm=False)
        yield _step_row(sizes, labels, first, dict(attention=attention), _xla_flags(sizes))
    yield _step_row(
        sizes,
        _ONE_DOCUMENT | dict(tokens=first, compute="fp8"),
        first,
        dict(attention=_ONE_DOCUMENT) | fp8,
    )


def _step_row(
    sizes: Sizes, labels: dict, num_tokens: int, sections: dict, environment: dict | None = None
) -> Row:
    def measure() -> dict:
        config = step_config(sizes, sizes.preset, num_tokens, **sections)
        start(config.runtime)
        return measure_step(config, sizes.repeats, _documents(config))

    return Row(
        labels=labels,
        measure=measure,
        seconds=60 + 70 * num_tokens / 131_072,
        environment=environment or {},
    )


def _xla_flags(sizes: Sizes) -> dict[str, str]:
    return {} if sizes.is_dry_run else dict(XLA_FLAGS=FLAGS_WITHOUT_TRITON)


def compile_rows(sizes: Sizes) -> Iterator[Row]:
    """Each warm row follows the cold row that fills its cache."""
    directory = Path(tempfile.gettempdir()) / "jaxlc_first_contact_cache"
    cases = (
        ("cold", _ONE_DOCUMENT, {}),
        ("warm", _ONE_DOCUMENT, {}),
        ("cold, packed documents", _PACKED, {}),
        ("cold, without Triton products", _ONE_DOCUMENT, _xla_flags(sizes)),
    )
    for name, attention, environment in cases[: 2 * sizes.num_masks]:
        measure = functools.partial(_compile, sizes, name, attention, str(directory))
        yield Row(labels=dict(case=name), measure=measure, seconds=90, environment=environment)


def _compile(sizes: Sizes, name: str, attention: dict, directory: str) -> dict:
    if name.startswith("cold"):
        shutil.rmtree(directory, ignore_errors=True)
    sections = dict(attention=attention, runtime=dict(compilation_cache_dir=directory))
    config = step_config(sizes, sizes.preset, sizes.step_tokens[0], **sections)
    start(config.runtime)
    step = build_step(config, make_mesh(config.mesh, jax.devices()[:1]))
    start_seconds = time.perf_counter()
    lowered = step.lower()
    lower_seconds = time.perf_counter() - start_seconds
    with compilation_cache.watch() as came_from_cache:
        compiled = step.compile(lowered=lowered)
        compile_seconds = time.perf_counter() - start_seconds - lower_seconds
        is_cached = came_from_cache()
    return dict(
        lower_seconds=lower_seconds,
        compile_seconds=compile_seconds,
        from_cache=is_cached,
        program_bytes=len(compiled.as_text()),
    )


def memory_rows(sizes: Sizes) -> Iterator[Row]:
    for attention in (_ONE_DOCUMENT, _PACKED)[: sizes.num_masks]:
        measure = functools.partial(_planned_memory, sizes, attention)
        yield Row(labels=attention | dict(case="plan"), measure=measure, seconds=120)
    for fraction in sizes.memory_fractions:
        for num_tokens in sizes.memory_tokens:
            yield Row(
                labels=dict(case="longest sequence", memory_fraction=fraction, tokens=num_tokens),
                measure=functools.partial(_fits, sizes, num_tokens),
                seconds=60 + 60 * num_tokens / 131_072,
                environment=dict(XLA_PYTHON_CLIENT_MEM_FRACTION=fraction),
            )


def _planned_memory(sizes: Sizes, attention: dict) -> dict:
    """The plan's bytes next to those of the compiled program, with its workspaces, and to the peak
    of one step.
    """
    config = step_config(sizes, sizes.preset, sizes.step_tokens[-1], attention=attention)
    start(config.runtime)
    measured = measure_step(config, 1, _documents(config))
    names = ("device_arguments_bytes", "device_temp_bytes", "workspace_bytes", "device_peak_bytes")
    return measured | planned(config, memory=names, predicted=("step_seconds",))


def planned(config: Config, **names: Sequence[str]) -> dict[str, Any]:
    """Values of the plan of `config`, made in another process on the CPU; a plan that fails becomes
    a value, too.

    Args:
      names: keys of the sections of the plan, such as predicted=("step_seconds",).
    """
    if not has_gpu_compiler():
        return {}
    device_kind = jax.devices()[0].device_kind
    device = hardware.find(device_kind) or hardware.find("h100")
    command = [sys.executable, "-c", _PLAN]
    environment = os.environ | dict(JAX_PLATFORMS="cpu", PYTHONPATH=os.pathsep.join(sys.path))
    values = json.dumps([to_dict(config), f"{device.name}:1x1"])
    ran = subprocess.run(
        command, input=values, env=environment, capture_output=True, text=True, check=False
    )
    if ran.returncode:
        return dict(plan_error=ran.stderr[-400:])
    plan = json.loads(ran.stdout.splitlines()[-1])
    return {f"planned_{name}": plan[section][name] for section in names for name in names[section]}


def _fits(sizes: Sizes, num_tokens: int) -> dict:
    config = step_config(sizes, sizes.large_preset, num_tokens, attention=_ONE_DOCUMENT)
    start(config.runtime)
    try:
        return dict(fits=True) | measure_step(config, 1)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return dict(fits=False, reason=str(error)[:300])


def profile_rows(sizes: Sizes, out: Path) -> Iterator[Row]:
    for preset, num_layers, num_tokens in sizes.profile_models:
        for mask, attention in (("one document", _ONE_DOCUMENT), ("mix of documents", _PACKED))[
            : sizes.num_masks
        ]:
            sections = dict(attention=attention, model=dict(num_layers=num_layers))
            directory = out / f"profile_{preset}_{num_tokens}_{mask.replace(' ', '_')}"
            measure = functools.partial(_profile, sizes, preset, num_tokens, sections, directory)
            labels = dict(preset=preset, layers=num_layers, mask=mask, tokens=num_tokens)
            yield Row(labels=labels, measure=measure, seconds=50 + 60 * num_tokens / 131_072)


def _profile(sizes: Sizes, preset: str, num_tokens: int, sections: dict, directory: Path) -> dict:
    """Traces steps and compares them with the estimate, as `jaxlc profile` does."""
    steps = f"{_NUM_WARM_UP + 1}:{_NUM_WARM_UP + _NUM_TRACED + 1}"
    config = step_config(sizes, preset, num_tokens, **sections, profile=dict(steps=steps))
    start(config.runtime)
    step = build_step(config, make_mesh(config.mesh, jax.devices()[:1]))
    compiled, documents = step.compile(), _documents(config)
    state, batch = step.init(), random_batch(step, documents)
    with StepProfiler(config, directory, compiled, lambda _: None) as profiled_step:
        for number in range(1, _NUM_WARM_UP + _NUM_TRACED + 1):
            profiled_step.start(number, state)
            state, _ = profiled_step(number, state, batch)
            profiled_step.stop(number, state)
    gpus = "h100:1x1" if sizes.is_dry_run else ""
    measured = jaxlc.profile.compare(directory / PROFILE_DIRECTORY, topology=gpus).to_json()
    measured["longest_kernels"] = _longest_kernels(directory / PROFILE_DIRECTORY)
    if documents:
        order = step.sequence_order
        work = sequence_work(config, order.of, documents, few_documents=order.few_documents).work
        model = TimeModel(topology(f"{device_or_h100().name}:1x1"), config, work=work)
        measured["estimated_seconds_of_documents"] = predict(
            analyze(compiled.as_text()), model
        ).step_seconds
    return measured


def _longest_kernels(directory: Path) -> list[dict[str, Any]]:
    """The kernels of a trace with the most time, by name: milliseconds and number of runs per step,
    all streams.
    """
    seconds, runs, operations = Counter[str](), Counter[str](), dict[str, str]()
    for events in trace_events.read(trace_events.find(directory)).devices.values():
        for event in events:
            seconds[event.name] += event.end_seconds - event.start_seconds
            runs[event.name] += 1
            operations[event.name] = event.op_name[-120:]
    return [
        dict(
            name=name[:100],
            ms=1e3 * total / _NUM_TRACED,
            runs=runs[name] / _NUM_TRACED,
            operation=operations[name],
        )
        for name, total in seconds.most_common(_NUM_KERNELS)
    ]
