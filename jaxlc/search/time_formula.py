"""Estimated time of a training step from its config, without a compiler: orders the candidates of a search.

The rates are those of the plan (`TimeModel`); the schedule is replaced by formulas: kernels of a layer, times layers,
times microbatches, plus the communication that they do not hide. The compiled step decides: `tests/plan` compares the
formula with it.
"""

from collections.abc import Mapping
from typing import NamedTuple

from jaxlc.config import Config
from jaxlc.config.checks.mesh_checks import num_head_ranks
from jaxlc.core.flops import causal_pairs
from jaxlc.core.hardware import Device
from jaxlc.hlo.kernel_costs import Product
from jaxlc.search.memory_formula import saved_bytes_per_token
from jaxlc.search.sizes import Sizes, sizes_of
from jaxlc.simulate.efficiency import num_steps
from jaxlc.simulate.packed_work import num_ring_steps
from jaxlc.simulate.roofline import Roofline
from jaxlc.simulate.topology import Topology
from jaxlc.step.remat import saves_attention


class TimeEstimate(NamedTuple):
    """Seconds per optimizer step by kind."""

    attention: float
    products: float  # matrix products
    other_kernels: float
    communication: float  # exposed
    host_copies: float  # exposed

    @property
    def step_seconds(self) -> float:
        return sum(self)


class ProductTimes:
    """Seconds of matrix products on a GPU; each shape is computed once, because many candidates share it."""

    def __init__(self, device: Device, roofline: Roofline):
        self._device, self._roofline = device, roofline
        self._seconds: dict[tuple[int, int, int], float] = {}

    def __call__(self, rows: float, columns: float, depth: float) -> float:
        """Seconds of the product of [rows, depth] and [depth, columns] in bfloat16."""
        shape = (max(1, int(rows)), max(1, int(columns)), max(1, int(depth)))
        if shape not in self._seconds:
            product = Product("bf16", *shape)
            self._seconds[shape] = self._roofline.matmul_seconds(self._device, "bf16", product.flops, (product,))
        return self._seconds[shape]


def estimate_time(
    config: Config, gpus: Topology, roofline: Roofline, kernels: Mapping[str, str], products: ProductTimes | None = None
) -> TimeEstimate:
    """Time of one optimizer step in which each sequence is one document.

    Args:
      kernels: attention kernel of each kind of layers, such as {"full": "cudnn"}.
      products: for these GPUs, shared by several calls.
    """
    return _Formula(config, gpus, roofline, kernels, products or ProductTimes(gpus.device, roofline)).total()


class _Formula:
    def __init__(
        self,
        config: Config,
        gpus: Topology,
        roofline: Roofline,
        kernels: Mapping[str, str],
        product_seconds: ProductTimes,
    ):
        self.config, self.gpus, self.roofline, self.kernels = config, gpus, roofline, kernels
        self.product_seconds = product_seconds
        self.sizes: Sizes = sizes_of(config)
        memory = config.memory
        group = memory.layers_per_remat_group
        # Forward passes of a layer in the backward pass of a step: of attention, of the rest of the layer.
        is_saved = memory.remat == "none" or saves_attention(memory)
        self.attention_reruns = float(not is_saved) + ((group - 1) / group if not is_saved else float(group > 1))
        self.layer_reruns = _RERUNS[memory.remat] + (group - 1) / group

    def total(self) -> TimeEstimate:
        sizes, num_layers = self.sizes, self.config.model.num_layers
        passes = sizes.num_microbatches * num_layers
        attention = sizes.num_microbatches * sum(
            self.config.model.num_layers_of(kind) * self._attention_seconds(kind) for kind in self.kernels
        )
        products = passes * self._layer_product_seconds()
        head = sizes.num_microbatches * self._head_product_seconds()
        others = passes * self._other_seconds() + self._head_traffic_seconds() + self._update_seconds()
        communication = passes * self._communication_seconds(attention / passes, products / passes)
        return TimeEstimate(attention, products + head, others, communication, self._host_seconds(attention + products))

    def _attention_seconds(self, kind: str) -> float:
        """Attention kernels of one layer, forward and backward."""
        model, mesh, sizes = self.config.model, self.config.mesh, self.sizes
        window = model.window_of(kind)
        pairs = sizes.num_sequences * causal_pairs(self.config.data.seq_len, window) / mesh.context
        forward = 4 * sizes.query_dim * pairs
        # 5 matrix products instead of 2; pallas computes two of them twice, for dq and for dk and dv.
        backward = (3.5 if self.kernels[kind] == "pallas" else 2.5) * forward
        steps, tile_tokens = num_ring_steps(self.config), self.config.memory.tile_tokens
        num_keys = tile_tokens // 2 if tile_tokens else self.config.data.seq_len / steps
        options = dict(num_keys=min(num_keys, window or num_keys), head_dim=model.head_dim)
        seconds = 0.0
        for is_masked, share in ((True, 1 / steps), (False, 1 - 1 / steps)):
            for is_backward, flops in ((False, forward * (1 + self.attention_reruns)), (True, backward)):
                seconds += self.roofline.attention_seconds(
                    self.gpus.device, self.kernels[kind], is_backward=is_backward, flops=share * flops,
                    is_masked=is_masked and not tile_tokens, **options,
                )  # fmt: skip
        return seconds

    def _layer_product_seconds(self) -> float:
        """Matrix products of one layer, forward, backward and recomputed."""
        sizes, model_dim = self.sizes, self.config.model.model_dim
        rows = min(self.config.memory.tile_tokens or sizes.tokens, sizes.tokens)
        shapes = 2 * [(model_dim, sizes.key_dim)] + 2 * [(model_dim, sizes.ffn_dim)]
        shapes += [(model_dim, sizes.query_dim), (sizes.query_dim, model_dim), (sizes.ffn_dim, model_dim)]
        forward = sum(self.product_seconds(rows, columns, depth) for depth, columns in shapes)
        of_inputs = sum(self.product_seconds(rows, depth, columns) for depth, columns in shapes)
        of_weights = sum(self.product_seconds(depth, columns, rows) for depth, columns in shapes)
        seconds = (1 + self.layer_reruns) * forward + of_inputs + sizes.trained_share * of_weights
        return sizes.tokens / rows * seconds

    def _head_product_seconds(self) -> float:
        """Logits of a microbatch and their gradients, chunk by chunk."""
        sizes, model_dim = self.sizes, self.config.model.model_dim
        vocab = sizes.head_params / model_dim
        chunk = self._loss_chunk_tokens()
        shapes = ((chunk, vocab, model_dim), (chunk, model_dim, vocab), (model_dim, vocab, chunk))
        return sizes.tokens / chunk * sum(self.product_seconds(*shape) for shape in shapes)

    def _loss_chunk_tokens(self) -> int:
        return self.config.memory.loss_chunk_tokens or 2048

    def _other_seconds(self) -> float:
        """Memory-bound kernels of one layer, forward and backward."""
        sizes, config = self.sizes, self.config
        per_token = 2 * (
            _RESIDUAL_PASSES * sizes.residual_dim * (1 + 0.4 * self.layer_reruns)
            + _FFN_PASSES * sizes.ffn_dim
            + _HEAD_PASSES * (sizes.query_dim + 2 * sizes.key_dim)
        )
        steps = num_ring_steps(self.config)
        merges = (steps - 1) * (_MERGE_PASSES * (1 + self.attention_reruns) + _MERGE_BACKWARD_PASSES) * sizes.query_dim
        if config.memory.tile_tokens:
            num_key_tiles = 2 * config.data.seq_len / config.memory.tile_tokens  # of zigzag order
            passes = _TILE_PASSES * (1 + self.attention_reruns) + _TILE_BACKWARD_PASSES
            merges += passes * (num_key_tiles + 1) / 2 * sizes.query_dim
        if config.memory.remat in ("none", "matmuls"):
            per_token += _SAVED_PASSES * saved_bytes_per_token(config, sizes)
        return self.roofline.memory_seconds(self.gpus.device, (per_token + 2 * merges) * sizes.tokens)

    def _head_traffic_seconds(self) -> float:
        """The float32 gradient of the output head is read and written for each chunk of the loss."""
        sizes = self.sizes
        num_chunks = sizes.num_microbatches * sizes.tokens / self._loss_chunk_tokens()
        logits = sizes.num_microbatches * sizes.tokens * 5 * 4 * sizes.head_params / self.config.model.model_dim
        return self.roofline.memory_seconds(self.gpus.device, num_chunks * 8 * sizes.head_params + logits)

    def _update_seconds(self) -> float:
        sizes = self.sizes
        num_bytes = (28 + 12 * sizes.num_microbatches) * sizes.num_trained / sizes.num_shards
        return self.roofline.memory_seconds(self.gpus.device, num_bytes)

    def _host_seconds(self, layers_seconds: float) -> float:
        """Exposed copies: those of the update, and activations that take longer than the layers."""
        sizes, memory, device = self.sizes, self.config.memory, self.gpus.device
        copy = lambda num_bytes: self.roofline.host_seconds(device, num_bytes)
        per_shard = sizes.num_trained / sizes.num_shards
        seconds = 0.0
        if memory.optimizer == "host":
            seconds += copy(16 * per_shard)
        if memory.parameters == "host":
            seconds += copy(26 * per_shard)
            if sizes.num_microbatches > 1:  # each adds its gradients to the sum on the host
                seconds += copy(12 * sizes.num_microbatches * per_shard)
        per_token = sum(
            {"residual": 2 * sizes.residual_dim, "attention_out": 2 * sizes.query_dim}.get(name, 0.0)
            for name in memory.offload
        )
        if per_token:
            layer_bytes = per_token * sizes.tokens / memory.layers_per_remat_group
            num_layers = self.config.model.num_layers * sizes.num_microbatches
            copies = 2 * num_layers * copy(layer_bytes)
            seconds += max(_EXPOSED_COPIES * copies, copies - layers_seconds)
        return seconds

    def _communication_seconds(self, attention: float, products: float) -> float:
        """Communication of one layer, forward and backward: what kernels do not hide, and what it slows them down."""
        config, sizes, mesh = self.config, self.sizes, self.config.mesh
        exposed = total = 0.0
        kernels = attention + products
        if mesh.tensor > 1:
            share = (mesh.tensor - 1) / mesh.tensor
            num_bytes = share * sizes.tokens * config.model.model_dim * 2
            seconds = self._link_seconds(num_bytes, mesh.tensor, stride=1, kind="all-gather")
            exposed += (_TENSOR_TRANSFERS + 3 * self.layer_reruns) * seconds
        if sizes.gather_ranks > 1:
            share = (sizes.gather_ranks - 1) / sizes.gather_ranks
            num_bytes = 2 * share * sizes.layer_params
            options = dict(num_ranks=sizes.gather_ranks, stride=mesh.tensor, kind="all-gather")
            gather = self._layer_link_seconds(num_bytes, **options)
            gathers = (3 if mesh.data == 1 else 2) * gather  # with data, an all-reduce instead of a reduce-scatter
            # Collectives over tensor wait for those that gather weights, since all run on one stream.
            share = _EXPOSED_GATHERS + _EXPOSED_GATHERS_BY_LOAD * gathers / kernels
            if mesh.tensor > 1:
                share = _EXPOSED_GATHERS_WITH_TENSOR
            exposed += max(min(1.0, share) * gathers, gathers - kernels)
            total += gathers
        reductions = self._data_reduction_seconds()
        exposed += max(_EXPOSED_REDUCTIONS * reductions, reductions - kernels)
        total += reductions
        exchanged, hops, exposed_hops = self._attention_communication(attention)
        exposed += _EXPOSED_EXCHANGES * exchanged + exposed_hops
        total += exchanged
        if config.runtime.transport == "nccl":  # the others copy without occupying multiprocessors
            total += hops
        hidden_seconds = max(0.0, total - exposed)
        return exposed + hidden_seconds * (1 - self.roofline.compute_share_during_nccl(self.gpus.device))

    def _data_reduction_seconds(self) -> float:
        """All-reduces of the gradients of one layer, one for each weight; only with data."""
        sizes, mesh = self.sizes, self.config.mesh
        if mesh.data == 1:
            return 0.0
        num_ranks = mesh.data * sizes.gather_ranks
        options = dict(num_ranks=num_ranks, stride=mesh.tensor, kind="all-reduce")
        num_bytes = 4 * (num_ranks - 1) / num_ranks * sizes.layer_params
        return self._layer_link_seconds(num_bytes, **options)

    def _layer_link_seconds(self, num_bytes: float, **options) -> float:
        """Collectives of `num_bytes` in total, one for each weight of a layer."""
        return self._link_seconds(num_bytes, **options) + (_WEIGHTS_OF_LAYER - 1) * self._link_seconds(0, **options)

    def _attention_communication(self, attention: float) -> tuple[float, float, float]:
        """Of one attention layer over context: exchanges and gathers, hops, exposed hops."""
        config, sizes, mesh = self.config, self.sizes, self.config.mesh
        ranks = num_head_ranks(config)
        forwards = 1 + self.attention_reruns
        exchanged = hops = exposed = 0.0
        if config.attention.strategy == "all_gather" and mesh.context > 1:
            num_bytes = 4 * (mesh.context - 1) * sizes.tokens * sizes.key_dim
            seconds = self._link_seconds(num_bytes, mesh.context, stride=mesh.tensor, kind="all-gather")
            exchanged += (forwards + 2) * seconds
        if ranks > 1:
            keys = max(sizes.key_dim, config.model.head_dim * ranks)  # repeated where ranks exceed the heads
            num_bytes = 2 * (ranks - 1) / ranks * sizes.tokens * (2 * sizes.query_dim + 2 * keys)
            exchanged += (forwards + 2) * self._link_seconds(num_bytes, ranks, stride=mesh.tensor, kind="all-to-all")
        steps = num_ring_steps(self.config)
        if steps > 1:
            num_bytes, members = 4 * sizes.tokens * sizes.key_dim, mesh.context // ranks
            hop = self._link_seconds(num_bytes, members, stride=mesh.tensor * ranks, kind="collective-permute")
            hops = (steps - 1) * (forwards + 3) * hop
            exposed += max((1 - _HIDDEN_HOPS) * hops, hops - attention)
        if config.memory.tile_tokens:
            exposed += _EXPOSED_TILES * (max(1.0, sizes.tokens / config.memory.tile_tokens) - 1) * hops
        return exchanged, hops, exposed

    def _link_seconds(self, num_bytes: float, num_ranks: int, *, stride: int, kind: str) -> float:
        """A collective of `num_ranks` GPUs that are `stride` apart; as `TimeModel.collective_seconds`."""
        gpus, latency_steps = self.gpus, num_steps(kind, num_ranks)
        seconds = self.roofline.nvlink_seconds(gpus.device, num_bytes, latency_steps)
        if num_ranks * stride <= gpus.gpus_per_domain:
            return seconds
        inside = max(1, gpus.gpus_per_domain // stride)  # members in one NVLink domain
        crossing = {"collective-permute": 1.0, "all-to-all": (num_ranks - inside) / max(1, num_ranks - 1)}
        crossing_bytes = crossing.get(kind, 1 / inside) * num_bytes
        return max(seconds, self.roofline.network_seconds(gpus.device, crossing_bytes, latency_steps))


# Fitted to compiled steps (benchmarks/recommendations.py compares them). Forward passes of matrix products in the
# backward pass, by memory.remat.
_RERUNS = {"none": 0.0, "matmuls": 0.0, "attention": 0.75, "full": 0.75}
_SAVED_PASSES = 3.5  # over saved activations, which are copied into and out of the arrays of all layers
# Passes over arrays of a layer in memory-bound kernels, forward and backward.
_RESIDUAL_PASSES = 40.0
_FFN_PASSES = 14.0
_HEAD_PASSES = 12.0
_MERGE_PASSES = 12.0
_MERGE_BACKWARD_PASSES = 22.0
_TILE_PASSES = 13.0
_TILE_BACKWARD_PASSES = 21.0
_TENSOR_TRANSFERS = 8.0
_EXPOSED_GATHERS = 0.08
_EXPOSED_GATHERS_BY_LOAD = 0.5  # times the ratio of their time to that of the kernels
_EXPOSED_GATHERS_WITH_TENSOR = 0.5
_EXPOSED_COPIES = 0.5
_EXPOSED_EXCHANGES = 0.4
_HIDDEN_HOPS = 0.97
_EXPOSED_REDUCTIONS = 0.42
_WEIGHTS_OF_LAYER = 7
_EXPOSED_TILES = 0.6
