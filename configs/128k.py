r"""Llama 3.1 8B with sequences of 131,072 tokens on 16 GPUs of one GB200 NVL72 domain. Variants:
h100, 70b, mini.

    jaxlc train --config=128k:mini                        # the same features in miniature, on 8 simulated CPU devices
    jaxlc plan --config=128k --topology=gb200:1x16        # ahead-of-time compilation, without a GPU

Other settings are those of configs/64k.py, which also shows how to train.
"""

from ml_collections import ConfigDict

from jaxlc.config import check_variant, read_config

VARIANTS = ("h100", "70b", "mini")


def get_config(variant: str = "") -> ConfigDict:
    check_variant(variant, VARIANTS)
    config = read_config(f"64k:{variant}")
    if variant == "mini":
        config.mesh.update(context=4, tensor=2)
        return config
    config.data.seq_len = 131_072
    config.train.update(global_batch_size=32, gradient_accumulation_steps=32)
    if variant != "70b":
        config.mesh.update(fsdp=1, context=8, tensor=2)
        config.runtime.topology = "h100:2x8" if variant == "h100" else "gb200:1x16"
    return config
