"""The range of every number in the settings. Imports no jax."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from jaxlc.config.values import invalid_value
from jaxlc.core.axes import MESH_AXES


class Range(NamedTuple):
    text: str
    holds: Callable[[float], bool]


_FROM_0 = Range("at least 0", lambda x: x >= 0)
_FROM_1 = Range("at least 1", lambda x: x >= 1)
_POSITIVE = Range("greater than 0", lambda x: x > 0)
_FRACTION = Range("at least 0 and less than 1", lambda x: 0 <= x < 1)
_OPEN_FRACTION = Range("greater than 0 and less than 1", lambda x: 0 < x < 1)
_FRACTION_OR_1 = Range("between 0 and 1", lambda x: 0 <= x <= 1)

RANGES: dict[str, dict[str, Range]] = {
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
        rope_scaling_original_tokens=Range("0 or at least 2", lambda x: x == 0 or x > 1),
        rope_scaling_beta_fast=_POSITIVE,
        rope_scaling_beta_slow=_POSITIVE,
        rope_scaling_attention_factor=_FROM_0,
        rope_fraction=Range("greater than 0 and at most 1", lambda x: 0 < x <= 1),
    ),
    "mesh": dict.fromkeys(MESH_AXES, _FROM_1),
    "attention": dict(ulysses_degree=_FROM_1, query_block_tokens=_FROM_1, key_block_tokens=_FROM_1),
    "data": dict(
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
        process_id=Range("at least 0, or -1", lambda x: x >= -1),
        start_timeout_seconds=_FROM_1,
        heartbeat_seconds=_FROM_1,
        nvshmem_heap_bytes=_FROM_0,
        memory_fraction=Range("greater than 0 and at most 1", lambda x: 0 < x <= 1),
        pinned_host_gib=_FROM_0,
        unified_memory_fraction=Range("0 or greater than 1", lambda x: x == 0 or x > 1),
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


def range_problems(section: str, values: Any) -> Iterator[str]:
    """Yields the numbers of a section that are out of range, as messages.

    Args:
      values: the section, such as a `TrainConfig` for "train".
    """
    for name, allowed in RANGES[section].items():
        value = getattr(values, name)
        if not allowed.holds(value):
            yield invalid_value(f"{section}.{name}", value, allowed.text)
