"""The attention kernels of the kinds of layers."""

import functools
from collections.abc import Iterator, Mapping

from jax.sharding import Mesh

from jaxlc import attention
from jaxlc.config import Config
from jaxlc.core.axes import CONTEXT, DATA, FSDP, TENSOR
from jaxlc.step import mixed_precision


def layer_kernels(config: Config, mesh: Mesh) -> dict[str, attention.KernelSelection]:
    """The kernel of each kind of layers of `config` on `mesh`, and why it was selected.

    Raises:
      UserError: the kernel that the config names does not support a kind.
    """
    model = config.model
    dtype = mixed_precision.compute_dtype(config.precision.compute, mesh.devices.flat[0].platform)
    choose = functools.partial(
        attention.choose,
        config.attention,
        mesh,
        head_dim=model.head_dim,
        dtype=dtype,
        num_elements=_num_query_elements(config, mesh),
    )
    kernels = {}
    for kind in dict.fromkeys(model.layer_kinds):
        window = model.window_of(kind)
        has_ranges = config.attention.document_mask or (window is not None and config.memory.tile_tokens > 0)
        kernels[kind] = choose(window=window, packed=has_ranges)
    return kernels


def by_kind(texts: Mapping[str, str]) -> Iterator[str]:
    """Yields the texts of the kinds of layers with their names; if they are equal, the text alone."""
    if len(set(texts.values())) == 1:
        yield next(iter(texts.values()))
    else:
        yield from (f"{kind}: {text}" for kind, text in texts.items())


def _num_query_elements(config: Config, mesh: Mesh) -> int:
    """Elements of a device's queries in one layer; of a tile's, if layers are computed in tiles."""
    sizes, train = mesh.shape, config.train
    batch = train.global_batch_size // (train.gradient_accumulation_steps * sizes[DATA] * sizes[FSDP])
    tokens = config.memory.tile_tokens or config.data.seq_len // sizes[CONTEXT]
    return batch * tokens * config.model.num_heads // sizes[TENSOR] * config.model.head_dim
