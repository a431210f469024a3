r"""UltraLong: extends Llama 3.1 8B Instruct from 131,072 to 1,048,576 tokens in one stage, with YaRN. Variants: mini.

    jaxlc train --config=extend_1m:mini       # the same features in miniature, on 8 simulated CPU devices
    jaxlc plan --config=extend_1m --topology=h100:8x8 --price_per_gpu_hour=2.5

RoPE scaling, masks, learning rate and the amount of data follow Xu et al. 2025 (arXiv:2504.06214); docs/recipes.md says
what is ours. To train on 64 H100s, start one process per GPU (docs/clusters.md):

    jaxlc train --config=extend_1m --config.model.init_from=meta-llama/Llama-3.1-8B-Instruct --config.data.sources=TEXTS
"""

from ml_collections import ConfigDict

from jaxlc.config import check_variant, defaults, shrink_for_cpu

VARIANTS = ("mini",)


def get_config(variant: str = "") -> ConfigDict:
    check_variant(variant, VARIANTS)
    config = defaults()
    config.model.preset = "llama3.1-8b"
    config.model.rope.update(scaling="yarn", factor=128.0, original_tokens=8192)
    # alpha and beta of the paper
    config.model.rope.update(beta_slow=1.0, beta_fast=4.0)
    config.mesh.update(fsdp=2, context=8, tensor=4)  # 8 nodes of 8
    config.runtime.topology = "h100:8x8"
    config.attention.document_mask = False  # documents are separated by the end token only
    config.data.seq_len = 1_048_576
    config.optimizer.update(
        learning_rate=3e-5, schedule="cosine", warmup_steps=10, weight_decay=0.1
    )
    # 1 billion tokens
    config.train.update(steps=120, global_batch_size=8, gradient_accumulation_steps=4)
    config.train.update(eval_sequences=8, eval_every_steps=40, checkpoint_every_steps=20)

    if variant == "mini":
        shrink_for_cpu(config)
        config.mesh.update(fsdp=2, context=2, tensor=2)
        config.train.update(steps=6, global_batch_size=4, eval_sequences=2)
        config.train.update(eval_every_steps=0, checkpoint_every_steps=3)
    return config
