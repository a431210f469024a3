import gc
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxlc.core.axes import BATCH_AXES, CONTEXT, MESH_AXES
from jaxlc.core.errors import UserError
from jaxlc.data import open_corpus
from jaxlc.data.sequences.loader import batches
from jaxlc.sharding.document_layout import document_order
from tests import helpers
from tests.data.corpora import S, make_config

NAMES = {"tokens", "targets", "loss_weights", "positions", "segment_ids"}
SPEC = PartitionSpec(None, BATCH_AXES, CONTEXT)


@pytest.fixture
def train(tmp_path: Path):
    return open_corpus(make_config(tmp_path)).train


def make_mesh(*shape: int) -> Mesh:
    assert len(jax.devices()) >= 8, "tests/conftest.py starts eight simulated devices"
    return jax.make_mesh(
        shape, MESH_AXES, axis_types=(AxisType.Auto,) * 4, devices=jax.devices()[: np.prod(shape)]
    )


def order_of(sequence: dict[str, np.ndarray]) -> np.ndarray:
    return document_order(sequence["segment_ids"], 4)


def stream(sequences, mesh: Mesh, spec=SPEC, **changes):
    def arranged(i: int):
        sequence = sequences[i]
        return sequence, order_of(sequence)

    arguments = dict(
        first_sequence=0,
        global_batch_size=8,
        gradient_accumulation_steps=2,
        seq_len=S,
        prefetch_steps=2,
    )
    return batches(arranged, sharding=NamedSharding(mesh, spec), **(arguments | changes))


def expected_step(sequences, step: int, first_sequence: int = 0) -> dict[str, np.ndarray]:
    """[2, 4, S] in the order of per-document sharding over 4, computed from the sequences alone."""
    built = [sequences[first_sequence + 8 * step + k] for k in range(8)]
    return {
        name: np.stack([sequence[name][order_of(sequence)] for sequence in built]).reshape(2, 4, S)
        for name in NAMES
    }


def assert_step(batch: dict[str, jax.Array], expected: dict[str, np.ndarray]) -> None:
    assert batch.keys() == expected.keys()
    for name, array in batch.items():
        assert array.dtype == expected[name].dtype
        np.testing.assert_array_equal(array, expected[name])
        for shard in array.addressable_shards:  # not only the global array
            np.testing.assert_array_equal(shard.data, expected[name][shard.index])


@pytest.mark.parametrize(
    "shape", [(1, 1, 4, 2), (2, 2, 2, 1), (2, 1, 4, 1), (1, 4, 1, 2), (1, 1, 3, 1), (1, 1, 1, 1)]
)
@pytest.mark.parametrize("prefetch_steps", [0, 3])
def test_batches_any_mesh_equal_sequences(train, shape: tuple[int, ...], prefetch_steps: int):
    batch_stream = stream(train, make_mesh(*shape), prefetch_steps=prefetch_steps)
    for step in range(3):
        batch = next(batch_stream)
        assert batch["tokens"].sharding.shard_shape((2, 4, S)) == (
            2,
            4 // (shape[0] * shape[1]),
            S // shape[2],
        )
        assert_step(batch, expected_step(train, step))


def test_batches_resumed_on_other_mesh_are_equal(train):
    mesh, other_mesh = make_mesh(2, 1, 2, 2), make_mesh(1, 2, 4, 1)
    uninterrupted = stream(train, mesh)
    steps = [next(uninterrupted) for _ in range(5)]
    resumed = stream(train, other_mesh, first_sequence=3 * 8)
    for step in (3, 4):
        assert_step(next(resumed), {name: np.asarray(array) for name, array in steps[step].items()})
    assert_step(
        next(stream(train, mesh, first_sequence=10**9)),
        expected_step(train, 0, first_sequence=10**9),
    )


def test_batches_each_sequence_is_built_once(train):
    class Counted:
        indices = []

        def __getitem__(self, i: int):
            self.indices.append(i)
            return train[i]

    batch_stream = stream(Counted(), make_mesh(1, 1, 4, 2), prefetch_steps=0)
    next(batch_stream), next(batch_stream)
    assert Counted.indices == list(range(16))


@pytest.mark.parametrize("end", ["close", "drop"])
def test_batches_ended_iterator_ends_threads(train, end: str):
    """They end soon: the sequences still to be prefetched, here 8,000, are not built."""

    class Slow:
        num_built = 0

        def __getitem__(self, i: int):
            # 8,000 take much longer than the test
            time.sleep(1e-3 if self.num_built < 100 else 0.1)
            self.num_built += 1
            return train[i]

    slow, earlier_threads = Slow(), set(threading.enumerate())
    batch_stream = stream(slow, make_mesh(1, 1, 4, 2), prefetch_steps=1000)
    next(batch_stream)
    new_threads = set(threading.enumerate()) - earlier_threads
    threads = [thread for thread in new_threads if thread.name.startswith(("grain", "place_batch"))]
    assert {thread.name[:5] for thread in threads} == {"grain", "place"}
    if end == "close":
        batch_stream.close()
    del batch_stream
    gc.collect()
    for thread in threads:
        thread.join(timeout=helpers.TIMEOUT_SECONDS)
    assert not any(thread.is_alive() for thread in threads)
    assert slow.num_built < 4000


def test_batches_error_in_sequence_reaches_caller():
    class Broken:
        def __getitem__(self, i: int):
            raise UserError(f"sequence {i} is missing")

    with pytest.raises(UserError, match="sequence 0 is missing") as error:
        next(stream(Broken(), make_mesh(1, 1, 4, 2)))
    shown = "".join(traceback.format_exception(error.value))
    assert "grain" not in shown.lower()


_PROCESS = """
import os, sys
from pathlib import Path
import jax, numpy as np
jax.distributed.initialize("127.0.0.1:" + sys.argv[2], num_processes=2, process_id=int(sys.argv[3]))
sys.path[:0] = [sys.argv[4]]
import test_loader as t
from jaxlc.data.sequences.packing import BalancedSequences, balanced_order, step_pairs
from tests.step.synthetic import small_config

class Counted:
    indices = set()
    def __getitem__(self, i):
        self.indices.add(i)
        return train[i]

config = t.make_config(Path(sys.argv[1]))
train = t.open_corpus(config).train  # both processes tokenize at the same time
for shape, num_sequences in (((2, 1, 4, 1), 4), ((1, 1, 8, 1), 8)):  # each its own sequences; each a half of all
    Counted.indices = set()
    settings = small_config(
        mesh=dict(data=2, context=4), attention=dict(document_mask=True), data=dict(seq_len=t.S),
        train=dict(global_batch_size=8, gradient_accumulation_steps=2, eval_sequences=2),
    )
    counted = Counted()
    counted.document_lengths = train.document_lengths
    batch = next(t.stream(BalancedSequences(counted, settings, 0), t.make_mesh(*shape), prefetch_steps=0))
    order = balanced_order(settings, step_pairs(train, settings, 0))
    assert sorted(order) == list(range(8)) != list(order), order
    expected = t.expected_step([train[i] for i in order], 0)
    assert len(Counted.indices) == num_sequences, Counted.indices
    for name, array in batch.items():
        assert len(array.addressable_shards) == 4
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(shard.data, expected[name][shard.index])
print("equal", train.store.fingerprint)
left_open = t.stream(train, t.make_mesh(2, 1, 4, 1), prefetch_steps=2)
next(left_open)
"""


def test_two_processes_share_cache_and_hold_their_shards(tmp_path: Path, monkeypatch):
    """Both tokenize the corpus at the same time. They end although a stream is left open, and
    although absl's flags are never parsed and the command line has a flag of its own, as in a
    notebook."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
    config = make_config(tmp_path)
    directory = str(Path(__file__).parent)
    command = [sys.executable, "-c", _PROCESS, str(tmp_path), str(helpers.free_port())]
    processes = [
        subprocess.Popen(
            [*command, str(i), directory, "--config=x.py"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    outputs = [process.communicate(timeout=helpers.TIMEOUT_SECONDS) for process in processes]
    fingerprint = open_corpus(config).train.store.fingerprint
    assert [stdout for stdout, _ in outputs] == [f"equal {fingerprint}\n"] * 2, outputs
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert len(list(Path(config.cache_dir).iterdir())) == 2  # the temporary files of both are gone
