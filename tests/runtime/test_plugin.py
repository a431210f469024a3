import importlib.metadata

import pytest

from jaxlc.core.errors import UserError
from jaxlc.runtime import plugin
from jaxlc.runtime.plugin import check_plugin, xla_version


def test_a_plugin_of_another_version_than_jaxlib(monkeypatch):
    monkeypatch.setattr(plugin, "_plugin", lambda: ("jax-cuda12-plugin", "0.10.9"))
    jaxlib = importlib.metadata.version("jaxlib")
    with pytest.raises(UserError, match=f'is 0.10.9 and jaxlib is {jaxlib}; .*"jax-cuda12-pjrt=={jaxlib}"'):
        check_plugin()
    assert xla_version() == (0, 10, 9)


def test_without_a_plugin_jaxlib_tells(monkeypatch):
    monkeypatch.setattr(plugin, "_plugin", lambda: None)
    check_plugin()
    assert ".".join(map(str, xla_version())) == importlib.metadata.version("jaxlib")
