"""Which steps are traced, and the memory profile. A trace of real steps is in test_run_api.py."""

import weakref

import jax
import pytest

from jaxlc.config import defaults, load
from jaxlc.core.errors import UserError
from jaxlc.train import step_profiler
from jaxlc.train.step_profiler import StepProfiler


def profile_config(**settings):
    config = defaults()
    config.profile.update(settings)
    return load(config)


class _Runtime:
    """Stands for the CUDA runtime."""

    def __init__(self):
        self.calls = []

    def cudaProfilerStart(self):  # noqa: N802
        self.calls.append("start")

    def cudaProfilerStop(self):  # noqa: N802
        self.calls.append("stop")


@pytest.mark.parametrize(
    ("first_run_step", "last_run_step", "expected"),
    [
        (1, 6, [1, 2, "start", 3, 4, "stop", 5, 6]),
        (4, 5, ["start", 4, "stop", 5]),
        (1, 3, [1, 2, "start", 3, "stop"]),
    ],
    ids=["all traced steps", "resumed run", "run that ends early"],
)
def test_nsys_captures_only_the_traced_steps(
    monkeypatch, tmp_path, first_run_step, last_run_step, expected
):
    runtime = _Runtime()
    monkeypatch.setattr(step_profiler, "_cuda_runtime", lambda: runtime)

    metrics = weakref.WeakSet()

    def run_step(state, batch):
        runtime.calls.append(batch)
        step_metrics = _Runtime()
        metrics.add(step_metrics)
        return state, step_metrics

    config = profile_config(steps="3:5", tool="nsys")
    with StepProfiler(config, tmp_path, run_step, print) as profiled_step:
        for step in range(first_run_step, last_run_step + 1):
            profiled_step.start(step, 0)
            profiled_step(step, 0, step)
            profiled_step.stop(step, 0)
    assert runtime.calls == expected
    assert not metrics, "the arrays of traced steps stay on the devices"


def test_nsys_without_cuda_runtime_raises(tmp_path, monkeypatch):
    monkeypatch.setattr(step_profiler, "_CUDA_RUNTIMES", ("libcudart.so.none",))
    profiled_step = StepProfiler(
        profile_config(steps="1:2", tool="nsys"), tmp_path, lambda *_: (0, 0), print
    )
    with pytest.raises(UserError, match="needs the CUDA runtime"):
        profiled_step.start(1, 0)


@pytest.mark.parametrize(
    ("message", "is_written"),
    [("RESOURCE_EXHAUSTED: Out of memory", True), ("INTERNAL: other", False)],
)
def test_step_out_of_memory_writes_memory_profile(tmp_path, message, is_written):
    def run_step(state, batch):
        raise jax.errors.JaxRuntimeError(message)

    lines = []
    with (
        pytest.raises(jax.errors.JaxRuntimeError),
        StepProfiler(profile_config(), tmp_path, run_step, lines.append) as p,
    ):
        p(1, 0, 0)
    path = tmp_path / "profile" / "memory-0.prof"
    assert path.exists() == is_written and any(str(path) in line for line in lines) == is_written
    assert not is_written or path.stat().st_size > 0


@pytest.mark.parametrize("steps", ["10", "3:3", "0:2", "5:2", "1-3", "a:b"])
def test_profile_steps_in_other_form_raises(steps):
    with pytest.raises(UserError, match=r"expected FIRST:END"):
        profile_config(steps=steps)
