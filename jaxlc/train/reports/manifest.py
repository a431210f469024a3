"""What a run was started with, besides its settings: versions, commit, devices. Kept in its resolved_config.py."""

import ast
import importlib.metadata
import platform
import shlex
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import jax

from jaxlc.core.axes import mesh_text
from jaxlc.core.time_limit import call_within
from jaxlc.step.step import TrainStep

_MARKER = "\n\n# The last start of the run; not settings.\nMANIFEST = "
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
_PACKAGE = Path(__file__).parents[2]
_GIT_SECONDS = 5.0


def make_manifest(before: dict[str, Any]) -> dict[str, Any]:
    """The manifest of this start.

    Args:
      before: that of the start before, whose identifier the run keeps.
    """
    versions = {name: importlib.metadata.version(name) for name in _PACKAGES}
    # A source tree that is not installed has no metadata. An import of the package, which imports this one, is a cycle.
    versions = dict(jaxlc=sys.modules["jaxlc"].__version__) | versions
    return dict(
        run_id=before.get("run_id") or uuid.uuid4().hex[:12],
        started=time.strftime("%Y-%m-%d %H:%M:%S %z"),
        command=shlex.join(sys.argv),
        python=platform.python_version(),
        commit=call_within(_GIT_SECONDS, _commit) or "",
        packages=versions,
        devices=f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        num_processes=jax.process_count(),
    )


def plan_summary(step: TrainStep, compiled: jax.stages.Compiled) -> dict[str, Any]:
    """What is known of a compiled step before it runs: sequence length, mesh, attention, FLOPs, and its memory on each
    device and in host memory, in bytes."""
    stats, config = compiled.memory_analysis(), step.config
    summary: dict[str, Any] = dict(seq_len=config.data.seq_len, mesh=mesh_text(step.mesh.shape))
    if step.model is None:
        summary |= dict(
            attention=f"{config.attention.strategy}, {step.kernel_choice}", flops_per_step=config.flops_per_step
        )
    if stats is not None:  # some backends have none
        summary |= dict(
            device_bytes=_needed(stats, ""),
            temporary_bytes=stats.temp_size_in_bytes,
            host_bytes=_needed(stats, "host_"),
        )
    return summary


def _needed(stats: Any, memory: str) -> int:
    """Bytes of arguments, results that are not written over arguments, and temporaries."""
    argument, output, alias, temp = (
        getattr(stats, f"{memory}{name}_size_in_bytes") for name in ("argument", "output", "alias", "temp")
    )
    return argument + output - alias + temp


def split_text(text: str) -> tuple[str, dict[str, Any]]:
    """The settings and the manifest of a resolved_config.py; an empty one for files of earlier versions."""
    settings, _, manifest = text.partition(_MARKER)
    try:
        return settings, ast.literal_eval(manifest.strip()) if manifest else {}
    except (SyntaxError, ValueError):
        return settings, {}


def joined_text(settings: str, manifest: dict[str, Any]) -> str:
    """The text of a resolved_config.py."""
    entries = "".join(f"    {name!r}: {value!r},\n" for name, value in manifest.items())
    return f"{settings.rstrip()}\n{_MARKER}{{\n{entries}}}\n"


def _commit() -> str:
    """The commit of the checkout that contains the package, with "+" if it has changes; "" outside a checkout."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(_PACKAGE), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=_GIT_SECONDS, check=True).stdout.strip()

    if not git("ls-files", "__init__.py"):  # an installed package below another checkout
        return ""
    return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
