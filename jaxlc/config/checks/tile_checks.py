"""Checks of memory.tile_tokens against other settings. Imports no jax."""

from collections.abc import Iterator

from jaxlc.config.checks.layer_checks import layers_by_path
from jaxlc.config.frozen import Config
from jaxlc.config.kinds import MIXERS

# With tiles, only these tensors of a layer exist for the whole sequence at once.
_WHOLE_TENSORS = ("residual", "attention_out", "attention_lse")
_TOGETHER = ("attention_out", "attention_lse")


def tile_problems(config: Config) -> Iterator[str]:
    """Reasons why the layers of `config` cannot run in tiles; none without tiles."""
    memory, attention, mesh, tile_tokens = config.memory, config.attention, config.mesh, config.memory.tile_tokens
    if not tile_tokens:
        return
    setting = f"config.memory.tile_tokens={tile_tokens}"
    if attention.strategy == "all_gather":
        yield (
            f"{setting} is incompatible with config.attention.strategy='all_gather';"
            " use --config.attention.strategy=ring, ulysses or hybrid"
        )
    if memory.remat not in ("full", "attention"):
        yield (
            f"{setting} is incompatible with config.memory.remat={memory.remat!r};"
            " use --config.memory.remat=full or attention"
        )
    named = (*memory.save, *memory.offload)
    for name in named:
        if name not in _WHOLE_TENSORS:
            yield f"{setting} computes {name!r} for one tile at a time: it cannot be saved or offloaded; remove it"
    if len({*named} & {*_TOGETHER}) == 1 and memory.remat == "full":
        yield f"{setting} saves or offloads {' and '.join(_TOGETHER)} together; name both, or neither"
    per_device, pieces = config.data.seq_len // mesh.context, 2 * mesh.tensor
    if per_device % tile_tokens or tile_tokens % pieces:
        yield (
            f"{setting} does not divide the {per_device} tokens of a device (data.seq_len / mesh.context), or"
            f" is not a multiple of 2 x mesh.tensor = {pieces}; use {_nearest_divisor(per_device, tile_tokens, pieces)}"
        )
    for path, layers in layers_by_path(config.model).items():
        for layer in layers:
            yield from MIXERS[layer.mixer].tile_problems(layer, config, path)


def _nearest_divisor(tokens: int, target: int, pieces: int) -> int:
    """The multiple of `pieces` nearest to `target` that divides `tokens`; `tokens` if there is none."""
    divisors = (size for size in range(pieces, tokens + 1, pieces) if tokens % size == 0)
    return min(divisors, key=lambda size: abs(size - target), default=tokens)
