"""The check before a run: each process reads and measures its facts, and process 0 judges those of all."""

import dataclasses
import os
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

import jax

from jaxlc._jax_internals import coordination_client
from jaxlc.config import check_num_devices
from jaxlc.config.command_line import ConfigFlags, ParsedCommand
from jaxlc.core.errors import UserError
from jaxlc.core.files import local_path
from jaxlc.preflight.facts import Facts, read_facts, with_visible_gpus
from jaxlc.preflight.findings import findings, needs_of, table_lines
from jaxlc.preflight.shared_directory import check_directory
from jaxlc.runtime.start import start_training
from jaxlc.runtime.watchdog import text_of_process_0, wait_for_processes
from jaxlc.step.memory import pinned_bytes
from jaxlc.train import stragglers

_PREFIX = "jaxlc/preflight/"
_SECONDS = 600  # limit of a wait for another process
_CLOCK_READINGS = 5
_MAX_LINES = 32


def check(command: ParsedCommand[ConfigFlags]) -> int:
    """Checks this process together with the others; process 0 prints what was found. Returns the exit status."""
    found = read_facts()  # before JAX takes memory
    configs = [stage.config for stage in command.stages]
    pinned_host_bytes = max(pinned_bytes(config).pooled for config in configs)
    start_training(configs[0].runtime, pinned_host_bytes, is_preflight=True)
    facts = with_visible_gpus(dataclasses.replace(found, process_id=jax.process_index()), os.environ)
    everyone = _gathered(_measured(facts, local_path(command.workdir).absolute()))
    failures = _judged(command, everyone) if jax.process_index() == 0 else []
    if text_of_process_0("preflight failures", str(len(failures)), _SECONDS) == "0":
        return 0
    lines = failures[:_MAX_LINES] or ["the output of process 0 has the reasons"]
    if len(failures) > len(lines):
        lines.append(f"and {len(failures) - len(lines)} more")
    print("\n  ".join(["error: preflight failed; the run would not work as planned:", *lines]), file=sys.stderr)
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
    problems, free_bytes = check_directory(workdir, token, facts.process_id, jax.process_count(), wait)
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
    failures, needs = list[str](), None
    try:
        for config in configs:
            check_num_devices(config, jax.device_count(), "the number of available devices is", command.flags.config)
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
