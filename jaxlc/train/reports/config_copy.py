"""The resolved settings of a run in its workdir, as a config file."""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

from jaxlc.config import Stage
from jaxlc.config.config_text import config_text
from jaxlc.core.atomic_files import replacing

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
    before = path.read_text(errors="replace") if path.exists() else text
    line = None
    if before != text:
        kept = next(file for file in _numbered(path) if not file.exists())
        path.replace(kept)
        names = _changed_settings(before, text)
        shown = ", ".join(names[:_MAX_NAMES]) + (f" and {len(names) - _MAX_NAMES} more" * (len(names) > _MAX_NAMES))
        line = f"settings changed since the last start: {shown}; the earlier ones are in {kept.name}"
    if not path.exists():
        with replacing(path) as out:
            out.write(text.encode())
    return line


def _numbered(path: Path) -> Iterator[Path]:
    return (path.with_stem(f"{path.stem}-{number}") for number in itertools.count(1))


def _changed_settings(before: str, after: str) -> list[str]:
    """The settings whose lines differ, by their paths; "stages" for the list of stages."""
    changed = [line for line in after.splitlines() if line not in before.splitlines()]
    changed += [line for line in before.splitlines() if line not in after.splitlines()]
    return list(dict.fromkeys(line.split('"')[1] if line.startswith('    "') else "stages" for line in changed))
