"""Rough time and memory of a training step from its config: the order in which a search compiles candidates.

Time: FLOPs, bytes and collectives of a layer at the rates of the plan (`TimeModel`), times layers and microbatches.
Kernels hide gathered weights, ring permutes and copies of activations; other communication is exposed. Memory: state
and saved activations, whose bytes are exact, and the working set of a layer. Nothing is fitted: what was compiled
corrects the rest (`best_first`), and the answer is always a compiled step.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from jaxlc.config import Config
from jaxlc.config.checks.mesh_checks import num_head_ranks
from jaxlc.config.schema import TENSOR_NAMES, MemoryConfig
from jaxlc.config.trained_params import FROZEN_BYTES, num_adapter_params, num_frozen_params
from jaxlc.core.errors import UserError
from jaxlc.core.flops import causal_pairs, num_params
from jaxlc.hlo.collectives import Groups
from jaxlc.hlo.kernel_costs import Product
from jaxlc.plan.memory import USABLE_HOST_SHARE, USABLE_SHARE
from jaxlc.runtime.memory_pools import activation_bytes, pinned_host_bytes
from jaxlc.simulate.packed_work import num_ring_steps
from jaxlc.simulate.roofline import Roofline
from jaxlc.simulate.time_model import TimeModel
from jaxlc.simulate.topology import Topology, make_mesh
from jaxlc.step.remat import saves_attention
from jaxlc.step.step import build_step

_PRODUCTS = ("query", "key", "value", "attention_projected", "mlp_gate", "mlp_up", "mlp_down")  # down: never recomputed
_LOSS_CHUNK_TOKENS = 2048  # with memory.loss_chunk_tokens=0: the middle of its three values


class Estimate(NamedTuple):
    """Of one step. Bytes are per GPU; those of the host per node."""

    step_seconds: float
    exact_bytes: float  # state and saved activations
    working_bytes: float  # the layer that is computed, gathered weights and the loss; buffers of libraries are missing
    host_bytes_per_node: float  # with the staging of a checkpoint
    uses_host: bool = False

    def fits(self, gpus: Topology, working_ratio: float = 1.0) -> bool:
        """Whether it fits, if `working_bytes` are wrong by a factor of `working_ratio`."""
        device_bytes = self.exact_bytes + working_ratio * self.working_bytes
        fits_host = self.host_bytes_per_node <= USABLE_HOST_SHARE * gpus.host_memory_bytes_per_node
        return fits_host and device_bytes <= USABLE_SHARE * gpus.device.memory_bytes


class Rates:
    """Seconds of matrix products, and attention kernels, on some GPUs; each is computed once."""

    def __init__(self, gpus: Topology, roofline: Roofline):
        self.gpus, self.roofline = gpus, roofline
        self._products: dict[tuple[int, int, int], float] = {}
        self._kernels: dict[tuple, Mapping[str, str] | None] = {}

    def product_seconds(self, rows: float, columns: float, depth: float) -> float:
        """The product of [rows, depth] and [depth, columns] in bfloat16."""
        shape = (max(1, int(rows)), max(1, int(columns)), max(1, int(depth)))
        if shape not in self._products:
            product = Product("bf16", *shape)
            self._products[shape] = self.roofline.matmul_seconds(self.gpus.device, "bf16", product.flops, (product,))
        return self._products[shape]

    def kernels(self, config: Config) -> Mapping[str, str] | None:
        """The attention kernel of each kind of layers; None if the requested one is unsupported."""
        attention, mesh = config.attention, config.mesh
        values = config.tokens_per_step * config.model.num_heads * config.model.head_dim
        values //= config.train.gradient_accumulation_steps * mesh.num_devices
        key = (attention.strategy, values >= 2**31)  # more than cuDNN's offsets
        if key not in self._kernels:
            self._kernels[key] = self._selected(config)
        return self._kernels[key]

    def _selected(self, config: Config) -> Mapping[str, str] | None:
        try:
            kernels = build_step(config, make_mesh(self.gpus, config.mesh)).kernels
        except UserError:
            return None
        packed = "_packed" if config.attention.document_mask else ""
        return {kind: x.name + packed if x.name == "cudnn" else x.name for kind, x in kernels.items()}


class Layout:
    """A mesh, a strategy and microbatches; estimates the step with any settings of memory."""

    def __init__(self, config: Config, rates: Rates, kernels: Mapping[str, str]):
        self.config, self.rates, self.kernels = config, rates, kernels
        self.gpus, self.roofline = rates.gpus, rates.roofline
        model, mesh, train = config.model, config.mesh, config.train
        self.model = TimeModel(self.gpus, config, self.roofline)
        self.num_sequences = train.global_batch_size // (train.gradient_accumulation_steps * mesh.data * mesh.fsdp)
        self.tokens = self.num_sequences * config.data.seq_len / mesh.context
        self.num_shards = mesh.fsdp * mesh.context * mesh.tensor
        self.num_frozen = num_frozen_params(model, config.lora, train)
        self.num_trained = num_params(model) - self.num_frozen + num_adapter_params(model, config.lora)
        self.query_dim = model.num_heads * model.head_dim / mesh.tensor
        self.key_dim = max(model.num_kv_heads / mesh.tensor, 1) * model.head_dim
        self.head_params = model.model_dim * model.vocab_size / mesh.tensor
        self.attention: dict[int, tuple[float, float]] = {}
        self.products: dict[int, _Products] = {}
        self.gather_seconds, self.reduce_seconds, self.exchange_seconds, self.hop_seconds, self.tensor_seconds = (
            self._collectives()
        )

    def estimate(self, memory: MemoryConfig) -> Estimate:
        gpus_per_node = min(self.gpus.gpus_per_node, self.gpus.num_gpus)
        config = dataclasses.replace(self.config, memory=memory)
        pinned_bytes, staging_bytes = pinned_host_bytes(config), 12 * self.num_trained / self.num_shards
        return Estimate(
            self._step_seconds(memory),
            self._exact_bytes(config),
            self._working_bytes(config),
            gpus_per_node * (pinned_bytes + staging_bytes),
            uses_host=pinned_bytes > 0,
        )

    def _exact_bytes(self, config: Config) -> float:
        """Parameters, gradients, moments and saved activations on the GPU."""
        memory = config.memory
        state = (8 * self.num_trained + FROZEN_BYTES[config.precision.frozen] * self.num_frozen) * (
            memory.parameters == "device"
        )
        state += 8 * self.num_trained * (memory.optimizer == "device")
        group = memory.layers_per_remat_group
        saved = {"residual"} if group > 1 else _saved(memory)
        activations = activation_bytes(config, saved - {*memory.offload}, config.model.num_layers // group)
        # Without remat also what is between the named tensors: norms, activation functions.
        return state / self.num_shards + activations * (2 if memory.remat == "none" else 1)

    def _working_bytes(self, config: Config) -> float:
        """Values and gradients of the layers that are computed, the gathered output head with its gradient, logits."""
        memory, mesh = config.memory, config.mesh
        share = min(memory.tile_tokens / self.tokens, 1) if memory.tile_tokens else 1
        whole = ("residual", "key", "value")  # of all tokens, also with tiles
        tiled = [name for name in TENSOR_NAMES if name not in whole]
        layer = 2 * activation_bytes(config, whole, 1) + 2 * share * activation_bytes(config, tiled, 1)
        chunk = memory.loss_chunk_tokens or _LOSS_CHUNK_TOKENS
        logits = 2 * 4 * chunk * config.model.vocab_size / mesh.tensor
        return layer * memory.layers_per_remat_group + 6 * self.head_params + logits

    def _step_seconds(self, memory: MemoryConfig) -> float:
        config, device = self.config, self.gpus.device
        tile, group = memory.tile_tokens, memory.layers_per_remat_group
        if tile not in self.products:
            self.attention[tile], self.products[tile] = self._attention_seconds(tile), self._product_seconds(tile)
        (forward, backward), products = self.attention[tile], self.products[tile]
        is_saved = memory.remat == "none" or saves_attention(memory)
        reruns = (0.0 if is_saved else 1.0) + (1 - 1 / group if not is_saved else float(group > 1))
        recomputed = sum(products.forward[name] for name in _PRODUCTS[:-1] if name not in _saved(memory))
        all_forward = sum(products.forward.values())
        recomputed += (1 - 1 / group) * all_forward
        attention = (1 + reruns) * forward + backward
        kernels = attention + all_forward + recomputed + products.backward + self._merge_seconds(tile, reruns)
        exposed = (3 + reruns) * self.exchange_seconds + 4 * (2 + recomputed / all_forward) * self.tensor_seconds
        exposed += max(0.0, self.reduce_seconds - kernels)
        hidden = {self.gather_seconds: kernels, (4 + reruns) * self.hop_seconds: attention}
        for seconds, kernel_seconds in hidden.items():
            exposed += max(0.0, seconds - kernel_seconds)
            if config.runtime.transport == "nccl":
                kernels += min(seconds, kernel_seconds) * (1 - self.roofline.compute_share_during_nccl(device))
        layers = config.model.num_layers * (kernels + exposed)
        layers += max(0.0, 2 * self.roofline.host_seconds(device, self._offloaded_bytes(memory)) - layers)
        per_shard = self.num_trained / self.num_shards
        # float32: each microbatch adds its gradients to a sum; the update reads and writes parameters and moments.
        num_microbatches = config.train.gradient_accumulation_steps
        sums = self.roofline.memory_seconds(device, 3 * 4 * per_shard)
        update = self.roofline.memory_seconds(device, 7 * 4 * per_shard)
        update += self.roofline.host_seconds(device, 2 * 8 * per_shard) * (memory.optimizer == "host")
        if memory.parameters == "host":
            update += self.roofline.host_seconds(device, 4 * 4 * per_shard)
            sums += self.roofline.host_seconds(device, (3 if num_microbatches > 1 else 0) * 4 * per_shard)
        return num_microbatches * (layers + self._loss_seconds(memory) + sums) + update

    def _offloaded_bytes(self, memory: MemoryConfig) -> float:
        group = memory.layers_per_remat_group
        names = memory.offload if group == 1 else ("residual",) if memory.offload else ()
        return activation_bytes(self.config, names, self.config.model.num_layers // group)

    def _attention_seconds(self, tile_tokens: int) -> tuple[float, float]:
        """Forward and backward of an attention layer, the mean over the kinds of layers."""
        config, model = self.config, self.config.model
        steps = num_ring_steps(config)
        num_keys = tile_tokens // 2 if tile_tokens else config.data.seq_len / steps
        totals = [0.0, 0.0]
        for kind, kernel in self.kernels.items():
            window = model.window_of(kind)
            pairs = self.num_sequences * causal_pairs(config.data.seq_len, window) / config.mesh.context
            layers = model.num_layers_of(kind) / model.num_layers
            # Products of a pair: 2 forward; 5 backward, of which pallas computes two twice.
            for is_backward, products in enumerate((2, 7 if kernel == "pallas" else 5)):
                for is_masked, share in ((True, 1 / steps), (False, 1 - 1 / steps)):
                    totals[is_backward] += layers * self.roofline.attention_seconds(
                        self.gpus.device,
                        kernel,
                        is_backward=bool(is_backward),
                        flops=share * 2 * products * self.query_dim * pairs,
                        num_keys=min(num_keys, window or num_keys),
                        head_dim=model.head_dim,
                        is_masked=is_masked and not tile_tokens,
                    )
        return totals[0], totals[1]

    def _product_seconds(self, tile_tokens: int) -> "_Products":
        """Matrix products of a layer with its weights."""
        model, tensor = self.config.model, self.config.mesh.tensor
        rows = min(tile_tokens or self.tokens, self.tokens)
        features = (self.query_dim, self.key_dim, self.key_dim, model.model_dim, *2 * [model.ffn_dim / tensor])
        depths = (*3 * [model.model_dim], self.query_dim, *2 * [model.model_dim])
        shapes = zip(_PRODUCTS, (*features, model.model_dim), (*depths, model.ffn_dim / tensor), strict=True)
        is_trained = self.num_trained / (self.num_trained + self.num_frozen)
        forward, backward, count, product = {}, 0.0, self.tokens / rows, self.rates.product_seconds
        for name, columns, depth in shapes:
            forward[name] = count * product(rows, columns, depth)
            backward += count * (product(rows, depth, columns) + is_trained * product(depth, columns, rows))
        return _Products(forward, backward)

    def _loss_seconds(self, memory: MemoryConfig) -> float:
        """The output head of a microbatch, chunk by chunk; each reads and writes the head's float32 gradient."""
        chunk, model = memory.loss_chunk_tokens or _LOSS_CHUNK_TOKENS, self.config.model
        vocab = model.vocab_size / self.config.mesh.tensor
        shapes = ((chunk, vocab, model.model_dim), (chunk, model.model_dim, vocab), (model.model_dim, vocab, chunk))
        products = sum(self.rates.product_seconds(*shape) for shape in shapes)
        traffic = self.roofline.memory_seconds(self.gpus.device, 2 * 4 * self.head_params)
        return self.tokens / chunk * (products + traffic)

    def _merge_seconds(self, tile_tokens: int, reruns: float) -> float:
        """Partial results in float32 of ring steps or tiles of keys: two are read and one is written."""
        num_merges = num_ring_steps(self.config) - 1.0
        if tile_tokens:
            num_merges += self.config.data.seq_len / tile_tokens  # half of the tiles of keys, in zigzag order
        features = (1 + reruns) * self.query_dim + self.query_dim + 2 * self.key_dim  # output; gradients of q, k, v
        return self.roofline.memory_seconds(self.gpus.device, num_merges * 3 * 4 * features * self.tokens)

    def _collectives(self) -> tuple[float, float, float, float, float]:
        """Seconds per layer: gathered weights, gradients over data, exchanges, hops, transfers over tensor."""
        config, mesh = self.config, self.config.mesh
        ranks, steps = num_head_ranks(config), num_ring_steps(config)
        sizes = (mesh.data, mesh.fsdp, mesh.context // ranks, ranks, mesh.tensor)
        model = config.model
        layer_params = model.model_dim * (2 * self.query_dim + 2 * self.key_dim + 3 * model.ffn_dim / mesh.tensor)

        def seconds(kind: str, axes: tuple[int, ...], num_bytes: float) -> float:
            size = math.prod(sizes[axis] for axis in axes)
            groups = _groups(sizes, axes, kind == "collective-permute")
            return self.model.group_seconds(kind, groups, num_bytes * (size - 1) / size)[0] if size > 1 else 0.0

        gather = seconds("all-gather", (1, 2, 3), 2 * layer_params)
        reductions = seconds("all-reduce", (0, 1, 2, 3), 2 * 2 * layer_params) if mesh.data > 1 else 0.0
        keys = 2 * 2 * self.tokens * self.key_dim
        exchange = seconds("all-to-all", (3,), 2 * self.tokens * (2 * self.query_dim + 2 * max(
            self.key_dim, model.head_dim * ranks)))  # fmt: skip
        if config.attention.strategy == "all_gather":
            exchange = seconds("all-gather", (2,), keys * mesh.context)
        hop = (steps - 1) * self.model.group_seconds("collective-permute", _groups(sizes, (2,), True), keys)[0]
        transfer = seconds("all-gather", (4,), 2 * self.tokens * model.model_dim)
        return (3 if mesh.data == 1 else 2) * gather, reductions, exchange, hop if steps > 1 else 0.0, transfer


class _Products(NamedTuple):
    forward: dict[str, float]  # by the name of the result
    backward: float


@functools.cache
def _groups(sizes: tuple[int, ...], axes: tuple[int, ...], is_permute: bool) -> Groups:
    """Device numbers along these axes of a mesh; of a permute, pairs of neighbors."""
    devices = np.arange(math.prod(sizes)).reshape(sizes)
    groups = np.moveaxis(devices, axes, range(-len(axes), 0)).reshape(-1, math.prod(sizes[axis] for axis in axes))
    if is_permute:
        groups = np.stack([groups, np.roll(groups, -1, axis=1)], axis=-1).reshape(-1, 2)
    return tuple(map(tuple, groups.tolist()))


def _saved(memory: MemoryConfig) -> set[str]:
    """Names of the activations of each layer that are not recomputed."""
    if memory.remat in ("none", "matmuls"):
        return {*TENSOR_NAMES}
    kept = {"residual", *memory.save, *memory.offload}
    return kept | ({"attention_out", "attention_lse"} if saves_attention(memory) else set())
