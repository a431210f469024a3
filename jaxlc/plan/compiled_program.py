"""A program that is compiled ahead of time for absent GPUs, with the compiler's reports of its memory."""

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
from jax.stages import Compiled

from jaxlc.core.errors import UserError
from jaxlc.hlo import AnalyzedProgram, analyze
from jaxlc.hlo.memory_dump import Dump, Launches, count_launches, read
from jaxlc.simulate.topology import FAILS_WITH_TRITON, NO_TRITON, options_without_gpu
from jaxlc.step.step import TrainStep
from jaxlc.step.verify_compiled import place_params, place_state


@dataclass(frozen=True, kw_only=True, eq=False)
class CompiledProgram:
    """A compiled program: of a training step, of an evaluation, or of generation."""

    compiled: Compiled
    dump: Dump  # the compiler's reports of arrays in memory and of thunks
    program: AnalyzedProgram
    compile_seconds: float  # on this machine

    @property
    def launches(self) -> Launches:
        return count_launches(self.program, self.dump.commands)

    @property
    def temp_bytes(self) -> int:
        """Temporaries and results in device memory, without symmetric buffers and results in donated arguments."""
        stats = self.compiled.memory_analysis()
        results = stats.output_size_in_bytes - stats.alias_size_in_bytes
        return stats.temp_size_in_bytes - self.dump.symmetric_bytes + results


def compile_step(step: TrainStep) -> CompiledProgram:
    """The training step.

    Raises:
      UserError: arrays too large for the compiler, or not enough memory on this machine.
    """
    return _compile_part(step, step.lower, place_state, step.compile)


def compile_evaluation(step: TrainStep) -> CompiledProgram:
    """The evaluation of one microbatch, `TrainStep.jitted_evaluation`. Raises UserError as `compile_step`."""
    return _compile_part(step, step.lower_evaluation, place_params, step.compile_evaluation)


def compile_log_probs(step: TrainStep) -> CompiledProgram:
    """The log-probabilities of a batch, `TrainStep.jitted_log_probs`. Raises UserError as `compile_step`."""
    return _compile_part(step, step.lower_log_probs, place_params, step.compile_log_probs)


def _compile_part(step: TrainStep, lower: Callable, place: Callable, compile_lowered: Callable) -> CompiledProgram:
    def compiled(options: dict) -> Compiled:
        lowered = lower()
        place(step, lowered)
        return compile_lowered(extra_options=options, lowered=lowered)

    problem = f"compilation failed with config.data.seq_len={step.config.data.seq_len}"
    advice = "use a shorter sequence or a larger config.mesh.context"
    return compile_program(compiled, step.config.precision.compute, problem=problem, advice=advice)


def compile_program(
    compile_with: Callable[[dict], Compiled], compute: str, *, problem: str, advice: str
) -> CompiledProgram:
    """Compiles a program without a GPU.

    Args:
      compile_with: compiles it with additional compiler options.
      compute: config.precision.compute.
      problem, advice: start and end of the message if the compilation fails, unless the compiler has a defect.
    Raises:
      UserError: arrays too large for the compiler, or not enough memory on this machine.
    """
    start_seconds = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        try:
            compiled = _compiled_without_gpu(compile_with, {**options_without_gpu(compute), "xla_dump_to": directory})
        except (jax.errors.JaxRuntimeError, OverflowError, MemoryError) as error:
            first_line = str(error).partition("\n")[0]
            if first_line.startswith("INTERNAL"):
                advice = f"this is a defect of the compiler of JAX {jax.__version__}: use another version"
            raise UserError(f"{problem}: {first_line}; {advice}") from error
        dump = read(Path(directory))
    seconds = time.perf_counter() - start_seconds
    program = analyze(compiled.as_text(), dump.thunks)
    return CompiledProgram(compiled=compiled, dump=dump, program=program, compile_seconds=seconds)


def _compiled_without_gpu(compile_with: Callable[[dict], Compiled], options: dict) -> Compiled:
    """As compiled with `options`; with cuBLAS for all products where Triton needs autotuning, that is, a GPU."""
    try:
        return compile_with(options)
    except jax.errors.JaxRuntimeError as error:
        if FAILS_WITH_TRITON not in str(error):
            raise
    return compile_with({**options, **NO_TRITON})
