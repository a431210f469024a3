"""Files: read without trust, replaced atomically, locked between processes, and errors of writing.
Imports no jax.

Files of JSON and of arrays may be written by others: they are limited in size, and invalid Unicode
and pointers of Git LFS are errors. A file is replaced atomically, so a process that is killed
leaves the old file or none. A lock holds between processes, on one host or on a file system that
they share. Errors of writing, such as a full disk, become errors that users can fix.

Fingerprints of what results depend on: stored beside them, and compared before they are resumed or
reused.
"""

import errno
import fcntl
import hashlib
import json
import math
import os
import re
import secrets
import shutil
import socket
import stat
import tempfile
import time
import tokenize
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from jaxlc import interrupts
from jaxlc.core.errors import DiskFullError, UserError, reason_of
from jaxlc.core.text import Log, nearest_name

_LETTERS = 16  # of a SHA-256 digest


def sha256_of(content: bytes | memoryview | str) -> str:
    """The SHA-256 digest, in hexadecimal, of bytes or of a text."""
    if isinstance(content, str):
        content = content.encode(errors="surrogatepass")
    return hashlib.sha256(content).hexdigest()


def fingerprint_of(content: object) -> str:
    """The fingerprint of a text, or of what `repr` shows of a value."""
    return sha256_of(content if isinstance(content, str) else repr(content))[:_LETTERS]


def file_fingerprint(path: Path) -> str:
    """The fingerprint of the content of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:_LETTERS]


def difference(stored: dict[str, Any], identity: dict[str, Any]) -> str:
    """The names and values of `identity` that the stored one does not have; empty: it has all."""
    names = [name for name in identity if stored.get(name) != identity[name]]
    return ", ".join(f"{name} {stored.get(name)!r} instead of {identity[name]!r}" for name in names)


_GROUP_BYTES = 2**30  # arrays that are initialized, converted or read together


def groups_within(sizes: Iterable[int], limit: int = _GROUP_BYTES) -> list[list[int]]:
    """Indices of consecutive items with these sizes, which together have at most `limit`; a larger
    one is alone.
    """
    groups = list[list[int]]()
    filled = limit
    for index, size in enumerate(sizes):
        filled += size
        if filled > limit:
            groups.append([])
            filled = size
        groups[-1].append(index)
    return groups


MAX_JSON_BYTES = 100_000_000  # of a file; its values may need 25 times as much memory


# Escapes of surrogates, which JSON may have alone, and the surrogates themselves.
_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
_SURROGATE = re.compile("[\ud800-\udfff]")
_ESCAPE_BYTES = re.compile(_ESCAPE.pattern.encode())
_LFS_POINTER = b"version https://git-lfs"
ADAPTER_FILE = "adapter_config.json"  # of peft
_OTHER_FORMATS = {  # end of the name of a file -> what to do
    ADAPTER_FILE: "use the base model of the adapters, and lora.init_from or --adapter for them (docs/lora.md)",
    ".gguf": "GGUF is not read; use the directory of the model with config.json and safetensors files",
    ".bin": "PyTorch files are not read; convert them with save_pretrained of transformers",
    ".safetensors": "expected a directory with config.json, and model.safetensors or the index of several files",
}


def other_format(path: Path) -> str | None:
    """What a file, or a directory without a model in safetensors files, has instead, and what to
    do; None if it is unknown."""
    names = [path.name] if path.is_file() else sorted(file.name for file in path.iterdir())
    found = (
        (name, advice)
        for end, advice in _OTHER_FORMATS.items()
        for name in names
        if name.endswith(end)
    )
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
                    raise UserError(
                        f"{path} is a pointer of Git LFS, not the file: run `git lfs pull` in {directory}"
                    )


def parse_json(text: bytes | str) -> Any:
    """The value of a JSON text, with U+FFFD for lone surrogates, which UTF-8 cannot encode.

    Raises:
      ValueError: it is not JSON, is nested too deeply, or is not UTF-8; or an object has a field twice.
    """
    try:
        value = json.loads(text, object_pairs_hook=_object)
        has_surrogates = (
            _ESCAPE.search(text) if isinstance(text, str) else _ESCAPE_BYTES.search(text)
        )
        return valid_unicode(value) if has_surrogates else value
    except RecursionError as error:
        raise ValueError(f"it is nested too deeply: {error}") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        check_unique([name for name, _ in pairs])
    return value


def check_unique(names: Sequence[str]) -> None:
    """Raises ValueError if the name of a field occurs twice, since its value is not known then."""
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"the field {name!r} occurs twice; rename one of them")


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
    """The objects in the lines of a file that a program of jaxlc has written; none without the file.
    A last line without its end is skipped: it is truncated.

    Raises:
      UserError: a line is not a JSON object; the message names it.
    """
    rows = []
    lines = path.read_bytes().split(b"\n") if path.exists() else [b""]
    for number, line in enumerate(lines[:-1], start=1):
        try:
            rows.append(parse_json(line))
            problem = "" if isinstance(rows[-1], dict) else "it is not an object"
        except ValueError as error:
            problem = reason_of(error)
        if problem:
            raise UserError(
                f"line {number} of {path} is not a JSON object ({problem}); remove that line"
            )
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


Arrays = dict[str, np.ndarray]  # by name


def read_arrays(path: Path) -> Arrays:
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
    except (
        zipfile.BadZipFile,
        EOFError,
        MemoryError,
        NotImplementedError,
        SyntaxError,
        tokenize.TokenError,
    ) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def write_json(path: str | Path, content: object) -> None:
    """Writes `content` as indented JSON."""
    path = local_path(path)
    with errors_named(path):
        path.write_text(json.dumps(content, indent=2) + "\n")


def write_json_lines(path: Path, rows: Iterable[Any]) -> None:
    """Writes a value in each line of a file, in a directory that may not exist; as `replacing`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as out:
        out.writelines(json.dumps(row).encode() + b"\n" for row in rows)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Opens a temporary file next to `path` that replaces it at the end; it is deleted on failure.

    The file has the permissions of the process's umask, unlike files of `tempfile`, which only
    their owner can read.

    Raises:
      OSError: the file cannot be written; `filename` is set.
    """
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with errors_named(path), temporary.open("xb+") as out:
            yield out
            out.flush()
            os.fsync(out.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def errors_named(path: Path) -> Iterator[None]:
    """Sets `filename` of an OSError of the block to `path` if it has none, as errors of read() and write()."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


_SECONDS_BETWEEN_ATTEMPTS = 0.2
_STALE = (errno.ESTALE, errno.ENOENT)  # NFS errors: another machine has deleted the file
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # a file system without locks


class LockHeld(UserError):
    """Another process holds the lock; the message starts with its name."""


@contextmanager
def locked(
    path: Path,
    on_wait: Log,
    *,
    timeout_seconds: float = math.inf,
    on_unsupported: Callable[[], None] = lambda: None,
    problem: str = "",
) -> Iterator[None]:
    """Holds an advisory lock on the file `path`, which exists only while a process holds it or waits for it.

    The kernel releases the lock when its process ends, also if it is killed, so a file without a process is no
    obstacle. On a file system without locks, processes do not wait.

    Args:
      on_wait: called once with the name of the process that holds the lock, if this process has to wait.
      timeout_seconds: the longest wait.
      on_unsupported: called if the file system has no locks.
      problem: what the message of `LockHeld` says after the name of the process.
    Raises:
      LockHeld: another process still holds the lock after `timeout_seconds`.
      OSError: the file cannot be made.
    """

    def delete() -> None:
        # such as on a file system that has become read-only: the error of the block is the cause
        with suppress(OSError):
            path.unlink()

    with (
        _acquired(path, on_wait, timeout_seconds, on_unsupported, problem) as file,
        interrupts.undone(delete),
    ):
        try:
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
            file.flush()
            yield
        finally:
            delete()  # before it is released: see _is_current


def _acquired(
    path: Path,
    on_wait: Log,
    timeout_seconds: float,
    on_unsupported: Callable[[], None],
    problem: str,
) -> BinaryIO:
    """Returns the file with its lock; see `locked`."""
    has_waited = False
    deadline = time.monotonic() + timeout_seconds
    while True:
        file = open(path, "ab+")  # noqa: SIM115 the caller closes it, which releases the lock
        try:
            while not _try_lock(file, on_unsupported):
                if not has_waited:
                    on_wait(_holder(file))
                    has_waited = True
                if time.monotonic() >= deadline:
                    with file:
                        raise LockHeld(f"{_holder(file)}{problem}")
                time.sleep(_SECONDS_BETWEEN_ATTEMPTS)
            # Another process may have deleted it just before it released its lock; then this
            # raises an error of _STALE, or the file is another one.
            if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                return file
        except OSError as error:
            if error.errno not in _STALE:
                raise
        file.close()


def _try_lock(file: BinaryIO, on_unsupported: Callable[[], None]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        if error.errno not in _UNSUPPORTED:
            raise
        on_unsupported()
    return True


def _holder(file: BinaryIO) -> str:
    """The name that the process with the lock has written to the file."""
    file.seek(0)
    return file.read().decode(errors="replace") or "another process"


def locked_at_once(path: Path, problem: str) -> AbstractContextManager[None]:
    """As `locked`, without waiting for a process that holds the lock."""
    return locked(path, lambda _: None, timeout_seconds=0, problem=problem)


@contextmanager
def new_directory(target: Path, advice: str) -> Iterator[Path]:
    """A directory to write files to, TARGET.partial, which becomes `target` at the end, also if that
    is an empty directory. It is deleted on failure, and by the next call after a kill.

    Raises:
      UserError: a file cannot be written, or another process writes this directory: "...: ADVICE".
    """
    partial, lock = (target.with_name(target.name + end) for end in (".partial", ".lock"))
    problem = f" writes to {target}: wait for its end, or {advice}"
    with write_errors_explained(target, advice):
        target.parent.mkdir(parents=True, exist_ok=True)
        with locked_at_once(lock, problem):
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            try:
                yield partial
                partial.rename(target)
            finally:
                shutil.rmtree(partial, ignore_errors=True)


_MAX_NAME = 255  # bytes, NAME_MAX and PATH_MAX of Linux
_MAX_PATH = 4096
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # pathlib changes gs://bucket to gs:/bucket
_HUB = re.compile(r"hf:/|https?:/+(www\.)?huggingface\.co/")


def local_path(value: str | Path) -> Path:
    """A path that a user gave, with the home directory instead of `~`.

    Raises:
      UserError: it is a URL or too long for a path, there is no home directory, or it is relative to a working
        directory that was deleted.
    """
    if _URL.match(str(value)):
        hub = ", or the hub id ORGANIZATION/NAME of a model" if _HUB.match(str(value)) else ""
        raise UserError(
            f"unsupported: {value} is a URL, and jaxlc reads and writes only file systems of this machine: copy or"
            f" mount it, and pass the path{hub}"
        )
    # unlike Path.expanduser, it does not raise for an unknown user
    path = os.path.expanduser(value)
    names = os.fsencode(path).split(b"/")
    # such as a text instead of a file; pathlib raises an OSError, also in exists()
    if len(path) >= _MAX_PATH or len(max(names, key=len)) > _MAX_NAME:
        raise UserError(
            f"{path[:64]}... is too long: a path has at most {_MAX_PATH:,} bytes, and each name in it {_MAX_NAME};"
            " pass the path of a file or directory"
        )
    if f"{path}/".startswith("~/"):  # as in a container whose user has a number only
        raise UserError(
            f"{value} is in the home directory, and this user has none: set HOME, or pass another path"
        )
    try:
        os.path.abspath(path)
    except FileNotFoundError:  # another command may also have made it again
        raise UserError("the working directory was deleted: change to another directory") from None
    return Path(path)


def nearest_path(path: Path) -> Path | None:
    """The path that exists and is most similar to one that does not: its last name differs, or one
    before it.
    """
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
    path = directory / name
    root = directory.resolve()
    if root.parent.name == "snapshots":  # MODEL/snapshots/REVISION has links to MODEL/blobs
        root = root.parent.parent
    if path.is_symlink() and not path.resolve().is_relative_to(root):
        raise ValueError(
            f"{name} is a symbolic link to {path.resolve()}, outside of {directory}; copy the file instead"
        )
    return path


def displayed(path: Path) -> Path:
    """An absolute path relative to the working directory, if it is below it; other paths unchanged."""
    try:
        return path.relative_to(Path.cwd())
    except (FileNotFoundError, ValueError):  # it was deleted, or is another one
        return path


# the last: a limit of the shell or of the file system
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def make_writable(directory: Path, advice: str) -> None:
    """Creates `directory` if it does not exist, and checks that it is writable.

    Args:
      advice: the end of the error.
    Raises:
      UserError: it cannot be created, or is not writable.
    """
    with write_errors_explained(directory, advice):
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass


@contextmanager
def write_errors_explained(place: Path | str, advice: str) -> Iterator[None]:
    """Raises an OSError of the block as a UserError: "cannot write to PLACE (REASON): ADVICE"."""
    try:
        yield
    except OSError as error:
        kind = UserError if full_disk_reason(error) is None else DiskFullError
        raise kind(f"cannot write to {place} ({reason_of(error)}): {advice}") from error


def temporary_explained() -> AbstractContextManager[None]:
    """As `write_errors_explained`, for files in the system's directory of temporary files."""
    return write_errors_explained("a directory of temporary files", TEMPORARY_ADVICE)


TEMPORARY_ADVICE = "set TMPDIR to a directory that is writable and has space"


def full_disk_reason(error: BaseException | None) -> str | None:
    """The message of the operating system if a full disk, a quota or a limit has caused an error;
    None: neither.

    TensorStore raises a ValueError with that message.
    """
    while error is not None:
        for reason in map(os.strerror, _FULL):
            if reason in str(error):
                return reason
        error = error.__cause__ or error.__context__
    return None


@contextmanager
def full_disk_explained(directory: Path | str, kept: Callable[[], str]) -> Iterator[None]:
    """Raises an error that a full disk has caused as a DiskFullError with one sentence.

    Args:
      directory: to which the block writes; an error that names its file is about the directory of that file.
      kept: returns the end of the sentence: what is not lost, and how to continue.
    """
    try:
        yield
    except Exception as error:
        reason = full_disk_reason(error)
        if reason is None or isinstance(error, UserError):
            raise
        name = getattr(error, "filename", None)
        place = Path(name).parent if name else directory
        raise DiskFullError(f"cannot write to {place} ({reason}): {kept()}") from error
