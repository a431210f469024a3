"""The operating system's timer, which ends this process if its Python code cannot.

A thread that holds the interpreter lock stops all Python code. The timer's signal SIGALRM has its
default action, which needs no Python code, so the exit status is 142.
"""

import faulthandler
import math
import signal
import threading
from typing import TextIO

_LEAST_SECONDS = 1.0
# of the timer, which the watched thread and the one that ends the process set
_lock = threading.Lock()
_is_ending = False


def is_available() -> bool:
    """False: the program handles SIGALRM itself."""
    return signal.getsignal(signal.SIGALRM) is signal.SIG_DFL


def write_stacks_to(file: TextIO) -> None:
    """Lets the signal write the Python stacks of all threads to `file`, without the interpreter
    lock, before it ends the process."""
    faulthandler.register(signal.SIGALRM, file=file, all_threads=True, chain=True)


def set_limit(seconds: float) -> None:
    """Ends this process after `seconds`; infinite: never. No effect after `set_end_limit`."""
    with _lock:
        if not _is_ending:
            _set_timer(seconds)


def set_end_limit(seconds: float) -> None:
    """Ends this process after `seconds`, whatever its phases set. Called once, when its end has
    begun.
    """
    global _is_ending
    with _lock:
        _is_ending = True
        if is_available():
            _set_timer(seconds)


def remove() -> None:
    """Removes what `set_limit` and `write_stacks_to` have set."""
    set_limit(math.inf)
    faulthandler.unregister(signal.SIGALRM)


def _set_timer(seconds: float) -> None:
    signal.setitimer(signal.ITIMER_REAL, 0 if math.isinf(seconds) else max(_LEAST_SECONDS, seconds))
