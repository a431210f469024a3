"""Part save: the real training loop, a run that is stopped and resumed, and checkpoints of host
state.
"""

import functools
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import jax

from benchmarks.first_contact.rows import Row
from benchmarks.first_contact.sizes import Sizes
from benchmarks.first_contact.step_rows import step_config
from jaxlc.checkpoints.files import CHECKPOINTS_DIRECTORY
from jaxlc.checkpoints.restore import RestoreTarget
from jaxlc.checkpoints.save import Checkpoints
from jaxlc.config import to_dict
from jaxlc.runtime.start import start
from jaxlc.sharding.mesh import make_mesh
from jaxlc.step.state import bytes_per_device
from jaxlc.step.step import build_step
from jaxlc.train.reports.metrics import METRICS_FILE, read_rows
from jaxlc.train.stage import prepare_workdir

ROOT = Path(__file__).parents[2]
_STOPPED = 143  # exit status after SIGTERM
_POLL_SECONDS = 0.02


def save_rows(sizes: Sizes) -> Iterator[Row]:
    for steps in sizes.log_every_steps:
        measure = functools.partial(_loop, sizes, steps)
        yield Row(labels=dict(name="loop", log_every_steps=steps), measure=measure, seconds=90)
    yield Row(labels=dict(name="resume"), measure=functools.partial(_resume, sizes), seconds=150)
    yield Row(labels=dict(name="checkpoint", preset=sizes.large_preset), measure=functools.partial(_checkpoint, sizes),
              seconds=240, environment=dict(XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB="100"))  # fmt: skip


def _start(sizes: Sizes, workdir: Path, *overrides: str) -> subprocess.Popen:
    command = [
        sys.executable,
        "-m",
        "jaxlc.train",
        "--config=configs/quickstart.py",
        f"--workdir={workdir}",
    ]
    command += [
        f"--config.train.steps={sizes.loop_steps}",
        f"--config.data.cache_dir={workdir.parent / 'corpus'}",
    ]
    command += [*sizes.loop_overrides, *overrides]
    return subprocess.Popen(
        command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def _finish(run: subprocess.Popen, status: int = 0) -> str:
    output, _ = run.communicate()
    if run.returncode != status:
        raise RuntimeError(f"exit status {run.returncode}: {output[-500:]}")
    return output


def _losses(workdir: Path) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in read_rows(workdir / METRICS_FILE) if "loss" in row}


def _loop(sizes: Sizes, log_every_steps: int) -> dict:
    with tempfile.TemporaryDirectory() as directory:
        workdir = Path(directory) / "run"
        _finish(_start(sizes, workdir, f"--config.train.log_every_steps={log_every_steps}"))
        rows = [row for row in read_rows(workdir / METRICS_FILE) if "step_seconds" in row]
        late = [row["step_seconds"] for row in rows if row["step"] > sizes.loop_steps // 2]
        return dict(step_seconds=statistics.median(late), losses=_some(_losses(workdir)))


def _resume(sizes: Sizes) -> dict:
    """A run that SIGTERM stops, resumed, next to a run without interruption."""
    with tempfile.TemporaryDirectory() as directory:
        whole, parts = Path(directory) / "whole", Path(directory) / "parts"
        _finish(_start(sizes, whole))
        run = _start(sizes, parts)
        while run.poll() is None and max(_losses_so_far(parts), default=0) < sizes.loop_steps // 2:
            time.sleep(_POLL_SECONDS)
        start_seconds = time.perf_counter()
        run.send_signal(signal.SIGTERM)
        _finish(run, _STOPPED)
        stop_seconds, stopped_after = time.perf_counter() - start_seconds, max(_losses(parts))
        _finish(_start(sizes, parts))
        expected, actual = _losses(whole), _losses(parts)
        difference = max(abs(actual[step] - expected[step]) for step in expected)
    return dict(
        stopped_after=stopped_after,
        stop_seconds=stop_seconds,
        largest_loss_difference=difference,
        losses=_some(expected),
        passed=actual.keys() == expected.keys() and difference < 2e-2,
    )


def _some(losses: dict[int, float]) -> dict[int, float]:
    """About 20 of the losses, to compare with those of another device."""
    return {step: losses[step] for step in sorted(losses)[:: max(1, len(losses) // 20)]}


def _losses_so_far(workdir: Path) -> dict[int, float]:
    return _losses(workdir) if (workdir / METRICS_FILE).exists() else {}


def _checkpoint(sizes: Sizes) -> dict:
    """Seconds of saving and restoring a state in host memory, and the largest resident memory of
    the process.
    """
    memory = dict(parameters="host", optimizer="host", remat="full", offload=("residual",))
    config = step_config(sizes, sizes.large_preset, sizes.step_tokens[0], memory=memory)
    start(config.runtime)
    step = build_step(config, make_mesh(config.mesh, jax.devices()[:1]))
    directory = prepare_workdir(tempfile.mkdtemp()) / CHECKPOINTS_DIRECTORY
    checkpoints = Checkpoints(directory, keep=1, warn=print)
    model = to_dict(config)["model"]
    try:
        times = [time.perf_counter()]
        state = jax.block_until_ready(step.init())
        times.append(time.perf_counter())
        checkpoints.save(0, state, dict(step=0, next_row=0, corpus="", config=to_dict(config)))
        times.append(time.perf_counter())
        checkpoints.wait()
        times.append(time.perf_counter())
        state = None
        state, _ = checkpoints.restore_latest(lambda _: RestoreTarget(step.abstract_state, model))
        jax.block_until_ready(state)
        times.append(time.perf_counter())
        checkpoints.close()
    finally:
        shutil.rmtree(directory.parent, ignore_errors=True)
    seconds = [end - start for start, end in zip(times, times[1:])]
    return dict(
        zip(("init_seconds", "save_seconds", "write_seconds", "restore_seconds"), seconds),
        state_bytes=bytes_per_device(step.abstract_state),
        largest_resident_bytes=1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    )
