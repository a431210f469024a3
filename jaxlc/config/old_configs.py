"""Converts configs that older versions stored in checkpoints to the current names and values. Imports no jax."""

import dataclasses
from typing import Any

from jaxlc.config.models.model_schema import ModelConfig
from jaxlc.config.models.presets import RENAMED_PRESETS
from jaxlc.core.errors import Unsupported

# Old path -> new path.
RENAMED = {
    "attention.ulysses_ranks": "attention.ulysses_degree",
    "data.sequence_tokens": "data.seq_len",
    "memory.keep": "memory.save",
    "memory.remat_layers": "memory.layers_per_remat_group",
    "optimizer.clip_norm": "optimizer.max_grad_norm",
    "precision.fp8_history_steps": "precision.fp8_amax_history_len",
    "precision.loss_scale_backoff": "precision.loss_scale_backoff_factor",
    "precision.loss_scale_growth": "precision.loss_scale_growth_factor",
    "precision.loss_scale_growth_steps": "precision.loss_scale_growth_interval",
    "train.accumulation_steps": "train.gradient_accumulation_steps",
    "train.eval_rows": "train.eval_sequences",
    "train.rows_per_step": "train.global_batch_size",
}
# Old path -> what replaces it.
REMOVED = {
    "attention.window": "use config.model.window=WINDOW with config.model.layer_kinds=sliding and"
    " config.model.sliding_rope_theta, which was config.model.rope_theta",
}
# The values of model settings that configs of older versions do not have.
MODEL_DEFAULTS = {
    field.name: list(field.default) if isinstance(field.default, tuple) else field.default
    for field in dataclasses.fields(ModelConfig)
    if field.default is not dataclasses.MISSING
}


def upgraded(stored: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """A stored config, which may be of an older version, in the form that `jaxlc.config.to_dict` returns.

    Settings get the values that give the same computation. Settings other than those of the model may be absent.

    Raises:
      Unsupported: the current layers do not compute what the model computed.
    """
    current: dict[str, dict[str, Any]] = {section: {} for section in stored}
    for section, values in stored.items():
        for name, value in values.items():
            new_section, _, new_name = RENAMED.get(f"{section}.{name}", f"{section}.{name}").partition(".")
            current[new_section][new_name] = value
    window = current.get("attention", {}).pop("window", 0)
    model = current["model"]
    if isinstance(model.get("qk_norm"), bool):
        model["qk_norm"] = "head" if model["qk_norm"] else "none"
    if "preset" in model:
        model["preset"] = RENAMED_PRESETS.get(model["preset"], model["preset"])
    optimizer = current.get("optimizer", {})
    if optimizer.get("schedule") != "wsd":
        optimizer.pop("decay_steps", None)  # had no effect, and is now an error
    if not optimizer.get("warmup_steps"):
        optimizer.pop("initial_learning_rate_ratio", None)  # the same
    current["model"] = MODEL_DEFAULTS | model | _scaling(model) | (_sliding(model, window) if window else {})
    return current


def _scaling(model: dict[str, Any]) -> dict[str, Any]:
    """A factor of 1 meant no scaling, and its parameters had no effect; a larger one meant that of Llama 3.1."""
    if "rope_scaling" in model:
        return {}
    if model.get("rope_scaling_factor", 1) > 1:
        return {"rope_scaling": "llama3"}
    return {name: value for name, value in MODEL_DEFAULTS.items() if name.startswith("rope_scaling")}


def _sliding(model: dict[str, Any], window: int) -> dict[str, Any]:
    """The settings of a model whose attention had a window in all layers."""
    if model["rope_scaling_factor"] != 1:
        raise Unsupported(
            f"unsupported: a run with attention.window={window} and"
            f" model.rope_scaling_factor={model['rope_scaling_factor']}, since RoPE of sliding layers is never scaled"
        )
    return dict(layer_kinds=["sliding"], window=window, sliding_rope_theta=model["rope_theta"])
