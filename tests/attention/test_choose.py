"""Kernel selection and the reasons that it reports."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxlc.attention import choose, make
from jaxlc.attention.contract import AttentionProblem
from jaxlc.attention.kernels import cudnn, fa3, pallas
from jaxlc.attention.kernels.choose import KERNELS, choose_kernel
from jaxlc.attention.strategies.sharded_attention import attention_spec
from jaxlc.config import AttentionConfig, MeshConfig, defaults, load
from jaxlc.core import hardware
from jaxlc.simulate.roofline import Roofline
from jaxlc.simulate.topology import WITHOUT_GPU, make_mesh, topology
from jaxlc.step.step import build_step

H100 = dict(platform="gpu", compute_capability="9.0")
A100 = dict(platform="gpu", compute_capability="8.0")
V100 = dict(platform="gpu", compute_capability="7.0")
MI300 = dict(platform="gpu", compute_capability="gfx942")
B200 = dict(platform="gpu", compute_capability="10.0")
RTX5090 = dict(platform="gpu", compute_capability="12.0")
CPU = dict(platform="cpu", compute_capability=None)


def _problem(device=H100, **changes) -> AttentionProblem:
    base = dict(dtype="bfloat16", head_dim=128, value_dim=128, window=None, implicit_positions=True)
    return AttentionProblem(**{**base, **device, **changes})


PACKED = dict(implicit_positions=False, document_ranges=True)
UNSUPPORTED_BY_CUDNN = {
    "cpu": (_problem(CPU), "platform cpu (supported: gpu)"),
    "V100": (_problem(V100), "compute capability 7.0 (supported: 8.0 and later)"),
    "AMD": (_problem(MI300), "compute capability gfx942 (supported: 8.0 and later)"),
    "float32": (_problem(dtype="float32"), "dtype float32 (supported: bfloat16, float16)"),
    "head dim 256 on Blackwell": (
        _problem(B200, head_dim=256, value_dim=256),
        "head dim 256 on compute capability 10.0 (supported: multiples of 8 up to 128)",
    ),
    "head dim 100": (
        _problem(head_dim=100, value_dim=100),
        "head dim 100 on compute capability 9.0 (supported: multiples of 8 up to 256)",
    ),
    "cuDNN 9.10.1": (
        _problem(cudnn_version=(9, 10, 1)),
        "cuDNN 9.10.1, whose backward has known bugs (supported: 9.10.2 and later)",
    ),
    "value dim": (
        _problem(value_dim=64, **PACKED),
        "head dim 64 of values with key ranges (supported: head dim of queries, 128)",
    ),
    "value dim on A100": (
        _problem(A100, value_dim=64),
        "head dim 64 of values (supported: head dim of queries, 128; others from compute capability 9.0 and cuDNN"
        " 9.10.2 on)",
    ),
    "value dim 60": (
        _problem(value_dim=60),
        "head dim 60 of values (supported: multiples of 8 up to 128)",
    ),
    "all_gather": (
        _problem(implicit_positions=False),
        "key ranges of all_gather, sliding windows or decoding (supported: packed documents without a window)",
    ),
    "packed on A100": (
        _problem(A100, **PACKED),
        "packed documents on compute capability 8.0 (supported: 9.0 and later)",
    ),
    "packed with 2^31 elements": (
        _problem(num_elements=2**31, **PACKED),
        "packed documents with 2147483648 elements of queries or keys per device"
        " (supported: fewer than 2^31, since offsets are int32)",
    ),
    "packed on Hopper with cuDNN 9.17": (
        _problem(cudnn_version=(9, 17, 9), **PACKED),
        "packed documents with cuDNN 9.17.9 on compute capability 9.0 (supported: 9.18.0 and later; before, gaps"
        " between documents may give NaN or wrong gradients: TransformerEngine#2186)",
    ),
    "packed on RTX 5090 with cuDNN 9.18.0": (
        _problem(RTX5090, cudnn_version=(9, 18, 0), **PACKED),
        "packed documents with cuDNN 9.18.0 on compute capability 12.0 (supported: 9.18.1 and later; before, gradients"
        " may be wrong: TransformerEngine#3333)",
    ),
    "without cuDNN": (
        _problem(cudnn_version=()),
        "cuDNN is not installed (supported: 9.8 and later)",
    ),
}
unsupported_by_cudnn = pytest.mark.parametrize(
    ("problem", "limit"), UNSUPPORTED_BY_CUDNN.values(), ids=UNSUPPORTED_BY_CUDNN.keys()
)


@pytest.mark.parametrize(
    "problem",
    [
        _problem(),
        _problem(A100),
        _problem(dtype="float16"),
        _problem(head_dim=64, value_dim=64),
        _problem(head_dim=256, value_dim=256, cudnn_version=(9, 18, 0), **PACKED),
        _problem(head_dim=192, value_dim=128, cudnn_version=(9, 10, 2)),
        _problem(window=100),
        _problem(num_elements=2**31 - 1, cudnn_version=(9, 18, 0), **PACKED),
        _problem(cudnn_version=(9, 8, 0)),
        _problem(B200, cudnn_version=(9, 8, 0), **PACKED),
        _problem(B200, **PACKED),
        _problem(RTX5090, cudnn_version=(9, 18, 1), **PACKED),
    ],
    ids=[
        "H100", "A100", "float16", "head dim 64", "head dim 256", "value dim", "window",
        "packed on H100 with cuDNN 9.18", "H100 with cuDNN 9.8", "packed on B200 with cuDNN 9.8", "packed on B200",
        "packed on RTX 5090 with cuDNN 9.18.1",
    ],
)  # fmt: skip
def test_auto_with_supported_problem_is_cudnn(problem):
    assert choose_kernel("auto", problem) == ("cudnn", "fastest supported kernel on gpu")


@pytest.mark.parametrize("name", ["auto", "cudnn"])
def test_packed_documents_on_absent_hopper_assume_cudnn_version(name):
    """A plan has no cuDNN to ask, so it says what it assumes."""
    assert choose_kernel(name, _problem(**PACKED)).reason.endswith(
        "; assumes cuDNN 9.18.0 or later"
    )
    assert choose_kernel(name, _problem(RTX5090, **PACKED)).reason.endswith(
        "; assumes cuDNN 9.18.1 or later"
    )


@pytest.mark.gpu_compiler
def test_choose_reads_cudnn_version_of_attached_devices_only(monkeypatch):
    mesh = make_mesh(topology("h100:1x1"), MeshConfig())
    packed = functools.partial(
        choose, AttentionConfig(), mesh, head_dim=128, dtype=jnp.bfloat16, packed=True
    )
    monkeypatch.setattr(cudnn, "cudnn_version", lambda: (9, 17, 0))
    assert packed().name == "cudnn" and "assumes cuDNN 9.18.0" in packed().reason
    monkeypatch.setattr(jax, "devices", lambda: list(mesh.devices.flat))
    assert packed().name == "pallas" and "cuDNN 9.17.0 on compute capability 9.0" in packed().reason


@unsupported_by_cudnn
def test_auto_without_cudnn_is_supported_and_has_reason(problem, limit):
    selection = choose_kernel("auto", problem)
    assert selection.name != "cudnn" and selection.kernel.unsupported(problem) is None
    assert selection.reason.startswith(f"fastest supported kernel on {problem.platform}")
    if problem.platform == "gpu":
        assert f"; cudnn unsupported: {limit}" in selection.reason


def test_auto_on_cpu_is_blockwise():
    assert choose_kernel("auto", _problem(CPU)) == ("blockwise", "fastest supported kernel on cpu")


@unsupported_by_cudnn
def test_named_kernel_if_unsupported_raises(problem, limit):
    with pytest.raises(NotImplementedError) as error:
        choose_kernel("cudnn", problem)
    assert str(error.value) == f"unsupported by attention kernel cudnn: {limit}; use kernel auto"
    assert choose_kernel("auto", problem).name != "cudnn"


@pytest.mark.parametrize("head_dim", [128, 256])
@pytest.mark.parametrize("device", [A100, H100, dict(platform="gpu", compute_capability="10.0")])
def test_auto_never_selects_mosaic(device, head_dim):
    problem = _problem(device, implicit_positions=False, head_dim=head_dim, value_dim=head_dim)
    assert choose_kernel("auto", problem).name != "mosaic"


@pytest.mark.gpu_compiler
@pytest.mark.parametrize(
    ("gpu", "head_dim", "name"),
    [
        *(pytest.param(gpu, 128, "pallas", marks=pytest.mark.full) for gpu in ("a100", "rtx3090")),
        pytest.param("t4", 128, "blockwise", marks=pytest.mark.full),
        ("rtx4090", 128, "pallas"),
        ("b200", 256, "pallas"),
    ],
)
def test_packed_documents_compile_without_faster_kernels(gpu, head_dim, name):
    """GPUs before Hopper, whose blocks may have less shared memory, and head dim 256 on Blackwell."""
    mesh, config = make_mesh(topology(f"{gpu}:1x1"), MeshConfig()), AttentionConfig()
    dtype = jnp.float16 if gpu == "t4" else jnp.bfloat16
    assert choose(config, mesh, head_dim=head_dim, dtype=dtype, packed=True).name == name
    one_document = choose(config, mesh, head_dim=head_dim, dtype=dtype, packed=False).name
    assert one_document == (name if gpu in ("t4", "b200") else "cudnn")
    attend, replicated = make(config, mesh), NamedSharding(mesh, PartitionSpec())
    q = jax.ShapeDtypeStruct((1, 512, 2, head_dim), dtype, sharding=replicated)
    segments = jax.ShapeDtypeStruct((1, 512), jnp.int32, sharding=replicated)

    def loss(q, segments):
        return attend(q, q, q, attend.prepare(None, segments))[0].astype(jnp.float32).sum()

    program = (
        jax.jit(jax.grad(loss))
        .lower(q, segments)
        .compile(compiler_options=dict(WITHOUT_GPU))
        .as_text()
    )
    assert ("flash_dq" in program) == (name == "pallas")


@pytest.mark.gpu_compiler
@pytest.mark.parametrize("gpu, is_small", [("rtx3090", True), ("l4", True), ("h100", False)])
def test_only_pallas_has_smaller_blocks_on_gpus_with_little_shared_memory(gpu, is_small):
    mesh, config = make_mesh(topology(f"{gpu}:1x1"), MeshConfig()), AttentionConfig()
    spec = attention_spec(config, mesh, True, None, None)
    assert spec.small_shared_memory == is_small
    assert (spec.query_block_tokens, spec.key_block_tokens) == (512, 512)  # of blockwise, too
    for head_dim, tokens in ((128, 64 if is_small else 128), (256, 32 if is_small else 64)):
        q = jax.ShapeDtypeStruct((1, 4096, 1, head_dim), jnp.bfloat16)
        mask = pallas._params("flash_forward", q, q, q, spec).mask
        assert (mask.query_block, mask.kv_block) == (tokens, tokens)


@pytest.mark.parametrize("name", KERNELS)
def test_named_kernel_is_selected_over_faster_one(monkeypatch, name):
    monkeypatch.setattr(fa3, "unavailable", lambda: None)
    assert choose_kernel(name, _problem()).name == name


@pytest.fixture
def with_fa3(monkeypatch):
    """fa3 is installed, with a JAX that it supports."""
    monkeypatch.setattr(fa3, "FIRST_JAX", (0, 10, 1))
    monkeypatch.setattr(fa3, "unavailable", lambda: None)


UNSUPPORTED_BY_FA3 = {
    "A100": (_problem(A100), "compute capability 8.0 (supported: 9.0)"),
    "deterministic": (
        _problem(deterministic=True),
        "config.runtime.deterministic=True (supported: False, since the order of its sums varies)",
    ),
    "head dim 96": (
        _problem(head_dim=96, value_dim=96),
        "head dim 96 (supported: 64, 128, 192, 256; padded, it is not faster than cudnn)",
    ),
    "value dim": (
        _problem(head_dim=192),
        "head dim 128 of values (supported: head dim of queries, 192)",
    ),
    "all_gather": (
        _problem(implicit_positions=False),
        "key ranges of all_gather, decoding, or a window over packed documents with a ring or shared prefixes"
        " (supported: packed documents, windows of one rank's tokens or of one document)",
    ),
}


@pytest.mark.parametrize("problem, limit", UNSUPPORTED_BY_FA3.values(), ids=UNSUPPORTED_BY_FA3)
def test_fa3_is_refused_with_the_limit_and_auto_takes_another(with_fa3, problem, limit):
    with pytest.raises(NotImplementedError) as error:
        choose_kernel("fa3", problem)
    assert str(error.value) == f"unsupported by attention kernel fa3: {limit}; use kernel auto"
    selection = choose_kernel("auto", problem)
    assert selection.name != "fa3"
    is_named = problem.compute_capability == "9.0"  # elsewhere it cannot be installed
    assert (f"fa3 unsupported: {limit}" in selection.reason) == is_named


def test_padded_head_dim_is_not_faster_than_cudnn():
    """96 as 128, by the rates of the time model; within 2% it counts as equal."""
    h100 = hardware.find("h100")
    cudnn_seconds, fa3_seconds = (
        sum(
            Roofline().attention_seconds(
                h100, name, is_backward=is_backward, flops=flops * width, head_dim=width
            )
            for is_backward, flops in ((False, 2.0), (True, 5.0))
        )
        for name, width in (("cudnn", 96), ("fa3", 128))
    )
    assert fa3_seconds > 0.98 * cudnn_seconds


@pytest.mark.parametrize(
    "problem",
    [
        _problem(),
        _problem(head_dim=256, value_dim=256),
        _problem(window=64),
        _problem(**PACKED),
        _problem(num_elements=2**31, **PACKED),
        _problem(window=64, implicit_positions=False, window_ranges=True),
    ],
    ids=["causal", "head dim 256", "window", "packed", "2^31 elements", "window over a halo"],
)
def test_auto_on_hopper_is_fa3_where_it_is_installed(with_fa3, problem):
    selection = choose_kernel("auto", problem)
    assert selection.name == "fa3" and "assumes dew_flash_attn 0.3.6" in selection.reason


@pytest.mark.gpu_compiler
@pytest.mark.parametrize(
    ("settings", "packed", "name"),
    [
        (dict(strategy="ring"), False, "fa3"),
        (dict(strategy="ring"), True, "pallas"),
        (dict(strategy="ulysses"), True, "fa3"),
        (dict(strategy="hybrid", ulysses_degree=4), True, "fa3"),
        (dict(strategy="hybrid", ulysses_degree=2), True, "pallas"),
    ],
    ids=str,
)
def test_window_over_packed_documents_is_fa3_on_ranks_with_the_same_tokens(
    with_fa3, settings, packed, name
):
    mesh = make_mesh(topology("h100:1x4"), MeshConfig(context=4))
    call = dict(head_dim=128, dtype=jnp.bfloat16, window=64, packed=packed)
    assert choose(AttentionConfig(**settings), mesh, **call).name == name


@pytest.mark.gpu_compiler
@pytest.mark.parametrize("deterministic, name", [(False, "fa3"), (True, "cudnn")])
def test_deterministic_run_takes_no_fa3(with_fa3, deterministic, name):
    config = defaults()
    config.model.update(num_heads=2, num_kv_heads=2, head_dim=64)
    config.runtime.deterministic = deterministic
    mesh = make_mesh(topology("h100:1x1"), MeshConfig())
    assert {x.name for x in build_step(load(config), mesh).kernels.values()} == {name}


def test_fa3_without_its_package_is_refused_with_the_install_line(monkeypatch):
    unavailable = fa3.unavailable.__wrapped__
    monkeypatch.setattr(fa3, "FIRST_JAX", (0, 10, 1))
    monkeypatch.setattr(fa3, "is_installed", lambda package: False)
    monkeypatch.setattr(fa3, "unavailable", unavailable)
    install = r"not installed: pip install -e '.\[fa3-cuda12\]' .*, or fa3-cuda13 with CUDA 13"
    with pytest.raises(NotImplementedError, match=install):
        choose_kernel("fa3", _problem())
    assert choose_kernel("auto", _problem()).name == "cudnn"
    monkeypatch.setattr(fa3, "FIRST_JAX", (9, 0))
    with pytest.raises(NotImplementedError, match=r"JAX 0.* \(supported: 9.0 and later\)"):
        choose_kernel("fa3", _problem())


def test_unknown_kernel_raises():
    with pytest.raises(
        ValueError, match="unknown attention kernel 'fastest'; known: auto, .*blockwise, cudnn"
    ):
        choose_kernel("fastest", _problem())


@pytest.mark.gpu_compiler
@pytest.mark.parametrize("kernel", ["auto", "cudnn"])
def test_latent_layers_have_cudnn_with_narrower_values_or_padded_ones(kernel):
    config = defaults()
    config.model.update(num_heads=2, num_kv_heads=2, head_dim=192, rope_fraction=1 / 3)
    config.model.update(layer_kinds=("latent",), latent=dict(rank=512, value_dim=128))
    config.attention.kernel = kernel
    for is_packed, version in ((False, "9.10.2"), (True, "9.18.0")):
        config.attention.document_mask = is_packed
        mesh = make_mesh(topology("h100:1x1"), MeshConfig())
        selection = build_step(load(config), mesh).kernels["latent"]
        assert selection.name == "cudnn" and f"assumes cuDNN {version}" in selection.reason
