"""The contract of attention kernels: arguments, results, masks.

    forward:  (q_BTNH, k_BSKH, v_BSKH, ranges, spec) -> (out_BTNH, lse_BNT)
    backward: (q, k, v, ranges, spec, QueryResults(out, lse, dout, dlse)) -> (dq, dk, dv)

`ranges` is the mask: one contiguous range of keys per query. Causal masks, packed documents, sliding windows, and the
blocks of these that strategies compute, all have this form. Kernels get neither positions nor segment ids.

A kernel may have these functions, too:

    prepare            computes what the kernel needs of the ranges of a call, once per training step instead of in
                       every layer; forward and backward then take its result as `ranges`
    forward_calls, backward_calls    return `CallResults` instead
    forward_in_layer(q_BTNH, k_BLSKH, v_BLSKH, layer, ranges, spec)    forward over the keys of one layer of a KV cache,
                       without a copy of the layer. The ranges are [B, P]: T/P consecutive queries, a power of 2 from
                       16, share one

`lse` is the natural logarithm of the sum of exponentials of a query's scaled scores, float32. With it, results over
two disjoint sets of keys merge exactly (`merge`), so the same two functions compose over KV blocks, ring steps and
tiles. The backward takes out and lse over *all* keys on all devices, even where k and v are one block. Its dk and dv
are the gradients of that block, its dq is the contribution of that block to dq.

Results are in q's dtype or in float32, whichever the kernel writes. Callers sum and merge them in float32.

A query without visible keys (a fully masked row) has out 0, lse -inf and gradient 0.

Attention sinks
---------------
Each query head may have a logit that joins the denominator of its softmax and has no value (gpt-oss).

    out' = out exp(lse - lse')        lse' = log(e^lse + e^sink)
    dsink = -sum over batch and tokens of exp(sink - lse') (dout' . out' - dlse')

out and lse are the results over all keys: a sink joins once, after the last merge over blocks, ring steps and ranks.
The probabilities with the sink are exp(score - lse'), which a kernel's backward computes from the lse that it is given.
So the backward calls the same kernels with out' and lse', and gives exact dq, dk and dv. Automatic differentiation of
the product above would be exact, too, but its gradient of the lse costs a second backward call of some kernels.
A fully masked row has out' 0, lse' equal to the sink, and gradient 0.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

OutLse = tuple[jax.Array, jax.Array]  # (out, lse)
KeysValues = tuple[jax.Array, jax.Array]  # (k, v), or their gradients
Gradients = tuple[jax.Array, jax.Array, jax.Array]  # (dq, dk, dv)


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """The static parameters of an attention call; hashable, so that it can be a static argument of
    `jit`.
    """

    # With ranges, a kernel need not read causal and window; see KeyRanges.
    causal: bool = True  # a query attends to keys of its segment at its own and earlier positions
    # a query attends to itself and the window - 1 tokens before it; only with causal
    window: int | None = None
    scale: float | None = None  # multiplies q . k; None: 1/sqrt(H)
    # The calls of ring steps have few documents: those that ranks share at most
    # (sharding/document_layout.py).
    few_documents: bool = False
    # ring steps after step 1 do not run if no document needs them; with key ranges
    skips_ring_steps: bool = False
    query_block_tokens: int = 256  # upper limits of the block sizes of kernels that work in blocks
    key_block_tokens: int = 256
    small_shared_memory: bool = False  # of the GPU; see `key_ranges`

    def __post_init__(self):
        assert self.window is None or (self.causal and self.window > 0), self

    @property
    def not_causal(self) -> "AttentionSpec":
        """For calls whose queries attend to whole blocks of earlier keys."""
        return replace(self, causal=False)

    def scale_for(self, head_dim: int) -> float:
        return 1.0 / math.sqrt(head_dim) if self.scale is None else self.scale


class KeyRanges(NamedTuple):
    """The attention mask: query t attends to the keys start_BT[t] <= s < end_BT[t], which are
    indices of k_BSKH.

    int32, O(T) memory; start and end are in 0 .. S. start == end == 0 for a fully masked row. A
    dense mask exists per block only. A call without ranges has an implicit mask: if the spec is
    causal, tokens are in natural order, the last query is aligned with the last key, and a query
    attends to the keys at its own and earlier indices, up to `window` of them; otherwise to all
    keys. `key_ranges.py` computes ranges from positions and segment ids.

    The spec of a call with ranges says which form they have: with `causal`, the last key of a query
    is the one at its own index, otherwise all queries of a document have the same range.
    """

    start_BT: jax.Array
    end_BT: jax.Array

    def dense_mask_BTS(self, num_keys: int) -> jax.Array:
        keys_S = jnp.arange(num_keys)
        return (self.start_BT[:, :, None] <= keys_S) & (keys_S < self.end_BT[:, :, None])

    def within(self, first_key, num_keys: int) -> "KeyRanges":
        """The ranges against the keys first_key .. first_key + num_keys - 1, counted from
        first_key.
        """
        start_BT, end_BT = (jnp.clip(x - first_key, 0, num_keys) for x in self)
        is_empty_BT = start_BT >= end_BT
        return KeyRanges(*(jnp.where(is_empty_BT, 0, x) for x in (start_BT, end_BT)))


class TreeRanges(NamedTuple):
    """The mask of documents that share prefixes: a query attends to the keys of disjoint ranges.

    Kernels take one range per query. `kernels.choose.SharedPrefixKernel` calls them once for each.
    """

    own: KeyRanges  # keys of the query's own document
    prefixes: tuple[KeyRanges, ...]  # keys of its document's prefix at each level, the root first


class QueryResults(NamedTuple):
    """The inputs of the backward that have one row per query: the results over all keys, and their
    gradients.
    """

    out_BTNH: jax.Array
    lse_BNT: jax.Array
    dout_BTNH: jax.Array
    dlse_BNT: jax.Array

    @property
    def finite_lse_BNT(self) -> jax.Array:
        """With 0 for -inf, which a fully masked row has; no key attends to it."""
        return jnp.where(jnp.isneginf(self.lse_BNT), 0.0, self.lse_BNT)

    @property
    def delta_BNT(self) -> jax.Array:
        """sum_H(dout out) - dlse, float32: the gradient of the scores is p (dout . v - delta)."""
        products_BTNH = self.out_BTNH.astype(jnp.float32) * self.dout_BTNH.astype(jnp.float32)
        return products_BTNH.sum(axis=-1).swapaxes(1, 2) - self.dlse_BNT


class CallResults(NamedTuple):
    """The results of a kernel's calls, and what is left to do: elementwise, so that a caller's sums
    fuse with it.
    """

    results: Any  # a tree of arrays
    # `results` -> the results of the kernel's forward or backward
    joined: Callable[[Any], tuple[jax.Array, ...]]

    def values(self) -> tuple[jax.Array, ...]:
        """The results of the kernel's forward or backward."""
        return self.joined(self.results)


class KernelOfCalls:
    """The contract of a kernel that has `forward_calls` and `backward_calls`."""

    forward_calls: Callable[..., CallResults]
    backward_calls: Callable[..., CallResults]

    def forward(self, *operands) -> tuple[jax.Array, ...]:
        """(out_BTNH, lse_BNT)"""
        return self.forward_calls(*operands).values()

    def backward(self, *operands) -> tuple[jax.Array, ...]:
        """(dq_BTNH, dk_BSKH, dv_BSKH)"""
        return self.backward_calls(*operands).values()


def implicit_ranges(
    spec: AttentionSpec, num_queries: int, num_keys: int
) -> tuple[jax.Array | None, jax.Array | None]:
    """(start_T, end_T) of a call without ranges, int32. A start of None is 0, an end of None is
    num_keys.
    """
    if not spec.causal:
        return None, None
    # 0 and below before all keys
    end_T = jnp.arange(num_keys - num_queries + 1, num_keys + 1, dtype=jnp.int32)
    return None if spec.window is None else jnp.maximum(end_T - spec.window, 0), jnp.maximum(
        end_T, 0
    )


def explicit_ranges(
    ranges: KeyRanges | None, q_BTNH: jax.Array, num_keys: int, spec: AttentionSpec
) -> KeyRanges:
    """`ranges`, or the ranges of a call without them."""
    if ranges is not None:
        return ranges
    start_T, end_T = implicit_ranges(spec, q_BTNH.shape[1], num_keys)
    bounds = jnp.int32(0) if start_T is None else start_T, num_keys if end_T is None else end_T
    return KeyRanges(*(jnp.broadcast_to(x, q_BTNH.shape[:2]) for x in bounds))


def add_dlse_term(
    gradients: Callable, v_BSKH: jax.Array, dlse_BNT: jax.Array, *dqk: jax.Array
) -> tuple[jax.Array, ...]:
    """(dq_BTNH, dk_BSKH) with the gradient of the lse, for a kernel that computes ds = p (dout . v - dout . out).

    The missing term p dlse equals the ds of a second call with v = 0, dout = (1, 0, ..., 0) and out = (-dlse, 0, ...,
    0). Where the caller does not use the lse, dlse is a constant zero, and XLA removes the second call.

    Args:
      gradients: (v_BSKH, out_BTNH, dout_BTNH) -> (dq, dk, dv)
    """

    def add(*dqk):
        is_first_H = jnp.arange(v_BSKH.shape[-1]) == 0
        out_BTNH = jnp.where(is_first_H, -dlse_BNT.swapaxes(1, 2)[..., None], 0.0)
        dout_BTNH = jnp.broadcast_to(is_first_H, out_BTNH.shape)
        return tuple(map(jnp.add, dqk, gradients(jnp.zeros_like(v_BSKH), out_BTNH, dout_BTNH)))

    # XLA simplifies a dot product with zeros to zero. It would evaluate `any(dlse != 0)` at compile time
    # instead, which takes 1.8 s per call at 8192 tokens and 32 heads, and grows in proportion.
    has_dlse = jnp.vdot(dlse_BNT, dlse_BNT) != 0
    return lax.cond(has_dlse, add, lambda *dqk: dqk, *dqk)


@dataclass(frozen=True, kw_only=True)
class AttentionProblem:
    """The properties of an attention call that the choice of a kernel depends on."""

    platform: str  # `jax.Device.platform`: "gpu", "cpu"
    compute_capability: str | None  # such as "9.0"; None without a GPU
    dtype: str  # the dtype that q, k and v share: "bfloat16"
    head_dim: int  # for queries and keys; values may differ
    value_dim: int
    window: int | None
    implicit_positions: bool  # no ranges are passed; see KeyRanges
    # the ranges are of packed documents over a rank's own tokens or a ring step
    document_ranges: bool = False
    # the ranges are of sliding windows in which a document's keys are contiguous, in the order of
    # its queries, and no other document has them
    window_ranges: bool = False
    deterministic: bool = False  # results must have the same bits in each run
    num_elements: int = 0  # elements of the larger of q and k per kernel call; 0 if unknown
    # installed; (): not found. None: the GPU is absent, any is assumed
    cudnn_version: tuple[int, ...] | None = None

    @property
    def major_capability(self) -> int:
        """The major version of the compute capability of an NVIDIA GPU; 0 for other devices."""
        major = (self.compute_capability or "").partition(".")[0]
        return int(major) if major.isdigit() else 0


class Kernel(Protocol):
    """Attention of one device's queries over one block of keys, without mesh or collectives.
    Modules implement it.
    """

    def unsupported(self, problem: AttentionProblem) -> str | None:
        """Why the kernel does not support `problem`: the value and the limit. None: it is
        supported.

        Example: "head dim 256 (supported: multiples of 8 up to 128)".
        """

    def forward(
        self,
        q_BTNH: jax.Array,
        k_BSKH: jax.Array,
        v_BSKH: jax.Array,
        ranges: KeyRanges | None,
        spec: AttentionSpec,
    ) -> OutLse:
        """Returns (out_BTNH, in q's dtype or float32, and lse_BNT, float32)."""

    def backward(
        self,
        q_BTNH: jax.Array,
        k_BSKH: jax.Array,
        v_BSKH: jax.Array,
        ranges: KeyRanges | None,
        spec: AttentionSpec,
        results: QueryResults,
    ) -> Gradients:
        """Returns (dq_BTNH, dk_BSKH, dv_BSKH), in q's dtype or float32."""


def calls_of(kernel: "Kernel", direction: Literal["forward", "backward"], *operands) -> CallResults:
    """The calls of the kernel's function `direction` with these operands."""
    calls = getattr(kernel, f"{direction}_calls", None)
    return calls(*operands) if calls else CallResults(getattr(kernel, direction)(*operands), tuple)


def prepared(
    kernel: Kernel | None, ranges: KeyRanges | None, num_keys: int, spec: AttentionSpec
) -> Any:
    """What `kernel` takes as `ranges`, over num_keys keys: the result of its `prepare`, or the
    ranges themselves.
    """
    prepare = getattr(kernel, "prepare", None)
    return ranges if prepare is None or ranges is None else prepare(ranges, num_keys, spec)


def join(out_BTNH: jax.Array, lse_BNT: jax.Array, sinks_N: jax.Array | None) -> OutLse:
    """(out, lse) with the sinks in the denominator, in the dtypes of the arguments; without sinks,
    the arguments.
    """
    if sinks_N is None:
        return out_BTNH, lse_BNT
    joined_BNT = jnp.logaddexp(lse_BNT, sinks_N[:, None].astype(jnp.float32))
    weight_BTN1 = jnp.exp(lse_BNT - joined_BNT).swapaxes(1, 2)[..., None]
    return (out_BTNH * weight_BTN1).astype(out_BTNH.dtype), joined_BNT


def gradient(sinks_N: jax.Array, results: QueryResults) -> jax.Array:
    """The gradient of the sinks, [N] in their dtype.

    Args:
      results: with the sinks in the denominator.
    """
    probability_BNT = jnp.exp(sinks_N[:, None].astype(jnp.float32) - results.lse_BNT)
    return -jnp.sum(probability_BNT * results.delta_BNT, axis=(0, 2)).astype(sinks_N.dtype)


def pad_tokens(x_BT: jax.Array, multiple: int) -> jax.Array:
    """Pads dimension 1 with zeros to a multiple. Of ranges, zeros are an empty range."""
    missing = -x_BT.shape[1] % multiple
    return append_tokens(x_BT, missing) if missing else x_BT


def append_tokens(x_BT: jax.Array, num_tokens: int, mode: str = "constant") -> jax.Array:
    """Appends zeros, or what another `mode` of `jnp.pad` gives, to dimension 1."""
    return jnp.pad(x_BT, [(0, 0), (0, num_tokens)] + [(0, 0)] * (x_BT.ndim - 2), mode=mode)


def merge(
    out_a_BTNH: jax.Array, lse_a_BNT: jax.Array, out_b_BTNH: jax.Array, lse_b_BNT: jax.Array
) -> OutLse:
    """(out, lse) over the union of two disjoint sets of keys, from the (out, lse) of each set; all
    float32.

    out = (e^lse_a out_a + e^lse_b out_b) / (e^lse_a + e^lse_b). The larger lse is subtracted first,
    so no exponential overflows. A side without visible keys (lse -inf) has weight 0; two such sides
    give (0, -inf). Commutative.
    """
    max_BNT = jnp.maximum(lse_a_BNT, lse_b_BNT)
    is_empty_BNT = jnp.isneginf(max_BNT)
    max_BNT = jnp.where(is_empty_BNT, 0.0, max_BNT)
    weight_a_BNT = jnp.exp(lse_a_BNT - max_BNT)
    weight_b_BNT = jnp.exp(lse_b_BNT - max_BNT)
    total_BNT = jnp.where(is_empty_BNT, 1.0, weight_a_BNT + weight_b_BNT)

    def per_query(x_BNT):
        return x_BNT.swapaxes(1, 2)[..., None]

    out_BTNH = out_a_BTNH * per_query(weight_a_BNT / total_BNT) + out_b_BTNH * per_query(
        weight_b_BNT / total_BNT
    )
    return out_BTNH, jnp.where(is_empty_BNT, -jnp.inf, max_BNT + jnp.log(total_BNT))


def merge_parts(out_PBTNH: jax.Array, lse_PBNT: jax.Array) -> OutLse:
    """`merge` of P disjoint sets of keys at once: (out_BTNH, lse_BNT) over their union; all
    float32.
    """
    lse_BNT = jax.nn.logsumexp(lse_PBNT, axis=0)
    weights_PBNT = jnp.exp(lse_PBNT - jnp.where(jnp.isneginf(lse_BNT), 0.0, lse_BNT))
    return jnp.einsum("PBTNH,PBNT->BTNH", out_PBTNH, weights_PBNT), lse_BNT
