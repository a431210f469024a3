"""Recurrent layers over a rank's tokens, inside `shard_map`; and the public functions of linear
attention, which check their arguments and split arrays over the mesh.

The fragments of a rank are cut into groups of chunks. Several groups are computed at once: the
affine map of each group, and its outputs as functions of the state that enters it. Then follow a
scan over the maps of a fragment, one exchange between ranks, and one product for the outputs. So
there are as many sequential steps as chunks in a group, and as groups, not as many as chunks. Without
correction, the maps need few products, and outputs are computed from the states that enter the groups.
Groups are recomputed in the backward pass.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxlc.attention.contract import append_tokens
from jaxlc.attention.kernels import packed_check
from jaxlc.attention.recurrence import chunks
from jaxlc.attention.recurrence.chunks import (
    Rule,
    Tokens,
    has_kernel,
    map_and_reads,
    outputs,
    read,
    sum_map,
)
from jaxlc.attention.recurrence.convolution import convolution
from jaxlc.attention.state_passing import (
    Affine,
    continued_states,
    entering_states,
    fragments_of,
    predecessors,
)
from jaxlc.attention.strategies.sharded_attention import TokenOrder, check_token_order
from jaxlc.attention.strategies.strategy import (
    AttentionAxes,
    check_contiguous,
    check_split,
    is_manual,
    repeat_heads,
    resolve_axes,
)
from jaxlc.core import CONTEXT, UserError, scopes
from jaxlc.sharding.mesh import Ranks, ranks_of, shard_map

GROUP_TOKENS = 1024
_GROUPS_AT_ONCE = 4  # of one sequence: 2.2 GiB of temporaries with 32 heads of dimension 128
# Kernels have no temporaries of that size, and a loop over groups copies their operands and results. They compute as
# many tokens at once as have outputs of this number of entries, half of what int32 counts.
_KERNEL_ENTRIES = 2**30


@jax.named_scope(scopes.LINEAR_ATTENTION)
def recurrence(tokens: Tokens, rule: Rule, *, ranks: Ranks, num_fragments: int) -> jax.Array:
    """The outputs [b, t, H, V] in the dtype of q.

    Args:
      tokens: of this rank, arrays [b, t, ...], without `segment_before_B`. Segments may be None: one segment. A segment
        is followed by those that continue it.
      num_fragments: of each rank; 1: the ranks have consecutive parts of the sequence. 2: zigzag order.
    """
    groups = _groups_of_rank(tokens, ranks, num_fragments)
    out = recurrence_in_groups(groups, rule, ranks, num_fragments)
    return _in_order(out, tokens.q_BLGK.shape[1], num_fragments)


def recurrence_in_groups(
    groups: Tokens,
    rule: Rule,
    ranks: Ranks,
    num_fragments: int,
    fragment_GB: jax.Array | None = None,
) -> jax.Array:
    """The outputs [G, B, g, H, V] of groups of tokens, arrays [G, B, g, ...]. See `entering_states`."""
    maps, read_all = _maps_and_reader(groups, rule)
    return read_all(entering_states(maps, ranks, num_fragments, fragment_GB))


@jax.named_scope(scopes.LINEAR_ATTENTION)
def continued_recurrence(
    tokens: Tokens, rule: Rule, initial_bHKV: jax.Array, *, ranks: Ranks
) -> tuple[jax.Array, jax.Array]:
    """The outputs [b, t, H, V], and the state after the last token, of one segment that starts with
    `initial_bHKV`.

    The ranks have consecutive tokens. Those with g and beta 0 do not change the state. Not
    differentiable.
    """
    groups = _groups_of_rank(tokens, ranks, 1)
    groups = groups._replace(segment_before_B=jnp.ones_like(groups.segment_before_B))
    maps, read_all = _maps_and_reader(groups, rule)
    states, state = continued_states(maps, initial_bHKV, ranks)
    return _in_order(read_all(states), tokens.q_BLGK.shape[1], 1), state


def groups_at_once(
    num_groups: int, num_sequences: int, group_tokens: int, most_tokens: int | None = None
) -> int:
    """Groups that are computed at once, at most; with as many in each batch, batches are few. They are equal
    (`_in_batches`): XLA compiles a smaller last batch for minutes, with all that computes its operands."""
    most_tokens = most_tokens or _GROUPS_AT_ONCE * GROUP_TOKENS
    most = max(1, most_tokens // (num_sequences * group_tokens))
    return math.ceil(num_groups / math.ceil(num_groups / most))


def kernel_tokens(tokens: Tokens, rule: Rule) -> int | None:
    """How many tokens kernels compute at once; None: they compute none."""
    *_, num_heads, value_dim = tokens.v_BLHV.shape
    entries = num_heads * (value_dim + tokens.k_BLGK.shape[-1])  # of the outputs of a token
    return _KERNEL_ENTRIES // entries if has_kernel(tokens, rule) else None


def _maps_and_reader(groups: Tokens, rule: Rule) -> tuple[Affine, Callable[[jax.Array], jax.Array]]:
    """The maps of groups, arrays [G, B, g, ...], and the function from the states that enter them to
    their outputs.

    Without correction, groups are read again for the outputs, since maps alone need few products.
    """
    sizes = groups.v_BLHV.shape[:3]
    each = functools.partial(_in_batches, groups_at_once(*sizes, kernel_tokens(groups, rule)))
    if not rule.corrects:
        run = jax.checkpoint(lambda pair: outputs(*pair, rule)[0])
        maps = each(jax.checkpoint(functools.partial(sum_map, rule=rule)), groups)
        return maps, lambda states: each(run, (groups, states))
    run = jax.checkpoint(functools.partial(map_and_reads, rule=rule))
    maps, reads = each(run, groups)
    return maps, lambda states: each(lambda pair: read(*pair), (reads, states))


def _in_batches(most: int, function: Callable, groups: Any) -> Any:
    """`function` of groups, trees of arrays [G, B, ...], of at most `most` groups at once, as sequences:
    `vmap` of loops would transpose their arrays.
    """
    num_groups, num_sequences = jax.tree.leaves(groups)[0].shape[:2]
    at_once = max(n for n in range(1, most + 1) if num_groups % n == 0)
    batches = jax.tree.map(lambda x: x.reshape(-1, at_once * num_sequences, *x.shape[2:]), groups)
    return jax.tree.map(
        lambda x: x.reshape(num_groups, num_sequences, *x.shape[2:]), lax.map(function, batches)
    )


def _groups_of_rank(tokens: Tokens, ranks: Ranks, num_fragments: int) -> Tokens:
    """The groups of all fragments of a rank, arrays [fragments x groups, B, tokens, ...], from
    arrays [b, t, ...].
    """
    num_sequences, num_tokens = tokens.q_BLGK.shape[:2]
    if tokens.segments_BL is None:
        tokens = tokens._replace(segments_BL=jnp.ones((num_sequences, num_tokens), jnp.int32))
    fragment_tokens = num_tokens // num_fragments
    num_groups = math.ceil(fragment_tokens / GROUP_TOKENS)
    num_groups += -num_groups % groups_at_once(num_groups, num_sequences, GROUP_TOKENS)
    fragments = fragments_of(tokens, num_fragments)
    before = predecessors([fragment.segments_BL[:, -1] for fragment in fragments], ranks)
    groups = [groups_of(*pair, num_groups) for pair in zip(fragments, before)]
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *groups)


def _in_order(out: jax.Array, num_tokens: int, num_fragments: int) -> jax.Array:
    """[fragments x groups, B, group tokens, ...] -> [b, t, ...], without the tokens that were
    appended.
    """
    out = out.reshape(num_fragments, -1, *out.shape[1:])
    out = jnp.moveaxis(out, 2, 0)
    out = out.reshape(len(out), num_fragments, -1, *out.shape[4:])
    return out[:, :, : num_tokens // num_fragments].reshape(len(out), num_tokens, *out.shape[3:])


def groups_of(tokens: Tokens, segment_before_B: jax.Array, num_groups: int) -> Tokens:
    """Arrays [num_groups, B, group tokens, ...], of whole chunks. Tokens are appended that do not
    change the state: 0 in all arrays.
    """
    num_tokens = tokens.segments_BL.shape[1]
    group_chunks = math.ceil(num_tokens / (num_groups * chunks.CHUNK_TOKENS))
    group_tokens = group_chunks * chunks.CHUNK_TOKENS
    missing = num_groups * group_tokens - num_tokens

    def cut(x, mode="constant"):
        x = append_tokens(x, missing, mode)
        return x.reshape(x.shape[0], num_groups, group_tokens, *x.shape[2:]).swapaxes(0, 1)

    segments = cut(tokens.segments_BL, mode="edge")
    before = jnp.concatenate([segment_before_B[None], segments[:-1, :, -1]])
    prefixes = tokens.prefixes_BLD
    return jax.tree.map(cut, tokens)._replace(
        segments_BL=segments,
        segment_before_B=before,
        prefixes_BLD=None if prefixes is None else cut(prefixes, mode="edge"),
    )


def gated_delta_rule(
    q_BTGK: jax.Array,
    k_BTGK: jax.Array,
    v_BTHV: jax.Array,
    g_BTH: jax.Array,
    beta_BTH: jax.Array,
    *,
    mesh: Mesh | None = None,
    segment_ids: jax.Array | None = None,
    scale: float | None = None,
    context_axis: str = CONTEXT,
    batch_axes: str | Sequence[str] | None = None,
    head_axis: str | None = None,
    token_order: TokenOrder = "natural",
) -> jax.Array:
    """The gated delta rule over a sequence split on a mesh axis. Works under `jit`, `grad` and `jax.checkpoint`.

    Yang et al., "Gated Delta Networks: Improving Mamba2 with Delta Rule" (2024). A token of a head changes the state
    S [K, V], which is 0 at the start of a document, and reads it:

        S = exp(g) S;  S = S + k (beta (v - k^T S))^T;  out = scale * S^T q

    Ranks exchange maps of states, whose size does not depend on the sequence length. Groups of tokens are recomputed in
    the backward pass. States and gates are float32 or wider; products with them have the dtype of q.

    Inside a `shard_map` over `context_axis`, arrays are local shards.

    Args:
      q_BTGK, k_BTGK: queries and keys, any float dtype; usually of length 1. Head h of H has key head h // (H / G).
      v_BTHV: values. H must be a multiple of G.
      g_BTH: the logarithm of the decay of the state, at most 0. Or [B, T, H, K], for each channel: Kimi Delta
        Attention (Kimi Linear, arXiv:2510.26692), in which no exponential overflows, however small g is.
      beta_BTH: the step size of the correction, usually from 0 to 1.
      segment_ids: [B, T] int32. Each segment, which is contiguous, starts with state 0; segment 0 is padding, whose
        outputs are 0. None: one segment.
      scale: multiplies q. None: 1/sqrt(K).
      mesh, context_axis, batch_axes, head_axis, token_order: see `attend`.
    Returns:
      out_BTHV in the dtype of q.
    Raises:
      UserError: a shape does not split over the mesh, or a name is unknown.
      Unsupported: a segment is not contiguous.
    """
    _check_delta_shapes(q_BTGK, k_BTGK, v_BTHV, g_BTH, beta_BTH)
    rule = Rule(q_BTGK.shape[-1] ** -0.5 if scale is None else scale)
    arrays = (q_BTGK, k_BTGK, v_BTHV, g_BTH, beta_BTH, segment_ids)
    heads = f"{v_BTHV.shape[2]} value and {q_BTGK.shape[2]} key heads"
    where = mesh, context_axis, batch_axes, head_axis, token_order
    return _on_mesh(_delta_rule, arrays, 5, heads, where, rule=rule)


def _delta_rule(q, k, v, g, beta, segments_bt, *, rule: Rule, **how) -> jax.Array:
    return recurrence(Tokens(q, k, v, g, beta, None, segments_bt, None), rule, **how)


_KERNEL_ADVICE = "set --config.runtime.delta_kernel=xla, and report the GPU and the version of JAX"


def check_kernel(device: jax.Device, *, key_dim: int, value_dim: int, dtype=jnp.bfloat16) -> str:
    """Compares outputs, states and gradients of the kernels with the XLA form: three documents,
    gates of 0 and of -1000, and padding.

    Returns:
      A line with the largest error.
    Raises:
      UserError: a kernel fails, or a result is wrong.
    """
    kernels = "the Pallas kernels of the delta rule"

    def results(*arrays, uses_kernel: bool):
        def run(q, k, v, g, beta, S_BHKV):
            tokens = Tokens(q, k, v, g, beta, None, *segments)
            rule = Rule(key_dim**-0.5, uses_kernel=uses_kernel)
            return chunks.outputs(tokens, S_BHKV, rule)

        out, vjp = jax.vjp(run, *arrays)
        return *out, *vjp(out)

    num_tokens = 2 * chunks.CHUNK_TOKENS
    index_T = jnp.arange(num_tokens)
    ends = jnp.array([num_tokens // 3, num_tokens // 3 + 7, num_tokens - 9])
    segments_T = 1 + jnp.searchsorted(ends, index_T, side="right").astype(jnp.int32)
    segments = jnp.where(segments_T == 4, 0, segments_T)[None], jnp.ones(1, jnp.int32)

    with jax.default_device(device):
        q, k, v, g, *others = random_tokens(num_tokens, 1, 2, key_dim, value_dim, dtype)
        g = jnp.where((index_T % 50 == 20)[:, None], -1000.0, g)
        call, expected = (
            functools.partial(
                jax.jit(functools.partial(results, uses_kernel=uses)), q, k, v, g, *others
            )
            for uses in (True, False)
        )
    comparison = call, lambda actual: packed_check.largest_error(actual, expected())
    messages = f"{kernels} fail", f"{kernels} are wrong"
    error = packed_check.measured_error([comparison], device, messages, _KERNEL_ADVICE)
    return f"kernel     pallas for the delta rule: {error}"


def random_tokens(
    num_tokens: int, key_heads: int, num_heads: int, key_dim: int, value_dim: int, dtype
) -> tuple[jax.Array, ...]:
    """q, k, v, g, beta, and a state, for `chunks.outputs`."""
    shape = 1, num_tokens, num_heads
    keys = jax.random.split(jax.random.key(0), 6)
    key_shape = (1, num_tokens, key_heads, key_dim)
    q, k = (jax.random.normal(key, key_shape) for key in keys[:2])
    q, k = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = jax.random.normal(keys[2], (*shape, value_dim))
    g = -0.3 * jax.nn.softplus(jax.random.normal(keys[3], shape))
    beta = jax.nn.sigmoid(jax.random.normal(keys[4], shape))
    S = jax.random.normal(keys[5], (1, num_heads, key_dim, value_dim))
    return *(x.astype(dtype) for x in (q, k, v)), g, beta, S


def short_convolution(
    x_BTW: jax.Array,
    weights_PW: jax.Array,
    *,
    mesh: Mesh | None = None,
    segment_ids: jax.Array | None = None,
    context_axis: str = CONTEXT,
    batch_axes: str | Sequence[str] | None = None,
    head_axis: str | None = None,
    token_order: TokenOrder = "natural",
) -> jax.Array:
    """A causal convolution of each channel along a sequence split on a mesh axis.

    Output t is the sum over i of weights[i] x[t - P + 1 + i]. Taps that reach into another segment count 0. Ranks
    exchange P - 1 tokens and their segments.

    Args:
      x_BTW: any float dtype.
      weights_PW: P taps; the last one multiplies the token itself.
      segment_ids: [B, T] int32. None: one segment.
      head_axis: the name of the mesh axis that splits W.
      mesh, context_axis, batch_axes, token_order: see `attend`.
    Returns:
      [B, T, W] in the dtype of x.
    Raises:
      UserError: a shape does not split over the mesh, or a rank has fewer tokens than the convolution reaches.
    """
    if x_BTW.ndim != 3 or weights_PW.ndim != 2 or x_BTW.shape[2] != weights_PW.shape[1]:
        raise UserError(
            f"invalid shapes x {x_BTW.shape} and weights {weights_PW.shape}: expected [B, T, W] and [P, W]"
        )
    arrays = (x_BTW, segment_ids, weights_PW)
    heads = f"{x_BTW.shape[2]} channels"
    where = mesh, context_axis, batch_axes, head_axis, token_order
    return _on_mesh(_convolution, arrays, 1, heads, where)


def _convolution(x_btW, segments_bt, weights_PW, *, ranks: Ranks, num_fragments: int) -> jax.Array:
    reach = len(weights_PW) - 1
    fragment_tokens = x_btW.shape[1] // num_fragments
    if reach > fragment_tokens:
        raise UserError(
            f"a convolution of {reach + 1} taps reaches beyond the {fragment_tokens} tokens of a fragment; use a longer"
            " sequence or fewer context ranks"
        )
    return convolution(x_btW, weights_PW, segments_bt, ranks=ranks, num_fragments=num_fragments)


def _on_mesh(
    local: Callable, arrays: tuple, num_with_heads: int, heads: str, where: tuple, **settings
) -> jax.Array:
    """Checks and splits the arrays of `_split`.

    Args:
      heads: as of `check_split`.
      where: the arguments mesh, context_axis, batch_axes, head_axis and token_order.
    """
    mesh, context_axis, batch_axes, head_axis, token_order = where
    check_token_order(token_order)
    settings["num_fragments"] = num_fragments = 2 if token_order == "zigzag" else 1
    segment_ids = arrays[num_with_heads]
    shape_BT = arrays[0].shape[:2]
    if segment_ids is not None and segment_ids.shape != shape_BT:
        raise UserError(
            f"invalid shape {segment_ids.shape} for segment_ids: expected [B, T] = {shape_BT}"
        )
    if is_manual(context_axis, arrays[0]):
        ranks = Ranks(context_axis, lax.axis_size(context_axis))
        return local(*arrays, ranks=ranks, **settings)
    axes = resolve_axes(mesh, context_axis, batch_axes, head_axis)
    check_split(arrays[num_with_heads - 1].shape[:3], arrays[0].shape[2], mesh, axes, heads=heads)
    if segment_ids is not None:
        check_contiguous(segment_ids, mesh.shape[axes.context] if num_fragments == 2 else 1)
    operands = (repeat_heads(x, axes.num_head_ranks(mesh)) for x in arrays[:num_with_heads])
    arrays = *operands, *arrays[num_with_heads:]
    return _split(arrays, local, tuple(settings.items()), mesh, axes, num_with_heads)


@jax.jit(static_argnums=(1, 2, 3, 4, 5))
def _split(
    arrays: tuple,
    local: Callable,
    settings: tuple[tuple[str, Any], ...],
    mesh: Mesh,
    axes: AttentionAxes,
    num_with_heads: int,
) -> jax.Array:
    """Calls `local` on shards: the first arrays are [B, T, heads, ...], then come [B, T] or None,
    and [P, heads].
    """
    specs = [PartitionSpec(axes.batch, axes.context, axes.head)] * num_with_heads
    specs += [None if arrays[num_with_heads] is None else PartitionSpec(axes.batch, axes.context)]
    specs += [PartitionSpec(None, axes.head)] * (len(arrays) - len(specs))
    ranks = ranks_of(mesh, axes.context)
    local = functools.partial(local, ranks=ranks, **dict(settings))
    return shard_map(local, mesh, tuple(specs), specs[0])(*arrays)


def _check_delta_shapes(q, k, v, g, beta) -> None:
    shapes = ", ".join(str(x.shape) for x in (q, k, v, g, beta))
    are_valid = (
        q.ndim == v.ndim == 4
        and k.shape == q.shape
        and v.shape[:2] == q.shape[:2]
        and v.shape[2] % q.shape[2] == 0
        and beta.shape == v.shape[:3]
        and g.shape in (beta.shape, (*beta.shape, q.shape[3]))
    )
    if not are_valid:
        raise UserError(
            f"invalid shapes {shapes} of q, k, v, g, beta: expected q and k [B, T, G, K], v [B, T, H, V] with H a"
            " multiple of G, g [B, T, H], or [B, T, H, K] with a decay of each channel, and beta [B, T, H]"
        )
    if not all(jnp.issubdtype(x.dtype, jnp.floating) for x in (q, k, v, g, beta)):
        dtypes = ", ".join(str(x.dtype) for x in (q, k, v, g, beta))
        raise UserError(
            f"invalid dtypes {dtypes} of q, k, v, g, beta: expected floats, such as bfloat16"
        )
