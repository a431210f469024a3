"""Measurements: the training step of a config on random tokens, calls of compiled functions, and
the environment.

The step is the same `TrainStep` that the training loop runs.
"""

import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxlc.config import Config
from jaxlc.core import hardware
from jaxlc.sharding.mesh import make_mesh
from jaxlc.step.batch import Batch
from jaxlc.step.step import TrainStep, build_step


def measure_step(config: Config, repeats: int, document_lengths: Sequence[int] = ()) -> dict:
    """Compiles and times the training step of `config` on the first devices of this machine.

    Args:
      document_lengths: as for `random_batch`.
    Returns:
      seconds: the minimum over `repeats` calls. tokens_per_second_per_device. mfu_causal: model
      FLOP/s with causal attention over peak FLOP/s; None if the peak of the device is unknown.
      arguments_bytes, temp_bytes: of the compiled program, per device. peak_bytes: peak memory in
      use on the first device since the process started; None if the backend does not report
        it.
      loss: of one more call.
      model, seq_len, global_batch_size, kernel, remat: the measured configuration.
    """
    mesh = make_mesh(config.mesh, jax.devices()[: config.mesh.num_devices])
    step = build_step(config, mesh)
    compiled = step.compile()
    state = step.init()
    batch = random_batch(step, document_lengths)

    def run():
        nonlocal state  # its buffers are donated to the new state
        state, metrics = compiled(state, batch)
        return metrics

    seconds = min(seconds_of_calls(run, repeats=repeats))
    device = mesh.devices.flat[0]
    memory = compiled.memory_analysis()
    chip = hardware.find(device.device_kind)
    flops_per_second = config.flops_per_step / seconds
    return dict(
        model=config.model.preset,
        seq_len=config.data.seq_len,
        global_batch_size=config.train.global_batch_size,
        kernel=step.kernel_names,
        remat=config.memory.remat,
        seconds=seconds,
        tokens_per_second_per_device=config.tokens_per_step / seconds / mesh.size,
        mfu_causal=flops_per_second / mesh.size / chip.bf16_flops_per_second if chip else None,
        loss=float(run().loss),
        arguments_bytes=memory.argument_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        peak_bytes=(device.memory_stats() or {}).get("peak_bytes_in_use"),
    )


def random_batch(step: TrainStep, document_lengths: Sequence[int] = ()) -> Batch:
    """Random tokens, in the order of a run.

    Args:
      document_lengths: documents of every sequence, in tokens, which fill it. Empty: one document.
    """
    like = step.abstract_batch
    shape = like.tokens.shape
    vocab_size = step.config.model.vocab_size
    lengths = np.array(document_lengths or shape[-1:], np.int32)
    segment_ids_T = np.repeat(np.arange(1, len(lengths) + 1, dtype=np.int32), lengths)
    positions_T = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
    in_document = dict(positions=positions_T, segment_ids=segment_ids_T)
    sequence, order_T = step.sequence_order.arranged(in_document)

    def make():
        tokens = jax.random.randint(jax.random.key(0), shape, 0, vocab_size)
        ordered = {name: jnp.broadcast_to(x_T[order_T], shape) for name, x_T in sequence.items()}
        others = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)  # those of post-training
        return others._replace(
            tokens=tokens,
            targets=jnp.roll(tokens, -1, axis=-1),
            loss_weights=jnp.ones(like.loss_weights.shape),
            **ordered,
        )

    return jax.jit(make, out_shardings=jax.tree.map(lambda x: x.sharding, like))()


def seconds_of_calls(function, *args, repeats: int) -> list[float]:
    """Wall-clock seconds of each of `repeats` calls after one warm-up call. Each call waits for its
    result.
    """
    (seconds,) = interleaved_seconds([lambda: function(*args)], repeats)
    return seconds


def interleaved_seconds(calls: list[Callable[[], object]], repeats: int) -> list[list[float]]:
    """Times several functions, one call of each per round, so that other load on the machine
    affects all of them.

    Returns:
      For each function the wall-clock seconds of its `repeats` calls, after one warm-up call.
    """
    for call in calls:
        jax.block_until_ready(call())
    seconds = [[] for _ in calls]
    for _ in range(repeats):
        for call, call_seconds in zip(calls, seconds):
            start_seconds = time.perf_counter()
            jax.block_until_ready(call())
            call_seconds.append(time.perf_counter() - start_seconds)
    return seconds
