"""The check before a run: each process reads and measures its facts, and process 0 judges the facts
of all. `check_directory` checks that all processes have the same file system at the workdir: write, read,
rename, lock, free space.
"""

import contextlib
import dataclasses
import os
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax

from jaxlc._jax_internals import coordination_client
from jaxlc.config import check_num_devices
from jaxlc.config.command_line import ConfigFlags, ParsedCommand
from jaxlc.core import UserError, reason_of
from jaxlc.core.files import LockHeld, local_path, locked, make_writable
from jaxlc.preflight.findings import (
    Facts,
    findings,
    needs_of,
    read_facts,
    table_lines,
    with_visible_gpus,
)
from jaxlc.runtime.start import start_training
from jaxlc.runtime.watchdog import text_of_process_0, wait_for_processes
from jaxlc.step.memory import pinned_bytes
from jaxlc.train import stragglers

# A client of a network file system may see a new file of another machine late: by default after 60 s at most in NFS
# (acdirmax), but a directory that it has never read is read at once.
_VISIBLE_SECONDS = 10.0
_POLL_SECONDS = 0.1


def check_directory(
    workdir: Path, token: str, process_id: int, num_processes: int, wait: Callable[[str], None]
) -> tuple[dict[str, str], int]:
    """Every process calls it; returns what failed -> why, and the free bytes.

    Each process writes a file, reads and renames it, and looks at that of the next process; process
    0 locks a file, and the others try to. All files are removed.

    Args:
      token: the same in all processes, and unique.
      wait: a barrier of all processes, with a name.
    """
    directory = workdir / f".preflight-{token}"
    problems = dict[str, str]()
    try:
        make_writable(directory, "")
        free_bytes = shutil.disk_usage(directory).free
    except UserError as error:
        reason = error.__cause__ if error.__cause__ is not None else error
        problems["write"] = reason_of(reason)
        free_bytes = 2**62
    own = directory / f"{process_id}"
    other = (process_id + 1) % num_processes
    with _noted(problems, "write"):
        own.write_text(f"{token} {process_id}")
    wait("preflight written")
    with _noted(problems, "read"):
        _check_content(directory / f"{other}", f"{token} {other}", other)
    wait("preflight read")
    with _noted(problems, "rename"):
        own.rename(directory / f"{process_id}.renamed")
    wait("preflight renamed")
    if not problems:
        with _noted(problems, "rename"):
            _check_content(directory / f"{other}.renamed", f"{token} {other}", other)
    _check_lock(directory / "lock", process_id, problems, wait)
    with contextlib.suppress(OSError):  # process 0 removes the rest
        (directory / f"{process_id}.renamed").unlink()
    wait("preflight removed")
    if process_id == 0 or "read" in problems:
        shutil.rmtree(directory, ignore_errors=True)
    return problems, free_bytes


@contextlib.contextmanager
def _noted(problems: dict[str, str], name: str) -> Iterator[None]:
    """Notes an error of the block, unless an earlier check has failed, from which it follows."""
    try:
        yield
    except OSError as error:
        if not problems:
            problems[name] = reason_of(error)


def _check_content(path: Path, expected: str, process_id: int) -> None:
    """Raises OSError if the file of another process is not there, or has other content."""
    deadline = time.monotonic() + _VISIBLE_SECONDS
    content = ""
    while content != expected:
        with contextlib.suppress(FileNotFoundError):
            content = path.read_text()
        if content != expected and time.monotonic() >= deadline:
            what = "has other content" if content else "is not there"
            raise OSError(f"the file of process {process_id} {what} after {_VISIBLE_SECONDS:.0f} s")
        if content != expected:
            time.sleep(_POLL_SECONDS)


def _check_lock(
    path: Path, process_id: int, problems: dict[str, str], wait: Callable[[str], None]
) -> None:
    """Process 0 holds a lock, which the other processes must not get."""
    unsupported: list[str] = []

    def on_unsupported() -> None:
        unsupported.append("the file system has no locks")

    def hold() -> contextlib.AbstractContextManager[None]:
        return locked(path, lambda holder: None, timeout_seconds=0, on_unsupported=on_unsupported)

    with contextlib.ExitStack() as held:
        if process_id == 0:
            with _noted(problems, "lock"):
                try:
                    held.enter_context(hold())
                except LockHeld:
                    raise OSError("process 0 does not get a lock that nobody holds") from None
        wait("preflight locked")
        if process_id != 0:
            with _noted(problems, "lock"), contextlib.suppress(LockHeld), hold():
                if not unsupported:
                    raise OSError("it gets a lock that process 0 holds")
        wait("preflight unlocked")
    if unsupported and not problems:
        problems["lock"] = unsupported[0]


_PREFIX = "jaxlc/preflight/"
_SECONDS = 600  # limit of a wait for another process
_CLOCK_READINGS = 5
_MAX_LINES = 32


def check(command: ParsedCommand[ConfigFlags]) -> int:
    """Checks this process together with the others; process 0 prints what was found. Returns the
    exit status.
    """
    found = read_facts()  # before JAX takes memory
    configs = [stage.config for stage in command.stages]
    pinned_host_bytes = max(pinned_bytes(config).pooled for config in configs)
    start_training(configs[0].runtime, pinned_host_bytes, is_preflight=True)
    facts = with_visible_gpus(
        dataclasses.replace(found, process_id=jax.process_index()), os.environ
    )
    everyone = _gathered(_measured(facts, local_path(command.workdir).absolute()))
    failures = _judged(command, everyone) if jax.process_index() == 0 else []
    if text_of_process_0("preflight failures", str(len(failures)), _SECONDS) == "0":
        return 0
    lines = failures[:_MAX_LINES] or ["the output of process 0 has the reasons"]
    if len(failures) > len(lines):
        lines.append(f"and {len(failures) - len(lines)} more")
    print(
        "\n  ".join(["error: preflight failed; the run would not work as planned:", *lines]),
        file=sys.stderr,
    )
    return 2


def _measured(facts: Facts, workdir: Path) -> Facts:
    """Adds what the processes measure together."""

    def wait(name: str) -> None:
        wait_for_processes(name, _SECONDS)

    clock = []
    for reading in range(_CLOCK_READINGS):
        wait(f"preflight clock {reading}")
        clock.append(time.time())
    token = text_of_process_0("preflight token", uuid.uuid4().hex[:12], _SECONDS)
    problems, free_bytes = check_directory(
        workdir, token, facts.process_id, jax.process_count(), wait
    )
    device = jax.local_devices()[0]
    return dataclasses.replace(
        facts,
        platform=device.platform,
        device_kind=device.device_kind,
        num_devices=jax.local_device_count(),
        clock=clock,
        directory_problems=problems,
        directory_free_bytes=free_bytes,
        device_seconds=stragglers.device_times(jax.local_devices()),
    )


def _judged(command: ParsedCommand[ConfigFlags], everyone: Sequence[Facts]) -> list[str]:
    """Prints the table; returns the failures."""
    first = everyone[0]
    configs = [stage.config for stage in command.stages]
    failures = list[str]()
    needs = None
    try:
        for config in configs:
            check_num_devices(
                config,
                jax.device_count(),
                "the number of available devices is",
                command.flags.config,
            )
        needs = needs_of(configs, local_path(command.workdir), first.platform)
    except UserError as error:
        failures.append(str(error))
    failures += findings(everyone, needs, factor=configs[0].runtime.straggler_factor)
    versions = ", ".join(f"{name} {version}" for name, version in first.versions.items())
    print("\n".join([*table_lines(everyone), f"process 0: {versions}"]))
    if needs is not None:
        print(needs.text(first.num_devices))
    if not failures:
        print("preflight: no problem found")
    return failures


def _gathered(facts: Facts) -> list[Facts]:
    """The facts of all processes, on process 0; empty on the others."""
    if (client := coordination_client()) is None:
        return [facts]
    client.key_value_set(f"{_PREFIX}facts/{facts.process_id}", facts.to_json())
    wait_for_processes("preflight facts", _SECONDS)
    if jax.process_index() != 0:
        return []
    values = client.key_value_dir_get(f"{_PREFIX}facts/")
    return sorted((Facts.from_json(value) for _, value in values), key=lambda own: own.process_id)
