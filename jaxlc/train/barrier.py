"""A barrier of the processes of a run."""

import itertools

import jax
import orbax.checkpoint as ocp

from jaxlc.runtime import watchdog

_DAY_SECONDS = 24 * 3600
_num_barriers = itertools.count()  # each barrier needs its own name


def wait_for_processes(name: str, timeout_seconds: int = _DAY_SECONDS) -> None:
    """Waits until all processes of the run are here.

    It precedes the first execution of each program: compilation times differ between processes by minutes, and a
    collective of devices fails if a process is late (Gloo: after about 30 s), or has a limit of its own.
    """
    # Not jax.experimental.multihost_utils: its barrier is such a collective.
    with watchdog.phase("waiting for processes", repeats=False):
        ocp.multihost.sync_global_processes(
            f"{name} {next(_num_barriers)}", processes=set(range(jax.process_count())), timeout=timeout_seconds
        )
