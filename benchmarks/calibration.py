"""The model of time against published runs: the nearest step that we can compile, predicted, over what was measured."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
from jax.stages import Compiled

from jaxlc.config import Config, defaults, load
from jaxlc.core import hardware
from jaxlc.core.flops import training_flops
from jaxlc.hlo import parse
from jaxlc.simulate.roofline import Roofline
from jaxlc.simulate.timeline import Prediction, predict
from jaxlc.simulate.topology import Topology, make_mesh, options_without_gpu, topology
from jaxlc.train.step import build_step


class Published(NamedTuple):
    """A measured run, and the settings nearest to it."""

    name: str
    unit: str  # a key of _SPEEDS
    figure: float
    is_f8: bool  # its linear layers multiply float8; ours bfloat16
    topology: str
    settings: dict[str, int | str]  # over _COMMON
    differs: str  # from what is compiled here; the index of a note


_LLAMA2_7B = {  # github.com/meta-llama: the shapes of Llama 2 7B
    "model.vocab_size": 32_000,
    "model.num_kv_heads": 32,
    "model.ffn_dim": 11_008,
}
_COMMON = {
    "model.preset": "llama3-8b",
    "attention.document_mask": False,
    "attention.kernel": "cudnn",
    "train.eval_sequences": 8,  # a multiple of any number of rows here
}


def _torchtitan(num_tokens: int, context: int, figure: float) -> Published:
    settings = {"mesh.fsdp": 8 // context, "mesh.context": context, "train.global_batch_size": 8 // context}
    settings |= {"data.seq_len": num_tokens, "memory.remat": "full"}
    name = f"TorchTitan, Llama 3.1 8B, FP8, {num_tokens // 1024}K, 8 H100"
    return Published(name, "tokens/s a GPU", figure, True, "h100:1x8", settings, "torchtitan")


RUNS = (
    Published(
        "TorchTitan, Llama 3.1 8B, bf16, 8K, 8 H100", "tokens/s a GPU", 6667, False, "h100:1x8",
        {"mesh.fsdp": 8, "train.global_batch_size": 16, "data.seq_len": 8192, "memory.remat": "attention"},
        "torchtitan",
    ),
    _torchtitan(32_768, 1, 3890),
    _torchtitan(65_536, 2, 2540),
    _torchtitan(131_072, 4, 1071),
    _torchtitan(262_144, 8, 548),
    Published(
        "NeMo, Llama 2 7B, FP8, 256K, 256 H100", "TFLOP/s a GPU, full square", 549, True, "h100:4x8",
        {
            **_LLAMA2_7B, "mesh.context": 8, "mesh.tensor": 4, "data.seq_len": 262_144,
            "memory.remat": "attention",
        },
        "nemo",
    ),
    Published(
        "NeMo, Llama 2 7B, FP8, 1M, 1024 H100", "TFLOP/s a GPU, full square", 536, True, "h100:32x8",
        {**_LLAMA2_7B, "mesh.context": 32, "mesh.tensor": 8, "data.seq_len": 1_048_576, "memory.remat": "none"},
        "nemo",
    ),
    Published(
        "TRL, Qwen3 8B, bf16, 1M, 8 H100", "s a step", 380, False, "h100:1x8",
        {
            "model.preset": "qwen3-8b", "mesh.context": 8, "data.seq_len": 1_048_576,
            "memory.remat": "full",
        },
        "trl",
    ),
    Published(
        "MEMO, GPT 7B, 1M, 8 A800", "% MFU, causal", 52.3, False, "a100:1x8",
        {"mesh.context": 8, "data.seq_len": 1_048_576, "memory.remat": "attention"},
        "memo",
    ),
)  # fmt: skip

# What each figure grows with, so that predicted over published is a ratio of speeds.
_SPEEDS: dict[str, Callable[[Config, Topology, Prediction], float]] = {
    "tokens/s a GPU": lambda config, gpus, found: found.tokens_per_second_per_device,
    "TFLOP/s a GPU, full square": lambda config, gpus, found: (
        _full_square_flops(config) / found.step_seconds / gpus.num_gpus / 1e12
    ),
    "% MFU, causal": lambda config, gpus, found: 100 * found.mfu_causal,
    "s a step": lambda config, gpus, found: found.step_seconds,
}


def page(command: str) -> str:
    """The table, as Markdown. Compiles a step for each run."""
    rows = [_row(run) for run in RUNS]
    introduction = _INTRODUCTION.format(command=command, version=jax.__version__)
    return "\n".join([introduction, *_HEADER, *rows, "", *_notes()]) + "\n"


def config_of(run: Published) -> Config:
    config = defaults()
    for path, value in {**_COMMON, **run.settings}.items():
        section, _, name = path.partition(".")
        config[section][name] = value
    return load(config)


def _row(run: Published) -> str:
    config, gpus = config_of(run), topology(run.topology)
    step = build_step(config, make_mesh(gpus, config.mesh))
    executable = step.compile(extra_options=options_without_gpu(config.precision.compute))
    program = parse(executable.as_text())
    rates = [Roofline()]
    if run.is_f8:  # the same program with its products at twice the peak, and what is reached of that
        rates.append(dataclasses.replace(rates[0], matmul_share=2 * hardware.F8_MATMUL_SHARE))
    found = [predict(program, gpus, config, each) for each in rates]
    cells = [run.name, f"{run.figure:g} {run.unit}"]
    for prediction in found:
        figure = _SPEEDS[run.unit](config, gpus, prediction)
        ratio = run.figure / figure if run.unit == "s a step" else figure / run.figure
        cells += [f"{figure:,.1f}", f"**{ratio:.2f}**"]
    cells += [""] * (6 - len(cells))
    shares = ", ".join(f"{kind} {seconds / found[0].step_seconds:.0%}" for kind, seconds in _largest(found[0]))
    mesh = " x ".join(f"{axis} {size}" for axis, size in vars(config.mesh).items() if size > 1)
    settings = f"`{run.topology}` {mesh}, remat `{config.memory.remat}`{_too_large(executable, gpus)}"
    cells += [settings, shares, f"[{run.differs}](#{run.differs})"]
    return f"| {' | '.join(cells)} |"


def _too_large(executable: Compiled, gpus: Topology) -> str:
    memory = executable.memory_analysis()
    num_bytes = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    return f", does not fit: {num_bytes / 2**30:.1f} GiB" if num_bytes > gpus.device.memory_bytes else ""


def _largest(prediction: Prediction) -> list[tuple[str, float]]:
    kinds = prediction.seconds_by_kind.items()
    return [(kind, seconds) for kind, seconds in kinds if seconds > 0.005 * prediction.step_seconds]


def _full_square_flops(config: Config) -> float:
    return training_flops(
        config.model,
        rows=config.train.global_batch_size,
        seq_len=config.data.seq_len,
        attention="full",
    )


_COLUMNS = (
    "run", "published", "predicted", "speed over published", "with FP8's rate", "speed over published",
    "compiled here", "predicted time goes to", "what differs",
)  # fmt: skip
_HEADER = (f"| {' | '.join(_COLUMNS)} |", "| --- " * len(_COLUMNS) + "|")
_INTRODUCTION = """\
# Predicted step times against published ones

Made by `{command}` with JAX {version}.

**These times are a model's. No GPU has confirmed them here.** For each published run the nearest step that this
trainer can make is compiled for the same GPUs, and its schedule is walked with the model of time of
`jaxlc/simulate/timeline.py` and the constants of `jaxlc/core/hardware.py`. The constants come from benchmarks of single
kernels and links; none was changed to fit this table, misses included.

The published programs are other programs: another attention kernel, another ring, another recomputation. So a speed
over 1 means that our step *would* be faster if it reached what kernels reach alone, and a ratio that drifts along the
rows of one source shows what the model leaves out. Where the published run multiplied float8, the second prediction
gives the matrix products of our bfloat16 program FP8's rate; attention stays bfloat16, as theirs does.

Where our step does not fit the GPU's memory, the compiler's schedule saves memory and hides less: its prediction is
that of a program that would not run.
"""


def _notes() -> Iterator[str]:
    yield "## What differs\n"
    for name, (source, text) in _NOTES.items():
        yield f"### {name}\n\n{source}. {text}\n"
    yield _READING


_NOTES = {
    "torchtitan": (
        "github.com/pytorch/torchtitan, docs/performance.md, tables 1 and 2",
        "Its H100s have 96 GB of HBM2e at 2.4 TB/s and a power limit of 500 W, ours 3.35 TB/s and 700 W. Attention is"
        " PyTorch's SDPA. The run at 8K recomputes selected operations, ours all but attention; the others recompute"
        " everything, as ours. The ratio grows with the share of attention: if the rest took what is predicted, theirs"
        " would take three times as long at 256K as it does at cuDNN's published rates.",
    ),
    "nemo": (
        "github.com/NVIDIA/NeMo, docs/source/performance/performance_long_sequence.md",
        "TFLOP/s count the whole square of attention, of which causal attention computes half. It runs TP 4 x CP 8 x"
        " DP 8 at 256K and TP 8 x CP 32 x DP 4 at 1M; data parallelism is left out here, for it hardly changes what a"
        " GPU does. What it recomputes is not said; ours is compiled with as little as fits.",
    ),
    "trl": (
        "github.com/huggingface/trl, docs/source/long_context_training.md",
        "Its attention is PyTorch's, on a ring of 8, in 56 GB a GPU. Our step of these settings does not fit 80 GB; it"
        " is here for its time.",
    ),
    "memo": (
        "arXiv:2407.12117",
        "An A800 is an A100 with 400 GB/s of NVLink instead of 600. A GPT of 7B without gates, other"
        " parallelism, activations kept in the host's memory in place of recomputation. Its MFU is taken for causal."
        " What attention kernels reach on an A100 is taken from an H100, and is a smaller part there than it should"
        " be: FlashAttention-2 reaches 0.6 to 0.7 of an A100's peak.",
    ),
}
_READING = """\
## How to read a prediction

The table says how far off a prediction may be, and that it is mostly too fast. Compare predictions with each other:
another mesh, strategy, transport or recomputation of the same model on the same GPUs. The model leaves out clocks that
fall under load, collectives that take multiprocessors from kernels, ranks that wait for slower ones, input and the
host, all of which make real steps slower. Rates measured on your own GPUs can replace those of the table
(`jaxlc.simulate.roofline.read`)."""
