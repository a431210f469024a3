"""Measures the peak memory of `jaxlc eval` with needles, for several lengths and numbers of
samples.

    python -m benchmarks.needle_memory --lengths=16384,65536 --examples=1,8 --devices=8

Each row is a process of its own on simulated CPU devices, with a randomly initialized model of one
sliding and one full layer. It prints JSON lines; `peak_gib` is the resident memory of all devices
together.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

DEPTHS = "0,0.33,0.67,1"
MODEL = {
    "num_layers": 2, "layer_kinds": "sliding,full", "model_dim": 64, "ffn_dim": 128, "attention.window": 512,
    "attention.num_heads": 2, "attention.num_kv_heads": 1, "attention.head_dim": 16,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", default="16384,65536", help="context lengths in tokens")
    parser.add_argument("--examples", default="1,8", help=f"samples at each of the depths {DEPTHS}")
    parser.add_argument(
        "--devices", type=int, default=8, help="simulated CPU devices of the context axis"
    )
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        workdir = Path(directory) / "run"
        _train(workdir, flags.devices)
        for length in map(int, flags.lengths.split(",")):
            for num_examples in map(int, flags.examples.split(",")):
                out = Path(directory) / f"{length}-{num_examples}"
                print(json.dumps(measure(workdir, out, length, num_examples)), flush=True)


def measure(workdir: Path, out: Path, length: int, num_examples: int) -> dict[str, float]:
    """Runs `jaxlc eval`; returns the number of samples, seconds, CPU seconds and the peak resident
    memory.
    """
    start = time.monotonic()
    usage = _run(
        "eval", str(workdir), "--tasks=needle", f"--lengths={length}", f"--num_examples={num_examples}",
        f"--depths={DEPTHS}", f"--out={out}",
    )  # fmt: skip
    num_samples = num_examples * len(DEPTHS.split(","))
    num_predictions = sum(
        len(path.read_text().splitlines()) - 1 for path in out.glob("step-*/needle-*.jsonl")
    )
    assert num_predictions == num_samples, f"{num_predictions} predictions of {num_samples} samples"
    return dict(
        length=length,
        samples=num_samples,
        seconds=round(time.monotonic() - start, 1),
        cpu_seconds=round(usage.ru_utime + usage.ru_stime, 1),
        peak_gib=round(usage.ru_maxrss / 2**20, 3),  # Linux counts KiB
    )


def _train(workdir: Path, num_devices: int) -> None:
    """One step on short sequences: the memory of an evaluation does not depend on the values of the
    parameters.
    """
    settings = {
        **{f"model.{name}": value for name, value in MODEL.items()},
        "mesh.context": num_devices,
        "mesh.tensor": 1,
        "runtime.simulated_devices": num_devices,
        "data.seq_len": 1024,
        "train.steps": 1,
        "train.eval_sequences": 1,
    }
    overrides = [f"--config.{name}={value}" for name, value in settings.items()]
    _run("train", "--config=quickstart", f"--workdir={workdir}", *overrides)


def _run(*arguments: str):
    """Runs a `jaxlc` command; returns the resources that it used."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "jaxlc", *arguments], stdout=output, stderr=subprocess.STDOUT
        )
        _, status, usage = os.wait4(process.pid, 0)
        if status:
            output.seek(0)
            sys.exit(
                f"jaxlc {arguments[0]} failed:\n{output.read().decode(errors='replace')[-3000:]}"
            )
    return usage


if __name__ == "__main__":
    main()
