"""Checks that a mesh divides heads, features, sequence and batch, and a search for one that does;
checks of memory.tile_tokens. Imports no jax.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator

from jaxlc.config.checks.layer_checks import layers_by_path
from jaxlc.config.files import read_config
from jaxlc.config.frozen import Config
from jaxlc.config.kinds import blocks_of, mixers_of
from jaxlc.config.schema import MeshConfig
from jaxlc.core import UserError, count_text, mesh_text, raise_first

# With tiles, only these tensors of a layer exist for the whole sequence at once.
_WHOLE_TENSORS = ("residual", "attention_out", "attention_lse")
_TOGETHER = ("attention_out", "attention_lse")


def tile_problems(config: Config) -> Iterator[str]:
    """Reasons why the layers of `config` cannot run in tiles; none without tiles."""
    memory = config.memory
    attention = config.attention
    mesh = config.mesh
    tile_tokens = config.memory.tile_tokens
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
    per_device = config.data.seq_len // mesh.context
    pieces = 2 * mesh.tensor
    if per_device % tile_tokens or tile_tokens % pieces:
        sizes = (size for size in range(pieces, per_device + 1, pieces) if per_device % size == 0)
        nearest = min(sizes, key=lambda size: abs(size - tile_tokens), default=per_device)
        yield (
            f"{setting} does not divide the {per_device} tokens of a device (data.seq_len / mesh.context), or"
            f" is not a multiple of 2 x mesh.tensor = {pieces}; use {nearest}"
        )
    for path, layer in layers_by_path(config.model):
        for mixer in mixers_of(layer).values():
            yield from mixer.tile_problems(layer, config, path)


def check_num_devices(
    config: Config, num_devices: int, there_are: str, config_path: str = ""
) -> None:
    """Checks that the mesh has `num_devices` devices.

    Args:
      there_are: the source of the number in the message, such as "the number of available devices is"; the number is
        appended.
      config_path: name or path of the config, with its variant; "": none.
    Raises:
      UserError: the number differs; the message has overrides or commands that work.
    """
    if config.mesh.num_devices == num_devices:
        return
    sizes = mesh_text(vars(config.mesh))
    problem = f"the mesh {sizes} needs {count_text(config.mesh.num_devices, 'device')} but {there_are} {num_devices}"
    if config.runtime.topology and config_path:
        small = f"{config_path.partition(':')[0]}:mini"
        run_small = (
            f", or run a small version with `jaxlc train --config={small}`"
            if _runs_anywhere(small)
            else ""
        )
        raise UserError(
            f"{problem}; the config is made for {config.runtime.topology}: run it there, or compile it ahead of time"
            f" with `jaxlc plan --config={config_path} --topology={config.runtime.topology}`{run_small}"
        )
    mesh = working_mesh(config, num_devices)
    ways = [] if mesh is None else [mesh_overrides(config.mesh, mesh)]
    if _splits(config):
        ways.append(f"--config.runtime.simulated_devices={config.mesh.num_devices}, on CPU")
    advice = (
        f"use {', or '.join(ways)}"
        if ways
        else "no mesh of either size divides this model and batch"
    )
    raise UserError(f"{problem}; {advice}")


def _runs_anywhere(config_path: str) -> bool:
    """Whether a config file has this variant, and it is made for no particular GPUs."""
    try:
        return not read_config(config_path).runtime.topology
    except UserError:
        return False


def working_mesh(config: Config, num_devices: int) -> MeshConfig | None:
    """The mesh of `num_devices` devices that divides model and batch and is nearest to that of
    `config`, or None.
    """

    def distance(mesh: MeshConfig) -> float:
        sizes = zip(vars(config.mesh).values(), vars(mesh).values())
        return sum(abs(math.log(new / old)) for old, new in sizes)

    meshes = [
        mesh for mesh in meshes_of(num_devices) if _splits(dataclasses.replace(config, mesh=mesh))
    ]
    return min(meshes, key=distance, default=None)


def _splits(config: Config) -> bool:
    return not any(
        (*split_problems(config), *length_problems(config), *evaluation_problems(config))
    )


def mesh_overrides(old: MeshConfig, new: MeshConfig) -> str:
    """The overrides that turn the mesh `old` into `new`: "--config.mesh.context=2"."""
    sizes = vars(old)
    return " ".join(
        f"--config.mesh.{axis}={size}" for axis, size in vars(new).items() if size != sizes[axis]
    )


def meshes_of(num_devices: int) -> Iterator[MeshConfig]:
    """All meshes of `num_devices` devices."""
    divisors = [n for n in range(1, num_devices + 1) if num_devices % n == 0]
    for tensor, context, fsdp in itertools.product(divisors, repeat=3):
        data, rest = divmod(num_devices, tensor * context * fsdp)
        if not rest:
            yield MeshConfig(data=data, fsdp=fsdp, context=context, tensor=tensor)


def split_problems(config: Config) -> Iterator[str]:
    """Dimensions of the model that the mesh does not divide, and a context axis that the strategy
    does not divide.
    """
    yield from dict.fromkeys(
        problem
        for path, layer in layers_by_path(config.model)
        for block in blocks_of(layer)
        for problem in block.mesh_problems(layer, config, path)
    )
    attention = config.attention
    mesh = config.mesh
    if attention.strategy == "hybrid" and mesh.context % attention.ulysses_degree:
        yield (
            f"config.mesh.context={mesh.context} is not divisible by config.attention.ulysses_degree="
            f"{attention.ulysses_degree}, as strategy 'hybrid' requires"
        )


def node_problems(config: Config) -> Iterator[str]:
    """Reasons why the mesh has no nodes of memory.node_copy_devices devices, or they cannot have
    copies of weights.
    """
    mesh = config.mesh
    num_devices = config.memory.node_copy_devices
    setting = f"config.memory.node_copy_devices={num_devices}"
    if not num_devices:
        return
    if num_devices == mesh.num_devices:
        yield f"{setting} has no effect, since the mesh is one node; use --config.memory.node_copy_devices=0"
    ranks, rest = divmod(num_devices, mesh.tensor)
    fsdp_ranks, rest_of_context = divmod(ranks, mesh.context)
    is_part_of_context = mesh.context % max(1, ranks) == 0
    if rest or not (is_part_of_context or (rest_of_context == 0 and mesh.fsdp % fsdp_ranks == 0)):
        yield (
            f"{setting} is not a node of the mesh {mesh_text(vars(mesh))}: it must be mesh.tensor times a divisor of"
            " mesh.context, or mesh.tensor x mesh.context times a divisor of mesh.fsdp; use another mesh, or"
            " --config.memory.node_copy_devices=0"
        )
    if config.memory.parameters == "host":
        yield (
            f"unsupported: {setting} with memory.parameters='host', whose weights are copied to the device layer by"
            " layer; use --config.memory.parameters=device"
        )
    if config.precision.compute == "fp8":
        yield (
            f"unsupported: {setting} with precision.compute='fp8', whose products are scaled over all ranks;"
            " use --config.precision.compute=bf16"
        )


def length_problems(config: Config) -> Iterator[str]:
    """Sequence and batch sizes that the mesh does not divide."""
    mesh = config.mesh
    train = config.train
    num_tokens = config.data.seq_len
    piece = 2 * mesh.context * mesh.tensor
    if num_tokens % piece:
        yield (
            f"config.data.seq_len={num_tokens} is not divisible by 2 x mesh.context x mesh.tensor = {piece};"
            f" use {nearest_multiples(num_tokens, piece)}"
        )
    parts = train.gradient_accumulation_steps * mesh.num_replicas
    if train.global_batch_size % parts:
        yield (
            f"config.train.global_batch_size={train.global_batch_size} is not divisible by"
            f" train.gradient_accumulation_steps x mesh.data x mesh.fsdp = {parts};"
            f" use {nearest_multiples(train.global_batch_size, parts)}"
        )


def check_evaluation(config: Config) -> None:
    """Checks that the mesh divides the sequences of an evaluation. Not part of `load`: a plan has
    no evaluation.

    Raises:
      UserError: it does not; the message has the nearest values that work.
    """
    raise_first(evaluation_problems(config))


def evaluation_problems(config: Config) -> Iterator[str]:
    """Evaluation batches that the mesh does not divide."""
    train = config.train
    replicas = config.mesh.num_replicas
    if train.eval_sequences % replicas:
        yield (
            f"config.train.eval_sequences={train.eval_sequences} is not divisible by mesh.data x mesh.fsdp"
            f" = {replicas}; use {nearest_multiples(train.eval_sequences, replicas)}"
        )


def nearest_multiples(value: int, divisor: int) -> str:
    """For messages: the multiples of `divisor` around `value`, without 0."""
    below = value // divisor * divisor
    return f"{below} or {below + divisor}" if below else f"{divisor}"
