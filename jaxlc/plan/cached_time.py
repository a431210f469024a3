"""Estimated time of attention over a KV cache, whose length the compiled program does not contain."""

from dataclasses import dataclass, field

from jaxlc.hlo.attention_kernels import AttentionKernelCall
from jaxlc.simulate.time_model import TimeModel


@dataclass(frozen=True, kw_only=True)
class CachedWork:
    """A chunk of new tokens and the cache on one rank, the same for all layers of a kind."""

    num_past: int  # tokens of each sequence in the cache
    num_new: int  # tokens of each sequence, without padding
    batch_size: int  # sequences on a rank
    num_heads: int  # query heads on a rank
    num_kv_heads: int
    head_dim: int
    num_ranks: int  # ranks of the context axis
    window: int
    cache_itemsize: int

    def pairs(self, has_window: bool) -> float:
        """Pairs of a query and a key that a rank computes for one sequence and head.

        Without a window, all queries attend to the keys of each rank, whose shares are equal up to a block. With a
        window, each rank has its own queries.
        """
        first, last = self.num_past + 1, self.num_past + self.num_new  # keys of the first and of the last query
        if not has_window:
            return self.num_new * (first + last) / 2 / self.num_ranks
        num_growing = max(0, min(last, self.window) - first + 1)  # queries with fewer keys than the window
        growing = num_growing * (2 * first + num_growing - 1) / 2
        return (growing + (self.num_new - num_growing) * self.window) / self.num_ranks

    def key_value_bytes(self, has_window: bool) -> float:
        """Bytes of the keys and values that a rank reads once."""
        num_tokens = self.num_past + self.num_new
        num_keys = min(num_tokens, self.window + self.num_new) if has_window else num_tokens / self.num_ranks
        return 2.0 * self.batch_size * num_keys * self.num_kv_heads * self.head_dim * self.cache_itemsize


@dataclass(frozen=True)
class CachedTimeModel(TimeModel):
    """A `TimeModel` of a program of generation. Its attention kernels read the cache at least once."""

    cached_work: CachedWork = field(kw_only=True)

    def attention_flops(self, call: AttentionKernelCall) -> float:
        """FLOPs of the pairs of a query and a key that the mask leaves: two matrix products per pair."""
        work = self.cached_work
        return 4.0 * work.head_dim * work.num_heads * work.batch_size * work.pairs(call.has_window)

    def attention_seconds(self, call: AttentionKernelCall) -> float:
        """The larger of the compute time and the time to read keys and values, as in decoding."""
        read_seconds = self.roofline.memory_seconds(self.gpus.device, self.cached_work.key_value_bytes(call.has_window))
        return max(super().attention_seconds(call), read_seconds)
