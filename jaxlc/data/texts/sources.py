"""Lists source files, in an order and under names that are equal on every machine.

A source is a file, a directory (read recursively, without hidden directories), a glob (`**` matches
any depth), a split of a data set of the Hugging Face hub, or the built-in `python-stdlib`: the
source files of Python's standard library, which exist wherever Python is installed.

The suffix of a file selects its format: .txt, .py, .md and .rst are one document each;
`data.records` describes files of many documents. `text_suffixes` of a source add others, such as .c
or .java.
"""

import glob
import hashlib
import itertools
import os
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from jaxlc.config.models import hub
from jaxlc.core.errors import UserError, reason_of
from jaxlc.core.files import local_path
from jaxlc.data.texts.records import LISTED_SUFFIXES, NAMED_SUFFIXES

PYTHON_STDLIB = "python-stdlib"
_TEXT_SUFFIXES = (".txt", ".py", ".md", ".rst")
# Files of programs, which text_suffixes="code" adds.
_CODE_SUFFIXES = (
    ".c", ".cc", ".cpp", ".cs", ".css", ".cu", ".cuh", ".go", ".h", ".hpp", ".hs", ".html",
    ".java", ".jl", ".js", ".kt", ".lua", ".m", ".ml", ".php", ".pl", ".r", ".rb", ".rs",
    ".scala", ".sh", ".sql", ".swift", ".tex", ".toml", ".ts", ".tsx", ".vue", ".yaml", ".yml", ".zig",
)  # fmt: skip
_CACHE_OF_DATASETS = "cache-"  # start of the names of files with results of the package `datasets`
# not the standard library, and different on every machine
_INSTALLED_PACKAGES = {"site-packages", "dist-packages"}


class SourceFile(NamedTuple):
    name: str  # path relative to its source, with forward slashes
    path: Path
    size_bytes: int
    modified_ns: int
    setting: str = "data.sources"  # that lists it; named in errors
    # Only some lines of a .jsonl file: begin and end in bytes, and the number of the first line.
    # None: the entire file.
    lines: tuple[int, int, int] | None = None


class FileList(NamedTuple):
    files: list[SourceFile]
    # files that a source lists although an earlier one already has; they are not repeated
    num_duplicates: int


def list_files(
    sources: Sequence[str], setting: str = "data.sources", text_suffixes: Sequence[str] = ()
) -> FileList:
    """Lists the files of `sources`, sorted by name within a source, each file once even if sources
    overlap.

    Args:
      setting: that lists the sources; named in errors.
      text_suffixes: of more files that are one document each; "code" adds those of programs.
    Raises:
      UserError: a source does not exist, contains no file of a supported type, or cannot be read.
    """
    more = [
        suffix
        for item in text_suffixes
        for suffix in (_CODE_SUFFIXES if item == "code" else (item,))
    ]
    suffixes = (*_TEXT_SUFFIXES, *more, *LISTED_SUFFIXES)
    files: dict[Path, SourceFile] = {}  # by real path
    num_listed = 0
    for source in sources:
        named_paths = _files_of(source, setting, suffixes)
        if not named_paths:
            raise UserError(
                f"{setting}: {source!r} contains no file with a supported suffix ({', '.join(suffixes)});"
                f" use a different source, or the paths of {' or '.join(NAMED_SUFFIXES)} files"
            )
        num_listed += len(named_paths)
        for name, path in sorted(named_paths):
            # Before resolve(), because it reports unreadable files and link loops.
            try:
                stat = path.stat()
            except OSError as error:
                raise unreadable(path, error, setting) from error
            file = SourceFile(name, path, stat.st_size, stat.st_mtime_ns, setting)
            files.setdefault(path.resolve(), file)
    return FileList(list(files.values()), num_listed - len(files))


def split_hash(name: str) -> float:
    """A number in [0, 1) that depends only on a document's name; documents below `eval_fraction`
    are held out.
    """
    return (
        int.from_bytes(hashlib.sha256(name.encode(errors="surrogateescape")).digest()[:6]) / 2**48
    )


def unreadable(path: Path, error: Exception, setting: str) -> UserError:
    """The error for a file that cannot be read."""
    return UserError(
        f"cannot read {str(path)!r} ({reason_of(error)}); fix it or remove it from {setting}"
    )


def _files_of(source: str, setting: str, suffixes: tuple[str, ...]) -> list[tuple[str, Path]]:
    if source == PYTHON_STDLIB:
        files = _files_below(Path(sysconfig.get_paths()["stdlib"]), (".py",))
        return [(name, path) for name, path in files if _INSTALLED_PACKAGES.isdisjoint(path.parts)]
    if source.startswith(hub.DATASET_PREFIX):
        files = hub.dataset_files(source, setting)
        suffixes = (*suffixes, *NAMED_SUFFIXES)
        return [(name, path) for name, path in files if name.endswith(suffixes)]
    path = local_path(source)
    suffixes = (*suffixes, *(x for x in NAMED_SUFFIXES if source.endswith(x)))
    if path.is_dir():
        return _files_below(path, suffixes)
    if path.is_file():
        return [(path.name, path)] if path.name.endswith(suffixes) else []
    if not glob.has_magic(source):
        advice = "use an existing file, directory or glob"
        if hub.is_model_id(source):
            advice += (
                f"; a data set of the hub is {hub.DATASET_PREFIX}{source}@REVISION/SUBSET/SPLIT"
            )
        raise UserError(f"{setting}: {source!r} does not exist; {advice}")
    root = Path(*itertools.takewhile(lambda part: not glob.has_magic(part), path.parts[:-1]))
    matches = [Path(match) for match in glob.glob(str(path), recursive=True)]
    return [
        (m.relative_to(root).as_posix(), m)
        for m in matches
        if m.is_file() and m.name.endswith(suffixes)
    ]


def _files_below(root: Path, suffixes: tuple[str, ...]) -> list[tuple[str, Path]]:
    named_paths = []
    for directory, subdirectories, file_names in os.walk(root):
        subdirectories[:] = [
            name for name in subdirectories if not name.startswith(".") and name != "__pycache__"
        ]
        paths = [
            Path(directory, name)
            for name in file_names
            if name.endswith(suffixes) and not name.startswith(_CACHE_OF_DATASETS)
        ]
        named_paths += [(path.relative_to(root).as_posix(), path) for path in paths]
    return named_paths
