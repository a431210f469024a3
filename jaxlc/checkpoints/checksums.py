"""Names, shapes and checksums of the arrays of a checkpoint, and whether they are finite."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxlc.config import Config
from jaxlc.core.identity import fingerprint_of
from jaxlc.runtime.barrier import Program
from jaxlc.step.state import DEVICE, is_on_host, to_memory_kind


def shapes_of(tree) -> dict[str, tuple[int, ...]]:
    """Shapes of the arrays as stored: a PRNG key is stored as its words."""
    words = {name: jax.eval_shape(jax.random.key_data, x) if _is_key(x) else x for name, x in named_leaves(tree)}
    return {name: tuple(x.shape) for name, x in words.items()}


def _is_key(x) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def keys_as_words(tree):
    """The tree with the words of PRNG keys in their place; of arrays or their shapes."""

    def words_of(x):
        if not _is_key(x):
            return x
        if isinstance(x, jax.Array):
            return jax.random.key_data(x)
        words = jax.eval_shape(jax.random.key_data, x)
        return jax.ShapeDtypeStruct(words.shape, words.dtype, sharding=x.sharding)

    return jax.tree.map(words_of, tree)


def words_as_keys(tree, like):
    """The tree that `keys_as_words` has changed, with the PRNG keys of `like`."""

    def key_of(words, x):
        if not _is_key(x):
            return words
        key = jax.random.wrap_key_data(words)
        assert key.dtype == x.dtype  # both are keys of JAX's default implementation
        return key

    return jax.tree.map(key_of, tree, like)


def named_leaves(tree) -> list[tuple[str, jax.Array]]:
    """(name, leaf) pairs; the name is the path, equal for a tree and for Orbax's copy of it as nested dicts."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in leaves]


class Summary(NamedTuple):
    """What one pass over an array computes."""

    checksum: int  # TensorStore detects truncated files, but not wrong bytes
    is_finite: bool  # no value is NaN or infinite


def summaries_of(state) -> dict[str, Summary]:
    """Name -> summary of each array.

    Arrays in host memory are copied to the device for this, one at a time.
    """
    names, leaves = [name for name, _ in named_leaves(state)], jax.tree.leaves(state)
    groups = [[leaf] for leaf in leaves] if is_on_host(state) else [leaves]
    words = np.concatenate([np.asarray(_words(group)) for group in groups])
    return {name: Summary(checksum, bool(is_finite)) for name, (checksum, is_finite) in zip(names, words.tolist())}


def stored_summary(array: np.ndarray) -> Summary:
    """The summary of an array of a checkpoint, a PRNG key as its words. Needs host memory for one copy of it."""
    is_floating = jnp.issubdtype(array.dtype, jnp.floating)
    is_finite = not is_floating or bool(np.isfinite(array).all())
    bits = array if array.dtype == np.bool_ else array.view(f"uint{8 * min(array.dtype.itemsize, 4)}")
    return Summary(int(bits.sum(dtype=np.uint64) % 2**32), is_finite)


def checksums_of(state) -> dict[str, int]:
    """Name -> checksum of each array."""
    return {name: summary.checksum for name, summary in summaries_of(state).items()}


def model_fingerprint(config: Config, params) -> str:
    """Equal for equal parameters and settings of a model, on any mesh and from any directory. It reads no file."""
    settings = dataclasses.replace(config.model, init_from="", preset="")
    return fingerprint_of((sorted(checksums_of(params).items()), settings, config.lora))


def nonfinite_param(summaries: dict[str, Summary]) -> str | None:
    """The problem of the first parameter that is not finite; None: all are finite."""
    names = (name for name, summary in summaries.items() if name.startswith("params/") and not summary.is_finite)
    return next((f"array {name} has NaN or infinite values" for name in names), None)


@functools.partial(Program, "checksums")
@jax.jit
def _words(arrays: list[jax.Array]) -> jax.Array:
    """Checksum, and 1 if it is finite, of each array: uint32 [arrays, 2].

    The checksum is the sum of the bits as unsigned integers modulo 2^32. It does not depend on the order of summation,
    hence not on the sharding.
    """

    def words(x: jax.Array) -> jax.Array:
        checksum = _bits(x).astype(jnp.uint32).sum(dtype=jnp.uint32)
        is_finite = jnp.isfinite(x).all() if jnp.issubdtype(x.dtype, jnp.floating) else True
        return jnp.stack([checksum, jnp.uint32(is_finite)])

    return jnp.stack([words(to_memory_kind(x, DEVICE)) for x in arrays])


def _bits(x: jax.Array) -> jax.Array:
    if _is_key(x):
        x = jax.random.key_data(x)
    if x.dtype == jnp.bool_:
        return x
    return jax.lax.bitcast_convert_type(x, f"uint{8 * min(x.dtype.itemsize, 4)}")
