"""A stage while it is trained: evaluates and saves its state, and writes the report at the end of the run."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax

from jaxlc.checkpoints.base_model import base_meta, checkpoint_part
from jaxlc.checkpoints.checkpoint import Checkpoints
from jaxlc.checkpoints.checkpoint_files import CHECKPOINTS_DIRECTORY
from jaxlc.config import Config, to_dict
from jaxlc.core.errors import UserError
from jaxlc.train.callbacks import Callbacks
from jaxlc.train.evaluation.held_out import Evaluation
from jaxlc.train.prepared_stages import Position, PreparedStage, num_tokens_until
from jaxlc.train.reports.final_report import write_report
from jaxlc.train.reports.metrics import METRICS_FILE, MetricsLog, read_rows
from jaxlc.train.reports.progress import Progress
from jaxlc.train.result.run_result import Result


@dataclass(frozen=True, kw_only=True)
class StageRun:
    """A prepared stage and the outputs of the run; none of them changes from step to step."""

    stage: PreparedStage
    workdir: Path
    progress: Progress
    checkpoints: Checkpoints
    metrics: MetricsLog
    callbacks: Callbacks

    @property
    def config(self) -> Config:
        return self.stage.stage.config

    def evaluate(self, position: Position) -> Evaluation | None:
        """The held-out loss, which is also written to metrics.jsonl; None if there are no held-out sequences."""
        if self.stage.evaluator is None:
            return None
        with self.progress.spinner("evaluating"):
            evaluation = self.stage.evaluator(position.state.params)
        self.metrics.write(step=position.step, eval_loss=evaluation.loss)
        self.callbacks("on_evaluation", position.step, evaluation)
        return evaluation

    def score(self, position: Position) -> dict[str, float]:
        """The scores of config.evals by name, which are also written to metrics.jsonl; empty without tasks."""
        if self.stage.scorer is None:
            return {}
        with self.progress.spinner("evaluating tasks"):
            scores = self.stage.scorer(position.state.params, position.step, self.workdir, self.progress.log)
        for score in scores:
            name = f"scores/{score.name}"
            others = {f"{name}/{key}": value for key, value in score._asdict().items() if key not in ("name", "score")}
            self.metrics.write(step=position.step, **{name: score.score}, **others)
        return {score.name: score.score for score in scores}

    def save(self, position: Position, evaluation: Evaluation | None, scores: dict[str, float]) -> None:
        """Saves a checkpoint, which is written in the background.

        Args:
          evaluation: of this position; None if it was not evaluated.
          scores: as `score` returns them.
        """
        stage = self.stage.stage
        meta = dict(
            step=position.step,
            next_row=position.next_sequence,  # the stored name is part of the checkpoint format
            corpus=self.stage.data.fingerprint,
            config=to_dict(self.config),
            stage=dict(name=stage.name, first_step=stage.first_step),
            eval_loss=evaluation.loss if evaluation is not None and math.isfinite(evaluation.loss) else None,
            scores={name: score for name, score in scores.items() if math.isfinite(score)},
            **base_meta(self.stage.step, position.state.params),
        )
        self.checkpoints.save(position.step, checkpoint_part(self.stage.step, position.state), meta)
        self.callbacks("on_checkpoint", position.step, self.workdir / CHECKPOINTS_DIRECTORY / str(position.step))

    def finish(
        self, stages: Sequence[PreparedStage], end: Position, evaluation: Evaluation | None, exit_status: int
    ) -> Result:
        """Writes the plots and prints the summary, unless a signal stopped the run; waits for the checkpoints.

        Args:
          evaluation: of `end`; None if no step of this run made one.
        """
        baselines: dict[str, float] = {}
        evaluator, data = self.stage.evaluator, self.stage.data
        if exit_status == 0:
            if evaluator is not None:
                evaluation = evaluation or evaluator(end.state.params)
                with self.progress.spinner("evaluating with limited context"):
                    evaluation = evaluator.with_context_gain(end.state.params, evaluation)
            if jax.process_index() == 0:
                baselines = data.baselines(self.config)
                num_tokens = num_tokens_until(stages, end.step)
                self.progress.log(
                    write_report(self.workdir, end.step, num_tokens, evaluation, baselines, data.waiting.share)
                )
        self.checkpoints.close()
        self.metrics.close()
        metrics = self.workdir / METRICS_FILE
        return Result(
            step=end.step,
            exit_status=exit_status,
            params=end.state.params,
            tokenizer=data.tokenizer,
            workdir=self.workdir,
            rows=read_rows(metrics) if metrics.exists() else [],
            train_step=self.stage.step,
            evaluate=functools.partial(self._evaluate_again, end),
            evaluation=evaluation if exit_status == 0 else None,
            baselines=baselines,
        )

    def _evaluate_again(self, position: Position) -> Evaluation:
        """`Result.evaluate`: after the run, when metrics.jsonl is closed."""
        evaluator = self.stage.evaluator
        if evaluator is None:
            raise UserError("the run has no held-out sequences: pass eval_batches to jaxlc.train.run")
        return evaluator.with_context_gain(position.state.params, evaluator(position.state.params))
