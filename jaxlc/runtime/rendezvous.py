"""Connects all processes of a run to process 0 before `jax.distributed` starts, which waits without
a message.

Process 0 listens at the coordinator's address, the port that JAX uses afterwards, and every other
process connects to it. Each side prints what it waits for, and errors such as two processes with
the same index end all of them. The connections stay open: `jaxlc.runtime.peers` watches them. They
carry lines of JSON over TCP.
"""

import contextlib
import errno
import ipaddress
import json
import os
import resource
import selectors
import socket
import time
from typing import Any, NamedTuple

from jaxlc.config import RuntimeConfig
from jaxlc.core import Log, UserError, first_of, reason_of

Message = dict[str, Any]  # a key names its kind: hello, welcome, go, failed, lost or bye

_MAX_LINE_BYTES = 65_536
_UNREACHABLE = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN)


class Member(NamedTuple):
    """A process of a run, as it introduces itself."""

    process_id: int
    num_processes: int
    host: str
    jax_version: str

    @property
    def name(self) -> str:
        return f"process {self.process_id} of {self.num_processes} on {self.host}"


class Connection:
    """A TCP connection that carries lines of JSON."""

    def __init__(self, connected: socket.socket):
        connected.setblocking(True)
        self.socket = connected
        self.member: Member | None = None  # who is on the other side
        # why the network does not reach the other side, after the end of the connection
        self.unreachable = ""
        self._buffer = b""

    def send(self, **message: Any) -> None:
        """Sends a message. A broken connection is noticed later, in `receive`."""
        with contextlib.suppress(OSError):
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[Message] | None:
        """The messages that have arrived; waits for data. None: the connection is closed.

        Raises:
          ValueError: the data are not ours.
          TimeoutError: no data before the timeout of the socket.
        """
        try:
            data = self.socket.recv(_MAX_LINE_BYTES)
        except OSError as error:
            if error.errno in _UNREACHABLE:
                self.unreachable = os.strerror(error.errno)
            elif isinstance(error, TimeoutError):
                raise
            return None
        if not data:
            return None
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        messages = [json.loads(line.decode(errors="replace")) for line in lines]
        if len(self._buffer) > _MAX_LINE_BYTES or not all(
            isinstance(message, dict) for message in messages
        ):
            raise ValueError("not a message of jaxlc")
        return messages

    def wait_for_end(self, seconds: float) -> None:
        """Waits at most `seconds` until the other side has closed the connection. Messages are
        lost.
        """
        end = time.monotonic() + seconds
        with contextlib.suppress(OSError):  # also of a timeout
            while (left := end - time.monotonic()) > 0:
                self.socket.settimeout(left)
                if not self.socket.recv(_MAX_LINE_BYTES):
                    return

    def close(self) -> None:
        self.socket.close()


_FIRST_NOTICE_SECONDS = 10.0  # then twice as long each time
_CONNECT_SECONDS = 5.0
_WELCOME_SECONDS = 10.0
_RETRY_SECONDS = 0.5
# after the timeout, for the error of process 0, which names the missing processes
_GRACE_SECONDS = 10.0
_PORT_IN_USE_SECONDS = 5.0  # how long an earlier run on the same port may take to end
_OTHER_OPEN_FILES = 1024  # libraries, checkpoints, data
_ADVICE = "start all processes, or set a longer config.runtime.start_timeout_seconds"


class _Clock:
    """Times of notices: after 10, 20, 40, ... seconds; ends after the timeout."""

    def __init__(self, timeout_seconds: float):
        self._start = time.monotonic()
        self._next_notice = _FIRST_NOTICE_SECONDS
        self._timeout_seconds = timeout_seconds

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start

    @property
    def seconds_to_timeout(self) -> float:
        return max(0.01, self._timeout_seconds - self.seconds)

    @property
    def is_over(self) -> bool:
        return self.seconds >= self._timeout_seconds

    @property
    def seconds_to_event(self) -> float:
        """Until the next notice or the timeout."""
        return max(0.01, min(self._next_notice, self._timeout_seconds) - self.seconds)

    def is_notice_due(self) -> bool:
        is_due = self.seconds >= self._next_notice
        if is_due:
            self._next_notice *= 2
        return is_due


def gather(config: RuntimeConfig, me: Member, say: Log) -> list[Connection]:
    """Process 0: waits until all other processes have connected; returns their connections.

    Args:
      say: prints a line.
    Raises:
      UserError: the port is in use, a process is missing after the timeout, or processes contradict each other.
    """
    _allow_open_files(me.num_processes)
    clock = _Clock(config.start_timeout_seconds)
    arrived = dict[int, Connection]()
    with _listen(config.coordinator_address) as listener, selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        try:
            while len(arrived) < me.num_processes - 1:
                for key, _ in selector.select(clock.seconds_to_event):
                    if key.data is None:
                        connection = Connection(listener.accept()[0])
                        selector.register(connection.socket, selectors.EVENT_READ, connection)
                    elif not _admit(key.data, me, arrived):
                        selector.unregister(key.data.socket)
                        key.data.close()
                _check_clock(clock, config.coordinator_address, me, arrived, say)
        except UserError as error:
            for key in selector.get_map().values():
                if key.data is not None:
                    key.data.send(failed=str(error))
            raise
    for connection in arrived.values():
        connection.send(go=True)
    return list(arrived.values())


def _allow_open_files(num_processes: int) -> None:
    """Raises the limit of open files of process 0, which is 1,024 on many systems: each process of
    the run has a connection to `peers` and one to JAX's coordination service.

    Raises:
      UserError: the system does not allow as many.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * num_processes + _OTHER_OPEN_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise UserError(
            f"process 0 of {num_processes} needs {needed:,} open files, and `ulimit -Hn` on {socket.gethostname()} is"
            f" {hard:,}: raise this limit, or start one process per machine"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _admit(connection: Connection, me: Member, arrived: dict[int, Connection]) -> bool:
    """Reads from a connection and adds it to `arrived`; False: it has ended, or belongs to another
    program.

    Raises:
      UserError: the process on the other side contradicts this one or another one.
    """
    try:
        messages = connection.receive()
        if messages is None:
            if connection.member is not None:
                arrived.pop(connection.member.process_id)
            return False
        for message in messages:
            connection.member = Member(**message["hello"])
            _check_member(connection.member, me, arrived)
            arrived[connection.member.process_id] = connection
            connection.send(welcome=me._asdict())
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, UserError):
            raise
        return False
    return True


def _check_member(member: Member, me: Member, arrived: dict[int, Connection]) -> None:
    if member.num_processes != me.num_processes:
        raise UserError(
            f"{member.name} and {me.name} disagree on the number of processes; start all with the same"
            " config.runtime.num_processes"
        )
    same = arrived.get(member.process_id)
    other = me if member.process_id == 0 else same.member if same and same.member else None
    if other is not None:
        raise UserError(
            f"two processes have the index {member.process_id}, on {other.host} and on {member.host}; give each its own"
            " config.runtime.process_id"
        )
    if member.jax_version != me.jax_version:
        raise UserError(
            f"{member.name} has JAX {member.jax_version} and {me.name} has JAX {me.jax_version}; install the same"
            " version on all machines"
        )


def _check_clock(
    clock: _Clock, address: str, me: Member, arrived: dict[int, Connection], say: Log
) -> None:
    """Prints which processes are missing, if a notice is due.

    Raises:
      UserError: the timeout is over.
    """
    absent = sorted(set(range(1, me.num_processes)) - arrived.keys())
    if not absent or not (clock.is_over or clock.is_notice_due()):
        return
    names = first_of(absent, 16)
    missing = f"{'process' if len(absent) == 1 else 'processes'} {names} of {me.num_processes} at {address}"
    note = _note(address, is_process_0=True)
    if clock.is_over:
        raise UserError(
            f"no connection from {missing} within {clock.seconds:.0f} s{note}; {_ADVICE}"
        )
    say(f"waiting for {missing}, {clock.seconds:.0f} s{note}")


def join(config: RuntimeConfig, me: Member, say: Log) -> Connection:
    """Other processes: connects to process 0 and waits until all processes have; returns the
    connection.

    Args:
      say: prints a line.
    Raises:
      UserError: no connection before the timeout, or process 0 reports an error.
    """
    clock = _Clock(config.start_timeout_seconds)
    address = config.coordinator_address
    target = f"process 0 of {me.num_processes} at {address}"
    while True:
        problem = "the connection was closed"
        with contextlib.ExitStack() as cleanup:
            try:
                host, _, port = address.rpartition(":")
                connection = Connection(
                    socket.create_connection(
                        (host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS
                    )
                )
                cleanup.callback(connection.close)
                connection.send(hello=me._asdict())
                if _wait_for_go(connection, clock, target):
                    cleanup.pop_all()
                    return connection
            except UserError:
                raise
            except UnicodeError:  # an empty or too long part of the name
                problem = "the host name does not resolve"
            except ValueError:
                problem = "another program answers at this port"
            except OSError as error:
                problem = _connection_problem(error)
        note = f": {problem}{_note(address, is_process_0=False)}"
        if clock.is_over:
            raise UserError(
                f"no connection to {target} within {clock.seconds:.0f} s{note}; {_ADVICE}"
            )
        if clock.is_notice_due():
            say(f"waiting for {target}, {clock.seconds:.0f} s{note}")
        time.sleep(_RETRY_SECONDS)


def _wait_for_go(connection: Connection, clock: _Clock, target: str) -> bool:
    """Whether all processes have connected; False if the connection ended before.

    Raises:
      UserError: process 0 reports an error, or the timeout is over.
      ValueError: the other side is not process 0 of a run.
    """
    connection.socket.settimeout(_WELCOME_SECONDS)
    while True:
        try:
            messages = connection.receive()
        except TimeoutError:
            if connection.member is None:
                raise ValueError("no answer to hello") from None
            raise UserError(
                f"{target} still waits for processes after {clock.seconds:.0f} s; {_ADVICE}"
            ) from None
        for message in messages or ():
            if "failed" in message:
                raise UserError(message["failed"])
            if "go" in message:
                connection.socket.settimeout(None)
                return True
            if "welcome" in message:
                connection.member = Member(**message["welcome"])
        if messages is None:
            return False
        if connection.member is not None:
            connection.socket.settimeout(clock.seconds_to_timeout + _GRACE_SECONDS)


def bind_address(address: str) -> str:
    """Where process 0 listens, IP:PORT: the interface that has the coordinator's address.

    All interfaces, [::]:PORT, if no interface of this machine has that address, as behind a service
    of Kubernetes, or if /etc/hosts gives the name of this machine a loopback address, which the
    other machines do not use.

    Args:
      address: HOST:PORT of the coordinator.
    """
    host, _, port = address.rpartition(":")
    for ip in _addresses(host, int(port)):
        is_usable = not ip.is_loopback or host.strip("[]") in ("localhost", str(ip))
        if is_usable and _is_local(str(ip)):
            return f"[{ip}]:{port}" if ip.version == 6 else f"{ip}:{port}"
    return f"[::]:{port}"


def _addresses(host: str, port: int) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """The addresses of a host; empty if it does not resolve."""
    try:
        infos = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return sorted({ipaddress.ip_address(info[4][0]) for info in infos}, key=str)


def _listen(address: str) -> socket.socket:
    """A socket that accepts connections where JAX's coordination service will do so."""
    host, _, port_text = bind_address(address).rpartition(":")
    host = "" if host == "[::]" else host.strip("[]")
    port = int(port_text)
    is_dual = not host and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual or ":" in host else socket.AF_INET
    deadline_seconds = time.monotonic() + _PORT_IN_USE_SECONDS
    while True:
        try:
            return socket.create_server(
                (host, port), family=family, backlog=1024, dualstack_ipv6=is_dual
            )
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise UserError(
                    f"cannot listen at port {port} for {address}: {reason_of(error)}"
                ) from error
            if time.monotonic() > deadline_seconds:
                raise UserError(
                    f"port {port} on {socket.gethostname()} is in use by another program, or by another process with"
                    " the index 0; use a different port in config.runtime.coordinator_address"
                ) from error
        time.sleep(_RETRY_SECONDS)


def _connection_problem(error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return "the host name does not resolve"
    if isinstance(error, ConnectionRefusedError):
        return "connection refused: process 0 has not started, or runs on another machine"
    if isinstance(error, TimeoutError):
        return "no answer: the host is down, or a firewall blocks the port"
    return reason_of(error)


def _note(address: str, *, is_process_0: bool) -> str:
    """A possible problem with the coordinator's address on this machine, after a semicolon; "":
    none.
    """
    host, _, port = address.rpartition(":")
    ips = _addresses(host, int(port))
    if not ips:
        return f"; {host} does not resolve on {socket.gethostname()}" if is_process_0 else ""
    if all(ip.is_loopback for ip in ips):
        return (
            f"; {host} is the loopback address {ips[0]} on {socket.gethostname()}, which only processes on the same"
            " machine reach: use a name or address that all machines reach"
        )
    if is_process_0 and not any(_is_local(str(ip)) for ip in ips):
        return f"; {ips[0]} is not an address of {socket.gethostname()}, and process 0 must run at {host}"
    return ""


def _is_local(ip: str) -> bool:
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    try:  # a kernel without IPv6 makes no such socket, although /etc/hosts may have ::1
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((ip, 0))
    except OSError:
        return False
    return True
