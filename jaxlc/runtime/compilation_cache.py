"""Keeps ahead-of-time compilations out of JAX's persistent compilation cache.

JAX writes programs compiled for absent devices to the cache but cannot read them back: without a client for the
devices, reading fails with the warning "Error reading persistent compilation cache entry", and JAX compiles again.
"""

import contextlib
from collections.abc import Iterable, Iterator


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """Compiles without the persistent cache.

    JAX decides once per process whether the cache is in use; `reset_cache` makes it decide again. Entries on disk are
    not touched.
    """
    import jax

    was_enabled = jax.config.jax_enable_compilation_cache
    _enable(False)
    try:
        yield
    finally:
        _enable(was_enabled)


@contextlib.contextmanager
def disabled_for_absent(devices: Iterable) -> Iterator[None]:
    """As `disabled` if any of the `jax.Device`s is only a compile target; otherwise the cache stays as it is."""
    with disabled() if any(_is_absent(device) for device in devices) else contextlib.nullcontext():
        yield


def _enable(is_enabled: bool) -> None:
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    jax.config.update("jax_enable_compilation_cache", is_enabled)
    compilation_cache.reset_cache()


def _is_absent(device) -> bool:
    import jax

    try:
        return device not in jax.devices(device.platform)
    except RuntimeError:  # JAX has no devices of that platform
        return True
