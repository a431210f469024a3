"""Measures the data path on a store on disk: tokens/s of one core, and memory, with a mixture of
text and chats.

    python -m benchmarks.data_path --gigabytes=20 --seq_len=131072 --seconds=10

It writes stores of random document lengths, most of it as holes of sparse files, so that 20 GB take
little space; a hole is read like data, as pages of zeros. It prints JSON lines: the first sequences
are read in one thread, then whole batches go through `jaxlc.data.batches`.
"""

import argparse
import itertools
import json
import os
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxlc.config.schema import SourceConfig
from jaxlc.core.axes import MESH_AXES
from jaxlc.data.sequences.loader import batches
from jaxlc.data.sequences.packing import MixedSequences, packed_source
from jaxlc.data.tokens.store import TokenStore
from jaxlc.sharding.document_layout import zigzag_order

# Name, share, mean document length in tokens, share of the bytes, and settings of each source.
SOURCES = (
    ("books", 0.3, 200_000, 0.4, dict(pool="full_length")),
    ("code", 0.4, 8_000, 0.3, dict(length_limits=(32_768,), length_weights=(1, 3))),
    ("web", 0.2, 1_200, 0.2, {}),
    (
        "chats",
        0.1,
        6_000,
        0.1,
        dict(chat_field="messages", answer_weights="answer", overlong="truncate"),
    ),
)
_ANSWERS_PER_CHAT = 8


def write_store(
    directory: Path, name: str, mean_tokens: int, num_bytes: int, is_chats: bool
) -> TokenStore:
    """A store of documents with lognormal lengths in a sparse file."""
    rng = np.random.default_rng(len(name))
    num_documents = max(2, num_bytes // 4 // mean_tokens)
    lengths = np.maximum(32, rng.lognormal(np.log(mean_tokens) - 0.5, 1, num_documents)).astype(
        np.int64
    )
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    path = directory / f"{name}.tokens"
    with open(path, "wb") as out:
        np.arange(1 << 20, dtype=np.uint32).tofile(out)
        out.truncate(4 * int(offsets[-1]))
    answers = None
    if is_chats:  # each chat has equal turns, of which the second half is the answer
        turns = lengths // _ANSWERS_PER_CHAT
        begins = (
            offsets[:-1, None] + turns[:, None] * np.arange(_ANSWERS_PER_CHAT) + turns[:, None] // 2
        )
        answers = np.stack([begins, begins + (turns // 2)[:, None]], axis=2).reshape(-1, 2)
    return TokenStore(
        tokens=np.memmap(path, np.uint32, "r"),
        offsets=offsets,
        split_hashes=rng.random(num_documents),
        fingerprint=name,
        answers=answers,
    )


def memory_gib() -> dict[str, float]:
    """Resident memory of this process: in all, its own, and pages of mapped files, which the system
    can drop.
    """
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    names = dict(rss="VmRSS", own="RssAnon", file_pages="RssFile")
    return {name: round(int(status[key].split()[0]) / 2**20, 2) for name, key in names.items()}


def measure(read, seq_len: int, seconds: float) -> dict[str, float]:
    """Tokens per second of `read(i)` for i = 0, 1, 2..., which reads one sequence; wall time and
    CPU time.
    """
    read(0)
    wall_start, cpu_start = time.perf_counter(), time.process_time()
    for count in itertools.count(1):
        read(count)
        wall, cpu = time.perf_counter() - wall_start, time.process_time() - cpu_start
        if wall > seconds:
            rates = dict(
                tokens_per_second=count * seq_len / wall,
                tokens_per_cpu_second=count * seq_len / cpu,
            )
            return {name: round(rate / 1e6, 1) for name, rate in rates.items()}
    raise AssertionError


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=20.0)
    parser.add_argument("--seq_len", type=int, default=131_072)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--directory", default=None)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        start = time.perf_counter()
        parts, shares = [], []
        before = memory_gib()
        for name, share, mean_tokens, share_of_bytes, fields in SOURCES:
            num_bytes = int(arguments.gigabytes * 1e9 * share_of_bytes)
            store = write_store(
                Path(directory), name, mean_tokens, num_bytes, "chat_field" in fields
            )
            source = SourceConfig(name=name, paths=("x",), **fields)
            ids = np.arange(store.num_documents)
            parts.append(packed_source(store, ids, source, arguments.seq_len, seed=0))
            shares.append(share)
        mixture = MixedSequences(parts, shares)
        size = dict(
            gigabytes=round(sum(part.store.tokens.nbytes for part in parts) / 1e9, 1),
            documents=sum(part.store.num_documents for part in parts),
            seq_len=arguments.seq_len,
            seconds_to_pack=round(time.perf_counter() - start, 1),
        )
        print(
            json.dumps(dict(what="corpus", **size, memory_before=before, memory_gib=memory_gib()))
        )
        rates = measure(mixture.__getitem__, arguments.seq_len, arguments.seconds)
        print(json.dumps(dict(what="sequences", million=rates, memory_gib=memory_gib())))
        mesh = jax.make_mesh((1,) * 4, MESH_AXES, axis_types=(jax.sharding.AxisType.Auto,) * 4)
        order = zigzag_order(arguments.seq_len, 8)
        stream = batches(
            lambda i: (mixture[i], order),
            first_sequence=0,
            global_batch_size=1,
            gradient_accumulation_steps=1,
            seq_len=arguments.seq_len,
            sharding=NamedSharding(mesh, PartitionSpec()),
            prefetch_steps=2,
        )
        rates = measure(lambda i: next(stream), arguments.seq_len, arguments.seconds)
        stream.close()
        print(
            json.dumps(
                dict(what="batches", cores=os.cpu_count(), million=rates, memory_gib=memory_gib())
            )
        )


if __name__ == "__main__":
    main()
