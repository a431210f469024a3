"""Compares training steps of jaxlc and PyTorch on one GPU, with the same weights and tokens.

    python -m benchmarks.gpu_comparison --rows=8b,1b --seconds=580 --out=out/comparison.jsonl
    python -m benchmarks.gpu_comparison --rows=experts,hybrid,lora --seconds=580 --out=out/comparison.jsonl
    python -m benchmarks.gpu_comparison --dry_run --torch_python=.venv-transformers/bin/python --out=out/dry_run.jsonl

Each column of a row runs in a process of its own, so that its memory is free for the next one. A
result is one line of --out, written when it is known, and the page next to it, a .md file, has the
latest result of each column of all calls. A column that fails or takes too long does not stop the
others.

PyTorch: models of `torch_models.py`, float32 parameters with bf16 autocast, torch.compile of each
layer, fused AdamW, and Liger's loss if it is installed. Columns `cudnn_*` have cuDNN's attention,
`fa3_*` FlashAttention-3, `fp8_op` cuDNN's attention and FP8 products of torchao. The suffix is the
checkpoint policy: `attention` saves the results of attention, `op` also every second product as
torchtitan does, `whole` neither. --dry_run runs all columns with tiny float32 models on a CPU.
"""

import contextlib
import datetime
import functools
import itertools
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import app, flags
from ml_collections import ConfigDict

import jaxlc.profile
from benchmarks.environment import environment_info
from jaxlc.checkpoints.pretrained import load_pretrained
from jaxlc.config import Config, defaults, load, with_settings
from jaxlc.config.models.config_json import config_json_of
from jaxlc.config.schema import MATMUL_NAMES
from jaxlc.profile.trace_events import ATTENTION, MATMUL, OTHER, EventClasses, TraceEvent
from jaxlc.runtime.start import start
from jaxlc.search.measure import random_batch
from jaxlc.sharding.mesh import make_mesh
from jaxlc.step.step import build_step
from jaxlc.train.step_profiler import PROFILE_DIRECTORY, StepProfiler

ROOT = Path(__file__).parents[1]
LEARNING_RATE = 1e-4
_WARM_UP, _TRACED, _TINY_TOKENS = 2, 2, 128
_MIN_SECONDS = 20  # a process is not started for less
_MAX_ERROR_CHARS = 600
_LORA = dict(rank=32, alpha=64.0)
# Of PyTorch: kernels that its compiler fuses, and products that it compiles or names by operation.
_FUSION = re.compile(r"triton_(?!tem)")
_PRODUCT = re.compile(r"(aten::|_)(mm|bmm|addmm)\b|triton_tem.*_mm")


@dataclass(frozen=True, kw_only=True)
class Row:
    """A model and a sequence length."""

    title: str
    preset: str
    num_tokens: int
    tiny: dict[str, Any]  # settings of the model in a dry run
    model: dict[str, Any] = field(default_factory=dict)  # settings that differ from the preset
    lora: dict[str, float] = field(default_factory=dict)
    fp8_matmuls: tuple[str, ...] = MATMUL_NAMES  # of jaxlc


_TINY = dict(vocab_size=96, num_layers=2, model_dim=64, ffn_dim=96)
_TINY_HEADS = {"attention.num_heads": 4, "attention.num_kv_heads": 2, "attention.head_dim": 16}
_TINY_EXPERTS = {"experts.num_experts": 8, "experts.experts_per_token": 2, "experts.ffn_dim": 32}
_TINY_DELTA = {f"delta_net.{x}": 16 for x in ("key_dim", "value_dim")}
_TINY_DELTA |= {"delta_net.key_heads": 2, "delta_net.value_heads": 4}
ROWS = {
    "8b": Row(
        title="Llama 3.1 8B, 4 layers", preset="llama3.1-8b", num_tokens=32_768,
        model=dict(num_layers=4), tiny=_TINY | _TINY_HEADS,
    ),
    "1b": Row(
        title="Llama 3.2 1B", preset="llama3.2-1b", num_tokens=131_072, tiny=_TINY | _TINY_HEADS
    ),
    "experts": Row(
        title="Qwen3-30B-A3B, 4 layers", preset="qwen3-30b-a3b", num_tokens=32_768,
        model=dict(num_layers=4), tiny=_TINY | _TINY_HEADS | _TINY_EXPERTS,
        fp8_matmuls=(*MATMUL_NAMES[:4], "expert_gate", "expert_up", "expert_down"),
    ),
    "hybrid": Row(
        title="Qwen3.5-9B, 4 layers", preset="qwen3.5-9b", num_tokens=32_768,
        model=dict(num_layers=4), tiny=_TINY | _TINY_HEADS | _TINY_DELTA | dict(num_layers=4),
    ),
    "lora": Row(
        title="Qwen3-4B, LoRA of rank 32", preset="qwen3-4b", num_tokens=65_536, lora=_LORA,
        tiny=_TINY | _TINY_HEADS,
    ),
}  # fmt: skip


class Column(NamedTuple):
    """A trainer and its settings. For PyTorch they are fields of the jobs of `torch_gpu.py`."""

    title: str
    is_torch: bool
    fp8: bool = False
    attention: str = ""
    checkpoint: str = ""


COLUMNS = {  # the most important first
    "jaxlc": Column("jaxlc", False),
    **{
        f"{attention}_{policy}": Column(f"PyTorch, {title}, {policy}", True, False, attention, policy)
        for policy in ("op", "attention")
        for attention, title in (("cudnn", "cuDNN"), ("fa3", "FlashAttention-3"))
    },
    "jaxlc_fp8": Column("jaxlc, FP8", False, True),
    "fp8_op": Column("PyTorch, cuDNN, FP8, op", True, True, "cudnn", "op"),
    "cudnn_whole": Column("PyTorch, cuDNN, whole", True, False, "cudnn", "whole"),
    "fa3_whole": Column("PyTorch, FlashAttention-3, whole", True, False, "fa3", "whole"),
}  # fmt: skip


def define_flags(values: flags.FlagValues = flags.FLAGS) -> None:
    for name, known in (("rows", ROWS), ("columns", COLUMNS)):
        about = f"{name} to run, in this order, of {', '.join(known)}"
        flags.DEFINE_list(name, list(known), about, flag_values=values)
    string = functools.partial(flags.DEFINE_string, flag_values=values)
    number = functools.partial(flags.DEFINE_float, flag_values=values)
    string("out", "runs/gpu_comparison/rows.jsonl", "file to which results are appended")
    string("torch_python", sys.executable, "a Python with PyTorch")
    string("child", "", "of a started process: the file of its jobs")
    about = "settings of jaxlc, such as attention.kernel=cudnn"
    flags.DEFINE_list("settings", [], about, flag_values=values)
    about = f"timed steps of a column, after {_WARM_UP}"
    flags.DEFINE_integer("repeats", 5, about, flag_values=values)
    number("seconds", 580.0, "all processes end within this time")
    number("column_seconds", 240.0, "a process that takes longer is ended")
    flags.DEFINE_bool("dry_run", False, "tiny models on a CPU", flag_values=values)


def main(_: Sequence[str]) -> None:
    values = flags.FLAGS
    if values.child:
        run_jobs(Path(values.child))
        return
    for names, known in ((values.rows, ROWS), (values.columns, COLUMNS)):
        if unknown := [name for name in names if name not in known]:
            sys.exit(f"error: unknown name {unknown[0]!r}: expected some of {', '.join(known)}")
    # ends the started process and removes the weights
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    out = Path(values.out).absolute()
    out.parent.mkdir(parents=True, exist_ok=True)
    call = Call(
        out=out, python=values.torch_python, deadline_seconds=time.monotonic() + values.seconds,
        column_seconds=values.seconds if values.dry_run else values.column_seconds,
    )  # fmt: skip
    job = dict(
        dry_run=values.dry_run, repeats=values.repeats, warm_up=_WARM_UP, traced=_TRACED,
        learning_rate=LEARNING_RATE, settings=values.settings,
    )  # fmt: skip
    # Files of weights are large: without a dry run, only one row has them at a time.
    groups = [values.rows] if values.dry_run else [[name] for name in values.rows]
    for names in groups:
        with tempfile.TemporaryDirectory() as directory:
            _run_rows(names, values.columns, Path(directory), job, call)


def _run_rows(
    names: list[str], columns: list[str], directory: Path, job: dict[str, Any], call: "Call"
) -> None:
    weights, measured = [], []
    for name in names:
        row_job = job | prepare(name, directory / name, job["dry_run"])
        weights.append(row_job | dict(column="weights"))
        for column in columns:
            measured.append(row_job | dict(column=column) | COLUMNS[column]._asdict())
    written = call.run(weights, is_torch=True)
    if "error" in written[0]:  # of PyTorch, or of the GPU
        for one in measured:
            call.write(one, dict(skipped=f"no weights: {written[0]['error']}"))
        return
    if job["dry_run"]:  # one process for each side
        for is_torch in (True, False):
            call.run([x for x in measured if x["is_torch"] == is_torch], is_torch)
        return
    for one in measured:
        call.run([one], one["is_torch"])


def prepare(name: str, directory: Path, dry_run: bool) -> dict[str, Any]:
    """Writes config.json and the tokens of a row; returns the fields of its jobs."""
    row = ROWS[name]
    num_tokens = _TINY_TOKENS if dry_run else row.num_tokens
    config, settings = defaults(), row.model | (row.tiny if dry_run else {})
    config.model.preset = row.preset
    config.update_from_flattened_dict({f"model.{path}": x for path, x in settings.items()})
    dtype = "float32" if dry_run else "bfloat16"
    model = load(config).model
    content = config_json_of(model, None, seq_len=num_tokens, dtype=dtype)
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(content))
    tokens = np.random.default_rng(0).integers(0, model.vocab_size, num_tokens)
    (directory / "tokens.json").write_text(json.dumps(tokens.tolist()))
    return dict(row=name, directory=str(directory), tokens=num_tokens, lora=row.lora)


@dataclass(frozen=True, kw_only=True)
class Call:
    """The processes of one call of this program, and where their results go."""

    out: Path
    python: str  # with PyTorch
    deadline_seconds: float  # of time.monotonic
    column_seconds: float
    started: str = field(default_factory=lambda: f"{datetime.datetime.now():%Y-%m-%d %H:%M:%S}")

    def run(self, jobs: Sequence[dict[str, Any]], is_torch: bool) -> list[dict[str, Any]]:
        """Runs jobs in one process; writes and returns a result of each."""
        left_seconds = self.deadline_seconds - time.monotonic()
        limit_seconds = min(self.column_seconds, left_seconds)
        with tempfile.TemporaryDirectory() as directory:
            path, results = Path(directory) / "jobs.json", Path(directory) / "results.jsonl"
            results.touch()
            path.write_text(json.dumps([job | dict(out=str(results)) for job in jobs]))
            if left_seconds < _MIN_SECONDS:
                reason = dict(skipped=f"{left_seconds:.0f} s left")
            else:
                reason = dict(error=_run_process(self._command(path, is_torch), limit_seconds))
            lines = [json.loads(line) for line in results.read_text().splitlines()]
        lines += [reason] * (len(jobs) - len(lines))
        for job, result in zip(jobs, lines):
            if job["column"] != "weights":
                self.write(job, result)
        return lines

    def _command(self, jobs: Path, is_torch: bool) -> list[str]:
        if is_torch:
            return [self.python, "-m", "benchmarks.torch_gpu", str(jobs)]
        return [sys.executable, "-m", "benchmarks.gpu_comparison", f"--child={jobs}"]

    def write(self, job: dict[str, Any], result: dict[str, Any]) -> None:
        names = ("row", "column", "tokens", "repeats", "settings", "dry_run")
        line = {name: job[name] for name in names} | dict(call=self.started) | summary(result)
        with self.out.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line)[:300], file=sys.stderr, flush=True)
        lines = [json.loads(line) for line in self.out.read_text().splitlines()]
        self.out.with_suffix(".md").write_text(page(lines))


def _run_process(command: list[str], limit_seconds: float) -> str:
    """Runs a process; returns why it has no result, which is the end of its messages."""
    environment = os.environ | dict(PYTHONPATH=os.pathsep.join([str(ROOT), *sys.path]))
    if command[0] != sys.executable:
        environment["PYTHONPATH"] = str(ROOT)
    # a session of its own, so that processes of the compiler end, too
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, start_new_session=True, text=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        _, messages = process.communicate(timeout=limit_seconds)
    except subprocess.TimeoutExpired:
        return f"did not finish in {limit_seconds:.0f} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return f"status {process.returncode}: {messages[-_MAX_ERROR_CHARS:]}"


def run_jobs(path: Path) -> None:
    """Measures columns of jaxlc. An error becomes the result of its job."""
    for job in json.loads(path.read_text()):
        try:
            result = measure(job)
        except Exception as error:  # the other jobs must still run
            result = dict(error=f"{type(error).__name__}: {str(error)[:_MAX_ERROR_CHARS]}")
        with Path(job["out"]).open("a") as file:
            file.write(json.dumps(result) + "\n")


def jaxlc_config(job: dict[str, Any]) -> Config:
    """The config of a column of jaxlc, with the weights of the job."""
    num_steps = job["warm_up"] + job["repeats"]
    precision: dict[str, Any] = dict(compute="fp32" if job["dry_run"] else "bf16")
    if job["fp8"]:
        precision = dict(compute="fp8", fp8_matmuls=ROWS[job["row"]].fp8_matmuls)
    if job["dry_run"] and job["lora"]:
        precision |= dict(frozen="fp32")
    sections = dict(
        model=dict(init_from=job["directory"]),
        data=dict(seq_len=job["tokens"]),
        attention=dict(document_mask=False),
        memory=dict(remat="attention", loss_chunk_tokens=min(4096, job["tokens"])),
        precision=precision,
        lora=job["lora"],
        optimizer=dict(
            learning_rate=job["learning_rate"], schedule="constant", warmup_steps=0, weight_decay=0.0
        ),
        train=dict(global_batch_size=1, eval_sequences=1),
        profile=dict(steps=f"{num_steps + 1}:{num_steps + job['traced'] + 1}"),
        runtime=dict(simulated_devices=int(job["dry_run"])),
    )  # fmt: skip
    config = load(ConfigDict(sections))
    changes = (setting.split("=", 1) for setting in job["settings"])
    return with_settings(config, {path: setting_value(value) for path, value in changes})


def setting_value(text: str) -> Any:
    """The value of a setting: JSON, or a text such as cudnn."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Times the steps of jaxlc, and traces the last ones, as `torch_gpu.measure` does."""
    start_seconds = time.perf_counter()
    config = jaxlc_config(job)
    start(config.runtime)
    device = jax.devices()[0]
    step = build_step(config, make_mesh(config.mesh, [device]))
    compiled = step.compile()
    params, _ = load_pretrained(step)
    state, batch = step.init(params), random_batch(step)
    del params
    tokens = np.array(json.loads(Path(job["directory"], "tokens.json").read_text()), np.int32)
    targets = np.roll(tokens, -1)
    batch = batch._replace(
        tokens=jax.device_put(tokens.reshape(batch.tokens.shape), batch.tokens.sharding),
        targets=jax.device_put(targets.reshape(batch.targets.shape), batch.targets.sharding),
    )
    seconds, losses = [], []
    directory = Path(job["directory"])
    num_steps = job["warm_up"] + job["repeats"] + job["traced"]
    with StepProfiler(config, directory, compiled, lambda _: None) as run_step:
        for number in range(1, num_steps + 1):
            run_step.start(number, state)
            step_start = time.perf_counter()
            state, metrics = run_step(number, state, batch)
            jax.block_until_ready((state, metrics))
            seconds.append(time.perf_counter() - step_start)
            losses.append(float(metrics.loss))
            run_step.stop(number, state)
    gpus = "h100:1x1" if job["dry_run"] else ""
    traced = jaxlc.profile.compare(directory / PROFILE_DIRECTORY, topology=gpus)
    shutil.rmtree(directory / PROFILE_DIRECTORY)
    classes = {x.name: x.measured_seconds for x in traced.classes}
    info = environment_info()
    return dict(
        step_seconds=seconds[job["warm_up"] : -job["traced"]],
        first_step_seconds=seconds[0],
        losses=losses,
        attention_seconds=classes[ATTENTION],
        product_seconds=classes[MATMUL],
        peak_bytes=(device.memory_stats() or {}).get("peak_bytes_in_use"),
        attention=step.kernel_names,
        device=info.pop("device"),
        versions={name: str(value) for name, value in info.items()},
        job_seconds=time.perf_counter() - start_seconds,
    )


def class_of(kernel: str) -> str:
    """The class of a kernel of PyTorch, or of an operation of its profile of a CPU, by its name."""
    if _FUSION.match(kernel):  # its name contains names of the operations next to it
        return OTHER
    if _PRODUCT.search(kernel):
        return MATMUL
    event = TraceEvent(kernel, "", "", "", 0.0, 0.0)
    return EventClasses(None).class_of(event) or OTHER


def summary(result: dict[str, Any]) -> dict[str, Any]:
    """A result with the median of its steps and the time of each class. The rest of a step is what
    attention and products do not take, gaps included.
    """
    if "step_seconds" not in result:
        return result
    values = dict(result)
    if kernels := values.pop("kernels", None):
        seconds = Counter[str]()
        for name, (kernel_seconds, _) in kernels.items():
            seconds[class_of(name)] += kernel_seconds
        longest = max(
            (name for name in kernels if class_of(name) == ATTENTION),
            key=lambda name: kernels[name][0],
            default="",
        )
        values |= dict(
            attention_seconds=seconds[ATTENTION], product_seconds=seconds[MATMUL], attention=longest[:80]
        )  # fmt: skip
    median = statistics.median(values["step_seconds"])
    rest = median - values["attention_seconds"] - values["product_seconds"]
    return values | dict(seconds=median, rest_seconds=rest)


def loss_difference(first: Sequence[float], second: Sequence[float], num_steps: int) -> float:
    """The largest relative difference of the losses of the first `num_steps` steps."""
    pairs = itertools.islice(zip(first, second, strict=True), num_steps)
    return max(abs(a - b) / abs(b) for a, b in pairs)


def page(lines: Iterable[dict[str, Any]]) -> str:
    """The latest result of each column, as a Markdown page."""
    latest = {(line["row"], line["column"]): line for line in lines}
    versions: dict[str, str] = {}
    for line in latest.values():
        versions |= line.get("versions", {})
    devices = sorted({x["device"] for x in latest.values() if "device" in x})
    days = sorted({line["call"].split()[0] for line in latest.values()})
    packages = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
    is_dry_run = any(line["dry_run"] for line in latest.values())
    kind = "A dry run of tiny models" if is_dry_run else "All figures are *measured*"
    text = [
        f"# Steps of jaxlc and PyTorch on one {' and one '.join(devices) or 'GPU'}", "",
        f"{' to '.join(sorted({days[0], days[-1]}))}. {packages}. {kind}: medians of steps of one sequence of random"
        " tokens with the same weights, and traces of two more steps. The rest of a step includes gaps.", "",
    ]  # fmt: skip
    for name, row in ROWS.items():
        if columns := {x: latest[name, x] for x in COLUMNS if (name, x) in latest}:
            text += _section(row, columns)
    return "\n".join(text)


def _section(row: Row, columns: Mapping[str, dict[str, Any]]) -> list[str]:
    tokens = next(iter(columns.values()))["tokens"]
    measured = {name: line for name, line in columns.items() if "seconds" in line}
    text = [f"## {row.title}, {tokens:,} tokens", ""]
    if measured:
        text += [
            "| | seconds | attention | products | rest | tokens/s | peak GB | loss |",
            "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        ]
    for name, line in measured.items():
        peak = "" if line["peak_bytes"] is None else f"{line['peak_bytes'] / 1e9:.1f}"
        parts = ("seconds", "attention_seconds", "product_seconds", "rest_seconds")
        times = [f"{line[part]:.3f}" for part in parts]
        rest = [f"{tokens / line['seconds']:,.0f}", peak, f"{line['losses'][0]:.4f}"]
        text.append(f"| {' | '.join([COLUMNS[name].title, *times, *rest])} |")
    text.append("")
    notes = [*_ratios(measured), *_notes(columns)]
    return [*text, *(f"- {note}" for note in notes), ""]


def _ratios(measured: Mapping[str, dict[str, Any]]) -> Iterator[str]:
    """The speed of each column of jaxlc, relative to PyTorch's better checkpoint policy."""
    for ours, prefix in itertools.product(("jaxlc", "jaxlc_fp8"), ("cudnn", "fa3", "fp8")):
        others = [name for name in measured if name.startswith(prefix)]
        if ours in measured and others:
            best = min(others, key=lambda name: measured[name]["seconds"])
            ratio = measured[best]["seconds"] / measured[ours]["seconds"]
            text = f"{COLUMNS[ours].title} is {ratio:.3f} times as fast as {COLUMNS[best].title}"
            difference = loss_difference(measured[ours]["losses"], measured[best]["losses"], 1)
            yield f"{text}; the first losses differ by {difference:.1e}, relative."


def _notes(columns: Mapping[str, dict[str, Any]]) -> Iterator[str]:
    for name, line in columns.items():
        for reason in ("skipped", "error"):
            if reason in line:
                yield f"{COLUMNS[name].title}, {reason}: {' '.join(line[reason].split())}"
    for name, line in columns.items():
        if line.get("attention"):
            head = f", head: {line['head']}" if "head" in line else ""
            yield f"{COLUMNS[name].title}: attention `{line['attention']}`{head}"
    calls = sorted({line["call"] for line in columns.values()})
    if len(calls) > 1:
        yield f"These columns are of {len(calls)} calls, from {calls[0]} to {calls[-1]}."
    if settings := sorted({x for line in columns.values() for x in line["settings"]}):
        yield f"Settings of jaxlc: {', '.join(settings)}."


if __name__ == "__main__":
    define_flags()
    app.run(main)
