"""The search space of a recommendation: meshes x attention strategies x microbatches x memory settings.

A layout is a context size, a tensor size and a strategy. Of its splits of the batch over data and fsdp, microbatches
and memory settings only the fastest that fit matter, so a layout offers them in order of estimated time: the next one
is needed only if the compiled step does not fit, although the formula expected it to.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxlc.config import Config
from jaxlc.config.checks.mesh_checks import length_problems, meshes_of, split_problems
from jaxlc.config.checks.tile_checks import tile_problems
from jaxlc.config.schema import MeshConfig
from jaxlc.core.axes import mesh_text
from jaxlc.core.errors import UserError
from jaxlc.search.memory_formula import MemoryEstimate, estimate_memory
from jaxlc.search.time_formula import ProductTimes, TimeEstimate, estimate_time
from jaxlc.simulate.roofline import Roofline
from jaxlc.simulate.topology import Topology, make_mesh
from jaxlc.step.step import build_step

Settings = dict[str, Any]

_ATTENTION_TENSORS = ("attention_out", "attention_lse")
# (memory.remat, memory.offload, memory.layers_per_remat_group): saved activations, from the most to the fewest bytes.
_ACTIVATIONS = (
    ("none", (), 1),
    ("matmuls", (), 1),
    ("attention", (), 1),
    ("full", ("residual", *_ATTENTION_TENSORS), 1),
    ("full", (), 1),
    ("full", ("residual",), 1),
    ("attention", ("residual",), 2),
    ("full", ("residual",), 2),
)
_TILE_TOKENS = (32_768, 16_384, 8_192)
_STATE = (("device", "device"), ("host", "device"), ("host", "host"))  # (memory.optimizer, memory.parameters)
_MAX_MICROBATCH = 8  # sequences of a microbatch on one replica


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One configuration with its estimates. `config` is not checked yet."""

    settings: Settings  # path -> value, on top of the given config
    config: Config
    gpus: Topology
    time: TimeEstimate
    memory: MemoryEstimate

    @property
    def name(self) -> str:
        """Such as "context=8 ulysses, 4 microbatches, remat=full tile_tokens=32768"."""
        config = self.config
        sizes = mesh_text({axis: size for axis, size in vars(config.mesh).items() if size > 1}) or "1 GPU"
        attention, memory = config.attention, config.memory
        degree = f"/{attention.ulysses_degree}" if attention.strategy == "hybrid" else ""
        parts = [f"remat={memory.remat}"]
        if memory.offload:
            parts.append(f"offload={','.join(memory.offload)}")
        for field, default in (("layers_per_remat_group", 1), ("tile_tokens", 0), ("optimizer", "device")):
            if getattr(memory, field) != default:
                parts.append(f"{field}={getattr(memory, field)}")
        if memory.parameters == "host":
            parts.append("parameters=host")
        strategy = f" {attention.strategy}{degree}" if config.mesh.context > 1 else ""
        steps = config.train.gradient_accumulation_steps
        return f"{sizes}{strategy}, {steps} microbatch{'es' if steps > 1 else ''}, {' '.join(parts)}"


class KernelsOf:
    """The attention kernels that configs would use, by kind of layers; each case is decided once."""

    def __init__(self, gpus: Topology):
        self._gpus = gpus
        self._known: dict[tuple, Mapping[str, str] | None] = {}

    def __call__(self, config: Config) -> Mapping[str, str] | None:
        """Kernel by kind, as named in `Roofline.attention_share`; None if the requested kernel is unsupported."""
        attention, mesh = config.attention, config.mesh
        tokens = config.memory.tile_tokens or config.data.seq_len // mesh.context
        sequences = config.tokens_per_step // config.data.seq_len // (mesh.data * mesh.fsdp)
        size = tokens * sequences * config.model.num_heads * config.model.head_dim // mesh.tensor
        size //= config.train.gradient_accumulation_steps
        key = (attention.strategy, attention.document_mask, attention.kernel, size >= 2**31)
        if key not in self._known:
            self._known[key] = self._kernels(config)
        return self._known[key]

    def _kernels(self, config: Config) -> Mapping[str, str] | None:
        try:
            kernels = build_step(config, make_mesh(self._gpus, config.mesh)).kernels
        except UserError:
            return None
        packed = "_packed" if config.attention.document_mask else ""
        names = {kind: kernel.name for kind, kernel in kernels.items()}
        return {kind: name + packed if name == "cudnn" else name for kind, name in names.items()}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Context, tensor and strategy, with the other settings that may fit, fastest first."""

    candidates: Sequence[Candidate]
    num_too_large: int  # settings that do not fit by the formula


def layouts(config: Config, gpus: Topology, roofline: Roofline, memory_margin: float) -> Iterator[Layout]:
    """All layouts of `gpus` that divide the model, the sequence and the batch of `config`.

    Args:
      memory_margin: settings are kept if this fraction of their estimated memory fits, because estimates may be too
        high.
    """
    kernels_of, products = KernelsOf(gpus), ProductTimes(gpus.device, roofline)
    memories = [(settings, _with(config, settings).memory) for settings in _memory_settings(config)]
    for variants in _layout_settings(config, gpus):
        fitting, num_too_large = [], 0
        for settings in variants:
            layout = _with(config, settings)
            if any(split_problems(layout)) or any(length_problems(layout)):
                continue
            for memory_settings, memory in memories:
                variant = dataclasses.replace(layout, memory=memory)
                is_invalid = not _divides(variant) or any(tile_problems(variant))
                kernels = None if is_invalid else kernels_of(variant)
                if kernels is None:
                    continue
                candidate = Candidate(
                    settings=settings | memory_settings,
                    config=variant,
                    gpus=gpus,
                    time=estimate_time(variant, gpus, roofline, kernels, products),
                    memory=estimate_memory(variant, gpus, kernels.get("full", next(iter(kernels.values())))),
                )
                if candidate.memory.fits(memory_margin):
                    fitting.append(candidate)
                else:
                    num_too_large += 1
        if fitting or num_too_large:
            yield Layout(candidates=sorted(fitting, key=_speed), num_too_large=num_too_large)


def _divides(config: Config) -> bool:
    """Whether tiles divide the tokens of a device; faster than `tile_problems`, which finds a size that does."""
    tile_tokens, mesh = config.memory.tile_tokens, config.mesh
    return not tile_tokens or not (config.data.seq_len // mesh.context % tile_tokens or tile_tokens % (2 * mesh.tensor))


def _speed(candidate: Candidate) -> tuple[int, int, float]:
    """Orders candidates by time; of those that differ by less than 0.5%, the simplest is first, then the smallest."""
    memory = candidate.config.memory
    is_set = (memory.offload, memory.tile_tokens, memory.optimizer == "host", memory.parameters == "host")
    num_set = sum(map(bool, is_set)) + (memory.layers_per_remat_group > 1)
    return round(math.log(candidate.time.step_seconds) / 0.005), num_set, candidate.memory.load


def _with(config: Config, settings: Settings) -> Config:
    """The config with other values, without the checks of `jaxlc.config.with_settings`, which take milliseconds."""
    sections: dict[str, dict[str, Any]] = {}
    for path, value in settings.items():
        section, _, name = path.partition(".")
        sections.setdefault(section, {})[name] = value
    return dataclasses.replace(
        config, **{name: dataclasses.replace(getattr(config, name), **values) for name, values in sections.items()}
    )


def _layout_settings(config: Config, gpus: Topology) -> Iterator[list[Settings]]:
    """For each layout its settings: of a mesh, a strategy, and microbatches of up to `_MAX_MICROBATCH` sequences."""
    by_shape: dict[tuple, list[Settings]] = {}
    for mesh in meshes_of(gpus.num_gpus):
        replicas = mesh.data * mesh.fsdp
        if config.train.global_batch_size % replicas:
            continue
        per_replica = config.train.global_batch_size // replicas
        sizes = [size for size in range(1, _MAX_MICROBATCH + 1) if per_replica % size == 0]
        for (strategy, degree), size in itertools.product(_strategies(mesh), sizes):
            settings = {
                **{f"mesh.{axis}": size for axis, size in vars(mesh).items()},
                "attention.strategy": strategy,
                "attention.ulysses_degree": degree,
                "runtime.topology": str(gpus),
                "data.seq_len": config.data.seq_len,
                "train.global_batch_size": config.train.global_batch_size,
                "train.gradient_accumulation_steps": per_replica // size,
                "train.eval_sequences": -(-config.train.eval_sequences // replicas) * replicas,
            }
            by_shape.setdefault((mesh.context, mesh.tensor, strategy, degree), []).append(settings)
    yield from by_shape.values()


def _strategies(mesh: MeshConfig) -> Iterator[tuple[str, int]]:
    """Strategies and Ulysses degrees; with context=1 all are the same program."""
    yield "ring", 1
    if mesh.context > 1:
        yield "ulysses", 1
        yield "all_gather", 1
        for degree in range(2, mesh.context):
            if mesh.context % degree == 0:
                yield "hybrid", degree


def _memory_settings(config: Config) -> Iterator[Settings]:
    period = len(config.model.layer_kinds)
    tiles = (0, *_TILE_TOKENS) if not config.model.window else (0,)
    for (remat, offload, group), tile, (optimizer, parameters) in itertools.product(_ACTIVATIONS, tiles, _STATE):
        if (remat == "none" and parameters == "host") or (tile and remat not in ("full", "attention")):
            continue
        if group > 1 and config.model.num_layers % max(group, period):
            continue
        yield {
            "memory.remat": remat,
            "memory.offload": offload,
            "memory.save": (),
            "memory.layers_per_remat_group": group if group == 1 else max(group, period),
            "memory.tile_tokens": tile,
            "memory.optimizer": optimizer,
            "memory.parameters": parameters,
            "memory.loss_chunk_tokens": 0,
        }
