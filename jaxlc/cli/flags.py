"""What verbs share: flags and their checks, output files, JAX on the CPU, and progress on stderr."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from jaxlc.config import Config, RuntimeConfig
from jaxlc.config.command_line import StageFlags, VerbFlags
from jaxlc.config.schema import SamplingSettings
from jaxlc.config.settings import hint_at
from jaxlc.config.values import Above0, From1
from jaxlc.core import Log, UserError, print_to_stderr, progress_lines
from jaxlc.core.files import local_path

_IMAGES = (".png", ".svg", ".pdf", ".jpg", ".jpeg", ".webp")


@dataclass(frozen=True, kw_only=True)
class ModelFlags(VerbFlags):
    """The flags of every verb that computes with a model."""

    # chat: chatml, llama3 or a Jinja file, for a model without template or with another one
    chat_template: str = ""
    # sizes of mesh axes, such as context=4,tensor=2; default: the mesh of the run
    mesh: str | None = None
    simulated_devices: int = 0  # number of CPU devices to simulate


@dataclass(frozen=True, kw_only=True)
class SamplingFlags(SamplingSettings, ModelFlags):
    """The flags of the verbs that sample a text."""

    positional = ("source",)

    source: str  # workdir of a run, Hugging Face directory or hub id
    step: int | None = None  # checkpoint to use; default: the latest
    adapter: str = ""  # directory of peft with LoRA adapters of the Hugging Face model SOURCE


def settings_in(flags: Any, part: type) -> dict[str, Any]:
    """The flags that are fields of `part`, such as `SamplingSettings`."""
    return {field.name: getattr(flags, field.name) for field in fields(part)}


@dataclass(frozen=True, kw_only=True)
class TargetFlags(StageFlags):
    """The flags of every verb that compiles for absent GPUs."""

    # target GPUs, NVLink domains x GPUs per domain: h100:8x8; default: config.runtime.topology
    topology: str = ""
    # JSON file of measured efficiencies and latencies; default: those of jaxlc/core/hardware.py
    constants: str = ""


@dataclass(frozen=True, kw_only=True)
class NodeFlags(TargetFlags):
    """The flags of every verb that plans a run on nodes, too."""

    devices_per_process: From1[int] = 1  # GPUs per process
    # host memory of one node in GiB; default: a typical value for these GPUs.
    host_memory_gib: Above0[float] | None = None
    # price of one GPU for one hour, in any currency; prints the cost of the run, or of tokens.
    price_per_gpu_hour: Above0[float] | None = None


def import_jax() -> None:
    """Imports JAX without the notes of its CUDA plugin."""
    import jaxlc.runtime.stderr  # noqa: F401


def start_on_cpu() -> None:
    """Starts JAX on the CPU, whether or not there are GPUs, and without XLA's log messages about
    them.
    """
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # errors are raised as exceptions
    from jaxlc.runtime.start import start

    start(RuntimeConfig(num_processes=1))


def target_topology(topology: str, config: Config) -> str:
    """The GPUs to compile for: those of --topology or of the config.

    Raises:
      UserError: there are none.
    """
    if not (topology or config.runtime.topology):
        raise UserError("no topology: pass target GPUs, such as --topology=h100:8x8")
    return topology or config.runtime.topology


@contextlib.contextmanager
def progress() -> Iterator[Log]:
    """Yields a function that shows what is compiled from its call on, on stderr."""
    with contextlib.ExitStack() as lines:
        lines.enter_context(progress_lines("starting"))

        def starting(description: str) -> None:
            lines.close()  # of what was before
            print_to_stderr(f"compiling {description} ...")
            lines.enter_context(progress_lines(f"compiling {description}"))

        yield starting


def mesh_sizes(mesh: str | None) -> dict[str, int] | None:
    """The sizes of --mesh, "context=4,tensor=2", by axis; None without the flag.

    Raises:
      UserError: another form.
    """
    if mesh is None:
        return None
    sizes = {}
    for part in mesh.split(","):
        axis, _, size = part.partition("=")
        if not size.isdecimal() or int(size) < 1:
            raise UserError(
                f"invalid value {mesh!r} for --mesh: expected sizes of axes, such as context=4,tensor=2"
            )
        hint_at(f"mesh.{axis.strip()}")  # raises for an unknown one
        sizes[axis.strip()] = int(size)
    return sizes


def check_output_file(flag: str, path: str | Path, *, is_image: bool = False) -> None:
    """Checks that a file can be written; the file may exist.

    Args:
      flag: name of the flag for the message.
      is_image: the suffix selects the format.
    Raises:
      UserError: a directory, a missing directory, no permission, or an unknown image format.
    """
    path = local_path(path)
    directory = path.resolve().parent
    if path.is_dir():
        raise UserError(f"--{flag}={path} is a directory; choose the name of a file")
    if not directory.is_dir():
        raise UserError(
            f"--{flag}={path}: the directory does not exist; create it, or choose another file"
        )
    if not os.access(path if path.exists() else directory, os.W_OK):
        raise UserError(f"--{flag}={path}: no permission to write this file; choose another file")
    if is_image and path.suffix.lower() not in _IMAGES:
        raise UserError(
            f"invalid --{flag}={path}: expected a file name that ends with {', '.join(_IMAGES)}"
        )
