"""The files of a checkpoint that several processes write: counted, and extrapolated to more
processes.

A real checkpoint of `jaxlc.checkpoints`, of 24 small arrays that are sharded over 8 simulated
devices.
"""

import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np

from jaxlc.config import RuntimeConfig
from jaxlc.runtime.start import start

NUM_DEVICES, NUM_ARRAYS = 8, 24
_STEP = 1


def save(directory: Path) -> None:
    """Every process calls it."""
    start(RuntimeConfig(simulated_devices=NUM_DEVICES))
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    from jaxlc.checkpoints.save import Checkpoints

    mesh = jax.make_mesh((NUM_DEVICES,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec("x"))
    values = np.random.default_rng(0).random((1024, 16), np.float32)
    state = {
        f"array{index}": jax.make_array_from_callback(values.shape, sharding, lambda at: values[at])
        for index in range(NUM_ARRAYS)
    }
    checkpoints = Checkpoints(directory, keep=1, warn=print, finite_params=False)
    checkpoints.save(_STEP, state, dict(step=_STEP, config=dict(model={})))
    checkpoints.close()


def count_files(num_processes: int, port: int) -> dict[str, tuple[int, int]]:
    """(files, bytes) by kind, of a checkpoint that this number of processes has written."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "benchmarks.scale.checkpoint_files", directory]
        shared = dict(
            JAX_NUM_PROCESSES=str(num_processes), JAX_COORDINATOR_ADDRESS=f"127.0.0.1:{port}"
        )
        environments = [
            os.environ | shared | dict(JAX_PROCESS_ID=str(index)) for index in range(num_processes)
        ]
        running = [
            subprocess.Popen(
                command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            for environment in environments
        ]
        assert [process.wait() for process in running] == [0] * num_processes
        step, counts, sizes = Path(directory, str(_STEP)), Counter[str](), Counter[str]()
        for path in step.rglob("*"):
            if path.is_file():
                parts = path.relative_to(step).parts
                is_own = any(part.startswith("ocdbt.process_") for part in parts)
                kind = f"{'of each process' if is_own else 'shared'}, {'values' if 'd' in parts else 'metadata'}"
                counts[kind] += 1
                sizes[kind] += path.stat().st_size
    return {kind: (counts[kind], sizes[kind]) for kind in sorted(counts)}


def rows(port: int, processes: tuple[int, ...], extrapolated: int) -> list[dict[str, object]]:
    """A row per kind of file; the last column is on the line through the two largest numbers of
    processes.
    """
    measured = {count: count_files(count, port + count) for count in processes}
    *_, small, large = processes
    result = []
    for kind, at_end in measured[large].items():
        at_small = measured[small].get(kind, (0, 0))
        slopes = [(y - x) / (large - small) for x, y in zip(at_small, at_end)]
        end = [y + slope * (extrapolated - large) for y, slope in zip(at_end, slopes)]
        columns = {
            f"{count} processes": _text(*measured[count].get(kind, (0, 0))) for count in processes
        }
        result.append({"files": kind, **columns, f"{extrapolated:,}, extrapolated": _text(*end)})
    return result


def _text(num_files: float, num_bytes: float) -> str:
    return f"{num_files:,.0f} files, {num_bytes / 1024:,.1f} KiB"


if __name__ == "__main__":
    save(Path(sys.argv[1]))
