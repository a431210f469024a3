"""The programs of the first measurements on a GPU: the dry run of every row, rows that fail, and
the constants.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.first_contact import command, constants, rows
from benchmarks.first_contact.long_rows import workspaces
from benchmarks.first_contact.rows import Row, RowFile
from jaxlc.simulate import roofline
from tests.environment import FAST_COMPILATION

ROOT = Path(__file__).parents[2]
# Runs Python as if these packages were not installed. The script itself makes jaxlc importable.
_BARE_MACHINE = """
import sys
absent = ("tokenizers", "huggingface_hub", "matplotlib", "pyarrow", "datasets", "qwix")
sys.modules.update(dict.fromkeys(absent))
"""


def first_contact(directory: Path, *arguments: str) -> list[dict]:
    """Runs the script without the packages that a GPU machine may lack, and returns the rows that
    it wrote.
    """
    (directory / "sitecustomize.py").write_text(_BARE_MACHINE)
    out = directory / "rows.jsonl"
    environment = {
        name: value
        for name, value in os.environ.items()
        # keeps the compilation cache of the tests
        if not name.startswith(("XLA_", "JAX_")) or "_CACHE_" in name
    }
    environment |= dict(PYTHONPATH=str(directory), JAX_PLATFORMS="cpu", XLA_FLAGS=FAST_COMPILATION)
    arguments = [f"--out={out}", *arguments]
    ran = subprocess.run(
        [sys.executable, "scripts/gpu_first_contact.py", *arguments],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    return list(rows.read([out]))


@pytest.mark.heavy
def test_dry_run_of_short_parts_measures_with_few_packages(tmp_path):
    measured = first_contact(
        tmp_path, "--dry_run", "--seconds=10000", "--parts=env,fa3,kernels,ring,rates,compile"
    )
    assert [
        row for row in measured if "error" in row or row.get("skipped", "").startswith("takes")
    ] == []
    assert {row["part"] for row in measured} == {
        "env",
        "fa3",
        "kernels",
        "ring",
        "rates",
        "compile",
    }
    assert all(row["passed"] for row in measured if "passed" in row)


@pytest.mark.full
def test_dry_run_measures_every_row_with_few_packages(tmp_path):
    measured = first_contact(tmp_path, "--dry_run", "--seconds=10000")
    assert [
        row for row in measured if "error" in row or row.get("skipped", "").startswith("takes")
    ] == []
    assert {row["part"] for row in measured} == set(command.PARTS)
    assert all(row["passed"] for row in measured if "passed" in row)
    by_part = {name: [row for row in measured if row["part"] == name] for name in command.PARTS}
    assert {row["case"] for row in by_part["kernels"]} >= {
        "causal",
        "full",
        "window, packed documents",
    }
    assert by_part["steps"][0]["loss"] > 0 and by_part["ring"][0]["ring_over_whole"] > 0
    assert [row["from_cache"] for row in by_part["compile"]][:2] == [False, True]
    assert (
        by_part["profile"][0]["step_seconds"] > 0
        and by_part["profile"][0]["estimated_step_seconds"] > 0
    )
    path = tmp_path / "constants.json"
    assert json.loads(path.read_text()).keys() >= {
        "matmul_share",
        "memory_share",
        "host_share",
        "attention_share",
    }
    assert roofline.from_file(str(path)) != roofline.Roofline()
    # The parts of a GPU machine run in processes of their own.
    assert first_contact(tmp_path, "--parts=env", "--seconds=300")[-1]["packages"]["jax"]


def test_rows_that_fail_or_take_too_long_do_not_stop_others(tmp_path):
    def failing():
        raise RuntimeError("x" * 10_000)

    def made():
        yield Row(labels=dict(name="a"), measure=failing, seconds=1)
        yield Row(labels=dict(name="b"), measure=dict, seconds=1e6)
        yield Row(labels=dict(name="c"), measure=lambda: dict(value=3), seconds=1)
        raise KeyError("the generator fails")

    path = tmp_path / "rows.jsonl"
    rows.run("part", made(), RowFile(path), time.monotonic() + 100)
    # a process that is killed while it writes
    path.write_text(path.read_text() + '{"part": "cut o')
    a, b, c, last = rows.read([path])
    assert a["error"].startswith("RuntimeError: xxx") and len(a["error"]) < 1000
    assert (
        b["skipped"].startswith("takes about 1000000 s")
        and c["value"] == 3
        and "KeyError" in last["error"]
    )


def test_process_that_crashes_becomes_a_row_with_its_messages(tmp_path, monkeypatch):
    script = tmp_path / "crash.py"
    script.write_text(
        "import os, sys; print('a message', file=sys.stderr, flush=True); os._exit(11)"
    )
    monkeypatch.setattr(command, "_SCRIPT", script)
    out = tmp_path / "rows.jsonl"
    deadline = time.monotonic() + 1000
    command._run_process("steps", 0, dict(tokens=8), {}, RowFile(out), out, deadline)
    command._run_process("steps", 1, dict(tokens=9), {}, RowFile(out), out, time.monotonic())
    crashed, late = rows.read([out])
    assert (crashed["tokens"], crashed["error"]) == (
        8,
        "process ended with 11",
    ) and "a message" in crashed["messages"]
    assert "s left" in late["skipped"]


_CRASH_THEN_HANG = """
import json, os, pathlib, sys, time
flags = dict(flag.removeprefix("--").split("=") for flag in sys.argv[1:])
index, out = int(flags["row"]), pathlib.Path(flags["out"])
if index < 2:
    seconds = [1000, 0.1][index]  # the first one ends before its time is over
    out.with_suffix(".started.json").write_text(json.dumps([index, dict(name=index), seconds, time.monotonic()]))
if index == 0:
    os._exit(11)
if index == 1:
    time.sleep(1000)
out.write_text(out.read_text() + '{"name": 2}' + chr(10))
"""


def test_part_continues_after_rows_that_crash_and_hang(tmp_path, monkeypatch):
    script, out = tmp_path / "script.py", tmp_path / "rows.jsonl"
    script.write_text(_CRASH_THEN_HANG)
    monkeypatch.setattr(command, "_SCRIPT", script)
    monkeypatch.setattr(command, "_POLL_SECONDS", 0.05)
    monkeypatch.setattr(command, "_limit_seconds", lambda estimated_seconds: estimated_seconds)
    command._run_part("kernels", 0, RowFile(out), out, time.monotonic() + 1000)
    crashed, hung, last = rows.read([out])
    assert (crashed["name"], crashed["error"]) == (0, "process ended with 11")
    assert hung["name"] == 1 and "the row took more than" in hung["error"] and last == dict(name=2)


def test_constants_of_a_measurement_ignore_dry_runs(tmp_path):
    copy = dict(part="basics", name="device copy")
    (tmp_path / "dry_run.jsonl").write_text(
        json.dumps(copy | dict(share=0.001, dry_run=True)) + "\n"
    )
    (tmp_path / "measured.jsonl").write_text(json.dumps(copy | dict(share=0.9)) + "\n")
    command._write_constants(tmp_path, is_dry_run=False)
    assert json.loads((tmp_path / command.CONSTANTS_FILE).read_text()) == dict(memory_share=0.9)


def test_constants_of_rows_are_read_by_the_plan():
    def rate(kernel, which, tokens, share, packed=None):
        return dict(
            part="rates",
            kernel=kernel,
            which=which,
            tokens=tokens,
            share=share,
            causal=not packed,
            packed=packed,
        )

    measured = constants.from_rows([
        rate("cudnn", "forward", 4096, 0.3),
        rate("cudnn", "forward", 131_072, 0.6),
        rate("cudnn", "backward", 4096, 0.2),
        rate("cudnn", "backward", 131_072, 0.5),
        rate("pallas", "forward", 4096, 0.4),
        rate("pallas", "backward", 4096, 0.25),
        rate("mosaic", "forward", 4096, 0.5),
        rate("cudnn", "forward", 131_072, 0.55, "causal"),
        rate("cudnn", "backward", 131_072, 0.45, "causal"),
        rate("cudnn", "forward", 131_072, 0.1, "ring step"),
        dict(part="basics", name="product", dtype="bf16", share=0.7),
        dict(part="basics", name="product", dtype="bf16", share=0.8),
        dict(part="basics", name="product", dtype="bf16", share=0.5),
        dict(part="experts", name="product", kernel="mosaic", which="forward", share=0.4),
        dict(part="experts", name="product", kernel="blocks", which="forward", share=0.6),
        dict(part="basics", name="device copy", error="out of memory"),
        dict(part="basics", name="small kernels", graph_seconds=2e-6, single_seconds=5e-6),
        dict(part="basics", name="synchronization", seconds=3e-5),
    ])  # fmt: skip
    read = roofline.read(json.dumps(measured))
    assert read.attention_share["cudnn"] == (0.6, 0.5) and read.attention_share["cudnn_packed"] == (
        0.55,
        0.45,
    )
    # its program has 7 products instead of 5
    assert read.attention_share["pallas"] == (0.4, pytest.approx(0.35))
    assert "blockwise" not in read.attention_share  # the published share remains
    assert (read.matmul_share, read.kernel_gap_seconds, read.synchronization_seconds) == (
        0.7,
        2e-6,
        3e-5,
    )
    assert read.expert_kernel_share == 0.4
    assert read.memory_share == roofline.Roofline().memory_share


def test_workspaces_are_read_from_the_compiled_text():
    forward = "  %a = (bf16[1,8]{1,0}, f32[1,8]{1,0}, u8[64]{0}) custom-call(%q, %k)"
    backward = "  %b = (bf16[1,8]{1,0}, bf16[1,8]{1,0}, u8[{}]{0}) custom-call(%q, %k)"
    text = "\n".join([
        f'{forward}, custom_call_target="__cudnn$fmhaSoftmax"',
        f'{backward.replace("{}", "100")}, custom_call_target="__cudnn$fmhaSoftmaxBackward"',
        f'{backward.replace("{}", "2534000000")}, custom_call_target="__cudnn$fmhaSoftmaxBackward"',
        '  %c = (bf16[4]{0}, u8[9]{0}) custom-call(%q), custom_call_target="__cublas$gemm"',
    ])  # fmt: skip
    assert workspaces(text) == {"Softmax": 64, "SoftmaxBackward": 2_534_000_000}


def test_rows_of_single_processes_are_listed_without_starting_jax():
    code = (
        "from pathlib import Path; from benchmarks.first_contact.command import PARTS;"
        " from benchmarks.first_contact.sizes import Sizes; from jaxlc._jax_internals import backends_are_initialized;"
        " parts = [part for part in PARTS.values() if part.has_process_per_row];"
        " assert sum(len(list(part.rows(Sizes(), Path('.')))) for part in parts) > 40;"
        " assert not backends_are_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
