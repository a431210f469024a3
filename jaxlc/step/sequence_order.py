"""The choice of the order of tokens in the arrays of a batch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from jaxlc.config import Config
from jaxlc.core.mixers.delta_net_mixer import NUM_CHAINS
from jaxlc.data.sequences.loader import OrderOf
from jaxlc.sharding.document_layout import NUM_FIRST_RING_STEPS, ChainedOrder, chained_order, document_order
from jaxlc.sharding.layout import natural_order, zigzag_order
from jaxlc.sharding.window_room import has_room_for_documents


@dataclass(frozen=True, kw_only=True)
class SequenceOrder:
    """The order of tokens in the arrays of a batch."""

    description: str  # for the start report
    # arrays [S] in natural order, "segment_ids" among them -> int64 [S]: index i of the batch holds token of(...)[i].
    of: OrderOf
    few_documents: bool = False  # context ranks share at most `document_layout.MAX_SHARED_DOCUMENTS` of a sequence
    skips_ring_steps: bool = False  # sequences of short documents need the first ring steps only
    num_chains: int = 0  # of `chained`
    # As `of`, with the fragments of ranks, for layers that exchange states. None: there are none, or zigzag order.
    chained: Callable[[Mapping[str, np.ndarray]], ChainedOrder] | None = None

    def arranged(self, sequence: Mapping[str, np.ndarray]) -> tuple[Mapping[str, np.ndarray], np.ndarray]:
        """All arrays of a sequence that a batch has, in natural order, and the order."""
        if self.chained is None:
            return sequence, self.of(sequence)
        order_T, fragments_T = self.chained(sequence)
        return {**sequence, "fragment_ids": fragments_T[natural_order(order_T)]}, order_T


def natural(num_tokens: int) -> SequenceOrder:
    """Tokens are not reordered."""
    order_T = np.arange(num_tokens)
    return SequenceOrder(description="tokens in natural order", of=lambda _: order_T)


def zigzag(num_tokens: int, context: int, reason: str = "") -> SequenceOrder:
    """Zigzag order over the whole sequence, the same for all sequences."""
    order_T = zigzag_order(num_tokens, context)
    because = f" ({reason})" if reason else ""
    return SequenceOrder(description=f"tokens in zigzag order{because}", of=lambda _: order_T)


def choose(config: Config, context: int) -> SequenceOrder:
    """Per-document sharding, or zigzag order where it is switched off or unsupported.

    Args:
      context: number of context ranks.
    """
    reason = _zigzag_reason(config, context)
    if reason is not None:
        return zigzag(config.data.seq_len, context, reason)
    attention = config.attention
    inner, window, is_tiled = _group_size(config), _window(config), bool(config.memory.tile_tokens)
    description = "tokens in the order of per-document sharding"
    few_documents = window is None and not is_tiled  # otherwise, a sequence may be in zigzag order
    skips_ring_steps = few_documents and _may_skip_ring_steps(config, context)
    if _has_states(config):
        taps = config.model.delta_conv_taps
        return _with_chains(description, context, window, min_tokens=taps - 1, skips_ring_steps=skips_ring_steps)

    def order_of(sequence):
        order_T = document_order(
            sequence["segment_ids"], context // inner, inner, mirrored=is_tiled, window=window,
            ascending=attention.shared_prefixes, skips_ring_steps=skips_ring_steps,
        )  # fmt: skip
        return zigzag_order(config.data.seq_len, context) if order_T is None else order_T

    return SequenceOrder(
        description=description, of=order_of, few_documents=few_documents, skips_ring_steps=skips_ring_steps
    )


def _with_chains(
    description: str, context: int, window: int | None, *, min_tokens: int, skips_ring_steps: bool
) -> SequenceOrder:
    def chained(sequence):
        return chained_order(
            sequence["segment_ids"], context, num_chains=NUM_CHAINS, min_tokens=min_tokens, window=window,
            skips_ring_steps=skips_ring_steps,
        )  # fmt: skip

    return SequenceOrder(
        description=f"{description}, at most {NUM_CHAINS - 1} documents of a sequence on all ranks",
        of=lambda sequence: chained(sequence).order_T,
        few_documents=window is None,
        skips_ring_steps=skips_ring_steps,
        num_chains=NUM_CHAINS,
        chained=chained,
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
    if _has_states(config):
        if config.model.attentions <= {"gated_delta_net", "sliding"}:
            return "no layer has more work on one rank than on another"
        if config.memory.tile_tokens:
            return "gated_delta_net layers with memory.tile_tokens, whose tiles have a part of each fragment of a rank"
        if attention.shared_prefixes:
            return "gated_delta_net layers with shared prefixes, whose states pass through the whole sequence"
        if attention.strategy == "hybrid":
            return "gated_delta_net layers with strategy hybrid, whose groups split documents once more"
    if attention.shared_prefixes and config.memory.tile_tokens:
        return "memory.tile_tokens with shared prefixes, whose tokens a mirrored piece does not reach"
    if attention.strategy == "ulysses" or (attention.strategy == "hybrid" and attention.ulysses_degree == context):
        return "each rank attends over whole sequences"
    if attention.shared_prefixes and _window(config) is not None:
        return "sliding windows of documents that share prefixes"
    window, rank_tokens = _window(config), config.data.seq_len // (context // _group_size(config))
    if window is not None and all(config.model.window_of(kind) for kind in config.model.used_kinds):
        return "sliding windows have nearly equal work on all ranks"
    if window is not None and not has_room_for_documents(rank_tokens, window):
        return f"sliding windows of {window} tokens are too long for pieces of documents on {rank_tokens} tokens"
    return None


def _may_skip_ring_steps(config: Config, context: int) -> bool:
    """Whether the ring steps of a microbatch are those of one sequence, whose documents have no other keys."""
    train, mesh, attention = config.train, config.mesh, config.attention
    has_ring = attention.strategy in ("ring", "hybrid") and context // _group_size(config) > NUM_FIRST_RING_STEPS
    is_one_sequence = train.global_batch_size == train.gradient_accumulation_steps and mesh.data * mesh.fsdp == 1
    return has_ring and is_one_sequence and not attention.shared_prefixes


def _has_states(config: Config) -> bool:
    """Whether layers exchange states between fragments of the sequence."""
    return "gated_delta_net" in config.model.attentions


def _group_size(config: Config) -> int:
    """Ranks that have whole sequences together, of which documents are split over the groups."""
    return config.attention.ulysses_degree if config.attention.strategy == "hybrid" else 1


def _window(config: Config) -> int | None:
    """The sliding window of the model; None without sliding layers."""
    return max(filter(None, map(config.model.window_of, config.model.used_kinds)), default=None)
