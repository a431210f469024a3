"""The version of XLA that compiles for GPUs, which is that of the installed plugin. Imports no jax."""

import importlib.metadata
import re

from jaxlc.core.errors import UserError

Version = tuple[int, ...]


def check_plugin() -> None:
    """Raises UserError unless the GPU plugin has the version of jaxlib, from which XLA's features are derived."""
    jaxlib = importlib.metadata.version("jaxlib")
    package, version = _plugin() or ("", jaxlib)
    if version != jaxlib:
        pjrt = package.replace("plugin", "pjrt")
        raise UserError(
            f'{package} is {version} but jaxlib is {jaxlib}: pip install "{package}=={jaxlib}" "{pjrt}=={jaxlib}"'
        )


def xla_version() -> Version:
    """The version of the GPU plugin; that of jaxlib if no plugin is installed (see `check_plugin`)."""
    _, version = _plugin() or ("", importlib.metadata.version("jaxlib"))
    return tuple(int(number) for number in re.match(r"\d+(?:\.\d+)*", version)[0].split("."))


def _plugin() -> tuple[str, str] | None:
    """Package name and version of the installed GPU plugin, in JAX's order of preference; None without one."""
    for package in ("jax-cuda13-plugin", "jax-cuda12-plugin"):
        try:
            return package, importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None
