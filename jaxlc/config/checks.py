"""Checks of a config before JAX starts: ranges, and settings that contradict each other. Imports no jax."""

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from jaxlc.config.eval_checks import training_problems
from jaxlc.config.frozen import Config
from jaxlc.config.layer_checks import layer_problems
from jaxlc.config.lora_checks import lora_problems
from jaxlc.config.mesh_checks import check_num_devices, length_problems, mesh_overrides, split_problems, working_mesh
from jaxlc.config.mixture import mixture_problems
from jaxlc.config.precision_checks import precision_problems
from jaxlc.config.rope_settings import rope_problems
from jaxlc.config.schema import TENSOR_NAMES, DataConfig
from jaxlc.config.tile_checks import tile_problems
from jaxlc.core.axes import MESH_AXES
from jaxlc.core.errors import UserError


class _Range(NamedTuple):
    text: str
    holds: Callable[[float], bool]


_FROM_0 = _Range("at least 0", lambda x: x >= 0)
_FROM_1 = _Range("at least 1", lambda x: x >= 1)
_POSITIVE = _Range("greater than 0", lambda x: x > 0)
_FRACTION = _Range("at least 0 and less than 1", lambda x: 0 <= x < 1)
_OPEN_FRACTION = _Range("greater than 0 and less than 1", lambda x: 0 < x < 1)
_FRACTION_OR_1 = _Range("between 0 and 1", lambda x: 0 <= x <= 1)

RANGES: dict[str, dict[str, _Range]] = {
    "model": dict(
        vocab_size=_FROM_1,
        num_layers=_FROM_1,
        model_dim=_FROM_1,
        num_heads=_FROM_1,
        num_kv_heads=_FROM_1,
        head_dim=_FROM_1,
        ffn_dim=_FROM_1,
        norm_epsilon=_POSITIVE,
        window=_FROM_0,
        sliding_rope_theta=_POSITIVE,
        query_scale_dim=_FROM_0,
        rope_theta=_POSITIVE,
        rope_scaling_factor=_FROM_1,
        rope_scaling_low_freq_factor=_POSITIVE,
        rope_scaling_high_freq_factor=_POSITIVE,
        rope_scaling_original_tokens=_Range("0 or at least 2", lambda x: x == 0 or x > 1),
        rope_scaling_beta_fast=_POSITIVE,
        rope_scaling_beta_slow=_POSITIVE,
        rope_scaling_attention_factor=_FROM_0,
        rope_fraction=_Range("greater than 0 and at most 1", lambda x: 0 < x <= 1),
    ),
    "mesh": dict.fromkeys(MESH_AXES, _FROM_1),
    "attention": dict(ulysses_degree=_FROM_1, query_block_tokens=_FROM_1, key_block_tokens=_FROM_1),
    "data": dict(
        seq_len=_FROM_1,
        eval_fraction=_OPEN_FRACTION,
        max_bad_records=_FROM_0,
        tokenizing_processes=_FROM_0,
        seed=_FROM_0,
        prefetch_steps=_FROM_0,
    ),
    "optimizer": dict(
        learning_rate=_FROM_0,
        warmup_steps=_FROM_0,
        decay_steps=_FROM_0,
        initial_learning_rate_ratio=_FRACTION_OR_1,
        final_learning_rate_ratio=_FRACTION_OR_1,
        schedule_steps=_FROM_0,
        schedule_start=_FROM_0,
        beta1=_FRACTION,
        beta2=_FRACTION,
        epsilon=_POSITIVE,
        weight_decay=_FROM_0,
        max_grad_norm=_FROM_0,
    ),
    "precision": dict(
        fp8_amax_history_len=_FROM_1,
        loss_scale=_POSITIVE,
        loss_scale_growth_factor=_FROM_1,
        loss_scale_growth_interval=_FROM_1,
        loss_scale_backoff_factor=_FRACTION,
        loss_scale_min=_POSITIVE,
        loss_scale_max=_POSITIVE,
    ),
    "lora": dict(rank=_FROM_0, alpha=_POSITIVE),
    "memory": dict(layers_per_remat_group=_FROM_1, tile_tokens=_FROM_0, loss_chunk_tokens=_FROM_0),
    "runtime": dict(
        simulated_devices=_FROM_0,
        num_processes=_FROM_0,
        process_id=_Range("at least 0, or -1", lambda x: x >= -1),
        start_timeout_seconds=_FROM_1,
        heartbeat_seconds=_FROM_1,
        nvshmem_heap_bytes=_FROM_0,
        memory_fraction=_Range("greater than 0 and at most 1", lambda x: 0 < x <= 1),
        pinned_host_gib=_FROM_0,
        unified_memory_fraction=_Range("0 or greater than 1", lambda x: x == 0 or x > 1),
    ),
    "train": dict(
        steps=_FROM_1,
        global_batch_size=_FROM_1,
        gradient_accumulation_steps=_FROM_1,
        seed=_FROM_0,
        z_loss=_FROM_0,
        eval_every_steps=_FROM_0,
        eval_sequences=_FROM_1,
        checkpoint_every_steps=_FROM_0,
        keep_checkpoints=_FROM_1,
        log_every_steps=_FROM_1,
    ),
    "profile": {},
    "evals": dict(every_steps=_FROM_0, num_examples=_FROM_1, num_needles=_FROM_1, batch_size=_FROM_1, seed=_FROM_0),
}


def check(config: Config) -> None:
    """Checks all values of `config`.

    Raises:
      UserError: the first value that is out of range or contradicts another one.
    """
    for section, ranges in RANGES.items():
        for name, allowed in ranges.items():
            value = getattr(getattr(config, section), name)
            if not allowed.holds(value):
                raise UserError(f"invalid value {value} for config.{section}.{name}: expected {allowed.text}")
    for problems in (
        _model_problems,
        layer_problems,
        _optimizer_problems,
        _data_problems,
        _memory_problems,
        _runtime_problems,
        _profile_problems,
    ):
        _raise_first(problems(config))
    # Checked before divisibility, whose advice keeps the number of devices.
    if config.runtime.simulated_devices:
        check_num_devices(config, config.runtime.simulated_devices, "config.runtime.simulated_devices is")
    for problem in split_problems(config):
        mesh = working_mesh(config, config.mesh.num_devices)
        smaller = "a smaller --config.mesh.tensor or --config.mesh.context"
        advice = f"use {mesh_overrides(config.mesh, mesh)}" if mesh else f"use {smaller}"
        raise UserError(f"{problem}; {advice}")
    _raise_first(length_problems(config))
    _raise_first(tile_problems(config))
    _raise_first(precision_problems(config))
    _raise_first(lora_problems(config))
    _raise_first(training_problems(config))


def _raise_first(problems: Iterator[str]) -> None:
    problem = next(problems, None)
    if problem is not None:
        raise UserError(problem)


def _model_problems(config: Config) -> Iterator[str]:
    model = config.model
    if model.num_heads % model.num_kv_heads:
        yield (
            f"config.model.num_heads={model.num_heads} is not a multiple of num_kv_heads={model.num_kv_heads};"
            " every key/value head serves the same number of query heads"
        )
    if model.head_dim % 2:
        yield f"config.model.head_dim={model.head_dim} is odd, and RoPE rotates pairs; use {model.head_dim + 1}"
    yield from rope_problems(model)


def _optimizer_problems(config: Config) -> Iterator[str]:
    optimizer = config.optimizer
    setting = "optimizer.schedule_steps" if optimizer.schedule_steps else "train.steps"
    steps = optimizer.schedule_steps or config.train.steps
    if optimizer.schedule == "wsd":
        if optimizer.decay_steps == 0:
            yield "config.optimizer.schedule='wsd' needs config.optimizer.decay_steps; a tenth of train.steps is usual"
        if optimizer.warmup_steps + optimizer.decay_steps > steps:
            yield (
                f"config.optimizer.warmup_steps={optimizer.warmup_steps} and decay_steps={optimizer.decay_steps} do not"
                f" fit into config.{setting}={steps}; shorten them or train for"
                f" {optimizer.warmup_steps + optimizer.decay_steps} steps or more"
            )


def _data_problems(config: Config) -> Iterator[str]:
    if not config.data.sources:
        yield "config.data.sources is empty: give files, directories, glob patterns, or 'python-stdlib'"
    for name, sources in (("sources", config.data.sources), ("eval_sources", config.data.eval_sources)):
        if "" in sources:
            yield f"config.data.{name} is {sources}, with an empty name in it; remove the empty name"
    if config.data.mixture and config.data.sources != DataConfig().sources:
        yield "config.data.sources and config.data.mixture are both set: add the sources to the mixture, as a source"
    yield from mixture_problems(config.data)


def _memory_problems(config: Config) -> Iterator[str]:
    memory = config.memory
    for setting, names in (("save", memory.save), ("offload", memory.offload)):
        for name in names:
            if name not in TENSOR_NAMES:
                yield f"config.memory.{setting} names {name!r}, which is not one of {', '.join(TENSOR_NAMES)}"
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
            f" num_processes={runtime.num_processes}; use a multiple of {runtime.num_processes}"
        )
    address = runtime.coordinator_address
    host, _, port = address.rpartition(":")
    if address and not (host and port.isdigit()):
        yield f"invalid value {address!r} for config.runtime.coordinator_address: expected host:port"
    if runtime.transport == "peer" and runtime.num_processes > 1:
        yield (
            "unsupported: config.runtime.transport='peer', which copies within one process, with"
            f" num_processes={runtime.num_processes}; use 'symmetric', 'nvshmem' or 'nccl'"
        )
    if runtime.unified_memory_fraction and not runtime.unified_memory:
        yield (
            f"config.runtime.unified_memory_fraction={runtime.unified_memory_fraction} has no effect without unified"
            " memory; use --config.runtime.unified_memory=True with it"
        )
    if runtime.nvshmem_heap_bytes and runtime.transport not in ("auto", "nvshmem"):
        yield (
            f"config.runtime.nvshmem_heap_bytes={runtime.nvshmem_heap_bytes} is for transport 'nvshmem', and"
            f" config.runtime.transport is {runtime.transport!r}; use --config.runtime.nvshmem_heap_bytes=0"
        )


def _profile_problems(config: Config) -> Iterator[str]:
    steps = config.profile.steps
    match = re.fullmatch(r"([1-9]\d*):([1-9]\d*)", steps)
    if steps and (match is None or int(match[1]) >= int(match[2])):
        yield f"invalid value {steps!r} for config.profile.steps: expected FIRST:END, such as 10:13 for steps 10 to 12"
