"""The names this project gives to mesh axes and to tensor dimensions. Imports nothing.

A mesh *axis* is a direction of the device mesh; a tensor *dimension* is a direction of an array.

Shape letters, used as suffixes (`q_BTNH` is batch x query positions x query heads x head dim):

    B batch rows              T query positions        S key positions
    N query heads             K key/value heads        G query heads per key/value head
    H head dim                D model dim              F feed-forward dim
    V vocabulary              L layers

Inside `shard_map` the letter of a dimension that is split over devices is lower case: `k_bskH` is this
device's piece of `k_BSKH`. Mixing local and global lengths is the classic bug of sequence parallelism; the
case of a letter is there to make it visible.
"""

DATA = "data"  # replicas: the batch is split, parameters are copied
FSDP = "fsdp"  # the batch is split, parameters and optimizer state are sharded
CONTEXT = "context"  # the sequence is split; parameters and optimizer state are sharded here too
TENSOR = "tensor"  # heads, feed-forward and vocabulary are split

MESH_AXES = (DATA, FSDP, CONTEXT, TENSOR)  # slowest to fastest varying: tensor peers are nearest neighbours
BATCH_AXES = (DATA, FSDP)  # axes over which batch rows are split
WEIGHT_AXES = (FSDP, CONTEXT)  # axes whose ranks see the same weights at use, so may share their storage
