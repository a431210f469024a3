import importlib.metadata
import re

import pytest

from jaxlc.core.errors import UserError
from jaxlc.runtime import xla_flags
from jaxlc.runtime.xla_flags import check_plugin, xla_version


def test_check_plugin_other_version_is_refused(monkeypatch):
    monkeypatch.setattr(xla_flags, "installed_plugin", lambda: ("jax-cuda12-plugin", "0.10.9"))
    jaxlib = importlib.metadata.version("jaxlib")
    with pytest.raises(
        UserError,
        match=f'has version 0.10.9 but jaxlib has version {jaxlib}: .*"jax-cuda12-pjrt=={jaxlib}"',
    ):
        check_plugin()
    assert xla_version() == (0, 10, 9)


def test_check_plugin_accepts_what_the_error_installs(monkeypatch):
    monkeypatch.setattr(xla_flags, "installed_plugin", lambda: ("jax-cuda12-plugin", "0.10.9"))
    with pytest.raises(UserError) as error:
        check_plugin()
    installed = dict(re.findall(r'"([\w-]+)==([\d.]+)"', str(error.value)))
    monkeypatch.setattr(
        xla_flags, "installed_plugin", lambda: ("jax-cuda12-plugin", installed["jax-cuda12-plugin"])
    )
    check_plugin()


def test_xla_version_without_plugin_is_jaxlib_version(monkeypatch):
    monkeypatch.setattr(xla_flags, "installed_plugin", lambda: None)
    check_plugin()
    assert ".".join(map(str, xla_version())) == importlib.metadata.version("jaxlib")
