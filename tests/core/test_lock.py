"""A lock that several processes share: one works, the others wait, and the lock of a killed process
is released.
"""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from jaxlc.core.files import LockHeld, locked
from tests import helpers

_HOLDER = """
import pathlib, sys, time
from jaxlc.core.files import locked
with locked(pathlib.Path(sys.argv[1]), print):
    print("holds", flush=True)
    time.sleep(600)
"""


def test_locked_file_is_gone_after_use_and_after_failure(tmp_path: Path):
    path = tmp_path / "lock"
    with locked(path, pytest.fail):
        assert path.exists()
    assert not path.exists()
    with pytest.raises(KeyError), locked(path, pytest.fail):
        raise KeyError
    assert not path.exists()


def test_locked_file_that_cannot_be_deleted_does_not_replace_the_error(tmp_path: Path, monkeypatch):
    """Such as of a file system that has become read-only."""

    def unlink(self, missing_ok=False):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))

    monkeypatch.setattr(Path, "unlink", unlink)
    with pytest.raises(KeyError), locked(tmp_path / "lock", pytest.fail):
        raise KeyError
    with locked(tmp_path / "lock", pytest.fail):
        pass


def test_locked_waits_for_other_threads_one_at_a_time(tmp_path: Path):
    active, most, waits, is_held = [0], [0], [], threading.Event()

    def work():
        with locked(tmp_path / "lock", waits.append):
            active[0] += 1
            most[0] = max(most[0], active[0])
            is_held.set()
            helpers.wait_until(lambda: len(waits) == 3 or most[0] > 1)
            active[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    threads[0].start()
    # a thread that waits before the holder has written its name reads "another process"
    is_held.wait()
    for thread in threads[1:]:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] and len(waits) == 3
    assert all(f"process {os.getpid()} on " in message for message in waits)
    assert list(tmp_path.iterdir()) == []


def test_locked_opens_file_again_if_deleted_on_nfs(tmp_path: Path, monkeypatch):
    """Another machine has deleted the file that this process has open and waits for."""
    flock, errors = fcntl.flock, [errno.EWOULDBLOCK, errno.ESTALE]

    def flock_on_nfs(file, operation):
        if errors:
            raise OSError(errors.pop(0), "of NFS")
        flock(file, operation)

    monkeypatch.setattr("jaxlc.core.files.fcntl.flock", flock_on_nfs)
    with locked(tmp_path / "lock", lambda holder: None):
        assert errors == [] and (tmp_path / "lock").exists()


def test_locked_ends_after_its_timeout_with_the_name_of_the_holder(tmp_path: Path):
    path, waits = tmp_path / "lock", []
    with locked(path, pytest.fail):
        with (
            pytest.raises(LockHeld, match=f"^process {os.getpid()} on "),
            locked(path, waits.append, timeout_seconds=0),
        ):
            pass
        assert len(waits) == 1 and path.exists()
    assert not path.exists()


def test_locked_without_locks_reports_it_and_does_not_wait(tmp_path: Path, monkeypatch):
    def flock(file, operation):
        raise OSError(errno.ENOSYS, "no locks")

    monkeypatch.setattr("jaxlc.core.files.fcntl.flock", flock)
    reports = []
    with locked(tmp_path / "lock", pytest.fail, on_unsupported=lambda: reports.append(1)):
        assert reports == [1]


def test_locked_ignores_file_of_killed_process(tmp_path: Path):
    path, waits = tmp_path / "lock", []
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout.readline() == "holds\n"

    def wait():
        with locked(path, waits.append):
            pass

    waiter = threading.Thread(target=wait)
    waiter.start()
    helpers.wait_until(lambda: waits)
    assert f"process {holder.pid} on " in waits[0] and waiter.is_alive()
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert path.exists()
    waiter.join(timeout=helpers.TIMEOUT_SECONDS)
    assert not waiter.is_alive() and not path.exists()
