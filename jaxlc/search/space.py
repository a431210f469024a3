"""The settings that a search may change: meshes, attention strategies, microbatches, and what is in
which memory.

Each memory setting has its cost in words. Imports no jax: the leading process of a sweep leaves the
devices to the workers that measure.
"""

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxlc.config import Config, MemoryConfig, unchecked, with_settings
from jaxlc.config.checks.layer_checks import unsupported_problems
from jaxlc.config.checks.mesh_checks import meshes_of, tile_problems
from jaxlc.config.flops import loss_chunk_tokens
from jaxlc.config.values import as_argument, defaults_of
from jaxlc.core import CONTEXT, MESH_AXES, TENSOR, count_text, mesh_text, num_replicas
from jaxlc.core.hardware import Device

Settings = dict[str, Any]  # path -> value: "mesh.context" -> 8

_MLP = ("mlp_gate", "mlp_up")
_QKV = ("query", "key", "value")
_ATTENTION = ("attention_out", "attention_lse")


class Activations(NamedTuple):
    """What a layer keeps for the backward pass. Fields are those of config.memory."""

    remat: str
    cost: str
    save: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()
    layers_per_remat_group: int = 1

    @property
    def settings(self) -> Settings:
        values = self._asdict()
        return {f"memory.{name}": value for name, value in values.items() if name != "cost"}

    def describes(self, memory: MemoryConfig) -> bool:
        is_grouped = memory.layers_per_remat_group > 1
        names = ("remat", "save", "offload")
        return is_grouped == (self.layers_per_remat_group > 1) and all(
            getattr(memory, name) == getattr(self, name) for name in names
        )


ACTIVATIONS = (  # about from the most to the fewest bytes on the GPU
    Activations("none", "saves all activations"),
    Activations("matmuls", "recomputes the cheap parts of a layer"),
    Activations("attention", "recomputes the output projection of attention", save=(*_QKV, *_MLP)),
    Activations("attention", "recomputes the projections of attention", save=_MLP),
    Activations("attention", "recomputes the projections of attention and half of the MLP", save=("mlp_gate",)),
    Activations("attention", "recomputes the MLP", save=_QKV),
    Activations("attention", "recomputes a layer's matrix products, but not attention"),
    Activations("full", "copies saved activations to host memory and back, and recomputes the projections of attention",
                save=_MLP, offload=("residual", *_ATTENTION)),
    Activations("full", "copies saved activations to host memory and back, and recomputes a layer's matrix products",
                offload=("residual", *_ATTENTION)),
    Activations("full", "recomputes a layer's whole forward pass, including its communication"),
    Activations("full", "copies every layer's input to host memory and back, and recomputes everything else",
                offload=("residual",)),
    Activations("attention", "recomputes everything, several layers at a time, whose inputs are in host memory",
                offload=("residual",), layers_per_remat_group=2),
    Activations("full", "recomputes everything, several layers at a time, whose inputs are in host memory, and each"
                " layer of them once more", offload=("residual",), layers_per_remat_group=2),
)  # fmt: skip
STRATEGIES = ("ring", "ulysses", "all_gather", "hybrid")
_TILE_TOKENS = (32_768, 16_384, 8_192)  # larger tiles send KV blocks around the ring fewer times
# (memory.optimizer, memory.parameters)
_STATE = (("device", "device"), ("host", "device"), ("host", "host"))
_STATE_COSTS = {
    "memory.optimizer": "copies AdamW's moments from host memory and back in every update",
    "memory.parameters": "copies weights from host memory twice per step and for the update, and gradients to it",
}
_MIN_CHUNK_TOKENS = 256  # below, the loss's matrix products are too small for the GPU


@dataclass(frozen=True, kw_only=True, eq=False)
class Point:
    """A configuration: `settings` on top of the config `base`."""

    base: Config
    settings: Settings

    @functools.cached_property
    def config(self) -> Config:
        """Not checked."""
        return unchecked(self.base, self.settings)

    def checked(self) -> Config:
        """Raises UserError if the settings are invalid, or contradict each other or the base."""
        return with_settings(self.base, self.settings)

    @property
    def overrides(self) -> str:
        """Command-line flags that turn the base into this point."""
        return overrides(self.settings)

    def columns(self) -> Settings:
        """The settings by field name, without the section: "context" -> 8."""
        return {key.rpartition(".")[2]: value for key, value in self.settings.items()}


def overrides(settings: Settings) -> str:
    """Command-line flags: "--config.mesh.context=8 --config.memory.offload=residual"."""
    return " ".join(f"--config.{path}={as_argument(value)}" for path, value in settings.items())


def meshes(
    config: Config, num_devices: int, axes: Sequence[str] = MESH_AXES
) -> Iterator[dict[str, int]]:
    """Axis sizes of every mesh of `num_devices` devices; axes that are not in `axes` keep their
    size.
    """
    fixed = {axis: size for axis, size in vars(config.mesh).items() if axis not in axes}
    for mesh in sorted(
        meshes_of(num_devices), key=lambda mesh: [getattr(mesh, axis) for axis in axes]
    ):
        if fixed.items() <= vars(mesh).items():
            yield dict(vars(mesh))


def ulysses_degrees(config: Config, mesh: Mapping[str, int]) -> list[int]:
    """Degrees that split context for hybrid, best first.

    First the largest degrees that divide the KV heads, then the smallest ones that repeat KV heads.
    Degree `context` would be ulysses, degree 1 would be ring.
    """
    heads = [
        (
            shape.attention.num_heads // mesh[TENSOR],
            max(1, shape.attention.num_kv_heads // mesh[TENSOR]),
        )
        for shape in map(config.model.layer_config, config.model.used_kinds)
    ]
    degrees = [
        degree
        for degree in range(2, mesh[CONTEXT])
        if mesh[CONTEXT] % degree == 0
        and all(
            queries % degree == 0 and (keys % degree == 0 or degree % keys == 0)
            for queries, keys in heads
        )
    ]
    without_repeats = [degree for degree in degrees if all(keys % degree == 0 for _, keys in heads)]
    return without_repeats[::-1] + [degree for degree in degrees if degree not in without_repeats]


def strategies(
    config: Config,
    mesh: Mapping[str, int],
    names: Sequence[str] = STRATEGIES,
    max_degrees: int | None = None,
) -> Iterator[Settings]:
    """Attention strategies with their Ulysses degrees. With context=1 all are the same program:
    only the first.
    """
    for name in names if mesh[CONTEXT] > 1 else names[:1]:
        degrees = (
            ulysses_degrees(config, mesh)[:max_degrees]
            if name == "hybrid" and mesh[CONTEXT] > 1
            else [1]
        )
        yield from (
            {"attention.strategy": name, "attention.ulysses_degree": degree} for degree in degrees
        )


def mesh_settings(mesh: Mapping[str, int]) -> Settings:
    return {f"mesh.{axis}": size for axis, size in mesh.items()}


def batch_settings(config: Config, mesh: Mapping[str, int], sequences: int) -> Settings:
    """Microbatches of `sequences` per replica; rounds eval_sequences up to a multiple of the
    replicas.
    """
    replicas = num_replicas(mesh)
    return {
        "train.gradient_accumulation_steps": max(
            1, config.train.global_batch_size // (sequences * replicas)
        ),
        "train.eval_sequences": math.ceil(config.train.eval_sequences / replicas) * replicas,
    }


def memory_settings(config: Config) -> Iterator[Settings]:
    """Settings of config.memory for the mesh of `config`, in a few cases invalid ones."""
    tokens = config.data.seq_len // config.mesh.context
    segment = config.model.repeated
    tiles = [size for size in _TILE_TOKENS if tokens % size == 0 and tokens >= 4 * size]
    for activations, tile, (optimizer, parameters) in itertools.product(
        ACTIVATIONS, (0, *tiles), _STATE
    ):
        group = activations.layers_per_remat_group
        if group > 1:
            group = max(group, len(segment.kinds))
        settings = activations.settings | {
            "memory.layers_per_remat_group": group,
            "memory.tile_tokens": tile,
            "memory.optimizer": optimizer,
            "memory.parameters": parameters,
        }
        if segment.num_layers % group or (parameters == "host" and activations.remat == "none"):
            continue
        candidate = unchecked(config, settings)
        if any(tile_problems(candidate)) or any(unsupported_problems(candidate)):
            continue
        yield settings


def changes(config: Config, device: Device) -> Iterator[Settings]:
    """Settings that differ from `config`: those of its memory, smaller chunks of the loss, smaller
    microbatches.
    """
    steps = config.train.gradient_accumulation_steps
    chunk = loss_chunk_tokens(config.model, config, device)
    smaller = [size for size in (chunk // 4, chunk // 16) if size >= _MIN_CHUNK_TOKENS]
    chunks = [config.memory.loss_chunk_tokens, *smaller]
    can_halve = config.train.global_batch_size % (2 * steps * config.mesh.num_replicas) == 0
    microbatches = (steps, 2 * steps) if can_halve else (steps,)
    given = {path: value_of(config, path) for path in next(memory_settings(config))}
    for settings in (
        given,
        *(settings for settings in memory_settings(config) if settings != given),
    ):
        for chunk_tokens, num_microbatches in itertools.product(chunks, microbatches):
            also = {
                "memory.loss_chunk_tokens": chunk_tokens,
                "train.gradient_accumulation_steps": num_microbatches,
            }
            changed = {
                path: x for path, x in (settings | also).items() if x != value_of(config, path)
            }
            if changed:
                yield changed


def cost(config: Config, changed: Settings) -> str:
    """What the changed settings cost, in words."""
    costs = []
    if any(f"memory.{name}" in changed for name in Activations._fields):
        memory = unchecked(config, changed).memory
        costs += [activations.cost for activations in ACTIVATIONS if activations.describes(memory)]
    if changed.get("memory.tile_tokens"):
        costs.append("runs layers in tiles of tokens; each tile has its own exchanges")
    costs += [text for path, text in _STATE_COSTS.items() if changed.get(path) == "host"]
    if "train.gradient_accumulation_steps" in changed:
        costs.append("smaller microbatches; weights are gathered for each")
    if "memory.loss_chunk_tokens" in changed:
        costs.append("smaller matrix products in the loss")
    return "; ".join(costs)


def value_of(config: Config, path: str) -> Any:
    section, _, name = path.partition(".")
    return getattr(getattr(config, section), name)


def departures(config: Config) -> list[str]:
    """Settings of attention and memory that differ from `defaults()`."""
    return [
        f"{section}.{name}"
        for section, part in (("attention", config.attention), ("memory", config.memory))
        for name, default in defaults_of(type(part)).items()
        if getattr(part, name) != default
    ]


def name_of(config: Config) -> str:
    """Such as "context=8 ulysses, 4 microbatches, save=mlp_gate,mlp_up"."""
    layout = layout_name(
        vars(config.mesh), config.attention.strategy, config.attention.ulysses_degree
    )
    steps = config.train.gradient_accumulation_steps
    changed = [path for path in departures(config) if "memory" in path]
    values = {
        path.removeprefix("memory."): value_of(config, path) for path in ("memory.remat", *changed)
    }
    texts = (f"{name}={as_argument(value)}" for name, value in values.items())
    return f"{layout}, {count_text(steps, 'microbatch', 'es')}, {' '.join(texts)}"


def layout_name(mesh: Mapping[str, int], strategy: str, degree: int) -> str:
    """Such as "fsdp=2 x context=4 hybrid/2"; with context=1 all strategies are the same program."""
    sizes = mesh_text({axis: size for axis, size in mesh.items() if size > 1}) or "1 GPU"
    hybrid = f"/{degree}" if strategy == "hybrid" else ""
    return f"{sizes} {strategy}{hybrid}" if mesh[CONTEXT] > 1 else sizes


def row_name(row: Mapping[str, Any]) -> str:
    """`layout_name` of the point of a row."""
    return layout_name(
        {axis: row[axis] for axis in MESH_AXES}, row["strategy"], row["ulysses_degree"]
    )
