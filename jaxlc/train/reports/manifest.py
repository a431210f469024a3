"""resolved_config.py in the workdir: all settings of a run as a config file, and what it was
started with besides them: versions, commit, devices.
"""

import ast
import contextlib
import importlib.metadata
import itertools
import platform
import shlex
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from jaxlc.config import Stage, read_config
from jaxlc.config.files import config_text
from jaxlc.config.settings import converted
from jaxlc.config.values import flattened
from jaxlc.core import UserError, first_of, mesh_text, reason_of
from jaxlc.core.files import read_json_file, replacing
from jaxlc.interrupts import call_within
from jaxlc.runtime.watchdog import on_process_0
from jaxlc.step.step import TrainStep

_MARKER = "\n\n# The last start of the run; not settings.\nMANIFEST = "
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
_PACKAGE = Path(__file__).parents[2]
_GIT_SECONDS = 5.0


def make_manifest(before: dict[str, Any], workdir: Path) -> dict[str, Any]:
    """The manifest of this start.

    Args:
      before: the manifest of the start before. A run keeps its identifier; a copy of its workdir gets a new one.
    """
    versions = {name: importlib.metadata.version(name) for name in _PACKAGES}
    # A source tree that is not installed has no metadata. An import of the package, which imports
    # this one, is a cycle.
    versions = dict(jaxlc=sys.modules["jaxlc"].__version__) | versions
    run_id = None if _is_copy(before, workdir) else before.get("run_id")
    return dict(
        run_id=run_id or uuid.uuid4().hex[:12],
        workdir=str(workdir.absolute()),
        started=time.strftime("%Y-%m-%d %H:%M:%S %z"),
        command=shlex.join(sys.argv),
        python=platform.python_version(),
        commit=call_within(_GIT_SECONDS, _commit) or "",
        packages=versions,
        devices=f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        num_processes=jax.process_count(),
    )


def _is_copy(before: dict[str, Any], workdir: Path) -> bool:
    """Whether another directory has the run. Its local checkpoints must not be shared with a copy."""
    first = Path(str(before.get("workdir", workdir)))
    with contextlib.suppress(OSError, ValueError):
        is_run = read_manifest(first).get("run_id") == before.get("run_id")
        return is_run and not first.samefile(workdir)
    return False


def plan_summary(step: TrainStep, compiled: jax.stages.Compiled) -> dict[str, Any]:
    """What is known of a compiled step before it runs: sequence length, mesh, attention, FLOPs, and
    its memory on each device and in host memory, in bytes."""
    stats = compiled.memory_analysis()
    config = step.config
    summary: dict[str, Any] = dict(seq_len=config.data.seq_len, mesh=mesh_text(step.mesh.shape))
    if step.model is None:
        summary |= dict(
            attention=f"{config.attention.strategy}, {step.kernel_choice}",
            flops_per_step=config.flops_per_step,
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
        getattr(stats, f"{memory}{name}_size_in_bytes")
        for name in ("argument", "output", "alias", "temp")
    )
    return argument + output - alias + temp


def _read(path: Path) -> tuple[str, dict[str, Any]]:
    """The settings and the manifest of a resolved_config.py, empty without the file; an empty
    manifest if it cannot be read.
    """
    text = path.read_text("utf-8", "replace") if path.exists() else ""
    settings, _, manifest = text.partition(_MARKER)
    try:
        return settings, ast.literal_eval(manifest.strip()) if manifest else {}
    except (SyntaxError, ValueError):
        return settings, {}


def _write(path: Path, settings: str, manifest: dict[str, Any]) -> None:
    """Writes a resolved_config.py."""
    entries = "".join(f"    {name!r}: {value!r},\n" for name, value in manifest.items())
    with replacing(path) as out:
        out.write(f"{settings.rstrip()}\n{_MARKER}{{\n{entries}}}\n".encode())


def _commit() -> str:
    """The commit of the checkout that contains the package, with "+" if it has changes; "" outside
    a checkout.
    """

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(_PACKAGE), *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=_GIT_SECONDS, check=True
        ).stdout.strip()

    if not git("ls-files", "__init__.py"):  # an installed package below another checkout
        return ""
    return git("rev-parse", "HEAD") + (
        "+" if git("status", "--porcelain", "--untracked-files=no") else ""
    )


CONFIG_COPY = "resolved_config.py"
PLAN_FILE = "plan.json"  # of `jaxlc plan --json`


def keep_config(workdir: Path, stages: Sequence[Stage]) -> str | None:
    """Writes the settings and the manifest of this start to `workdir`. Different settings of an
    earlier start are kept next to them, with a number.

    Returns:
      What changed since that start, in one line; None if nothing did.
    Raises:
      OSError: the files cannot be written.
    """
    path = workdir / CONFIG_COPY
    text = config_text(stages)
    is_changed = path.exists()
    text_before, manifest = _read(path)
    is_changed &= text_before.rstrip() != text.rstrip()
    if is_changed:
        numbered = (path.with_stem(f"{path.stem}-{number}") for number in itertools.count(1))
        kept = next(file for file in numbered if not file.exists())
        # a copy: after a kill, `path` still has the identifier of the run
        with replacing(kept) as out:
            out.write(path.read_bytes())
    _write(path, text, make_manifest(manifest, workdir))
    if not is_changed:
        return None
    before = _settings(kept)
    after = _settings(path)
    names = [name for name in before | after if before.get(name) != after.get(name)]
    if not names:  # only their order or the text around them
        kept.unlink()
        return None
    shown = first_of(names)
    return f"settings changed since the last start: {shown}; the earlier ones are in {kept.name}"


def keep_plan(workdir: Path, stage: str, plan: dict[str, Any]) -> None:
    """Adds what is known of the compiled step of a stage to the manifest in `workdir`.

    Raises:
      OSError: the file cannot be written.
    """
    path = workdir / CONFIG_COPY
    text, manifest = _read(path)
    manifest["plan"] = {**manifest.get("plan", {}), stage: plan}
    _write(path, text, manifest)


def differing_kernel(workdir: Path, stage: str, step: TrainStep) -> str | None:
    """How the attention kernel of a stage differs from the plan in `workdir`, in one line; None if
    it does not, or if no plan is there.
    """
    path = workdir / PLAN_FILE
    if not path.exists() or step.model is not None:
        return None
    try:
        plan = read_json_file(path)
        if "stages" in plan:
            plan = next(x["plan"] for x in plan["stages"] if x["name"] == stage)
        planned = plan["kernel_names"]
    except (OSError, ValueError, LookupError, TypeError, StopIteration) as error:
        return f"the attention kernel of {path} is unknown: {reason_of(error)}; plan again with --json={path}"
    if planned == step.kernel_names:
        return None
    return (
        f"{path} is a plan with attention kernel {planned}, and this run has {step.kernel_choice}: time and memory"
        " differ from the plan"
    )


def read_manifest(workdir: Path) -> dict[str, Any]:
    """The manifest of the last start; empty if there is none."""
    return _read(workdir / CONFIG_COPY)[1]


def run_id_everywhere(workdir: Path) -> str:
    """The identifier of the run on all processes, as process 0 has written it."""
    return on_process_0(lambda: read_manifest(workdir)["run_id"])


def stored_settings(workdir: Path) -> dict[str, Any]:
    """The settings of a run by their paths; none if they cannot be read."""
    return _settings(workdir / CONFIG_COPY)


def _settings(path: Path) -> dict[str, Any]:
    """The settings of a config file by their paths; none if it cannot be read."""
    try:
        return flattened(converted("", read_config(str(path)).to_dict()))
    except UserError:
        return {}
