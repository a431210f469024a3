"""The mesh sweep: which points there are, and that none is lost or done twice whatever ends a process."""

import csv
import functools
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from jaxlc.config import Config, defaults, load
from jaxlc.core.errors import UserError
from jaxlc.sweep import runner, worker
from jaxlc.sweep.grid import Point, points, space
from tests.plan.gpus import needs_gpu_compiler, small_config
from tests.sweep import fakes

ROOT = Path(__file__).parents[2]


def small(tmp_path, model: dict | None = None, **mesh) -> Config:
    config = defaults()
    config.model.update(model or {})
    config.mesh.update(mesh)
    config.data.update(seq_len=4096, cache_dir=str(tmp_path))
    config.train.update(global_batch_size=4, gradient_accumulation_steps=4)
    return load(config)


def three_points(tmp_path) -> list[Point]:
    """context x tensor: 1 x 4, 2 x 2, 4 x 1."""
    config = small(tmp_path)
    return points(config, 4, space(config, axes="context,tensor"))[0]


def run(tmp_path, work, *, console: Console | None = None, num_workers: int = 3) -> list[dict]:
    console = console or Console(file=io.StringIO())
    return runner.run(
        three_points(tmp_path), work, about=dict(figures="fake"), out=tmp_path, num_workers=num_workers, console=console
    )


def mesh_of(row: dict) -> tuple[int, int]:
    return row["context"], row["tensor"]


def written(tmp_path) -> list[dict]:
    return [json.loads(line) for line in (tmp_path / runner.ROWS).read_text().splitlines()]


def wait_until(holds) -> None:
    end_seconds = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end_seconds
        time.sleep(0.02)


class Interrupts(Console):
    """Ctrl-C when the first row has been written."""

    def print(self, *args, **kwargs):
        raise KeyboardInterrupt


def test_all_meshes_with_the_batch_as_it_was(tmp_path):
    config = small(tmp_path)
    found, num_left_out = points(config, 4, space(config))
    meshes = [point.columns() for point in found]
    assert sorted((mesh["fsdp"], mesh["context"], mesh["tensor"]) for mesh in meshes) == [
        (1, 1, 4), (1, 2, 2), (1, 4, 1), (2, 1, 2), (2, 2, 1), (4, 1, 1)
    ]  # fmt: skip
    assert num_left_out == 0
    for point in found:
        train, mesh = point.config.train, point.config.mesh
        assert train.global_batch_size // train.gradient_accumulation_steps // (mesh.data * mesh.fsdp) == 1
    overrides = found[-1].overrides
    assert (
        "--config.mesh.context=4 --config.mesh.tensor=1" in overrides and "gradient_accumulation_steps=4" in overrides
    )


def test_an_axis_that_is_not_named_keeps_its_size(tmp_path):
    config = small(tmp_path, tensor=2)
    found, _ = points(config, 8, space(config, axes="context,data"))
    assert {(p.config.mesh.context, p.config.mesh.data, p.config.mesh.tensor) for p in found} == {
        (1, 4, 2), (2, 2, 2), (4, 1, 2)
    }  # fmt: skip
    with pytest.raises(UserError, match=r"no mesh of the axes context beside data=1 x fsdp=1 x tensor=2 has 9 devices"):
        points(config, 9, space(config, axes="context"))


def test_points_that_are_no_programs_of_their_own_are_counted_and_refused_ones_have_a_reason(tmp_path):
    config = small(tmp_path)
    found, num_left_out = points(config, 8, space(config, axes="context,tensor", strategies="ring,hybrid"))
    by_name = {(p.columns()["context"], p.columns()["strategy"]): p for p in found}
    # hybrid at context 1, as ring does nothing there either, and at 2, where nothing cuts it
    assert set(by_name) == {(1, "ring"), (2, "ring"), (4, "ring"), (4, "hybrid"), (8, "ring"), (8, "hybrid")}
    assert num_left_out == 2
    assert "num_heads=4 is not divisible by config.mesh.tensor=8" in by_name[1, "ring"].refusal
    assert by_name[1, "ring"].config is None


@pytest.mark.parametrize("num_kv_heads, context, ranks", [
    (8, 16, 8),
    (8, 8, 4),  # 8 would be ulysses
    (2, 8, 2),  # 4 would repeat heads
    (1, 8, 2),  # repeats one, as 4 would more often
])  # fmt: skip
def test_hybrid_exchanges_among_as_many_as_have_heads_of_their_own(tmp_path, num_kv_heads, context, ranks):
    config = small(tmp_path, dict(num_heads=8, num_kv_heads=num_kv_heads))
    ((point,), _) = points(config, context, space(config, axes="context", strategies="hybrid"))
    assert point.config.attention.ulysses_degree == ranks


def test_rows_that_the_replicas_do_not_divide_are_refused(tmp_path):
    config = small(tmp_path)
    found, _ = points(config, 8, space(config, axes="fsdp"))
    assert [point.refusal for point in found] == [
        "config.train.global_batch_size=4 is not divisible by"
        " train.gradient_accumulation_steps x mesh.data x mesh.fsdp = 8; use 8"
    ]


def test_lengths_remats_and_transports_multiply(tmp_path):
    config = small(tmp_path)
    asked = space(config, axes="context", remat="full,attention", sequence="2048,4096", transports="nccl,nvshmem")
    found, _ = points(config, 4, asked)
    assert len(found) == 8
    assert {p.config.data.seq_len for p in found} == {2048, 4096}


@pytest.mark.parametrize("asked, words", [
    (dict(axes="contxt"), "there is no mesh axis 'contxt'; did you mean context?"),
    (dict(strategies="ring,rings"), "there is no strategy 'rings'; did you mean ring?"),
    (dict(remat="most"), "there is no remat 'most'; there are"),
    (dict(transports="rdma"), "there is no transport 'rdma'; there are"),
    (dict(sequence="64k"), "--sequence has '64k', which is not a whole number"),
])  # fmt: skip
def test_unknown_names_are_a_sentence(tmp_path, asked, words):
    with pytest.raises(UserError, match=words.replace("?", r"\?")):
        space(small(tmp_path), **asked)


def test_a_sweep_goes_on_where_it_was(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, fakes.figures, console=Interrupts(), num_workers=1)
    first = (tmp_path / runner.ROWS).read_text()
    assert len(first.splitlines()) == 1
    (tmp_path / runner.ROWS).write_text(first + '{"key": "half a li')
    rows = run(tmp_path, fakes.figures, num_workers=1)
    assert (tmp_path / runner.ROWS).read_text().startswith(first)
    assert len(written(tmp_path)) == 3 and {mesh_of(row) for row in rows} == {(1, 4), (2, 2), (4, 1)}
    run(tmp_path, fakes.figures)
    assert len(written(tmp_path)) == 3
    done_first = written(tmp_path)[0]
    assert (tmp_path / "calls-{}x{}".format(*mesh_of(done_first))).read_text() == "x"
    assert (tmp_path / "calls-4x1").read_text() == "x"


def test_rows_of_another_config_are_others(tmp_path):
    run(tmp_path, fakes.figures)
    config = small(tmp_path)
    longer = points(config, 4, space(config, axes="context,tensor", sequence="8192"))[0]
    console = Console(file=io.StringIO())
    rows = runner.run(longer, fakes.figures, about=dict(figures="fake"), out=tmp_path, num_workers=3, console=console)
    assert [row["seq_len"] for row in rows] == [8192] * 3 and len(written(tmp_path)) == 6


@pytest.mark.parametrize("work, status, reason", [
    (fakes.killed_at_context_2, "failed",
     "its process was ended by SIGKILL, as when memory runs out; its last line: about to take too much"),
    (fakes.exits_at_context_2, "failed", "its process ended with status 3"),
    (fakes.raises_at_context_2, "failed", "RuntimeError: RESOURCE_EXHAUSTED: out of memory"),
    (fakes.refuses_at_context_2, "refused", "kernel cudnn cannot do this"),
])  # fmt: skip
def test_what_ends_one_point_is_a_row_and_ends_no_other(tmp_path, work, status, reason):
    rows = run(tmp_path, work)
    assert [mesh_of(row) for row in rows] == [(4, 1), (1, 4), (2, 2)]  # (1, 4) is fast and does not fit
    assert (rows[-1]["status"], rows[-1]["reason"].replace("\n", "")) == (status, reason)
    assert len(written(tmp_path)) == 3
    assert list(runner.without_figures(rows)) == [f"{status}: context=2 tensor=2 ring: {reason}"]


def test_a_process_ends_when_the_leading_one_is_killed(tmp_path):
    code = (
        "import sys; from pathlib import Path; from tests.sweep import fakes, test_runner\n"
        "if __name__ == '__main__': test_runner.run(Path(sys.argv[1]), fakes.waits, num_workers=1)\n"
    )
    leader = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT)
    path = tmp_path / "pid"
    wait_until(lambda: path.exists() and path.read_text())
    leader.kill()
    leader.wait()
    stat = Path("/proc") / path.read_text() / "stat"
    wait_until(lambda: not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z")


def test_those_that_fit_come_first_then_by_speed():
    def row(name, status="done", fits=True, rate=0.0):
        return dict(name=name, status=status, fits=fits, tokens_per_second_per_device=rate)

    fitting = [row("slow", rate=1.0), row("fast", rate=2.0)]
    rows = [row("broken", status="failed"), row("large", fits=False, rate=9.0), *fitting]
    assert [each["name"] for each in runner.ranked(rows)] == ["fast", "slow", "large", "broken"]


@needs_gpu_compiler
def test_table_csv_and_pictures(tmp_path, monkeypatch, capsys):
    for name in ("JAX_PLATFORMS", "TF_CPP_MIN_LOG_LEVEL"):
        monkeypatch.setenv(name, os.environ.get(name, ""))  # and back afterwards
    monkeypatch.setattr(worker, "predicted", fakes.figures_for)
    asked = dict(axes="context,tensor", transports="nccl,nvshmem", sequence="2048,4096")
    assert runner.compare(small(tmp_path), tmp_path, topology="h100:1x4", workers="4", **asked) == 0
    printed = capsys.readouterr().out
    assert "tiny, predicted for h100:1x4" in printed and "does not fit" in printed
    assert "first: --config.mesh.data=1 --config.mesh.fsdp=1 --config.mesh.context=2 --config.mesh.tensor=2" in printed
    with (tmp_path / runner.RANKING).open() as file:
        ranking = list(csv.DictReader(file))
    assert len(ranking) == 12 and ranking[0]["rank"] == "1" and ranking[0]["transport"] == "nvshmem"
    assert float(ranking[0]["tokens_per_second_per_device"]) == 205.0
    for name in ("meshes.png", "transports.png"):
        assert (tmp_path / name).stat().st_size > 5000


def test_the_command_measures_on_simulated_devices_and_tells_mistakes_in_a_sentence(tmp_path):
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
    command = [sys.executable, "scripts/sweep_meshes.py", f"--config={config}", f"--out={tmp_path}", "--run"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}

    def call(*arguments):
        return subprocess.run([*command, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)

    done = call("--axes=context")
    assert done.returncode == 0, done.stderr
    assert "tiny, measured on 8 x cpu" in done.stdout
    (row,) = written(tmp_path)
    assert (row["status"], row["figures"], row["context"]) == ("done", "measured", 8)
    assert row["tokens_per_second_per_device"] > 0 and row["device_peak_bytes"] > 0
    refused = call("--topology=h100:1x8")
    assert refused.returncode == 2
    assert refused.stderr == "error: --topology=h100:1x8 is for predictions; leave it out, or leave out --run\n"


@needs_gpu_compiler
@pytest.mark.heavy
def test_a_row_of_the_real_plan():
    work = functools.partial(worker.predicted, topology="h100:1x4")
    ((_, row),) = worker.rows([load(small_config())], work, num_workers=1)
    assert row["status"] == "done", row["reason"]
    assert row["fits"] and row["hops"] > 0 and row["hops_by"] == "NCCL" and row["kernel"] == "cudnn"
    assert row["tokens_per_second_per_device"] > 0 and 0 < row["mfu_causal"] < 1
    assert row["host_peak_bytes"] > 2**28
