"""The result of a run: the trained model, its metrics and figures."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from jax.sharding import Mesh

from jaxlc.checkpoints.checkpoint_files import CHECKPOINTS_DIRECTORY
from jaxlc.config import Config
from jaxlc.config.models.pretrained import CONFIG_FILE
from jaxlc.core import extras, html
from jaxlc.core.axes import mesh_text
from jaxlc.core.errors import UserError
from jaxlc.core.paths import displayed
from jaxlc.data.tokens.tokenizers import Tokenizer
from jaxlc.step.language_model import LanguageModel
from jaxlc.step.step import TrainStep
from jaxlc.train.evaluation.held_out import Evaluation
from jaxlc.train.reports.final_report import (
    LOSS_BY_POSITION_PLOT,
    LOSS_PLOT,
    OPTIMIZER_PLOT,
    REWARD_PLOT,
)
from jaxlc.train.reports.history import History
from jaxlc.train.reports.metrics import METRICS_FILE, TENSORBOARD_DIRECTORY, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True)
class Result:
    """A run, as returned by `jaxlc.train.run` and `jaxlc.load`."""

    step: int  # optimizer steps done, also by earlier runs in the same workdir
    # 0, or 128 + the number of the signal that stopped the run: SIGTERM 143, SIGHUP 129, SIGINT (Ctrl-C) 130
    exit_status: int = 0
    params: dict  # the trained parameters, float32, sharded over the mesh
    tokenizer: Tokenizer  # of the run: text to token ids and back
    workdir: Path  # directory of metrics, plots and checkpoints
    rows: list[Row] = field(default_factory=list, repr=False)  # the content of metrics.jsonl
    train_step: TrainStep = field(repr=False)  # config, mesh, model, loss and optimizer of the run
    evaluate: Callable[[], Evaluation] = field(repr=False)  # evaluates `params` on the held-out sequences of the run
    # Held-out loss after the last step; None if a signal stopped the run before it, if the run was loaded, or if the
    # run has no held-out sequences.
    evaluation: Evaluation | None = None

    @property
    def config(self) -> Config:
        return self.train_step.config

    @property
    def mesh(self) -> Mesh:
        return self.train_step.mesh

    @property
    def is_pretrained(self) -> bool:
        """Whether this is the model of a Hugging Face directory, loaded as it is. Its RoPE follows the length of each
        text instead of data.seq_len."""
        return (self.workdir / CONFIG_FILE).is_file()

    @cached_property
    def model(self) -> LanguageModel:
        """Logits, token losses and hidden states of the trained model, for text or tokens."""
        return LanguageModel(self.train_step, self.params, self.tokenizer, is_pretrained=self.is_pretrained)

    @cached_property
    def history(self) -> History:
        """The metrics of the run as columns, for `pandas.DataFrame`."""
        return History(self.rows)

    @property
    def paths(self) -> dict[str, Path]:
        """The files of the run that exist, by name."""
        names = dict(
            metrics=METRICS_FILE,
            checkpoints=CHECKPOINTS_DIRECTORY,
            loss_figure=LOSS_PLOT,
            loss_by_position_figure=LOSS_BY_POSITION_PLOT,
            optimizer_figure=OPTIMIZER_PLOT,
            reward_figure=REWARD_PLOT,
            tensorboard=TENSORBOARD_DIRECTORY,
        )
        return {name: self.workdir / file for name, file in names.items() if (self.workdir / file).exists()}

    def loss_figure(self) -> "Figure":
        """Training and held-out loss over steps. Raises UserError if matplotlib is not installed."""
        extras.require("matplotlib", "a figure of the loss")
        from jaxlc.train.reports.loss_plots import loss_figure

        return loss_figure(self.rows)

    def loss_by_position_figure(self) -> "Figure":
        """Held-out loss by position in the document. Evaluates if `evaluation` is None.

        Raises:
          UserError: matplotlib is not installed.
        """
        extras.require("matplotlib", "a figure of the loss")
        from jaxlc.train.reports.loss_plots import loss_by_position_figure

        return loss_by_position_figure(self.evaluation or self.evaluate())

    def reward_figure(self) -> "Figure":
        """Mean reward of the rollouts, tokens of their answers, ratio and age of the policy over steps.

        Raises:
          UserError: matplotlib is not installed, or the run has no rollouts.
        """
        extras.require("matplotlib", "a figure of the rewards")
        from jaxlc.train.reports.loss_plots import reward_figure

        if not any("rollouts/reward" in row for row in self.rows):
            raise UserError("the run has no rollouts: config.rollouts.source is not set")
        return reward_figure(self.rows)

    def __repr__(self) -> str:
        loss = "" if self.evaluation is None else f", held-out loss {self.evaluation.loss:.3f}"
        return f"Result(step {self.step} of {self.config.train.steps}{loss}, {displayed(self.workdir)})"

    def _repr_html_(self) -> str:
        losses, speed = self.history.column("loss")[1], self.history.median("tokens_per_second")
        rows = [("steps", f"{self.step:,} of {self.config.train.steps:,}")]
        if len(losses):
            rows.append(("training loss", f"{losses[0]:.3f} → {losses[-1]:.3f} {self.history.loss_unit}"))
        if self.evaluation is not None:
            rows.append(("held-out loss", f"{self.evaluation.loss:.3f} nats per token"))
        if speed is not None:
            rows.append(("tokens/s (median)", f"{speed:,.0f}"))
        rows += [("mesh", mesh_text(self.mesh.shape)), ("workdir", displayed(self.workdir))]
        rows.append(
            ("explore", "model, params, tokenizer, history, config, paths, loss_figure(), loss_by_position_figure()")
        )
        return html.table((), rows, align="ll")
