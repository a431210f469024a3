"""What the variables of launchers say about a process, and which settings take precedence over
them.
"""

import pytest

from jaxlc.config import RuntimeConfig
from jaxlc.core.errors import UserError
from jaxlc.runtime import launcher
from jaxlc.runtime.launcher import Launch, find, gpus_of_process, resolve
from tests.launch.slurm import task_variables

OPEN_MPI = dict(
    OMPI_COMM_WORLD_SIZE="16",
    OMPI_COMM_WORLD_RANK="9",
    OMPI_COMM_WORLD_LOCAL_RANK="1",
    OMPI_COMM_WORLD_LOCAL_SIZE="8",
    OMPI_MCA_orte_hnp_uri="1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
)
LAUNCH = Launch("Slurm", 4, 2, "node0:9753", local_id=0, num_local=1)


@pytest.mark.parametrize(
    "nodes, tasks, node, expected",
    [
        ("node[001-003,7],other", "8(x3),4(x2)", "4", ("node001", 4)),
        ("a-12,b[1-2]", "2", "0", ("a-12", 2)),
        ("rack[1-2]node[3-4]", "1(x4)", "3", ("rack1node3", 1)),
    ],
)
def test_find_slurm_step_reads_nodes_and_tasks(nodes, tasks, node, expected):
    variables = task_variables(3, num_tasks=5, job_id=4097) | dict(SLURM_STEP_ID="1")
    launch = find(
        variables
        | dict(SLURM_STEP_NODELIST=nodes, SLURM_STEP_TASKS_PER_NODE=tasks, SLURM_NODEID=node)
    )
    host, num_local = expected
    assert launch == Launch(
        "Slurm", 5, 3, f"{host}:{61_440 + 1 + 97}", local_id=3, num_local=num_local
    )


def test_find_without_a_started_step_is_none():
    """A batch script has SLURM_PROCID, and each pod of a Job that is no run has an index."""
    assert find({}) is None
    assert (
        find(dict(SLURM_JOB_ID="1", SLURM_PROCID="0", SLURM_NTASKS="8", SLURM_LOCALID="0")) is None
    )
    assert find(dict(JOB_COMPLETION_INDEX="3")) is None


def test_find_open_mpi_precedes_slurm():
    expected = Launch("Open MPI", 16, 9, "10.96.0.1:9753", local_id=1, num_local=8)
    assert find(task_variables(0, num_tasks=2, job_id=1) | OPEN_MPI) == expected
    newer = {name: value for name, value in OPEN_MPI.items() if "uri" not in name}
    assert find(newer).coordinator_address == ""
    assert find(newer | dict(JAX_COORDINATOR_ADDRESS="node0:1")).coordinator_address == "node0:1"
    assert (
        find(newer | dict(OMPI_COMM_WORLD_LOCAL_SIZE="16")).coordinator_address == "127.0.0.1:9753"
    )


def test_find_unreadable_variable_raises():
    with pytest.raises(
        UserError, match="variables of the launcher cannot be read .KeyError: 'JAX_NUM_PROCESSES'"
    ):
        find(dict(JAX_PROCESS_ID="1"))
    with pytest.raises(
        UserError, match="invalid value 'node0' for JAX_COORDINATOR_ADDRESS: expected HOST:PORT"
    ):
        find(OPEN_MPI | dict(JAX_COORDINATOR_ADDRESS="node0"))


def test_resolve_settings_precede_the_launcher():
    def resolved(launch, **settings):
        config = resolve(RuntimeConfig(**settings), launch)
        return config.num_processes, config.process_id, config.coordinator_address

    assert resolved(LAUNCH) == (4, 2, "node0:9753")
    assert resolved(None) == resolved(LAUNCH, num_processes=1) == (1, 0, "127.0.0.1:9753")
    assert resolved(LAUNCH, coordinator_address="other:1") == (4, 2, "other:1")
    explicit = dict(num_processes=2, process_id=1, coordinator_address="a:2")
    assert resolved(LAUNCH, **explicit) == resolved(None, **explicit) == (2, 1, "a:2")


@pytest.mark.parametrize(
    "launch, settings, words",
    [
        (
            None,
            dict(num_processes=2),
            "no launcher gives the index of this process; pass --config.runtime.process_id",
        ),
        (LAUNCH, dict(num_processes=8), "num_processes=8, but Slurm started 4 processes"),
        (
            LAUNCH,
            dict(process_id=4),
            "invalid process index 4 of 4 processes: expected 0 to 3",
        ),
        (
            LAUNCH._replace(process_id=-1),
            {},
            "invalid process index -1 of 4 processes: expected 0 to 3",
        ),
        (
            LAUNCH._replace(coordinator_address=""),
            {},
            "set JAX_COORDINATOR_ADDRESS=HOST:9753 in all processes",
        ),
    ],
)
def test_resolve_contradiction_raises(launch, settings, words):
    with pytest.raises(UserError, match=words):
        resolve(RuntimeConfig(**settings), launch)


def test_resolve_with_what_the_errors_advise():
    assert resolve(RuntimeConfig(num_processes=2, process_id=1), None).process_id == 1
    assert resolve(RuntimeConfig(num_processes=0), LAUNCH).num_processes == 4
    launch = find(
        dict(JAX_NUM_PROCESSES="2", JAX_PROCESS_ID="1", JAX_COORDINATOR_ADDRESS="host:9753")
    )
    assert resolve(RuntimeConfig(), launch).coordinator_address == "host:9753"
    without = LAUNCH._replace(coordinator_address="")
    assert (
        resolve(RuntimeConfig(coordinator_address="host:9753"), without).coordinator_address
        == "host:9753"
    )


@pytest.mark.parametrize(
    "num_local, local_id, environment, expected",
    [
        (8, 3, {}, "3"),
        (2, 1, {}, "4,5,6,7"),
        (1, 0, {}, None),  # one process per machine
        (8, 3, dict(CUDA_VISIBLE_DEVICES="3"), None),  # assigned by the launcher
        (2, 1, dict(CUDA_VISIBLE_DEVICES="0,1,2,3", SLURM_GPUS_ON_NODE="8"), None),
        # a job on half of a node
        (2, 1, dict(CUDA_VISIBLE_DEVICES="4,5,6,7", SLURM_GPUS_ON_NODE="4"), "6,7"),
        # selected by the user, for all processes
        (4, 3, dict(CUDA_VISIBLE_DEVICES="4,5,6,7"), "7"),
        (9, 2, dict(CUDA_VISIBLE_DEVICES=",".join(f"MIG-{i}" for i in range(9))), "MIG-2"),
        (8, 3, dict(CUDA_VISIBLE_DEVICES=""), None),  # no GPUs
    ],
)
def test_gpus_of_process_divide_the_machine(num_local, local_id, environment, expected):
    launch = LAUNCH._replace(num_local=num_local, local_id=local_id)
    assert gpus_of_process(launch, environment, num_gpus_on_machine=8) == expected


def test_gpus_of_process_plain_divides_the_users_selection():
    """launch/plain assigns no GPUs; Slurm may have assigned two to each of two processes on a
    machine with eight.
    """
    launch, environment = LAUNCH._replace(num_local=2, local_id=1), dict(CUDA_VISIBLE_DEVICES="4,5")
    assert gpus_of_process(launch, environment, num_gpus_on_machine=8) is None
    assert (
        gpus_of_process(
            launch._replace(launcher="JAX_PROCESS_ID"), environment, num_gpus_on_machine=8
        )
        == "5"
    )


def test_gpus_of_process_uneven_raises():
    with pytest.raises(
        UserError, match="started 3 processes on .*, which do not divide its 8 GPUs"
    ):
        gpus_of_process(LAUNCH._replace(num_local=3), {}, num_gpus_on_machine=8)
    assert launcher.num_gpus_on_machine() >= 0
