import os
import stat

import pytest

from jaxlc.core.files import replacing


def test_replacing_gives_the_permissions_of_the_umask(tmp_path):
    """A cache may be shared: other users read its files."""
    previous = os.umask(0o022)
    try:
        with replacing(tmp_path / "a") as out:
            out.write(b"new")
    finally:
        os.umask(previous)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o644


def test_replacing_with_an_error_keeps_the_old_file(tmp_path):
    (tmp_path / "a").write_text("old")
    with pytest.raises(KeyError), replacing(tmp_path / "a") as out:
        out.write(b"new")
        raise KeyError
    assert (tmp_path / "a").read_text() == "old" and len(list(tmp_path.iterdir())) == 1
