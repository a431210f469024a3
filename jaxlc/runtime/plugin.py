"""Which version of XLA compiles for GPUs: that of the installed plugin. Imports no jax."""

import importlib.metadata
import re

from jaxlc.core.errors import UserError

Version = tuple[int, ...]


def check_plugin() -> None:
    """Raises UserError if the GPU plugin is not of jaxlib's version: what XLA can do is told from that."""
    jaxlib = importlib.metadata.version("jaxlib")
    package, version = _plugin() or ("", jaxlib)
    if version != jaxlib:
        pjrt = package.replace("plugin", "pjrt")
        raise UserError(
            f'{package} is {version} and jaxlib is {jaxlib}; pip install "{package}=={jaxlib}" "{pjrt}=={jaxlib}"'
        )


def xla_version() -> Version:
    """The version of the GPU plugin; of jaxlib, which the plugin must equal, where it is part of that."""
    _, version = _plugin() or ("", importlib.metadata.version("jaxlib"))
    return tuple(int(number) for number in re.match(r"\d+(?:\.\d+)*", version)[0].split("."))


def _plugin() -> tuple[str, str] | None:
    """The installed GPU plugin's package and version; in the order in which JAX looks for them."""
    for package in ("jax-cuda13-plugin", "jax-cuda12-plugin"):
        try:
            return package, importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None
