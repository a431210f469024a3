import errno
import gc
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxlc.checkpoints import files as checkpoint_files
from jaxlc.checkpoints import save as checkpoint
from jaxlc.checkpoints.restore import RestoreTarget, restore_params
from jaxlc.checkpoints.save import Checkpoints, Storage
from jaxlc.core.errors import UserError, WriteError
from jaxlc.train.stage import prepare_workdir
from tests import helpers

pytestmark = pytest.mark.jax_version

REPOSITORY = Path(__file__).parents[2]
MODEL = dict(preset="tiny", vocab_size=61, model_dim=16, rope=dict(theta=10_000.0))


class State(NamedTuple):
    step: jax.Array
    params: dict
    opt_state: optax.OptState
    rng: jax.Array


def make_mesh(*shape: int) -> Mesh:
    devices = np.array(jax.devices()[: np.prod(shape)]).reshape(shape)
    return Mesh(devices, ("fsdp", "context"), axis_types=(AxisType.Auto,) * 2)


def make_state(step: int, mesh: Mesh, vocab_size: int = 62) -> State:
    """float32, bfloat16, int32, bool, a PRNG key and optax's own tuples; every leaf depends on
    `step`.
    """
    rng = np.random.default_rng(step)
    params = dict(
        embedding=rng.normal(size=(vocab_size, 256)).astype(np.float32),
        half=rng.normal(size=(16, 16)).astype(jnp.bfloat16),
        flags=rng.integers(2, size=16).astype(bool),
    )
    decay = dict(embedding=True, half=True, flags=False)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.masked(optax.scale_by_adam(), decay)
    )
    state = State(jnp.int32(step), params, optimizer.init(params), jax.random.key(step))
    return jax.tree.map(lambda x: jax.device_put(x, sharding_of(x, mesh)), state)


def sharding_of(x, mesh: Mesh) -> NamedSharding:
    is_split = np.ndim(x) == 2
    return NamedSharding(
        mesh, PartitionSpec(None, ("fsdp", "context")) if is_split else PartitionSpec()
    )


def abstract(state: State, mesh: Mesh) -> State:
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding_of(x, mesh)), state
    )


def meta_of(step: int, **model) -> dict:
    return dict(step=step, next_row=4 * step, corpus="a1b2", config=dict(model={**MODEL, **model}))


def assert_same(a: State, b: State) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)):
        assert x.dtype == y.dtype
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


class Run:
    """A directory with checkpoints, and the warnings of restoring."""

    def __init__(self, directory: Path, keep: int = 3):
        self.directory, self.keep, self.warnings = directory, keep, []
        self.mesh = make_mesh(2, 4)

    def save(self, *steps: int) -> None:
        checkpoints = self.open()
        for step in steps:
            checkpoints.save(step, make_state(step, self.mesh), meta_of(step))
        checkpoints.close()

    def open(self) -> Checkpoints:
        return Checkpoints(self.directory, keep=self.keep, warn=self.warnings.append)

    def restore(self, **model):
        checkpoints = self.open()
        abstract_state = abstract(make_state(0, self.mesh), self.mesh)
        try:
            return checkpoints.restore_latest(
                lambda _: RestoreTarget(abstract_state, {**MODEL, **model})
            )
        finally:
            checkpoints.close()

    def biggest_file(self, step: int) -> Path:
        files = (self.directory / str(step) / "state").rglob("d/*")  # files with array data
        return max(files, key=lambda path: path.stat().st_size)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A directory with the checkpoints of steps 10 and 20."""
    directory = tmp_path_factory.mktemp("saved")
    Run(directory).save(10, 20)
    return directory


@pytest.fixture
def run_with(saved, tmp_path) -> Callable[..., Run]:
    """Returns a run in `tmp_path` with copies of the checkpoints of some steps: a copy is faster
    than a save.
    """

    def copy(*steps: int) -> Run:
        for step in steps:
            shutil.copytree(saved / str(step), tmp_path / str(step))
        return Run(tmp_path)

    return copy


def truncate(run: Run, step: int) -> None:
    os.truncate(run.biggest_file(step), run.biggest_file(step).stat().st_size // 2)


def delete_arrays(run: Run, step: int) -> None:
    run.biggest_file(step).unlink()


def delete_manifest(run: Run, step: int) -> None:
    (run.directory / str(step) / "state" / "manifest.ocdbt").unlink()


def flip_a_bit(run: Run, step: int) -> None:
    file = run.biggest_file(step)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 64
    file.write_bytes(content)


def garble_meta(run: Run, step: int) -> None:
    (run.directory / str(step) / "meta" / "metadata").write_text('{"step": ')


def empty_everything(run: Run, step: int) -> None:
    shutil.rmtree(run.directory / str(step))
    (run.directory / str(step)).mkdir()


def change_meta(run: Run, step: int) -> None:
    """Changes a digit of next_row: still valid JSON, but other data."""
    path = run.directory / str(step) / "meta" / "metadata"
    path.write_text(path.read_text().replace('"next_row": ', '"next_row": 1'))


def store_nan(run: Run, step: int) -> None:
    """Saves the checkpoint again with a NaN, as a run of a custom model can."""
    shutil.rmtree(run.directory / str(step))
    checkpoints = Checkpoints(run.directory, keep=3, warn=pytest.fail, finite_params=False)
    checkpoints.save(step, with_nan(make_state(step, run.mesh)), meta_of(step))
    checkpoints.close()


def with_nan(state: State) -> State:
    return state._replace(
        params=state.params | dict(half=state.params["half"].at[3, 5].set(jnp.nan))
    )


DAMAGES = (
    truncate,
    delete_arrays,
    delete_manifest,
    flip_a_bit,
    garble_meta,
    change_meta,
    empty_everything,
    store_nan,
)


def test_restore_latest_returns_saved_state_and_meta(run_with):
    run = run_with(10)
    state, meta = run.restore()
    assert_same(state, make_state(10, run.mesh))
    assert meta == meta_of(10)
    assert run.warnings == []


@pytest.mark.parametrize("shape", [(8, 1), (1, 2), (1, 1)])
def test_restore_latest_on_another_mesh_returns_same_state(run_with, shape):
    run = run_with(10)
    mesh = make_mesh(*shape)
    checkpoints = run.open()
    state, _ = checkpoints.restore_latest(
        lambda _: RestoreTarget(abstract(make_state(0, mesh), mesh), MODEL)
    )
    checkpoints.close()
    assert_same(state, make_state(10, mesh))
    assert state.params["embedding"].sharding.mesh.shape == mesh.shape


def test_restore_latest_with_other_vocab_padding_resizes(run_with):
    run = run_with(10)
    for vocab_size in (61, 64):
        checkpoints = run.open()
        target = RestoreTarget(abstract(make_state(0, run.mesh, vocab_size), run.mesh), MODEL)
        state, _ = checkpoints.restore_latest(lambda _, target=target: target)
        checkpoints.close()
        saved = make_state(10, run.mesh)
        for restored, original in (
            (state.params["embedding"], saved.params["embedding"]),
            (
                state.opt_state[1].inner_state.mu["embedding"],
                saved.opt_state[1].inner_state.mu["embedding"],
            ),
        ):
            assert restored.shape == (vocab_size, 256)
            np.testing.assert_array_equal(np.asarray(restored)[:61], np.asarray(original)[:61])


def test_save_keeps_the_latest_checkpoints(tmp_path):
    run = Run(tmp_path / "new", keep=2)
    assert run.restore() is None
    run.save(1, 2, 3)
    assert run.open().steps() == [2, 3]


def test_save_keeps_every_nth_and_the_best_of_each_stage(tmp_path):
    """The second manager reads the losses of the checkpoints that the first one saved."""
    losses = {1: 3.0, 2: 1.0, 3: None, 4: 2.0, 5: 4.0, 6: 5.0, 7: 4.5, 8: 6.0}
    for steps in ((1, 2, 3, 4), (5, 6, 7, 8)):
        checkpoints = Checkpoints(tmp_path, keep=1, keep_every=3, keep_best=1, warn=pytest.fail)
        for step in steps:
            meta = meta_of(step) | dict(stage=dict(name="long" if step > 4 else ""))
            checkpoints.save(step, dict(x=jnp.ones(8)), meta)
            checkpoints.add_evaluation(step, eval_loss=losses[step])
        checkpoints.close()
    assert checkpoints.steps() == [2, 3, 5, 6, 8]


def test_failed_save_does_not_wait_for_other_processes(tmp_path, monkeypatch):
    """The others wait for its part of the checkpoint. Orbax calls the barrier again after an error."""
    waited, raised = [], []

    def save(error: Exception | None) -> None:
        try:
            try:
                if error is not None:
                    raise error
            finally:
                barrier(key="end", timeout_ms=1000)
        except OSError as caught:
            raised.append(caught)

    monkeypatch.setattr(
        ocp.multihost, "get_barrier_sync_fn", lambda: lambda **kwargs: waited.append(kwargs)
    )
    manager = Checkpoints(tmp_path, keep=1, warn=pytest.fail)._shared._manager
    barrier = manager._options.async_options.barrier_sync_fn
    for error in (None, full := OSError(28, "No space left on device")):
        thread = threading.Thread(target=save, args=(error,))
        thread.start()
        thread.join()
    assert raised == [full] and len(waited) == 1
    save(OSError())  # in the main thread, such as a save after an interrupt
    assert len(waited) == 2
    manager.close()


def test_write_may_take_longer_than_the_limit_of_orbax(tmp_path):
    """20 minutes by the time of day, after which each save of a large state would end the run."""
    manager = Checkpoints(tmp_path, keep=1, warn=pytest.fail)._shared._manager
    assert manager._options.async_options.timeout_secs == 24 * 3600
    manager.close()


def test_incomplete_checkpoints_are_ignored_and_removed(run_with, tmp_path):
    run = run_with(10)
    shutil.copytree(tmp_path / "10", tmp_path / "11.orbax-checkpoint-tmp")  # the temporary name
    checkpoints = run.open()
    assert checkpoints.steps() == [10]
    checkpoints.save(20, make_state(20, run.mesh), meta_of(20))
    checkpoints.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["10", "20"]


def test_save_of_saved_step_does_nothing(run_with):
    run = run_with(10)
    checkpoints = run.open()
    checkpoints.save(10, make_state(99, run.mesh), meta_of(99))
    checkpoints.close()
    assert_same(run.restore()[0], make_state(10, run.mesh))


def test_save_then_donation_keeps_saved_values(tmp_path):
    run = Run(tmp_path)
    overwrite = jax.jit(lambda x: x * 2 + 1, donate_argnums=0)
    big = jax.device_put(
        jnp.ones((1024, 16)), NamedSharding(run.mesh, PartitionSpec("fsdp", "context"))
    )
    target = jax.ShapeDtypeStruct(big.shape, big.dtype, sharding=big.sharding)
    checkpoints = run.open()
    checkpoints.save(1, dict(big=big), meta_of(1))
    for _ in range(20):
        big = overwrite(big)
    jax.block_until_ready(big)
    checkpoints.wait()
    restored, _ = checkpoints.restore_latest(lambda _: RestoreTarget(dict(big=target), MODEL))
    checkpoints.close()
    assert (np.asarray(restored["big"]) == 1).all()


@pytest.mark.parametrize("damage", DAMAGES)
def test_restore_latest_with_damage_uses_older_checkpoint(run_with, tmp_path, damage, monkeypatch):
    run = run_with(10, 20)
    damage(run, 20)
    printed = []  # tracebacks that Python would print
    monkeypatch.setattr(
        sys, "unraisablehook", lambda unraisable: printed.append(str(unraisable.exc_value))
    )

    state, meta = run.restore()
    gc.collect()
    assert [text for text in printed if "reading array" in text] == []
    assert_same(state, make_state(10, run.mesh))
    assert meta["next_row"] == 40
    [warning] = run.warnings
    assert str(tmp_path / "20") in warning and "step 10" in warning and "\n" not in warning

    assert run.open().steps() == [10]


def test_save_with_nan_in_a_parameter_raises_and_saves_nothing(run_with):
    run = run_with(10)
    checkpoints = run.open()
    with pytest.raises(
        UserError,
        match=r"params/half has NaN or infinite values after step 20.*checkpoints in .*: 10;",
    ):
        checkpoints.save(20, with_nan(make_state(20, run.mesh)), meta_of(20))
    infinite = make_state(20, run.mesh)
    infinite = infinite._replace(
        opt_state=jax.tree.map(lambda x: x / 0.0 if x.ndim else x, infinite.opt_state)
    )
    checkpoints.save(20, infinite, meta_of(20))  # moments may be infinite
    checkpoints.close()
    assert run.open().steps() == [10, 20]


def test_restore_params_with_nan_raises_their_name(run_with):
    run = run_with(10, 20)
    store_nan(run, 20)
    params = abstract(make_state(0, run.mesh), run.mesh).params
    with pytest.raises(
        UserError,
        match=r"step 20 .* \(array params/half has NaN or infinite values\); other .*: 10",
    ):
        restore_params(run.directory, 20, params, vocab_size=61)
    restore_params(run.directory, 20, params, vocab_size=61, finite_params=False)


@pytest.mark.parametrize("is_new_run", [False, True])
def test_save_after_damage_replaces_damaged_step(run_with, is_new_run):
    run = run_with(10, 20)
    truncate(run, 20)
    checkpoints = run.open()
    checkpoints.restore_latest(
        lambda _: RestoreTarget(abstract(make_state(0, run.mesh), run.mesh), MODEL)
    )
    if is_new_run:
        checkpoints.close()
        checkpoints = run.open()
    checkpoints.save(20, make_state(99, run.mesh), meta_of(20))
    checkpoints.close()
    assert checkpoints.steps() == [10, 20]
    assert_same(run.restore()[0], make_state(99, run.mesh))
    assert len(run.warnings) == 1


def test_restore_latest_with_only_damage_raises_and_keeps_files(run_with, tmp_path):
    run = run_with(10, 20)
    truncate(run, 10)
    delete_manifest(run, 20)
    with pytest.raises(UserError) as error:
        run.restore()
    assert str(tmp_path) in str(error.value) and "--workdir" in str(error.value)
    assert run.open().steps() == [10, 20]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (dict(model_dim=32), "config.model.model_dim=16, and this config has 32"),
        (dict(rope=dict(theta=5e5)), "rope.theta=10000.0, and this config has 500000.0"),
        (dict(new_setting=1), "new_setting=None, and this config has 1"),
        (
            dict(kinds=dict(full=dict(ffn_dim=8))),
            "kinds={}, and this config has {'full': {'ffn_dim': 8}}",
        ),
    ],
)
def test_restore_latest_with_other_model_raises(run_with, changed, message):
    run = run_with(10)
    truncate(run, 10)
    with pytest.raises(UserError, match=message) as error:
        run.restore(**changed)
    assert "--workdir" in str(error.value)


def test_restore_latest_with_other_preset_name_or_without_stored_kinds_works(run_with):
    assert run_with(10).restore(preset="renamed", kinds={}) is not None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda state, S: state._replace(params={**state.params, "half": S((16, 8))}),
            r"half has shape \(16, 16\)",
        ),
        (
            lambda state, S: state._replace(params={**state.params, "more": S((4,))}),
            "more has shape None",
        ),
        (lambda state, S: state._replace(opt_state=()), "opt_state/1"),
        (lambda state, S: state._replace(params={**state.params, "flags": S((17,))}), "flags"),
    ],
)
def test_restore_latest_with_other_arrays_raises(run_with, change, message):
    run = run_with(10)
    shape = lambda dims: jax.ShapeDtypeStruct(
        dims, jnp.float32, sharding=NamedSharding(run.mesh, PartitionSpec())
    )
    checkpoints = run.open()
    with pytest.raises(UserError, match=message):
        checkpoints.restore_latest(
            lambda _: RestoreTarget(
                change(abstract(make_state(0, run.mesh), run.mesh), shape), MODEL
            )
        )
    checkpoints.close()


def test_prepare_workdir_creates_directory_or_raises(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert prepare_workdir("runs/new") == tmp_path / "runs" / "new"
    assert {path.name for path in (tmp_path / "runs" / "new").iterdir()} == {
        "checkpoints",
        "metrics.jsonl",
    }
    (tmp_path / "file").touch()
    for unwritable in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/nowhere")):
        with pytest.raises(UserError, match=f"cannot write to {unwritable} .*--workdir"):
            prepare_workdir(unwritable)


def start(code: str, *arguments: str, devices: int) -> subprocess.Popen:
    environment = {**os.environ, "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    environment["PYTHONPATH"] = str(REPOSITORY)
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


SAVE_FOREVER = """
import itertools, sys
import jax, jax.numpy as jnp
from jaxlc.checkpoints.save import Checkpoints
from jaxlc.checkpoints.restore import RestoreTarget
checkpoints = Checkpoints(sys.argv[1], keep=2, warn=print)
for step in itertools.count(1):
    state = dict(big=jnp.full((256, 1024), step, jnp.float32), step=jnp.int32(step))
    checkpoints.save(step, state, dict(next_row=step, config=dict(model=dict(vocab_size=61))))
    print(step, flush=True)
"""


def test_kill_while_saving_loses_at_most_that_checkpoint(tmp_path):
    process = start(SAVE_FOREVER, str(tmp_path), devices=1)
    while (started := int(process.stdout.readline())) < 4:
        pass
    process.send_signal(signal.SIGKILL)
    # the last step that it printed
    started = max([started, *map(int, process.stdout.read().split())])
    process.communicate()

    warnings = []
    checkpoints = Checkpoints(tmp_path, keep=2, warn=warnings.append)
    everywhere = NamedSharding(make_mesh(1, 1), PartitionSpec())
    shapes = dict(
        big=jax.ShapeDtypeStruct((256, 1024), jnp.float32), step=jax.ShapeDtypeStruct((), jnp.int32)
    )
    target = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), shapes
    )
    state, meta = checkpoints.restore_latest(lambda _: RestoreTarget(target, dict(vocab_size=61)))
    step = int(state["step"])
    assert started - 1 <= step <= started + 1
    assert meta["next_row"] == step and (np.asarray(state["big"]) == step).all() and warnings == []
    checkpoints.save(step + 1, state, meta)
    checkpoints.close()
    assert [path.name for path in tmp_path.iterdir() if "tmp" in path.name] == []


TWO_PROCESSES = """
import os, sys
from pathlib import Path
from types import SimpleNamespace
directory, port, process_id = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
import jax
jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=process_id)
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.experimental import multihost_utils
from jaxlc.checkpoints.save import Checkpoints
from jaxlc.checkpoints.restore import RestoreTarget

mesh = Mesh(np.array(jax.devices()), ("fsdp",))
sharding = NamedSharding(mesh, PartitionSpec("fsdp"))
value = lambda step: np.arange(4096, dtype=np.float32) * step
make = lambda step: dict(x=jax.make_array_from_callback((4096,), sharding, lambda index: value(step)[index]))
checkpoints = Checkpoints(directory, keep=3, warn=lambda text: print("WARNED", text))
for step in (1, 2):
    checkpoints.save(step, make(step), dict(step=step, config=dict(model=dict(vocab_size=61))))
checkpoints.wait()
if process_id == 1:  # damage a file that only process 1 reads
    file = max((directory / "2/state/ocdbt.process_1/d").iterdir(), key=lambda path: path.stat().st_size)
    os.truncate(file, file.stat().st_size // 2)
multihost_utils.sync_global_devices("damaged")
target = dict(x=jax.ShapeDtypeStruct((4096,), np.float32, sharding=sharding))
state, meta = checkpoints.restore_latest(lambda _: RestoreTarget(target, dict(vocab_size=61)))
for shard in state["x"].addressable_shards:
    np.testing.assert_array_equal(np.asarray(shard.data), value(1)[shard.index])
checkpoints.save(2, make(2), dict(step=2, config=dict(model=dict(vocab_size=61))))
checkpoints.close()
print("RESTORED", meta["step"], checkpoints.steps())
"""


def test_two_processes_with_damage_use_same_older_checkpoint(tmp_path):
    port = str(helpers.free_port())
    processes = [start(TWO_PROCESSES, str(tmp_path), port, str(i), devices=2) for i in range(2)]
    for process in processes:
        output, errors = process.communicate(timeout=helpers.TIMEOUT_SECONDS)
        assert process.returncode == 0, errors
        assert "RESTORED 1 [1, 2]" in output
        assert output.count("WARNED") == 1

    sharding = NamedSharding(make_mesh(8, 1), PartitionSpec("fsdp"))
    checkpoints = Checkpoints(tmp_path, keep=3, warn=print)
    target = dict(x=jax.ShapeDtypeStruct((4096,), jnp.float32, sharding=sharding))
    state, _ = checkpoints.restore_latest(lambda _: RestoreTarget(target, dict(vocab_size=61)))
    checkpoints.close()
    np.testing.assert_array_equal(np.asarray(state["x"]), np.arange(4096, dtype=np.float32) * 2)


def test_save_to_a_read_only_directory_is_one_error_with_the_complete_checkpoints(
    tmp_path, monkeypatch
):
    """No warning precedes it."""
    checkpoints = Checkpoints(tmp_path, keep=1, warn=pytest.fail)
    checkpoints.save(1, dict(x=jnp.ones(8)), meta_of(1))
    checkpoints.wait()
    error = PermissionError(errno.EACCES, "Permission denied", str(tmp_path / "2"))
    monkeypatch.setattr(Storage, "wait", lambda _: raise_(error))
    with (
        pytest.raises(WriteError, match=r"\(Permission denied\); complete checkpoints there: 1;"),
        checkpoints.settled(),
    ):
        checkpoints.save(2, dict(x=jnp.ones(8)), meta_of(2))


def test_exception_waits_for_the_checkpoint_that_is_being_written(tmp_path, monkeypatch):
    """But not longer than a limit, and not after Ctrl-C."""
    warnings: list[str] = []
    checkpoints = Checkpoints(tmp_path, keep=3, warn=warnings.append)
    with pytest.raises(RuntimeError, match="evaluation"), checkpoints.settled():
        checkpoints.save(1, dict(x=jnp.ones(8)), meta_of(1))
        raise RuntimeError("evaluation")
    assert checkpoints.steps() == [1] and not warnings
    monkeypatch.setattr(Storage, "wait", lambda _: time.sleep(5))
    monkeypatch.setattr(checkpoint, "_SETTLE_SECONDS", 0.1)
    for error in (KeyboardInterrupt, SystemExit):
        with pytest.raises(error), checkpoints.settled():
            raise error
    assert warnings == ["warning: the last checkpoint was not saved: it was not complete after 0 s"]


def raise_(error: Exception) -> NoReturn:
    raise error


def test_quiet_saves_passes_other_errors_to_the_hook_before(monkeypatch):
    """Such as the hook of `jaxlc.interrupts`, which ends the process after Ctrl-C."""
    seen: list[str] = []
    monkeypatch.setattr(
        sys, "unraisablehook", lambda unraisable: seen.append(str(unraisable.exc_value))
    )
    for _ in range(2):
        checkpoint_files.quiet_saves()
    for text in ("Event loop is closed", "another error"):
        sys.unraisablehook(SimpleNamespace(exc_value=RuntimeError(text)))
    assert seen == ["another error"]
