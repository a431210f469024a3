"""The sizes of JAX's memory pools on a GPU, set before JAX starts, and the errors of pools that are
too small.
"""

import importlib.util
import mmap
import re
from pathlib import Path

import jax
import pytest

from jaxlc.config import RuntimeConfig
from jaxlc.core.errors import UserError
from jaxlc.runtime import memory
from jaxlc.runtime.memory import Machine, explained, out_of_memory, prepare

GIB = 2**30
LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"


def prepared(
    needed_bytes: int = 0, *, environment: dict | None = None, **runtime
) -> tuple[dict[str, str], str]:
    environment = dict(environment or {})
    return environment, "\n".join(prepare(RuntimeConfig(**runtime), environment, needed_bytes))


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    monkeypatch.setattr(
        memory, "find_machine", lambda: Machine(("H100",) * 8, 80 * GIB, 1000 * GIB)
    )


def test_prepare_sets_both_pools():
    environment, text = prepared(90 * GIB)
    assert environment == {"XLA_CLIENT_MEM_FRACTION": "0.9", LIMIT: "96"}  # 5% and 1 GiB more
    assert "GPU memory pool: 0.9 of each GPU's memory" in text
    assert "pinned host memory pool: up to 96 GiB per GPU" in text and "warning" not in text
    assert prepared(0, memory_fraction=0.5)[0] == {"XLA_CLIENT_MEM_FRACTION": "0.5"}
    assert prepared(90 * GIB, pinned_host_gib=120.5)[0][LIMIT] == "121"


def test_prepare_larger_than_host_memory_warns():
    """XLA makes a pool for each GPU, and one for the staging buffers of each process."""
    assert (
        "8 GPUs and 1 processes (staging buffers) of this machine need 920 GiB in total"
        in prepared(106 * GIB)[1]
    )
    assert (
        "need 936 GiB in total, and it has 1000 GiB" in prepare(RuntimeConfig(), {}, 95 * GIB, 8)[1]
    )
    assert "warning" not in prepared(95 * GIB)[1]


@pytest.mark.parametrize("name", ["XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"])
def test_prepare_environment_takes_precedence(name):
    given = {name: "0.8", LIMIT: "200"}
    environment, text = prepared(90 * GIB, environment=given)
    assert environment == given
    assert text.splitlines() == [
        f"GPU memory pool: 0.8 of each GPU's memory ({name})",
        f"pinned host memory pool: 200 GiB per GPU ({LIMIT})",
    ]
    assert prepared(environment=dict(XLA_PYTHON_CLIENT_ALLOCATOR="platform"))[1] == ""


@pytest.mark.parametrize(
    "message, stats, environment, words",
    [
        (
            "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes.",
            dict(bytes_limit=70 * GIB, bytes_in_use=60 * GIB),
            dict(XLA_CLIENT_MEM_FRACTION="0.9"),
            "16.00 GiB more do not fit into JAX's pool of 70.00 GiB (0.9 of each GPU's memory), of which 60.00 GiB"
            " are in use; raise --config.runtime.memory_fraction",
        ),
        (
            "RESOURCE_EXHAUSTED: Out of host memory trying to allocate 282.00GiB. Please set the environment variable"
            f" {LIMIT} to allocate larger host memory than the default 64 GB.",
            {},
            {},
            "282.00 GiB more do not fit into the pool of 64 GiB per GPU; use --config.runtime.pinned_host_gib=346",
        ),
        (
            "INTERNAL: Failed call to cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY: out of memory",
            {},
            dict(XLA_CLIENT_MEM_FRACTION="0.9"),
            "outside of JAX's pool, which takes 0.9 of each GPU's memory; lower --config.runtime.memory_fraction, now",
        ),
        (
            "INTERNAL: Failed call to cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY: out of memory",
            {},
            dict(XLA_CLIENT_MEM_FRACTION="0.95"),
            "of each GPU's memory; lower XLA_CLIENT_MEM_FRACTION, now 0.95, for NCCL",
        ),
        (
            "RESOURCE_EXHAUSTED: Out of memory allocating 17179869184 bytes.",
            None,
            {},
            "16.00 GiB more do not fit into this machine's memory",
        ),
    ],
)
def test_out_of_memory_names_pool_need_and_setting(message, stats, environment, words):
    assert words in out_of_memory(message, RuntimeConfig(), stats, environment)


@pytest.mark.parametrize(
    ("message", "environment"),
    [
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 2.00GiB.", {}),
        (
            "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 2.00GiB.",
            dict(XLA_CLIENT_MEM_FRACTION="0.5"),
        ),
        (f"RESOURCE_EXHAUSTED: Out of host memory trying to allocate 282.00GiB. {LIMIT}", {}),
    ],
)
def test_advice_to_enlarge_a_pool_enlarges_it_until_none_is_left(message, environment):
    """Applies what the error of the run before advises, as a user does."""
    before, _ = prepared(100 * GIB, environment=environment)
    problem = out_of_memory(message, RuntimeConfig(), {}, before)
    if "pinned" in problem:
        setting, size_gib = re.search(r"--config\.runtime\.(\w+)=(\d+)", problem).groups()
        after, _ = prepared(100 * GIB, environment=environment, **{setting: float(size_gib)})
        assert int(after[LIMIT]) == int(before[LIMIT]) + 282
        return
    setting, largest = re.search(
        r"raise (?:--config\.runtime\.)?(\w+), to ([\d.]+) at most", problem
    ).groups()
    config = {} if environment else {setting: float(largest)}
    after, _ = prepared(
        100 * GIB,
        environment=dict(environment, **{setting: largest}) if environment else {},
        **config,
    )
    assert after["XLA_CLIENT_MEM_FRACTION"] == largest
    problem = out_of_memory(message, RuntimeConfig(**config), {}, after)
    assert "raise" not in problem and "`jaxlc plan --advise`" in problem


@pytest.mark.jax_version
@pytest.mark.gpu_compiler
def test_variables_and_message_are_in_the_gpu_plugin():
    """XLA documents none of them."""
    plugin = next(path for cuda in (12, 13) if (path := _plugin_path(cuda)))
    with plugin.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        for text in (
            LIMIT,
            "XLA_PJRT_GPU_HOST_MEMORY_PREALLOCATE",
            "to allocate larger host memory than the default 64 GB",
        ):
            assert content.find(text.encode()) > 0, text


def _plugin_path(cuda: int) -> Path | None:
    spec = importlib.util.find_spec(f"jax_plugins.xla_cuda{cuda}")
    return Path(spec.origin).with_name("xla_cuda_plugin.so") if spec and spec.origin else None


def test_explained_leaves_other_errors():
    with pytest.raises(jax.errors.JaxRuntimeError, match="INVALID"), explained(RuntimeConfig()):
        raise jax.errors.JaxRuntimeError("INVALID_ARGUMENT: shapes")
    with (
        pytest.raises(UserError, match="2.00 GiB more do not fit into this machine's memory"),
        explained(RuntimeConfig()),
    ):
        raise jax.errors.JaxRuntimeError(
            "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 2.00GiB."
        )
    assert memory.DEFAULT_HOST_GIB == 64
