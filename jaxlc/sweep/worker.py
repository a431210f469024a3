"""One point of a sweep in a process of its own: what ends it, a signal too, ends nothing else.

Imports no jax, so that such a process can set the environment first.
"""

import contextlib
import multiprocessing
import os
import pickle
import resource
import signal
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NamedTuple

from jaxlc.config import Config, RuntimeConfig
from jaxlc.core.errors import UserError

Row = dict[str, object]
Work = Callable[[Config], Row]  # a function at the top of a module, or a partial of one: it is sent by its name
Measure = Callable[[Config, int], Row]  # (config, repeats) -> figures, as `jaxlc.sweep.measure` has it

_REPEATS = 5  # timed steps of a measurement
# Of host memory: an 8B step for 64 GPUs took 0.65 GB (jax 0.10.1, kernel pallas); there are larger ones.
_COMPILE_BYTES = 2 * 2**30


def predicted(config: Config, topology: str) -> Row:
    """Figures of the step compiled for GPUs that are not here."""
    os.environ["JAX_PLATFORMS"] = "cpu"  # for JAX, which reads it at its import, and for processes that it may start
    from jaxlc import plan, runtime

    runtime.start(RuntimeConfig())
    import jax

    from jaxlc.plan.memory import USABLE_HOST_SHARE

    jax.config.update("jax_enable_compilation_cache", False)  # cannot read programs for GPUs that are not here
    found = plan.plan(config, topology)
    time_of_step, memory, ring = found.predicted, found.memory, found.ring
    return dict(
        step_seconds=time_of_step.step_seconds,
        tokens_per_second_per_device=time_of_step.tokens_per_second_per_device,
        mfu_causal=time_of_step.mfu_causal,
        recomputed_share=time_of_step.recomputed_share,
        exposed_communication_seconds=time_of_step.exposed_communication_seconds,
        exposed_host_copy_seconds=time_of_step.exposed_host_copy_seconds,
        bound_by=time_of_step.bound_by,
        fits=memory.fits,
        device_fits=memory.device_fits,
        device_peak_bytes=memory.device_peak_bytes,
        device_compiled_bytes=memory.device_arguments_bytes + memory.device_temp_bytes + memory.symmetric_used_bytes,
        device_usable_bytes=memory.usable_bytes,
        device_capacity_bytes=memory.device_capacity_bytes,
        symmetric_used_bytes=memory.symmetric_used_bytes,
        host_bytes_per_node=memory.host_bytes_per_node,
        staging_bytes_per_node=memory.staging_bytes_per_node,
        host_usable_bytes_per_node=USABLE_HOST_SHARE * memory.host_capacity_per_node_bytes,
        largest="; ".join(f"{each.shape} {each.bytes / 2**30:.2f} GiB {each.made_by}" for each in memory.largest[:3]),
        hops=ring.hops,
        hops_exposed=ring.exposed,
        hops_by=", ".join(sorted(ring.by_backend)),
        kernel=found.kernel_choice.partition(" ")[0],
        compile_seconds=found.compile_seconds,
    )


def devices_here(config: Config) -> Row:
    """How many devices JAX has here, and of which kind."""
    from jaxlc import runtime

    runtime.start(config.runtime)
    import jax

    return dict(device=jax.devices()[0].device_kind, num_devices=jax.device_count())


def measured(config: Config, measure: Measure) -> Row:
    """Figures of the step on the devices that are here. What JAX cannot allocate is an exception."""
    from jaxlc import runtime

    runtime.start(config.runtime)
    found = measure(config, _REPEATS)
    return dict(
        step_seconds=found["seconds"],
        tokens_per_second_per_device=found["tokens_per_second_per_device"],
        mfu_causal=found["mfu_causal"],
        fits=True,
        device_peak_bytes=found["peak_bytes"] or found["arguments_bytes"] + found["temp_bytes"],
        kernel=found["kernel"],
        loss=found["loss"],
    )


def rows(configs: Sequence[Config], work: Work, num_workers: int) -> Iterator[tuple[int, Row]]:
    """Does `work` for every config, so many at a time; gives (index, row) as they are done.

    Every row has `status`: "done"; "refused" where a UserError says why; "failed" after any other exception, or when
    the process died. `reason` is empty if it is done.
    """
    waiting, running = deque(enumerate(configs)), []
    try:
        while waiting or running:
            while waiting and len(running) < num_workers:
                running.append(_Worker.start(*waiting.popleft(), work))
            ready = wait([worker.connection for worker in running])
            for worker in [worker for worker in running if worker.connection in ready]:
                running.remove(worker)
                yield worker.index, worker.result()
    finally:
        for worker in running:
            worker.process.kill()
            worker.said.unlink()


def num_workers_here() -> int:
    """As many compiles side by side as there are cores, and host memory for."""
    with contextlib.suppress(FileNotFoundError):  # where the system is no Linux, cores alone decide
        memory = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        available_bytes = 1024 * int(memory["MemAvailable"].split()[0])
        return max(1, min(_num_cores(), available_bytes // _COMPILE_BYTES))
    return _num_cores()


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Worker(NamedTuple):
    index: int
    process: multiprocessing.Process
    connection: Connection  # gives one row; ends without one when the process dies
    said: Path  # what it and the compiler print, which would disturb the progress on the screen

    @classmethod
    def start(cls, index: int, config: Config, work: Work) -> "_Worker":
        context = multiprocessing.get_context("spawn")  # a fork would take JAX's threads along, half alive
        ours, theirs = context.Pipe(duplex=False)
        descriptor, said = tempfile.mkstemp(prefix="sweep-", suffix=".log")
        os.close(descriptor)
        process = context.Process(target=_main, args=(config, pickle.dumps(work), theirs, said), daemon=True)
        process.start()
        theirs.close()  # or the end of the process would not end the connection
        return cls(index, process, ours, Path(said))

    def result(self) -> Row:
        try:
            row = self.connection.recv()
        except EOFError:
            row = None
        self.process.join()
        lines = self.said.read_text(errors="replace").strip().splitlines()
        self.said.unlink()
        return row or dict(status="failed", reason=_death(self.process.exitcode, lines[-1] if lines else ""))


def _main(config: Config, pickled_work: bytes, connection: Connection, said: str) -> None:
    """Runs in the new process. To unpickle is to import, which may print or fail too."""
    with open(said, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    threading.Thread(target=_end_with_the_leader, daemon=True).start()
    start_seconds = time.perf_counter()
    try:
        row = dict(status="done", reason="", **pickle.loads(pickled_work)(config))
    except UserError as error:
        row = dict(status="refused", reason=str(error))
    except Exception as error:
        first_line = str(error).partition("\n")[0]
        row = dict(status="failed", reason=f"{type(error).__name__}: {first_line}")
    row["seconds"] = time.perf_counter() - start_seconds
    row["host_peak_bytes"] = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # Linux counts in KiB
    connection.send(row)


def _end_with_the_leader() -> None:
    """Nobody waits for the row when the leading process has been killed."""
    multiprocessing.parent_process().join()
    os._exit(1)


def _death(exit_code: int, last_line: str) -> str:
    """A sentence on a process that said no more."""
    if exit_code >= 0:
        how = f"its process ended with status {exit_code}"
    else:
        name = signal.Signals(-exit_code).name
        how = f"its process was ended by {name}" + (", as when memory runs out" if name == "SIGKILL" else "")
    return f"{how}; its last line: {last_line}" if last_line else how
