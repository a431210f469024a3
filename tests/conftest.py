"""Environment that must be set before jax is imported, and the CPU time of a test run.

Tests run on eight simulated CPU devices with a persistent compilation cache.
"""

import gc
import importlib.util
import os
import resource

import pytest

from tests.environment import CACHE, FAST_COMPILATION, FAST_START, WITHOUT_ASSEMBLER

NUM_DEVICES = 8

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={NUM_DEVICES} {FAST_COMPILATION}"
os.environ.update(CACHE | FAST_START | WITHOUT_ASSEMBLER)

# Tracing creates many objects that stay alive: with Python's thresholds, a fifth of the CPU time is
# garbage collection. Garbage is collected before each test.
gc.disable()


# Heavy tests and the modules with the longest others run first, so that all workers end at about the same time.
FIRST = {
    "test_notebooks.py",
    "test_first_contact.py",
    "test_configs.py",
    "test_stages.py",
    "test_resume.py",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sorts the tests, and skips those with the marker `gpu_compiler` if the compiler is not
    installed.
    """
    items.sort(
        key=lambda item: (
            item.get_closest_marker("heavy") is None,
            item.path.name not in FIRST,
        )
    )
    if importlib.util.find_spec("jax_plugins") is None:
        for item in items:
            if item.get_closest_marker("gpu_compiler"):
                item.add_marker(
                    pytest.mark.skip(reason="needs the GPU compiler: pip install -e '.[plan]'")
                )


def pytest_runtest_setup() -> None:
    """Later garbage collections, automatic and explicit ones, do not search the objects of earlier
    tests again.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _no_cache_for_absent_gpus(request: pytest.FixtureRequest):
    """Tests with the marker `gpu_compiler` compile for absent GPUs; JAX's cache cannot read such
    programs back.
    """
    if request.node.get_closest_marker("gpu_compiler") is None:
        yield
        return
    from jaxlc.runtime import compilation_cache

    with compilation_cache.disabled():
        yield


@pytest.fixture
def ptxas():
    """GPU kernels are assembled: NVIDIA's assembler rejects what a GPU cannot run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXLC_ASSEMBLE", "1")
        yield


@pytest.fixture(scope="module")
def shared_programs():
    """Runs of the module compile each program once."""
    from tests.train import runs

    with pytest.MonkeyPatch.context() as patch:
        runs.share_programs(patch)
        yield


@pytest.fixture(scope="module")
def without_plots():
    """Runs of the module write no plots."""
    from tests.train import runs

    with pytest.MonkeyPatch.context() as patch:
        runs.without_plots(patch)
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
    """Called in the leading process when a worker of pytest-xdist ends; a crashed worker has no
    output.
    """
    _worker_cpu_seconds.append(getattr(node, "workeroutput", {}).get("cpu_seconds", 0.0))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """CPU seconds do not depend on what else the machine does; they are the measure of the suite's
    cost.
    """
    cpu_seconds = sum(_worker_cpu_seconds) or _cpu_seconds()
    terminalreporter.write_line(f"CPU seconds of all tests: {cpu_seconds:.0f}")
