"""Estimated time of single kernels and transfers of a training step: a `Roofline` on the GPUs of a
`Topology`.
"""

import math
from collections import Counter
from dataclasses import dataclass

from jaxlc.config import Config, ModelConfig
from jaxlc.config.kinds.attention import num_head_ranks
from jaxlc.core.scopes import RING_STEP, SHARED_PREFIX
from jaxlc.hlo.collectives import Collective, Groups
from jaxlc.hlo.kernel_costs import AttentionCollective, AttentionKernelCall, Cost
from jaxlc.hlo.parser import Instruction, Program, is_data_dependent, is_in, trip_count
from jaxlc.simulate.packed_work import AttentionWork, num_shards, one_document
from jaxlc.simulate.roofline import Roofline, num_steps
from jaxlc.simulate.topology import Topology

DEFAULT_ROOFLINE = Roofline()
# Transports whose transfers within an NVLink domain are copies by copy engines, or puts without a
# kernel.
_COPY_ENGINES = ("nvshmem", "symmetric", "peer")


@dataclass(frozen=True)
class TimeModel:
    """Used by the simulator, by the plan's ring section and by the benchmarks, so that all
    estimates agree.
    """

    gpus: Topology
    config: Config
    roofline: Roofline = DEFAULT_ROOFLINE
    # work of packed sequences; None: each sequence is one document
    work: AttentionWork | None = None

    def attention_flops(self, call: AttentionKernelCall) -> float:
        """FLOPs of one run of an attention kernel, without those that its mask skips."""
        return call.full_flops * visible_fraction(call, self.config, self.work)

    def num_rounds(self, program: Program, loop: Instruction) -> float:
        """Rounds of a loop in one run; those over further documents are a mean. Raises ValueError
        as `trip_count`.
        """
        if not is_data_dependent(loop.op_name):
            return trip_count(program, loop)
        if self.work is None or is_in(loop.op_name, SHARED_PREFIX):  # one call takes two trees
            return 0
        is_ring_step = is_in(loop.op_name, RING_STEP)
        return self.work.ring_step_further_calls if is_ring_step else self.work.own_further_calls

    def attention_seconds(self, call: AttentionKernelCall) -> float:
        return self.roofline.attention_seconds(
            self.gpus.device,
            call.kernel,
            is_backward=call.is_backward,
            flops=self.attention_flops(call),
            num_keys=call.sizes.num_keys if call.sizes else math.inf,
            head_dim=call.head_dim,
            is_masked=call.is_masked,
        )

    def kernel_seconds(self, cost: Cost) -> tuple[float, str]:
        """Seconds of a kernel that is not attention, and what bounds it: "compute" or "HBM"."""
        compute = self.roofline.matmul_seconds(
            self.gpus.device, cost.dtype, cost.flops, cost.products
        )
        memory = self.roofline.memory_seconds(self.gpus.device, cost.bytes)
        return max(compute, memory), "compute" if compute > memory else "HBM"

    def collective_seconds(self, collective: Collective, sent_bytes: float) -> tuple[float, str]:
        """Seconds of a collective that sends `sent_bytes` per device, and its link: "NVLink" or
        "network".
        """
        return self.group_seconds(collective.kind, collective.groups, sent_bytes)

    def group_seconds(self, kind: str, groups: Groups, sent_bytes: float) -> tuple[float, str]:
        """As `collective_seconds`, of replica groups.

        A collective that crosses NVLink domains takes as long as the slower of the two links.
        """
        device = self.gpus.device
        roofline = self.roofline
        steps = num_steps(kind, len(groups[0]))
        seconds = roofline.nvlink_seconds(device, sent_bytes, steps)
        fraction = _crossing_fraction(kind, groups, self.gpus.gpus_per_domain)
        if not fraction:
            return seconds, "NVLink"
        return max(
            seconds, roofline.network_seconds(device, fraction * sent_bytes, steps)
        ), "network"

    def compute_share(self, collective: Collective) -> float:
        """The fraction of the multiprocessors that kernels have while `collective` runs."""
        if collective.transport in _COPY_ENGINES:
            return 1.0
        return self.roofline.compute_share_during_nccl(self.gpus.device)

    def host_copy_seconds(self, num_bytes: int) -> float:
        return self.roofline.host_seconds(self.gpus.device, num_bytes)

    def exchange_seconds(self, exchange: AttentionCollective) -> float:
        """Seconds of a collective of attention, with what overlapping ones send over the same link."""
        return self.collective_seconds(exchange.collective, exchange.link_bytes)[0]

    def overlapped_attention_seconds(self, exchange: AttentionCollective) -> float:
        """Seconds of the attention kernels between start and done of `exchange`."""
        return sum(self.attention_seconds(call) for call in exchange.overlapped_calls)

    def is_hidden_by_attention(self, exchange: AttentionCollective) -> bool:
        """Whether the attention kernels that overlap with `exchange` take at least as long as it
        does.

        This is stricter than the simulator (`timeline.predict`), where all kernels hide
        communication.
        """
        if exchange.is_unoverlapped:
            return False
        return self.overlapped_attention_seconds(exchange) >= self.exchange_seconds(exchange)


def _crossing_fraction(kind: str, groups: Groups, gpus_per_domain: int) -> float:
    """Bytes that each GPU's network card sends, as a fraction of the bytes that the GPU sends; 0
    within one domain.

    A collective permute may leave the domain with all its bytes. An all-to-all sends to members
    outside what is for them. The others pass the same bytes around all members: a domain forwards
    them once, and its members share that.
    """
    domains = [Counter(member // gpus_per_domain for member in group) for group in groups]
    if all(len(members) == 1 for members in domains):
        return 0
    if kind == "collective-permute":
        return 1
    inside = min(min(members.values()) for members in domains)
    size = len(groups[0])
    if "all-to-all" in kind:
        return (size - inside) / (size - 1)
    return 1 / inside


def visible_fraction(
    call: AttentionKernelCall, config: Config, work: AttentionWork | None = None
) -> float:
    """The fraction of a call's pairs of query and key that its mask leaves, on the slowest rank.

    The first of several packed calls counts the pairs of all documents. In tiled layers, masked
    calls without a window are causal or, with config.attention.document_mask, cannot be
    distinguished; most of those are fully visible for one document.

    Args:
      work: of the sequences; None: each sequence is one document.
    """
    if not call.is_masked:
        return 1.0
    if call.has_further_documents:
        return 0.0
    whole = one_document(config)
    work = work or whole
    # calls over prefixes, of which each has the keys of one level
    num_calls = config.attention.shared_prefixes if call.is_over_prefix else 1
    if call.has_window:
        return min(
            1.0, work.window_pairs / (_local_tokens(config) * _num_window_keys(call, config))
        )
    if config.memory.tile_tokens:
        pairs = work.total_of(is_over_prefix=call.is_over_prefix) / num_calls
        return (1.0 if config.attention.document_mask else 0.5) * pairs / whole.total
    pairs = work.ring_step_pairs if call.is_ring_step else work.own_pairs
    if call.is_over_prefix:
        pairs = work.prefix_ring_step_pairs if call.is_ring_step else work.prefix_own_pairs
        pairs /= num_calls
    head_share = _head_share(config)
    shape = shape_of(call, config.model, head_share)
    return min(1.0, pairs * shape.attention.num_heads * head_share / _all_pairs(call, shape))


def shape_of(call: AttentionKernelCall, model: ModelConfig, head_share: float) -> ModelConfig:
    """The settings of the layers of a call: of the first kind with its window and, if there are
    such, its head dim and query heads. Kinds that differ only in their key/value heads are not
    distinguished.

    Args:
      head_share: query heads of a call, times its sequences, divided by the query heads of its layers.
    """
    kinds = [
        kind for kind in model.used_kinds if (model.window_of(kind) is not None) == call.has_window
    ]
    shapes = [model.layer_config(kind) for kind in kinds] or [model]
    num_heads = call.sizes.num_heads if call.sizes else 0
    return min(
        shapes,
        key=lambda x: (
            x.attention.head_dim != call.head_dim,
            x.attention.num_heads * head_share != num_heads,
        ),
    )


def _local_tokens(config: Config) -> float:
    """Tokens of a sequence on a rank, or on a group of ranks that exchange heads for tokens."""
    return config.data.seq_len / num_shards(config)


def _num_window_keys(call: AttentionKernelCall, config: Config) -> float:
    """Keys of a call with a sliding window. Those of a blockwise loop follow from its pairs."""
    if call.sizes is not None:
        return float(call.sizes.num_keys)
    num_queries = _local_tokens(config)
    if config.memory.tile_tokens:  # a sub-chunk of one sequence
        num_queries = (
            config.memory.tile_tokens * num_head_ranks(config) / (2 * num_sequences(config))
        )
    head_share = _head_share(config)
    shape = shape_of(call, config.model, head_share)
    return _all_pairs(call, shape) / (shape.attention.num_heads * head_share * num_queries)


def _head_share(config: Config) -> float:
    """The share of the query heads that a device has in a kernel call, times the sequences of a
    microbatch.
    """
    return num_sequences(config) / (config.mesh.tensor * num_head_ranks(config))


def num_sequences(config: Config) -> float:
    """Sequences of a microbatch of which a rank has a part."""
    train = config.train
    return train.global_batch_size / (train.gradient_accumulation_steps * config.mesh.num_replicas)


def _all_pairs(call: AttentionKernelCall, model: ModelConfig) -> float:
    """Pairs of a query and a key that a call covers, masked ones included, summed over sequences
    and heads.

    Those of a blockwise loop follow from its FLOPs: 2 or 5 matrix products per pair.
    """
    if call.sizes is not None:
        return float(math.prod(call.sizes))
    return call.full_flops / (2.0 * (5 if call.is_backward else 2) * model.attention.head_dim)
