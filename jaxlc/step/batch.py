"""The batch of a training step, and the order of tokens in its arrays."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxlc.config import Config, ModelConfig
from jaxlc.config.flops import num_layers_by_kind
from jaxlc.config.kinds.contract import NUM_CHAINS
from jaxlc.core import BATCH_AXES, CONTEXT, num_replicas
from jaxlc.data.sequences.loader import Batch, OrderOf, array_dtypes
from jaxlc.models.contract import ChoosesKernel, PassesStates, PerDocumentOrder
from jaxlc.models.kinds import kinds_with, reach
from jaxlc.sharding.document_layout import (
    NUM_FIRST_RING_STEPS,
    ChainedOrder,
    chained_order,
    document_order,
    has_room_for_documents,
    natural_order,
    token_at,
    tree_order,
    zigzag_order,
)


@dataclass(frozen=True, kw_only=True)
class SequenceOrder:
    """The order of tokens in the arrays of a batch."""

    description: str  # for the start report
    # arrays [S] in natural order, "segment_ids" among them -> int64 [S]: index i of the batch holds
    # token of(...)[i].
    of: OrderOf
    # context ranks share at most `document_layout.MAX_SHARED_DOCUMENTS` of a sequence
    few_documents: bool = False
    skips_ring_steps: bool = False  # sequences of short documents need the first ring steps only
    num_chains: int = 0  # of `chained`
    # As `of`, with the fragments of ranks, for layers that exchange states. None: there are none,
    # or zigzag order.
    chained: Callable[[Mapping[str, np.ndarray]], ChainedOrder] | None = None

    def arranged(
        self, sequence: Mapping[str, np.ndarray]
    ) -> tuple[Mapping[str, np.ndarray], np.ndarray]:
        """All arrays of a sequence that a batch has, in natural order, and the order."""
        added = {}
        if self.chained is None:
            order_T = self.of(sequence)
        else:
            order_T, fragments_T = self.chained(sequence)
            added["fragment_ids"] = fragments_T[natural_order(order_T)]
        if "loss_tokens" in sequence:
            added["loss_tokens"] = natural_order(order_T)[sequence["loss_tokens"]]
        return {**sequence, **added}, order_T


def in_natural_order(num_tokens: int) -> SequenceOrder:
    """Tokens are not reordered."""
    order_T = np.arange(num_tokens)
    return SequenceOrder(description="tokens in natural order", of=lambda _: order_T)


def in_zigzag_order(num_tokens: int, context: int, reason: str = "") -> SequenceOrder:
    """Zigzag order over the whole sequence, the same for all sequences."""
    order_T = zigzag_order(num_tokens, context)
    because = f" ({reason})" if reason else ""
    return SequenceOrder(description=f"tokens in zigzag order{because}", of=lambda _: order_T)


def choose_order(config: Config, context: int) -> SequenceOrder:
    """Per-document sharding, or zigzag order where it is switched off or unsupported.

    Args:
      context: number of context ranks.
    """
    reason = _zigzag_reason(config, context)
    if reason is not None:
        return in_zigzag_order(config.data.seq_len, context, reason)
    inner = _group_size(config)
    window = _window(config)
    is_tiled = bool(config.memory.tile_tokens)
    description = "tokens in the order of per-document sharding"
    few_documents = window is None and not is_tiled  # otherwise, a sequence may be in zigzag order
    skips_ring_steps = few_documents and _may_skip_ring_steps(config, context)
    if kinds_with(PassesStates, config.model):
        min_tokens = reach(config.model)

        def chained(sequence):
            return chained_order(
                sequence["segment_ids"], context, num_chains=NUM_CHAINS, min_tokens=min_tokens, window=window,
                skips_ring_steps=skips_ring_steps,
            )  # fmt: skip

        return SequenceOrder(
            description=f"{description}, at most {NUM_CHAINS - 1} documents of a sequence on all ranks",
            of=lambda sequence: chained(sequence).order_T,
            few_documents=few_documents,
            skips_ring_steps=skips_ring_steps,
            num_chains=NUM_CHAINS,
            chained=chained,
        )

    def order_of(sequence):
        segment_ids_T = sequence["segment_ids"]
        prefix_ids_TD = sequence.get("prefix_ids")
        if prefix_ids_TD is not None:
            return tree_order(segment_ids_T, prefix_ids_TD, context // inner, inner)
        order_T = document_order(
            segment_ids_T, context // inner, inner, mirrored=is_tiled, window=window,
            skips_ring_steps=skips_ring_steps,
        )  # fmt: skip
        return zigzag_order(config.data.seq_len, context) if order_T is None else order_T

    return SequenceOrder(
        description=description,
        of=order_of,
        few_documents=few_documents,
        skips_ring_steps=skips_ring_steps,
    )


def _zigzag_reason(config: Config, context: int) -> str | None:
    """Why sequences are in zigzag order; None: per-document sharding."""
    attention = config.attention
    if context == 1:
        return "one context rank"
    if not attention.document_mask:
        return "attention.document_mask=False"
    if not attention.document_sharding:
        return "attention.document_sharding=False"
    reason = _states_reason(config)
    if reason is not None:
        return reason
    if attention.shared_prefixes and config.memory.tile_tokens:
        return (
            "memory.tile_tokens with shared prefixes, whose tokens a mirrored piece does not reach"
        )
    if attention.strategy == "ulysses" or (
        attention.strategy == "hybrid" and attention.ulysses_degree == context
    ):
        return "each rank attends over whole sequences"
    if attention.shared_prefixes and _window(config) is not None:
        return "sliding windows of documents that share prefixes"
    window = _window(config)
    rank_tokens = config.data.seq_len // (context // _group_size(config))
    if window is not None and all(config.model.window_of(kind) for kind in config.model.used_kinds):
        return "sliding windows have nearly equal work on all ranks"
    if window is not None and not has_room_for_documents(rank_tokens, window):
        return f"sliding windows of {window} tokens are too long for pieces of documents on {rank_tokens} tokens"
    return None


def _may_skip_ring_steps(config: Config, context: int) -> bool:
    """Whether the ring steps of a microbatch are of one sequence, whose documents have no other
    keys.
    """
    train = config.train
    attention = config.attention
    has_ring = (
        attention.strategy in ("ring", "hybrid")
        and context // _group_size(config) > NUM_FIRST_RING_STEPS
    )
    is_one_sequence = (
        train.global_batch_size == train.gradient_accumulation_steps
        and config.mesh.num_replicas == 1
    )
    return has_ring and is_one_sequence and not attention.shared_prefixes


def _states_reason(config: Config) -> str | None:
    """Why sequences are in zigzag order if layers pass states along them; None: such layers do not
    need that.
    """
    model = config.model
    attention = config.attention
    kinds = kinds_with(PassesStates, model)
    if not kinds:
        return None
    if all(map(model.window_of, kinds_with(ChoosesKernel, model))):
        return "no layer has more work on one rank than on another"
    layers = f"{model.attention_of(kinds[0])} layers"
    if len(kinds_with(PerDocumentOrder, model)) < len(kinds):
        return f"{layers}, whose states pass through the whole sequence"
    if config.memory.tile_tokens:
        return (
            f"{layers} with memory.tile_tokens, whose tiles have a part of each fragment of a rank"
        )
    if attention.shared_prefixes:
        return f"{layers} with shared prefixes, whose states pass through the whole sequence"
    if attention.strategy == "hybrid":
        return f"{layers} with strategy hybrid, whose groups split documents once more"
    return None


def _group_size(config: Config) -> int:
    """Ranks that have whole sequences together, of which documents are split over the groups."""
    return config.attention.ulysses_degree if config.attention.strategy == "hybrid" else 1


def _window(config: Config) -> int | None:
    """The sliding window of the model; None without sliding layers."""
    return max(filter(None, map(config.model.window_of, config.model.used_kinds)), default=None)


_SEQUENCE_SPEC = PartitionSpec(BATCH_AXES, CONTEXT)
BATCH_SPEC = PartitionSpec(None, *_SEQUENCE_SPEC)


def sequence_positions(shape: tuple[int, int], mesh: Mesh) -> jax.Array:
    """int32 of `shape` [sequences, tokens]: the position of each token in its sequence, in layout
    order.
    """
    num_tokens = shape[1]
    positions_T = token_at(jnp.arange(num_tokens, dtype=jnp.int32), num_tokens, mesh.shape[CONTEXT])
    return lax.with_sharding_constraint(
        jnp.broadcast_to(positions_T, shape), NamedSharding(mesh, _SEQUENCE_SPEC)
    )


def at_loss_tokens(x: jax.Array, batch: Batch) -> jax.Array:
    """Values [..., tokens] as values of the rows of the loss, [..., rows]; see `Batch.loss_tokens`.
    Without these, the rows are the tokens.
    """
    if batch.loss_tokens is None:
        return x
    return jnp.take_along_axis(x, batch.loss_tokens.reshape(*x.shape[:-1], -1), axis=-1)


def token_weights(batch: Batch) -> jax.Array:
    """The sum of the loss weights of the rows of each token: the transpose of `at_loss_tokens`."""
    weights = loss_rows(batch).loss_weights
    like_tokens = jax.ShapeDtypeStruct(batch.tokens.shape, weights.dtype)
    return jax.linear_transpose(lambda x: at_loss_tokens(x, batch), like_tokens)(weights)[0]


def loss_rows(batch: Batch) -> Batch:
    """The batch with arrays of the loss [..., rows], and the ids of the rows: segment_ids are the
    numbers of the answers, and prefix_ids the segment ids of the roots of their trees.
    """
    if batch.loss_tokens is None:
        return batch
    first = batch.prefix_ids[..., 0]
    roots = at_loss_tokens(jnp.where(first > 0, first, batch.segment_ids), batch)
    rows = {
        name: x.reshape(roots.shape)
        for name, x in batch._asdict().items()
        if x is not None and x.shape == batch.loss_tokens.shape
    }
    return batch._replace(
        **rows | dict(segment_ids=rows["loss_segments"], prefix_ids=roots[..., None])
    )


def attention_pairs(batch: Batch, model: ModelConfig) -> jax.Array:
    """Pairs of a query and a key that the document mask leaves in a batch, summed over the layers;
    float32.
    """
    is_text = batch.segment_ids > 0
    pairs = jnp.float32(0)
    for kind, num_layers in num_layers_by_kind(model).items():
        num_keys = jnp.minimum(
            batch.positions + 1, model.window_of(kind) or batch.positions.shape[-1]
        )
        # First by sequence: a sum in float32 over all tokens would round away single addends.
        by_sequence = jnp.where(is_text, num_keys, 0).sum(-1, dtype=jnp.float32)
        pairs += num_layers * by_sequence.sum()
    return pairs


def num_invalid_indices(batch: Batch, model: ModelConfig) -> jax.Array:
    """Tokens, weighted targets, positions and recorded experts out of range, which JAX would clamp
    without an error; float32.

    Batches of a run are checked on the host (`data.sequences.user_batches`), batches of other loops
    only here.
    """
    targets = jnp.where(loss_rows(batch).loss_weights > 0, at_loss_tokens(batch.targets, batch), 0)
    ends = [
        (batch.tokens, model.vocab_size),
        (targets, model.vocab_size),
        (batch.positions, batch.positions.shape[-1]),
    ]
    if batch.loss_tokens is not None:
        ends.append((batch.loss_tokens, batch.tokens.shape[-1]))
    if (experts := batch.experts) is not None:
        is_missing = experts == jnp.iinfo(experts.dtype).max
        ends.append((jnp.where(is_missing, 0, experts), model.experts.num_experts))
    if batch.teacher_tokens is not None:
        ends.append((batch.teacher_tokens + 1, model.vocab_size + 1))
    return sum(((x < 0) | (x >= end)).astype(jnp.float32).sum() for x, end in ends)


def abstract_batch(
    config: Config, mesh: Mesh, has_fragments: bool = False, *, is_evaluated: bool = False
) -> Batch:
    """Shapes, dtypes and shardings of the batch of a step, or of an evaluation: one microbatch with one sequence per
    rank of the data and fsdp axes, arrays [B, S].

    Args:
      has_fragments: whether the order of tokens has `SequenceOrder.chained`.
    """
    train = config.train
    num_parts = train.gradient_accumulation_steps
    shape = num_parts, train.global_batch_size // num_parts, config.data.seq_len
    spec = BATCH_SPEC
    if is_evaluated:
        shape = num_replicas(mesh.shape), config.data.seq_len
        spec = _SEQUENCE_SPEC
    dtypes = array_dtypes(config) | ({"fragment_ids": np.dtype("i4")} if has_fragments else {})
    sharding = NamedSharding(mesh, spec)
    batch = Batch(
        **{
            name: jax.ShapeDtypeStruct((*shape, *dtype.shape), dtype.base, sharding=sharding)
            for name, dtype in dtypes.items()
        }
    )
    if config.posttrain.uses_reference_model and not is_evaluated:
        # added by `train.stage_setup.Reference`
        batch = batch._replace(reference_log_probs=batch.loss_weights)
    return batch
