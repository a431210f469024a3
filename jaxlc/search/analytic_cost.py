"""Rough time and memory of a training step from its config: the order in which a search compiles
candidates.

Time: FLOPs, bytes and collectives of a layer at the rates of the plan (`TimeModel`), times layers
and microbatches. Kernels hide gathered weights, ring permutes and copies of activations; other
communication is exposed. Memory: state and saved activations, whose bytes are exact, and the
working set of a layer. Nothing is fitted: what was compiled corrects the rest (`best_first`), and
the answer is always a compiled step.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from jaxlc.config import Config, MemoryConfig
from jaxlc.config.flops import (
    FROZEN_BYTES,
    causal_pairs,
    loss_chunk_tokens,
    product_entries,
    sum_over_layers,
)
from jaxlc.config.kinds import active_ffn_dim, mixer_matrices, mixers_of, tensor_names
from jaxlc.config.kinds.attention import num_head_ranks
from jaxlc.config.models.model_schema import LayerConfig
from jaxlc.config.schema import MATMUL_NAMES
from jaxlc.core import UserError
from jaxlc.hlo.collectives import Groups
from jaxlc.hlo.kernel_costs import Product
from jaxlc.plan.program import USABLE_HOST_SHARE, USABLE_SHARE, host_pools_per_node_bytes
from jaxlc.runtime.memory import host_pool_bytes
from jaxlc.simulate.packed_work import num_ring_steps
from jaxlc.simulate.roofline import Roofline
from jaxlc.simulate.time_model import TimeModel, num_sequences
from jaxlc.simulate.topology import Topology, make_mesh
from jaxlc.step.memory import StateBytes, activation_bytes, pinned_bytes, state_bytes
from jaxlc.step.remat import saves_attention
from jaxlc.step.step import build_step

_TILES_PER_STEP = 2  # keys of a kernel call in layers in tiles, about; see attention/query_tiles.py
# Arrays of activations of a layer that are gathered over tensor: 4.5 and 6.2 in steps of qwen3.5-9b with 1M tokens that
# were compiled with tensor=2 and 4 (8 H100s, JAX 0.10.1).
_GATHERED = 5


class Estimate(NamedTuple):
    """One step. Bytes are per GPU; host memory is per node."""

    step_seconds: float
    exact_bytes: float  # state and saved activations
    # the layer that is computed, gathered weights and the loss; buffers of libraries are missing
    working_bytes: float
    host_bytes_per_node: float  # with the staging of a checkpoint
    # all pools of pinned memory of a node, and a checkpoint; 0: no pools
    host_pools_bytes: float = 0.0

    def fits(self, gpus: Topology, working_ratio: float = 1.0) -> bool:
        """Whether it fits, if `working_bytes` are wrong by a factor of `working_ratio`."""
        device_bytes, host_bytes = usable_memory(gpus)
        fits_device = self.exact_bytes + working_ratio * self.working_bytes <= device_bytes
        return fits_device and self.host_bytes_per_node <= host_bytes


def usable_memory(gpus: Topology) -> tuple[float, float]:
    """Bytes that a step may use: of a GPU, and of the host memory of a node."""
    return (
        USABLE_SHARE * gpus.device.memory_bytes,
        USABLE_HOST_SHARE * gpus.host_memory_bytes_per_node,
    )


class Rates:
    """Seconds of matrix products, and attention kernels, on some GPUs; each is computed once."""

    def __init__(self, gpus: Topology, roofline: Roofline):
        self.gpus, self.roofline = gpus, roofline
        self.product_seconds = functools.cache(self._product_seconds)
        self._kernels: dict[tuple, Mapping[str, str] | None] = {}
        self._states: dict[tuple, StateBytes] = {}

    def _product_seconds(self, rows: float, columns: float, depth: float) -> float:
        """The product of [rows, depth] and [depth, columns] in bfloat16."""
        product = Product("bf16", *(max(1, int(size)) for size in (rows, columns, depth)))
        return self.roofline.matmul_seconds(self.gpus.device, "bf16", product.flops, (product,))

    def kernels(self, config: Config) -> Mapping[str, str] | None:
        """The attention kernel of each kind of layers; None if the requested one is unsupported."""
        shapes = map(config.model.layer_config, config.model.used_kinds)
        values = config.tokens_per_step * max(
            shape.attention.num_heads * shape.attention.head_dim for shape in shapes
        )
        values //= config.train.gradient_accumulation_steps * config.mesh.num_devices
        key = (config.attention.strategy, values >= 2**31)  # more than cuDNN's offsets
        if key not in self._kernels:
            packed = "_packed" if config.attention.document_mask else ""
            try:
                kernels = build_step(config, make_mesh(self.gpus, config.mesh)).kernels
                self._kernels[key] = {
                    k: x.name + packed if x.name in ("cudnn", "fa3") else x.name
                    for k, x in kernels.items()
                }
            except UserError:
                self._kernels[key] = None
        return self._kernels[key]

    def state_bytes(self, config: Config) -> StateBytes:
        """The bytes of the training state per GPU, which depend on the mesh and on the rank of
        adapters.
        """
        key = (config.lora.rank, *vars(config.mesh).values())
        if key not in self._states:
            self._states[key] = state_bytes(config)
        return self._states[key]


class Layout:
    """A mesh, a strategy and microbatches; estimates the step with any settings of memory."""

    def __init__(self, config: Config, rates: Rates, kernels: Mapping[str, str]):
        self.config = config
        self.rates = rates
        self.kernels = kernels
        self.gpus = rates.gpus
        self.roofline = rates.roofline
        model = config.model
        mesh = config.mesh
        train = config.train
        self.model = TimeModel(self.gpus, config, self.roofline)
        self.num_sequences = num_sequences(config)
        self.tokens = self.num_sequences * config.data.seq_len / mesh.context
        self.state = rates.state_bytes(config)
        entries = product_entries(model, config.lora, train)
        self.backward_products = (
            entries.input_gradients + entries.weight_gradients
        ) / entries.forward
        dims = sum_over_layers(model, lambda layer: np.array(_dims_of(layer, config)))
        self.dims = _Dims(*dims / model.num_layers)  # means over the layers
        self.head_params = model.model_dim * model.vocab_size / mesh.tensor
        self.collectives = self._collectives()
        self.attention_seconds = functools.cache(self._attention_seconds)  # by memory.tile_tokens
        self.layer_seconds = functools.cache(self._layer_seconds)

    def estimate(self, memory: MemoryConfig) -> Estimate:
        gpus_per_node = self.gpus.used_gpus_per_node
        config = dataclasses.replace(self.config, memory=memory)
        pinned = pinned_bytes(config, self.state)
        staging_bytes = self.state.trained + self.state.optimizer
        pools_bytes = host_pools_per_node_bytes(
            host_pool_bytes(config.runtime, pinned.pooled), self.gpus
        )
        return Estimate(
            self._step_seconds(config),
            self._exact_bytes(config),
            self._working_bytes(config),
            gpus_per_node * (sum(pinned) + staging_bytes),
            pools_bytes + gpus_per_node * staging_bytes if pools_bytes else 0,
        )

    def _exact_bytes(self, config: Config) -> float:
        """Parameters, gradients, moments and saved activations on the GPU."""
        memory, state = config.memory, self.state
        total = 0.0
        if memory.parameters == "device":
            total += 2 * state.trained + state.frozen  # weights and gradients
        if memory.optimizer == "device":
            total += state.optimizer
        group = memory.layers_per_remat_group
        saved = {"residual"} if group > 1 else _saved(memory)
        activations = activation_bytes(
            config, saved - {*memory.offload}, config.model.num_remat_groups(group)
        )
        # in two bytes each; with several microbatches also a float32 sum of gradients
        if memory.node_copy_devices:
            shards_per_rank = config.mesh.num_devices / config.mesh.data / memory.node_copy_devices
            num_trained = state.trained / 4
            num_frozen = state.frozen / FROZEN_BYTES[config.precision.frozen]
            gradient_bytes = 2 if config.train.gradient_accumulation_steps == 1 else 6
            total += shards_per_rank * (
                2 * (num_trained + num_frozen) + gradient_bytes * num_trained
            )
        # Without remat also what is between the named tensors: norms, activation functions.
        return total + activations * (2 if memory.remat == "none" else 1)

    def _working_bytes(self, config: Config) -> float:
        """Values and gradients of the layers that are computed, the gathered output head with its
        gradient, logits.
        """
        memory, mesh = config.memory, config.mesh
        share = min(memory.tile_tokens / self.tokens, 1) if memory.tile_tokens else 1
        whole = ("residual", "key", "value")  # saved for all tokens, also with tiles
        tiled = [name for name in tensor_names() if name not in whole]
        layer = 2 * activation_bytes(config, whole, 1) + 2 * share * activation_bytes(
            config, tiled, 1
        )
        layer += (
            _GATHERED * share * 2 * self.tokens * (1 - 1 / mesh.tensor) * config.model.model_dim
        )
        chunk = loss_chunk_tokens(config.model, config, self.gpus.device)
        logits = 2 * 4 * chunk * config.model.vocab_size / mesh.tensor
        return layer * memory.layers_per_remat_group + 6 * self.head_params + logits

    def _step_seconds(self, config: Config) -> float:
        device = self.gpus.device
        memory = config.memory
        tile = memory.tile_tokens
        group = memory.layers_per_remat_group
        attention_forward, attention_backward = self.attention_seconds(tile)
        forward, backward = self.layer_seconds(tile)
        collectives = self.collectives
        all_forward = sum(forward.values())
        is_saved = memory.remat == "none" or saves_attention(memory)
        reruns = float(group > 1) if is_saved else 2 - 1 / group
        # down is never recomputed
        recomputed = sum(forward[name] for name in MATMUL_NAMES[:-1] if name not in _saved(memory))
        recomputed += (1 - 1 / group) * all_forward
        attention = (1 + reruns) * attention_forward + attention_backward
        kernels = (
            attention + all_forward + recomputed + backward + self._merge_seconds(tile, reruns)
        )
        exposed = (3 + reruns) * collectives.exchange + 4 * (
            2 + recomputed / all_forward
        ) * collectives.transfer
        exposed += max(0.0, collectives.reduction - kernels)
        for seconds, hiding in (
            (collectives.gather, kernels),
            ((4 + reruns) * collectives.hop, attention),
        ):
            exposed += max(0.0, seconds - hiding)
            if self.config.runtime.transport == "nccl":
                kernels += min(seconds, hiding) * (
                    1 - self.roofline.compute_share_during_nccl(device)
                )
        layers = self.config.model.num_layers * (kernels + exposed)
        offload = ("residual",) if memory.offload and group > 1 else memory.offload
        num_groups = self.config.model.num_remat_groups(group)
        offloaded = activation_bytes(self.config, offload, num_groups)
        layers += max(0.0, 2 * self.roofline.host_seconds(device, offloaded) - layers)
        num_microbatches = self.config.train.gradient_accumulation_steps
        shard = self.state.trained
        # float32: each microbatch adds its gradients to a sum; the update reads and writes
        # parameters and moments.
        sums = self.roofline.memory_seconds(device, 3 * shard)
        update = self.roofline.memory_seconds(device, 7 * shard)
        if memory.optimizer == "host":
            update += self.roofline.host_seconds(device, 4 * shard)
        if memory.parameters == "host":
            update += self.roofline.host_seconds(device, 4 * shard)
            if num_microbatches > 1:
                sums += self.roofline.host_seconds(device, 3 * shard)
        return num_microbatches * (layers + self._loss_seconds(config) + sums) + update

    def _attention_seconds(self, tile_tokens: int) -> tuple[float, float]:
        """Forward and backward of an attention layer, the mean over the kinds of layers."""
        config, model = self.config, self.config.model
        steps = num_ring_steps(config)
        num_keys = _TILES_PER_STEP * tile_tokens if tile_tokens else config.data.seq_len / steps
        totals = [0.0, 0.0]
        for kind, kernel in self.kernels.items():
            window = model.window_of(kind)
            pairs = (
                self.num_sequences * causal_pairs(config.data.seq_len, window) / config.mesh.context
            )
            shape = model.layer_config(kind)
            share = model.num_layers_of(kind) / model.num_layers
            # Products of a pair: 2 forward; 5 backward, of which pallas computes two twice. One
            # ring step has a mask.
            for is_backward, products in enumerate((2, 7 if kernel == "pallas" else 5)):
                totals[is_backward] += share * self.roofline.attention_seconds(
                    self.gpus.device,
                    kernel,
                    is_backward=bool(is_backward),
                    flops=2
                    * products
                    * shape.attention.num_heads
                    * shape.attention.head_dim
                    / config.mesh.tensor
                    * pairs,
                    num_keys=min(num_keys, window or num_keys),
                    head_dim=shape.attention.head_dim,
                    is_masked=steps == 1 and not tile_tokens,
                )
        return totals[0], totals[1]

    def _layer_seconds(self, tile_tokens: int) -> tuple[dict[str, float], float]:
        """Matrix products of a layer with its weights: forward by the name of the result, and
        backward.
        """
        model = self.config.model
        rows = min(tile_tokens or self.tokens, self.tokens)
        dims = self.dims
        widths = (dims.queries, *[dims.expanded / 2] * 2, dims.query, *[dims.ffn] * 3)
        forward = {
            name: self.tokens / rows * self.rates.product_seconds(rows, width, model.model_dim)
            for name, width in zip(MATMUL_NAMES, widths, strict=True)
        }
        # Products of the same sizes give the gradients of activations, and of trained weights.
        return forward, self.backward_products * sum(forward.values())

    def _loss_seconds(self, config: Config) -> float:
        """The output head of a microbatch, chunk by chunk; each reads and writes the head's float32
        gradient.
        """
        device, model = self.gpus.device, config.model
        chunk = loss_chunk_tokens(model, config, device)
        product = self.rates.product_seconds(
            chunk, model.vocab_size / config.mesh.tensor, model.model_dim
        )
        traffic = self.roofline.memory_seconds(device, 2 * 4 * self.head_params)
        return self.tokens / chunk * ((1 + self.backward_products) * product + traffic)

    def _merge_seconds(self, tile_tokens: int, reruns: float) -> float:
        """Partial results in float32 of ring steps or tiles of keys: two are read and one is
        written.
        """
        num_merges = num_ring_steps(self.config) - 1.0
        if tile_tokens:
            model = self.config.model
            without_window = sum(not model.window_of(kind) for kind in model.layer_kinds) / len(
                model.layer_kinds
            )
            # Half of the steps over all keys: the others are masked.
            num_merges += (
                without_window * self.config.data.seq_len / (2 * _TILES_PER_STEP * tile_tokens)
            )
        # output; gradients of q, k, v
        features = (2 + reruns) * self.dims.query + self.dims.sent
        return self.roofline.memory_seconds(
            self.gpus.device, num_merges * 3 * 4 * features * self.tokens
        )

    def _collectives(self) -> "_Collectives":
        config = self.config
        model = self.config.model
        mesh = self.config.mesh
        ranks = num_head_ranks(config)
        steps = num_ring_steps(config)
        sizes = (mesh.data, mesh.fsdp, mesh.context // ranks, ranks, mesh.tensor)
        dims = self.dims
        layer_params = model.model_dim * (
            dims.queries + dims.keys_values + dims.query + 3 * dims.ffn
        )
        keys = 2 * self.tokens * dims.sent

        def seconds(kind: str, axes: tuple[int, ...], num_bytes: float) -> float:
            size = math.prod(sizes[axis] for axis in axes)
            groups = _groups(sizes, axes, kind == "collective-permute")
            return (
                self.model.group_seconds(kind, groups, num_bytes * (size - 1) / size)[0]
                if size > 1
                else 0.0
            )

        exchanged = 2 * dims.query + 2 * max(dims.key, dims.head * ranks)
        exchange = seconds("all-to-all", (3,), 2 * self.tokens * exchanged)
        if config.attention.strategy == "all_gather":
            exchange = seconds("all-gather", (2,), keys * mesh.context)
        return _Collectives(
            gather=(3 if mesh.data == 1 else 2)
            * seconds("all-gather", (1, 2, 3), 2 * layer_params),
            reduction=seconds("all-reduce", (0, 1, 2, 3), 2 * 2 * layer_params)
            if mesh.data > 1
            else 0.0,
            exchange=exchange,
            hop=steps * seconds("collective-permute", (2,), keys) if steps > 1 else 0.0,
            transfer=seconds("all-gather", (4,), 2 * self.tokens * model.model_dim),
        )


class _Dims(NamedTuple):
    """Columns of the products of a layer on a rank of tensor, with as many FLOPs as its projections,
    and entries of a token.
    """

    queries: float
    keys_values: float
    expanded: float  # keys_values with all expansions of latents in a ring
    sent: float  # by a ring or an all-gather
    query: float  # of all heads, as are keys
    key: float
    head: float
    ffn: float


def _dims_of(layer: LayerConfig, config: Config) -> _Dims:
    tensor = config.mesh.tensor
    matrices = mixer_matrices(layer)
    sizes = layer.attention
    ffn = active_ffn_dim(layer) / tensor
    if not matrices:
        return _Dims(*[0.0] * 7, ffn)
    query = sizes.num_heads * sizes.head_dim / tensor
    key = max(sizes.num_kv_heads / tensor, 1) * sizes.head_dim
    others = query, key, sizes.head_dim, ffn
    latent = (mixer for mixer in mixers_of(layer).values() if "key_value" in mixer.projections)
    mixer = next(latent, None)
    if mixer is None:
        return _Dims(sizes.num_heads * sizes.gated_dim / tensor, *[2 * key] * 3, *others)
    dims = {
        name: matrices[path].size / layer.model_dim / tensor
        for name, path in mixer.projections.items()
        if path in matrices
    }
    saved = mixer.saved_bytes(layer, config, 1)
    sends_latents = "key" not in saved
    latent_dim = tensor * dims["latent"]
    num_expansions = num_ring_steps(config) if sends_latents else 1
    return _Dims(
        sum(dim for name, dim in dims.items() if name.startswith("query")),
        latent_dim + dims["key_value"],
        latent_dim + num_expansions * dims["key_value"],
        saved["latent"] / tensor if sends_latents else 2 * key,
        *others,
    )


class _Collectives(NamedTuple):
    """Seconds per layer."""

    gather: float  # weights
    reduction: float  # gradients over data
    exchange: float  # queries, keys and values over context
    hop: float  # all steps of a ring
    transfer: float  # activations over tensor


@functools.cache
def _groups(sizes: tuple[int, ...], axes: tuple[int, ...], is_permute: bool) -> Groups:
    """Device numbers along these axes of a mesh; of a permute, pairs of neighbors."""
    devices = np.arange(math.prod(sizes)).reshape(sizes)
    groups = np.moveaxis(devices, axes, range(-len(axes), 0)).reshape(
        -1, math.prod(sizes[axis] for axis in axes)
    )
    if is_permute:
        groups = np.stack([groups, np.roll(groups, -1, axis=1)], axis=-1).reshape(-1, 2)
    return tuple(map(tuple, groups.tolist()))


def _saved(memory: MemoryConfig) -> set[str]:
    """Names of the activations of each layer that are not recomputed."""
    if memory.remat in ("none", "matmuls"):
        return {*tensor_names()}
    kept = {"residual", *memory.save, *memory.offload}
    return kept | ({"attention_out", "attention_lse"} if saves_attention(memory) else set())
