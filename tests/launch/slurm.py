"""Environment variables as Slurm sets them, and a fake `srun` that starts real processes on this
machine.
"""

import os
import socket
from pathlib import Path

FAKE_SLURM = Path(__file__).parent / "fake_slurm"
_FIRST_PORT, _NUM_PORTS = 61_440, 4096  # see jaxlc/runtime/launcher.py


def free_job_id() -> int:
    """The number of a job whose port is free on this machine."""
    for job_id in range(os.getpid() % _NUM_PORTS, 2 * _NUM_PORTS):
        with socket.socket() as probe:
            try:
                probe.bind(("", _FIRST_PORT + job_id % _NUM_PORTS))
            except OSError:
                continue
        return job_id
    raise AssertionError("no free port")


def job_variables(*, num_tasks: int) -> dict[str, str]:
    """Variables of a batch script; PATH has the fake srun and scontrol."""
    path = f"{FAKE_SLURM}{os.pathsep}{os.environ['PATH']}"
    return dict(
        PATH=path,
        SLURM_JOB_ID=str(free_job_id()),
        SLURM_NTASKS=str(num_tasks),
        FAKE_NODE="localhost",
    )


def task_variables(process_id: int, *, num_tasks: int, job_id: int) -> dict[str, str]:
    """Variables of a task that srun started; all tasks are on this machine."""
    return dict(
        SLURM_JOB_ID=str(job_id),
        SLURM_STEP_ID="0",
        SLURM_STEP_NODELIST="localhost",
        SLURM_STEP_NUM_TASKS=str(num_tasks),
        SLURM_NTASKS=str(num_tasks),  # JAX's detection needs it
        SLURM_STEP_TASKS_PER_NODE=str(num_tasks),
        SLURM_NODEID="0",
        SLURM_PROCID=str(process_id),
        SLURM_LOCALID=str(process_id),
    )
