"""The training step as a compiled program: the one object from which a plan is made."""

from dataclasses import dataclass
from functools import cached_property
from typing import Self

from jaxlc.plan import summary
from jaxlc.plan.compiled_program import CompiledProgram, compile_evaluation, compile_step
from jaxlc.plan.memory import Memory, evaluation_peak_bytes, measure
from jaxlc.simulate.time_model import TimeModel
from jaxlc.simulate.timeline import Prediction, predict
from jaxlc.step import verify_compiled
from jaxlc.step.step import TrainStep


@dataclass(frozen=True, kw_only=True, eq=False)
class StepProgram(CompiledProgram):
    """A training step that is compiled ahead of time and verified against its config (`compile`)."""

    step: TrainStep
    model: TimeModel  # the target GPUs, and the rates of all estimates
    warnings: tuple[str, ...]  # a transport other than the requested one

    @classmethod
    def compile(cls, step: TrainStep, model: TimeModel) -> Self:
        """Compiles `step` for `model.gpus`, analyzes the program and verifies it.

        Raises:
          UserError: arrays too large for the compiler, a transport that the compiler did not use, or state that is not
            in the memory that the config names.
        """
        compiled = compile_step(step)
        warnings = verify_compiled.check(step, compiled.program.attention_collectives)
        verify_compiled.check_memory(step, compiled.program)
        verify_compiled.check_host_copies(compiled.program)
        return cls(**vars(compiled), step=step, model=model, warnings=tuple(warnings))

    @cached_property
    def memory(self) -> Memory:
        return measure(self.step, self.model.gpus, self)

    @cached_property
    def ring(self) -> summary.Ring:
        return summary.ring(self.program.attention_collectives, self.model)

    @cached_property
    def prediction(self) -> Prediction:
        """The estimated time of the step."""
        return predict(self.program, self.model)

    @cached_property
    def evaluation_peak_bytes(self) -> int:
        """Peak memory of an evaluation between two steps, which is compiled too. Raises UserError as `compile`."""
        evaluation = compile_evaluation(self.step)
        verify_compiled.check(self.step, evaluation.program.attention_collectives)
        verify_compiled.check_host_copies(evaluation.program)
        return evaluation_peak_bytes(self.step, self.memory, evaluation)
