"""python -m jaxlc.plan --config=FILE[:variant] --topology=GPU:DOMAINSxGPUS [--config.a.b=value ...] [--advise]

Compiles the training step for GPUs that are not here; prints what it takes, what it sends and which kernels it runs.
"""

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from jaxlc import plan, runtime
from jaxlc.config import RuntimeConfig, transport_settings, with_settings
from jaxlc.config.command_line import ParsedCommand, run_main
from jaxlc.core.errors import UserError

_FLAGS = {
    "topology": "GPUs to compile for, NVLink domains x GPUs in each: h100:8x8; config.runtime.topology by default",
    "transport": "short for --config.runtime.transport: auto, nccl, nvshmem, symmetric or peer",
    "devices-per-process": "GPUs that one process drives; 1 by default",
    "json": "a file for the figures",
    "timeline": "a file for a picture of one layer's predicted time: timeline.png",
    "constants": "a JSON file of measured rates for the predicted time, in place of those of jaxlc/core/hardware.py",
    "advise": "where the step does not fit, compile for single changes that make it fit",
}


def main(command: ParsedCommand) -> int:
    """Returns the exit status 0, whether the step fits or not: the page and the JSON say it."""
    flags = command.extra
    config = command.config
    if flags["transport"] is not None:
        config = with_settings(config, transport_settings(flags["transport"]))
    name = flags["topology"] or config.runtime.topology
    if not name:
        raise UserError("no topology is given; name GPUs to compile for, such as --topology=h100:8x8")
    per_process = flags["devices-per-process"] or "1"
    if not per_process.isdigit():
        raise UserError(f"--devices-per-process is {per_process!r}, which is not a whole number")
    for flag in ("json", "timeline"):
        path = flags[flag]
        if path and not Path(path).resolve().parent.is_dir():
            raise UserError(f"--{flag}={path} is in a directory that is not there; make it, or name another file")
    _start_on_cpu()
    from jaxlc.plan import report

    with _progress() as starting:
        found = plan.plan(
            config,
            name,
            devices_per_process=int(per_process),
            advise=flags["advise"] is not None,
            constants=flags["constants"] or "",
            timeline=flags["timeline"] or "",
            starting=starting,
        )
    command_line = " ".join(["python -m jaxlc.plan", *sys.argv[1:]])
    print(report.page(found, how_to_ask=f"{command_line} --advise"))
    if flags["json"]:
        Path(flags["json"]).write_text(json.dumps(found.to_json(), indent=1) + "\n")
    return 0


def _start_on_cpu() -> None:
    """Starts JAX where there may be GPUs of another kind, or none, and without XLA's remarks on that."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # what is an error comes as an exception
    runtime.start(RuntimeConfig())
    import jax

    jax.config.update("jax_enable_compilation_cache", False)  # cannot read programs for GPUs that are not here


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Gives a function that says what is compiled next: a live line in a terminal, plain lines elsewhere, on stderr."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task("starting", total=None)

        def starting(what: str) -> None:
            bars.reset(task, description=f"compiling {what}")
            if not console.is_terminal:
                console.print(f"compiling {what} ...", markup=False)

        yield starting


if __name__ == "__main__":
    # A flag without a value: the parser knows flags with values only.
    arguments = ["--advise=true" if argument == "--advise" else argument for argument in sys.argv]
    sys.exit(run_main(main, arguments, description=__doc__, extra_flags=_FLAGS))
