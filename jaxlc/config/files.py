"""Config files: Python files that define `get_config(variant) -> ConfigDict`, found by path or by the name of a shipped
one. Imports no jax."""

import inspect
import runpy
import traceback
from collections.abc import Sequence
from pathlib import Path

from ml_collections import ConfigDict

from jaxlc.config.models.hub import is_model_id
from jaxlc.config.models.presets import PRESETS
from jaxlc.config.values import SettingError
from jaxlc.core.errors import UserError, checked
from jaxlc.core.text import did_you_mean, nearest_name

_PACKAGE = Path(__file__).parents[1]
# A wheel has the shipped configs at jaxlc/configs, a source tree at configs/.
_DIRECTORIES = (_PACKAGE / "configs", _PACKAGE.parent / "configs")


def shipped_configs() -> dict[str, Path]:
    """Name -> file of the configs that come with jaxlc: {"quickstart": .../configs/quickstart.py, ...}."""
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
        get_config = runpy.run_path(str(path)).get("get_config")  # names such as 256k.py cannot be imported
        takes_variant = bool(get_config and inspect.signature(get_config).parameters)
        config = get_config(*[variant] * takes_variant) if get_config else None
    except Exception as error:
        raise UserError(_error_text(error, name, path)) from error
    if get_config is None:
        raise UserError(f"invalid config file {name}: expected a function get_config(variant), as in quickstart.py")
    if variant and not takes_variant:
        raise UserError(f"unknown variant {variant!r}: get_config() of {name} has no parameter for it")
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
    """For config files: shrinks `config` in place to a model and sequences that train on CPU in about a minute.

    Strategy, precision, rematerialization and offloading stay, so that the same code runs. The caller sets the mesh and
    `memory.tile_tokens`, which depend on the config.

    Args:
      simulated_devices: the number of CPU devices to simulate; the size of the mesh.
    """
    config.model.update(preset="tiny", vocab_size=257, num_layers=2)  # 256 bytes and the end-of-document token
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
    path = Path(name)
    if path.is_file():
        if path.suffix != ".py":
            raise UserError(f"invalid config file {name!r}: expected a Python file that defines get_config(variant)")
        return path
    if name in PRESETS or (is_model_id(name) and path.suffix != ".py" and not path.parent.is_dir()):
        setting = "preset" if name in PRESETS else "init_from"
        raise UserError(f"{name!r} is a model, not a config: use --config=64k --config.model.{setting}={name}")
    # Suggestions for a path are files of its own directory, but only where the file name is close to one of them.
    stems = {file.stem: str(file) for file in path.parent.glob("*.py")} if path.suffix or path.parent.name else {}
    nearest = nearest_name(path.stem, [*stems, *shipped])
    question = f" (did you mean {stems.get(nearest, nearest)}?)" if nearest else ""
    raise UserError(
        f"config {name!r} not found{question}: give the path of a .py file or one of the shipped configs"
        f" {', '.join(shipped)}"
    )


def _error_text(error: Exception, name: str, path: Path) -> str:
    """The error of the config file at `path` in one line, with the last line of the file that it passed through."""
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
