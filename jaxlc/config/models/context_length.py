"""The context length of pretrained models, and the warning about longer sequences. Imports no jax."""

import math
from collections.abc import Mapping
from typing import Any

from jaxlc.config.models.model_schema import KindConfig, ModelConfig, model_from, model_name
from jaxlc.config.models.pretrained import Pretrained, locate
from jaxlc.core.errors import UserError

_BY_FACTOR = ("linear", "ntk", "llama3")  # kinds of scaling that a larger factor alone extends


def context_tokens(model: ModelConfig, trained_tokens: int = 0) -> int | None:
    """The longest sequence in tokens for which the weights and the RoPE of `model` are meant; None: unlimited, unknown.

    It is the length of the base model (max_position_embeddings of its config.json, or data.seq_len of a run), times the
    scaling that the settings add. It is unknown with another rope_theta, which extends the context as well, and without
    layers of kind full there is no limit.

    Args:
      trained_tokens: data.seq_len of the run that trained the weights; 0: they are those of model.init_from.
    """
    if "full" not in model.attentions or model.rope_scaling == "dynamic_ntk":
        return None
    if not model.init_from:
        return trained_tokens or None
    base = _base_of(model)
    if base is None or model.rope_theta != base[0]["rope_theta"]:
        return None
    settings, length = base
    factor = settings["rope_scaling_factor"]
    original = settings["rope_scaling_original_tokens"] or length / factor
    is_same = model.rope_scaling == settings["rope_scaling"]
    if model.rope_scaling == "none":
        reached = length if is_same else original
    else:
        reached = model.rope_scaling_factor * (model.rope_scaling_original_tokens or original)
        if is_same:
            reached = max(reached, length * model.rope_scaling_factor / factor)
    return max(trained_tokens, int(reached))


def context_warning(
    model: ModelConfig, num_tokens: int, *, trained_tokens: int | None = None, stage: str = ""
) -> str | None:
    """One sentence if sequences of `num_tokens` are longer than the context of `model`, with the settings that extend
    it; None if they are not.

    Args:
      trained_tokens: None: a run is going to train the model. Otherwise, the model is used as it is; see
        `context_tokens`.
      stage: the name of the stage that trains, "" in a run without stages.
    """
    context = context_tokens(model, trained_tokens or 0)
    if context is None or num_tokens <= context:
        return None
    prefix = f"config.stages.{stage}." if stage else "config."
    flags = " ".join(
        f"--{prefix}model.{name}={value}" for name, value in _extending_settings(model, context, num_tokens).items()
    )
    limit = f"{context:,} tokens with its RoPE"
    if trained_tokens is None:
        return (
            f"{prefix}data.seq_len={num_tokens} is longer than the context of {model_name(vars(model))}, {limit}: use"
            f" {flags}, or shorter sequences (docs/extend_context.md)"
        )
    return (
        f"{num_tokens:,} tokens are more than the context of the model, {limit}, so expect poor results: to extend it,"
        f" train it with {flags} (docs/extend_context.md)"
    )


def _extending_settings(model: ModelConfig, context: int, num_tokens: int) -> dict[str, Any]:
    """Settings of the model whose context is at least `num_tokens`: a larger factor, or YaRN."""
    if model.rope_scaling in _BY_FACTOR:
        return dict(rope_scaling_factor=math.ceil(model.rope_scaling_factor * num_tokens / context))
    original = model.rope_scaling_original_tokens or context
    return dict(
        rope_scaling="yarn", rope_scaling_factor=math.ceil(num_tokens / original), rope_scaling_original_tokens=original
    )


def _base_of(model: ModelConfig) -> tuple[Mapping[str, Any], int] | None:
    """The settings and the context length of model.init_from; None if it is gone or does not name its length."""
    try:
        source = locate(model.init_from)
        settings = source.model_settings()
        length = _context_of_run(source, settings) if source.is_run else source.config_json()["max_position_embeddings"]
    except (UserError, KeyError):
        return None
    return (settings, length) if length else None


def _context_of_run(source: Pretrained, settings: Mapping[str, Any]) -> int | None:
    stored = source.run_config()
    kinds = tuple(KindConfig(name=name, **fields) for name, fields in settings.get("kinds", {}).items())
    names = {name: stored["model"][name] for name in ("preset", "init_from")}
    fields: dict[str, Any] = {**settings, **names, "kinds": kinds}
    return context_tokens(model_from(fields), stored["data"]["seq_len"]) or stored["data"]["seq_len"]
