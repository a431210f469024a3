"""Config files: Python files that define `get_config(variant) -> ConfigDict`, found by path or by
the name of a shipped one. Imports no jax.

`base_config` is the config that a command starts from, also without a file. `config_text` writes
resolved settings as a config file.
"""

import inspect
import runpy
import textwrap
import traceback
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from jaxlc.config.checks.stage_checks import SCHEDULE
from jaxlc.config.frozen import FROM_LENGTHS, Stage, StageConfig, refusal, to_dict
from jaxlc.config.models.config_json import CHANGEABLE_SETTINGS
from jaxlc.config.models.hub import is_model_id
from jaxlc.config.models.presets import PRESETS
from jaxlc.config.models.pretrained import CONFIG_FILE
from jaxlc.config.settings import defaults
from jaxlc.config.values import Tokens, as_python, defaults_of, flattened, typed
from jaxlc.core import SettingError, UserError, checked, did_you_mean, nearest_name, suggestion
from jaxlc.core.files import local_path

TOKENS_PER_STEP = 4_194_304  # at most, without --config: as the shipped configs of 8B models
_DEFAULT_SEQ_LEN = 131_072


def base_config(config: ConfigDict | None, flags: Mapping[str, str | None]) -> ConfigDict | None:
    """`config` with the model and sequence length of the flags; without it, the defaults with a
    model.

    Args:
      config: None: no --config is given.
      flags: --model and, of a verb that has it, --seq_len; None if not given.
    Returns:
      None if there is neither a config nor a model.
    Raises:
      UserError: an unknown model, an invalid length, or a length for a config with stages.
    """
    model = flags["model"]
    length = flags.get("seq_len")
    if model is None and length is None:
        return config
    if config is None:
        if model is None:
            raise UserError("no model is given: use --model=NAME or --config=NAME with --seq_len")
        config = defaults()
        config.data.seq_len = typed("--seq_len", length, Tokens) if length else _DEFAULT_SEQ_LEN
        num_sequences = max(1, TOKENS_PER_STEP // config.data.seq_len)
        # rounded down, so that GPUs divide it
        config.train.global_batch_size = 2 ** (num_sequences.bit_length() - 1)
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
    """Removes the settings that model.init_from decides from a config that sets them for another
    model.

    Args:
      kept: paths that are not removed, such as "model.num_layers".
    """
    changeable = {path.partition(".")[0] for path in CHANGEABLE_SETTINGS}
    for name in set(config.model) - {"init_from", *changeable}:
        if f"model.{name}" not in kept:
            del config.model[name]


_FILE = '''"""{title}"""

from ml_collections import ConfigDict

from jaxlc.config import check_variant, {function}


def get_config(variant: str = "") -> ConfigDict:
    check_variant(variant, ())
{body}
    return config
'''


def file_text(title: str, base: str, settings: Mapping[str, Any], lines: Sequence[str]) -> str:
    """The text of a config file.

    Args:
      title: its docstring.
      base: the call that returns the config to change, such as "defaults()".
      settings: the new values by their paths.
      lines: statements before these are set.
    """
    body = [f"config = {base}", *lines, f"config.update_from_flattened_dict({as_python(settings)})"]
    return _FILE.format(
        title=title, function=base.partition("(")[0], body=textwrap.indent("\n".join(body), "    ")
    )


def config_text(stages: Sequence[Stage]) -> str:
    """The text of a config file, from which `read_config` and `load_stages` return `stages` again.

    It does not depend on defaults, presets, or a config.json that may change later. Relative paths
    of data stay relative.
    """
    first = stages[0]
    settings = {
        path: x for path, x in _settings(first).items() if not (first.name and path in FROM_LENGTHS)
    }
    for index, stage in enumerate(stages[1:], start=1):
        # the seed that a stage has by default
        given = _settings(first) | {"data.seed": first.config.data.seed + index}
        has_new_mixture = stage.config.data.mixture != first.config.data.mixture
        for path, value in _settings(stage).items():
            is_derived = path in FROM_LENGTHS or refusal(stage.name, path)
            if stage.schedule == "continue" and path.removeprefix("optimizer.") in SCHEDULE:
                is_derived = True
            is_new = has_new_mixture and path.startswith("data.mixture.")
            if not is_derived and (is_new or path not in given or value != given[path]):
                settings[f"stages.{stage.name}.{path}"] = value
    heads = []
    for stage in stages if first.name else ():
        # the fields that are not sections, with the length in steps
        fields = dict(name=stage.name, steps=stage.num_steps)
        for name, default in defaults_of(StageConfig).items():
            value = getattr(stage, name)
            if name not in ("steps", "tokens") and value != default:
                fields[name] = value
        texts = (f"{name}={as_python(value)}" for name, value in fields.items())
        heads.append(f"    dict({', '.join(texts)}),")
    return file_text(
        "All settings of a run as `jaxlc train` resolved them; --config=FILE reads them.",
        "defaults()",
        settings,
        ["config.stages = [", *heads, "]"] if heads else [],
    )


def _settings(stage: Stage) -> dict[str, Any]:
    """The settings by their paths; the sources of a mixture replace data.sources."""
    settings = flattened(to_dict(stage.config))
    if stage.config.data.mixture:
        del settings["data.sources"]
    return settings


_PACKAGE = Path(__file__).parents[1]
# A wheel has the shipped configs at jaxlc/configs, a source tree at configs/.
_DIRECTORIES = (_PACKAGE / "configs", _PACKAGE.parent / "configs")


def shipped_configs() -> dict[str, Path]:
    """Name -> file of the configs that come with jaxlc: {"quickstart": .../configs/quickstart.py,
    ...}.
    """
    directory = next((directory for directory in _DIRECTORIES if directory.is_dir()), None)
    return {path.stem: path for path in sorted(directory.rglob("*.py"))} if directory else {}


@checked
def read_config(name: str) -> ConfigDict:
    """The ConfigDict of a config file, to edit and pass to `jaxlc.train.run` or `jaxlc.plan.plan`.

    Args:
      name: the name of a shipped config or the path of a file that ends in .py; both may be followed by a colon and a
        variant: "256k", "256k:h100", "my/config.py:small".
    Raises:
      UserError: no such config or variant, or the file fails.
    """
    name, _, variant = name.partition(":")
    path = _find(name)
    try:
        # names such as 256k.py cannot be imported
        get_config = runpy.run_path(str(path)).get("get_config")
        takes_variant = bool(get_config and inspect.signature(get_config).parameters)
        config = get_config and (get_config(variant) if takes_variant else get_config())
    except Exception as error:
        raise UserError(_error_text(error, name, path)) from error
    if get_config is None:
        raise UserError(
            f"invalid config file {name}: expected a function get_config(variant), as in quickstart.py"
        )
    if variant and not takes_variant:
        raise UserError(
            f"unknown variant {variant!r}: get_config() of {name} has no parameter for it"
        )
    if not isinstance(config, ConfigDict):
        raise UserError(
            f"invalid config file {name}: get_config returned {type(config).__name__}, expected the ConfigDict of"
            " jaxlc.config.defaults()"
        )
    return config


def check_variant(variant: str, variants: Sequence[str]) -> None:
    """For config files: checks that `variant` is "" or one of `variants`.

    Raises:
      UserError: it is not.
    """
    if variant not in ("", *variants):
        advice = did_you_mean(variant, variants) if variants else "this config has no variants"
        raise UserError(f"unknown variant {variant!r}: {advice}")


def shrink_for_cpu(config: ConfigDict, *, simulated_devices: int = 8) -> None:
    """For config files: shrinks `config` in place to a model and sequences that train on CPU in
    about a minute.

    Strategy, precision, rematerialization and offloading stay, so that the same code runs. The
    caller sets the mesh and `memory.tile_tokens`, which depend on the config.

    Args:
      simulated_devices: the number of CPU devices to simulate; the size of the mesh.
    """
    # 256 bytes and the end-of-document token
    config.model.update(preset="tiny", vocab_size=257, num_layers=2)
    config.runtime.update(topology="", simulated_devices=simulated_devices)
    config.data.seq_len = 1024
    config.optimizer.update(learning_rate=3e-3, warmup_steps=5)
    train = config.train
    train.update(steps=20, eval_every_steps=10, checkpoint_every_steps=10)
    for setting in ("global_batch_size", "gradient_accumulation_steps", "eval_sequences"):
        train[setting] = min(2, train[setting])


def _find(name: str) -> Path:
    """The file of a config that is named by path or, if shipped, by its bare name."""
    shipped = shipped_configs()
    if name in shipped:
        return shipped[name]
    path = local_path(name)
    if path.suffix in (".yaml", ".yml", ".json", ".toml"):
        raise UserError(
            f"invalid config file {name!r}: a config is a Python file. `jaxlc init --model=MODEL --data=PATHS"
            " --topology=GPUS` writes one; docs/other_programs.md lists the names of settings in other programs, and"
            " what they are called here"
        )
    if path.is_file():
        if path.suffix != ".py":
            raise UserError(
                f"invalid config file {name!r}: expected a Python file that defines get_config(variant)"
            )
        return path
    is_id = is_model_id(name) and path.suffix != ".py" and not path.parent.is_dir()
    if name in PRESETS or is_id or (path / CONFIG_FILE).is_file():
        setting = "preset" if name in PRESETS else "init_from"
        raise UserError(
            f"{name!r} is a model, not a config: use --config=64k --config.model.{setting}={name}"
        )
    # Suggestions for a path are files of its own directory, but only where the file name is close
    # to one of them.
    stems = (
        {file.stem: str(file) for file in path.parent.glob("*.py")}
        if path.suffix or path.parent.name
        else {}
    )
    nearest = nearest_name(path.stem, [*stems, *shipped])
    question = f" (did you mean {stems.get(nearest, nearest)}?)" if nearest else ""
    raise UserError(
        f"config {name!r} not found{question}: give the path of a .py file or one of the shipped configs"
        f" {', '.join(shipped)}"
    )


def _error_text(error: Exception, name: str, path: Path) -> str:
    """The error of the config file at `path` in one line, with the last line of the file that it
    passed through.
    """
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).resolve() == path.resolve()]
    place = f"{path} line {own[-1].lineno}" if own else path
    if isinstance(error, SettingError):
        return f"{place}: {error}"
    if isinstance(error, UserError):
        return f"{name}: {error}"
    if isinstance(error, ValueError) and frames[-1:] == own[-1:]:
        return f"{path}: {error}"  # raised by the file itself, for its user
    return f"{place} fails with {type(error).__name__}: {' '.join(str(error).split())}"
