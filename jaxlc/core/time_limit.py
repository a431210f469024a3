"""Calls that may hang, such as those to a file system or to another process, with a time limit. Imports no jax."""

import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def call_within(seconds: float, function: Callable[[], T]) -> T | None:
    """The result of `function`, called in a daemon thread; None if it raises or takes longer than `seconds`.

    A call that takes longer goes on in its thread, which does not keep the process from ending.
    """
    results: list[T] = []

    def call() -> None:
        with contextlib.suppress(Exception):
            results.append(function())

    thread = threading.Thread(target=call, name="jaxlc-limited-call", daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None
