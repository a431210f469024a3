"""The five data sources of a run: corpus, stream, traces, rollouts, and batches of the caller."""

import dataclasses
import math
from typing import Any

from jaxlc.config import Config, Stage, unchecked, with_settings
from jaxlc.core import UserError
from jaxlc.data.corpus import Corpus
from jaxlc.data.sequences.loader import Batches, DataSource, Inputs
from jaxlc.data.sequences.user_batches import OwnBatches
from jaxlc.data.stream import Stream
from jaxlc.data.tokens.tokenizers import Tokenizer, tokenizer_of
from jaxlc.posttrain.rollouts import Rollouts
from jaxlc.posttrain.traces import Traces, with_reference


def open(  # noqa: A001
    config: Config,
    *,
    batches: Batches | None = None,
    eval_batches: Batches | None = None,
    is_trained: bool = True,
    **options: Any,
) -> DataSource:
    """Opens what a run of `config` trains on; see `jaxlc.train.run`.

    Args:
      is_trained: False: the tokenizer and documents may have tokens that the model lacks.
      options: other fields of `Inputs`.
    Raises:
      UserError: the data cannot be read, or does not match the config.
    """
    config = with_used_split(with_reference(config))
    kind = _kind(config, batches, eval_batches)
    # Batches have their own tokens, so that any tokenizer may decode them.
    is_matching = is_trained and kind is not OwnBatches
    tokenizer = load_matching_tokenizer(config) if is_matching else tokenizer_of(config.data)
    vocab_size = config.model.vocab_size if is_trained else tokenizer.vocab_size
    inputs = Inputs(
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        batches=batches,
        eval_batches=eval_batches,
        **options,
    )
    return kind.open(config, inputs)


def with_used_split(config: Config) -> Config:
    """The config; in a run without evaluation, no document is held out."""
    if config.train.eval_sequences:
        return config
    return unchecked(config, {"data.eval_fraction": 0.0})


def with_epochs(stage: Stage, source: DataSource) -> Stage:
    """The stage with the steps of config.train.epochs; unchanged without it.

    Args:
      source: what the stage trains on.
    Raises:
      UserError: it has no epochs, or other settings contradict the number of steps.
    """
    train = stage.config.train
    if not train.epochs:
        return stage
    if source.epoch_sequences is None:
        raise UserError(
            f"config.train.epochs={train.epochs:g} is for a corpus or traces, and this run has other data:"
            " set config.train.steps instead"
        )
    # Rounded first, since 0.1 * 30 is more than 3.
    num_steps = math.ceil(round(train.epochs * source.epoch_sequences / train.global_batch_size, 6))
    config = with_settings(stage.config, {"train.steps": num_steps, "train.epochs": 0.0})
    return dataclasses.replace(stage, config=config)


def _kind(
    config: Config, batches: Batches | None, eval_batches: Batches | None
) -> type[DataSource]:
    if batches is None and eval_batches is not None:
        raise UserError(
            "eval_batches without batches: pass both, or neither to train on the corpus of config.data"
        )
    if batches is not None and config.rollouts.source:
        raise UserError(
            f"batches with config.rollouts.source={config.rollouts.source!r}: pass one of them; rollouts replace"
            " batches"
        )
    if batches is not None:
        return OwnBatches
    if config.rollouts.source:
        return Rollouts
    if config.data.traces:
        return Traces
    posttrain = config.posttrain
    if posttrain.loss or posttrain.teacher_top_k:
        name = "loss" if posttrain.loss else "teacher_top_k"
        raise UserError(
            f"config.posttrain.{name}={getattr(posttrain, name)!r} without traces: set config.data.traces, or pass"
            " batches to jaxlc.train.run"
        )
    return Stream if config.data.stream else Corpus


def load_matching_tokenizer(config: Config) -> Tokenizer:
    """Loads the tokenizer of `config`. That of a pretrained model may have tokens that the model
    lacks; the readers of data and prompts refuse them where they occur.

    Raises:
      UserError: it cannot be loaded, or the model has too few tokens.
    """
    tokenizer = tokenizer_of(config.data)
    is_pretrained = bool(config.model.init_from)
    always_used = [tokenizer.end_of_document_id, *tokenizer.start_ids.tolist()]
    num_needed = max(always_used) + 1 if is_pretrained else tokenizer.vocab_size
    if num_needed > config.model.vocab_size:
        advice = f"--config.model.vocab_size={num_needed}"
        if is_pretrained:
            advice = (
                "--config.data.tokenizer to the tokenizer of config.model.init_from, or"
                f" {advice}, which adds rows"
            )
        raise UserError(
            f"the tokenizer {config.data.tokenizer} has {num_needed} tokens and the model"
            f" {config.model.vocab_size}; set {advice}"
        )
    return tokenizer
