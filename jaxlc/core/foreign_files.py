"""Files of JSON and of arrays that others may have written. Imports no jax."""

import json
import re
import stat
import tokenize
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from jaxlc.core.errors import UserError, reason_of

MAX_JSON_BYTES = 100_000_000  # of a file; its values may need 25 times as much memory


# Escapes of surrogates, which JSON may have alone, and the surrogates themselves.
_ESCAPE, _SURROGATE = re.compile(r"\\u[dD][89a-fA-F]"), re.compile("[\ud800-\udfff]")
_ESCAPE_BYTES = re.compile(_ESCAPE.pattern.encode())
_LFS_POINTER = b"version https://git-lfs"
ADAPTER_FILE = "adapter_config.json"  # of peft
_OTHER_FORMATS = {  # end of the name of a file -> what to do
    ADAPTER_FILE: "merge the adapters into their base model with merge_and_unload of peft, and use the result",
    ".gguf": "GGUF is not read; use the directory of the model with config.json and safetensors files",
    ".bin": "PyTorch files are not read; convert them with save_pretrained of transformers",
    ".safetensors": "expected a directory with config.json, and model.safetensors or the index of several files",
}


def other_format(path: Path) -> str | None:
    """What a file, or a directory without a model in safetensors files, has instead, and what to do; None if it is
    unknown."""
    names = [path.name] if path.is_file() else sorted(file.name for file in path.iterdir())
    found = ((name, advice) for end, advice in _OTHER_FORMATS.items() for name in names if name.endswith(end))
    name, advice = next(found, ("", ""))
    return f"has {name}: {advice}" if name else None


def check_no_pointers(directory: Path) -> None:
    """Checks that the files of a model are not those that Git has in place of the files of Git LFS.

    Raises:
      UserError: one of them is.
    """
    for path in sorted(directory.iterdir()):
        if path.suffix in (".json", ".safetensors") and path.is_file():
            with path.open("rb") as file:
                if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
                    raise UserError(f"{path} is a pointer of Git LFS, not the file: run `git lfs pull` in {directory}")


def parse_json(text: bytes | str) -> Any:
    """The value of a JSON text, with U+FFFD for lone surrogates, which UTF-8 cannot encode.

    Raises:
      ValueError: it is not JSON, is nested too deeply, or is not UTF-8.
    """
    try:
        value = json.loads(text)
        has_surrogates = _ESCAPE.search(text) if isinstance(text, str) else _ESCAPE_BYTES.search(text)
        return valid_unicode(value) if has_surrogates else value
    except RecursionError as error:
        raise ValueError(f"it is nested too deeply: {error}") from None


def valid_unicode(value: Any) -> Any:
    """A value of JSON with U+FFFD for lone surrogates in its texts."""
    if isinstance(value, str):
        return _SURROGATE.sub("\ufffd", value)
    if isinstance(value, dict):
        return {valid_unicode(name): valid_unicode(x) for name, x in value.items()}
    return [valid_unicode(x) for x in value] if isinstance(value, list) else value


def read_json_file(path: Path) -> Any:
    """The value in a JSON file.

    Raises:
      OSError: the file cannot be read.
      ValueError: it is not JSON, or has more than MAX_JSON_BYTES.
    """
    return parse_json(read_limited(path, MAX_JSON_BYTES))


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The objects in the lines of a file that a program of jaxlc has written.

    Raises:
      UserError: a line is not a JSON object; the message names it.
    """
    rows = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            rows.append(parse_json(line))
            problem = "" if isinstance(rows[-1], dict) else "it is not an object"
        except ValueError as error:
            problem = reason_of(error)
        if problem:
            raise UserError(f"line {number} of {path} is not a JSON object ({problem}); remove that line")
    return rows


def read_limited(path: Path, max_bytes: int) -> bytes:
    """The content of a file.

    Raises:
      OSError: the file cannot be read.
      ValueError: it is larger, or a device or a pipe.
    """
    mode = path.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # opening a directory raises the usual error
        raise ValueError("it is not a regular file")
    with path.open("rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ValueError(f"it has more than {max_bytes:,} bytes")
    return content


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a file that `numpy.savez` wrote; nothing is unpickled.

    Raises:
      OSError: the file cannot be read.
      ValueError: it is damaged, or compressed: its arrays could then be much larger than the file.
    """
    try:
        with zipfile.ZipFile(path) as members:
            if any(member.compress_type != zipfile.ZIP_STORED for member in members.infolist()):
                raise ValueError("it is compressed")
        with np.load(path, allow_pickle=False) as arrays:
            return dict(arrays)
    except (zipfile.BadZipFile, EOFError, MemoryError, NotImplementedError, SyntaxError, tokenize.TokenError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
