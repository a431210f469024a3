import tomllib
from pathlib import Path

import pytest

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
