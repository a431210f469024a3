"""Reads the variables of the launcher of a run: Slurm, Open MPI, Kubernetes, or variables set
manually.

`runtime.start` takes the settings from them that config.runtime leaves to the launcher. JAX's own
detection is switched off, because under Slurm it selects the GPU with the number SLURM_LOCALID also
where a process has only one visible GPU (jax-ml/jax issues 16788, 23452 and 28194).
"""

import dataclasses
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from jaxlc.config import RuntimeConfig
from jaxlc.core import UserError

DEFAULT_PORT = 9753
# the launcher of launch/plain, which starts processes with equal CUDA_VISIBLE_DEVICES
_PLAIN = "JAX_PROCESS_ID"
_LOCAL_ADDRESS = f"127.0.0.1:{DEFAULT_PORT}"

Environment = Mapping[str, str]  # variables


class Launch(NamedTuple):
    """The place of this process in a run."""

    launcher: str
    num_processes: int
    process_id: int
    coordinator_address: str  # "": unknown
    local_id: int  # index among the processes on this machine
    num_local: int  # number of processes on this machine


def find(environment: Environment) -> Launch | None:
    """The launcher in the environment variables; None if there is none.

    Raises:
      UserError: a variable has an unexpected value.
    """
    # Open MPI precedes Slurm: in a Slurm job its processes inherit variables of the step that
    # starts its daemons.
    for detect in (_from_jax_variables, _from_kubernetes, _from_open_mpi, _from_slurm):
        try:
            launch = detect(environment)
        except (KeyError, ValueError, IndexError, TypeError) as error:
            raise UserError(
                f"the variables of the launcher cannot be read ({type(error).__name__}: {error}); set all of them, or"
                " none for a run of one process"
            ) from None
        if launch is not None:
            address = environment.get("JAX_COORDINATOR_ADDRESS")  # also read by JAX
            return launch._replace(coordinator_address=_checked(address)) if address else launch
    return None


def _checked(address: str) -> str:
    host, _, port = address.rpartition(":")
    if not (host and port.isdigit()):
        raise UserError(
            f"invalid value {address!r} for JAX_COORDINATOR_ADDRESS: expected HOST:PORT"
        )
    return address


def resolve(config: RuntimeConfig, launch: Launch | None) -> RuntimeConfig:
    """`config` with the number of processes, the process index and the coordinator's address of the
    launcher.

    Values that the config sets take precedence.

    Raises:
      UserError: a value is unknown, or config and launcher contradict each other.
    """
    if config.num_processes == 1 or (launch is None and config.num_processes == 0):
        return dataclasses.replace(
            config, num_processes=1, process_id=0, coordinator_address=_LOCAL_ADDRESS
        )
    if launch is None:
        if config.process_id < 0:
            raise UserError(
                f"config.runtime.num_processes={config.num_processes}, but no launcher gives the index of this process;"
                " pass --config.runtime.process_id=INDEX"
            )
        return dataclasses.replace(
            config, coordinator_address=config.coordinator_address or _LOCAL_ADDRESS
        )
    num_processes = config.num_processes or launch.num_processes
    if num_processes != launch.num_processes and config.process_id < 0:
        raise UserError(
            f"config.runtime.num_processes={num_processes}, but {launch.launcher} started {launch.num_processes}"
            " processes; remove the setting, or start as many processes"
        )
    address = config.coordinator_address or launch.coordinator_address
    if num_processes > 1 and not address:
        raise UserError(
            f"{launch.launcher} does not give the address of process 0; set JAX_COORDINATOR_ADDRESS=HOST:{DEFAULT_PORT}"
            " in all processes, or --config.runtime.coordinator_address, with the host of process 0"
        )
    process_id = launch.process_id if config.process_id < 0 else config.process_id
    if not 0 <= process_id < num_processes:
        raise UserError(
            f"invalid process index {process_id} of {num_processes} processes: expected 0 to {num_processes - 1}"
        )
    return dataclasses.replace(
        config, num_processes=num_processes, process_id=process_id, coordinator_address=address
    )


def gpus_of_process(
    launch: Launch, environment: Environment, num_gpus_on_machine: int
) -> str | None:
    """CUDA_VISIBLE_DEVICES for a process that sees the GPUs of all processes on its machine; None:
    no change.

    The GPUs are divided evenly in order, so that one process per GPU and processes with several
    GPUs both work. If a launcher has assigned GPUs, such as Slurm with --gpus-per-task, the machine
    has enough of them for all processes.

    Raises:
      UserError: the GPUs cannot be divided evenly.
    """
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    gpus = (
        [str(index) for index in range(num_gpus_on_machine)]
        if visible is None
        else visible.split(",")
    )
    num_gpus = int(environment.get("SLURM_GPUS_ON_NODE") or num_gpus_on_machine)
    are_assigned = len(gpus) * launch.num_local <= num_gpus and launch.launcher != _PLAIN
    if launch.num_local == 1 or len(gpus) < 2 or are_assigned:
        return None
    if len(gpus) % launch.num_local:
        raise UserError(
            f"{launch.launcher} started {launch.num_local} processes on {socket.gethostname()}, which do not divide its"
            f" {len(gpus)} GPUs; start one process per GPU, or one per machine"
        )
    per_process = len(gpus) // launch.num_local
    return ",".join(gpus[launch.local_id * per_process :][:per_process])


def num_gpus_on_machine() -> int:
    """The number of NVIDIA GPUs with a device file. Does not start JAX."""
    return len(
        [
            path
            for path in Path("/dev").glob("nvidia*")
            if path.name.removeprefix("nvidia").isdigit()
        ]
    )


def _from_jax_variables(environment: Environment) -> Launch | None:
    """The variables of launch/plain."""
    if "JAX_PROCESS_ID" not in environment:
        return None
    return Launch(
        _PLAIN,
        int(environment["JAX_NUM_PROCESSES"]),
        int(environment["JAX_PROCESS_ID"]),
        "",
        local_id=int(environment.get("JAX_LOCAL_PROCESS_ID", "0")),
        num_local=int(environment.get("JAX_NUM_LOCAL_PROCESSES", "1")),
    )


def _from_kubernetes(environment: Environment) -> Launch | None:
    """An Indexed Job or a JobSet of one job, with one process per pod.

    Kubernetes gives the index, but not the number of pods: the manifest sets JAX_NUM_PROCESSES. The
    host name of a pod ends with its index, and its subdomain is the headless service.
    """
    if "JOB_COMPLETION_INDEX" not in environment or "JAX_NUM_PROCESSES" not in environment:
        return None
    num_processes = int(environment["JAX_NUM_PROCESSES"])
    index = int(environment["JOB_COMPLETION_INDEX"])
    host, dot, domain = socket.getfqdn().partition(".")
    first_host = host.removesuffix(f"-{index}") + "-0" if host.endswith(f"-{index}") else ""
    address = f"{first_host}{dot}{domain}:{DEFAULT_PORT}" if first_host else ""
    return Launch("Kubernetes", num_processes, index, address, local_id=0, num_local=1)


def _from_open_mpi(environment: Environment) -> Launch | None:
    if "OMPI_COMM_WORLD_RANK" not in environment:
        return None
    num_processes = int(environment["OMPI_COMM_WORLD_SIZE"])
    num_local = int(environment["OMPI_COMM_WORLD_LOCAL_SIZE"])
    # Open MPI 4 gives the addresses of mpirun, which by default starts rank 0 on its own machine:
    # "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911". Open MPI 5 gives none.
    mpirun = re.search(r"tcp://([^,:]+)", environment.get("OMPI_MCA_orte_hnp_uri", ""))
    host = "127.0.0.1" if num_local == num_processes else mpirun[1] if mpirun else ""
    return Launch(
        "Open MPI",
        num_processes,
        int(environment["OMPI_COMM_WORLD_RANK"]),
        f"{host}:{DEFAULT_PORT}" if host else "",
        local_id=int(environment["OMPI_COMM_WORLD_LOCAL_RANK"]),
        num_local=num_local,
    )


def _from_slurm(environment: Environment) -> Launch | None:
    """A process that srun started. A batch script has SLURM_PROCID too, but is not in a step."""
    if "SLURM_STEP_NODELIST" not in environment or "SLURM_PROCID" not in environment:
        return None
    job = int(environment["SLURM_JOB_ID"])
    step = int(environment["SLURM_STEP_ID"])
    # Above Linux's default range of ports for outgoing connections; jobs on one node rarely have
    # the same one.
    port = 61_440 + (job + 97 * step) % 4096
    return Launch(
        "Slurm",
        int(environment["SLURM_STEP_NUM_TASKS"]),
        int(environment["SLURM_PROCID"]),
        f"{_first_host(environment['SLURM_STEP_NODELIST'])}:{port}",
        local_id=int(environment["SLURM_LOCALID"]),
        num_local=_tasks_per_node(environment["SLURM_STEP_TASKS_PER_NODE"])[
            int(environment["SLURM_NODEID"])
        ],
    )


def _first_host(node_list: str) -> str:
    """ "node[001-003,7],other" -> "node001"."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", node_list)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0])


def _tasks_per_node(counts: str) -> list[int]:
    """ "8(x2),4" -> [8, 8, 4]."""
    matches = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", count) for count in counts.split(",")]
    return [int(match[1]) for match in matches for _ in range(int(match[2] or 1))]
