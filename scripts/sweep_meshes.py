"""python scripts/sweep_meshes.py --config=FILE[:variant] --topology=GPU:DOMAINSxGPUS [--config.a.b=value ...]

Compiles the training step on every mesh of those GPUs, which need not be here, and ranks them by predicted tokens/s.
Started again it goes on where it was. With --run it measures, on the devices that are here, in one process:

    python scripts/sweep_meshes.py --config=configs/256k.py:mini --run --axes=context,tensor
"""

import sys
from pathlib import Path

from jaxlc.config import Config
from jaxlc.config.command_line import ParsedCommand, run_main

_FLAGS = {
    "topology": "GPUs to compile for: gb200:1x64; config.runtime.topology by default",
    "axes": "mesh axes that vary; context,tensor,fsdp by default",
    "strategies": "of attention: ring,hybrid; the config's by default",
    "remat": "the config's by default",
    "sequence": "tokens of a row: 65536,262144; the config's by default",
    "transports": "of hops: nccl,nvshmem; the config's by default",
    "workers": "compiles side by side; as many as cores and memory allow by default",
    "out": "directory for rows, ranking and pictures; runs/sweep_FILE by default",
    "run": "measure on all devices that are here, or that config.runtime.simulated_devices asks for",
}


def measure(config: Config, repeats: int) -> dict:
    """In a process of its own: only there JAX may start."""
    from jaxlc.sweep import measure

    return measure.measure(config, repeats)


def main(command: ParsedCommand) -> int:
    from jaxlc.sweep import runner

    given = dict(command.extra)
    out = Path(given.pop("out") or f"runs/sweep_{Path(command.workdir).name}")
    if given.pop("run"):
        return runner.measure(command.config, out, measure, **given)
    return runner.compare(command.config, out, **given)


if __name__ == "__main__":
    # A flag without a value: the parser knows flags with values only.
    arguments = ["--run=true" if argument == "--run" else argument for argument in sys.argv]
    sys.exit(run_main(main, arguments, description=__doc__, extra_flags=_FLAGS))
