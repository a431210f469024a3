"""Training states are restored on other meshes and by other numbers of processes, bitwise."""

import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxlc.checkpoints.restore import RestoreTarget
from jaxlc.checkpoints.save import Checkpoints
from jaxlc.config import defaults, load, to_dict
from jaxlc.sharding.mesh import make_mesh
from jaxlc.step.step import TrainStep, build_step
from tests import helpers
from tests.checkpoints.test_checkpoint import start

pytestmark = pytest.mark.jax_version


def make_step(**mesh: int) -> TrainStep:
    config = defaults()
    config.model.update(
        vocab_size=256,
        num_layers=2,
        model_dim=32,
        num_heads=4,
        num_kv_heads=4,
        head_dim=8,
        ffn_dim=64,
    )
    config.data.seq_len = 64
    config.mesh.update(mesh)
    config.train.global_batch_size = config.train.eval_sequences = 8
    loaded = load(config)
    return build_step(loaded, make_mesh(loaded.mesh, jax.devices()[: loaded.mesh.num_devices]))


def values(state) -> list[np.ndarray]:
    is_key = lambda x: jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key)
    return [np.asarray(jax.random.key_data(x) if is_key(x) else x) for x in jax.tree.leaves(state)]


def test_state_restored_on_other_meshes_is_bitwise_equal(tmp_path):
    """From context to fsdp to tensor to one device, each from the checkpoint that the mesh before
    it has saved.
    """
    steps = [make_step(context=8), make_step(fsdp=8), make_step(tensor=4, context=2), make_step()]
    state = steps[0].init()
    expected = values(state)
    for number, step in enumerate(steps, 1):
        checkpoints = Checkpoints(tmp_path, keep=1, warn=pytest.fail)
        if number > 1:
            target = RestoreTarget(step.abstract_state, to_dict(step.config)["model"])
            state, _ = checkpoints.restore_latest(lambda _, target=target: target)
            for got, wanted in zip(values(state), expected, strict=True):
                np.testing.assert_array_equal(got, wanted)
            [*_, last] = jax.tree.leaves(state.params)
            assert len(last.sharding.device_set) == step.config.mesh.num_devices
        checkpoints.save(number, state, dict(step=number, config=to_dict(step.config)))
        checkpoints.close()


PROCESS = """
import sys
from pathlib import Path
directory, port, num_processes, process_id = Path(sys.argv[1]), *map(int, sys.argv[2:])
import jax
if num_processes > 1:
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=num_processes, process_id=process_id)
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxlc.checkpoints.save import Checkpoints
from jaxlc.checkpoints.restore import RestoreTarget

devices = np.array(jax.devices())
mesh = Mesh(devices.reshape(-1, 2), ("fsdp", "context"))
sharding = NamedSharding(mesh, PartitionSpec(("fsdp", "context")))
value = np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32)
checkpoints = Checkpoints(directory, keep=3, warn=lambda text: print("WARNED", text))
abstract = dict(x=jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding))
restored = checkpoints.restore_latest(lambda _: RestoreTarget(abstract, dict(vocab_size=61)))
if restored is None:
    state = dict(x=jax.make_array_from_callback(value.shape, sharding, lambda index: value[index]))
else:
    state, _ = restored
for shard in state["x"].addressable_shards:
    np.testing.assert_array_equal(np.asarray(shard.data), value[shard.index])
checkpoints.save(len(checkpoints.steps()) + 1, state, dict(config=dict(model=dict(vocab_size=61))))
checkpoints.close()
print("STEPS", checkpoints.steps())
"""


def run(directory: Path, num_processes: int, devices_per_process: int) -> None:
    """Restores the latest checkpoint, if there is one, compares it, and saves the next."""
    port = helpers.free_port()
    processes: list[subprocess.Popen] = [
        start(
            PROCESS,
            str(directory),
            str(port),
            str(num_processes),
            str(i),
            devices=devices_per_process,
        )
        for i in range(num_processes)
    ]
    for process in processes:
        output, errors = process.communicate(timeout=helpers.TIMEOUT_SECONDS)
        assert process.returncode == 0, errors
        assert "WARNED" not in output and "STEPS" in output


@pytest.mark.heavy
def test_state_of_two_processes_is_restored_by_four_and_by_one(tmp_path, monkeypatch, capsys):
    """The one is this process, with eight devices."""
    for num_processes, devices in ((2, 2), (4, 1)):
        run(tmp_path, num_processes, devices)
    monkeypatch.setattr(sys, "argv", ["-c", str(tmp_path), "0", "1", "0"])
    exec(PROCESS, {})
    assert capsys.readouterr().out == "STEPS [1, 2, 3]\n"
