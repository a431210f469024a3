"""A stream: a corpus that may be larger than the disk, read in chunks while the run trains.

Files are read through fsspec and cut into chunks: whole lines of .jsonl, row groups of Parquet, and
other files as a whole; small files share a chunk. The order of the chunks depends on data.seed, and
is the same in every epoch. Each chunk is tokenized and packed as a corpus of its own, in a thread
that is one chunk ahead. Its files are deleted as soon as they are open, so that the space of a chunk
is free when it is not used any more, also after a kill.

Sequence i is a pure function of (files, tokenizer, settings, i): chunks follow each other. A
checkpoint has the number of sequences of each chunk before it, so that a run that resumes does not
make these chunks again.
"""

import glob
import shutil
import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, pairwise
from operator import attrgetter
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from jaxlc.config import Config
from jaxlc.config.models import hub
from jaxlc.config.schema import SourceConfig
from jaxlc.core import UserError, errors, gib, reason_of
from jaxlc.core.files import fingerprint_of, full_disk_reason, local_path, make_writable
from jaxlc.data import corpus
from jaxlc.data.sequences.loader import DataSource, Inputs, SourceView
from jaxlc.data.sequences.packing import (
    JoinedSequences,
    PackedSequences,
    epoch_order,
    split_documents,
)
from jaxlc.data.texts.documents import EVAL_SETTING, LISTED, Fields, Notes
from jaxlc.data.texts.records import (
    LINES_SUFFIXES,
    MEGATRON_SUFFIX,
    RECORD_SUFFIXES,
    has_suffix,
    needed_columns,
)
from jaxlc.data.texts.sources import SourceFile, list_files
from jaxlc.data.tokens.encoder import Encoder, grouped
from jaxlc.data.tokens.store import LEFTOVER_SECONDS, NoText

_SUFFIXES = tuple(suffix for suffix in RECORD_SUFFIXES if suffix != MEGATRON_SUFFIX)
_PREFIX = "stream-"  # of temporary directories in data.cache_dir
_READERS = 16  # threads that ask for the sizes of files and row groups
# What fsspec says of a file that changes with its content: in object stores, on the hub, elsewhere.
_VERSIONS = ("ETag", "etag", "blob_id", "mtime", "created")
# Least text of a chunk for each GiB of the cache: a chunk has at most twice of it, except for large
# files, and takes about five times its text while it is made; half of the cache is free then.
_CHUNK_BYTES = 2**30 / 32
# The padding of a chunk is about half a sequence: 0.4% of 128 sequences with 4 bytes a token.
_CHUNK_BYTES_PER_TOKEN = 512
_SECONDS_BETWEEN_CHECKS = 0.05


class Part(NamedTuple):
    """A part of a file."""

    url: str  # of the file, or its path
    version: str
    begin: int  # in bytes, or row groups of Parquet
    end: int
    num_bytes: int

    @property
    def place(self) -> str:
        """Where the part starts, for errors that number its records."""
        unit = "row group" if has_suffix(self.url, ".parquet") else "byte"
        return f"{self.url} from {unit} {self.begin:,}" if self.begin else self.url


@contextmanager
def _explained(url: str, setting: str) -> Iterator[None]:
    """Raises errors of fsspec, and of the clients of object stores, as UserErrors."""
    try:
        yield
    except Exception as error:
        if isinstance(error, UserError) or full_disk_reason(error):
            raise
        raise UserError(
            f"{setting}: cannot read {url!r} ({reason_of(error)}): check the name, your access to it, and that the"
            " package of fsspec for it is installed, such as s3fs or gcsfs"
        ) from error


def _version(info: Mapping[str, Any]) -> str:
    known = [f"{name} {info[name]}" for name in _VERSIONS if info.get(name)]
    return ", ".join([f"{info['size']} bytes", *known[:1]])


def _urls(name: str, setting: str) -> list[str]:
    """The files of a source. Local files are found as without a stream, and have their real paths."""
    import fsspec

    if name.startswith(hub.DATASET_PREFIX):
        return [url for _, url in hub.dataset_files(name, setting, is_streamed=True)]
    if "://" in name:
        with _explained(name, setting):
            fs, root = fsspec.url_to_fs(name)
            paths = sorted(fs.glob(root) if glob.has_magic(root) else fs.find(root))
            urls = [fs.unstrip_protocol(path) for path in paths]
    else:
        urls = [f"file://{file.path.resolve()}" for file in list_files([name], setting).files]
    return [url for url in urls if has_suffix(url, _SUFFIXES)]


def _parts(url: str, chunk_bytes: int, setting: str) -> list[Part]:
    """Cuts a file into parts."""
    import fsspec

    with _explained(url, setting):
        fs, path = fsspec.url_to_fs(url)
        info = fs.info(path)
        part = partial(Part, url, _version(info))
        if has_suffix(url, ".parquet"):
            from pyarrow import parquet

            with fs.open(path) as opened:
                footer = parquet.read_metadata(opened)
            sizes = [footer.row_group(i).total_byte_size for i in range(footer.num_row_groups)]
            groups = grouped(range(len(sizes)), sizes.__getitem__, chunk_bytes)
            return [part(x[0], x[-1] + 1, sum(sizes[i] for i in x)) for x in groups]
    size = info["size"]
    num_parts = size // chunk_bytes + 1 if has_suffix(url, LINES_SUFFIXES) else 1
    bounds = [size * i // num_parts for i in range(num_parts + 1)]
    return [part(begin, end, end - begin) for begin, end in pairwise(bounds)]


def _fetch(part: Part, copy: Path, fields: Fields, setting: str) -> SourceFile:
    """Copies a part to a file.

    Raises:
      UserError: the file cannot be read, or has changed since the stream was opened.
    """
    import fsspec

    url, version, begin, end, _ = part
    with _explained(url, setting):
        fs, path = fsspec.url_to_fs(url)
        try:
            if has_suffix(url, ".parquet"):
                from pyarrow import parquet

                with fs.open(path) as opened, parquet.ParquetFile(opened) as table:
                    names = table.schema_arrow.names
                    columns = needed_columns(copy, fields.document, fields.others, names)
                    rows = table.read_row_groups([*range(begin, end)], columns)
                parquet.write_table(rows, copy)
            elif has_suffix(url, LINES_SUFFIXES):
                copy.write_bytes(fs.read_block(path, begin, end - begin, b"\n"))
            else:
                fs.get_file(path, str(copy))
        finally:  # a file that was replaced may be unreadable from here on
            fs.invalidate_cache(path)
            _check_same(url, version, _version(fs.info(path)))
    return SourceFile(f"{begin}@{url}", copy, copy.stat().st_size, 0, setting)


def _check_same(name: str, before: object, now: object) -> None:
    if before != now:
        raise UserError(
            f"data.stream: {name} has changed, from {before} to {now}: set or put it back as it was, name the commit of"
            " a data set of the hub, or use a different --workdir"
        )


def _with_places(message: str, places: Mapping[str, Part]) -> str:
    """A message with the places of parts instead of the paths of their copies, which are deleted,
    as is the list of bad records."""
    for copy, part in places.items():
        message = message.replace(copy, part.place)
    return message.partition(LISTED)[0]


@dataclass
class ChunkedSequences(JoinedSequences):
    """An endless dataset: the sequences of chunks, one chunk after the other. It is thread-safe."""

    opener: corpus.StoreOpener
    source: SourceConfig
    chunks: Sequence[Sequence[Part]]
    # by chunk, the least recently used first; None: it has no sequence
    _made: dict[int, Future[PackedSequences | None]] = field(default_factory=dict)
    _bytes: dict[int, int] = field(default_factory=dict)  # of complete chunks
    # First sequence of each known chunk, and the end of the last one.
    _bounds: list[int] = field(default_factory=lambda: [0])
    _lock: Any = field(default_factory=threading.Lock)
    _thread: ThreadPoolExecutor = field(default_factory=partial(ThreadPoolExecutor, 1))
    _is_closed: bool = False
    _checked_seconds: float = 0.0

    @property
    def _limit_bytes(self) -> float:
        return self.opener.config.stream_cache_gib * 2**30

    def at(self, i: int) -> tuple[PackedSequences, int]:
        """The chunk of sequence i, and its index there.

        Raises:
          UserError: a chunk cannot be read, or no chunk has a sequence.
        """
        bounds = self._bounds
        while True:
            with self._lock:
                is_counted = len(bounds) > len(self.chunks)
                if is_counted and not bounds[-1]:
                    raise UserError(
                        f"{corpus.setting_of(self.source)}: no document has a length that the source"
                        " uses, or all are empty, or no chat has a token in the loss"
                    )
                epoch, place = divmod(i, bounds[-1]) if is_counted else (0, i)
                number = bisect_right(bounds, place) - 1
                packed = self._requested(number)
                self._requested((number + 1) % len(self.chunks))
            sequences = packed.result()
            num_sequences = sequences.num_sequences if sequences else 0
            with self._lock:
                if number + 1 == len(bounds):
                    bounds.append(bounds[number] + num_sequences)
            if sequences and place < bounds[number + 1]:
                return sequences, place - bounds[number] + epoch * num_sequences

    def counts(self, num_sequences: int) -> list[int]:
        """The number of sequences of each chunk that has some of the first `num_sequences`."""
        end = bisect_left(self._bounds, num_sequences)
        return np.diff(self._bounds[: end + 1]).tolist()

    def resume(self, counts: Sequence[int]) -> None:
        self._bounds = [*accumulate(counts, initial=0)]

    def close(self) -> None:
        """Ends the thread."""
        self._is_closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _requested(self, number: int) -> Future[PackedSequences | None]:
        packed = self._made.pop(number, None) or self._thread.submit(self._make, number)
        self._made[number] = packed
        return packed

    def _make(self, number: int) -> PackedSequences | None:
        """Fetches, tokenizes and packs a chunk."""
        with self._lock:  # the least recently used chunks, so that half of the cache is free
            for used in [x for x in self._made if x in self._bytes][:-1]:
                if sum(self._bytes.values()) > self._limit_bytes / 2:
                    del self._made[used], self._bytes[used]
        config = self.opener.config
        setting = corpus.setting_of(self.source)
        fields = Fields.from_config(self.source)
        # NFS keeps deleted files as .nfs* until they are closed, and so the directory
        with TemporaryDirectory(
            prefix=_PREFIX, dir=local_path(config.cache_dir), ignore_cleanup_errors=True
        ) as name:
            directory = Path(name)
            opener = replace(
                self.opener,
                config=replace(config, cache_dir=name),
                progress=partial(self._check, directory),
                warnings=[],
            )
            places = {
                str(directory / f"{i}@{PurePosixPath(part.url).name}"): part
                for i, part in enumerate(self.chunks[number])
            }
            try:
                copies = [
                    _fetch(part, Path(copy), fields, setting) for copy, part in places.items()
                ]
                files = [file for file in copies if file.size_bytes]
                if not files:
                    return None
                store = opener.open(files, fields)
                split = split_documents(store, 0.0)
                packed = corpus.packed_train(opener, self.source, store, split)
            except NoText:
                return None
            except UserError as error:
                raise UserError(_with_places(str(error), places)) from error
            store.read(0, 1)  # opens the file
        for line in opener.warnings:
            opener.inputs.log(f"warning: {_with_places(line, places)}")
        with self._lock:
            self._bytes[number] = store.tokens.nbytes
        return packed

    def _check(self, directory: Path, num_bytes: int, total_bytes: int | None) -> None:
        """Checks the size of the cache while a chunk is made: `num_bytes` of its text are tokenized.

        Raises:
          UserError: it is above its limit, or the stream is closed.
        """
        if self._is_closed:
            raise UserError("the stream is closed")
        now = time.monotonic()
        if num_bytes == total_bytes or now > self._checked_seconds + _SECONDS_BETWEEN_CHECKS:
            self._checked_seconds = now
            with suppress(FileNotFoundError):  # a temporary file of the store
                size = sum(path.stat().st_size for path in directory.rglob("*.*"))
                if size + sum(self._bytes.values()) > self._limit_bytes:
                    raise UserError(
                        f"config.data.stream_cache_gib={self._limit_bytes / 2**30:g} is too small for a chunk of"
                        f" {gib(size)} GiB: use a larger one, or smaller compressed files, which are chunks as a whole"
                    )


@dataclass(frozen=True, kw_only=True)
class Stream(DataSource):
    """The data source of data.stream."""

    is_balanced = True
    train: ChunkedSequences
    identity: dict[str, Any]  # files and settings that the sequences depend on

    @classmethod
    def open(cls, config: Config, inputs: Inputs) -> "Stream":
        """
        Raises:
          UserError: files cannot be listed, or the held-out text cannot be read.
        """
        errors.require("fsspec", "config.data.stream")
        data = config.data
        cache = local_path(config.data.cache_dir)
        (source,) = corpus.source_configs(data)
        setting = corpus.setting_of(source)
        chunk_bytes = int(data.stream_cache_gib * _CHUNK_BYTES)
        make_writable(cache, "use a different --config.data.cache_dir")
        for left in cache.glob(f"{_PREFIX}*"):  # by a process that was killed
            is_open = any(left.glob(".nfs*"))  # by a run of another machine
            if time.time() - left.stat().st_mtime > LEFTOVER_SECONDS and not is_open:
                shutil.rmtree(left, ignore_errors=True)
        with inputs.progress("listing the files of the stream") as update:
            opener = corpus.StoreOpener(config=data, inputs=inputs, progress=update)
            heldout = corpus.open_heldout(opener)
            excluded = {url for name in data.eval_sources for url in _urls(name, EVAL_SETTING)}
            listed = dict.fromkeys(url for name in source.paths for url in _urls(name, setting))
            urls = [url for url in listed if url not in excluded]
            if not urls:
                raise UserError(
                    f"{setting}: {', '.join(source.paths)!r} has no file that data.stream reads"
                    f" ({', '.join(_SUFFIXES)}) and data.eval_sources does not have"
                )
            parts = list[Part]()
            with ThreadPoolExecutor(_READERS) as readers:
                cut = partial(_parts, chunk_bytes=chunk_bytes, setting=setting)
                for number, cut_parts in enumerate(readers.map(cut, urls), start=1):
                    parts += cut_parts
                    update(number, len(urls))
        chunks = [*grouped(parts, attrgetter("num_bytes"), chunk_bytes)]
        least_gib = _CHUNK_BYTES_PER_TOKEN * data.seq_len / _CHUNK_BYTES
        if data.stream_cache_gib < least_gib:
            opener.warnings.append(
                f"the chunks of config.data.stream_cache_gib={data.stream_cache_gib:g} have few sequences of"
                f" data.seq_len tokens, so that they have more padding; use"
                f" --config.data.stream_cache_gib={least_gib:.2g}"
            )
        opener.warnings.extend(hub.pin_advice(source.paths, setting))
        identity = {part.url: part.version for part in parts} | {
            "the source": repr(corpus.identity_of(source, source.share)),
            "data.tokenizer": inputs.tokenizer.fingerprint,
            "data.seq_len": data.seq_len,
            "data.seed": data.seed,
            "data.stream_cache_gib": data.stream_cache_gib,
        }
        if Fields.from_config(source).chat:
            template = Encoder(inputs.tokenizer, data.chat_template, Notes()).template
            identity["data.chat_template"] = fingerprint_of(template.identity)
        order = epoch_order(len(chunks), data.seed, 0)
        size = gib(sum(part.num_bytes for part in parts))
        return cls(
            tokenizer=inputs.tokenizer,
            train=ChunkedSequences(opener, source, [chunks[i] for i in order]),
            heldout=heldout,
            fingerprint=fingerprint_of((identity, heldout and heldout.store.fingerprint)),
            description=f"stream of {len(urls):,} files, {size} GiB, in {len(chunks):,} chunks",
            warnings=tuple(opener.warnings),
            identity=identity,
        )

    def views(self) -> list[SourceView]:
        raise UserError(
            "unsupported: config.data.stream with `jaxlc data`, which reads the whole corpus; use"
            " --config.data.stream=False and a part of the files"
        )

    def position(self, num_sequences: int) -> dict[str, Any]:
        return dict(stream=dict(identity=self.identity, counts=self.train.counts(num_sequences)))

    def resume(self, meta: Mapping[str, Any], next_sequence: int) -> None:
        if stored := meta.get("stream"):
            before = stored["identity"]
            for name in before | self.identity:
                _check_same(name, before.get(name, "nothing"), self.identity.get(name, "nothing"))
            self.train.resume(stored["counts"])
        self.train.at(next_sequence)  # raises errors in its chunk before the step is compiled

    def close(self) -> None:
        self.train.close()
