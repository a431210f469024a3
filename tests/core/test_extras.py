import re
import tomllib
from pathlib import Path

import pytest

from jaxlc.attention.kernels import fa3
from jaxlc.core import errors
from jaxlc.core.errors import UserError

ROOT = Path(__file__).parents[2]


def test_extras_names_match_pyproject():
    optional = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for package, extra in errors.EXTRAS.items():
        names = [requirement.replace("-", "_") for requirement in optional[extra]]
        assert any(name.startswith(package) for name in names), package


@pytest.mark.parametrize("toolkit", [12, 13])
def test_lock_of_fa3_has_the_checked_version_with_hashes(toolkit):
    first, *hashes = (ROOT / f"requirements-fa3-cuda{toolkit}.lock").read_text().splitlines()
    assert first.startswith(f"dew-flash-attn-cu{toolkit}=={fa3.VERSION} ;")
    assert hashes and all(re.fullmatch(r" +--hash=sha256:[0-9a-f]{64}( \\)?", x) for x in hashes)


def test_require_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setattr(errors, "is_installed", lambda package: False)
    with pytest.raises(UserError) as error:
        errors.require("matplotlib", "--timeline")
    command = "pip install -e '.[plot]' in a checkout of jaxlc"
    assert (
        str(error.value)
        == f"--timeline needs the package matplotlib, which is not installed: {command}"
    )


def test_require_installed_package_passes():
    errors.require("matplotlib", "--timeline")
