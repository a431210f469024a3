"""Paths: as users give them, and as they are displayed."""

import os
import re
from pathlib import Path

from jaxlc.core.errors import UserError
from jaxlc.core.suggestions import nearest_name

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # pathlib changes gs://bucket to gs:/bucket
_HUB = re.compile(r"hf:/|https?:/+(www\.)?huggingface\.co/")


def local_path(value: str | Path) -> Path:
    """A path that a user gave, with the home directory instead of `~`.

    Raises:
      UserError: it is a URL.
    """
    if _URL.match(str(value)):
        hub = ", or the hub id ORGANIZATION/NAME of a model" if _HUB.match(str(value)) else ""
        raise UserError(
            f"unsupported: {value} is a URL, and jaxlc reads and writes only file systems of this machine: copy or"
            f" mount it, and pass the path{hub}"
        )
    return Path(os.path.expanduser(value))  # unlike Path.expanduser, it does not raise for an unknown user


def nearest_path(path: Path) -> Path | None:
    """The path that exists and is most similar to one that does not: its last name differs, or one before it."""
    if path.parent.is_dir():
        name = nearest_name(path.name, (child.name for child in path.parent.iterdir()))
        return path.parent / name if name else None
    parent = nearest_path(path.parent)
    return parent / path.name if parent is not None and (parent / path.name).exists() else None


def file_inside(directory: Path, name: object) -> Path:
    """The file `name` of a directory that others may have written, such as a downloaded model.

    A symbolic link may lead to another file of the directory, or, in the cache of the hub, of the same model.

    Raises:
      ValueError: the name has other parts than a file name, or the file is a link to a file elsewhere.
    """
    if not isinstance(name, str) or name in ("", "..") or "\0" in name or Path(name).name != name:
        raise ValueError(f"{str(name)[:100]!r} is not the name of a file")
    path, root = directory / name, directory.resolve()
    if root.parent.name == "snapshots":  # MODEL/snapshots/REVISION has links to MODEL/blobs
        root = root.parent.parent
    if path.is_symlink() and not path.resolve().is_relative_to(root):
        raise ValueError(
            f"{name} is a symbolic link to {path.resolve()}, outside of {directory}; copy the file instead"
        )
    return path


def displayed(path: Path) -> Path:
    """An absolute path relative to the working directory, if it is below it; other paths unchanged."""
    directory = Path.cwd()
    return path.relative_to(directory) if path.is_relative_to(directory) else path
