"""Part long_run: `jaxlc train` with LoRA of Llama 3.1 8B at 262,144 tokens on one GPU, and at the
most tokens that host memory allows.

A row compiles the step, which fills the compilation cache, and has the plan; the next one runs it.
"""

import functools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from benchmarks.first_contact.loop_rows import ROOT
from benchmarks.first_contact.rows import Row
from benchmarks.first_contact.sizes import Sizes
from benchmarks.first_contact.step_rows import planned
from jaxlc.config import Config, load, read_config
from jaxlc.runtime.start import start
from jaxlc.sharding.mesh import make_mesh
from jaxlc.step.step import build_step
from jaxlc.train.reports.metrics import METRICS_FILE, read_rows

_HOST_SHARE = 0.85  # of the free host memory, for pinned activations
_POLL_SECONDS = 0.1
_PLANNED = dict(
    predicted=("step_seconds", "exposed_host_copy_seconds"),
    memory=("device_peak_bytes", "host_bytes_per_device"),
)
# `jaxlc train`, and the largest device memory that it used, as the last line.
_TRAIN = """
import json, sys
from jaxlc.cli.training import TrainFlags, train
from jaxlc.config.command_line import run_main
status = run_main(train, sys.argv, flags=TrainFlags)
import jax
stats = jax.devices()[0].memory_stats() or {}
print(json.dumps(dict(status=status, peak_bytes=stats.get("peak_bytes_in_use"))))
"""


def long_run_rows(sizes: Sizes) -> Iterator[Row]:
    for is_longest, steps, run_seconds in ((False, 2, 440), (True, 1, 520)):
        labels = dict(case="longest" if is_longest else "long run", steps=steps)
        for name, measure, seconds in (("compile", _compile, 240), ("run", _run, run_seconds)):
            measure = functools.partial(measure, sizes, is_longest, steps)
            yield Row(labels=labels | dict(name=name), measure=measure, seconds=seconds)


def _settings(sizes: Sizes, is_longest: bool, steps: int) -> dict[str, Any]:
    """The settings of a run that differ from `1m_1gpu:lora`."""
    settings = {
        "data.seq_len": sizes.long_run_tokens,
        "runtime.topology": "",
        "train.steps": steps,
        "train.eval_sequences": 0,
        "train.eval_every_steps": 0,
        "train.checkpoint_every_steps": 0,
        "train.log_every_steps": 1,
        **sizes.long_run_settings,
    }
    if is_longest:
        bytes_per_token = _host_bytes(_config(sizes, settings)) / sizes.long_run_tokens
        tile = _config(sizes, settings).memory.tile_tokens
        fits = _HOST_SHARE * _available_bytes() / bytes_per_token
        settings["data.seq_len"] = int(min(fits, sizes.longest_run_tokens)) // tile * tile
    return settings


def _config(sizes: Sizes, settings: dict[str, Any]) -> Config:
    config = read_config(sizes.long_run_config)
    config.update_from_flattened_dict(settings)
    return load(config)


def _host_bytes(config: Config) -> float:
    """Pinned bytes of the saved residual stream: one array of bf16 or float32 for each layer."""
    itemsize = 4 if config.precision.compute == "fp32" else 2
    model = config.model
    return config.data.seq_len * model.num_layers * model.model_dim * itemsize


def _compile(sizes: Sizes, is_longest: bool, steps: int) -> dict[str, Any]:
    """Fills the compilation cache; the memory of the compiled step, and its plan."""
    config = _config(sizes, _settings(sizes, is_longest, steps))
    start(config.runtime)
    start_seconds = time.perf_counter()
    stats = (
        build_step(config, make_mesh(config.mesh, jax.devices()[:1])).compile().memory_analysis()
    )
    values = dict(
        tokens=config.data.seq_len,
        compile_seconds=time.perf_counter() - start_seconds,
        device_bytes=stats.argument_size_in_bytes + stats.temp_size_in_bytes,
        host_bytes=stats.host_argument_size_in_bytes + stats.host_temp_size_in_bytes,
    )
    return values if sizes.is_dry_run else values | planned(config, **_PLANNED)


def _run(sizes: Sizes, is_longest: bool, steps: int) -> dict[str, Any]:
    """Runs `jaxlc train` in a process of its own.

    Returns:
      seconds_to_first_step: from the start of the process. step_seconds: of each step, as the run
      logs them. host_bytes: the largest decrease of the available memory of the machine.
    """
    settings = _settings(sizes, is_longest, steps)
    with tempfile.TemporaryDirectory() as directory:
        workdir = Path(directory) / "run"
        command = [sys.executable, "-c", _TRAIN, f"--config={sizes.long_run_config}"]
        command += [f"--workdir={workdir}", f"--config.data.cache_dir={directory}/corpus"]
        command += [f"--config.{name}={value}" for name, value in settings.items()]
        available, least = _available_bytes(), _available_bytes()
        start_seconds, first_seconds = time.perf_counter(), None
        with (Path(directory) / "log").open("w+") as log:
            process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
            while process.poll() is None:
                time.sleep(_POLL_SECONDS)
                least = min(least, _available_bytes())
                if first_seconds is None and _rows(workdir):
                    first_seconds = time.perf_counter() - start_seconds
            log.seek(0)
            lines = log.read().splitlines()
        if process.returncode:
            raise RuntimeError(f"exit status {process.returncode}: {' '.join(lines)[-500:]}")
        steps_of_run = _rows(workdir)
    return dict(
        tokens=settings["data.seq_len"],
        seconds_to_first_step=first_seconds,
        step_seconds=[row["step_seconds"] for row in steps_of_run],
        losses=[row["loss"] for row in steps_of_run],
        host_bytes=available - least,
        compiled=[line for line in lines if "compiled" in line or "pinned" in line],
        **json.loads(lines[-1]),
    )


def _rows(workdir: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl that have a step; none before the file is there."""
    path = workdir / METRICS_FILE
    return [row for row in read_rows(path) if "step_seconds" in row] if path.exists() else []


def _available_bytes() -> int:
    """MemAvailable of the machine."""
    (line,) = (x for x in Path("/proc/meminfo").read_text().splitlines() if "MemAvailable" in x)
    return 1024 * int(line.split()[1])
