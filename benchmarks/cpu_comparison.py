"""Compares attention and a training step with PyTorch and transformers on the cores of this machine.

    make .venv-transformers/.ready
    python -m benchmarks.cpu_comparison --torch_python=.venv-transformers/bin/python --out=runs/cpu_comparison.jsonl

Attention: causal, float32, forward and backward. Step: the model and the sequences of configs/quickstart.py, AdamW.
The cases are PyTorch (`scaled_dot_product_attention`, `LlamaForCausalLM`), one device, and the mesh of quickstart of
simulated devices, where attention is a ring over all of them. PyTorch runs in a process and an environment of its own.
All cases alternate. CPU seconds depend less on other load than seconds.
"""

import dataclasses
import functools
import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax
from absl import app, flags
from rich.console import Console
from rich.table import Table

from benchmarks.attention_speed import AttentionCase, compile_case
from benchmarks.environment import environment_info
from jaxlc.config import Config, MeshConfig, RuntimeConfig, load, read_config, with_settings
from jaxlc.runtime.start import start
from jaxlc.search.measure import random_batch
from jaxlc.sharding.mesh import make_mesh
from jaxlc.step.step import build_step

_TORCH_CPU = Path(__file__).with_name("torch_cpu.py")


class Case(NamedTuple):
    """One contestant. `call` runs it once and returns (seconds, CPU seconds of its process)."""

    task: str  # "attention" or "step"
    name: str
    call: Callable[[], tuple[float, float]]


def define_flags(values: flags.FlagValues = flags.FLAGS) -> None:
    integer = functools.partial(flags.DEFINE_integer, flag_values=values)
    string = functools.partial(flags.DEFINE_string, flag_values=values)
    string("torch_python", "", "a Python with torch and transformers; empty: without their cases")
    flags.DEFINE_list("tasks", ["attention", "step"], "what is compared", flag_values=values)
    integer("seq_len", 8192, "sequence length of attention; that of a step is quickstart's")
    integer("num_heads", 8, "heads of attention")
    integer("head_dim", 64, "head dimension of attention")
    flags.DEFINE_list(
        "settings", [], "changes of quickstart, such as data.seq_len=512", flag_values=values
    )
    integer("repeats", 5, "timed calls per case, after one warm-up call")
    string("out", "runs/cpu_comparison.jsonl", "file to which rows are appended")


def main(_) -> None:
    values = flags.FLAGS
    config = load(read_config("quickstart"))
    settings = (setting.split("=", 1) for setting in values.settings)
    config = with_settings(
        config, {"precision.compute": "fp32"} | {key: json.loads(value) for key, value in settings}
    )
    start(RuntimeConfig(simulated_devices=config.mesh.num_devices))
    attention = AttentionCase(
        strategy="ring", seq_len=values.seq_len, num_heads=values.num_heads, num_kv_heads=values.num_heads,
        head_dim=values.head_dim,
    )  # fmt: skip
    cases, info = (
        [*jaxlc_cases(attention, config)],
        environment_info() | dict(num_cores=os.cpu_count()),
    )
    if values.torch_python:
        torch_cases, versions = cases_of_torch(values.torch_python, attention, config)
        cases, info = [*torch_cases, *cases], info | versions
    rows = measure([case for case in cases if case.task in values.tasks], values.repeats)
    out = Path(values.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("a") as file:
        file.writelines(json.dumps(row | info) + "\n" for row in rows)
    Console().print(_table(rows))


def measure(cases: list[Case], repeats: int) -> list[dict]:
    """Calls all cases alternately; a row per case with median and minimum of seconds, and median of
    CPU seconds.
    """
    for case in cases:
        case.call()
    times = [[] for _ in cases]
    for _ in range(repeats):
        for case, case_times in zip(cases, times, strict=True):
            case_times.append(case.call())
    rows = []
    for case, case_times in zip(cases, times, strict=True):
        seconds, cpu_seconds = zip(*case_times, strict=True)
        rows.append(
            dict(task=case.task, name=case.name, seconds=statistics.median(seconds), seconds_min=min(seconds),
                 cpu_seconds=statistics.median(cpu_seconds), repeats=repeats)
        )  # fmt: skip
    return rows


def jaxlc_cases(attention: AttentionCase, config: Config) -> Iterator[Case]:
    """Attention and step on one device, and on all simulated devices."""
    num_devices = config.mesh.num_devices
    for name, mesh in (
        ("one device", MeshConfig()),
        (f"ring, {num_devices} devices", MeshConfig(context=num_devices)),
    ):
        compiled = compile_case(attention, make_mesh(mesh, jax.devices()[: mesh.num_devices]))
        yield Case("attention", name, functools.partial(_timed, compiled.call))
    for name, mesh in (
        ("one device", MeshConfig()),
        (f"quickstart, {num_devices} devices", config.mesh),
    ):
        yield Case(
            "step", name, functools.partial(_timed, _step(dataclasses.replace(config, mesh=mesh)))
        )


def _step(config: Config) -> Callable[[], object]:
    step = build_step(config, make_mesh(config.mesh, jax.devices()[: config.mesh.num_devices]))
    compiled, state, batch = step.compile(), step.init(), random_batch(step)

    def call():
        nonlocal state  # its buffers are donated to the new state
        state, metrics = compiled(state, batch)
        return metrics

    return call


def _timed(call: Callable[[], object]) -> tuple[float, float]:
    start_seconds, start_cpu_seconds = time.perf_counter(), time.process_time()
    jax.block_until_ready(call())
    return time.perf_counter() - start_seconds, time.process_time() - start_cpu_seconds


def cases_of_torch(
    python: str, attention: AttentionCase, config: Config
) -> tuple[list[Case], dict]:
    """The cases of `torch_cpu.py`, which waits in a process of `python` for the name of a task, and
    its versions.
    """
    model = config.model
    case = dict(
        num_threads=os.cpu_count(), seq_len=attention.seq_len, num_heads=attention.num_heads,
        head_dim=attention.head_dim, vocab_size=model.vocab_size, model_dim=model.model_dim, ffn_dim=model.ffn_dim,
        num_layers=model.num_layers, model_heads=model.attention.num_heads,
        model_kv_heads=model.attention.num_kv_heads, model_head_dim=model.attention.head_dim,
        step_seq_len=config.data.seq_len, batch_size=config.train.global_batch_size,
    )  # fmt: skip
    command = [python, str(_TORCH_CPU), json.dumps(case)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def answer(line: str = "") -> str:
        process.stdin.write(line)
        process.stdin.flush()
        return process.stdout.readline()

    versions = json.loads(answer())
    calls = {
        task: functools.partial(_answer_seconds, answer, task) for task in ("attention", "step")
    }
    return [Case(task, "PyTorch", call) for task, call in calls.items()], versions


def _answer_seconds(answer: Callable[[str], str], task: str) -> tuple[float, float]:
    seconds, cpu_seconds = json.loads(answer(f"{task}\n"))
    return seconds, cpu_seconds


def _table(rows: list[dict]) -> Table:
    table = Table(title=f"{rows[0]['repeats']} calls per case")
    for heading in ("task", "case", "seconds", "min", "CPU seconds", "of PyTorch's"):
        table.add_column(heading, justify="left" if heading in ("task", "case") else "right")
    torch_seconds = {row["task"]: row["cpu_seconds"] for row in rows if row["name"] == "PyTorch"}
    for row in rows:
        ratio = (
            f"{row['cpu_seconds'] / torch_seconds[row['task']]:.2f}"
            if row["task"] in torch_seconds
            else ""
        )
        numbers = (f"{row[key]:.2f}" for key in ("seconds", "seconds_min", "cpu_seconds"))
        table.add_row(row["task"], row["name"], *numbers, ratio)
    return table


if __name__ == "__main__":
    define_flags()
    app.run(main)
