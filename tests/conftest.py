"""Environment that must be set before jax is imported, and the CPU time of a test run.

Tests run on eight simulated CPU devices with a persistent compilation cache.
"""

import importlib.metadata
import importlib.util
import os
import resource
from pathlib import Path

import pytest

NUM_DEVICES = 8
# In the user's cache directory, so that clones and worktrees share it. JAX keys entries by its version and the program.
CACHE_DIR = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxlc" / "xla"

os.environ["JAX_PLATFORMS"] = "cpu"
# Tests spend most of their time in compilation, not in the programs: the optimizer and, where it can be switched off
# (JAX 0.10), the slower of XLA's two code generators for CPU fusions are off. That makes compilation 3 times as fast.
_fast_compilation = [
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_parallel_codegen_split_count=1",
]
if importlib.metadata.version("jax").startswith("0.10."):
    _fast_compilation.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join([f"--xla_force_host_platform_device_count={NUM_DEVICES}", *_fast_compilation])
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(CACHE_DIR)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests with the marker `gpu_compiler` if the compiler is not installed. No test needs a GPU."""
    if importlib.util.find_spec("jax_plugins") is None:
        for item in items:
            if item.get_closest_marker("gpu_compiler"):
                item.add_marker(pytest.mark.skip(reason="needs the GPU compiler: pip install -e '.[plan]'"))


@pytest.fixture(autouse=True)
def _no_cache_for_absent_gpus(request: pytest.FixtureRequest):
    """Tests with the marker `gpu_compiler` compile for absent GPUs; JAX's cache cannot read such programs back."""
    if request.node.get_closest_marker("gpu_compiler") is None:
        yield
        return
    from jaxlc.runtime import compilation_cache

    with compilation_cache.disabled():
        yield


_worker_cpu_seconds: list[float] = []


def _cpu_seconds() -> float:
    """User and system time of this process and of its finished children."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):  # a worker of pytest-xdist
        session.config.workeroutput["cpu_seconds"] = _cpu_seconds()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error) -> None:
    """Called in the leading process when a worker of pytest-xdist ends; a crashed worker has no output."""
    _worker_cpu_seconds.append(getattr(node, "workeroutput", {}).get("cpu_seconds", 0.0))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """CPU seconds do not depend on what else the machine does; they are the measure of the suite's cost."""
    cpu_seconds = sum(_worker_cpu_seconds) or _cpu_seconds()
    terminalreporter.write_line(f"CPU seconds of all tests: {cpu_seconds:.0f}")
