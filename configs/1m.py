r"""Llama 3.1 8B with sequences of 1,048,576 tokens on 64 GPUs of one GB200 NVL72 domain. Variants:
h100, 70b, mini.

    jaxlc train --config=1m:mini                        # the same features in miniature, on 8 simulated CPU devices
    jaxlc plan --config=1m --topology=gb200:1x64        # ahead-of-time compilation, without a GPU

Other settings are those of configs/64k.py, which also shows how to train.
"""

from ml_collections import ConfigDict

from jaxlc.config import check_variant, read_config

VARIANTS = ("h100", "70b", "mini")


def get_config(variant: str = "") -> ConfigDict:
    check_variant(variant, VARIANTS)
    config = read_config(f"64k:{variant}")
    config.attention.strategy = "ring"
    config.memory.save = ()
    config.train.global_batch_size = 4
    if variant == "mini":
        config.mesh.update(fsdp=2, context=2, tensor=2)
        return config
    config.data.seq_len = 1_048_576
    config.train.gradient_accumulation_steps = 4
    if variant != "70b":
        config.mesh.update(fsdp=2, context=8, tensor=4)
        config.runtime.topology = "h100:8x8" if variant == "h100" else "gb200:1x64"
        config.train.gradient_accumulation_steps = 2
    return config
