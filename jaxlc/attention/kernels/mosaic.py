"""tokamax's attention for Hopper and Blackwell (Pallas on Mosaic GPU): any key ranges. By name
only.

No GPU has verified this kernel yet, so `auto` does not select it (docs/support.md). It is an
optional package (github.com/openxla/tokamax): `pip install -e '.[mosaic]'`, Python 3.12 and later.

tokamax's public function selects a kernel by the default device, so it cannot compile for an absent
GPU, and it has no gradient of the lse. Hence this module calls the two kernel functions of each GPU
generation, which are private. They depend on no device as long as their grid is not persistent,
that is, not one program per multiprocessor.

tokamax's forward skips KV blocks outside the ranges of a query block. Its backward does not: with
ranges, it computes every pair of a query and a key that it is given. So the backward here calls it
for pairs of blocks of `PAIR_BLOCK_TOKENS` tokens and skips the pairs that are fully masked.

Rounding: out is float32. tokamax returns dq, dk and dv in the dtype of q, once per call; all sums
over calls, here and over ring steps, are float32.

Mosaic GPU reads the GPU generation once per process (jaxlib 0.12.0.1): a process can compile for
Hopper or for Blackwell, not for both.
"""

import functools
import importlib
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxlc.attention.contract import (
    AttentionProblem,
    AttentionSpec,
    Gradients,
    KeyRanges,
    OutLse,
    QueryResults,
    add_dlse_term,
    explicit_ranges,
    pad_tokens,
)
from jaxlc.core import Unsupported, errors, hardware, scopes

VERSION = "0.0.17"  # the version that was checked; the extra in pyproject.toml pins it
BLOCK_TOKENS = 128  # the block sizes of all kernels divide it
HEAD_DIM_MULTIPLE = 8
# GPU generation, as the major version of the compute capability -> its kernels. The kernels for Ampere have no
# backward. The backward for Blackwell with head dim 256 needs 270,436 bytes of shared memory of 232,448.
MAX_HEAD_DIM = {"9": 256, "10": 192}
_GENERATIONS = {"9": "sm90", "10": "sm100"}
_PACKAGE = "tokamax._src.ops.attention"
_FORWARD_PARAMETERS = {
    "q", "k", "v", "bias", "mask", "k_start", "k_end", "is_causal", "logits_soft_cap", "logits_scale", "out_dtype",
    "normalize_output", "return_residuals", "use_stable_softmax", "rescale_threshold", "config",
}  # fmt: skip
_BACKWARD_PARAMETERS = {
    "q", "k", "v", "residuals", "out", "dout", "bias", "mask", "k_start", "k_end", "logits_scale", "logits_soft_cap",
    "is_causal", "ds_dtype", "config",
}  # fmt: skip


class KernelMask(NamedTuple):
    """Which keys a query attends to: the keys of its range, and with `is_causal` no later ones than
    itself.
    """

    # int32; with end_BT. A fully masked row has start >= end. None: all keys
    start_BT: jax.Array | None
    end_BT: jax.Array | None
    is_causal: bool  # by index: needs as many queries as keys


class Modules(NamedTuple):
    """tokamax's modules of one GPU generation."""

    forward: ModuleType
    backward: ModuleType


def tokamax_forward(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    mask: KernelMask,
    *,
    scale: float,
    generation: str,
) -> OutLse:
    """Returns (out_BTNH, lse_BNT), float32. A fully masked row has out 0, lse -inf.

    Args:
      q_BTNH, k_BSKH, v_BSKH: bfloat16 or float16; T and S are multiples of BLOCK_TOKENS.
      generation: a key of MAX_HEAD_DIM.
    """
    module = modules(generation).forward
    config = module.Config(**_forward_config(generation, q_BTNH.shape[-1], v_BSKH.shape[-1]))

    def one_sequence(q_TNH, k_SKH, v_SKH, start_1T, end_1T):
        return module.flash_attention_kernel(
            q_TNH, k_SKH, v_SKH, None, None, start_1T, end_1T, is_causal=mask.is_causal, logits_soft_cap=None,
            logits_scale=scale, out_dtype=jnp.dtype(jnp.float32), normalize_output=True, return_residuals=True,
            use_stable_softmax=True, rescale_threshold=1.0, config=config,
        )  # fmt: skip

    with jax.named_scope(scopes.MOSAIC_FORWARD), _causal_scope(mask):
        out_BTNH, (max_BNT, total_BNT) = jax.vmap(one_sequence)(
            q_BTNH, k_BSKH, v_BSKH, *_ranges(mask)
        )
    return out_BTNH, max_BNT + jnp.log(total_BNT)


def tokamax_backward(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    mask: KernelMask,
    out_BTNH: jax.Array,
    lse_BNT: jax.Array,
    dout_BTNH: jax.Array,
    *,
    scale: float,
    generation: str,
) -> Gradients:
    """Returns (dq, dk, dv) in q's dtype, without the gradient of the lse. The ranges of `mask` skip no blocks.

    Args:
      out_BTNH: any float dtype; the kernel reads it in out . dout only. out and lse may be over more keys than k.
      lse_BNT: finite.
      dout_BTNH: in q's dtype.
    """
    module = modules(generation).backward
    config = module.Config(**_backward_config(generation, q_BTNH.shape[-1], v_BSKH.shape[-1]))

    def one_sequence(q_TNH, k_SKH, v_SKH, start_1T, end_1T, out_TNH, lse_NT, dout_TNH):
        max_and_total = lse_NT, jnp.ones_like(lse_NT)  # p = exp(scores - max) / total
        return module.flash_attention_vjp_kernel(
            q_TNH, k_SKH, v_SKH, max_and_total, out_TNH, dout_TNH, None, None, start_1T, end_1T, logits_scale=scale,
            logits_soft_cap=None, is_causal=mask.is_causal, ds_dtype=None, config=config,
        )[:3]  # fmt: skip

    # tokamax computes out . dout in the dtype that both promote to.
    with (
        jax.named_scope(scopes.MOSAIC_BACKWARD),
        _causal_scope(mask),
        jax.numpy_dtype_promotion("standard"),
    ):
        return jax.vmap(one_sequence)(
            q_BTNH, k_BSKH, v_BSKH, *_ranges(mask), out_BTNH, lse_BNT, dout_BTNH
        )


@functools.cache
def modules(generation: str) -> Modules:
    """tokamax's modules for a GPU generation.

    Raises:
      UserError: tokamax is not installed.
      NotImplementedError: this version of tokamax has other kernel functions.
    """
    errors.require("tokamax", "attention.kernel=mosaic")
    name = _GENERATIONS[generation]
    parts = [
        (f"pallas_mosaic_gpu_kernel_{name}", "flash_attention_kernel", _FORWARD_PARAMETERS),
        (
            f"pallas_mosaic_gpu_vjp_kernel_{name}",
            "flash_attention_vjp_kernel",
            _BACKWARD_PARAMETERS,
        ),
    ]
    loaded = []
    for module_name, function, expected in parts:
        changed = f"this version of tokamax has changed {function} (supported: tokamax {VERSION})"
        try:
            module = importlib.import_module(f"{_PACKAGE}.{module_name}")
            parameters = set(inspect.signature(getattr(module, function)).parameters)
        except (ImportError, AttributeError) as error:
            raise NotImplementedError(f"{changed}: {error}") from None
        if parameters != expected:
            raise NotImplementedError(
                f"{changed}: other parameters ({', '.join(sorted(parameters ^ expected))})"
            )
        loaded.append(module)
    return Modules(*loaded)


def _causal_scope(mask: KernelMask) -> AbstractContextManager:
    """Marks a causal call for `jaxlc.hlo.kernel_costs`."""
    return jax.named_scope(scopes.MOSAIC_CAUSAL) if mask.is_causal else nullcontext()


def _ranges(mask: KernelMask) -> tuple[jax.Array | None, jax.Array | None]:
    """start and end as [B, 1, T], where 1 stands for the heads."""
    start_BT, end_BT = (None if x is None else x[:, None, :] for x in mask[:2])
    return start_BT, end_BT


def _forward_config(generation: str, head_dim: int, value_dim: int) -> dict[str, Any]:
    """tokamax's default for the head dims, from its estimates of shared memory, without a
    persistent grid.
    """
    if generation == "9":
        has_large_blocks = head_dim + value_dim <= 320
        return dict(
            block_q=64, block_kv=128 if has_large_blocks else 64, num_stages=2, persistent=False
        )
    num_stages = 2 if head_dim + value_dim <= 256 else 1
    return dict(
        block_q=128, block_kv=128, num_stages=num_stages, collective=False, persistent=False
    )


def _backward_config(generation: str, head_dim: int, value_dim: int) -> dict[str, Any]:
    """As `_forward_config`."""
    if generation == "9":
        num_stages = 2 if head_dim + value_dim <= 384 else 1
        return dict(
            block_q_dkv=64, block_kv_dkv=64, block_q_dq=64, block_kv_dq=64, num_stages=num_stages
        )
    block = 128 if max(head_dim, value_dim) <= 128 else 64
    return dict(
        block_q_dkv=block,
        block_kv_dkv=128,
        block_q_dq=128,
        block_kv_dq=block,
        num_stages=2,
        residual_stages=2,
    )


# Queries and keys per call of the backward, if the mask has ranges. Assumed: a larger block computes more masked pairs,
# a smaller one adds up dq more often.
PAIR_BLOCK_TOKENS = 2048
_DTYPES = ("bfloat16", "float16")


def unsupported(problem: AttentionProblem) -> str | None:
    """See `contract.Kernel.unsupported`."""
    if problem.platform != "gpu":
        return f"platform {problem.platform} (supported: gpu)"
    generation = _generation(problem.compute_capability)
    if generation not in MAX_HEAD_DIM:
        return f"compute capability {problem.compute_capability} (supported: 9.0 and 10.x)"
    if problem.dtype not in _DTYPES:
        return f"dtype {problem.dtype} (supported: {', '.join(_DTYPES)})"
    limit = MAX_HEAD_DIM[generation]
    for name, width in (
        ("head dim {}", problem.head_dim),
        ("head dim {} of values", problem.value_dim),
    ):
        if width > limit or width % HEAD_DIM_MULTIPLE:
            supported = f"multiples of {HEAD_DIM_MULTIPLE} up to {limit} on compute capability {generation}.x"
            return f"{name.format(width)} (supported: {supported})"
    return None


def forward(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    ranges: KeyRanges | None,
    spec: AttentionSpec,
) -> OutLse:
    """See `contract.Kernel.forward`.

    Raises:
      UserError: tokamax is not installed.
      Unsupported: the scale is not positive, or the target GPU is unknown.
    """
    num_queries = q_BTNH.shape[1]
    mask = _mask(q_BTNH, k_BSKH, ranges, spec)
    q_BTNH, k_BSKH, v_BSKH, (start_BT, end_BT) = _padded(
        (q_BTNH, k_BSKH, v_BSKH, mask[:2]), BLOCK_TOKENS
    )
    mask = mask._replace(start_BT=start_BT, end_BT=end_BT)
    out_BTNH, lse_BNT = tokamax_forward(
        q_BTNH, k_BSKH, v_BSKH, mask, scale=_scale(spec, q_BTNH), generation=target_generation()
    )
    return out_BTNH[:, :num_queries], lse_BNT[..., :num_queries]


def backward(
    q_BTNH, k_BSKH, v_BSKH, ranges: KeyRanges | None, spec: AttentionSpec, results: QueryResults
):
    """See `contract.Kernel.backward`; raises as `forward`.

    tokamax has no gradient of the lse; `contract.add_dlse_term` adds it, in float32.
    """
    mask = _mask(q_BTNH, k_BSKH, ranges, spec)
    lse_BTN = results.finite_lse_BNT.swapaxes(1, 2)
    call = functools.partial(
        tokamax_backward, scale=_scale(spec, q_BTNH), generation=target_generation()
    )

    def gradients(v_BSKH, out_BTNH, dout_BTNH):
        queries = _Queries(q_BTNH, out_BTNH, lse_BTN, dout_BTNH.astype(q_BTNH.dtype), *mask[:2])
        return _gradients(call, queries, k_BSKH, v_BSKH, mask.is_causal)

    *dqk, dv_BSKH = gradients(v_BSKH, results.out_BTNH, results.dout_BTNH)
    return *add_dlse_term(gradients, v_BSKH, results.dlse_BNT, *dqk), dv_BSKH


def target_generation() -> str:
    """The GPU generation that the current program is for, as the major version of its compute
    capability.

    Inside `shard_map`, JAX knows the devices of the mesh, which may be absent ones
    (`simulate.topology`). Elsewhere it is that of the default device.

    Raises:
      Unsupported: it is not a GPU that JAX or `core.hardware` knows.
    """
    target = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    device_kind = jax.devices()[0].device_kind if target is None else target.device_kind
    local = {
        device.device_kind: getattr(device, "compute_capability", None) for device in jax.devices()
    }
    listed = hardware.find(device_kind)
    capability = local.get(device_kind) or (listed and listed.compute_capability)
    if capability is None:
        raise Unsupported(
            f"unsupported by attention kernel mosaic: device {device_kind} (supported: NVIDIA GPUs)"
        )
    return _generation(capability)


class _Queries(NamedTuple):
    """The operands of the backward that have one row per query; all are [B, T, ...]."""

    q_BTNH: jax.Array
    out_BTNH: jax.Array
    lse_BTN: jax.Array
    dout_BTNH: jax.Array
    start_BT: jax.Array | None
    end_BT: jax.Array | None


def _gradients(
    call: Callable, queries: _Queries, k_BSKH: jax.Array, v_BSKH: jax.Array, is_causal: bool
) -> Gradients:
    """(dq_BTNH, dk_BSKH, dv_BSKH), float32: one call, or one for each pair of blocks that is not
    fully masked.
    """
    num_queries = queries.q_BTNH.shape[1]
    num_keys = k_BSKH.shape[1]
    has_pairs = queries.start_BT is not None and max(num_queries, num_keys) > PAIR_BLOCK_TOKENS
    q_block, kv_block = (
        PAIR_BLOCK_TOKENS
        if has_pairs and num_tokens > PAIR_BLOCK_TOKENS
        else -(-num_tokens // BLOCK_TOKENS) * BLOCK_TOKENS
        for num_tokens in (num_queries, num_keys)
    )
    queries = _padded(queries, q_block)
    k_BSKH, v_BSKH = _padded((k_BSKH, v_BSKH), kv_block)

    def pair_gradients(queries: _Queries, k_BSKH, v_BSKH):
        mask = KernelMask(queries.start_BT, queries.end_BT, is_causal)
        lse_BNT = queries.lse_BTN.swapaxes(1, 2)
        results = call(
            queries.q_BTNH, k_BSKH, v_BSKH, mask, queries.out_BTNH, lse_BNT, queries.dout_BTNH
        )
        return tuple(x.astype(jnp.float32) for x in results)

    if has_pairs:
        dq_BTNH, dk_BSKH, dv_BSKH = _sum_over_pairs(
            pair_gradients, queries, k_BSKH, v_BSKH, q_block, kv_block
        )
    else:
        dq_BTNH, dk_BSKH, dv_BSKH = pair_gradients(queries, k_BSKH, v_BSKH)
    return dq_BTNH[:, :num_queries], dk_BSKH[:, :num_keys], dv_BSKH[:, :num_keys]


@jax.named_scope(scopes.MOSAIC_PAIRS)
def _sum_over_pairs(
    pair_gradients: Callable,
    queries: _Queries,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    q_block: int,
    kv_block: int,
) -> Gradients:
    """The sums of (dq, dk, dv) over pairs of a query block and a KV block; block sizes divide T and
    S.
    """
    num_q_blocks = queries.q_BTNH.shape[1] // q_block
    num_kv_blocks = k_BSKH.shape[1] // kv_block

    def kv_block_step(dq_BTNH, j):
        first_key = j * kv_block
        k_block, v_block = (
            lax.dynamic_slice_in_dim(x, first_key, kv_block, axis=1) for x in (k_BSKH, v_BSKH)
        )
        in_block = KeyRanges(queries.start_BT, queries.end_BT).within(first_key, kv_block)
        start_BT, end_BT = _unordered_if_empty(in_block, kv_block)
        in_block = queries._replace(start_BT=start_BT, end_BT=end_BT)

        def q_block_step(carry, i):
            block_queries = _Queries(
                *(lax.dynamic_slice_in_dim(x, i * q_block, q_block, axis=1) for x in in_block)
            )

            def add(dq_BTNH, dk_block, dv_block):
                dq, dk, dv = pair_gradients(block_queries, k_block, v_block)
                dq += lax.dynamic_slice_in_dim(dq_BTNH, i * q_block, q_block, axis=1)
                return (
                    lax.dynamic_update_slice_in_dim(dq_BTNH, dq, i * q_block, axis=1),
                    dk_block + dk,
                    dv_block + dv,
                )

            has_keys = (block_queries.start_BT < block_queries.end_BT).any()
            return lax.cond(has_keys, add, lambda *carry: carry, *carry), None

        zeros = (jnp.zeros(x.shape, jnp.float32) for x in (k_block, v_block))
        (dq_BTNH, *dkv), _ = lax.scan(q_block_step, (dq_BTNH, *zeros), jnp.arange(num_q_blocks))
        return dq_BTNH, dkv

    dq_BTNH = jnp.zeros(queries.q_BTNH.shape, jnp.float32)
    dq_BTNH, (dk, dv) = lax.scan(kv_block_step, dq_BTNH, jnp.arange(num_kv_blocks))
    return dq_BTNH, *(
        jnp.moveaxis(x, 0, 1).reshape(like.shape) for x, like in ((dk, k_BSKH), (dv, v_BSKH))
    )


def _mask(
    q_BTNH: jax.Array, k_BSKH: jax.Array, ranges: KeyRanges | None, spec: AttentionSpec
) -> KernelMask:
    """The mask of a call with padding of T and S: no query attends to padding keys."""
    num_queries = q_BTNH.shape[1]
    num_keys = k_BSKH.shape[1]
    if ranges is None:
        if spec.causal and spec.window is None and num_queries == num_keys:
            return KernelMask(None, None, is_causal=True)  # keys that pad S come after all queries
        if not spec.causal and num_keys % BLOCK_TOKENS == 0:
            return KernelMask(None, None, is_causal=False)
    ranges = explicit_ranges(ranges, q_BTNH, num_keys, spec)
    return KernelMask(*_unordered_if_empty(ranges, num_keys), is_causal=False)


def _unordered_if_empty(ranges: KeyRanges, num_keys: int) -> KeyRanges:
    """Empty ranges as (num_keys, 0). tokamax takes the minimum of all starts and the maximum of all
    ends of a block of queries as the range of the block; these values leave both as they are."""
    is_empty_BT = ranges.start_BT >= ranges.end_BT
    return KeyRanges(
        jnp.where(is_empty_BT, num_keys, ranges.start_BT), jnp.where(is_empty_BT, 0, ranges.end_BT)
    )


def _padded(arrays: Any, multiple: int) -> Any:
    return jax.tree.map(lambda x: pad_tokens(x, multiple), arrays)


def _scale(spec: AttentionSpec, q_BTNH: jax.Array) -> float:
    scale = spec.scale_for(q_BTNH.shape[-1])
    if scale <= 0:
        raise Unsupported(
            f"unsupported by attention kernel mosaic: scale {spec.scale} (supported: above 0)"
        )
    return scale


def _generation(compute_capability: str | None) -> str:
    return (compute_capability or "").partition(".")[0]
