"""The directory of a run, which one run at a time writes to."""

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

from jaxlc.checkpoints.checkpoint_files import CHECKPOINTS_DIRECTORY, TEMPORARY, committed_steps, quiet_saves
from jaxlc.checkpoints.stored_checkpoints import LOCK_FILE
from jaxlc.core.errors import UserError
from jaxlc.core.lock import LockHeld, locked
from jaxlc.core.paths import local_path
from jaxlc.core.write_errors import full_disk_explained, make_writable, write_errors_explained
from jaxlc.runtime.barrier import wait_for_processes
from jaxlc.train.reports.metrics import METRICS_FILE

# A run that was asked to stop may still save its last checkpoint, and an NFS server keeps the locks of a machine that
# has lost its power for 90 s.
LOCK_SECONDS = 100.0
_BARRIER_SECONDS = 300  # by which a process may reach a barrier later than the others


@contextlib.contextmanager
def open_workdir(workdir: str | Path, log: Callable[[str], None]) -> Iterator[Path]:
    """Prepares `workdir` for a run, and locks it until the end of the block; returns its absolute path.

    Process 0 holds the lock, and the other processes wait for it, so that none of them touches the checkpoints of
    another run.

    Args:
      log: prints a line.
    Raises:
      UserError: the workdir is not writable, another run trains in it, or its disk becomes full in the block.
    """
    path = prepare_workdir(workdir)
    with contextlib.ExitStack() as stack:
        quiet_saves()
        stack.enter_context(full_disk_explained(path, lambda: _kept(path)))
        if jax.process_index() == 0:
            stack.callback(_remove_empty, path)
            stack.enter_context(_locked(path, log))
            stack.callback(_remove_empty, path / CHECKPOINTS_DIRECTORY, path / METRICS_FILE)  # while it is locked
        wait_for_processes("workdir locked", int(LOCK_SECONDS) + _BARRIER_SECONDS)
        yield path


def _remove_empty(*paths: Path) -> None:
    """Removes what `prepare_workdir` has made for a start that was refused: empty files and directories."""
    for path in paths:
        with contextlib.suppress(OSError):  # such as a directory that is not empty
            if path.is_dir():
                path.rmdir()
            elif not path.stat().st_size:
                path.unlink()


def prepare_workdir(workdir: str | Path) -> Path:
    """Creates `workdir` if it does not exist, checks that it is writable, and returns its absolute path.

    Raises:
      UserError: it is not writable, or a file in it is a symbolic link.
    """
    path, advice = local_path(workdir).absolute(), "use a different --workdir"
    make_writable(path, advice)
    links = sorted(entry.name for entry in path.iterdir() if entry.is_symlink() and not entry.is_dir())
    if links:  # of a workdir that somebody else has written: the run would write to a file elsewhere
        raise UserError(f"{path / links[0]} is a symbolic link, so a run would write elsewhere: remove it, or {advice}")
    with write_errors_explained(path, advice):
        (path / CHECKPOINTS_DIRECTORY).mkdir(exist_ok=True)
        (path / METRICS_FILE).open("a").close()
    return path


@contextlib.contextmanager
def _locked(path: Path, log: Callable[[str], None]) -> Iterator[None]:
    lock = locked(
        path / LOCK_FILE,
        lambda holder: log(f"waiting up to {LOCK_SECONDS:.0f} s for {holder}, which trains in {path}"),
        timeout_seconds=LOCK_SECONDS,
        on_unsupported=lambda: log(
            f"warning: the file system of {path} has no locks: do not start a second run in this workdir"
        ),
    )
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(lock)
        except LockHeld as error:
            raise UserError(
                f"{error} trains in {path}: wait for its end or stop it, or use a different --workdir"
            ) from None
        yield


def _kept(path: Path) -> str:
    """What is kept after a full disk; deletes the checkpoints that are incomplete."""
    checkpoints = path / CHECKPOINTS_DIRECTORY
    for incomplete in checkpoints.glob(f"*{TEMPORARY}*"):
        shutil.rmtree(incomplete, ignore_errors=True)
    steps = committed_steps(checkpoints)
    saved = f"the checkpoint of step {steps[-1]} is complete" if steps else "there is no checkpoint yet"
    return f"{saved}; free space, then run the same command again{' to resume' if steps else ''}"
