"""Runs `jaxlc train` in this process and in others, with a model small enough for tests."""

import contextlib
import io
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from jaxlc.checkpoints.files import CHECKPOINTS_DIRECTORY
from jaxlc.checkpoints.pretrained import keep_description, load_pretrained
from jaxlc.checkpoints.save import Checkpoints
from jaxlc.cli.training import train as run_training
from jaxlc.config import Config, defaults, load, to_dict
from jaxlc.config.command_line import run_main
from jaxlc.sharding.mesh import make_mesh
from jaxlc.step.step import TrainStep, build_step
from jaxlc.train.reports import run_report
from jaxlc.train.reports.metrics import METRICS_FILE, is_timing, read_rows
from tests import environment, helpers

ROOT = Path(__file__).parents[2]
_CONFIG = """
from jaxlc.config import defaults

def get_config(variant):
    config = defaults()
    config.model.update(vocab_size=257, num_layers=2, model_dim=32, num_heads=4, num_kv_heads=2, head_dim=8, ffn_dim=64)
    config.mesh.update(context=4, tensor=2)
    config.runtime.simulated_devices = 8
    config.data.sources = ({corpus!r},)
    config.data.cache_dir = {cache!r}
    config.data.seq_len = 128
    config.data.eval_fraction = 0.3
    config.optimizer.learning_rate = 3e-3
    config.train.update(steps=12, global_batch_size=2, eval_every_steps=6, eval_sequences=2, checkpoint_every_steps=4)
    return config
"""


# A run that ends soon may end before the test has sent its signal.
_SLOW_CONFIG = """
import time
from jaxlc.train.reports.metrics import MetricsLog

_write = MetricsLog.write

def _write_slowly(self, **row):
    _write(self, **row)
    time.sleep(0.5)

MetricsLog.write = _write_slowly
"""


def share_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes runs with equal programs in this process use one compiled step and one compiled
    evaluation.

    A run in another process compiles its own, and so do the runs of test_compiled_step_reuse.py.
    """
    for name in ("compile", "compile_evaluation"):
        monkeypatch.setattr(TrainStep, name, _compiled_once(getattr(TrainStep, name)))


def without_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes runs in this process and its children write no plots. test_final_report.py and test_run_api.py have
    those of a run.
    """
    monkeypatch.setattr(run_report, "write_plots", lambda *_: [])
    monkeypatch.setenv("JAXLC_WITHOUT_MATPLOTLIB", "1")


def _compiled_once(method):
    """`method` of `TrainStep`, called once for each mesh, batch, custom model and settings of the
    program.
    """
    programs = {}

    def compiled(step: TrainStep) -> jax.stages.Compiled:
        settings = to_dict(step.config)
        for section in ("data", "evals", "rollouts"):
            del settings[section]
        for name in ("checkpoint_every_steps", "eval_every_steps", "nonfinite"):
            del settings["train"][name]
        for name in ("init_from", "preset"):
            del settings["model"][name]
        del settings["lora"]["init_from"]
        key = (
            repr(settings),
            repr(step.abstract_batch),
            step.mesh,
            step.model,
            step.token_loss,
            step.policy_loss,
            step.custom_optimizer,
        )
        if key not in programs:
            programs[key] = method(step)
        return programs[key]

    return compiled


def save_step_0(config, workdir: Path) -> Config:
    """Writes a checkpoint of the initial parameters as if a run had made it, without training."""
    config = load(config)
    step = build_step(config, make_mesh(config.mesh, jax.devices()[: config.mesh.num_devices]))
    params = load_pretrained(step)[0] if config.model.init_from else None
    checkpoints = Checkpoints(workdir / CHECKPOINTS_DIRECTORY, keep=1, warn=print)
    checkpoints.save(
        1, step.init(params), dict(step=1, next_row=0, corpus="", config=to_dict(config))
    )
    checkpoints.close()
    if config.model.init_from:
        keep_description(config.model, workdir)
    return config


def write_untrained_run(directory: Path, seed: int = 0) -> Path:
    """Writes a run of a small model on bytes, with the checkpoint 1 of its initial parameters;
    returns `directory`.
    """
    config = defaults()
    config.model.update(
        vocab_size=257,
        num_layers=2,
        model_dim=16,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        ffn_dim=32,
    )
    config.mesh.context = config.runtime.simulated_devices = 2
    config.data.seq_len, config.train.seed = 64, seed
    save_step_0(config, directory)
    return directory


def write_config(directory: Path) -> Path:
    """Writes a config file and its corpus, sixteen documents of a few hundred bytes, to
    `directory`.
    """
    corpus = directory / "corpus"
    corpus.mkdir()
    for i in range(16):
        text = " ".join(f"{word} {(i * word) % 17}" for word in range(20 + 11 * i))
        (corpus / f"document{i}.txt").write_text(text)
    path = directory / "config.py"
    path.write_text(_CONFIG.format(corpus=str(corpus), cache=str(directory / "cache")))
    return path


def write_slow_config(config: Path) -> Path:
    """Writes the same config to a file that makes a run in another process wait half a second after
    each row.
    """
    path = config.with_name("slow.py")
    path.write_text(_SLOW_CONFIG + config.read_text())
    return path


def _arguments(config: Path | str, workdir: Path, overrides: dict) -> list[str]:
    settings = [f"--config.{name.replace('__', '.')}={value}" for name, value in overrides.items()]
    return [f"--config={config}", f"--workdir={workdir}", *settings]


def start(config: Path | str, workdir: Path, **overrides) -> subprocess.Popen:
    """Starts a run in another process, which writes no plots; `mesh__context=2` is
    --config.mesh.context=2.
    """
    command = [sys.executable, "-m", "jaxlc.train", *_arguments(config, workdir, overrides)]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment.for_user(JAXLC_WITHOUT_MATPLOTLIB="1"),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def finish(run: subprocess.Popen, status: int = 0) -> str:
    """Waits for a run, checks its exit status, and returns what it printed."""
    try:
        output, _ = run.communicate(timeout=helpers.TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        run.kill()
        raise AssertionError(f"timeout:\n{run.communicate()[0]}") from None
    assert run.returncode == status, output
    return output


def train_elsewhere(config: Path | str, workdir: Path, status: int = 0, **overrides) -> str:
    """Runs from start to end in another process, as for another number of devices, and returns the
    output.
    """
    return finish(start(config, workdir, **overrides), status)


def train(config: Path | str, workdir: Path, status: int = 0, **overrides) -> str:
    """Runs from start to end in this process, which takes a third of the time, and returns the
    output.
    """
    with contextlib.redirect_stdout(io.StringIO()) as output, contextlib.redirect_stderr(output):
        exit_status = run_main(
            run_training, ["jaxlc train", *_arguments(config, workdir, overrides)]
        )
    assert exit_status == status, output.getvalue()
    return output.getvalue()


def start_pair(config: Path, workdir: Path, **overrides) -> list[subprocess.Popen]:
    """Starts a run of two processes with half of the devices each; the context axis spans both."""
    address = f"127.0.0.1:{helpers.free_port()}"
    processes = dict(runtime__num_processes=2, runtime__coordinator_address=address)
    return [
        start(config, workdir, **processes, runtime__process_id=i, **overrides) for i in range(2)
    ]


def damage(checkpoint: Path) -> None:
    """Truncates the files of its arrays."""
    for file in (checkpoint / "state").rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def wait_until(condition, run: subprocess.Popen) -> None:
    """Waits for a condition while a run continues."""
    helpers.wait_until(condition, process=run)


def rows(workdir: Path) -> list[dict]:
    """The rows of metrics.jsonl without their timings."""
    return [
        {k: v for k, v in row.items() if not is_timing(k)}
        for row in read_rows(workdir / METRICS_FILE)
    ]


def step_of(workdir: Path) -> int:
    """The step of the last complete row, 0 before the first; safe while the run writes."""
    path = workdir / METRICS_FILE
    return max((row["step"] for row in read_rows(path)), default=0) if path.exists() else 0
