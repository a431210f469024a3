"""JAX's persistent compilation cache: its directory, and which compilations use it.

A second equal run, in the same process or after a restart, then loads its compiled programs. JAX
stores programs that took longer than `jax_persistent_cache_min_compile_time_secs`, 1 s by default,
and keys them by the program, its compiler options, the versions of JAX and XLA, and the devices
with their instruction sets.
"""

import contextlib
import os
import re
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from jaxlc.config import RuntimeConfig
from jaxlc.core import UserError, reason_of
from jaxlc.core.files import local_path
from jaxlc.runtime import stderr
from jaxlc.runtime.xla_flags import xla_version

# Size limit of the default directory. JAX can bound the size itself, but that needs the package filelock, and JAX 0.10
# fails to evict entries that were written without a bound.
MAX_BYTES = 8 * 2**30
_ENTRY_PATTERNS = ("*-cache", "*-atime")  # the files that JAX writes
_REQUESTS = "/jax/compilation_cache/compile_requests_use_cache"
_HITS = "/jax/compilation_cache/cache_hits"
# Before 0.12, XLA writes two errors of 1,500 characters for each program that it loads on x86 CPUs: "Target machine
# feature +prefer-no-gather is not supported", although that is a preference, not a feature (jax-ml/jax issue 38445).
_CPU_NOTES = ("cpu_aot_loader.cc",)
_FIRST_XLA_WITHOUT_CPU_NOTES = (0, 12)
_TORN = re.compile(r"Error reading persistent compilation cache entry for '(\w+)'")


class _Directories:
    """The directories that the last call of `configure` set."""

    jax: str | None = None  # the value of jax_compilation_cache_dir, if it was changed
    step: str | None = None  # the directory for the training step only, where XLA writes _CPU_NOTES


def configure(config: RuntimeConfig, platform: str) -> None:
    """Sets the cache directory of JAX from config.compilation_cache_dir. May be called again, with
    other values.

    Raises:
      UserError: the directory that the config names cannot be created.
    """
    # What the user has set in Python or in the environment. "": no cache; None: not set.
    users = jax.config.jax_compilation_cache_dir
    if users == _Directories.jax:
        users = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if config.compilation_cache_dir == "auto" and users is not None:
        _set_directories(users, for_step_only=None)
        return
    directory = _directory(config)
    if directory and platform == "cpu" and xla_version() < _FIRST_XLA_WITHOUT_CPU_NOTES:
        _set_directories(users, for_step_only=directory)
    else:
        _set_directories(directory, for_step_only=None)


@contextlib.contextmanager
def for_step(devices: Iterable) -> Iterator[None]:
    """For the compilation of a training step: uses the configured cache, unless a device is absent.

    JAX writes programs compiled for absent devices to the cache but cannot read them back: without
    a client for the devices, reading fails with the warning "Error reading persistent compilation
    cache entry", and JAX compiles again.

    Args:
      devices: `jax.Device`s.
    """
    if any(_is_absent(device) for device in devices):
        with disabled():
            yield
    elif _Directories.step is not None:
        before = jax.config.jax_compilation_cache_dir
        _update("jax_compilation_cache_dir", _Directories.step)
        try:
            with stderr.without_lines(_CPU_NOTES), _torn_entries_deleted():
                yield
        finally:
            _update("jax_compilation_cache_dir", before)
    else:
        with _torn_entries_deleted():
            yield


@contextlib.contextmanager
def _torn_entries_deleted() -> Iterator[None]:
    """Deletes the entries that JAX could not read, such as one of a process that was killed while
    it wrote it.

    JAX detects them by the checksum of the compressed entry, warns, and compiles; but it does not
    replace an entry that exists, so every restart would compile again.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for warning in caught:
        if (match := _TORN.match(str(warning.message))) is None:
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno
            )
            continue
        paths = list(Path(jax.config.jax_compilation_cache_dir or ".").glob(f"{match[1]}-*-cache"))
        torn = [path for path in paths if _is_torn(path)]
        for path in torn:
            path.unlink(missing_ok=True)
        warnings.warn(
            f"{warning.message}: compiled again, {len(torn)} damaged entries deleted", stacklevel=1
        )


def _is_torn(path: Path) -> bool:
    """Whether an entry is incomplete or damaged; False for compressions other than zlib, JAX's
    default.
    """
    try:
        content = path.read_bytes()
        if content[:1] in (b"", b"\x78"):
            zlib.decompress(content)
    except OSError:
        return False
    except zlib.error:
        return True
    return False


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """Compiles without the persistent cache. Entries on disk are not touched."""
    was_enabled = jax.config.jax_enable_compilation_cache
    _update("jax_enable_compilation_cache", False)
    try:
        yield
    finally:
        _update("jax_enable_compilation_cache", was_enabled)


@contextlib.contextmanager
def watch() -> Iterator[Callable[[], bool]]:
    """Yields a function: whether at least one program was compiled since, and all of them came from
    the cache.
    """
    counts: Counter[str] = Counter()

    def listen(event: str, **_) -> None:
        counts[event] += 1

    jax.monitoring.register_event_listener(listen)
    try:
        yield lambda: 0 < counts[_REQUESTS] == counts[_HITS]
    finally:
        jax.monitoring.unregister_event_listener(listen)


def prune(directory: Path, max_bytes: int) -> None:
    """Deletes the least recently used entries until they take at most `max_bytes`; other files are
    kept.
    """
    entries = []
    for path in (path for pattern in _ENTRY_PATTERNS for path in directory.glob(pattern)):
        with contextlib.suppress(FileNotFoundError):  # another process may prune concurrently
            status = path.stat()
            entries.append((max(status.st_atime, status.st_mtime), status.st_size, path))
    num_bytes = sum(size for _, size, _ in entries)
    for _, size, path in sorted(entries):
        if num_bytes <= max_bytes:
            return
        path.unlink(missing_ok=True)
        num_bytes -= size


def _directory(config: RuntimeConfig) -> str | None:
    """The directory of config.compilation_cache_dir, created if necessary, or None."""
    setting = config.compilation_cache_dir
    if setting == "auto":
        # Processes of a GPU run share the work of autotuning. If only some of them found the program in a cache of
        # their own, the others would wait for them.
        return _default_directory() if config.num_processes <= 1 else None
    if not setting:
        return None
    path = local_path(setting).absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = reason_of(error)
        raise UserError(
            f"invalid value {setting!r} for config.runtime.compilation_cache_dir: {reason}"
        ) from None
    return str(path)


def _default_directory() -> str | None:
    """The default directory, created and pruned; None if that fails, as in a read-only home
    directory.
    """
    path = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "jaxlc" / "xla"
    try:
        path = local_path(path)
        path.mkdir(parents=True, exist_ok=True)
        prune(path, MAX_BYTES)
    except (OSError, UserError) as error:
        print(f"compiled programs are not cached: {path}: {reason_of(error)}", flush=True)
        return None
    return str(path)


def _set_directories(directory: str | None, *, for_step_only: str | None) -> None:
    _Directories.step = for_step_only
    if jax.config.jax_compilation_cache_dir != directory:
        _update("jax_compilation_cache_dir", directory)
        _Directories.jax = directory


def _update(option: str, value: bool | str | None) -> None:
    """Sets an option of JAX's cache, and makes JAX decide again whether and where the cache is."""
    jax.config.update(option, value)
    compilation_cache.reset_cache()


def _is_absent(device) -> bool:
    try:
        return device not in jax.devices(device.platform)
    except RuntimeError:  # JAX has no devices of that platform
        return True
