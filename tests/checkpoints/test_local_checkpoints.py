"""Local checkpoints: every process writes its own parts of the arrays, as if to a disk of its
machine.
"""

import shutil
from pathlib import Path

import jax
import pytest

from jaxlc.checkpoints.files import committed_steps
from jaxlc.checkpoints.restore import RestoreTarget
from jaxlc.checkpoints.save import Checkpoints
from tests import helpers
from tests.checkpoints.test_checkpoint import (
    MODEL,
    abstract,
    assert_same,
    make_mesh,
    make_state,
    meta_of,
    start,
)

pytestmark = pytest.mark.jax_version


class LocalRun:
    """A run on one mesh, with a shared and a local directory of checkpoints."""

    def __init__(self, path: Path, *mesh: int):
        self.shared, self.local, self.mesh, self.warnings = (
            path / "shared",
            path / "local",
            make_mesh(*mesh),
            [],
        )
        self.checkpoints = Checkpoints(
            self.shared, keep=2, warn=self.warnings.append, local_directory=self.local
        )

    def save(self, step: int, *, is_local: bool) -> None:
        self.checkpoints.save(step, make_state(step, self.mesh), meta_of(step), is_local=is_local)
        self.checkpoints.wait()

    def restored_step(self) -> int:
        """The step of the restored state, which is compared with the saved one."""
        abstract_state = abstract(make_state(0, self.mesh), self.mesh)
        state, meta = self.checkpoints.restore_latest(
            lambda _: RestoreTarget(abstract_state, MODEL)
        )
        assert meta == meta_of(meta["step"]) | ({"place": meta["place"]} if "place" in meta else {})
        assert_same(state, make_state(meta["step"], self.mesh))
        return meta["step"]

    def local_steps(self) -> list[int]:
        return committed_steps(self.local / "process-0")


def test_latest_of_shared_and_local_checkpoints_is_restored(tmp_path):
    run = LocalRun(tmp_path, 2, 4)
    run.save(1, is_local=False)
    for step in (2, 3, 4):
        run.save(step, is_local=True)
    # two local ones are kept
    assert run.checkpoints.steps() == [1, 3, 4] and run.local_steps() == [3, 4]
    assert LocalRun(tmp_path, 2, 4).restored_step() == 4
    run.save(5, is_local=False)
    run.save(5, is_local=True)  # has no effect
    assert run.local_steps() == [3, 4]
    assert LocalRun(tmp_path, 2, 4).restored_step() == 5
    assert not run.warnings


def test_local_checkpoint_of_another_mesh_is_deleted_and_the_shared_one_restored(tmp_path):
    run = LocalRun(tmp_path, 2, 4)
    run.save(1, is_local=False)
    run.save(2, is_local=True)
    other = LocalRun(tmp_path, 4, 2)
    assert other.restored_step() == 1 and other.local_steps() == []
    [warning] = other.warnings
    assert warning == (
        "the local checkpoint of step 2 is not used: another mesh, or another number of processes, has written it"
    )
    other.save(2, is_local=True)
    assert LocalRun(tmp_path, 4, 2).restored_step() == 2


def test_damaged_local_checkpoint_is_deleted_and_the_one_before_restored(tmp_path):
    run = LocalRun(tmp_path, 2, 4)
    run.save(1, is_local=False)
    for step in (2, 3):
        run.save(step, is_local=True)
    biggest = max(
        (run.local / "process-0/3/state").rglob("d/*"), key=lambda path: path.stat().st_size
    )
    biggest.write_bytes(bytes(byte ^ 1 for byte in biggest.read_bytes()))
    again = LocalRun(tmp_path, 2, 4)
    assert again.restored_step() == 2 and again.local_steps() == [2] and len(again.warnings) == 1


def test_new_run_deletes_local_checkpoints_and_the_end_of_a_run_too(tmp_path):
    run = LocalRun(tmp_path, 2, 4)
    run.save(1, is_local=False)
    run.save(2, is_local=True)
    run.checkpoints.close(is_done=True)
    assert run.local_steps() == [] and committed_steps(run.shared) == [1]


PROCESS = """
import sys
from pathlib import Path
directory, port, process_id, expected = Path(sys.argv[1]), *map(int, sys.argv[2:])
import jax
jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=process_id)
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxlc.checkpoints.save import Checkpoints
from jaxlc.checkpoints.restore import RestoreTarget

mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("fsdp", "context"))
values = dict(split=np.arange(512, dtype=np.float32).reshape(32, 16), copied=np.arange(7, dtype=np.float32))
specs = dict(split=PartitionSpec(("fsdp", "context")), copied=PartitionSpec())

def state_of(step):
    arrays = {}
    for name, value in values.items():
        sharding = NamedSharding(mesh, specs[name])
        arrays[name] = jax.make_array_from_callback(value.shape, sharding, lambda index: value[index] + step)
    return arrays

checkpoints = Checkpoints(directory / "shared", keep=2, warn=print, local_directory=directory / "local")
target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state_of(0))
restored = checkpoints.restore_latest(lambda _: RestoreTarget(target, dict(vocab_size=61)))
step = 0
if restored is not None:
    state, meta = restored
    step = meta["step"]
    for name, array in state.items():
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), values[name][shard.index] + step)
assert step == expected, step
for step in range(step + 1, step + 4):
    meta = dict(step=step, config=dict(model=dict(vocab_size=61)))
    checkpoints.save(step, state_of(step), meta, is_local=step % 4 > 0)
checkpoints.close()
"""


def run_processes(directory: Path, expected: int) -> None:
    """Restores step `expected`, if it is not 0, and saves the next three; every fourth is a shared
    one.
    """
    port = helpers.free_port()
    processes = [
        start(PROCESS, str(directory), str(port), str(i), str(expected), devices=2)
        for i in range(2)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=helpers.TIMEOUT_SECONDS)
        assert process.returncode == 0, errors


@pytest.mark.heavy
def test_local_checkpoint_counts_only_if_both_processes_have_it(tmp_path):
    run_processes(tmp_path, 0)  # local: 1 to 3, of which the latest two are kept
    shutil.rmtree(tmp_path / "local/process-1/3")
    run_processes(tmp_path, 2)  # local: 3 and 5; shared: 4
    assert committed_steps(tmp_path / "shared") == [4]
    for i in range(2):
        assert committed_steps(tmp_path / f"local/process-{i}") == [3, 5]
    shutil.rmtree(tmp_path / "local/process-0")  # another machine takes its place
    run_processes(tmp_path, 4)
    assert jax.process_count() == 1
