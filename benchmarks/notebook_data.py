"""Compiles the plans and sweeps that the notebooks show, and writes them to notebooks/data/.

    python -m benchmarks.notebook_data
    python -m benchmarks.notebook_data --parts=plans

Everything is AOT-compiled, without a GPU. All parts together take about 15 minutes on one CPU core.
Compiled points of the sweep and of the memory curves are stored in --cache; an interrupted command
resumes from them.
"""

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from absl import app, flags

from benchmarks import memory_cases
from benchmarks.memory_cases import Case
from jaxlc.core.errors import UserError

PARTS = ("plans", "sweep", "memory")
# The base, with tensor parallelism in each node, and changes of one setting. One document per
# sequence.
_CONFIG = "jaxlc plan --config=256k:h100 --transport=nccl --config.attention.document_mask=False"
_BASE = f"{_CONFIG} --config.mesh.fsdp=1 --config.mesh.tensor=8 --config.train.gradient_accumulation_steps=16"
PLANS = {
    "256k_base": _BASE,
    "256k_mesh": _CONFIG,  # the mesh of the config
    "256k_nvshmem": _BASE.replace("--transport=nccl", "--transport=nvshmem"),
    "256k_remat_full": f"{_BASE} --config.memory.remat=full",
    "256k_document_mask": _BASE.replace("document_mask=False", "document_mask=True"),
    "256k_gb200": f"{_BASE} --topology=gb200:1x64",
    "1m_1gpu": "jaxlc plan --config=1m_1gpu",
}
SWEEP = (
    "jaxlc sweep --config=256k:h100 --topology=h100:8x8 --transports=nccl --config.attention.document_mask=False"
    " --workers=1"
)
_LENGTHS = (65_536, 262_144, 1_048_576)
_ROW_KEYS = (
    "seq_len", "overrides", "fits", "device_fits", "device_peak_bytes", "device_usable_bytes", "host_bytes_per_node",
    "staging_bytes_per_node", "host_usable_bytes_per_node", "step_seconds", "tokens_per_second_per_device",
    "exposed_host_copy_seconds", "kernel", "jax",
)  # fmt: skip


def define_flags(values: flags.FlagValues = flags.FLAGS) -> None:
    flags.DEFINE_list("parts", list(PARTS), "parts to write", flag_values=values)
    flags.DEFINE_string("out", "notebooks/data", "directory of the files", flag_values=values)
    flags.DEFINE_string(
        "cache", "runs/notebook_data", "directory of compiled points", flag_values=values
    )


def main(_) -> None:
    values = flags.FLAGS
    out, cache = Path(values.out), Path(values.cache)
    writers = {"plans": write_plans, "sweep": write_sweep, "memory": write_memory}
    try:
        for part in values.parts:
            if part not in writers:
                raise UserError(f"invalid {part!r} for --parts: expected {', '.join(PARTS)}")
            writers[part](out, cache)
    except (UserError, KeyboardInterrupt, subprocess.CalledProcessError) as error:
        sys.exit(f"error: {error}")


def write_plans(out: Path, cache: Path) -> None:
    """Writes plan_NAME.json: the plan, and its command."""
    cache.mkdir(parents=True, exist_ok=True)
    for name, command in PLANS.items():
        path = cache / f"{name}.json"
        _run(f"{command} --json={path}")
        values = {"command": f"{command} --json=plan.json"} | json.loads(path.read_text())
        (out / f"plan_{name}.json").write_text(json.dumps(values) + "\n")


def write_sweep(out: Path, cache: Path) -> None:
    """Writes the points of the mesh sweep."""
    directory = cache / "sweep"
    _run(f"{SWEEP} --out={directory}")
    shutil.copy(directory / "points.jsonl", out / "sweep_256k.jsonl")


def write_memory(out: Path, cache: Path) -> None:
    """Writes the memory of one H100 over the sequence length, for a growing list of settings."""
    memory_cases.start()
    cases = list(memory_over_length())
    rows = memory_cases.compile_cases(cases, cache / "memory")
    points = [
        {"settings": case.name} | {key: row[key] for key in _ROW_KEYS}
        for case, row in zip(cases, rows, strict=True)
    ]
    values = {
        "command": "python -m benchmarks.notebook_data --parts=memory",
        "model": "llama3.1-8b",
    }
    values |= {"topology": "h100:1x1", "points": points}
    (out / "memory_over_length.json").write_text(json.dumps(values, indent=0) + "\n")


def memory_over_length() -> Iterator[Case]:
    """Llama 3.1 8B on one H100. "and" adds a setting to the line before; "tiles" are all of those
    up to tile_tokens.
    """
    on_host = {"memory.optimizer": "host", "memory.parameters": "host"}
    offload = on_host | {"memory.offload": ("residual",)}
    tiles = offload | {"memory.tile_tokens": 32_768}
    lines = {
        "remat=none": ({"memory.remat": "none"}, _LENGTHS[:2]),
        "remat=attention": ({"memory.remat": "attention"}, _LENGTHS),
        "remat=full": ({}, _LENGTHS),
        "and optimizer=host": ({"memory.optimizer": "host"}, _LENGTHS),
        "and parameters=host": (on_host, _LENGTHS),
        "and offload=residual": (offload, _LENGTHS),
        "and tile_tokens=32768": (tiles, _LENGTHS),
        "tiles, layers_per_remat_group=2": (tiles | {"memory.layers_per_remat_group": 2}, _LENGTHS),
        "tiles, precision.compute=fp8": (tiles | {"precision.compute": "fp8"}, _LENGTHS),
        "tiles, loss in one chunk": (tiles | {"memory.loss_chunk_tokens": 0}, _LENGTHS[:2]),
    }
    for name, (settings, lengths) in lines.items():
        for seq_len in lengths:
            changed = dict(settings)
            if "memory.loss_chunk_tokens" in changed:
                changed["memory.loss_chunk_tokens"] = seq_len
            yield Case(
                name, "h100:1x1", memory_cases.mesh(context=1) | changed | {"data.seq_len": seq_len}
            )


def _run(command: str) -> None:
    """Runs a jaxlc command with this Python."""
    print(command, flush=True)
    subprocess.run([sys.executable, "-m", "jaxlc", *shlex.split(command)[1:]], check=True)


if __name__ == "__main__":
    define_flags()
    app.run(main)
