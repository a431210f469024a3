"""The attention kernels of the kinds of layers."""

import functools
from collections.abc import Iterator, Mapping

from jax.sharding import Mesh

from jaxlc import attention
from jaxlc.config import Config, ModelConfig
from jaxlc.core.axes import CONTEXT, DATA, FSDP, TENSOR
from jaxlc.step import mixed_precision


def layer_kernels(config: Config, mesh: Mesh) -> dict[str, attention.KernelSelection]:
    """The kernel of each kind of layers with attention of `config` on `mesh`, and why it was selected.

    Raises:
      UserError: the kernel that the config names does not support a kind.
    """
    model = config.model
    dtype = mixed_precision.compute_dtype(config.precision.compute, mesh.devices.flat[0].platform)
    choose = functools.partial(attention.choose, config.attention, mesh, dtype=dtype)
    kernels = {}
    for kind in model.used_kinds:
        own, window = model.of_kind(kind), model.window_of(kind)
        if own.mixer != "attention":
            continue
        kernels[kind] = choose(
            head_dim=own.head_dim,
            window=window,
            packed=config.attention.document_mask or (window is not None and config.memory.tile_tokens > 0),
            num_elements=_num_query_elements(config, mesh, own),
        )
    return kernels


def by_kind(texts: Mapping[str, str]) -> Iterator[str]:
    """Yields the texts of the kinds of layers with their names; if they are equal, the text alone; if there are none,
    "none"."""
    if not texts:
        yield "none"
    elif len(set(texts.values())) == 1:
        yield next(iter(texts.values()))
    else:
        yield from (f"{kind}: {text}" for kind, text in texts.items())


def _num_query_elements(config: Config, mesh: Mesh, model: ModelConfig) -> int:
    """Elements of a device's queries in a layer with the sizes of `model`; of a tile's, if layers are computed in
    tiles."""
    sizes, train = mesh.shape, config.train
    batch = train.global_batch_size // (train.gradient_accumulation_steps * sizes[DATA] * sizes[FSDP])
    tokens = config.memory.tile_tokens or config.data.seq_len // sizes[CONTEXT]
    return batch * tokens * model.num_heads // sizes[TENSOR] * model.head_dim
