"""Barriers of the processes of a run, before they execute a program together."""

import itertools
from typing import Any

from jaxlc._jax_internals import coordination_client
from jaxlc.runtime import watchdog

_DAY_SECONDS = 24 * 3600
_num_names = itertools.count()  # each barrier and each text needs its own name


def wait_for_processes(name: str, timeout_seconds: int = _DAY_SECONDS) -> None:
    """Waits until all processes of the run are here.

    It precedes the first execution of each program: compilation times differ between processes by minutes, and a
    collective of devices fails if a process is late (Gloo: after about 30 s), or has a limit of its own.
    """
    # Not jax.experimental.multihost_utils: its barrier is such a collective.
    if (client := coordination_client()) is None:
        return
    with watchdog.phase("waiting for processes", repeats=False):
        client.wait_at_barrier(f"jaxlc/{name} {next(_num_names)}", 1000 * timeout_seconds)


def text_of_process_0(name: str, text: str) -> str:
    """`text` of process 0, on every process; that of other processes is not used."""
    import jax

    if (client := coordination_client()) is None:
        return text
    key = f"jaxlc/{name} {next(_num_names)}"
    if jax.process_index() == 0:
        client.key_value_set(key, text)
        return text
    with watchdog.phase("waiting for processes", repeats=False):
        return client.blocking_key_value_get(key, 1000 * _DAY_SECONDS)


def problem_of_any_process(name: str, problem: str) -> str:
    """The problem of the first process that has one, on every process; "": none has."""
    import jax

    if (client := coordination_client()) is None:
        return problem
    prefix = f"jaxlc/{name} {next(_num_names)}/"
    if problem:
        client.key_value_set(f"{prefix}{jax.process_index():09}", problem)
    wait_for_processes(name)
    return min(client.key_value_dir_get(prefix), default=("", ""))[1]


class Program:
    """A jitted function that all processes of a run call with the same shapes. When it is compiled, they wait for each
    other before it is executed."""

    def __init__(self, name: str, jitted: Any):
        """
        Args:
          jitted: what `jax.jit` returns.
        """
        self._name, self._jitted = name, jitted
        self._compiled: set[Any] = set()  # structures, shapes and dtypes of arguments

    def __call__(self, *arguments: Any) -> Any:
        import jax

        if jax.process_count() > 1:
            leaves, structure = jax.tree.flatten(arguments)
            if (key := (structure, *map(jax.typeof, leaves))) not in self._compiled:
                with watchdog.phase("compilation", repeats=False):
                    self._jitted.lower(*arguments).compile()
                wait_for_processes(f"{self._name} compiled")
                self._compiled.add(key)
        return self._jitted(*arguments)
