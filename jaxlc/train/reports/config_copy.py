"""The resolved settings of a run in its workdir, as a config file."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxlc.config import Stage, read_config
from jaxlc.config.config_text import config_text
from jaxlc.config.setting_paths import converted
from jaxlc.config.values import flattened
from jaxlc.core.atomic_files import replacing
from jaxlc.core.errors import UserError

CONFIG_COPY = "resolved_config.py"
_MAX_NAMES = 8  # changed settings in one line


def keep_config(workdir: Path, stages: Sequence[Stage]) -> str | None:
    """Writes the settings to `workdir`. Different settings of an earlier start are kept next to them, with a number.

    Returns:
      What changed since that start, in one line; None if nothing did.
    Raises:
      OSError: the files cannot be written.
    """
    path, text = workdir / CONFIG_COPY, config_text(stages)
    has_copy = path.exists()
    if has_copy and path.read_text(errors="replace") == text:
        return None
    if has_copy:
        numbered = (path.with_stem(f"{path.stem}-{number}") for number in itertools.count(1))
        kept = path.replace(next(file for file in numbered if not file.exists()))
    with replacing(path) as out:
        out.write(text.encode())
    if not has_copy:
        return None
    before, after = _settings(kept), _settings(path)
    names = [name for name in before | after if before.get(name) != after.get(name)]
    if not names:  # only their order or the text around them
        kept.unlink()
        return None
    shown = ", ".join(names[:_MAX_NAMES]) + (f" and {len(names) - _MAX_NAMES} more" * (len(names) > _MAX_NAMES))
    return f"settings changed since the last start: {shown}; the earlier ones are in {kept.name}"


def _settings(path: Path) -> dict[str, Any]:
    """The settings of a config file by their paths; none if it cannot be read, such as one of another version."""
    try:
        return flattened(converted("", read_config(str(path)).to_dict()))
    except UserError:
        return {}
