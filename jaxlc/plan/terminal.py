"""What the commands that compile plans share: JAX on the CPU, progress on stderr, and checks of their flags."""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from jaxlc import runtime
from jaxlc.config import Config, RuntimeConfig, with_settings
from jaxlc.config.command_line import StageFlags
from jaxlc.config.ranges import Above0, From1
from jaxlc.core.errors import UserError
from jaxlc.core.text import progress_lines


@dataclass(frozen=True, kw_only=True)
class TargetFlags(StageFlags):
    """The flags of every verb that compiles for absent GPUs."""

    topology: str = ""  # target GPUs, NVLink domains x GPUs per domain: h100:8x8; default: config.runtime.topology
    constants: str = ""  # JSON file of measured efficiencies and latencies; default: those of jaxlc/core/hardware.py


@dataclass(frozen=True, kw_only=True)
class NodeFlags(TargetFlags):
    """The flags of every verb that plans a run on nodes, too."""

    devices_per_process: From1[int] = 1  # GPUs per process
    # host memory of one node in GiB; default: a typical value for these GPUs.
    host_memory_gib: Above0[float] | None = None
    # price of one GPU for one hour, in any currency; prints the cost of the run, or of tokens.
    price_per_gpu_hour: Above0[float] | None = None


def start_on_cpu() -> None:
    """Starts JAX on the CPU, whether or not there are GPUs, and without XLA's log messages about them."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # errors are raised as exceptions
    runtime.start(RuntimeConfig(num_processes=1))


def with_transport(config: Config, transport: str) -> Config:
    """The config with the transport of --transport; unchanged if it is ""."""
    return with_settings(config, {"runtime.transport": transport}) if transport else config


def target_topology(topology: str, config: Config) -> str:
    """The GPUs to compile for: those of --topology or of the config.

    Raises:
      UserError: there are none.
    """
    if not (topology or config.runtime.topology):
        raise UserError("no topology: pass target GPUs, such as --topology=h100:8x8")
    return topology or config.runtime.topology


@contextlib.contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Yields a function that shows what is compiled, on stderr: a spinner in a terminal, lines elsewhere."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    disabled = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=disabled) as bars, contextlib.ExitStack() as lines:
        task = bars.add_task("starting", total=None)

        def starting(description: str) -> None:
            bars.reset(task, description=f"compiling {description}")
            if disabled:
                lines.close()  # of the program before
                console.print(f"compiling {description} ...", markup=False)
                lines.enter_context(progress_lines(f"compiling {description}"))

        yield starting
