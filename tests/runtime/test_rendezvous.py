"""The start of a run of several processes, here of threads: what is missing or wrong is printed,
and ends all.
"""

import contextlib
import errno
import json
import os
import re
import socket
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from jaxlc.config import RuntimeConfig
from jaxlc.core.errors import UserError
from jaxlc.runtime import peers, rendezvous
from jaxlc.runtime.rendezvous import Connection, Member
from tests.helpers import free_port, wait_until


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    for name, seconds in (
        ("_FIRST_NOTICE_SECONDS", 0.05),
        ("_RETRY_SECONDS", 0.01),
        ("_PORT_IN_USE_SECONDS", 0.05),
    ):
        monkeypatch.setattr(rendezvous, name, seconds)
    for name in ("_BROADCAST_SECONDS", "_FAILURE_SECONDS"):
        monkeypatch.setattr(peers, name, 0.0)


class Run:
    """The processes of a run as threads; `lines` are what they print."""

    def __init__(self, num_processes: int, host: str = "127.0.0.1", timeout_seconds: int = 600):
        self.num_processes, self.lines = num_processes, []
        address = f"{host}:{free_port()}"
        self.config = RuntimeConfig(
            coordinator_address=address, start_timeout_seconds=timeout_seconds
        )
        self._threads = ThreadPoolExecutor(num_processes)

    def start(self, process_id: int, /, **changes) -> Future:
        me = Member(process_id, self.num_processes, f"host{process_id}", "0.1")._replace(**changes)
        say = self.lines.append
        call = rendezvous.gather if process_id == 0 and not changes else rendezvous.join
        return self._threads.submit(call, self.config, me, say)

    def wait_for_line(self, start: str) -> str:
        """Waits until a line with this start is printed; returns the first one."""
        wait_until(lambda: any(line.startswith(start) for line in self.lines))
        return next(line for line in self.lines if line.startswith(start))


def test_late_processes_are_named_until_all_have_connected():
    run = Run(4)
    first, second = run.start(0), run.start(2)
    address = run.config.coordinator_address
    line = run.wait_for_line("waiting for processes 1, 3 of 4 ")  # earlier ones may name process 2
    assert re.match(
        rf"waiting for processes 1, 3 of 4 at {address}, \d+ s; 127.0.0.1 is the loopback", line
    )
    others = [run.start(1), run.start(3)]
    assert sorted(connection.member.process_id for connection in first.result()) == [1, 2, 3]
    for process in (second, *others):
        assert process.result().member.host == "host0"


def test_late_process_0_is_named_with_the_reason():
    run = Run(2)
    other = run.start(1)
    assert "connection refused" in run.wait_for_line("waiting for process 0 of 2 at")
    run.start(0).result()
    other.result()


@pytest.mark.parametrize(
    "host, reason",
    [
        ("no-such-host", "the host name does not resolve"),
        ("no..host", "the host name does not resolve"),
        (
            "127.0.0.1",
            "connection refused: .*; 127.0.0.1 is the loopback address 127.0.0.1 on .*: use a name or address",
        ),
    ],
)
def test_missing_process_0_raises_after_the_timeout(host, reason, monkeypatch):
    real = socket.getaddrinfo

    def resolve(name, *args, **options):
        if "such" in name:  # a name server may take seconds to answer
            raise socket.gaierror(name)
        return real(name, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with pytest.raises(
        UserError, match=rf"no connection to process 0 of 2 at {host}:\d+ within \d+ s: {reason}"
    ):
        Run(2, host, timeout_seconds=1).start(1).result()


def test_missing_process_ends_all_after_the_timeout():
    run = Run(3, timeout_seconds=3)  # in which process 1 has to connect
    for process in (run.start(0), run.start(1)):
        with pytest.raises(
            UserError,
            match=r"no connection from process 2 of 3 at .* within \d+ s.*; start all processes",
        ):
            process.result()


@pytest.mark.parametrize(
    "changes, words",
    [
        (
            dict(num_processes=2),
            "process 2 of 2 on host2 and process 0 of 3 on host0 disagree on the number of proc",
        ),
        (
            dict(process_id=1),
            "two processes have the index 1, on host1 and on host2|on host2 and on host1",
        ),
        (dict(process_id=0), "two processes have the index 0, on host0 and on host2"),
        (
            dict(jax_version="0.2"),
            "process 2 of 3 on host2 has JAX 0.2 and process 0 of 3 on host0 has JAX 0.1",
        ),
    ],
)
def test_contradicting_process_ends_all(changes, words):
    run = Run(3)
    processes = [run.start(0), run.start(1)]
    run.wait_for_line("waiting for process 2 of 3 ")  # process 1 has connected
    for process in (*processes, run.start(2, host="host2", **changes)):
        with pytest.raises(UserError, match=words):
            process.result()


def test_connection_with_binary_data_raises():
    """`join` reports another program, and not a host name that does not resolve, which is a
    UnicodeError.
    """
    ours, other = socket.socketpair()
    with ours, other:
        other.sendall(b"\x80\x81\n")
        with pytest.raises(json.JSONDecodeError):
            Connection(ours).receive()


def test_port_of_another_program_is_reported_on_both_sides(monkeypatch):
    monkeypatch.setattr(rendezvous, "_WELCOME_SECONDS", 0.2)
    run = Run(2, timeout_seconds=1)
    with socket.create_server(("", int(run.config.coordinator_address.rpartition(":")[2]))):
        with pytest.raises(
            UserError, match=r"port \d+ on .* is in use by another program, or by another process"
        ):
            run.start(0).result()
        with pytest.raises(UserError, match="another program answers at this port"):
            run.start(1).result()


def test_other_connections_are_ignored():
    run = Run(2)
    first = run.start(0)
    host, _, port = run.config.coordinator_address.rpartition(":")
    for data in (b"GET / HTTP/1.1\r\n\r\n", b'{"other": 1}\n', b"[1]\n", b""):
        with (
            contextlib.suppress(ConnectionRefusedError),
            socket.create_connection((host, int(port))) as stranger,
        ):
            stranger.sendall(data)
    other = run.start(1)
    assert first.result()[0].member == Member(1, 2, "host1", "0.1") and other.result()


def test_bind_address_is_the_interface_of_the_coordinator(monkeypatch):
    assert rendezvous.bind_address("127.0.0.1:5") == "127.0.0.1:5"
    assert rendezvous.bind_address("localhost:5") in ("127.0.0.1:5", "[::1]:5")
    assert (
        rendezvous.bind_address("203.0.113.1:5")
        == rendezvous.bind_address("does-not-exist.invalid:5")
        == "[::]:5"
    )
    # as Debian's /etc/hosts has it for the name of the machine
    infos = [(0, 0, 0, "", ("127.0.1.1", 5))]
    monkeypatch.setattr(rendezvous.socket, "getaddrinfo", lambda *_, **__: infos)
    assert rendezvous.bind_address("node0:5") == "[::]:5"


def test_kernel_without_ipv6(monkeypatch):
    """Although /etc/hosts gives localhost the address ::1."""

    class Socket(socket.socket):
        def __init__(self, family=socket.AF_INET, *arguments, **options):
            if family == socket.AF_INET6:
                raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
            super().__init__(family, *arguments, **options)

    monkeypatch.setattr(socket, "socket", Socket)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(0, 0, 0, "", ("::1", 5, 0, 0))])
    assert rendezvous.bind_address("localhost:5") == "[::]:5"
    rendezvous._listen(f"localhost:{free_port()}").close()


def test_note_of_an_address_of_another_machine():
    assert "203.0.113.1 is not an address of" in rendezvous._note(
        "203.0.113.1:1", is_process_0=True
    )
    assert rendezvous._note("203.0.113.1:1", is_process_0=False) == ""


@pytest.fixture
def links() -> list[tuple[peers.Link, Connection, list]]:
    """Of three connected processes: the link, a connection, and the losses that it reports."""
    run = Run(3)
    first, *others = [run.start(process_id) for process_id in range(3)]
    links = []
    for process_id, connections in enumerate(
        [first.result(), *([other.result()] for other in others)]
    ):
        me, losses = Member(process_id, 3, f"host{process_id}", "0.1"), []
        on_loss = lambda *loss, losses=losses: losses.append(loss)
        links.append(
            (
                peers.Link(me, connections, heartbeat_seconds=10, on_loss=on_loss),
                connections[0],
                losses,
            )
        )
    yield links
    for _, connection, _ in links:
        with contextlib.suppress(OSError):
            connection.socket.shutdown(socket.SHUT_RDWR)


def test_link_reports_a_killed_process_to_all(links):
    # as the operating system does for a killed process
    links[1][1].socket.shutdown(socket.SHUT_RDWR)
    loss = ("process 1 of 3 on host1 ended unexpectedly", peers.PEER_LOST_STATUS)
    wait_until(lambda: links[0][2] == links[2][2] == [loss])


def test_link_reports_the_error_of_a_failed_process(links):
    links[2][0].close(failure="UserError: no space left")
    wait_until(
        lambda: (
            links[0][2]
            == links[1][2]
            == [("process 2 of 3 on host2 failed: UserError: no space left", 1)]
        )
    )


def test_link_reports_a_machine_that_the_network_does_not_reach(links, monkeypatch):
    class Unreachable:
        def recv(self, num_bytes: int) -> bytes:
            raise OSError(errno.EHOSTUNREACH, "No route to host")

        def shutdown(self, how: int) -> None:
            """Called by the fixture."""

    def receive(self):
        self.socket = Unreachable()
        return Connection.receive(self)

    monkeypatch.setattr(peers, "_receive", receive)
    links[1][1].socket.shutdown(socket.SHUT_RDWR)  # wakes the thread of process 0
    text = f"the network does not reach process 1 of 3 on host1 ({os.strerror(errno.EHOSTUNREACH)})"
    wait_until(lambda: links[0][2] == [(text, peers.PEER_LOST_STATUS)])


def test_process_0_waits_until_the_others_have_ended(links):
    first = links[0][0]
    first.wait_for_others(0.01)  # both are there
    links[1][0].wait_for_others(600.0)  # not process 0
    waiting = threading.Thread(target=first.wait_for_others, args=(600.0,), daemon=True)
    waiting.start()
    links[1][1].socket.shutdown(socket.SHUT_RDWR)
    waiting.join(0.2)
    assert waiting.is_alive()
    links[2][1].socket.shutdown(socket.SHUT_RDWR)
    wait_until(lambda: not waiting.is_alive())


def test_link_of_processes_that_end_normally_is_silent(links):
    for link, connection, _ in reversed(links):
        link.close()
        with contextlib.suppress(OSError):  # the other side may have closed it before
            connection.socket.shutdown(socket.SHUT_RDWR)
    wait_until(lambda: not any(thread.name == "jaxlc-peers" for thread in threading.enumerate()))
    assert [losses for _, _, losses in links] == [[], [], []]


@pytest.mark.parametrize(
    ("soft", "hard", "raised_to"),
    [(1024, 2**20, 3072), (65_536, 65_536, None), (-1, -1, None), (1024, -1, 3072)],
)
def test_limit_of_open_files_is_raised_for_many_processes(monkeypatch, soft, hard, raised_to):
    """With 1,024 processes and a limit of 1,024 files, `accept` failed; -1 is no limit."""
    limits: list[tuple[int, int]] = []
    monkeypatch.setattr(rendezvous.resource, "getrlimit", lambda what: (soft, hard))
    monkeypatch.setattr(rendezvous.resource, "setrlimit", lambda what, limit: limits.append(limit))
    rendezvous._allow_open_files(1024)
    assert limits == ([(raised_to, hard)] if raised_to else [])


def test_low_limit_of_open_files_is_named(monkeypatch):
    monkeypatch.setattr(rendezvous.resource, "getrlimit", lambda what: (1024, 2048))
    with pytest.raises(
        UserError,
        match=r"process 0 of 1024 needs 3,072 open files, and `ulimit -Hn` on .* is 2,048",
    ):
        rendezvous._allow_open_files(1024)
