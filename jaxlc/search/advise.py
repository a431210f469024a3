"""Searches for changes of a config that make its step fit, by compiling: single changes, and last all together."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import NamedTuple

from ml_collections import ConfigDict

from jaxlc.config import Config, with_settings
from jaxlc.core.axes import BATCH_AXES, CONTEXT, DATA, FSDP, TENSOR
from jaxlc.core.errors import UserError
from jaxlc.plan.compile import on_gpus, plan_step
from jaxlc.plan.memory import Memory
from jaxlc.plan.record import Change
from jaxlc.plan.result import Plan
from jaxlc.simulate.topology import Topology

_NUM_FITTING = 2  # the search ends after this many changes that fit; later ones cost more time
_MIN_CHUNK_TOKENS = 256  # below, the loss's matrix products are too small for the GPU
_TILE_TOKENS = (32_768, 16_384, 8_192)  # larger tiles send KV blocks around the ring fewer times
_REMAT_COSTS = {  # each saves fewer activations than the one before
    "none": "",
    "matmuls": "recomputes the cheap parts of a layer",
    "attention": "recomputes a layer's matrix products, but not attention",
    "full": "recomputes a layer's whole forward pass, including its communication",
}


class Candidate(NamedTuple):
    """One change, which may consist of several settings."""

    settings: dict[str, int | str | tuple[str, ...]]  # "memory.remat" -> "full"
    cost: str  # what it costs in time, as text

    @property
    def overrides(self) -> str:
        texts = {name: ",".join(x) if isinstance(x, tuple) else x for name, x in self.settings.items()}
        return " ".join(f"--config.{name}={text}" for name, text in texts.items())


def plan_with_advice(config: ConfigDict | Config, gpus: Topology, starting: Callable[[str], None], **options) -> Plan:
    """The plan of `config`, with advice if it does not fit; see `compile.plan_step`.

    Args:
      starting: called with a description of each program before it is compiled.
      options: further arguments of `compile.plan_step` for `config` itself.
    """
    config = on_gpus(config, gpus)
    plan = plan_step(config, gpus, lambda: starting(f"the training step for {gpus}"), **options)
    if plan.memory.fits:
        return plan
    changes = []
    for candidate in candidates(config):
        memory = _memory_with(config, candidate, gpus, starting)
        if memory is None:
            continue
        changes.append(Change(
            overrides=candidate.overrides,
            cost=candidate.cost,
            device_peak_bytes=memory.device_peak_bytes,
            host_bytes_per_node=memory.host_bytes_per_node,
            fits=memory.fits,
        ))  # fmt: skip
        if sum(change.fits for change in changes) == _NUM_FITTING:
            break
    return dataclasses.replace(plan, advice=tuple(changes))


def _memory_with(config: Config, candidate: Candidate, gpus: Topology, starting) -> Memory | None:
    """Memory of the step with the change; None if the change is invalid for this config."""
    try:
        changed = with_settings(config, candidate.settings)
        return plan_step(changed, gpus, lambda: starting(f"with {candidate.overrides}")).memory
    except UserError:
        return None


def candidates(config: Config) -> Iterator[Candidate]:
    """Changes that may save memory, in order of estimated cost in time. Some may be invalid for the config."""
    for changes in _BY_COST:
        yield from changes(config)


def _smaller_loss_chunks(config: Config) -> Iterator[Candidate]:
    tokens = config.memory.loss_chunk_tokens // 4
    if tokens >= _MIN_CHUNK_TOKENS:
        yield Candidate({"memory.loss_chunk_tokens": tokens}, "smaller matrix products in the loss")


def _smaller_microbatches(config: Config) -> Iterator[Candidate]:
    steps = 2 * config.train.gradient_accumulation_steps
    yield Candidate({"train.gradient_accumulation_steps": steps}, "smaller microbatches; weights are gathered for each")


def _fully_sharded_parameters(config: Config) -> Iterator[Candidate]:
    if config.mesh.data > 1:
        yield Candidate(
            {"mesh.data": 1, "mesh.fsdp": config.mesh.fsdp * config.mesh.data}, "weights are gathered for each layer"
        )


def _more_remat(config: Config) -> Iterator[Candidate]:
    names = list(_REMAT_COSTS)
    for name in names[names.index(config.memory.remat) + 1 :]:
        yield Candidate({"memory.remat": name}, _REMAT_COSTS[name])


def _offload(config: Config) -> Iterator[Candidate]:
    """Offloads the inputs of layers to host memory, or saves fewer of them."""
    if "residual" not in config.memory.offload:
        settings = {"memory.remat": "full", "memory.offload": (*config.memory.offload, "residual")}
        yield Candidate(settings, "copies every layer's input to host memory and back, and recomputes everything else")
    if config.memory.layers_per_remat_group == 1:
        size = _group_size(config)
        settings = {"memory.remat": "attention", "memory.layers_per_remat_group": size}
        yield Candidate(settings, f"recomputes everything, {size} layers at a time")


def _ring(config: Config) -> Iterator[Candidate]:
    if config.attention.strategy in ("all_gather", "ulysses"):
        yield Candidate({"attention.strategy": "ring"}, "ring steps, whose communication overlaps with attention")


def _more_context(config: Config) -> Iterator[Candidate]:
    """Moves devices from another axis to context; with a batch axis, microbatches become smaller accordingly."""
    for axis in (FSDP, DATA, TENSOR):
        size = getattr(config.mesh, axis)
        for factor in dict.fromkeys((2, size)):
            if size % factor or size == 1:
                continue
            settings = {f"mesh.{axis}": size // factor, f"mesh.{CONTEXT}": config.mesh.context * factor}
            if axis in BATCH_AXES:
                settings["train.gradient_accumulation_steps"] = config.train.gradient_accumulation_steps * factor
            yield Candidate(settings, f"a longer ring instead of {axis}")


def _more_tensor(config: Config) -> Iterator[Candidate]:
    if config.mesh.context % 2 == 0:
        settings = {"mesh.context": config.mesh.context // 2, "mesh.tensor": config.mesh.tensor * 2}
        yield Candidate(settings, "a shorter ring, and more communication around each matrix product")


def _moments_on_host(config: Config) -> Iterator[Candidate]:
    if config.memory.optimizer == "device":
        yield Candidate(
            {"memory.optimizer": "host"}, "copies AdamW's moments from host memory and back in every update"
        )


def _weights_on_host(config: Config) -> Iterator[Candidate]:
    if config.memory.parameters == "device":
        settings = {"memory.parameters": "host"} | _at_most(config, "attention")
        if len(config.model.layer_kinds) > 1 and config.memory.layers_per_remat_group == 1:
            settings["memory.layers_per_remat_group"] = _group_size(config)
        yield Candidate(
            settings, "copies weights from host memory twice per step and for the update, and gradients to it"
        )


def _tiles(config: Config) -> Iterator[Candidate]:
    """The largest tile size that divides a device's tokens into at least four tiles."""
    tokens = config.data.seq_len // config.mesh.context
    sizes = [size for size in _TILE_TOKENS if tokens % size == 0 and tokens >= 4 * size]
    if sizes and not config.memory.tile_tokens and not config.model.window:
        settings = {"memory.tile_tokens": sizes[0]} | _at_most(config, "attention")
        if config.attention.strategy == "all_gather":
            settings["attention.strategy"] = "ring"
        yield Candidate(settings, "runs layers in tiles of tokens; each tile has its own exchanges")


def _everything(config: Config) -> Iterator[Candidate]:
    """All changes together. Groups of layers need less host memory, and one layer's input more on the GPU."""
    settings = {}
    for change in (_tiles, _moments_on_host, _weights_on_host):
        for candidate in change(config):
            settings |= candidate.settings
    settings |= {"memory.remat": "full", "memory.offload": ("residual",)}
    yield Candidate(
        settings,
        "all of these together: recomputes layers; saved activations and the training state are in host memory",
    )
    if config.memory.layers_per_remat_group == 1:
        yield Candidate(
            settings | {"memory.layers_per_remat_group": _group_size(config)},
            f"the same, {_group_size(config)} layers at a time: fewer saved activations in host memory",
        )


def _group_size(config: Config) -> int:
    """The smallest remat group of several layers."""
    period = len(config.model.layer_kinds)
    return period if period > 1 else 2


def _at_most(config: Config, remat: str) -> dict[str, str]:
    """The setting memory.remat=`remat`, if the config saves more activations than that."""
    names = list(_REMAT_COSTS)
    return {"memory.remat": remat} if names.index(config.memory.remat) < names.index(remat) else {}


_BY_COST: tuple[Callable[[Config], Iterator[Candidate]], ...] = (
    _smaller_loss_chunks,
    _smaller_microbatches,
    _fully_sharded_parameters,
    _ring,
    _more_remat,
    _more_context,
    _offload,
    _more_tensor,
    _moments_on_host,
    _weights_on_host,
    _tiles,
    _everything,
)
