"""Kills a training run at random times and compares it with a run that is not disturbed: metrics and weights, bitwise.

    python scripts/kill_drill.py --config=extend_512k:mini --kills=20 --out=runs/kill_drill
    python scripts/kill_drill.py --all --kills=50

--all kills four runs in turn: quickstart, stages, LoRA and GRPO, which divide the kills among them. Kills are SIGKILLs
between steps, inside a save, at the borders of stages, and while the rollouts of the next step are made or awaited.
Further arguments, such as --config.train.z_loss=0.0, are passed to `jaxlc train`. Prints a log; the exit status is 1
if the runs differ.

With config.rollouts.source=files, --rollouts names a directory of files STEP.jsonl, such as that of a run with
source=model. Both runs get each file when they have trained the step before:

    python scripts/kill_drill.py --config=grpo_128k:mini --kills=10 --out=runs/model
    python scripts/kill_drill.py --config=grpo_128k:mini --kills=10 --out=runs/files \\
        --rollouts=runs/model/undisturbed/rollouts --config.rollouts.source=files --config.rollouts.prompts= \\
        --config.rollouts.reward= --config.rollouts.prompts_per_step=8 --config.rollouts.max_tokens=256

With config.rollouts.source=server, --server starts scripts/stand_in_server.py; every second kill also kills it, and a
new one has no adapters:

    python scripts/kill_drill.py --config=grpo_128k:mini --kills=5 --server --config.rollouts.source=server \\
        --config.rollouts.server_max_loras=4 --config.rollouts.lag=2
"""

import argparse
import contextlib
import datetime
import functools
import json
import platform
import random
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxlc.config import Stage
from jaxlc.config.command_line import parse
from jaxlc.train.reports.metrics import is_timing

# Runs of --all: the arguments of `jaxlc train`.
RUNS = {
    "quickstart": "--config=quickstart --config.train.steps=24 --config.train.checkpoint_every_steps=2"
    " --config.train.eval_every_steps=12",
    "stages": "--config=extend_512k:mini",
    "lora": "--config=lora_1m_1gpu:mini --config.train.steps=10 --config.train.checkpoint_every_steps=2",
    "grpo": "--config=grpo_128k:mini --config.train.steps=8 --config.train.checkpoint_every_steps=2",
}
_POLL_SECONDS = 0.001
_TIMEOUT_SECONDS = 600
_ROLLOUT_SECONDS = 0.5


@dataclass(frozen=True)
class Kill:
    """A SIGKILL of the run."""

    step: int
    # "step": after this step; "save": inside the first save from this step on; "border": as stages start; "rollouts":
    # after this step, before the rollouts of a later one are there, which are `ahead` steps after it
    place: str
    ahead: int = 1


def plan_kills(stages: Sequence[Stage], num_kills: int, seed: int) -> list[Kill]:
    """Kills in the order of their steps: about a quarter inside saves, a quarter at borders, and
    the rest at steps.

    Of runs with rollouts, half are before rollouts.
    """
    rng = random.Random(seed)
    borders, last_step = [stage.end_step for stage in stages[:-1]], stages[-1].end_step
    second, third = ("border" if borders else "step"), "step"
    if stages[0].config.rollouts.source:
        second = third = "rollouts"
    places = [("save", second, third, "step")[i % 4] for i in range(num_kills)]
    ahead = 1 + stages[0].config.rollouts.lag
    kills = []
    for place in places:
        # Saves are short, so a kill may miss some: enough of them must follow.
        end = max(1, last_step // 2) if place == "save" else last_step - ahead
        step = rng.choice(borders) if place == "border" else rng.randint(1, max(1, end))
        kills.append(Kill(step, place, ahead))
    return sorted(kills, key=lambda kill: (kill.step, kill.place))


def drill(
    arguments: Sequence[str],
    out: Path,
    *,
    num_kills: int,
    seed: int,
    log: Callable[[str], None],
    undisturbed: Path | None = None,
    rollouts: Path | None = None,
    with_server: bool = False,
) -> bool:
    """Runs both runs and compares them; returns whether they are equal.

    Args:
      arguments: of `jaxlc train`, without --workdir.
      out: directory for the work directories, which must not contain earlier runs.
      log: called with each line of the log.
      undisturbed: work directory of a finished run. None: it is run here.
      rollouts: directory of the files that both runs get one by one.
      with_server: starts a stand-in for config.rollouts.server.
    """
    server = _Server() if with_server else None
    arguments = [*arguments, *([f"--config.rollouts.server={server.url}"] if server else [])]
    with server or contextlib.nullcontext():
        return _drill(arguments, out, num_kills, seed, log, undisturbed, rollouts, server)


def _drill(
    arguments: Sequence[str],
    out: Path,
    num_kills: int,
    seed: int,
    log: Callable[[str], None],
    undisturbed: Path | None,
    rollouts: Path | None,
    server: "_Server | None",
) -> bool:
    stages = parse(["jaxlc train", *arguments]).stages
    names = ", ".join(f"{stage.name or 'all'} to step {stage.end_step}" for stage in stages)
    log(
        f"{datetime.date.today()}: {num_kills} kills, seed {seed}; Python {platform.python_version()}"
    )
    log(f"jaxlc train {' '.join(arguments)}; stages: {names}")
    killed = out / "killed"
    if undisturbed is None:
        undisturbed = out / "undisturbed"
        with _fed(undisturbed, rollouts):
            _finish(arguments, undisturbed, out / "undisturbed.log")
    rng = random.Random(seed + 1)
    for number, kill in enumerate(plan_kills(stages, num_kills, seed), start=1):
        if server is not None and number % 2:
            server.restart()
        with _fed(killed, rollouts):
            log(
                f"kill {number:>2}: {_kill_once(kill, arguments, killed, out / f'killed{number}.log', rng)}"
            )
    with _fed(killed, rollouts):
        _finish(arguments, killed, out / "killed.log")
    problems = differences(undisturbed, killed, stages[-1].end_step)
    rows, files = len(_rows(undisturbed)), len(_rollouts(undisturbed))
    others = f", {files} files of rollouts" if files else ""
    log(
        "\n".join(problems)
        or f"equal: {rows} rows of metrics.jsonl{others}, and all arrays of the last checkpoint, bitwise"
    )
    return not problems


def differences(expected: Path, actual: Path, step: int) -> list[str]:
    """The differences of two work directories: metrics without timings, and arrays of the
    checkpoint of `step`.
    """
    from jaxlc.checkpoints.files import arrays_of

    problems = []
    rows, other_rows = _rows(expected), _rows(actual)
    if rows != other_rows:
        wrong = [pair for pair in zip(rows, other_rows) if pair[0] != pair[1]]
        problems.append(
            f"metrics differ: {len(rows)} and {len(other_rows)} rows, first difference {wrong[:1]}"
        )
    if _rollouts(expected) != _rollouts(actual):
        problems.append("the files of rollouts differ")
    arrays, other_arrays = (
        dict(arrays_of(run / "checkpoints" / str(step))) for run in (expected, actual)
    )
    if arrays.keys() != other_arrays.keys():
        problems.append("the checkpoints have different arrays")
    else:
        for name, array in arrays.items():
            if array.tobytes() != other_arrays[name].tobytes():
                problems.append(f"array {name} differs")
    return problems


def _kill_once(
    kill: Kill, arguments: Sequence[str], workdir: Path, log_path: Path, rng: random.Random
) -> str:
    """Starts the run, kills it, and returns a description of the kill."""
    checkpoints = workdir / "checkpoints"
    old_saves = set(_unfinished_saves(checkpoints))
    process = _start(arguments, workdir, log_path)
    start_seconds = time.monotonic()

    def is_due() -> bool:
        if kill.place == "save":
            return any(
                save not in old_saves and _step_of(save) >= kill.step
                for save in _unfinished_saves(checkpoints)
            )
        if kill.place == "border":
            return f"starts from the checkpoint of step {kill.step}\n" in log_path.read_text()
        if kill.place == "rollouts":
            step = _last_step(workdir)
            later = str(step + kill.ahead)
            return step >= kill.step and later not in map(_stem, _rollouts(workdir))
        return _last_step(workdir) >= kill.step

    while not is_due():
        # the run removes them, and may use their names again
        old_saves &= set(_unfinished_saves(checkpoints))
        if process.poll() is not None:
            raise RuntimeError(f"the run ended before {kill}: {log_path.read_text()[-2000:]}")
        if time.monotonic() > start_seconds + _TIMEOUT_SECONDS:
            process.kill()
            raise RuntimeError(f"{kill} did not happen in {_TIMEOUT_SECONDS} s")
        time.sleep(_POLL_SECONDS)
    if kill.place != "save":
        time.sleep(rng.uniform(0.0, 0.05))
    process.kill()
    process.wait()
    place = dict(
        save="inside a save from step", border="at the border of step", step="after step",
        rollouts="before the rollouts after step",
    )[kill.place]  # fmt: skip
    unfinished = [
        path.name.partition(".")[0]
        for path in _unfinished_saves(checkpoints)
        if path not in old_saves
    ]
    left = f", unfinished save of step {', '.join(unfinished)}" if unfinished else ""
    return f"{place} {kill.step}, last row of step {_last_step(workdir)}{left}"


def _finish(arguments: Sequence[str], workdir: Path, log_path: Path) -> None:
    """Runs to the end."""
    if _start(arguments, workdir, log_path).wait(_TIMEOUT_SECONDS):
        raise RuntimeError(f"the run failed: {log_path.read_text()[-2000:]}")


def _start(arguments: Sequence[str], workdir: Path, log_path: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "jaxlc.train", *arguments, f"--workdir={workdir}"]
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("w") as output:
        return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)


class _Server:
    """The stand-in in another process, on a free port."""

    def __init__(self):
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> "_Server":
        program = [sys.executable, "scripts/stand_in_server.py", f"--port={self._port}"]
        self._process = subprocess.Popen(
            [*program, "--delay_seconds=0.3"], cwd=Path(__file__).parents[1]
        )
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()

    def restart(self) -> None:
        self.__exit__()
        self.__enter__()


@contextlib.contextmanager
def _fed(workdir: Path, source: Path | None) -> Iterator[None]:
    """Copies the rollouts of `source` to the run meanwhile: those of a step, a moment after the row
    of the step before.

    Args:
      source: None: none.
    """
    ends = threading.Event()

    def feed(source: Path) -> None:
        while not ends.wait(0.05):
            step = _last_step(workdir) + 1
            path, made = workdir / "rollouts" / f"{step}.jsonl", source / f"{step}.jsonl"
            if made.exists() and not path.exists() and not ends.wait(_ROLLOUT_SECONDS):
                path.parent.mkdir(parents=True, exist_ok=True)
                partial = path.with_suffix(".partial")
                shutil.copyfile(made, partial)
                partial.rename(path)

    threads = [] if source is None else [threading.Thread(target=feed, args=[source])]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ends.set()
        for thread in threads:
            thread.join()


def _rollouts(workdir: Path) -> dict[str, bytes]:
    """The files of steps, which another name has until it is whole."""
    paths = (workdir / "rollouts").glob("[0-9]*")
    paths = (path for path in paths if path.suffix in (".jsonl", ".parquet"))
    return {path.name: path.read_bytes() for path in paths}


def _stem(name: str) -> str:
    return name.partition(".")[0]


def _unfinished_saves(checkpoints: Path) -> list[Path]:
    return list(checkpoints.glob("[0-9]*tmp*")) if checkpoints.is_dir() else []


def _step_of(save: Path) -> int:
    return int(save.name.partition(".")[0])


def _last_step(workdir: Path) -> int:
    """The step of the last complete row; 0 before the first."""
    path = workdir / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return json.loads(lines[-1])["step"] if lines else 0


def _rows(workdir: Path) -> list[dict]:
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    return [
        {name: value for name, value in json.loads(line).items() if not is_timing(name)}
        for line in lines
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20, help="number of kills (default: 20)")
    parser.add_argument(
        "--seed", type=int, default=0, help="random seed of their steps and places (default: 0)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/kill_drill"), help="directory of both runs"
    )
    parser.add_argument("--all", action="store_true", help=f"kill the runs {', '.join(RUNS)}")
    parser.add_argument(
        "--rollouts", type=Path, help="directory of rollouts, with config.rollouts.source=files"
    )
    parser.add_argument(
        "--server", action="store_true", help="start a stand-in, for config.rollouts.source=server"
    )
    flags, arguments = parser.parse_known_args()
    log = functools.partial(print, flush=True)
    runs = RUNS if flags.all else {"": ""}
    are_equal = []
    for number, (name, run_flags) in enumerate(runs.items()):
        num_kills = flags.kills // len(runs) + (number < flags.kills % len(runs))
        whole = [*run_flags.split(), *arguments]
        seed, out = flags.seed + number, flags.out.absolute() / name
        are_equal.append(
            drill(
                whole,
                out,
                num_kills=num_kills,
                seed=seed,
                log=log,
                rollouts=flags.rollouts,
                with_server=flags.server,
            )
        )
    return 0 if all(are_equal) else 1


if __name__ == "__main__":
    sys.exit(main())
