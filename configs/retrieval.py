"""Retrieval over a whole sequence: a small model that uses its context, on 4 simulated CPU devices.

    jaxlc train --config=retrieval

Documents repeat the numbers of names at any distance (the source `phone-book`, docs/data.md). The
model learns to retrieve them on short sequences with data parallelism, then on 4,096 tokens with
ring attention over context=4. benchmarks/2026-11-22-retrieval.md compares it with a window of 256
tokens and with a broken ring.
"""

from ml_collections import ConfigDict

from jaxlc.config import check_variant, defaults


def get_config(variant: str = "") -> ConfigDict:
    check_variant(variant, ())
    config = defaults()
    config.model.update(preset="tiny", vocab_size=448, num_layers=2, model_dim=128, ffn_dim=256)
    config.model.update(tie_embeddings=False, scale_embeddings=True)
    config.model.attention.update(num_heads=4, num_kv_heads=4, head_dim=32, window=3)
    # The first layer collects the last tokens; the second finds a name by its content, at any
    # distance.
    config.model.update(layer_kinds=("sliding", "nope"))
    config.model.rope.sliding_theta = 100.0
    config.runtime.simulated_devices = 4
    config.data.update(
        sources="phone-book", tokenizer=__file__.removesuffix(".py") + "_tokenizer.json"
    )
    config.data.eval_fraction = 0.02
    config.optimizer.update(warmup_steps=20, weight_decay=0.01, beta2=0.95)
    config.memory.remat = "none"  # all activations fit, so nothing is recomputed
    config.train.update(eval_sequences=16, checkpoint_every_steps=0, log_every_steps=20)
    config.stages = [
        _stage(128, steps=500, global_batch_size=16, learning_rate=3e-3, mesh=dict(data=4)),
        _stage(512, steps=200, global_batch_size=4, learning_rate=2e-3, mesh=dict(data=4)),
        _stage(4096, steps=150, global_batch_size=1, learning_rate=1e-3, mesh=dict(context=4)),
    ]
    return config


def _stage(
    seq_len: int, *, steps: int, global_batch_size: int, learning_rate: float, mesh: dict
) -> dict:
    return dict(
        name=f"{seq_len}",
        steps=steps,
        data=dict(seq_len=seq_len),
        mesh=mesh,
        train=dict(global_batch_size=global_batch_size),
        optimizer=dict(learning_rate=learning_rate, schedule="constant"),
    )
