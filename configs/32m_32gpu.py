"""Llama 3 8B on rows of 33,554,432 tokens, 4 nodes of 8 H100s. Variants: mini.

    python -m jaxlc.train --config=configs/32m_32gpu.py:mini    the same in miniature, on 8 simulated CPU devices
    python -m jaxlc.plan  --config=configs/32m_32gpu.py --topology=h100:4x8    compiled for GPUs that are not here

What makes it fit is under `memory`; docs/memory.md says what each setting saves and costs. To train, start a process
for each GPU as configs/256k.py tells it; each node needs 1,200 GiB of host memory.
"""

from ml_collections import ConfigDict

from jaxlc.config import defaults

VARIANTS = ("mini",)


def get_config(variant: str = "") -> ConfigDict:
    if variant not in ("", *VARIANTS):
        raise ValueError(f"configs/32m_32gpu.py has no variant {variant!r}; there is mini")
    config = defaults()
    config.model.preset = "llama3-8b"
    config.mesh.context = 32  # heads are exchanged within a node, K and V go around the nodes
    config.attention.update(strategy="hybrid", ulysses_degree=8)
    config.attention.document_mask = False  # a row is one document: cuDNN can do it
    config.runtime.update(topology="h100:4x8", transport="nvshmem", nvshmem_heap_bytes=14 * 2**30)  # hops take 12
    config.data.seq_len = 33_554_432
    config.memory.update(remat="full", offload=("residual",), layers_per_remat_group=2, tile_tokens=32_768)
    config.memory.update(optimizer="host", parameters="host")
    config.optimizer.warmup_steps = 10
    config.train.update(steps=100, global_batch_size=1, eval_sequences=1, checkpoint_every_steps=10)

    if variant == "mini":  # the same axes and features, a small model on short rows
        config.model.update(preset="tiny", vocab_size=257, num_layers=2)  # bytes and the end of a document
        config.mesh.context = 8
        config.attention.ulysses_degree = 2
        config.runtime.update(topology="", simulated_devices=8)
        config.data.seq_len = 1024
        config.memory.tile_tokens = 32
        config.optimizer.update(learning_rate=3e-3, warmup_steps=5)
        config.train.update(steps=20, eval_every_steps=10)
    return config
