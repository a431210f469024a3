"""Profiles of training steps: traces of the steps that config.profile names, and device memory when
it runs out.

    WORKDIR/profile/
        plugins/profile/DATE/HOST.xplane.pb    the trace, for XProf and `jaxlc profile`
        step.hlo.txt.gz                        the compiled step, whose instructions the trace names
        run.json                               its config and devices, and the pairs of its attention
        memory-PROCESS.prof                    allocations on the devices, written when a step runs out of memory

With config.profile.processes="all", the first three are in one directory per process,
WORKDIR/profile/process-N.
"""

import ctypes
import gzip
import statistics
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self

import jax

from jaxlc.config import Config, to_dict
from jaxlc.core import Log, UserError
from jaxlc.core.files import write_json
from jaxlc.step.batch import Batch
from jaxlc.step.state import TrainState
from jaxlc.step.step import StepMetrics

PROFILE_DIRECTORY = "profile"  # in the workdir
PROGRAM_FILE = "step.hlo.txt.gz"
RUN_FILE = "run.json"
# in RUN_FILE: mean `StepMetrics.attention_pairs` of the traced steps; absent if unknown
PAIRS = "attention_pairs"
STEP_ANNOTATION = "train"  # name of the range of one step, with the statistic step_num
_OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"
_CUDA_RUNTIMES = ("libcudart.so.13", "libcudart.so.12", "libcudart.so")


class StepProfiler:
    """Calls the compiled step, and traces the steps of config.profile. A context manager around the
    loop over steps.

    Each call is a range named `STEP_ANNOTATION` in any trace of the process. An exception that
    reports that the device memory is exhausted writes a memory profile.
    """

    def __init__(
        self,
        config: Config,
        workdir: Path,
        run_step: jax.stages.Compiled,
        log: Log,
    ):
        """
        Args:
          run_step: the compiled step, (state, batch) -> (state, metrics).
          log: prints one line.
        """
        settings = config.profile
        self._config = config
        self._run_step = run_step
        self._log = log
        self._directory = workdir / PROFILE_DIRECTORY
        is_traced = settings.processes == "all" or jax.process_index() == 0
        self._steps = settings.traced_steps if is_traced else range(0)
        self._first_traced: int | None = None  # the first step of the trace that is being recorded
        self._metrics: list[StepMetrics] = []  # of its steps

    def start(self, step: int, state: TrainState) -> None:
        """Starts the trace if `step` is its first step; `state` is the argument of the step."""
        if step in self._steps and self._first_traced is None:
            jax.block_until_ready(state)  # earlier steps are not a part of the trace
            self._start(step)

    def __call__(
        self, step: int, state: TrainState, batch: Batch
    ) -> tuple[TrainState, StepMetrics]:
        with jax.profiler.StepTraceAnnotation(STEP_ANNOTATION, step_num=step):
            state, metrics = self._run_step(state, batch)
        if self._first_traced is not None:
            self._metrics.append(metrics)
        return state, metrics

    def is_last(self, step: int) -> bool:
        """Whether `step` is the last one of the trace that is being recorded."""
        return self._first_traced is not None and step + 1 not in self._steps

    def stop(self, step: int, state: TrainState) -> None:
        """Writes the trace if `step`, which returned `state`, is its last step."""
        if self.is_last(step):
            jax.block_until_ready(state)
            self._stop(step)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._first_traced is not None:  # the run ended among the traced steps
            self._stop(None)
        if isinstance(error, jax.errors.JaxRuntimeError) and _OUT_OF_MEMORY in str(error):
            self._directory.mkdir(parents=True, exist_ok=True)
            path = self._directory / f"memory-{jax.process_index()}.prof"
            jax.profiler.save_device_memory_profile(path)
            self._log(
                f"the device memory is exhausted; its allocations are in {path}, which `go tool pprof` and XProf read"
            )

    @property
    def _trace_directory(self) -> Path:
        """One directory per process if all trace: JAX names traces by second and host, which
        processes can share.
        """
        if self._config.profile.processes == "first":
            return self._directory
        return self._directory / f"process-{jax.process_index()}"

    def _start(self, step: int) -> None:
        self._first_traced = step
        if self._config.profile.tool == "nsys":
            _cuda_runtime().cudaProfilerStart()
            return
        directory = self._trace_directory
        directory.mkdir(parents=True, exist_ok=True)
        (directory / PROGRAM_FILE).write_bytes(gzip.compress(self._run_step.as_text().encode()))
        self._write_run()
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # calls of Python functions, which fill the trace
        jax.profiler.start_trace(directory, profiler_options=options)

    def _stop(self, last: int | None) -> None:
        first = self._first_traced
        metrics = self._metrics
        self._first_traced = None
        self._metrics = []  # frees the arrays on the devices
        if self._config.profile.tool == "nsys":
            _cuda_runtime().cudaProfilerStop()
            return
        jax.profiler.stop_trace()
        steps = (
            f"steps {first} to {last}"
            if last is not None
            else f"steps from {first} on, until the run ended,"
        )
        directory = self._trace_directory
        pairs = [step_metrics.attention_pairs for step_metrics in metrics]
        if last is not None and None not in pairs:
            self._write_run({PAIRS: statistics.fmean(map(float, pairs))})
        self._log(
            f"traced {steps} in {directory}; compare them with the plan: jaxlc profile {directory}"
        )

    def _write_run(self, more: Mapping[str, float] = MappingProxyType({})) -> None:
        devices = dict(device_kind=jax.devices()[0].device_kind, num_devices=jax.device_count())
        about = dict(config=to_dict(self._config), **devices, **more)
        write_json(self._trace_directory / RUN_FILE, about)


def _cuda_runtime() -> ctypes.CDLL:
    """The CUDA runtime, which the CUDA plugin of JAX has loaded. Raises UserError if there is none."""
    for name in _CUDA_RUNTIMES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise UserError(
        f"config.profile.tool='nsys' needs the CUDA runtime, and none of {', '.join(_CUDA_RUNTIMES)} can be loaded;"
        " use --config.profile.tool=xprof"
    )
