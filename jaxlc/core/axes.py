"""Names of mesh axes and letters of tensor dimensions.

An *axis* belongs to the device mesh, a *dimension* to an array.

Shape letters, used as suffixes of names: `q_BTNH` has shape [batch, query positions, query heads, head dim].

    B batch                   T query positions        S key positions
    N query heads             K key/value heads        G query heads per key/value head
    H head dim                D model dim              F feed-forward dim
    V vocabulary              L layers               R rank of an adapter

    In jaxlc/attention: M layer tiles, P query sub-chunks of a tile, I query blocks, J KV blocks,
    R rows of a query block (G x T)
    In linear attention: G key heads, H value heads, K key dim, V value dim, L consecutive tokens, C tokens of
    a chunk, N chunks, W channels, P taps

Inside `shard_map` the letter of a dimension that is split over devices is lower case: `k_bskH` is the local shard of
`k_BSKH`. The case makes it visible where local and global lengths are mixed, a common bug of sequence parallelism.
"""

import math
from collections.abc import Mapping

DATA = "data"  # batch split, parameters replicated
FSDP = "fsdp"  # batch split, parameters and optimizer state sharded
CONTEXT = "context"  # sequence split; parameters and optimizer state sharded
TENSOR = "tensor"  # heads, feed-forward and vocabulary split

MESH_AXES = (DATA, FSDP, CONTEXT, TENSOR)  # slowest to fastest varying: tensor ranks are adjacent
BATCH_AXES = (DATA, FSDP)  # axes that split the batch
WEIGHT_AXES = (FSDP, CONTEXT)  # axes that shard parameters, which are equal on their ranks at use

# Entries of a parameter tree whose arrays have a leading dimension of layers: `is_layers`.
FIRST_LAYERS = "first_layers"
LAYERS = "layers"
LAST_LAYERS = "last_layers"


def is_layers(name: str) -> bool:
    """Whether the entry of a parameter tree with this name is a segment of the layers: first_layers, layers, layers_2
    and so on, last_layers; see `ModelConfig.segments`."""
    return LAYERS in name.split("_")


def num_replicas(sizes: Mapping[str, int]) -> int:
    """Replicas of a mesh with these sizes of axes: the parts that the batch is split into."""
    return math.prod(sizes[axis] for axis in BATCH_AXES)


def mesh_text(sizes: Mapping[str, int]) -> str:
    """Sizes of mesh axes as text: "context=8 x tensor=8"."""
    return " x ".join(f"{axis}={size}" for axis, size in sizes.items())
