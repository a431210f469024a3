r"""Supervised fine-tuning of gpt-oss-20b on chats and agent traces of up to 131,072 tokens.
Variants: mini.

    jaxlc train --config=sft_gpt_oss_128k:mini        # the same features in miniature, on 8 simulated CPU devices
    jaxlc plan --config=sft_gpt_oss_128k --topology=h100:1x8 --price_per_gpu_hour=2.5

Data, learning rate, steps and batch are those of configs/recipes/sft_128k.py; the weight of the
balance loss is ours. To train on 8 H100s, start one process per GPU (docs/clusters.md):

    jaxlc train --config=sft_gpt_oss_128k --config.model.init_from=openai/gpt-oss-20b \
      --config.data.mixture.chats.paths=CHATS.jsonl
"""

from ml_collections import ConfigDict

from jaxlc.config import check_variant, read_config

VARIANTS = ("mini",)


def get_config(variant: str = "") -> ConfigDict:
    check_variant(variant, VARIANTS)
    config = read_config(f"sft_128k:{variant}")
    config.memory.update(remat="attention", offload=("residual", "attention_out"), optimizer="host")
    config.train.balance_loss = 1e-3
    if variant == "mini":
        config.model.update(activation="clamped_swiglu", layer_kinds=("sliding", "full"))
        config.model.attention.update(num_kv_heads=8, sinks=True, window=128)
        config.model.experts.update(
            num_experts=8, experts_per_token=2, ffn_dim=64, router="topk_softmax", bias=True
        )
        config.model.rope.update(
            sliding_scaling=True, scaling="yarn", factor=32.0, original_tokens=32
        )
    else:
        config.model.preset = "gpt-oss-20b"
    return config
