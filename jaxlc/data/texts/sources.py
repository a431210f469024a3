"""Lists source files, in an order and under names that are equal on every machine.

A source is a file, a directory (read recursively, without hidden directories), a glob (`**` matches
any depth), a split of a data set of the Hugging Face hub, or the built-in `python-stdlib`: the
source files of Python's standard library, which exist wherever Python is installed.

The suffix of a file selects its format: .txt, .py, .md and .rst are one document each;
`data.records` describes files of many documents. `text_suffixes` of a source add others, such as .c
or .java.

The built-in `phone-book` has names with numbers that later lines of the same document repeat. Numbers are random, so a
model predicts one only if the document has contained the entry before, up to a whole sequence earlier, and if its
attention reaches that far (multi-query associative recall, Arora et al. 2023, arXiv:2312.04927). Short documents have
from one name to a few, because a model learns to repeat a number before it learns to match names; long documents have
all names, so that many repetitions are thousands of tokens apart.
"""

import glob
import hashlib
import itertools
import os
import random
import re
import sysconfig
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from jaxlc.config import DataConfig
from jaxlc.config.models import hub
from jaxlc.core import UserError
from jaxlc.core.files import local_path, write_errors_explained, write_json_lines
from jaxlc.data.texts.records import LISTED_SUFFIXES, NAMED_SUFFIXES, has_suffix, unreadable

PYTHON_STDLIB = "python-stdlib"
_TEXT_SUFFIXES = (".txt", ".py", ".md", ".rst")
# Files of programs, which text_suffixes="code" adds.
_CODE_SUFFIXES = (
    ".c", ".cc", ".cpp", ".cs", ".css", ".cu", ".cuh", ".go", ".h", ".hpp", ".hs", ".html",
    ".java", ".jl", ".js", ".kt", ".lua", ".m", ".ml", ".php", ".pl", ".r", ".rb", ".rs",
    ".scala", ".sh", ".sql", ".swift", ".tex", ".toml", ".ts", ".tsx", ".vue", ".yaml", ".yml", ".zig",
)  # fmt: skip
_SPLITS_FILE = "dataset_dict.json"  # of the package `datasets`, beside a directory for each split
_SHARD = re.compile(r"(.+)-\d{5}-of-\d{5}\.")  # of a split, as data sets of the hub have them
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
        for suffix in (_CODE_SUFFIXES if item == "code" else (item.lower(),))
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


def _files_of(source: str, setting: str, suffixes: tuple[str, ...]) -> list[tuple[str, Path]]:
    if source == PYTHON_STDLIB:
        stdlib = Path(sysconfig.get_paths()["stdlib"])
        return _files_below(stdlib, (".py",), without=_INSTALLED_PACKAGES)
    if source.startswith(hub.DATASET_PREFIX):
        files = hub.dataset_files(source, setting)
        suffixes = (*suffixes, *NAMED_SUFFIXES)
        return [(name, Path(path)) for name, path in files if has_suffix(name, suffixes)]
    if "://" in source:
        raise UserError(
            f"{setting}: {source!r} is a URL, as only training data of a stream may be: set --config.data.stream=True,"
            " or copy the files"
        )
    path = local_path(source)
    suffixes = (*suffixes, *(x for x in NAMED_SUFFIXES if has_suffix(source, x)))
    if path.is_dir():
        return _files_below(path, suffixes)
    if path.is_file():
        return [(path.name, path)] if has_suffix(path, suffixes) else []
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
        if m.is_file() and has_suffix(m, suffixes)
    ]


def _files_below(
    root: Path, suffixes: tuple[str, ...], without: Collection[str] = ()
) -> list[tuple[str, Path]]:
    """Names relative to `root`, and paths; `without`: names of directories that are not searched."""
    named_paths = []
    for directory, subdirectories, file_names in os.walk(root):
        splits = {f"{shard[1]}-*" for name in file_names if (shard := _SHARD.match(name))}
        if _SPLITS_FILE in file_names:
            splits = {*subdirectories}
        if _SPLITS_FILE in file_names or "train-*" in splits and len(splits) > 1:
            paths = ", ".join(os.path.join(directory, name) for name in sorted(splits))
            raise UserError(
                f"{directory} has several splits of a data set: name those to use, of {paths}"
            )
        subdirectories[:] = [
            name
            for name in subdirectories
            if not name.startswith(".") and name not in ("__pycache__", *without)
        ]
        paths = [
            Path(directory, name)
            for name in file_names
            if has_suffix(name, suffixes) and not name.startswith(_CACHE_OF_DATASETS)
        ]
        named_paths += [(path.relative_to(root).as_posix(), path) for path in paths]
    return named_paths


PHONE_BOOK = "phone-book"
_NAMES = """
Alma Boris Clara Daniel Edith Felix Greta Henry Ines Jonas Karla Leo Mona Nils Olga Paul Quentin Rosa Simon Tilda Ugo
Vera Walter Xenia Yves Zoe Anton Berta Cesar Dora Emil Frida Gustav Hanna Igor Julia Kurt Laura Marco Nadia Otto Petra
Rainer Sofia Theo Ulla Victor Wanda Yara Zeno Adam Bella Carl Diana Erik Flora Georg Helga Ivan Judith Klaus Lena Max
Nora Agnes Albert Anita Arthur Astrid August Bruno Carmen Celia Conrad Dagmar David Doris Edgar Elena Elias Emma Ernst
Esther Eva Fiona Franz Gerda Gloria Hector Hilda Hugo Ingrid Iris Isaac Jakob Jana Joel Josef Judy Kira Lars Linda
Lotte Lucas Luisa Magda Martin Mira Naomi Nikita Noah Oscar Pablo Paula Pia Rita Robin Ruben Ruth Samuel Sara Silas
Tessa Tomas Vito
"""
NAMES = tuple(_NAMES.split())
_FILLERS = """
the of and to in a is that it was for on are as with his they at be this from have or by one had not but what all were
when we there can an your which their said if do will each about how up out them then she many some so these would
other into has more her two like him see time could no make than first been its who now people my made over did down
only way find use may water long little very after words called just where most know get through back much before go
good new write our used me man too any day same right look think also around another came come work three word must
because does part even place well such here take why things help put years different away again off went old number
great tell men say small every found still between name should hotel big give air line set own under read last never us
left end along while might next sound below saw something thought both few those always looked show large often
together asked house world going wish
"""
FILLERS = tuple(_FILLERS.split())
_FORMAT = 1  # increment it when documents change
_NUM_TOKENS = 4 << 20  # tokens of all documents together
_MIN_DOCUMENTS = 64
_TOKENS_PER_NAME = 16  # at least, of a document
_ALL_NAMES_TOKENS = 4096  # length of a document with as many names as fit
_MAX_FILLER = 0.3  # largest probability of a run of filler words before an entry


def phone_book_documents(num_tokens: int, seed: int = 0) -> Iterator[list[str]]:
    """Documents of `num_tokens` words, without end; they depend on the arguments only."""
    rng = random.Random(f"{seed} {num_tokens}")
    max_names = max(1, min(len(NAMES), num_tokens // _TOKENS_PER_NAME))
    least = min(1.0, num_tokens / _ALL_NAMES_TOKENS)
    while True:
        num_names = round(max_names ** rng.uniform(least, 1.0))
        parts = _parts(rng, num_tokens, rng.sample(NAMES, num_names))
        yield list(itertools.chain.from_iterable(parts))[:num_tokens]


def entry(name: str, number: int) -> list[str]:
    """The words of an entry: a name and three pairs of digits."""
    return [name, f"{number // 10_000:02}", f"{number // 100 % 100:02}", f"{number % 100:02}"]


def _parts(rng: random.Random, num_tokens: int, names: Sequence[str]) -> Iterator[list[str]]:
    """Entries of `names` in random order, and runs of filler words between them, of at least
    `num_tokens` words.
    """
    numbers = {name: rng.randrange(10**6) for name in names}
    filler = rng.uniform(0.0, _MAX_FILLER)
    num_words = 0
    while num_words < num_tokens:
        is_filler = rng.random() < filler
        part = _filler(rng) if is_filler else entry(name := rng.choice(names), numbers[name])
        num_words += len(part)
        yield part


def _filler(rng: random.Random) -> list[str]:
    """A run of words, of which those at the start of FILLERS are the most frequent, and a full
    stop.
    """
    return [FILLERS[int(len(FILLERS) * rng.random() ** 2)] for _ in range(rng.randrange(5, 15))] + [
        "."
    ]


def retrieval_prompt(rng: random.Random, num_tokens: int, distance: int) -> tuple[str, str]:
    """A document that ends with a name, and the number of that name.

    Args:
      num_tokens: of the document.
      distance: tokens from the only entry of the name to the end, plus at most the length of one part.
    """
    asked, *others = rng.sample(NAMES, len(NAMES))
    name, *number = entry(asked, rng.randrange(10**6))
    parts = list(_parts(rng, num_tokens, others))
    lengths = itertools.accumulate(len(part) for part in reversed(parts))
    num_after = next(index for index, length in enumerate(lengths, 1) if length >= distance)
    parts.insert(len(parts) - num_after, [name, *number])
    words = [*itertools.chain.from_iterable(parts), name][-num_tokens:]
    return " ".join(words), " ".join(number)


def phone_book_file(config: DataConfig) -> Path:
    """The file of the source in data.cache_dir, with documents that fill a sequence; written if it
    does not exist.

    Raises:
      UserError: it cannot be written.
    """
    num_tokens = config.seq_len
    num_documents = max(_MIN_DOCUMENTS, _NUM_TOKENS // num_tokens)
    path = local_path(config.cache_dir) / f"{PHONE_BOOK}-{_FORMAT}-{num_tokens}.jsonl"
    if not path.exists():
        with write_errors_explained(
            f"data.cache_dir {config.cache_dir!r}", "use a writable directory"
        ):
            documents = itertools.islice(phone_book_documents(num_tokens), num_documents)
            # several processes may write the same content at the same time
            write_json_lines(path, ({"text": " ".join(words)} for words in documents))
    return path
