"""Output files of commands, which are checked before the work whose result they get. Imports no jax."""

import json
import os
from pathlib import Path
from typing import Any

from jaxlc.core.errors import UserError
from jaxlc.core.files import local_path

_IMAGES = (".png", ".svg", ".pdf", ".jpg", ".jpeg", ".webp")


def check_output_file(flag: str, path: str | Path, *, is_image: bool = False) -> None:
    """Checks that a file can be written; the file may exist.

    Args:
      flag: name of the flag for the message.
      is_image: the suffix selects the format.
    Raises:
      UserError: a directory, a missing directory, no permission, or an unknown image format.
    """
    local_path(path)  # raises for a URL
    path = Path(path)
    directory = path.resolve().parent
    if path.is_dir():
        raise UserError(f"--{flag}={path} is a directory; choose the name of a file")
    if not directory.is_dir():
        raise UserError(f"--{flag}={path}: the directory does not exist; create it, or choose another file")
    if not os.access(path if path.exists() else directory, os.W_OK):
        raise UserError(f"--{flag}={path}: no permission to write this file; choose another file")
    if is_image and path.suffix.lower() not in _IMAGES:
        raise UserError(f"invalid --{flag}={path}: expected a file name that ends with {', '.join(_IMAGES)}")


def write_json(path: str | Path, values: dict[str, Any]) -> None:
    Path(path).write_text(json.dumps(values, indent=1) + "\n")
