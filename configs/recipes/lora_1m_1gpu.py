r"""LoRA: extends Llama 3.1 8B Instruct to 1,048,576 tokens on a single H100 with 80 GB. Variants:
mini.

    jaxlc train --config=lora_1m_1gpu:mini        # the same features in miniature, on 1 simulated CPU device
    jaxlc plan --config=lora_1m_1gpu --topology=h100:1x1 --price_per_gpu_hour=2.5

Adapters of rank 32 over frozen bf16 weights, as configs/1m_1gpu.py:lora, with the RoPE scaling of
`extend_1m`; docs/lora.md gives memory and export. To train, on a machine with 320 GiB of host
memory:

    jaxlc train --config=lora_1m_1gpu --config.model.init_from=meta-llama/Llama-3.1-8B-Instruct \
      --config.data.sources=TEXTS
"""

from ml_collections import ConfigDict

from jaxlc.config import check_variant, read_config

VARIANTS = ("mini",)


def get_config(variant: str = "") -> ConfigDict:
    check_variant(variant, VARIANTS)
    config = read_config("1m_1gpu:mini" if variant == "mini" else "1m_1gpu:lora")
    config.model.rope.update(scaling="yarn", factor=128.0, original_tokens=8192)
    config.model.rope.update(beta_slow=1.0, beta_fast=4.0)
    config.train.update(steps=100)  # 105 million tokens

    if variant == "mini":
        config.lora.rank = 8
        config.memory.update(optimizer="device", parameters="device")
        config.train.update(
            steps=6, checkpoint_frozen=False, eval_every_steps=0, checkpoint_every_steps=3
        )
    return config
