r"""Olmo 3: extends the 7B model from 8,192 to 65,536 tokens on 50 billion tokens. Variants: 32b, mini.

    jaxlc train --config=olmo3_64k:mini       # the same features in miniature, on 8 simulated CPU devices
    jaxlc plan --config=olmo3_64k --topology=h100:8x8 --price_per_gpu_hour=2.5

The figures are those of OLMo-3-1025-7B-long-context.py (github.com/allenai/OLMo-core) and of the report
(arXiv:2512.13961); docs/recipes.md says what differs. To train on 64 H100s, start one process per GPU
(docs/clusters.md):

    jaxlc train --config=olmo3_64k --config.model.init_from=allenai/Olmo-3-1025-7B --config.data.sources=TEXTS
"""

from ml_collections import ConfigDict

from jaxlc.config import check_variant, defaults, shrink_for_cpu

VARIANTS = ("32b", "mini")


def get_config(variant: str = "") -> ConfigDict:
    check_variant(variant, VARIANTS)
    config = defaults()
    # YaRN on full layers, factor 8 from 8,192
    config.model.preset = "olmo3-32b" if variant == "32b" else "olmo3-7b"
    config.mesh.update(fsdp=8, context=8)  # 8 nodes of 8
    config.runtime.topology = "h100:8x8"
    config.data.seq_len = 65_536
    config.optimizer.update(
        learning_rate=2.0712352850360292e-4, schedule="linear", final_learning_rate_ratio=0.0
    )
    config.optimizer.update(
        warmup_steps=200, beta1=0.9, beta2=0.95, weight_decay=0.1, decay_embeddings=False
    )
    # 4,194,304 tokens a step
    config.train.update(steps=11_921, global_batch_size=64, gradient_accumulation_steps=8)
    config.train.update(
        z_loss=1e-5, eval_sequences=8, eval_every_steps=1000, checkpoint_every_steps=500
    )

    if variant == "32b":
        config.train.steps = 23_842  # 100 billion tokens
        config.memory.remat = "full"
    elif variant == "mini":
        shrink_for_cpu(config)
        config.model.update(num_layers=4, layer_kinds=("sliding", "sliding", "sliding", "full"))
        config.model.norm_placement = "post"
        config.model.attention.update(qk_norm="projection", window=128)
        config.model.rope.update(scaling="yarn", factor=8.0, original_tokens=128)
        config.mesh.update(fsdp=2, context=4)
        config.train.update(steps=6, global_batch_size=4, eval_sequences=2)
        config.train.update(eval_every_steps=0, checkpoint_every_steps=3)
    return config
