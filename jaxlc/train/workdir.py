"""The directory of a run."""

import tempfile
from pathlib import Path

from jaxlc.checkpoints.checkpoint_files import CHECKPOINTS_DIRECTORY
from jaxlc.core.errors import UserError, reason_of
from jaxlc.train.reports.metrics import METRICS_FILE


def prepare_workdir(workdir: str | Path) -> Path:
    """Creates `workdir` if it does not exist, checks that it is writable, and returns its absolute path.

    Raises:
      UserError: it is not writable.
    """
    path = Path(workdir).expanduser().absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / CHECKPOINTS_DIRECTORY).mkdir(exist_ok=True)
        with tempfile.TemporaryFile(dir=path), (path / METRICS_FILE).open("a"):
            pass
    except OSError as error:
        raise UserError(f"cannot write to {path} ({reason_of(error)}): use a different --workdir") from error
    return path
