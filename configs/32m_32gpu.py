r"""Llama 3.1 8B with sequences of 33,554,432 tokens on 4 nodes of 8 H100s. Variants: mini.

    jaxlc train --config=32m_32gpu:mini                # the same features in miniature, on 8 simulated CPU devices
    jaxlc plan --config=32m_32gpu --topology=h100:4x8  # ahead-of-time compilation, without a GPU

The settings under `memory` make it fit; docs/memory.md gives what each of them saves and costs. To train, start one
process per GPU as in configs/256k.py; each node needs 1,200 GiB of host memory.
"""

from ml_collections import ConfigDict

from jaxlc.config import check_variant, defaults, shrink_for_cpu

VARIANTS = ("mini",)


def get_config(variant: str = "") -> ConfigDict:
    check_variant(variant, VARIANTS)
    config = defaults()
    config.model.preset = "llama3.1-8b"
    config.mesh.context = 32  # Ulysses all-to-all within a node, the K/V ring between nodes
    config.attention.update(strategy="hybrid", ulysses_degree=8)
    config.attention.document_mask = False  # a sequence is one document, which the cuDNN kernel supports
    config.runtime.update(topology="h100:4x8", transport="nvshmem", nvshmem_heap_bytes=14 * 2**30)  # the ring takes 12
    config.data.seq_len = 33_554_432
    config.memory.update(remat="full", offload=("residual",), layers_per_remat_group=2, tile_tokens=32_768)
    config.memory.update(optimizer="host", parameters="host")
    config.optimizer.warmup_steps = 10
    config.train.update(steps=100, global_batch_size=1, eval_sequences=1, checkpoint_every_steps=10)

    if variant == "mini":
        shrink_for_cpu(config)
        config.mesh.context = 8
        config.attention.ulysses_degree = 2
        config.memory.tile_tokens = 32
    return config
