import errno
import os

import pytest

from jaxlc.config.command_line import VerbFlags, run_main
from jaxlc.core.errors import UserError
from jaxlc.core.files import full_disk_explained, make_writable, write_json


def _write(tmp_path, error: Exception) -> str:
    """Type and message of `error` after it was raised where a command writes to `tmp_path`."""
    with (
        pytest.raises(Exception) as raised,
        full_disk_explained(tmp_path, lambda: "step 4 is kept"),
    ):  # noqa: B017, PT011
        raise error
    return f"{raised.type.__name__}: {raised.value}"


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)),
        ValueError(
            'RESOURCE_EXHAUSTED: Error writing "params.w/0.0" [OS error 28: No space left on device]'
        ),
    ],
)
def test_full_disk_becomes_one_sentence(error, tmp_path):
    message = _write(tmp_path, error)
    assert message.startswith(f"DiskFullError: cannot write to {tmp_path} (") and message.endswith(
        "): step 4 is kept"
    )


def test_full_disk_of_another_file_names_its_directory(tmp_path):
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/var/tmp/x")
    assert "cannot write to /var/tmp (No space" in _write(tmp_path, error)


def test_full_disk_ends_a_command_with_one_sentence(capsys):
    def write(command) -> int:
        write_json("/dev/full", command.arguments)
        return 0

    assert run_main(write, ["jaxlc x"], flags=VerbFlags) == 1
    assert capsys.readouterr().err == (
        "error: cannot write to /dev (No space left on device): free space, then run the same command again\n"
    )


def test_other_error_is_not_changed(tmp_path):
    assert _write(tmp_path, PermissionError(errno.EACCES, "denied")).startswith("PermissionError")


def test_make_writable_with_a_file_raises(tmp_path):
    make_writable(tmp_path / "a" / "b", "use b")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot write to .*file \(File exists\): use b"):
        make_writable(tmp_path / "file", "use b")
