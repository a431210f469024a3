"""Names, shapes and checksums of the arrays of a checkpoint."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxlc.step.state import DEVICE, is_on_host, to_memory_kind


def shapes_of(tree) -> dict[str, tuple[int, ...]]:
    """Shapes of the arrays as stored: a PRNG key is stored as its words."""
    words = {name: jax.eval_shape(jax.random.key_data, x) if _is_key(x) else x for name, x in named_leaves(tree)}
    return {name: tuple(x.shape) for name, x in words.items()}


def _is_key(x) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def named_leaves(tree) -> list[tuple[str, jax.Array]]:
    """(name, leaf) pairs; the name is the path, equal for a tree and for Orbax's copy of it as nested dicts."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in leaves]


def checksums_of(state) -> dict[str, int]:
    """Name -> checksum of each array. TensorStore detects truncated files, but not wrong bytes.

    Arrays in host memory are copied to the device for this, one at a time.
    """
    names, leaves = [name for name, _ in named_leaves(state)], jax.tree.leaves(state)
    groups = [[leaf] for leaf in leaves] if is_on_host(state) else [leaves]
    sums = np.concatenate([np.asarray(_sums_of_bits(group)) for group in groups])
    return dict(zip(names, sums.tolist()))


@jax.jit
def _sums_of_bits(arrays: list[jax.Array]) -> jax.Array:
    """The sum of the bits of each array as unsigned integers modulo 2^32, uint32 [arrays].

    It does not depend on the order of summation, hence not on the sharding.
    """
    return jnp.stack([_bits(to_memory_kind(x, DEVICE)).astype(jnp.uint32).sum(dtype=jnp.uint32) for x in arrays])


def _bits(x: jax.Array) -> jax.Array:
    if _is_key(x):
        x = jax.random.key_data(x)
    if x.dtype == jnp.bool_:
        return x
    return jax.lax.bitcast_convert_type(x, f"uint{8 * min(x.dtype.itemsize, 4)}")
