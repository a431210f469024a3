"""The kernel `mosaic` without a GPU.

A stand-in replaces the two functions of tokamax. It computes what the operands of a call mean to
tokamax's kernels: (max, total) as the softmax, out in out . dout only, ranges and causality by
index. So the results match the reference only if the operands are correct.

Not tested: the results that tokamax computes on a GPU (scripts/gpu_first_contact.py). Where tokamax
is installed, both passes are compiled for an H100 and a B200.
"""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxlc.attention.contract import AttentionProblem, AttentionSpec, KeyRanges, QueryResults
from jaxlc.attention.kernels import mosaic, reference
from jaxlc.config import MeshConfig
from jaxlc.core import errors
from jaxlc.core.errors import UserError
from jaxlc.simulate.topology import make_mesh, topology
from tests.attention.cases import assert_rows_match, inputs, oracle, sharded, split_mesh
from tests.attention.compile_mosaic import HEAD_DIMS
from tests.tolerances import FLOAT32_PARITY

ROOT = Path(__file__).parents[2]
NUM_TOKENS = 300  # 3 blocks of 128, the last one padded


def _visible_TS(start_1T, end_1T, is_causal: bool, num_queries: int, num_keys: int):
    keys_S, mask_TS = jnp.arange(num_keys), jnp.ones((num_queries, num_keys), bool)
    if start_1T is not None:
        mask_TS = (start_1T[0][:, None] <= keys_S) & (keys_S < end_1T[0][:, None])
    if is_causal:
        assert num_queries == num_keys
        mask_TS &= keys_S <= jnp.arange(num_queries)[:, None]
    return mask_TS


def _heads(x_SKH, num_heads: int):
    return jnp.repeat(x_SKH, num_heads // x_SKH.shape[1], axis=1)


def _check_shapes(q, k, v, start, end, bias, mask):
    assert q.ndim == k.ndim == v.ndim == 3 and q.shape[0] % 128 == k.shape[0] % 128 == 0
    assert bias is None and mask is None
    assert (start is None) == (end is None) and all(
        x is None or x.shape == (1, q.shape[0]) for x in (start, end)
    )


def _forward(
    q, k, v, bias, mask, k_start, k_end, *, is_causal, logits_soft_cap, logits_scale, out_dtype, normalize_output,
    return_residuals, use_stable_softmax, rescale_threshold, config,
):  # fmt: skip
    _check_shapes(q, k, v, k_start, k_end, bias, mask)
    assert (
        logits_soft_cap is None
        and normalize_output
        and return_residuals
        and not config["persistent"]
    )
    k, v = _heads(k, q.shape[1]), _heads(v, q.shape[1])
    mask_TS = _visible_TS(k_start, k_end, is_causal, len(q), len(k))
    scores = jnp.where(mask_TS, logits_scale * jnp.einsum("tnh,snh->nts", q, k), -jnp.inf)
    maximum = scores.max(-1)
    p = jnp.exp(scores - jnp.where(jnp.isneginf(maximum), 0.0, maximum)[..., None])
    total = p.sum(-1)
    out = jnp.einsum("nts,snh->tnh", p / (total[..., None] + jnp.finfo(jnp.float32).tiny), v)
    return out.astype(out_dtype), (maximum, total)


def _backward(
    q, k, v, residuals, out, dout, bias, mask, k_start, k_end, *, logits_scale, logits_soft_cap, is_causal, ds_dtype,
    config,
):  # fmt: skip
    _check_shapes(q, k, v, k_start, k_end, bias, mask)
    assert (
        logits_soft_cap is None
        and ds_dtype is None
        and dout.dtype == q.dtype
        and out.dtype == jnp.float32
    )
    num_kv_heads, (maximum, total) = k.shape[1], residuals
    all_k, all_v = _heads(k, q.shape[1]), _heads(v, q.shape[1])
    mask_TS = _visible_TS(k_start, k_end, is_causal, len(q), len(k))
    scores = logits_scale * jnp.einsum("tnh,snh->nts", q, all_k)
    p = jnp.where(mask_TS, jnp.exp(scores - maximum[..., None]) / total[..., None], 0.0)
    delta = jnp.einsum("tnh,tnh->nt", out, dout)
    ds = p * (jnp.einsum("tnh,snh->nts", dout, all_v) - delta[..., None])
    dq, dk = (
        logits_scale * x
        for x in (jnp.einsum("nts,snh->tnh", ds, all_k), jnp.einsum("nts,tnh->snh", ds, q))
    )
    dk, dv = (
        x.reshape(len(k), num_kv_heads, -1, x.shape[-1]).sum(2)
        for x in (dk, jnp.einsum("nts,tnh->snh", p, dout))
    )
    return *(x.astype(q.dtype) for x in (dq, dk, dv)), None


@pytest.fixture
def fake_tokamax(monkeypatch: pytest.MonkeyPatch):
    """The stand-in, for an H100, with blocks of 128 tokens per call of the backward."""
    module = SimpleNamespace(
        Config=dict, flash_attention_kernel=_forward, flash_attention_vjp_kernel=_backward
    )
    monkeypatch.setattr(mosaic, "modules", lambda generation: mosaic.Modules(module, module))
    monkeypatch.setattr(mosaic, "target_generation", lambda: "9")
    monkeypatch.setattr(mosaic, "unsupported", lambda problem: None)
    monkeypatch.setattr(mosaic, "PAIR_BLOCK_TOKENS", 128)
    jax.clear_caches()  # programs with another stand-in
    yield module
    jax.clear_caches()


def _random_ranges(num_queries: int, num_keys: int, seed: int = 0) -> KeyRanges:
    """Two sequences: ranges of any length, of one key, of all keys, and empty ones."""
    random = np.random.default_rng(seed)
    bounds = np.sort(random.integers(0, num_keys + 1, (2, 2, num_queries)), axis=0)
    start, end = bounds[0], bounds[1]
    end[:, ::5] = np.minimum(start[:, ::5] + 1, num_keys)
    start[:, 1::9], end[:, 1::9] = 0, num_keys
    is_empty = (start >= end) | (random.random(start.shape) < 0.1)
    return KeyRanges(*(jnp.asarray(np.where(is_empty, 0, x), jnp.int32) for x in (start, end)))


CASES = {
    "causal": (NUM_TOKENS, NUM_TOKENS, None, AttentionSpec()),
    "full": (NUM_TOKENS, 131, None, AttentionSpec(causal=False, scale=0.3)),
    "window": (NUM_TOKENS, NUM_TOKENS, None, AttentionSpec(window=70)),
    "fewer_queries": (131, NUM_TOKENS, None, AttentionSpec()),
    "ranges": (NUM_TOKENS, 131, _random_ranges(NUM_TOKENS, 131), AttentionSpec()),
    "ranges_over_more_keys": (131, NUM_TOKENS, _random_ranges(131, NUM_TOKENS), AttentionSpec()),
}


@pytest.mark.parametrize(
    ("num_queries", "num_keys", "ranges", "spec"), CASES.values(), ids=CASES.keys()
)
def test_mosaic_operands_give_reference_results(fake_tokamax, num_queries, num_keys, ranges, spec):
    """Grouped queries and a gradient of the lse, which tokamax does not have."""
    q, _, _, dout = inputs(batch=2, num_tokens=num_queries, value_dim=24)
    _, k, v, _ = inputs(batch=2, num_tokens=num_keys, value_dim=24, seed=1)
    dlse = jax.random.normal(jax.random.key(9), (2, q.shape[2], num_queries))
    out, lse = jax.jit(reference.forward, static_argnums=4)(q, k, v, ranges, spec)
    gradients = jax.jit(reference.backward, static_argnums=4)(
        q, k, v, ranges, spec, QueryResults(out, lse, dout, dlse)
    )
    actual_out, actual_lse = jax.jit(mosaic.forward, static_argnums=4)(q, k, v, ranges, spec)
    actual = jax.jit(mosaic.backward, static_argnums=4)(
        q, k, v, ranges, spec, QueryResults(out, lse, dout, dlse)
    )
    assert all(x.dtype == jnp.float32 for x in (actual_out, actual_lse, *actual))
    np.testing.assert_array_equal(np.isneginf(actual_lse), np.isneginf(lse))
    finite_lse = (jnp.maximum(x, -1e3) for x in (actual_lse, lse))
    assert_rows_match((actual_out, next(finite_lse)), (out, next(finite_lse)), FLOAT32_PARITY)
    assert_rows_match(actual, gradients, FLOAT32_PARITY)


def test_mosaic_without_dlse_has_one_backward_per_pair(fake_tokamax, monkeypatch):
    """A constant dlse of zero removes the second call; fully masked pairs of blocks are not
    computed at all.
    """
    num_calls = []

    def counted(*operands, **settings):
        jax.debug.callback(lambda: num_calls.append(1))
        return _backward(*operands, **settings)

    fake_tokamax.flash_attention_vjp_kernel = counted
    q, k, v, dout = inputs(batch=1, num_tokens=384)
    end_BT = jnp.arange(1, 385, dtype=jnp.int32)[None]
    # blocks 1 and 2 attend to themselves, 1 to 0 as well
    ranges = KeyRanges(128 * ((end_BT - 1) // 256), end_BT)

    def gradients(q, k, v):
        out, lse = mosaic.forward(q, k, v, ranges, AttentionSpec())
        return mosaic.backward(
            q, k, v, ranges, AttentionSpec(), QueryResults(out, lse, dout, jnp.zeros_like(lse))
        )

    jax.block_until_ready(jax.jit(gradients)(q, k, v))
    jax.effects_barrier()
    assert len(num_calls) == 5  # (0, 0), (1, 0), (1, 1), (2, 1), (2, 2) of 9 pairs


def test_ring_with_mosaic_matches_reference(fake_tokamax):
    """Packed documents over 4 ranks: global out and lse in the backward, ranges against the block
    of each ring step.
    """
    heads = dict(num_heads=4, num_kv_heads=2)
    actual = sharded(split_mesh(context=4), packed=True, kernel="mosaic", heads=heads)
    assert_rows_match(actual, oracle(packed=True, **heads), FLOAT32_PARITY)


H100 = dict(
    platform="gpu",
    compute_capability="9.0",
    dtype="bfloat16",
    head_dim=128,
    value_dim=128,
    window=7,
)
UNSUPPORTED = [
    (dict(platform="cpu"), "platform cpu (supported: gpu)"),
    (dict(compute_capability="8.0"), "compute capability 8.0 (supported: 9.0 and 10.x)"),
    (dict(compute_capability=None), "compute capability None (supported: 9.0 and 10.x)"),
    (dict(compute_capability="12.0"), "compute capability 12.0 (supported: 9.0 and 10.x)"),
    (dict(dtype="float32"), "dtype float32 (supported: bfloat16, float16)"),
    (
        dict(head_dim=264),
        "head dim 264 (supported: multiples of 8 up to 256 on compute capability 9.x)",
    ),
    (
        dict(compute_capability="10.0", value_dim=256),
        "head dim 256 of values (supported: multiples of 8 up to 192 on compute capability 10.x)",
    ),
    (
        dict(value_dim=100),
        "head dim 100 of values (supported: multiples of 8 up to 256 on compute capability 9.x)",
    ),
    (dict(), None),
    (dict(compute_capability="10.3", head_dim=192), None),
    (dict(head_dim=256, value_dim=256), None),
]


@pytest.mark.parametrize(("change", "limit"), UNSUPPORTED)
def test_unsupported_has_value_and_limit(change, limit):
    assert (
        mosaic.unsupported(AttentionProblem(**H100 | dict(implicit_positions=False) | change))
        == limit
    )


def test_mosaic_without_positive_scale_raises():
    q, k, v, _ = inputs(batch=1)
    with pytest.raises(NotImplementedError, match="scale 0.0 .supported: above 0"):
        mosaic.forward(q, k, v, None, AttentionSpec(scale=0.0))


def test_mosaic_on_cpu_raises():
    q, k, v, _ = inputs(batch=1)
    with pytest.raises(NotImplementedError, match="device cpu .supported: NVIDIA GPUs"):
        mosaic.forward(q, k, v, None, AttentionSpec())


def test_mosaic_without_tokamax_names_extra(monkeypatch):
    monkeypatch.setattr(errors, "is_installed", lambda package: False)
    with pytest.raises(
        UserError, match=r"attention.kernel=mosaic needs the package tokamax.*\[mosaic\]"
    ):
        mosaic.modules.__wrapped__("9")


def test_changed_tokamax_raises_with_parameters(monkeypatch):
    def changed(q, k, v, added): ...

    monkeypatch.setattr(errors, "is_installed", lambda package: True)
    fake = SimpleNamespace(
        import_module=lambda name: SimpleNamespace(flash_attention_kernel=changed)
    )
    monkeypatch.setattr(mosaic, "importlib", fake)
    with pytest.raises(
        NotImplementedError, match=r"changed flash_attention_kernel .supported: .*added, bias"
    ):
        mosaic.modules.__wrapped__("9")


@pytest.mark.gpu_compiler
@pytest.mark.jax_version
@pytest.mark.parametrize(("gpu", "generation"), [("h200", "9"), ("gb200", "10")])
def test_target_inside_shard_map_is_that_of_the_mesh(gpu, generation):
    targets = []

    def on_device(x):
        targets.append(mosaic.target_generation())
        return x

    mesh = make_mesh(topology(f"{gpu}:1x1"), MeshConfig())
    specs = PartitionSpec()
    jax.eval_shape(
        jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=specs), jnp.zeros(1)
    )
    assert targets == [generation]


needs_tokamax = pytest.mark.skipif(
    not errors.is_installed("tokamax"), reason="needs pip install -e '.[mosaic]'"
)


@needs_tokamax
@pytest.mark.gpu_compiler
@pytest.mark.usefixtures("ptxas")
@pytest.mark.parametrize("gpu", HEAD_DIMS)
def test_mosaic_compiles_for_absent_gpus(gpu):
    """In a process of its own: jaxlib compiles Mosaic kernels for one GPU generation per process."""
    command = [sys.executable, "-m", "tests.attention.compile_mosaic", gpu]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert done.stdout.count("compiled") == len(HEAD_DIMS[gpu]) + 1, done.stdout
