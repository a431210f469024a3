"""Products of experts in blocks against a loop over experts, in float64."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec, SingleDeviceSharding

from jaxlc.config import MeshConfig
from jaxlc.config.kinds.experts import block_rows
from jaxlc.core.axes import CONTEXT
from jaxlc.models import expert_products as expert_blocks
from jaxlc.models.expert_products import (
    ExpertWeights,
    LowRank,
    assign,
    expert_outputs,
    fp8_block_product,
)
from jaxlc.models.kinds import experts
from jaxlc.models.kinds.dense import gated
from jaxlc.models.kinds.experts import Experts
from jaxlc.models.matmuls import E4M3, E5M2, to_fp8
from jaxlc.sharding.mesh import make_mesh
from jaxlc.simulate.topology import WITHOUT_GPU, topology

T, D, F, E, R = 48, 6, 5, 8, 3
SCALE = 1.5  # of adapters


def _chosen(routing: str) -> np.ndarray:
    """[T, k]; one expert of each choice, and no expert twice in a token."""
    rng = np.random.default_rng(0)
    if routing == "all to one":
        return np.full((T, 1), 3)
    if routing == "one token each":
        return np.arange(E)[:, None]
    usable = E - 1 if routing == "an unused expert" else E
    return np.stack([rng.permutation(usable)[:3] for _ in range(T)])


def _loop(x_TD, weights_Tk, experts: ExpertWeights, chosen_Tk):
    out = jnp.zeros_like(x_TD)
    for e in range(E):
        weights = zip(experts[:3], experts[6:])  # with their adapters
        gate, up, down = (
            w[e] if adapter is None else w[e] + SCALE * adapter[0][e] @ adapter[1][e]
            for w, adapter in weights
        )
        gate_bias, up_bias, down_bias = (0 if x is None else x[e] for x in experts[3:6])
        hidden = gated("silu", x_TD @ gate + gate_bias, x_TD @ up + up_bias)
        out += jnp.where(chosen_Tk == e, weights_Tk, 0).sum(1)[:, None] * (
            hidden @ down + down_bias
        )
    return out


def _operands(num_tokens: int, num_chosen: int, has_bias: bool, has_adapters: bool = False):
    rng = np.random.default_rng(1)
    shapes = [(E, D, F), (E, D, F), (E, F, D)] + ([(E, F), (E, F), (E, D)] if has_bias else [])
    experts = ExpertWeights(*(jnp.array(rng.standard_normal(shape)) for shape in shapes))
    if has_adapters:
        sizes = ((D, F), (D, F), (F, D))
        a_b = [
            [jnp.array(rng.standard_normal((E, *pair))) for pair in ((i, R), (R, o))]
            for i, o in sizes
        ]
        experts = experts._replace(
            **dict(
                zip(
                    ("gate_adapter", "up_adapter", "down_adapter"), (LowRank(*pair) for pair in a_b)
                )
            )
        )
    x_TD, weights_Tk = (
        rng.standard_normal((num_tokens, D)),
        rng.uniform(0.1, 1, (num_tokens, num_chosen)),
    )
    return jnp.array(x_TD), jnp.array(weights_Tk), experts


def _blocks(x_TD, weights_Tk, experts: ExpertWeights, chosen_Tk):
    activation = functools.partial(gated, "silu")
    return expert_outputs(
        x_TD, chosen_Tk, weights_Tk, experts, activation=activation, adapter_scale=SCALE
    )


@functools.partial(jax.jit, static_argnums=0)
def _outputs_and_gradients(run, operands, chosen_Tk, cotangent_TD):
    out_TD, vjp = jax.vjp(lambda *operands: run(*operands, chosen_Tk), *operands)
    return out_TD, vjp(cotangent_TD)


@pytest.mark.parametrize("has", [(), ("biases", "adapters")], ids=" and ".join)
@pytest.mark.parametrize("routing", ["random", "an unused expert", "all to one", "one token each"])
def test_expert_outputs_and_gradients_equal_loop_over_experts(
    routing, has, monkeypatch: pytest.MonkeyPatch
):
    # The sums are in float32, also in float64: with it they would hide errors below 1e-7.
    monkeypatch.setattr(jnp, "float32", jnp.float64)
    with jax.enable_x64(True):
        chosen_Tk = jnp.array(_chosen(routing), jnp.int32)
        operands = _operands(*chosen_Tk.shape, "biases" in has, "adapters" in has)
        cotangent = jnp.array(np.random.default_rng(2).standard_normal(operands[0].shape))
        results, expected = (
            jax.tree.leaves(_outputs_and_gradients(run, operands, chosen_Tk, cotangent))
            for run in (_blocks, _loop)
        )
        for got, want in zip(results, expected, strict=True):
            assert got.dtype == want.dtype
            np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)


def test_one_program_serves_every_routing():
    x_TD, weights_Tk, experts = jax.tree.map(lambda x: x.astype(np.float32), _operands(T, 3, False))
    run = jax.jit(functools.partial(expert_outputs, activation=functools.partial(gated, "silu")))
    rng = np.random.default_rng(0)
    few = np.stack([rng.permutation(3) for _ in range(T)])  # 5 of 8 experts without a token
    for chosen_Tk in (_chosen("random"), few, np.tile(np.arange(3), (T, 1))):
        out = run(x_TD, jnp.array(chosen_Tk, jnp.int32), weights_Tk, experts)
        np.testing.assert_allclose(out, _loop(x_TD, weights_Tk, experts, chosen_Tk), atol=1e-4)
    assert run._cache_size() == 1


@pytest.mark.parametrize("router", ["sigmoid", "softmax"])
def test_bias_is_added_to_scores_for_the_choice_only(router, monkeypatch):
    """Biases change the choice, and more than logits of this size would."""
    logits_TE, bias_E = np.random.default_rng(0).standard_normal((2, T, E)) * [[[1]], [[0.2]]]
    bias_E = bias_E[0]
    if router == "sigmoid":
        scores_TE = 1 / (1 + np.exp(-logits_TE))
    else:
        scores_TE = np.exp(logits_TE) / np.exp(logits_TE).sum(-1, keepdims=True)
    chosen_Tk = np.argsort(-(scores_TE + bias_E), axis=-1)[:, :R]
    assert (np.sort(chosen_Tk) != np.sort(np.argsort(-scores_TE, -1)[:, :R])).any(-1).sum() > T // 4
    assert (np.sort(chosen_Tk) != np.sort(np.argsort(-logits_TE - bias_E)[:, :R])).any()
    weights_Tk = np.take_along_axis(scores_TE, chosen_Tk, -1)
    monkeypatch.setattr(experts, "_logits", lambda *_, **__: jnp.asarray(logits_TE)[None])
    module = SimpleNamespace(router=None, router_bias=None, router_kind=router, renormalizes=True)
    vars(module).update(choice_bias=jnp.asarray(bias_E), groups=(1, 1), num_chosen=R, scale=2.0)
    module.choose = functools.partial(Experts.choose, module)
    got = Experts.route(module, jnp.zeros((1, T, D)), None, shard=None)
    np.testing.assert_array_equal(got.chosen_BTk[0], chosen_Tk)
    expected_Tk = 2 * weights_Tk / weights_Tk.sum(-1, keepdims=True)
    np.testing.assert_allclose(got.weights_BTk[0], expected_Tk, rtol=1e-6)


@pytest.mark.parametrize(
    ("num_tokens", "num_chosen", "num_experts"), [(1, 8, 128), (64, 4, 8), (4096, 8, 128)]
)
def test_assign_gives_each_assignment_a_row_of_its_expert(num_tokens, num_chosen, num_experts):
    rng = np.random.default_rng(0)
    chosen_Tk = np.stack([rng.permutation(num_experts)[:num_chosen] for _ in range(num_tokens)])
    got = jax.tree.map(np.asarray, assign(jnp.array(chosen_Tk, jnp.int32), num_experts))
    assert len(np.unique(got.slot_Tk)) == chosen_Tk.size
    assert (got.token_S[got.slot_Tk] == np.arange(num_tokens)[:, None]).all()
    assert (got.expert_n[got.slot_Tk // got.block_rows] == chosen_Tk).all()
    # the others are padding
    assert (got.token_S == num_tokens).sum() == len(got.token_S) - chosen_Tk.size


def test_block_rows_follow_the_load_and_decoding_has_no_padding():
    assert [block_rows(tokens * 8, 128) for tokens in (1, 64, 2048, 32_768, 10**6)] == [
        1,
        1,
        32,
        512,
        512,
    ]
    assert len(assign(jnp.zeros((1, 8), jnp.int32), 128).token_S) == 8


@pytest.mark.jax_version
@pytest.mark.gpu_compiler
def test_gradient_of_many_blocks_compiles_for_a_gpu():
    """XLA did not finish the scatter of these blocks as whole matrices in a minute."""
    gpu = SingleDeviceSharding(topology("h100:1x1").devices[0])
    blocks = jax.ShapeDtypeStruct((639, 2048, 768), jnp.float32, sharding=gpu)
    experts = jax.ShapeDtypeStruct((639,), jnp.int32, sharding=gpu)
    sums = jax.jit(lambda x, expert: expert_blocks._sum_of_blocks(x, expert, 128))
    assert (
        sums.lower(blocks, experts).compile(dict(WITHOUT_GPU)).memory_analysis().temp_size_in_bytes
        < 2**20
    )


def _rounded(x, dtype):
    x_8, scale, _ = to_fp8(x, dtype)
    return x_8.astype(jnp.float32) * scale


def test_fp8_product_of_blocks_on_two_ranks_equals_product_of_rounded_operands():
    """All ranks have one scale: values of the second are so small that they underflow."""
    rng, expert_n = np.random.default_rng(0), jnp.array([0, 2, 2, 3])
    sizes_x, sizes_dout = (np.array([1, 1, small, small])[:, None, None] for small in (1e-5, 1e-9))
    x_nmD = jnp.array(sizes_x * rng.standard_normal((4, 3, D)), jnp.float32)
    dout_nmF = jnp.array(sizes_dout * rng.standard_normal((4, 3, F)), jnp.float32)
    w_EDF = jnp.array(rng.standard_normal((E, D, F)), jnp.float32)
    specs = PartitionSpec(CONTEXT), PartitionSpec(), PartitionSpec(CONTEXT)
    product = jax.shard_map(
        fp8_block_product,
        mesh=make_mesh(MeshConfig(context=2), jax.devices()[:2]),
        in_specs=specs,
        out_specs=PartitionSpec(CONTEXT),
        check_vma=False,
    )

    @jax.jit
    def outputs_and_gradients(x_nmD, w_EDF, dout_nmF):
        out_nmF, vjp = jax.vjp(lambda x, w: product(x, w, expert_n), x_nmD, w_EDF)
        return out_nmF, *vjp(dout_nmF)

    results = outputs_and_gradients(x_nmD, w_EDF, dout_nmF)
    x, w, dout = _rounded(x_nmD, E4M3), _rounded(w_EDF, E4M3), _rounded(dout_nmF, E5M2)
    dw = jax.ops.segment_sum(jnp.einsum("nmD,nmF->nDF", x, dout), expert_n, E)
    expected = (
        jnp.einsum("nmD,nDF->nmF", x, w[expert_n]),
        jnp.einsum("nmF,nDF->nmD", dout, w[expert_n]),
        dw,
    )
    for got, value, sizes in zip(results, expected, (sizes_x, sizes_dout, 1), strict=True):
        np.testing.assert_allclose(got / sizes, value / sizes, rtol=1e-5, atol=1e-5)
    # it is rounded
    assert np.abs(results[0] - jnp.einsum("nmD,nDF->nmF", x_nmD, w_EDF[expert_n])).max() > 1e-2
