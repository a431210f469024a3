"""Checks of a config before JAX starts: ranges, and settings that contradict each other. Imports no jax."""

import re
from collections.abc import Iterator

from jaxlc.config.checks.checkpoint_checks import checkpoint_problems
from jaxlc.config.checks.eval_checks import training_problems
from jaxlc.config.checks.layer_checks import (
    layer_problems,
    layers_by_path,
    size_problems,
    unsupported_problems,
    unused_problems,
)
from jaxlc.config.checks.lora_checks import lora_problems
from jaxlc.config.checks.mesh_checks import (
    check_num_devices,
    length_problems,
    mesh_overrides,
    nearest_multiples,
    node_problems,
    split_problems,
    working_mesh,
)
from jaxlc.config.checks.mixture_checks import mixture_problems
from jaxlc.config.checks.posttrain_checks import posttrain_problems
from jaxlc.config.checks.precision_checks import precision_problems
from jaxlc.config.checks.tile_checks import tile_problems
from jaxlc.config.frozen import SECTIONS, Config
from jaxlc.config.kinds import tensor_names
from jaxlc.config.models.rope_settings import rope_problems
from jaxlc.config.ranges import range_problems
from jaxlc.config.schema import DataConfig
from jaxlc.core.errors import UserError, raise_all, raise_first


def check(config: Config, *, on_devices: bool = True) -> None:
    """Checks all values of `config`.

    Args:
      on_devices: whether the mesh is checked, too.
    Raises:
      UserError: all values that are out of range; or all that contradict others.
    """
    raise_all(problem for section in SECTIONS for problem in range_problems(section, getattr(config, section)))
    for problems in (layer_problems, unused_problems, size_problems, unsupported_problems, _rope_problems):
        raise_first(problems(config))  # later ones rely on the sizes
    checks = (*_CHECKS, _mesh_problems) if on_devices else _CHECKS
    raise_all(problem for problems in checks for problem in problems(config))


def _mesh_problems(config: Config) -> Iterator[str]:
    """What the mesh does not divide: first devices and heads, whose advice is another mesh, then lengths."""
    try:
        if config.runtime.simulated_devices:
            check_num_devices(config, config.runtime.simulated_devices, "config.runtime.simulated_devices is")
    except UserError as error:
        yield str(error)
        return
    for problem in split_problems(config):
        mesh = working_mesh(config, config.mesh.num_devices)
        smaller = "a smaller --config.mesh.tensor or --config.mesh.context"
        advice = f"use {mesh_overrides(config.mesh, mesh)}" if mesh else f"use {smaller}"
        yield f"{problem}; {advice}"
        return
    yield from [*length_problems(config), *node_problems(config)] or tile_problems(config)


def _rope_problems(config: Config) -> Iterator[str]:
    for layers in layers_by_path(config.model).values():
        yield from rope_problems(layers[0])


def _attention_problems(config: Config) -> Iterator[str]:
    attention = config.attention
    if attention.strategy != "hybrid" and attention.ulysses_degree > 1:
        yield (
            f"config.attention.ulysses_degree={attention.ulysses_degree} is for strategy 'hybrid', and"
            f" config.attention.strategy is {attention.strategy!r}; use --config.attention.ulysses_degree=1"
        )


def _optimizer_problems(config: Config) -> Iterator[str]:
    optimizer = config.optimizer
    setting = "optimizer.schedule_steps" if optimizer.schedule_steps else "train.steps"
    steps = optimizer.schedule_steps or config.train.steps
    if optimizer.schedule == "wsd":
        if optimizer.decay_steps == 0:
            yield (
                "config.optimizer.schedule='wsd' needs config.optimizer.decay_steps, usually a tenth of the steps;"
                f" use --config.optimizer.decay_steps={max(1, steps // 10)}"
            )
        if optimizer.warmup_steps + optimizer.decay_steps > steps:
            yield (
                f"config.optimizer.warmup_steps={optimizer.warmup_steps} and decay_steps={optimizer.decay_steps} do not"
                f" fit into config.{setting}={steps}; shorten them or train for"
                f" {optimizer.warmup_steps + optimizer.decay_steps} steps or more"
            )
    elif optimizer.decay_steps:
        yield (
            f"config.optimizer.decay_steps={optimizer.decay_steps} has no effect with config.optimizer.schedule="
            f"{optimizer.schedule!r}, which has no separate decay; use --config.optimizer.schedule=wsd with it, or set"
            " it to 0"
        )
    if optimizer.initial_learning_rate_ratio and not optimizer.warmup_steps:
        yield (
            f"config.optimizer.initial_learning_rate_ratio={optimizer.initial_learning_rate_ratio} has no effect"
            " without a warm-up; set config.optimizer.warmup_steps, or set it to 0"
        )


def _data_problems(config: Config) -> Iterator[str]:
    if not (config.data.sources or config.data.mixture or config.data.traces or config.rollouts.source):
        yield "config.data.sources is empty: give files, directories, glob patterns, or 'python-stdlib'"
    for name, sources in (("sources", config.data.sources), ("eval_sources", config.data.eval_sources)):
        if "" in sources:
            yield f"config.data.{name} is {sources}, with an empty name in it; remove the empty name"
    if config.data.mixture and config.data.sources not in ((), DataConfig().sources):
        yield (
            "config.data.sources and config.data.mixture are both set: add the sources to the mixture, as a source, or"
            " clear them with --config.data.sources="
        )
    yield from mixture_problems(config.data)


def _memory_problems(config: Config) -> Iterator[str]:
    memory = config.memory
    for setting, names in (("save", memory.save), ("offload", memory.offload)):
        for name in names:
            if name not in tensor_names():
                yield f"config.memory.{setting} names {name!r}, which is not one of {', '.join(tensor_names())}"
    twice = sorted(set(memory.save) & set(memory.offload))
    if twice:
        yield f"config.memory.save and config.memory.offload both name {twice[0]!r}; remove it from one of them"
    if memory.remat == "none" and (memory.save or memory.offload or memory.layers_per_remat_group > 1):
        yield (
            "config.memory.remat='none' saves all activations on the device, so memory.save, memory.offload and"
            " memory.layers_per_remat_group have no effect; use --config.memory.remat=full or attention with them"
        )
    if memory.remat == "none" and memory.parameters == "host":
        yield (
            "unsupported: config.memory.parameters='host' with memory.remat='none', which would keep the copied weights"
            " of all layers on the device; use --config.memory.remat=full or attention"
        )
    if memory.remat == "matmuls" and memory.offload:
        yield (
            "unsupported: config.memory.remat='matmuls' with memory.offload; use --config.memory.remat=full and name"
            " the tensors in memory.save and memory.offload"
        )


def _runtime_problems(config: Config) -> Iterator[str]:
    runtime = config.runtime
    if 0 < runtime.num_processes <= runtime.process_id:
        yield (
            f"config.runtime.process_id={runtime.process_id} is too large for num_processes={runtime.num_processes};"
            " processes are numbered from 0"
        )
    if runtime.num_processes and runtime.simulated_devices % runtime.num_processes:
        yield (
            f"config.runtime.simulated_devices={runtime.simulated_devices} does not divide among"
            f" num_processes={runtime.num_processes};"
            f" use {nearest_multiples(runtime.simulated_devices, runtime.num_processes)}"
        )
    address = runtime.coordinator_address
    host, _, port = address.rpartition(":")
    if address and not (host and port.isdigit()):
        yield f"invalid value {address!r} for config.runtime.coordinator_address: expected host:port"
    if runtime.transport == "peer" and runtime.num_processes > 1:
        yield (
            "unsupported: config.runtime.transport='peer', which copies within one process, with"
            f" num_processes={runtime.num_processes}; use --config.runtime.transport=symmetric, nvshmem or nccl"
        )
    if runtime.unified_memory_fraction and not runtime.unified_memory:
        yield (
            f"config.runtime.unified_memory_fraction={runtime.unified_memory_fraction} has no effect without unified"
            " memory; use --config.runtime.unified_memory=True with it"
        )


def _profile_problems(config: Config) -> Iterator[str]:
    steps = config.profile.steps
    match = re.fullmatch(r"([1-9]\d*):([1-9]\d*)", steps)
    if steps and (match is None or int(match[1]) >= int(match[2])):
        yield f"invalid value {steps!r} for config.profile.steps: expected FIRST:END, such as 10:13 for steps 10 to 12"


_CHECKS = (  # they do not depend on each other
    _attention_problems,
    _optimizer_problems,
    _data_problems,
    _memory_problems,
    _runtime_problems,
    _profile_problems,
    checkpoint_problems,
    precision_problems,
    lora_problems,
    training_problems,
    posttrain_problems,
)
