"""Attention over a sequence split on a mesh, as functions of global arrays: strategies, kernels,
`shard_map`.

`make` builds the attention that models call; `api.attend` is the public function.

`to_zigzag` and `to_natural` reorder tokens between ranks, inside `shard_map`. In natural order rank
r of n holds the neighboring chunks 2r and 2r + 1 of 2n, in zigzag order the chunks r and 2n - 1 -
r. Of the two chunks that a rank holds in zigzag order, one is even and one is odd. So two
collective permutes suffice, one of all even chunks and one of all odd chunks: each rank sends its
shard once. Indexing the global array with `zigzag_order` would gather it on every rank instead.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxlc.attention import key_ranges
from jaxlc.attention.contract import AttentionProblem, AttentionSpec, Kernel, OutLse
from jaxlc.attention.kernels import cudnn
from jaxlc.attention.kernels.choose import KernelSelection, SharedPrefixKernel, choose_kernel
from jaxlc.attention.key_ranges import TokenInfo
from jaxlc.attention.strategies import all_gather, ring, ulysses, window_exchange
from jaxlc.attention.strategies.strategy import (
    DEFAULT_AXES,
    AttentionAxes,
    AttentionSpecs,
    Expansion,
    ShardedQKV,
    repeat_heads,
)
from jaxlc.config import AttentionConfig
from jaxlc.core import CONTEXT, UserError, scopes
from jaxlc.sharding.mesh import Ranks, shard_map, split_context


@jax.named_scope(scopes.REORDER)
def to_zigzag(x_bt: jax.Array, ranks: Ranks) -> jax.Array:
    """Converts this rank's shard from natural to zigzag order."""
    if ranks.size == 1:
        return x_bt
    even, odd = (
        lax.ppermute(
            chunk, ranks.axis, [(rank, owner) for owner, rank in _owners(ranks.size, parity)]
        )
        for parity, chunk in enumerate(jnp.split(x_bt, 2, 1))
    )
    is_odd_rank = lax.axis_index(ranks.axis) % 2 == 1
    return jnp.concatenate(
        [jnp.where(is_odd_rank, odd, even), jnp.where(is_odd_rank, even, odd)], 1
    )


@jax.named_scope(scopes.REORDER)
def to_natural(x: jax.Array, ranks: Ranks, dim: int = 1) -> jax.Array:
    """The inverse of `to_zigzag`; `dim` is the dimension of the tokens."""
    if ranks.size == 1:
        return x
    lo, hi = jnp.split(x, 2, dim)
    is_odd_rank = lax.axis_index(ranks.axis) % 2 == 1
    even = jnp.where(is_odd_rank, hi, lo)
    odd = jnp.where(is_odd_rank, lo, hi)
    chunks = (
        lax.ppermute(chunk, ranks.axis, _owners(ranks.size, parity))
        for parity, chunk in enumerate((even, odd))
    )
    return jnp.concatenate(list(chunks), dim)


def _owners(num_ranks: int, parity: int) -> list[tuple[int, int]]:
    """(rank in zigzag order, rank in natural order) of each even (parity 0) or odd (parity 1)
    chunk.
    """
    chunks = range(parity, 2 * num_ranks, 2)
    return [(min(chunk, 2 * num_ranks - 1 - chunk), chunk // 2) for chunk in chunks]


TokenOrder = Literal["natural", "zigzag"]


class Strategy(NamedTuple):
    """A way to split a sequence over the context axis.

    `attend(qkv, kernel, spec, ranks)` is the attention of this rank's queries over the whole sequence, out_btnH in q's
    dtype and lse_bnt float32. Its arguments are this rank's shard, in zigzag order without ranges, with ranges in any
    order for which `key_ranges` holds; the kernel for one KV block; and the mesh axis that splits the sequence, of any
    size from 1.
    """

    attend: Callable  # this function and the next run inside `shard_map`; see strategy.py
    prepare: Callable
    # `(spec, batch axes, ranks)` -> the PartitionSpecs of the result of `prepare`
    ranges_specs: Callable
    implicit_positions: bool  # without packed documents, its kernel calls have implicit positions
    # Also with a sliding window. Otherwise only the tokens that it reaches are sent: window_exchange.py.
    attends_in_windows: bool = False


STRATEGIES: dict[str, Strategy] = {
    "ring": Strategy(ring.attend, ring.prepare, ring.ranges_specs, implicit_positions=True),
    "all_gather": Strategy(
        all_gather.attend, all_gather.prepare, all_gather.ranges_specs, implicit_positions=False
    ),
    "ulysses": Strategy(
        ulysses.attend,
        ulysses.prepare,
        ulysses.ranges_specs,
        implicit_positions=True,
        attends_in_windows=True,
    ),
}
STRATEGIES["hybrid"] = STRATEGIES["ring"]  # of groups of ranks, which exchange heads for tokens
_WINDOWS = Strategy(
    window_exchange.attend,
    window_exchange.prepare,
    window_exchange.ranges_specs,
    implicit_positions=False,
)


def strategy_of(config: AttentionConfig, window: int | None) -> Strategy:
    """The strategy of layers with this window."""
    strategy = STRATEGIES[known_strategy(config.strategy)]
    return strategy if window is None or strategy.attends_in_windows else _WINDOWS


def choose(
    config: AttentionConfig,
    mesh: Mesh | None,
    *,
    head_dim: int,
    dtype,
    packed: bool,
    window: int | None = None,
    value_dim: int | None = None,
    num_elements: int = 0,
    ring_ranks: int | None = None,
    shared_prefixes: int = 0,
    deterministic: bool = False,
) -> KernelSelection:
    """The kernel that `make(config, mesh, window=window)` calls for such arrays, and the reason.

    Args:
      mesh: its first device decides. None: `jax.devices()[0]`.
      head_dim: head dim of queries and keys.
      dtype: dtype of q, k and v.
      packed: whether the call has key ranges.
      window: of `make`.
      value_dim: head dim of values. None: equal to head_dim.
      num_elements: of a device's shard of q. 0: unknown.
      ring_ranks: ranks, or groups of ranks, that have different tokens. None: of the mesh's context axis.
      shared_prefixes, deterministic: of `make`.
    Raises:
      UserError, Unsupported: as `choose_kernel`.
    """
    implicit_positions = strategy_of(config, window).implicit_positions
    if ring_ranks is None:
        context = 1 if mesh is None else mesh.shape.get(CONTEXT, 1)
        inner = {"ulysses": context, "hybrid": config.ulysses_degree}.get(config.strategy, 1)
        ring_ranks = context // inner
    problem = problem_on(
        mesh,
        dtype,
        head_dim=head_dim,
        value_dim=value_dim or head_dim,
        window=window,
        implicit_positions=implicit_positions and not packed,
        document_ranges=packed and implicit_positions and window is None,
        window_ranges=window is not None
        and not shared_prefixes
        and (not packed or ring_ranks == 1),
        deterministic=deterministic,
        num_elements=num_elements,
    )
    return choose_kernel(config.kernel, problem)


def problem_on(mesh: Mesh | None, dtype, **settings: Any) -> AttentionProblem:
    """The problem on the first device of the mesh; None: `jax.devices()[0]`.

    Args:
      settings: the fields that do not depend on the device.
    """
    device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
    return AttentionProblem(
        platform=device.platform,
        compute_capability=getattr(device, "compute_capability", None),
        dtype=jnp.dtype(dtype).name,
        cudnn_version=cudnn.version_for(device),
        **settings,
    )


def make(
    config: AttentionConfig,
    mesh: Mesh,
    *,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    axes: AttentionAxes = DEFAULT_AXES,
    token_order: TokenOrder = "zigzag",
    few_documents: bool = False,
    skips_ring_steps: bool = False,
    shared_prefixes: int = 0,
    deterministic: bool = False,
) -> "ShardedAttention":
    """Attention over a sequence split on the mesh, as functions of global arrays.

    Args:
      window: a query attends to itself and the window - 1 tokens before it; requires causal. None: all earlier tokens.
      axes: the axes of the mesh that split the batch, the sequence and the heads.
      token_order: the order of the tokens of all arguments and results; see `attend`.
      few_documents: tokens are in the order of per-document sharding, in which ranks share few documents.
      skips_ring_steps: if no document needs the ring steps after step 1, they do not run.
      shared_prefixes: levels of prefixes that documents may continue, which `prepare` gets; 0: none.
      deterministic: `auto` takes no kernel whose results differ between runs.
    Raises:
      UserError: the strategy is unknown, or `config.ulysses_degree` does not divide the context axis.
    """
    known_strategy(config.strategy)
    inner = config.ulysses_degree if config.strategy == "hybrid" else None
    split_mesh, ranks = split_context(mesh, inner, axes.context)
    spec = dataclasses.replace(
        attention_spec(config, mesh, causal, window, scale),
        few_documents=few_documents,
        skips_ring_steps=skips_ring_steps,
    )
    return ShardedAttention(
        config=config, mesh=mesh, split_mesh=split_mesh, ranks=ranks, spec=spec, axes=axes, token_order=token_order,
        shared_prefixes=shared_prefixes, deterministic=deterministic,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ShardedAttention:
    """Attention over a sequence split on a mesh, to be called under `jit`; `make` builds it.

    The tokens of all arguments and results are in `token_order`.
    """

    config: AttentionConfig
    mesh: Mesh
    split_mesh: Mesh  # the mesh with the context axis split into `ranks`
    ranks: tuple[Ranks, ...]
    spec: AttentionSpec
    axes: AttentionAxes
    token_order: TokenOrder
    shared_prefixes: int = 0
    deterministic: bool = False

    def prepare(
        self,
        positions_BT: jax.Array | None,
        segments_BT: jax.Array | None,
        q_like: jax.ShapeDtypeStruct | None = None,
        prefixes_BTD: jax.Array | None = None,
    ):
        """The mask of packed documents as key ranges, for all layers of a training step.

        Args:
          positions_BT: int32; count from the start of the sequence, or restart with each document. None: they follow
            from the token order.
          segments_BT: int32. Tokens attend within their own segment only, which is contiguous; 0 is padding. None: each
            sequence is one document.
          q_like: the q_BTNH of all calls. With it, what a kernel computes from the ranges is computed once, here; such
            calls have no `vmap`. None: each call computes it.
          prefixes_BTD: int32, with `shared_prefixes`; see `key_ranges.TokenInfo`. Requires positions.
        Returns:
          The `ranges` of a call, a tree of arrays; None if nothing is masked, or if the mask is implicit.
        """
        if segments_BT is None and (positions_BT is None or not self.spec.causal):
            return None
        local = functools.partial(
            prepare_shard,
            config=self.config,
            kernel=None if q_like is None else self._kernel(q_like, q_like.shape[-1], packed=True),
            spec=self.spec,
            ranks=self.ranks,
            token_order=self.token_order,
        )
        tokens = TokenInfo(positions_BT, segments_BT, prefixes_BTD)
        return self._split(local, (tokens.map(lambda _: self._specs.tokens),), self._ranges_specs)(
            tokens
        )

    def __call__(
        self,
        q_BTNH: jax.Array,
        k_BSKH: jax.Array,
        v_BSKH: jax.Array | Expansion,
        ranges=None,
        sinks_N: jax.Array | None = None,
    ) -> OutLse:
        """(out_BTNH, lse_BNT float32).

        Where the ranks of the head axis exceed K, key/value heads are repeated here, outside `shard_map`, so that their
        gradients are summed.

        Args:
          k_BSKH: keys; with an `Expansion` in place of values, which only strategy ring supports, the latents
            [B, S, C] that it expands, float32, so that their gradient is summed over tensor ranks in float32.
          ranges: of `prepare`. None: each sequence is one document.
          sinks_N: float32, a logit per query head in the denominator of the softmax; see contract.py. None: no sinks.
        """
        tokens, heads, lse = self._specs
        if isinstance(v_BSKH, Expansion):
            value_dim = v_BSKH.value_dim
            kv_specs = PartitionSpec(*tokens, None), v_BSKH.specs(self.axes.head)
        else:
            num_head_ranks = self.axes.num_head_ranks(self.mesh)
            k_BSKH, v_BSKH = (repeat_heads(x, num_head_ranks) for x in (k_BSKH, v_BSKH))
            value_dim = v_BSKH.shape[-1]
            kv_specs = (heads, heads)
        local = functools.partial(
            attend_shard,
            config=self.config,
            kernel=self._kernel(q_BTNH, value_dim, packed=ranges is not None),
            spec=self.spec,
            ranks=self.ranks,
            token_order=self.token_order,
        )
        ranges_specs = None if ranges is None else self._ranges_specs
        sinks_spec = None if sinks_N is None else PartitionSpec(self.axes.head)
        split = self._split(local, (heads, *kv_specs, ranges_specs, sinks_spec), (heads, lse))
        return split(q_BTNH, k_BSKH, v_BSKH, ranges, sinks_N)

    def _kernel(
        self, q_BTNH: jax.Array | jax.ShapeDtypeStruct, value_dim: int, packed: bool
    ) -> Kernel:
        kernel = choose(
            self.config, self.mesh, head_dim=q_BTNH.shape[-1], value_dim=value_dim, dtype=q_BTNH.dtype,
            packed=packed, window=self.spec.window,
            num_elements=math.prod(NamedSharding(self.split_mesh, self._specs.heads).shard_shape(q_BTNH.shape)),
            ring_ranks=1 if self.config.strategy == "ulysses" else self.ranks[0].size,
            shared_prefixes=self.shared_prefixes, deterministic=self.deterministic,
        ).kernel  # fmt: skip
        return SharedPrefixKernel(kernel) if packed and self.shared_prefixes else kernel

    @property
    def _specs(self) -> AttentionSpecs:
        return self.axes.specs(tuple(split.axis for split in self.ranks))

    @property
    def _ranges_specs(self):
        strategy = strategy_of(self.config, self.spec.window)
        return strategy.ranges_specs(self.spec, self.axes.batch, self.ranks[0])

    def _split(self, local: Callable, in_specs: tuple, out_specs) -> Callable:
        split = shard_map(local, self.split_mesh, in_specs, out_specs)

        def call(*operands):
            with _current_mesh(self.split_mesh):
                return split(*operands)

        return call


def _current_mesh(mesh: Mesh) -> AbstractContextManager:
    """Allows `shard_map` over `mesh` where `jax.set_mesh` has set another mesh of the same devices."""
    if jax.sharding.get_abstract_mesh().empty:
        return nullcontext()
    return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


@jax.named_scope(scopes.CORE_ATTENTION)
def prepare_shard(
    tokens: TokenInfo,
    *,
    config: AttentionConfig,
    kernel: Kernel | None,
    spec: AttentionSpec,
    ranks: tuple[Ranks, ...],
    token_order: TokenOrder,
):
    """The `ranges` of `attend_shard`; runs inside `shard_map`. See `ShardedAttention.prepare`."""
    all_ranks = _as_one_axis(ranks)
    if token_order == "natural":
        tokens = tokens.map(lambda x_bt: to_zigzag(x_bt, all_ranks))
    if tokens.positions_BT is None:
        tokens = tokens._replace(positions_BT=all_ranks.positions(*tokens.segments_BT.shape))
    outer, *inner = ranks
    for group in inner:
        tokens = ulysses.gather_tokens(tokens, group)
    return strategy_of(config, spec.window).prepare(tokens, kernel, spec, outer)


@jax.named_scope(scopes.CORE_ATTENTION)
def attend_shard(
    q_btnH: jax.Array,
    k_bskH: jax.Array,
    v_bskH: jax.Array,
    key_ranges,
    sinks_n: jax.Array | None,
    *,
    config: AttentionConfig,
    kernel: Kernel,
    spec: AttentionSpec,
    ranks: tuple[Ranks, ...],
    token_order: TokenOrder,
) -> OutLse:
    """(out_btnH, lse_bnt float32) of this rank's shard; runs inside `shard_map`. See
    `ShardedAttention`.
    """
    all_ranks = _as_one_axis(ranks)
    if token_order == "natural":
        q_btnH, k_bskH, v_bskH = (to_zigzag(x, all_ranks) for x in (q_btnH, k_bskH, v_bskH))
    # Ranges are the same in every layer. Differentiating a scan over layers would hoist the dense masks of all blocks
    # out of the loop: T x S entries. The barrier ties them to the queries, so they are computed inside the loop, block
    # by block.
    q_btnH, key_ranges = lax.optimization_barrier((q_btnH, key_ranges))
    outer, *inner = ranks

    def attend(qkv: ShardedQKV) -> OutLse:
        return strategy_of(config, spec.window).attend(qkv, kernel, spec, outer)

    for group in inner:
        attend = functools.partial(ulysses.exchange, attend, ranks=group)
    with jax.named_scope(scopes.SLIDING_WINDOW) if spec.window else nullcontext():
        qkv = ShardedQKV(q_btnH, k_bskH, v_bskH, key_ranges, sinks_n)
        out_btnH, lse_bnt = attend(qkv)
    if token_order == "natural":
        return to_natural(out_btnH, all_ranks), to_natural(lse_bnt, all_ranks, dim=2)
    return out_btnH, lse_bnt


def _as_one_axis(ranks: tuple[Ranks, ...]) -> Ranks:
    return Ranks(tuple(split.axis for split in ranks), math.prod(split.size for split in ranks))


def attention_spec(
    config: AttentionConfig,
    mesh: Mesh | None,
    causal: bool,
    window: int | None,
    scale: float | None,
) -> AttentionSpec:
    """For kernels on the first device of the mesh; None: `jax.devices()[0]`."""
    device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
    return AttentionSpec(
        causal=causal,
        window=window,
        scale=scale,
        query_block_tokens=config.query_block_tokens,
        key_block_tokens=config.key_block_tokens,
        small_shared_memory=key_ranges.has_small_shared_memory(device),
    )


def check_token_order(name: str) -> None:
    if name not in get_args(TokenOrder):
        raise UserError(
            f"invalid token_order={name!r}: expected one of {', '.join(get_args(TokenOrder))}"
        )


def known_strategy(name: str) -> str:
    if name not in STRATEGIES:
        raise UserError(
            f"unknown attention strategy {name!r}; known: {', '.join(sorted(STRATEGIES))}"
        )
    return name
