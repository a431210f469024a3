"""Changes of a config that make its step fit, each found by compiling it: single ones, and at last all together."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import NamedTuple

from ml_collections import ConfigDict

from jaxlc.config import Config, with_settings
from jaxlc.core.axes import BATCH_AXES, CONTEXT, DATA, FSDP, TENSOR
from jaxlc.core.errors import UserError
from jaxlc.plan.compile import on_gpus, plan_step
from jaxlc.plan.memory import Memory
from jaxlc.plan.report import Change, Plan
from jaxlc.simulate.topology import Topology

_ENOUGH = 2  # changes that fit; the rest costs the user more
_FEWEST_CHUNK_TOKENS = 256  # below, the loss's matrix products are too small for the GPU
_TILE_TOKENS = (32_768, 16_384, 8_192)  # the larger the fewer times around a ring
_REMAT_COSTS = {  # each keeps less than the one before
    "none": "",
    "matmuls": "what is cheap in a layer is computed twice",
    "attention": "a layer's matrix products are computed twice, attention is not",
    "full": "a layer's whole forward is computed twice, with its hops",
}


class Candidate(NamedTuple):
    """A change of one thing, which may take several settings."""

    settings: dict[str, int | str | tuple[str, ...]]  # "memory.remat" -> "full"
    cost: str  # in time, in words

    @property
    def overrides(self) -> str:
        texts = {name: ",".join(x) if isinstance(x, tuple) else x for name, x in self.settings.items()}
        return " ".join(f"--config.{name}={text}" for name, text in texts.items())


def plan_with_advice(config: ConfigDict | Config, gpus: Topology, starting: Callable[[str], None], **options) -> Plan:
    """The plan of `config`, with advice if it does not fit; see `compile.plan_step`.

    Args:
      starting: is told what is compiled next.
      options: of `compile.plan_step`, for `config` itself.
    """
    config = on_gpus(config, gpus)
    found = plan_step(config, gpus, lambda: starting(f"the training step for {gpus}"), **options)
    if found.memory.fits:
        return found
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
        if sum(change.fits for change in changes) == _ENOUGH:
            break
    return dataclasses.replace(found, advice=tuple(changes))


def _memory_with(config: Config, candidate: Candidate, gpus: Topology, starting) -> Memory | None:
    """None if the change contradicts the rest of the config."""
    try:
        changed = with_settings(config, candidate.settings)
        return plan_step(changed, gpus, lambda: starting(f"with {candidate.overrides}")).memory
    except UserError:
        return None


def candidates(config: Config) -> Iterator[Candidate]:
    """Changes that may save memory, those that cost least time first. Not all of them need be possible."""
    for changes in _CHEAPEST_FIRST:
        yield from changes(config)


def _smaller_loss_chunks(config: Config) -> Iterator[Candidate]:
    tokens = config.memory.loss_chunk_tokens // 4
    if tokens >= _FEWEST_CHUNK_TOKENS:
        yield Candidate({"memory.loss_chunk_tokens": tokens}, "smaller matrix products in the loss")


def _fewer_rows_at_a_time(config: Config) -> Iterator[Candidate]:
    steps = 2 * config.train.gradient_accumulation_steps
    yield Candidate(
        {"train.gradient_accumulation_steps": steps}, "the batch in more parts, and weights gathered for each"
    )


def _parameters_split(config: Config) -> Iterator[Candidate]:
    if config.mesh.data > 1:
        yield Candidate(
            {"mesh.data": 1, "mesh.fsdp": config.mesh.fsdp * config.mesh.data}, "each layer's weights are gathered"
        )


def _more_remat(config: Config) -> Iterator[Candidate]:
    names = list(_REMAT_COSTS)
    for name in names[names.index(config.memory.remat) + 1 :]:
        yield Candidate({"memory.remat": name}, _REMAT_COSTS[name])


def _offload(config: Config) -> Iterator[Candidate]:
    """Layers' inputs to the host, and fewer of them."""
    if "residual" not in config.memory.offload:
        settings = {"memory.remat": "full", "memory.offload": (*config.memory.offload, "residual")}
        yield Candidate(settings, "every layer's input to host memory and back, beside everything being recomputed")
    if config.memory.layers_per_remat_group == 1:
        settings = {"memory.remat": "attention", "memory.layers_per_remat_group": 2}
        yield Candidate(settings, "everything computed again, two layers at a time")


def _ring(config: Config) -> Iterator[Candidate]:
    if config.attention.strategy in ("all_gather", "ulysses"):
        yield Candidate({"attention.strategy": "ring"}, "hops, which hide behind attention where it takes long enough")


def _more_context(config: Config) -> Iterator[Candidate]:
    """Context in place of another axis; of rows, so many fewer at a time."""
    for axis in (FSDP, DATA, TENSOR):
        size = getattr(config.mesh, axis)
        for factor in dict.fromkeys((2, size)):
            if size % factor or size == 1:
                continue
            settings = {f"mesh.{axis}": size // factor, f"mesh.{CONTEXT}": config.mesh.context * factor}
            if axis in BATCH_AXES:
                settings["train.gradient_accumulation_steps"] = config.train.gradient_accumulation_steps * factor
            yield Candidate(settings, f"a longer ring in place of {axis}")


def _more_tensor(config: Config) -> Iterator[Candidate]:
    if config.mesh.context % 2 == 0:
        settings = {"mesh.context": config.mesh.context // 2, "mesh.tensor": config.mesh.tensor * 2}
        yield Candidate(settings, "a shorter ring, and more to gather around each matrix product")


def _moments_on_host(config: Config) -> Iterator[Candidate]:
    if config.memory.optimizer == "device":
        yield Candidate({"memory.optimizer": "host"}, "AdamW's moments from host memory and back in every update")


def _weights_on_host(config: Config) -> Iterator[Candidate]:
    if config.memory.parameters == "device":
        settings = {"memory.parameters": "host"} | _at_most(config, "attention")
        yield Candidate(settings, "weights from host memory twice a step and for the update, gradients there")


def _tiles(config: Config) -> Iterator[Candidate]:
    """Of the sizes that divide a device's tokens the largest that leaves four tiles or more."""
    tokens = config.data.seq_len // config.mesh.context
    sizes = [size for size in _TILE_TOKENS if tokens % size == 0 and tokens >= 4 * size]
    if sizes and not config.memory.tile_tokens:
        settings = {"memory.tile_tokens": sizes[0]} | _at_most(config, "attention")
        if config.attention.strategy == "all_gather":
            settings["attention.strategy"] = "ring"
        yield Candidate(settings, "layers in tiles of tokens, each with an exchange or a ring of its own")


def _everything(config: Config) -> Iterator[Candidate]:
    """Where no single change is enough. Groups of layers spare the host; the GPU then holds a layer's input more."""
    settings = {}
    for change in (_tiles, _moments_on_host, _weights_on_host):
        for candidate in change(config):
            settings |= candidate.settings
    settings |= {"memory.remat": "full", "memory.offload": ("residual",)}
    yield Candidate(settings, "all of these together: layers computed again, and what waits is on the host")
    if config.memory.layers_per_remat_group == 1:
        yield Candidate(
            settings | {"memory.layers_per_remat_group": 2}, "the same, two layers at a time: half of it on the host"
        )


def _at_most(config: Config, remat: str) -> dict[str, str]:
    """The setting of remat, if layers keep more now than with `remat`."""
    names = list(_REMAT_COSTS)
    return {"memory.remat": remat} if names.index(config.memory.remat) < names.index(remat) else {}


_CHEAPEST_FIRST: tuple[Callable[[Config], Iterator[Candidate]], ...] = (
    _smaller_loss_chunks,
    _fewer_rows_at_a_time,
    _parameters_split,
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
