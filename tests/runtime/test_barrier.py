"""Barriers before programs that several processes execute together."""

import jax
import jax.numpy as jnp
import pytest

from jaxlc.runtime import watchdog
from jaxlc.runtime.watchdog import Program


@pytest.fixture
def events(monkeypatch):
    """What a run of two processes does, in order."""
    seen = []

    class Client:
        def wait_at_barrier(self, name: str, timeout_in_ms: int) -> None:
            seen.append(f"wait {name.rsplit(' ', 1)[0]}")

    def listen(event: str, seconds: float, **_) -> None:
        if event.endswith("backend_compile_duration"):
            seen.append("compile")

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(watchdog, "coordination_client", Client)
    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.jax_version
def test_processes_wait_for_each_other_between_compilation_and_execution(events):
    def double(x, tables):
        jax.debug.callback(lambda: events.append("execute"))
        return x * 2 if tables is None else x * tables["scale"]

    program = Program("generation", jax.jit(double, donate_argnums=0))
    arguments = [
        (jnp.ones(3), None),
        (jnp.zeros(3), None),
        (jnp.ones(5), None),
        (jnp.ones(5), {"scale": 3.0}),
    ]
    events.clear()
    for x, tables in arguments:
        jax.block_until_ready(program(x, tables))
        jax.effects_barrier()
    first = ["compile", "wait jaxlc/generation compiled", "execute"]
    assert events == [*first, "execute", *first, *first]
