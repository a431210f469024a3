"""What one process of 1,024 reads, builds and holds until its first batch: the index of the corpus
and its sequences.

    python -m benchmarks.scale.first_batch DIRECTORY PROCESS_ID

The devices are absent H100s (the extra `plan`), one per process; the stores are those of
`benchmarks.data_path`, sparse files of 20 GB, which `write_stores` makes. It prints a JSON line.
"""

import json
import math
import resource
import sys
import time
from pathlib import Path

import numpy as np
from jax.sharding import NamedSharding

from benchmarks.data_path import SOURCES, memory_gib, write_store
from jaxlc.config import Config, load, read_config
from jaxlc.config.schema import SourceConfig
from jaxlc.data.sequences.loader import local_part, spans_of
from jaxlc.data.sequences.packing import BalancedSequences, MixedSequences, packed_source
from jaxlc.data.tokens.store import TokenStore
from jaxlc.sharding.document_layout import zigzag_order
from jaxlc.simulate.topology import make_mesh, topology
from jaxlc.step.batch import BATCH_SPEC

TOPOLOGY = "h100:128x8"
# The run of `tests/plan/test_scale.py`.
SETTINGS = ("--config.mesh.fsdp=32", "--config.train.global_batch_size=64")
_GIGABYTES = 20.0


def config_of_1024() -> Config:
    config = read_config("1m:h100")
    config.mesh.fsdp, config.train.global_batch_size = 32, 64
    return load(config)


def write_stores(directory: Path) -> None:
    """Token files with holes, and for each an index as `open_store` reads it."""
    for name, _, mean_tokens, share_of_bytes, fields in SOURCES:
        num_bytes = int(_GIGABYTES * 1e9 * share_of_bytes)
        store = write_store(directory, name, mean_tokens, num_bytes, "chat_field" in fields)
        answers = {} if store.answers is None else {"answers": store.answers}
        np.savez(
            directory / f"{name}.npz",
            offsets=store.offsets,
            split_hashes=store.split_hashes,
            **answers,
        )


def open_mixture(directory: Path, seq_len: int) -> MixedSequences:
    parts = []
    for name, _, _, _, fields in SOURCES:
        with np.load(directory / f"{name}.npz") as index:
            store = TokenStore(
                tokens=np.memmap(directory / f"{name}.tokens", np.uint32, "r"),
                offsets=index["offsets"],
                split_hashes=index["split_hashes"],
                fingerprint=name,
                answers=index.get("answers"),
            )
        source = SourceConfig(name=name, paths=("x",), **fields)
        parts.append(packed_source(store, np.arange(store.num_documents), source, seq_len, seed=0))
    return MixedSequences(parts, [share for _, share, *_ in SOURCES])


def first_batch(directory: Path, process_id: int) -> dict[str, object]:
    """Measures one process."""
    config, before, start = config_of_1024(), memory_gib(), time.perf_counter()
    seq_len, train = config.data.seq_len, config.train
    mixture = open_mixture(directory, seq_len)
    opened = time.perf_counter() - start
    mesh = make_mesh(topology(TOPOLOGY), config.mesh)
    num_sums = train.gradient_accumulation_steps
    shape = (num_sums, train.global_batch_size // num_sums, seq_len)
    devices = NamedSharding(mesh, BATCH_SPEC).devices_indices_map(shape)
    own = [index for device, index in devices.items() if device.process_index == process_id]
    local_B, spans_T = local_part(own, shape)
    sequences = BalancedSequences(mixture, config, 0) if config.attention.document_mask else mixture
    order, start = zigzag_order(seq_len, config.mesh.context), time.perf_counter()
    spans = [
        spans_of(sequences[microbatch * shape[1] + b], order, spans_T)
        for microbatch in range(num_sums)
        for b in local_B
    ]
    kept = sum(span.nbytes for sequence in spans for values in sequence.values() for span in values)
    return dict(
        process=process_id,
        documents=mixture.num_documents,
        seconds_to_open=round(opened, 1),
        seconds_of_first_batch=round(time.perf_counter() - start, 2),
        sequences_read=len(spans),
        mib_read=round(len(spans) * seq_len * 4 / 2**20),
        mib_kept=round(kept / 2**20, 2),
        own_memory_gib=round(memory_gib()["own"] - before["own"], 2),
        peak_gib=round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
        devices_of_a_sequence=math.prod(mesh.shape[axis] for axis in ("context", "tensor")),
    )


if __name__ == "__main__":
    print(json.dumps(first_batch(Path(sys.argv[1]), int(sys.argv[2]))))
