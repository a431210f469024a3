import dataclasses
import gc
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxlc.config.schema import DataConfig
from jaxlc.core.axes import BATCH_AXES, CONTEXT, MESH_AXES
from jaxlc.core.errors import UserError
from jaxlc.data.loader import batches, open_corpus
from jaxlc.sharding.layout import zigzag_order

S = 24
NAMES = {"tokens", "targets", "loss_weights", "positions", "segment_ids"}
SPEC = PartitionSpec(None, BATCH_AXES, CONTEXT)


def make_config(directory: Path, **changes) -> DataConfig:
    """Forty documents of one line."""
    (directory / "docs").mkdir(exist_ok=True)
    for i in range(40):
        (directory / "docs" / f"{i}.txt").write_text(f"document {i} " * (i % 7 + 1))
    config = DataConfig(
        sources=(str(directory / "docs"),), cache_dir=str(directory / "cache"), seq_len=S, eval_fraction=0.25
    )
    return dataclasses.replace(config, **changes)


@pytest.fixture
def rows(tmp_path: Path):
    return open_corpus(make_config(tmp_path)).train


def make_mesh(*shape: int) -> Mesh:
    assert len(jax.devices()) >= 8, "tests/conftest.py starts eight simulated devices"
    return jax.make_mesh(shape, MESH_AXES, axis_types=(AxisType.Auto,) * 4, devices=jax.devices()[: np.prod(shape)])


def stream(rows, mesh: Mesh, spec=SPEC, **changes):
    arguments = dict(
        first_sequence=0,
        global_batch_size=8,
        gradient_accumulation_steps=2,
        sequence_order=zigzag_order(S, 4),
        prefetch_steps=2,
    )
    return batches(rows, sharding=NamedSharding(mesh, spec), **(arguments | changes))


def expected_step(rows, step: int, first_sequence: int = 0) -> dict[str, np.ndarray]:
    """[2, 4, S] in zigzag order over 4, from the rows alone."""
    built = [rows[first_sequence + 8 * step + k] for k in range(8)]
    return {name: np.stack([row[name][zigzag_order(S, 4)] for row in built]).reshape(2, 4, S) for name in NAMES}


def assert_step(batch: dict[str, jax.Array], expected: dict[str, np.ndarray]) -> None:
    assert batch.keys() == expected.keys()
    for name, array in batch.items():
        assert array.dtype == expected[name].dtype
        np.testing.assert_array_equal(array, expected[name])
        for shard in array.addressable_shards:  # each device holds its own piece, not only the array as a whole
            np.testing.assert_array_equal(shard.data, expected[name][shard.index])


@pytest.mark.parametrize("shape", [(1, 1, 4, 2), (2, 2, 2, 1), (2, 1, 4, 1), (1, 4, 1, 2), (1, 1, 3, 1), (1, 1, 1, 1)])
@pytest.mark.parametrize("prefetch_steps", [0, 3])
def test_sharded_arrays_are_the_rows(rows, shape: tuple[int, ...], prefetch_steps: int):
    batch_stream = stream(rows, make_mesh(*shape), prefetch_steps=prefetch_steps)
    for step in range(3):
        batch = next(batch_stream)
        assert batch["tokens"].sharding.shard_shape((2, 4, S)) == (2, 4 // (shape[0] * shape[1]), S // shape[2])
        assert_step(batch, expected_step(rows, step))


def test_resume_from_any_row(rows):
    mesh, other_mesh = make_mesh(2, 1, 2, 2), make_mesh(1, 2, 4, 1)
    whole = stream(rows, mesh)
    steps = [next(whole) for _ in range(5)]
    resumed = stream(rows, other_mesh, first_sequence=3 * 8)
    for step in (3, 4):
        assert_step(next(resumed), {name: np.asarray(array) for name, array in steps[step].items()})
    assert_step(next(stream(rows, mesh, first_sequence=10**9)), expected_step(rows, 0, first_sequence=10**9))


def test_a_process_builds_each_of_its_rows_once(rows):
    class Counted:
        asked = []

        def __getitem__(self, i: int):
            self.asked.append(i)
            return rows[i]

    batch_stream = stream(Counted(), make_mesh(1, 1, 4, 2), prefetch_steps=0)
    next(batch_stream), next(batch_stream)
    assert Counted.asked == list(range(16))


@pytest.mark.parametrize("end", ["close", "drop"])
def test_threads_end_with_the_iterator(rows, end: str):
    """And they end soon: what was still to be prefetched, here 8,000 rows, is not built."""

    class Slow:
        num_built = 0

        def __getitem__(self, i: int):
            time.sleep(1e-3)
            self.num_built += 1
            return rows[i]

    slow = Slow()
    batch_stream = stream(slow, make_mesh(1, 1, 4, 2), prefetch_steps=1000)
    next(batch_stream)
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("grain")]
    assert threads
    if end == "close":
        batch_stream.close()
    del batch_stream
    gc.collect()
    for thread in threads:
        thread.join(timeout=10)
    assert not any(thread.is_alive() for thread in threads)
    assert slow.num_built < 4000


def test_errors_of_a_row_reach_the_caller():
    class Broken:
        def __getitem__(self, i: int):
            raise UserError(f"row {i} is gone")

    with pytest.raises(UserError, match="row 0 is gone"):
        next(stream(Broken(), make_mesh(1, 1, 4, 2)))


def test_corpus_is_split_by_document(tmp_path: Path):
    corpus = open_corpus(make_config(tmp_path))
    train, heldout = set(corpus.train.document_ids), set(corpus.heldout.document_ids)
    assert not train & heldout and len(train | heldout) == 40 and 3 <= len(heldout) <= 20
    (tmp_path / "docs" / "new.txt").write_text("one more does not move the others")
    names = sorted(path.name for path in (tmp_path / "docs").iterdir())
    grown = open_corpus(make_config(tmp_path))
    old_ids = [d for d, name in enumerate(names) if name != "new.txt"]
    assert [old_ids.index(d) for d in grown.heldout.document_ids if d in old_ids] == sorted(heldout)


def test_heldout_rows_do_not_depend_on_the_seed(tmp_path: Path):
    one, two = (open_corpus(make_config(tmp_path, seed=seed)) for seed in (1, 2))
    assert (one.heldout[0]["tokens"] == two.heldout[one.heldout.num_sequences]["tokens"]).all()
    assert any((one.train[i]["tokens"] != two.train[i]["tokens"]).any() for i in range(3))


def test_fingerprint_changes_with_whatever_changes_the_rows(tmp_path: Path):
    configs = [{}, {"seed": 1}, {"seq_len": 32}, {"eval_fraction": 0.3}, {"prefetch_steps": 9}]
    fingerprints = [open_corpus(make_config(tmp_path, **changes)).fingerprint for changes in configs]
    assert len(set(fingerprints)) == 4 and fingerprints[0] == fingerprints[4]


@pytest.mark.parametrize("eval_fraction, counts", [(0.0, "40 documents to train on and 0"), (1.0, "0 documents to")])
def test_a_side_without_documents(tmp_path: Path, eval_fraction: float, counts: str):
    with pytest.raises(UserError, match=f"data.eval_fraction {eval_fraction} leaves {counts}"):
        open_corpus(make_config(tmp_path, eval_fraction=eval_fraction))


_PROCESS = """
import sys
from pathlib import Path
import jax, numpy as np
jax.distributed.initialize("127.0.0.1:" + sys.argv[2], num_processes=2, process_id=int(sys.argv[3]))
sys.path[:0] = [sys.argv[4]]
import test_loader as t

class Counted:
    asked = set()
    def __getitem__(self, i):
        self.asked.add(i)
        return rows[i]

rows = t.open_corpus(t.make_config(Path(sys.argv[1]))).train
for shape, num_sequences in (((2, 1, 4, 1), 4), ((1, 1, 8, 1), 8)):  # each its own rows; both a half of each row
    Counted.asked = set()
    order = t.zigzag_order(t.S, 4)
    batch = next(t.stream(Counted(), t.make_mesh(*shape), sequence_order=order, prefetch_steps=0))
    expected = t.expected_step(rows, 0)
    assert len(Counted.asked) == num_sequences, Counted.asked
    for name, array in batch.items():
        assert len(array.addressable_shards) == 4
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(shard.data, expected[name][shard.index])
print("equal")
"""


def test_two_processes_hold_the_pieces_of_one(tmp_path: Path, monkeypatch):
    import portpicker

    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
    open_corpus(make_config(tmp_path))
    here = str(Path(__file__).parent)
    command = [sys.executable, "-c", _PROCESS, str(tmp_path), str(portpicker.pick_unused_port())]
    processes = [
        subprocess.Popen([*command, str(i), here], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for i in range(2)
    ]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [stdout for stdout, _ in outputs] == ["equal\n"] * 2, outputs


_UNPARSED_FLAGS = """
import sys
from pathlib import Path
import test_loader as t
batch = next(t.stream(t.open_corpus(t.make_config(Path(sys.argv[1]))).train, t.make_mesh(1, 1, 4, 2)))
print(batch["tokens"].shape)
"""


def test_a_notebook_needs_no_flags_and_ends_in_time(tmp_path: Path, monkeypatch):
    """absl's flags are never parsed here, the command line has a flag of its own, the stream is left open."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parent}:{Path(__file__).parents[2]}")
    command = [sys.executable, "-c", _UNPARSED_FLAGS, str(tmp_path), "--config=x.py"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (0, "(2, 4, 24)\n"), result.stderr
