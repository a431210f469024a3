"""The resolved settings of a run in its workdir, as a config file."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from jaxlc.config import Stage, read_config
from jaxlc.config.config_text import config_text
from jaxlc.config.setting_paths import converted
from jaxlc.config.values import flattened
from jaxlc.core.atomic_files import replacing
from jaxlc.core.errors import UserError
from jaxlc.runtime.barrier import text_of_process_0
from jaxlc.train.reports.manifest import joined_text, make_manifest, split_text

CONFIG_COPY = "resolved_config.py"
_MAX_NAMES = 8  # changed settings in one line


def keep_config(workdir: Path, stages: Sequence[Stage]) -> str | None:
    """Writes the settings and the manifest of this start to `workdir`. Different settings of an earlier start are kept
    next to them, with a number.

    Returns:
      What changed since that start, in one line; None if nothing did.
    Raises:
      OSError: the files cannot be written.
    """
    path, text = workdir / CONFIG_COPY, config_text(stages)
    has_copy = path.exists()
    text_before, manifest = split_text(path.read_text(errors="replace")) if has_copy else ("", {})
    is_changed = has_copy and text_before.rstrip() != text.rstrip()
    if is_changed:
        numbered = (path.with_stem(f"{path.stem}-{number}") for number in itertools.count(1))
        kept = path.replace(next(file for file in numbered if not file.exists()))
    with replacing(path) as out:
        out.write(joined_text(text, make_manifest(manifest)).encode())
    if not is_changed:
        return None
    before, after = _settings(kept), _settings(path)
    names = [name for name in before | after if before.get(name) != after.get(name)]
    if not names:  # only their order or the text around them
        kept.unlink()
        return None
    shown = ", ".join(names[:_MAX_NAMES]) + (f" and {len(names) - _MAX_NAMES} more" * (len(names) > _MAX_NAMES))
    return f"settings changed since the last start: {shown}; the earlier ones are in {kept.name}"


def keep_plan(workdir: Path, stage: str, plan: dict[str, Any]) -> None:
    """Adds what is known of the compiled step of a stage to the manifest in `workdir`.

    Raises:
      OSError: the file cannot be written.
    """
    path = workdir / CONFIG_COPY
    text, manifest = split_text(path.read_text(errors="replace"))
    manifest["plan"] = {**manifest.get("plan", {}), stage: plan}
    with replacing(path) as out:
        out.write(joined_text(text, manifest).encode())


def read_manifest(workdir: Path) -> dict[str, Any]:
    """The manifest of the last start; empty for runs of earlier versions."""
    path = workdir / CONFIG_COPY
    return split_text(path.read_text(errors="replace"))[1] if path.exists() else {}


def run_id_everywhere(workdir: Path) -> str:
    """The identifier of the run on all processes, as process 0 has written it."""
    return text_of_process_0("run id", read_manifest(workdir)["run_id"] if jax.process_index() == 0 else "")


def stored_settings(workdir: Path) -> dict[str, Any]:
    """The settings of a run by their paths; none if they cannot be read."""
    return _settings(workdir / CONFIG_COPY)


def _settings(path: Path) -> dict[str, Any]:
    """The settings of a config file by their paths; none if it cannot be read, such as one of another version."""
    try:
        return flattened(converted("", read_config(str(path)).to_dict()))
    except UserError:
        return {}
