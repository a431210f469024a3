"""The command: alone, and as two processes of which one has faults."""

import subprocess
import sys
from pathlib import Path

from jaxlc.cli.training import PreflightFlags, run_preflight
from jaxlc.config.command_line import run_main
from tests import environment
from tests.helpers import TIMEOUT_SECONDS, free_port

ROOT = Path(__file__).parents[2]
_WITH_FAULTS = """
import sys, types, time
from jaxlc.cli.training import PreflightFlags, run_preflight
from jaxlc.config.command_line import run_main
from jaxlc.preflight import check, findings
from jaxlc.runtime import peers
from jaxlc.train import stragglers

check._VISIBLE_SECONDS = 0.0
if "--config.runtime.process_id=1" in sys.argv:
    versions, device_times = findings.versions, stragglers.device_times
    findings.versions = lambda driver: versions(driver) | {"NCCL": "2.18.1"}
    findings.free_host_bytes = lambda: 2**20
    late = dict(time=lambda: time.time() + 60)
    check.time = types.SimpleNamespace(**vars(time) | late)

    def slow_times(devices):
        times = device_times(devices)
        times["product"][2] += 1.0
        return times

    stragglers.device_times = slow_times
peers.exit_process(run_main(run_preflight, sys.argv, flags=PreflightFlags))
"""
_FAULTS = (
    "the version of NCCL differs: not found on process 0 on {host}; 2.18.1 on process 1 on {host}",
    "the clock of process 1 on {host} is 60.0 s ahead",
    "{host} has 0.00 GiB of free host memory",
    "the workdir is not shared: the file of process 1 is not there after 0 s (process 0 on {host})",
    "device 2 of process 1 on {host} is slow: a matrix product takes",
)


def test_preflight_of_one_process_finds_no_problem(tmp_path, capsys):
    argv = ["jaxlc preflight", "--config=quickstart", f"--workdir={tmp_path}"]
    assert run_main(run_preflight, argv, flags=PreflightFlags) == 0
    output = capsys.readouterr().out
    assert (
        "preflight: no problem found" in output and "to host GB/s" in output and "jaxlib" in output
    )
    assert list(tmp_path.iterdir()) == []


def test_preflight_of_two_processes_finds_all_faults(tmp_path):
    """Version, clock, memory, file system and device of process 1."""
    command = [
        sys.executable,
        "-c",
        _WITH_FAULTS,
        "--config=quickstart",
        "--config.runtime.num_processes=2",
    ]
    command.append(f"--config.runtime.coordinator_address=127.0.0.1:{free_port()}")
    running = [
        subprocess.Popen(
            [
                *command,
                f"--config.runtime.process_id={index}",
                f"--workdir={tmp_path / str(index)}",
            ],
            cwd=ROOT,
            env=environment.for_user(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        for index in range(2)
    ]
    try:
        (output, errors), (_, other_errors) = [
            process.communicate(timeout=TIMEOUT_SECONDS) for process in running
        ]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [2, 2], errors + other_errors
    host = next(line.split()[1] for line in output.splitlines() if line.split()[:1] == ["1"])
    _, *found = errors[errors.index("error: preflight failed") :].splitlines()
    missing = [
        fault.format(host=host)
        for fault in _FAULTS
        if not any(fault.format(host=host) in x for x in found)
    ]
    assert missing == [], errors
    assert "the output of process 0 has the reasons" in other_errors
