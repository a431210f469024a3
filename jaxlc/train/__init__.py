"""Training: `run` trains, and `build_step` builds the training step that plan, sweep and benchmarks use too.

JAX is imported only when one of them is used, so that `python -m jaxlc.train` can set the environment before.
"""

import importlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from jaxlc.core.errors import checked

if TYPE_CHECKING:
    from pathlib import Path

    import optax
    from ml_collections import ConfigDict

    from jaxlc.config import Config
    from jaxlc.step.custom_model import Model
    from jaxlc.step.language_model import LanguageModel
    from jaxlc.step.loss import TokenLoss
    from jaxlc.step.policy_loss import PolicyLoss
    from jaxlc.step.step import TrainStep, build_step
    from jaxlc.train.callbacks import Callback, RunInfo, StopTraining, TrainingStopped
    from jaxlc.train.reports.metrics import History
    from jaxlc.train.result import Result

# Public name -> its module, which is imported when the name is first used.
_MODULES = {
    "Callback": "train.callbacks",
    "History": "train.reports.metrics",
    "LanguageModel": "step.language_model",
    "Model": "step.custom_model",
    "Result": "train.result",
    "RunInfo": "train.callbacks",
    "StopTraining": "train.callbacks",
    "TrainStep": "step.step",
    "TrainingStopped": "train.callbacks",
    "build_step": "step.step",
}
__all__ = [
    "Callback",
    "History",
    "LanguageModel",
    "Model",
    "Result",
    "RunInfo",
    "StopTraining",
    "TrainStep",
    "TrainingStopped",
    "build_step",
    "run",
]


@checked
def run(
    config: "ConfigDict | Config",
    workdir: "str | Path" = "runs/notebook",
    *,
    model: "Model | None" = None,
    loss: "TokenLoss | None" = None,
    policy_loss: "PolicyLoss | None" = None,
    optimizer: "optax.GradientTransformation | None" = None,
    batches: Iterable[Mapping] | None = None,
    eval_batches: Iterable[Mapping] | None = None,
    callbacks: "Iterable[Callback]" = (),
) -> "Result":
    """Trains `config` in `workdir`, or resumes from the latest valid checkpoint there, and returns the trained model.

    The first SIGTERM, SIGHUP or Ctrl-C during the loop saves a checkpoint after the current step and returns; a second
    signal raises KeyboardInterrupt at once.

    Args:
      config: settings, from `jaxlc.config.read_config` or `defaults`.
      workdir: directory of metrics, plots and checkpoints.
      model: a model to train instead of the decoder of config.model, of which only vocab_size is used then; see
        `jaxlc.train.Model`.
      loss: the loss of each token instead of cross entropy: `(logits float32 [tokens, vocab_size], targets int32
        [tokens]) -> losses float32 [tokens]`, differentiable. It is called for chunks of tokens.
      policy_loss: a loss of answers instead of the formula of config.posttrain.loss: `(log_probs, batch) -> sum of the
        losses`, float32, differentiable. log_probs are those of the targets, float32 [sequences, tokens]; arrays of
        batch, such as advantages and loss_weights, have that shape. The sum is divided as posttrain.loss does.
      optimizer: an optax optimizer that replaces config.optimizer, gradient clipping and schedule included.
      batches: one dictionary per step instead of the corpus of config.data: "tokens", integers [global_batch_size,
        seq_len] in natural order, and optionally "segment_ids" (1, 2, ... by document, 0 is padding), "positions",
        "targets" and "loss_weights" of that shape. By default a sequence is one document and the target is the next
        token. A run that resumes skips the batches of the steps already done, so pass the same iterable from its start.
        Training ends with the iterable, or after train.steps. With several processes, each passes the same batches.
      eval_batches: held-out batches of any number of sequences, for runs with `batches`. None: no evaluation.
      callbacks: objects with the methods of `jaxlc.train.Callback`.
    Raises:
      UserError: invalid user input (config, paths, environment), in almost all cases before anything is compiled;
        another run trains in `workdir`, its disk is full, or parameters are not finite when a checkpoint is due.
      TrainingStopped: a loss or gradient is not finite, unless train.nonfinite is "skip"; or a stage ends with a
        held-out loss above its max_eval_loss, or a score below its min_scores.
    """
    from jaxlc import runtime

    runtime.import_jax()
    from jaxlc.train import loop

    return loop.run(
        config,
        workdir,
        model=model,
        loss=loss,
        policy_loss=policy_loss,
        optimizer=optimizer,
        batches=batches,
        eval_batches=eval_batches,
        callbacks=callbacks,
    )


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"jaxlc.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'jaxlc.train' has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
