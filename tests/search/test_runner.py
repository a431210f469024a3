"""The mesh sweep: its grid of points, one process per point, resuming, interrupting, and the
ranking.
"""

import csv
import json
import math
import os
import signal
import subprocess
import sys
from html import unescape
from pathlib import Path

import numpy as np
import pytest

from jaxlc.cli import main_of, planning
from jaxlc.cli.planning import SweepFlags
from jaxlc.config import Config, command_line, defaults, load, with_settings
from jaxlc.core import processes
from jaxlc.core import text as progress_lines
from jaxlc.core.errors import UserError
from jaxlc.search import ranking, runner
from jaxlc.search import ranking as results
from jaxlc.search.ranking import Ranking
from jaxlc.search.space import Point
from tests.helpers import TIMEOUT_SECONDS, record_figures, wait_until
from tests.plan.gpus import small_config
from tests.search import fakes

main = main_of("sweep")

ROOT = Path(__file__).parents[2]


def small(tmp_path, model: dict | None = None, **mesh) -> Config:
    config = defaults()
    config.model.update(model or {})
    config.mesh.update(mesh)
    config.data.update(seq_len=4096, cache_dir=str(tmp_path))
    config.train.update(global_batch_size=4, gradient_accumulation_steps=4)
    return load(config)


def grid(config: Config, num_devices: int, **flags: str) -> list[Point]:
    """The points of command-line flags."""
    values = [f"--{name}={value}" for name, value in flags.items()]
    parsed = command_line.parse(["sweep", "--config=quickstart", *values], flags=SweepFlags).flags
    return planning.grid(config, num_devices, parsed)


def three_points(tmp_path) -> list[Point]:
    """context x tensor: 1 x 4, 2 x 2, 4 x 1."""
    config = small(tmp_path)
    return grid(config, 4, axes="context,tensor")


ABOUT = dict(figures="estimated", topology="h100:1x4", model="tiny")


def test_directory_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write to .*file/runs .*: use another working"):
        runner.run([], fakes, about=ABOUT, out=tmp_path / "file" / "runs", num_workers=1)


def run(tmp_path, work, *, num_workers: int = 3, log=lambda line: None) -> list[dict]:
    points = three_points(tmp_path)
    return ranking.ranked(
        runner.run(points, work, about=ABOUT, out=tmp_path, num_workers=num_workers, log=log)
    )


def mesh_of(row: dict) -> tuple[int, int]:
    return row["context"], row["tensor"]


def written(tmp_path) -> list[dict]:
    return [json.loads(line) for line in (tmp_path / results.ROWS).read_text().splitlines()]


def interrupt(line: str) -> None:
    """Raises KeyboardInterrupt at the line of the first finished point."""
    if "1/3" in line:
        raise KeyboardInterrupt


def test_points_all_meshes_keep_microbatch_per_replica(tmp_path):
    config = small(tmp_path)
    all_points = grid(config, 4)
    meshes = [point.columns() for point in all_points]
    assert sorted((mesh["fsdp"], mesh["context"], mesh["tensor"]) for mesh in meshes) == [
        (1, 1, 4), (1, 2, 2), (1, 4, 1), (2, 1, 2), (2, 2, 1), (4, 1, 1)
    ]  # fmt: skip
    for point in all_points:
        config = point.checked()
        train, mesh = config.train, config.mesh
        assert (
            train.global_batch_size // train.gradient_accumulation_steps // (mesh.data * mesh.fsdp)
            == 1
        )
    overrides = all_points[-1].overrides
    assert (
        "--config.mesh.context=4 --config.mesh.tensor=1" in overrides
        and "gradient_accumulation_steps=4" in overrides
    )


def test_points_axis_not_listed_keeps_its_size(tmp_path):
    config = small(tmp_path, tensor=2)
    all_points = grid(config, 8, axes="context,data")
    assert {(p.config.mesh.context, p.config.mesh.data, p.config.mesh.tensor) for p in all_points} == {
        (1, 4, 2), (2, 2, 2), (4, 1, 2)
    }  # fmt: skip
    with pytest.raises(
        UserError,
        match="no mesh of 9 devices: --axes=context cannot complete data=1 x fsdp=1 x tensor=2",
    ):
        grid(config, 9, axes="context")
    # the advice of the error, and of the next one
    assert grid(config, 9, axes="context,data,tensor")
    with pytest.raises(UserError, match="no points: hybrid needs a context axis that splits"):
        grid(small(tmp_path), 2, axes="context", strategies="hybrid")
    assert grid(small(tmp_path), 2, axes="context", strategies="hybrid,ring")
    assert grid(small(tmp_path), 4, axes="context", strategies="hybrid")


def test_points_duplicates_counted_and_rejected_with_reason(tmp_path, capsys):
    config = small(tmp_path)
    all_points = grid(config, 8, axes="context,tensor", strategies="ring,hybrid")
    by_name = {(p.columns()["context"], p.columns()["strategy"]): p for p in all_points}
    # The duplicates: hybrid at context 1, where ring communicates nothing either, and at 2, which
    # has no divisor.
    assert set(by_name) == {
        (1, "ring"),
        (2, "ring"),
        (4, "ring"),
        (4, "hybrid"),
        (8, "ring"),
        (8, "hybrid"),
    }
    assert capsys.readouterr().err == "6 points; 2 duplicate configurations skipped\n"
    with pytest.raises(UserError, match=r"num_heads=4 is not divisible by config\.mesh\.tensor=8"):
        by_name[1, "ring"].checked()


@pytest.mark.parametrize("num_kv_heads, context, degree", [
    (8, 16, 8),
    (8, 8, 4),  # degree 8 would be ulysses
    (2, 8, 2),  # degree 4 would repeat KV heads
    (1, 8, 2),  # both repeat the KV head, degree 4 more often
])  # fmt: skip
def test_ulysses_degree_largest_without_repeated_kv_heads(tmp_path, num_kv_heads, context, degree):
    config = small(tmp_path, dict(num_heads=8, num_kv_heads=num_kv_heads))
    (point,) = grid(config, context, axes="context", strategies="hybrid")
    assert point.config.attention.ulysses_degree == degree


def test_points_batch_not_divisible_by_replicas_rejected(tmp_path):
    config = small(tmp_path)
    all_points = grid(config, 8, axes="fsdp")
    (row,) = runner.run(all_points, fakes.figures, about=ABOUT, out=tmp_path, num_workers=1)
    assert (row["status"], row["reason"]) == (
        "refused",
        "config.train.global_batch_size=4 is not divisible by"
        " train.gradient_accumulation_steps x mesh.data x mesh.fsdp = 8; use 8",
    )
    ranking = Ranking((row,))  # reasons without an empty table
    assert str(ranking).splitlines()[2:] == [f"refused: fsdp=8: {row['reason']}"]
    assert "divisible" in ranking._repr_html_()


def test_points_seq_lens_remats_and_transports_multiply(tmp_path):
    config = small(tmp_path)
    flags = dict(remat="full,attention", seq_len="2048,4096", transports="nccl,nvshmem")
    all_points = grid(config, 4, axes="context", **flags)
    assert len(all_points) == 8
    assert {p.config.data.seq_len for p in all_points} == {2048, 4096}


@pytest.mark.parametrize("flags, message", [
    (dict(axes="contxt"), "unknown setting config.mesh.contxt: did you mean config.mesh.context?"),
    (dict(strategies="ring,rings"), "invalid --strategies=rings: expected one of 'ring', .*did you mean ring?"),
    (dict(remat="most"), "invalid --remat=most: expected one of 'none', 'full', 'attention', 'matmuls'"),
    (dict(transports="rdma"), r"invalid --transports=rdma: expected one of .*'nccl', 'nvshmem'"),
    (dict(seq_len="64k,1.5M"), "invalid --seq_len=64k,1.5M: expected a list of tokens"),
])  # fmt: skip
def test_grid_invalid_value_raises_user_error(tmp_path, flags, message):
    with pytest.raises(UserError, match=message.replace("?", r"\?")):
        grid(small(tmp_path), 4, **flags)


def test_run_interrupted_resumes_without_repeating_points(tmp_path):
    with pytest.raises(
        KeyboardInterrupt,
        match=r"^interrupted: 1 of 3 points are in .*points.jsonl; the same command",
    ):
        run(tmp_path, fakes.figures, log=interrupt, num_workers=1)
    first = (tmp_path / results.ROWS).read_text()
    assert len(first.splitlines()) == 1
    (tmp_path / results.ROWS).write_text(first + '{"key": "half a li')
    rows = run(tmp_path, fakes.figures, num_workers=1)
    assert (tmp_path / results.ROWS).read_text().startswith(first)
    assert len(written(tmp_path)) == 3 and {mesh_of(row) for row in rows} == {
        (1, 4),
        (2, 2),
        (4, 1),
    }
    run(tmp_path, fakes.figures)
    assert len(written(tmp_path)) == 3
    done_first = written(tmp_path)[0]
    assert (tmp_path / "calls-{}x{}".format(*mesh_of(done_first))).read_text() == "x"
    assert (tmp_path / "calls-4x1").read_text() == "x"


def test_run_other_config_adds_rows(tmp_path):
    run(tmp_path, fakes.figures)
    config = small(tmp_path)
    longer = grid(config, 4, axes="context,tensor", seq_len="8192")
    rows = runner.run(longer, fakes.figures, about=ABOUT, out=tmp_path, num_workers=3)
    assert [row["seq_len"] for row in rows] == [8192] * 3 and len(written(tmp_path)) == 6


def test_rows_of_other_code_packages_and_flags_are_not_used(tmp_path, monkeypatch):
    def num_calls() -> int:
        run(tmp_path, fakes.figures)
        return sum(path.stat().st_size for path in tmp_path.glob("calls-*"))

    assert (num_calls(), num_calls()) == (3, 3)
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_memory_limit_slop_factor=160")
    assert (num_calls(), num_calls()) == (6, 6)
    monkeypatch.setattr(runner, "_COMPILING", ("jax", "numpy"))
    assert (num_calls(), num_calls()) == (9, 9)
    monkeypatch.setattr(runner, "file_fingerprint", lambda path: "other")
    assert (num_calls(), num_calls()) == (12, 12)


@pytest.mark.parametrize("work, status, reason", [
    (fakes.killed_at_context_2, "failed",
     "the process was killed by SIGKILL (possibly out of host memory); its last output: allocating the logits"),
    (fakes.exits_at_context_2, "failed", "the process exited with status 3"),
    (fakes.raises_at_context_2, "failed", "RuntimeError: RESOURCE_EXHAUSTED: out of memory"),
    (fakes.refuses_at_context_2, "refused", "unsupported: kernel cudnn"),
])  # fmt: skip
def test_run_failing_point_is_a_row_and_others_finish(tmp_path, work, status, reason):
    rows = run(tmp_path, work)
    # (1, 4) is fast and does not fit
    assert [mesh_of(row) for row in rows] == [(4, 1), (1, 4), (2, 2)]
    assert (rows[-1]["status"], rows[-1]["reason"].replace("\n", "")) == (status, reason)
    has_died = "process" in reason
    assert len(written(tmp_path)) == 3 - has_died
    assert (run(tmp_path, fakes.figures)[-1]["status"] == "done") == has_died
    assert f"\n{status}: context=2 x tensor=2 ring: {reason}\n" in str(Ranking(tuple(rows)))


def test_run_ends_points_at_the_limit_and_prints_progress(tmp_path, monkeypatch):
    monkeypatch.setattr(progress_lines, "SECONDS_BETWEEN_LINES", 0.1)
    points, lines, pid = three_points(tmp_path), [], tmp_path / "pid"
    options = dict(about=ABOUT, out=tmp_path, num_workers=3, log=lines.append)
    ended = runner.run(
        points,
        fakes.hangs_at_context_2,
        **options,
        is_over=lambda rows: len(rows) == 2 and pid.exists(),
    )
    assert [row["status"] for row in ended] == ["done", "stopped", "done"] and len(
        written(tmp_path)
    ) == 2
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
    assert "running 3 points: 0:00 so far" in lines
    assert [row["status"] for row in runner.run(points, fakes.figures, **options)] == ["done"] * 3


def test_exit_reason_is_the_error_above_a_list_of_flags():
    lines = [
        "W1127 13:07:00 a.cc:1] note",
        "E1127 13:07:00 b.cc:2] value maybe for flag",
        "F1127 13:07:00 parsing failed",
    ]
    reason = processes._exit_reason(-6, [*lines, "Flags:", "\t--xla_last=false\tbool"])
    assert reason == f"the process was killed by SIGABRT; its last output: {lines[1]}; {lines[2]}"


_CONFIG = """
from jaxlc.config import defaults

def get_config(variant):
    config = defaults()
    config.data.update(seq_len=4096, cache_dir="{cache_dir}")
    config.train.update(global_batch_size=4, gradient_accumulation_steps=4)
    return config
"""
# Runs the command twice in one process, with fake work: the first run is interrupted, the second one killed.
# A shell starts background jobs, such as a CI job, with SIGINT ignored, and their children inherit that.
_COMMAND_TWICE = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from jaxlc.cli import main_of
from jaxlc.search import runner
from tests.search import fakes
main = main_of("sweep")
if __name__ == "__main__":
    runner.local_devices, runner.measure_point = fakes.four_devices, fakes.hangs_at_context_2
    print("status", main(["sweep", *sys.argv[1:]]), flush=True)
    main(["sweep", *sys.argv[1:]])
"""


def test_command_ctrl_c_and_kill_leave_no_worker(tmp_path):
    config = tmp_path / "config.py"
    config.write_text(
        "from jaxlc.config import defaults\n"
        "def get_config(variant):\n"
        "    config = defaults()\n"
        f"    config.data.cache_dir = {str(tmp_path)!r}\n"
        "    config.runtime.simulated_devices = config.mesh.context = 4\n"
        "    return config\n"
    )
    flags = ["--run", f"--config={config}", f"--out={tmp_path}", "--axes=context,tensor"]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    command = [sys.executable, "-c", _COMMAND_TWICE, *flags]
    leader = subprocess.Popen(command, cwd=ROOT, start_new_session=True, **pipes)
    pids = [_wait_for_worker(tmp_path)]
    os.killpg(leader.pid, signal.SIGINT)  # what a terminal does at Ctrl-C
    pids.append(_wait_for_worker(tmp_path))  # of the resumed sweep
    leader.kill()
    stdout, stderr = leader.communicate(timeout=TIMEOUT_SECONDS)
    for pid in pids:
        stat = Path("/proc") / pid / "stat"
        wait_until(
            lambda stat=stat: (
                not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"
            )
        )
    assert "status 130" in stdout and "Traceback" not in stderr
    interrupted = [line for line in stderr.splitlines() if line.startswith("interrupted")]
    assert interrupted == [
        f"interrupted: 1 of 3 points are in {tmp_path / results.ROWS}; the same command resumes"
    ]
    assert (
        stderr.splitlines()[0] == "starting JAX"
        and f"1 of 3 points are already in {tmp_path}" in stderr
    )


def _wait_for_worker(tmp_path) -> str:
    """Waits until a worker hangs; returns its process id."""
    path = tmp_path / "pid"
    wait_until(lambda: path.exists() and path.read_text())
    pid = path.read_text()
    path.unlink()
    return pid


def test_load_ranks_stored_points_and_shows_them(tmp_path):
    rows = run(tmp_path, fakes.refuses_at_context_2)
    file = tmp_path / results.ROWS
    file.write_text(content := file.read_text() + '{"key": "half a li')  # of a sweep that runs
    for path in (tmp_path, file):
        loaded = results.load(path)
        assert list(loaded.rows) == rows and len(loaded) == 3
    assert file.read_text() == content
    assert "context=2 x tensor=2 ring: unsupported: kernel cudnn" in str(loaded)
    assert loaded[:1].rows == loaded.rows[:1]
    assert repr(loaded).splitlines()[1].startswith(" first: --config.mesh.data=1")
    shown = loaded._repr_html_()
    assert (
        str(loaded).splitlines()[2] in unescape(shown)
        and "does not fit" in shown
        and "unsupported: kernel cudnn" in shown
    )
    speed, memory = loaded.figure().axes
    assert [bar.get_width() for bar in speed.patches[:2]] == [
        row["tokens_per_second_per_device"] for row in rows[:2]
    ]
    with pytest.raises(UserError, match="no points in"):
        results.load(tmp_path / "missing.jsonl")


def test_ranked_measurements_by_speed_and_failures_last():
    def row(name, status="done", fits=True, rate=1.0):
        return dict(
            name=name,
            status=status,
            fits=fits,
            tokens_per_second_per_device=rate,
            figures="measured",
        )

    fitting = [row("slow", rate=1.0), row("fast", rate=1.01)]
    rows = [row("broken", status="failed"), row("large", fits=False, rate=9.0), *fitting]
    assert [ranked["name"] for ranked in ranking.ranked(rows)] == [
        "fast",
        "slow",
        "large",
        "broken",
    ]


def test_note_names_up_to_three_meshes_that_the_estimate_cannot_order():
    def row(rate, context, fits=True, seq_len=4096, high=4.0):
        sizes = dict(data=1, fsdp=1, context=context, tensor=1, seq_len=seq_len)
        return sizes | dict(
            step_seconds_low=1.0,
            step_seconds_high=high,
            status="done",
            topology="h100:1x8",
            fits=fits,
            tokens_per_second_per_device=rate,
            device_peak_bytes=1,
        )

    def note(*rows):
        return Ranking(rows, pair_spread=math.log(1.25)).note()

    narrow = row(100.0, 1, high=1.15)  # of a ratio as well
    assert "of a ratio, 15%" in note(narrow, row(90.0, 2)) and not note(narrow, row(85.0, 2))
    first, same_mesh = row(100.0, 1), row(99.0, 1)
    close = [row(90.0, context) for context in (2, 4, 8)]
    far = [
        row(79.0, 16),
        row(99.0, 16, fits=False),
        row(99.0, 16, seq_len=8192),
        dict(status="failed"),
    ]
    assert (
        "cannot order 1 and 2: they differ by less than the 80% interval of a ratio, 25%"
        in note(first, close[0])
    )
    assert "cannot order 1, 3, 4 and 2 more: they" in note(first, same_mesh, *close, *far)
    assert note(first, *far) == note(row(1.0, 1, fits=False)) == ""


@pytest.mark.gpu_compiler
def test_estimate_writes_table_csv_and_plots(tmp_path, monkeypatch, capsys):
    for name in ("JAX_PLATFORMS", "TF_CPP_MIN_LOG_LEVEL"):
        monkeypatch.setenv(name, os.environ.get(name, ""))  # restored after the test
    monkeypatch.setattr(runner, "estimate_point", fakes.figures_for)
    figures = record_figures(monkeypatch)
    flags = [
        "--axes=context,tensor",
        "--transports=nccl,nvshmem",
        "--seq_len=2048,4096",
        "--workers=4",
    ]
    config = tmp_path / "config.py"
    config.write_text(_CONFIG.format(cache_dir=str(tmp_path)))
    command = ["sweep", f"--config={config}", "--topology=h100:1x4", f"--out={tmp_path}", *flags]
    assert main([*command, "--axes=contxt"]) == 2  # before the compiler starts
    assert capsys.readouterr().err.startswith("error: unknown setting config.mesh.contxt")
    assert main(command) == 0
    printed = capsys.readouterr()
    assert printed.err.startswith("12 points\nstarting the GPU compiler for h100:1x4\n")
    assert "tiny, estimated for h100:1x4" in printed.out and "does not fit" in printed.out
    assert (
        "times are estimates" in printed.out
        and "The estimate cannot order 1 and 1 more: " in printed.out
    )
    best = "first: --config.mesh.data=1 --config.mesh.fsdp=1 --config.mesh.context=2 --config.mesh.tensor=2"
    assert best in printed.out
    with (tmp_path / results.RANKING).open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 12 and rows[0]["rank"] == "1" and rows[0]["transport"] == "nvshmem"
    assert float(rows[0]["tokens_per_second_per_device"]) == 205.0
    _check_mesh_plot(figures[0])
    _check_transport_plot(figures[1])
    assert (tmp_path / "meshes.png").exists() and (tmp_path / "transports.png").exists()


def _check_mesh_plot(figure) -> None:
    """Six points have the longest sequence; best first, and those that do not fit are paler."""
    speed, memory = figure.axes
    assert speed.get_xlabel() == "tokens/s per device" and "GiB" in memory.get_xlabel()
    assert [bar.get_width() for bar in speed.patches[:6]] == [205, 204, 105, 104, 405, 404]
    assert [bar.get_width() for bar in memory.patches[:6]] == [2, 2, 4, 4, 1, 1]
    assert [bar.get_facecolor()[3] for bar in speed.patches[:6]] == [1, 1, 1, 1, 0.35, 0.35]
    assert speed.get_yticklabels()[0].get_text() == "context=2 x tensor=2 ring, nvshmem"
    assert memory.lines[0].get_xdata()[0] == 76 and "usable" in memory.get_xlabel()
    assert "4,096" in figure.get_suptitle()


def _check_transport_plot(figure) -> None:
    """A line per transport for the best mesh; a line per mesh for the speedup."""
    speed, gain = figure.axes
    lines = {
        line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in speed.lines
    }
    assert lines == {"nccl": ([2048, 4096], [202, 204]), "nvshmem": ([2048, 4096], [203, 205])}
    speedups = [[100 / rate, 100 / (rate + 2)] for rate in (202, 102, 402)]
    np.testing.assert_allclose([line.get_ydata() for line in gain.lines], speedups)
    assert speed.get_ylabel() == "tokens/s per device" and gain.get_ylabel() == "speedup, %"


def test_command_run_measures_simulated_devices(tmp_path):
    config = tmp_path / "config.py"
    config.write_text(
        "from jaxlc.config import defaults\n"
        "def get_config(variant):\n"
        "    config = defaults()\n"
        "    config.model.update(vocab_size=32, num_layers=1, model_dim=16, ffn_dim=16, head_dim=4)\n"
        "    config.mesh.context = config.runtime.simulated_devices = 8\n"
        "    config.data.seq_len = 64\n"
        "    return config\n"
    )
    command = [
        sys.executable,
        "scripts/sweep_meshes.py",
        f"--config={config}",
        f"--out={tmp_path}",
        "--run",
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "--axes=context"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "tiny, measured on 8 x cpu" in done.stdout and "stimate" not in done.stdout
    (row,) = written(tmp_path)
    assert (row["status"], row["figures"], row["context"]) == ("done", "measured", 8)
    assert row["tokens_per_second_per_device"] > 0 and row["device_peak_bytes"] > 0


@pytest.mark.parametrize(("flags", "message"), [
    (["--run", "--topology=h100:1x8"], "--topology=h100:1x8 is unsupported with --run"),
    (["--topology=h100:1x8", "--workers=0"], "invalid --workers=0: expected at least 1"),
    ([], "no topology: pass target GPUs"),
    (["--run=false"], "no topology: pass target GPUs"),
    (["--run", "--constants=c.json"], "--constants=c.json is unsupported with --run"),
])  # fmt: skip
def test_command_invalid_flags_exit_with_status_2(monkeypatch, capsys, flags, message):
    monkeypatch.chdir(ROOT)
    assert main(["sweep", "--config=configs/quickstart.py", *flags]) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")


def test_command_help_lists_own_flags_before_settings(capsys):
    assert main(["sweep", "--help"]) == 0
    text = capsys.readouterr().out
    settings = text.index("Settings")
    assert all(
        text.index(f"\n  --{flag} ") < settings for flag in ("topology", "axes", "seq_len", "run")
    )


@pytest.mark.gpu_compiler
@pytest.mark.heavy
def test_estimate_small_config_has_all_figures():
    config = with_settings(load(small_config()), {"runtime.topology": "h100:1x4"})
    ((_, row),) = processes.run_in_processes([config], runner.estimate_point, num_workers=1)
    assert row["status"] == "done", row["reason"]
    assert row["fits"] and row["hops"] > 0 and row["hops_by"] == "NCCL" and row["kernel"] == "cudnn"
    assert row["tokens_per_second_per_device"] > 0 and 0 < row["mfu_causal"] < 1
    assert row["host_peak_bytes"] > 2**28
