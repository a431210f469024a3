"""Watches the other processes of a run, and ends this process with one line on stderr when one of
them has ended.

Without it, JAX detects a killed process after `heartbeat_seconds`, and the others end with a C++
stack trace. Here every process keeps a connection to process 0, which the operating system closes
when a process ends.

A thread that holds the interpreter lock stops all Python code. Then the operating system's timer
ends the process: the default action of its signal SIGALRM needs no Python code, so the exit status
is 142.
"""

import atexit
import contextlib
import faulthandler
import math
import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import NoReturn, TextIO

from jaxlc.config import RuntimeConfig
from jaxlc.core import Log, UserError, reason_of
from jaxlc.interrupts import call_within, end_process, start_thread
from jaxlc.runtime.rendezvous import Connection, Member, Message, gather, join

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


# Exit status when another process ends without an error: EX_TEMPFAIL of sysexits.h. Launchers can
# restart the run.
PEER_LOST_STATUS = 75
# Process 0 ends last, because JAX aborts the others when its service ends. After a failure it waits longer, for an
# error of its own, which is often the same one.
_BROADCAST_SECONDS = 0.5
_FAILURE_SECONDS = 1.5
# by which a link may report the loss of a process later than a collective fails
_COLLECTIVE_SECONDS = 5.0
_KEEPALIVE_PROBES = 3
_RESTART = "run the same command again"
_HINT_SECONDS = 5.0  # a file system may fail with the other machine
# how long process 0 waits for the others: until the timer of `watchdog` has ended one that hangs
_LAST_SECONDS = 22.0
# Limits of the end itself, by the operating system's timer: of process 0, and of the others, which need up to 7 s. The
# timer of `watchdog` would end process 0 while it waits.
_LAST_LIMIT_SECONDS = _LAST_SECONDS + 3.0
_LIMIT_SECONDS = 15.0


class Process0Error(UserError):
    """Process 0 has failed, in another process. `report_failure` waits for the text of process 0."""


class Link:
    """Watches the connections to other processes in a thread."""

    def __init__(
        self,
        me: Member,
        connections: Sequence[Connection],
        *,
        heartbeat_seconds: float,
        on_loss: Callable[[str, int], None],
    ):
        """
        Args:
          connections: of process 0: to all others; of others: to process 0.
          heartbeat_seconds: a machine that has not answered for this time counts as failed.
          on_loss: called in the thread, once, with a text such as "process 1 of 4 on node1 ended unexpectedly" and an
            exit status: PEER_LOST_STATUS, or 1 if that process reported an error.
        """
        self._me = me
        self._connections = list(connections)
        self._on_loss = on_loss
        self._is_closed = threading.Event()
        self.has_failed = False
        for connection in connections:
            connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            interval_seconds = max(1, int(heartbeat_seconds / (_KEEPALIVE_PROBES + 2)))
            for name, value in (
                ("TCP_KEEPIDLE", interval_seconds),
                ("TCP_KEEPINTVL", interval_seconds),
                ("TCP_KEEPCNT", _KEEPALIVE_PROBES),
            ):
                if hasattr(socket, name):  # macOS lacks the first
                    connection.socket.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
            # a child would keep it open when this process ends
            os.register_at_fork(after_in_child=connection.close)
        self.thread = start_thread(self._watch, "peers")

    def close(self, failure: str | None = None, *, lost: str | None = None) -> None:
        """Announces the normal end of this process, after which the others go on, or why all of
        them end.

        Args:
          failure: an error of this process; the others end with status 1.
          lost: a text about a process that hangs; the others end with PEER_LOST_STATUS.
        """
        self._is_closed.set()
        self.has_failed = failure is not None
        message: Message = {"bye": True}
        if failure is not None:
            message = {"failed": failure}
        elif lost is not None:
            message = {"lost": lost, "status": PEER_LOST_STATUS}
        for connection in self._connections:
            connection.send(**message)

    @property
    def ends_last(self) -> bool:
        """Whether this is process 0."""
        return self._me.process_id == 0

    def wait_for_others(self, seconds: float) -> None:
        """On process 0, waits until the others have ended. When it ends, JAX aborts those whose
        Python code does not run, before their timer writes their stacks."""
        end = time.monotonic() + seconds
        for connection in self._connections if self.ends_last else ():
            connection.wait_for_end(end - time.monotonic())

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            for connection in self._connections:
                selector.register(connection.socket, selectors.EVENT_READ, connection)
            while selector.get_map():
                for key, _ in selector.select():
                    messages = _receive(key.data)
                    if messages is None or any(
                        message.keys() & {"failed", "lost"} for message in messages
                    ):
                        self._lose(key.data, messages or [])
                        return
                    if any("bye" in message for message in messages):
                        selector.unregister(key.data.socket)

    def _lose(self, connection: Connection, messages: list[Message]) -> None:
        name = connection.member.name if connection.member else "another process"
        status = PEER_LOST_STATUS
        seconds = _BROADCAST_SECONDS
        text = f"{name} ended unexpectedly"
        if connection.unreachable:
            text = f"the network does not reach {name} ({connection.unreachable})"
        for message in messages:
            if "lost" in message:  # from process 0
                text = message["lost"]
                status = message["status"]
            elif "failed" in message:
                text = f"{name} failed: {message['failed']}"
                status = 1
                seconds = _FAILURE_SECONDS
        if self._me.process_id == 0:
            for other in self._connections:
                if other is not connection:
                    other.send(lost=text, status=status)
            time.sleep(seconds)
        if not self._is_closed.is_set():
            self._on_loss(text, status)


_link: Link | None = None
_ending = threading.Lock()  # held by the thread that ends the process
_restart_hint: Callable[[], str] = lambda: "start all processes again"


def connect(config: RuntimeConfig, say: Log) -> None:
    """Waits until all processes of the run have connected to process 0, then watches them until
    this process ends.

    Args:
      config: with all values resolved; num_processes is more than 1.
      say: prints a line about processes that are missing.
    Raises:
      UserError: see `rendezvous.gather` and `rendezvous.join`.
    """
    global _link
    import jax

    me = Member(config.process_id, config.num_processes, socket.gethostname(), jax.__version__)
    connections = gather(config, me, say) if me.process_id == 0 else [join(config, me, say)]
    _link = Link(me, connections, heartbeat_seconds=config.heartbeat_seconds, on_loss=end_run)
    atexit.register(_at_exit)  # before JAX's own handler, which waits for the other processes


def set_restart_hint(hint: Callable[[], str]) -> None:
    """Sets the function that returns the end of the message about a lost process: where a restart
    resumes.
    """
    global _restart_hint
    _restart_hint = hint


def report_failure(error: BaseException) -> None:
    """Reports to the other processes, if there are any, that this one fails; they print the error
    and end.

    A collective that fails because another process has ended is no failure of this one, nor is a
    failure of process 0: it ends with the message about the other process.
    """
    if _link is None:
        return
    import jax

    if isinstance(error, (jax.errors.JaxRuntimeError, Process0Error)):
        # the thread may notice that another process has ended
        _link.thread.join(_COLLECTIVE_SECONDS)
    _wait_for_end()
    _link.close(failure=_text_of(error))


def exit_process(status: int) -> NoReturn:
    """Ends this process; after `report_failure` without JAX's exit handler, which waits for the
    other processes, and after an error or a signal of a single process without waiting for the
    threads of a save."""
    if _link.has_failed if _link is not None else status:
        end_process(status)
    sys.exit(status)


def end_run(
    text: str,
    status: int = PEER_LOST_STATUS,
    *,
    announces: bool = False,
    since: float | None = None,
) -> NoReturn:
    """Prints why this process ends, and ends it, in a few seconds also if a file system or another
    process hangs; process 0 ends after the others, or after `_LAST_SECONDS`. If this thread cannot
    go on, for example because another one holds the interpreter lock, the operating system's timer
    ends the process with status 142.

    Args:
      announces: the other processes print `text` and end as well.
      since: time.monotonic() from which process 0 waits for the others; default: now.
    """
    _ending.acquire()
    start = time.monotonic() if since is None else since
    link = _link
    if link is not None and link.ends_last:
        set_end_limit(start + _LAST_LIMIT_SECONDS - time.monotonic())
    else:
        set_end_limit(_LIMIT_SECONDS)
    if announces and link is not None:
        call_within(_BROADCAST_SECONDS, lambda: link.close(lost=text))
        time.sleep(_BROADCAST_SECONDS)
    if _RESTART not in text:  # the errors of a full disk and of a lost directory say it themselves
        text += f"; {call_within(_HINT_SECONDS, _restart_hint) or 'start all processes again'}"
    with contextlib.suppress(OSError, ValueError):
        print(f"error: {text}", file=sys.stderr, flush=True)
    if link is not None and status == PEER_LOST_STATUS:
        link.wait_for_others(start + _LAST_SECONDS - time.monotonic())
    end_process(status)


def _wait_for_end() -> None:
    """Does not return if another thread ends this process, whose collectives then fail."""
    if _ending.locked():
        _ending.acquire()


def _at_exit() -> None:
    assert _link is not None
    _wait_for_end()
    if getattr(sys, "last_value", None) is None:
        _link.close()
    else:  # an exception that nothing caught
        _link.close(failure=_text_of(sys.last_value))
        end_process(1)


def _text_of(error: BaseException) -> str:
    text = reason_of(error) if str(error) else "interrupted"
    return text if isinstance(error, UserError) else f"{type(error).__name__}: {text}"


def _receive(connection: Connection) -> list[Message] | None:
    try:
        return connection.receive()
    except (OSError, ValueError):
        return None
