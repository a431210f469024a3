"""The version of XLA that compiles for GPUs, which is the version of the installed plugin. Does not import JAX."""

import importlib.metadata
import re

from jaxlc.core.errors import UserError

Version = tuple[int, ...]


def check_plugin() -> None:
    """Raises UserError if the versions of the GPU plugin and jaxlib differ, because XLA's features depend on both."""
    jaxlib = importlib.metadata.version("jaxlib")
    package, version = installed_plugin() or ("", jaxlib)
    if version != jaxlib:
        pjrt = package.replace("plugin", "pjrt")
        raise UserError(
            f"{package} has version {version} but jaxlib has version {jaxlib}:"
            f' pip install "{package}=={jaxlib}" "{pjrt}=={jaxlib}"'
        )


def xla_version() -> Version:
    """The version of the GPU plugin; without one, the version of jaxlib, which a plugin must equal."""
    _, version = installed_plugin() or ("", importlib.metadata.version("jaxlib"))
    return tuple(int(number) for number in re.match(r"\d+(?:\.\d+)*", version)[0].split("."))


def installed_plugin() -> tuple[str, str] | None:
    """The package and version of the installed GPU plugin, in the order in which JAX searches for it."""
    for package in ("jax-cuda13-plugin", "jax-cuda12-plugin"):
        try:
            return package, importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None
