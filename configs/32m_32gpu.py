r"""Llama 3.1 8B with sequences of 33,554,432 tokens on 4 nodes of 8 H100s. Variants: mini.

    jaxlc train --config=32m_32gpu:mini                # the same features in miniature, on 8 simulated CPU devices
    jaxlc plan --config=32m_32gpu --topology=h100:4x8  # ahead-of-time compilation, without a GPU

Other settings are those of configs/1m_1gpu.py; docs/memory.md gives what those under `memory` save
and cost. To train, start one process per GPU as in configs/64k.py; each node needs 1,430 GiB of
host memory.
"""

from ml_collections import ConfigDict

from jaxlc.config import check_variant, read_config

VARIANTS = ("mini",)


def get_config(variant: str = "") -> ConfigDict:
    check_variant(variant, VARIANTS)
    config = read_config(f"1m_1gpu:{variant}")
    config.mesh.context = 32  # Ulysses all-to-all within a node, the K/V ring between nodes
    config.attention.update(strategy="hybrid", ulysses_degree=8)
    config.runtime.nvshmem_heap_bytes = 14 * 2**30  # the ring takes 12
    config.memory.layers_per_remat_group = 2
    if variant == "mini":
        config.mesh.context = config.runtime.simulated_devices = 8
        config.attention.ulysses_degree = 2
        config.memory.tile_tokens = 32
        return config
    config.runtime.topology = "h100:4x8"
    config.data.seq_len = 33_554_432
    return config
