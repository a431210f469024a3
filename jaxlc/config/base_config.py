"""The config that a recommendation starts from: that of --config, or only a model. Imports no jax."""

from collections.abc import Container, Mapping

from ml_collections import ConfigDict

from jaxlc.config.models.config_json import CHANGEABLE_SETTINGS
from jaxlc.config.models.hub import is_model_id
from jaxlc.config.models.presets import PRESETS
from jaxlc.config.settings import defaults
from jaxlc.config.values import Tokens, typed
from jaxlc.core.errors import UserError
from jaxlc.core.files import local_path
from jaxlc.core.text import suggestion

TOKENS_PER_STEP = 4_194_304  # at most, without --config: as the shipped configs of 8B models
_DEFAULT_SEQ_LEN = 131_072


def base_config(config: ConfigDict | None, flags: Mapping[str, str | None]) -> ConfigDict | None:
    """`config` with the model and sequence length of the flags; without it, the defaults with a model.

    Args:
      config: None: no --config is given.
      flags: --model and, of a verb that has it, --seq_len; None if not given.
    Returns:
      None if there is neither a config nor a model.
    Raises:
      UserError: an unknown model, an invalid length, or a length for a config with stages.
    """
    model, length = flags["model"], flags.get("seq_len")
    if model is None and length is None:
        return config
    if config is None:
        if model is None:
            raise UserError("no model is given: use --model=NAME or --config=NAME with --seq_len")
        config = defaults()
        config.data.seq_len = typed("--seq_len", length, Tokens) if length else _DEFAULT_SEQ_LEN
        num_sequences = max(1, TOKENS_PER_STEP // config.data.seq_len)
        config.train.global_batch_size = 2 ** (num_sequences.bit_length() - 1)  # rounded down, so that GPUs divide it
    elif length:
        if config.stages:
            raise UserError(
                "unsupported: --seq_len for a config with stages; use --config.stages.NAME.data.seq_len=TOKENS"
            )
        config.data.seq_len = typed("--seq_len", length, Tokens)
    if model is not None:
        set_model(config, model)
    return config


def set_model(config: ConfigDict, model: str) -> None:
    """Sets the model of `config` to a preset, a Hugging Face directory or hub id, or a run.

    Raises:
      UserError: `model` is none of these.
    """
    if model in PRESETS:
        config.model.preset = model
        return
    if not local_path(model).is_dir() and not is_model_id(model):
        raise UserError(
            f"unknown --model={model}: expected a Hugging Face directory, a hub id ORGANIZATION/NAME, or one of"
            f" {', '.join(PRESETS)}{suggestion(model, PRESETS)}"
        )
    unset_shape(config)
    config.model.init_from = model


def unset_shape(config: ConfigDict, kept: Container[str] = ()) -> None:
    """Removes the settings that model.init_from decides from a config that sets them for another model.

    Args:
      kept: paths that are not removed, such as "model.num_layers".
    """
    for name in set(config.model) - {"init_from", *CHANGEABLE_SETTINGS}:
        if f"model.{name}" not in kept:
            del config.model[name]
