"""The kernels of experts without a GPU: XLA's `ragged_dot` stands for Mosaic's, and JAX interprets Triton's."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxlc import _jax_internals
from jaxlc.config.kinds.experts import block_rows, num_blocks
from jaxlc.core import scopes
from jaxlc.core.errors import Unsupported, UserError
from jaxlc.hlo import analyze
from jaxlc.hlo.kernel_costs import kernel_cost
from jaxlc.models import expert_products
from jaxlc.models.expert_products import PRODUCTS, ExpertWeights, check_product, expert_outputs
from jaxlc.models.kinds.dense import gated
from jaxlc.plan.program import kernels
from jaxlc.simulate.topology import WITHOUT_GPU, topology
from tests.tolerances import FLOAT32_PARITY, max_relative_error

T, D, F, E = 1100, 64, 128, 2  # blocks of 64 rows with mosaic, otherwise of 128
_OVER_ROWS = jax.lax.RaggedDotDimensionNumbers(((((0,), (0,)), ((), ()))), [0], [])


def _ragged_dot(x_SK, w_EKN, sizes_E, *, transpose_rhs, **tiles):
    """NaN in rows after the last group, which the kernel does not write."""
    out_SN = jax.lax.ragged_dot(x_SK, w_EKN.swapaxes(1, 2) if transpose_rhs else w_EKN, sizes_E)
    return jnp.where((jnp.arange(len(x_SK)) < sizes_E.sum())[:, None], out_SN, jnp.nan)


def _ragged_gradient(x_SK, dout_SN, sizes_E, **tiles):
    return jax.lax.ragged_dot_general(x_SK, dout_SN, sizes_E, _OVER_ROWS)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(_jax_internals, "mosaic_ragged_dot", _ragged_dot)
    monkeypatch.setattr(_jax_internals, "mosaic_ragged_gradient", _ragged_gradient)
    return monkeypatch


@pytest.mark.parametrize("kernel", ["mosaic", "pallas"])
@pytest.mark.parametrize("routing", ["random", "an unused expert", "all to one"])
def test_outputs_and_gradients_equal_blocks(stand_in, routing, kernel):
    rng = np.random.default_rng(0)
    chosen_Tk = {"random": rng.integers(0, E, (T, 1)), "an unused expert": np.ones((T, 1))}.get(
        routing, 0 * T
    )
    chosen_Tk = jnp.broadcast_to(jnp.array(chosen_Tk, jnp.int32), (T, 1))
    shapes = (T, D), (T, D), (T, 1), (E, D, F), (E, D, F), (E, F, D), (E, F), (E, F), (E, D)
    cotangent, x_TD, weights_Tk, *experts = (
        jnp.array(rng.standard_normal(shape), jnp.float32) for shape in shapes
    )

    @functools.partial(jax.jit, static_argnums=0)
    def results(kernel, *operands):
        def outputs(x_TD, weights_Tk, experts):
            activate = functools.partial(gated, "silu")
            return expert_outputs(x_TD, chosen_Tk, weights_Tk, experts, activate, kernel=kernel)

        out, vjp = jax.vjp(outputs, *operands)
        return out, vjp(cotangent)

    assert block_rows(T, E, "mosaic") < block_rows(T, E)
    stand_in.setattr(expert_products, "_DEPTH", 32)
    operands = x_TD, weights_Tk, ExpertWeights(*experts)
    got, expected = (jax.tree.leaves(results(kernel, *operands)) for kernel in (kernel, "blocks"))
    for a, b in zip(got, expected, strict=True):
        assert max_relative_error(a, b) <= FLOAT32_PARITY


def test_blocks_of_kernels_have_less_padding():
    """Qwen3-30B-A3B, 32,768 tokens on a rank."""
    rows, experts = 32_768 * 8, 128
    padded = [
        num_blocks(rows, experts, kernel) * block_rows(rows, experts, kernel)
        for kernel in ("blocks", "mosaic", "pallas")
    ]
    assert [round(x / rows - 1, 3) for x in padded] == [0.248, 0.031, 0.062]
    assert [block_rows(8, experts, kernel) for kernel in ("mosaic", "pallas")] == [1, 16]


def _check(kernel: str = "mosaic") -> str:
    sizes = dict(num_experts=8, model_dim=64, ffn_dim=64)
    return check_product(kernel, jax.devices()[0], **sizes, dtype=jnp.float32)


@pytest.mark.parametrize("kernel", ["mosaic", "pallas"])
def test_check_before_training_passes(stand_in, kernel):
    assert re.fullmatch(
        rf"kernel     {kernel} for experts: relative error .*e[+-]0\d on cpu, measured now",
        _check(kernel),
    )


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("dot", lambda x, w, sizes, **kwargs: _ragged_dot(x, w, jnp.roll(sizes, 1), **kwargs)),
        ("dot", lambda x, w, sizes, **kwargs: _ragged_dot(x, w, sizes.at[-1].add(-1), **kwargs)),
        ("dot", lambda x, w, sizes, transpose_rhs, **kwargs: _ragged_dot(
            x, w[::-1] if transpose_rhs else w, sizes, transpose_rhs=transpose_rhs)),
        ("gradient", lambda *args, **kwargs: _ragged_gradient(*args).at[0].set(jnp.nan)),
        ("gradient", lambda *args, **kwargs: _ragged_gradient(*args).at[5].set(_ragged_gradient(*args)[4])),
    ],
    ids=["other experts", "a row is not written", "dx", "NaN for an empty expert", "a gradient for an empty expert"],
)  # fmt: skip
def test_check_before_training_ends_run_if_a_kernel_is_wrong(stand_in, name, wrong):
    stand_in.setattr(_jax_internals, f"mosaic_ragged_{name}", wrong)
    with pytest.raises(
        UserError,
        match=r"are wrong on .*relative error .* set --config.runtime.expert_kernel=blocks",
    ):
        _check()


@pytest.mark.jax_version
@pytest.mark.skipif(
    not hasattr(plgpu, "force_gpu_interpret_mode"),
    reason="JAX 0.12 interprets these kernels on a CPU",
)
def test_check_before_training_passes_with_interpreted_kernels(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_jax_internals._JaxOnHopper, "core_count", 4)  # threads of the interpreter
    with plgpu.force_gpu_interpret_mode():
        check_product("mosaic", jax.devices()[0], num_experts=5, model_dim=128, ffn_dim=64)


def test_check_before_training_ends_run_if_a_kernel_fails():
    """There is no such kernel for a CPU."""
    with pytest.raises(UserError, match=r"fail on .*: set --config.runtime.expert_kernel=blocks"):
        check_product("mosaic", jax.devices()[0], num_experts=2, model_dim=64, ffn_dim=64)


def test_devices_other_than_hopper_raise():
    expert_products.check_devices(topology("h200:1x1").devices)
    for devices, problem in (
        (jax.devices(), "cpu is no GPU"),
        (topology("b200:1x1").devices, "B200 has 10.0"),
    ):
        with pytest.raises(
            Unsupported, match=rf"needs GPUs of compute capability 9.0, and .*{problem}"
        ):
            expert_products.check_devices(devices)


@pytest.mark.parametrize("kernel", ["mosaic", "pallas"])
def test_operands_of_2_to_the_31_elements_raise(kernel):
    x = jax.ShapeDtypeStruct((2**15, 64, 1024), jnp.bfloat16)
    w, expert_n = (
        jax.ShapeDtypeStruct((E, 1024, 64), jnp.bfloat16),
        jax.ShapeDtypeStruct((2**15,), jnp.int32),
    )
    with pytest.raises(Unsupported, match="2,097,152 rows of 1,024 elements"):
        jax.eval_shape(PRODUCTS[kernel], x, w, expert_n)


@pytest.mark.jax_version
@pytest.mark.gpu_compiler
@pytest.mark.usefixtures("ptxas")
@pytest.mark.parametrize("kernel", ["mosaic", "pallas"])
def test_kernels_compile_for_hopper_and_their_flops_are_those_of_the_rows(kernel):
    """A product, and the gradients of x and w."""
    num_experts, blocks, rows, depth, width = 8, 12, 64, 128, 192
    mesh = Mesh(topology("h100:1x1").devices, ("x",))
    gpu = NamedSharding(mesh, PartitionSpec())
    shapes = (blocks, rows, depth), (num_experts, depth, width), (blocks, rows, width)
    x, w, dout = (jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=gpu) for shape in shapes)
    expert_n = jax.ShapeDtypeStruct((blocks,), jnp.int32, sharding=gpu)

    @jax.named_scope(scopes.EXPERTS)
    def product(x, w, expert_n):
        return PRODUCTS[kernel](x, w, expert_n)

    def results(x, w, dout, expert_n):
        out, vjp = jax.vjp(lambda x, w: product(x, w, expert_n), x, w)
        return out, vjp(dout)

    # Triton's lowering takes the GPU from the mesh.
    run = jax.shard_map(
        results, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False
    )
    lowered = jax.jit(run).lower(x, w, dout, expert_n)
    program = analyze(lowered.compile(dict(WITHOUT_GPU)).as_text())
    assert kernels(program) == {f"{kernel} experts backward": 2, f"{kernel} experts forward": 1}
    costs = [kernel_cost(program, computation, x) for computation in program for x in computation]
    products = [product for cost in costs if cost for product in cost.products]
    assert [product.flops for product in products] == 3 * [2 * blocks * rows * depth * width]
    assert all(product.expert_kernel == kernel and product.dtype == "bf16" for product in products)
