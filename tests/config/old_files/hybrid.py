"""The models of notebooks/hybrid.ipynb, as its cells before sections had names. Variants: delta_net."""

from ml_collections import ConfigDict

import jaxlc

NAMES, TOKENS, BATCH, STEPS = 32, 128, 16, 500


def get_config(variant: str = "") -> ConfigDict:
    layer_kinds = ("gated_delta_net", "nope") if variant else ("full", "nope")
    delta_dim = 16 if variant else 0
    config = jaxlc.config.defaults()
    model, train = config.model, config.train
    model.update(
        preset="tiny",
        vocab_size=2 * NAMES,
        num_layers=2,
        model_dim=64,
        ffn_dim=128,
        layer_kinds=layer_kinds,
    )
    model.update(
        num_heads=1,
        num_kv_heads=1,
        head_dim=64,
        qk_norm="head",
        scale_embeddings=True,
        tie_embeddings=False,
    )
    if delta_dim:
        model.update(delta_key_heads=2, delta_value_heads=2, delta_conv_taps=2)
        model.update(delta_key_dim=delta_dim, delta_value_dim=delta_dim)
    config.runtime.simulated_devices = 2
    config.mesh = dict(data=2)
    config.data.seq_len = TOKENS
    config.attention.document_mask = False  # a sequence is one document
    config.optimizer.update(learning_rate=5e-3, warmup_steps=20, weight_decay=0.01, beta2=0.95)
    config.memory.remat = "none"
    train.update(steps=STEPS, global_batch_size=BATCH, log_every_steps=50)
    train.update(eval_every_steps=0, checkpoint_every_steps=0)
    return config
