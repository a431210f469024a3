r"""Llama 3.1 8B with sequences of 262,144 tokens on 64 GPUs of one GB200 NVL72 domain. Variants:
h100, 70b, mini.

    jaxlc train --config=256k:mini                        # the same features in miniature, on 8 simulated CPU devices
    jaxlc plan --config=256k --topology=gb200:1x64        # ahead-of-time compilation, without a GPU

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
    if variant == "mini":
        config.mesh.update(fsdp=2, context=4)
        config.train.gradient_accumulation_steps = 1
        return config
    config.data.seq_len = 262_144
    config.train.update(global_batch_size=16, gradient_accumulation_steps=16)
    if variant == "":  # first by estimated speed in benchmarks/2026-11-21-mesh-sweep.md
        config.mesh.update(fsdp=16, context=4)
        # the ring takes 1.5 GiB of it
        config.runtime.update(topology="gb200:1x64", nvshmem_heap_bytes=2 * 2**30)
        config.train.update(gradient_accumulation_steps=1, eval_sequences=16)
    elif variant == "h100":  # 8 nodes of 8: each node is a ring
        config.mesh.update(fsdp=8, context=8)
        config.runtime.topology = "h100:8x8"
        config.train.update(gradient_accumulation_steps=2, eval_sequences=8)
    return config
