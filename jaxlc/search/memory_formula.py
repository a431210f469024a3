"""Estimated memory of a training step from its config, without a compiler: prunes the candidates of a search.

Terms: the training state and its gradients, gathered weights of a layer and of the output head, saved activations of
all layers, activations of the layer that is computed, attention workspaces, and buffers of communication. The compiled
step decides: `tests/plan` compares the formula with it.
"""

from typing import NamedTuple

from jaxlc.attention.kernels import cudnn
from jaxlc.config import Config
from jaxlc.config.checks.mesh_checks import num_head_ranks
from jaxlc.config.trained_params import FROZEN_BYTES
from jaxlc.plan.memory import NCCL_BYTES_PER_PEER, NCCL_MAX_PEERS, USABLE_HOST_SHARE, USABLE_SHARE
from jaxlc.runtime.memory_pools import pinned_host_bytes
from jaxlc.search.sizes import Sizes, sizes_of
from jaxlc.simulate.topology import Topology

_UNROLLED = 1.4  # times the memory of a layer, with two microbatches outside of a loop


class MemoryEstimate(NamedTuple):
    """Bytes per GPU and per node, and the bytes that a step may use."""

    device_bytes: float
    host_bytes_per_node: float  # pinned memory and checkpoint staging
    usable_device_bytes: float
    usable_host_bytes: float

    @property
    def load(self) -> float:
        """The used share of GPU or host memory, the larger of the two; at most 1 fits."""
        return max(self.device_bytes / self.usable_device_bytes, self.host_bytes_per_node / self.usable_host_bytes)

    def fits(self, margin: float = 1.0) -> bool:
        """Whether `margin` times the bytes on the GPU, and those on the host, are usable."""
        fits_device = margin * self.device_bytes <= self.usable_device_bytes
        return fits_device and self.host_bytes_per_node <= self.usable_host_bytes


def estimate_memory(config: Config, gpus: Topology, kernel: str) -> MemoryEstimate:
    """Memory of the step of `config` with this attention kernel of the full layers, such as "cudnn"."""
    sizes = sizes_of(config)
    num_saved = config.model.num_layers / config.memory.layers_per_remat_group
    device_bytes = (
        _state_bytes(config, sizes)
        + _weights_in_use_bytes(config, sizes)
        + saved_bytes_per_token(config, sizes) * sizes.tokens * num_saved
        + (_UNROLLED if _is_unrolled(config) else 1) * _layer_bytes(config, sizes)
        + _workspace_bytes(config, sizes, kernel)
        + _communication_bytes(config)
    )
    gpus_per_node = min(gpus.gpus_per_node, gpus.num_gpus)
    staging_bytes = (12 * sizes.num_trained + _stored_frozen_bytes(config, sizes)) / sizes.num_shards
    return MemoryEstimate(
        device_bytes,
        gpus_per_node * ((2 if _is_unrolled(config) else 1) * pinned_host_bytes(config) + staging_bytes),
        USABLE_SHARE * gpus.device.memory_bytes,
        USABLE_HOST_SHARE * gpus.host_memory_bytes_per_node,
    )


def _is_unrolled(config: Config) -> bool:
    """Whether both of two microbatches are outside of a loop, and their activations in memory at the same time.

    With parameters in host memory, `train.accumulation` computes the first microbatch before the loop over the others.
    """
    return config.memory.parameters == "host" and config.train.gradient_accumulation_steps == 2


def _stored_frozen_bytes(config: Config, sizes: Sizes) -> float:
    return sizes.num_frozen * FROZEN_BYTES[config.precision.frozen] * config.train.checkpoint_frozen


def _state_bytes(config: Config, sizes: Sizes) -> float:
    """Parameters, gradients (their sum and those of a microbatch) and moments on the GPU."""
    frozen_bytes = FROZEN_BYTES[config.precision.frozen] * sizes.num_frozen
    parameters = (12 * sizes.num_trained + frozen_bytes) * (config.memory.parameters == "device")
    moments = 8 * sizes.num_trained * (config.memory.optimizer == "device")
    return (parameters + moments) / sizes.num_shards


def _weights_in_use_bytes(config: Config, sizes: Sizes) -> float:
    """Gathered weights of a layer and their gradients, and the output head with its float32 gradient."""
    num_bytes = 4 * sizes.layer_params + 5 * sizes.head_params
    if config.memory.parameters == "host":  # embedding and output head are copied whole, with their gradients
        num_bytes += 16 * sizes.head_params * config.mesh.tensor / sizes.num_shards
    return num_bytes


def saved_bytes_per_token(config: Config, sizes: Sizes) -> float:
    """Activations of one layer that are saved on the GPU for the backward pass, per token of a context rank."""
    memory = config.memory
    attention = 2 * sizes.query_dim + 4 * sizes.query_dim / config.model.head_dim
    by_name = dict(
        residual=2 * sizes.residual_dim,
        attention_out=2 * sizes.query_dim,
        attention_lse=4 * sizes.query_dim / config.model.head_dim,
    )
    saved = {"residual"}
    if memory.remat in ("attention", "matmuls") and memory.layers_per_remat_group == 1:
        saved |= {"attention_out", "attention_lse"}
    per_token = sum(by_name[name] for name in saved - {*memory.offload})
    matmuls = 2 * (sizes.residual_dim + sizes.query_dim + 2 * sizes.key_dim + 2 * sizes.ffn_dim)
    if memory.remat == "matmuls":
        per_token += matmuls
    if memory.remat == "none":
        per_token = 2 * (6 * sizes.residual_dim + 5 * (sizes.query_dim + sizes.key_dim) + 8 * sizes.ffn_dim) + attention
    return per_token


def _layer_bytes(config: Config, sizes: Sizes) -> float:
    """Activations of the layer whose gradient is computed: of all tokens, and of those that are computed at once."""
    model, memory, tensor = config.model, config.memory, config.mesh.tensor
    whole = 4 * sizes.residual_dim + 12 * sizes.key_dim  # residual, its gradient; K and V, their float32 gradients
    tile = 2 * (4 * sizes.query_dim + 3 * sizes.residual_dim + 3 * sizes.ffn_dim)
    tile += 5 * model.model_dim * (tensor - 1) / tensor  # inputs of matrix products, gathered over tensor
    tile += {"ulysses": 8, "hybrid": 12}.get(config.attention.strategy, 0) * sizes.query_dim * (config.mesh.context > 1)
    group = memory.layers_per_remat_group
    if group > 1:
        whole += (group - 1) * 2 * sizes.residual_dim
        whole += 2 * sizes.query_dim * (memory.remat == "attention") * group
    return whole * sizes.tokens + tile * min(memory.tile_tokens or sizes.tokens, sizes.tokens)


def _workspace_bytes(config: Config, sizes: Sizes, kernel: str) -> float:
    if not kernel.startswith("cudnn"):
        return 0.0
    mesh, model, ranks = config.mesh, config.model, num_head_ranks(config)
    num_heads = model.num_heads // (mesh.tensor * ranks)
    num_keys = max(1, model.num_kv_heads // (mesh.tensor * ranks))
    tokens = int(sizes.tokens / sizes.num_sequences) * ranks
    if config.memory.tile_tokens:
        tokens = config.memory.tile_tokens // 2  # tiles are halves of zigzag order
    q_shape = (sizes.num_sequences, tokens, num_heads, model.head_dim)
    k_shape = (sizes.num_sequences, tokens, num_keys, model.head_dim)
    return cudnn.workspace_bytes(q_shape, k_shape, True, 2 if kernel == "cudnn_packed" else 1)


def _communication_bytes(config: Config) -> float:
    """Buffers of NCCL: rings have one peer, an all-to-all has all of its ranks."""
    mesh, ranks = config.mesh, num_head_ranks(config)
    num_rings = (mesh.fsdp * mesh.context > 1) + (mesh.tensor > 1) + (mesh.num_devices > 1)
    num_peers = num_rings + min(ranks - 1, NCCL_MAX_PEERS)
    if mesh.context > ranks:
        num_peers += 1
    return num_peers * NCCL_BYTES_PER_PEER
