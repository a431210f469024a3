r"""Extends Qwen3-30B-A3B, a mixture of experts, from 32,768 to 262,144 tokens on 1 billion tokens. Variants: mini.

    jaxlc train --config=extend_qwen3_moe_256k:mini        # the same features in miniature, on 8 simulated CPU devices
    jaxlc plan --config=extend_qwen3_moe_256k --topology=h100:1x8 --price_per_gpu_hour=2.5

YaRN is what the model card of Qwen3-30B-A3B gives for 131,072 tokens (factor 4 from 32,768), with factor 8, and the
weight of the balance loss that of its config.json; learning rate and amount of data are those of
configs/recipes/extend_1m.py. AdamW's moments are in host memory. To train on 8 H100s, start one process per GPU
(docs/clusters.md):

    jaxlc train --config=extend_qwen3_moe_256k --config.model.init_from=Qwen/Qwen3-30B-A3B --config.data.sources=TEXTS
"""

from ml_collections import ConfigDict

from jaxlc.config import check_variant, defaults, shrink_for_cpu

VARIANTS = ("mini",)


def get_config(variant: str = "") -> ConfigDict:
    check_variant(variant, VARIANTS)
    config = defaults()
    config.model.preset = "qwen3-30b-a3b"
    config.model.rope.update(scaling="yarn", factor=8.0, original_tokens=32_768)
    config.mesh.context = 8
    config.attention.strategy = "ring"
    config.memory.update(remat="attention", offload=("residual", "attention_out"), optimizer="host")
    config.runtime.topology = "h100:1x8"
    config.data.seq_len = 262_144
    config.optimizer.update(
        learning_rate=3e-5, schedule="cosine", warmup_steps=10, weight_decay=0.1
    )
    # 4,194,304 tokens a step
    config.train.update(steps=240, global_batch_size=16, gradient_accumulation_steps=16)
    config.train.update(
        balance_loss=1e-3, eval_sequences=4, eval_every_steps=60, checkpoint_every_steps=40
    )

    if variant == "mini":
        shrink_for_cpu(config)
        config.model.experts.update(
            num_experts=8, experts_per_token=2, ffn_dim=64, renormalize=True
        )
        config.train.update(steps=6, eval_every_steps=0, checkpoint_every_steps=3)
    return config
