r"""Llama 3.1 8B with sequences of 8,388,608 tokens on one node of 8 H100s. Variants: mini.

    jaxlc train --config=8m_8gpu:mini                # the same features in miniature, on 8 simulated CPU devices
    jaxlc plan --config=8m_8gpu --topology=h100:1x8  # ahead-of-time compilation, without a GPU

Other settings are those of configs/1m_1gpu.py; docs/memory.md gives what those under `memory` save
and cost. To train, start one process per GPU as in configs/64k.py; the node needs 1,640 GiB of host
memory.
"""

from ml_collections import ConfigDict

from jaxlc.config import check_variant, read_config

VARIANTS = ("mini",)


def get_config(variant: str = "") -> ConfigDict:
    check_variant(variant, VARIANTS)
    config = read_config(f"1m_1gpu:{variant}")
    config.mesh.context = 8
    config.attention.strategy = "ulysses"
    config.memory.layers_per_remat_group = 2
    if variant == "mini":
        config.model.attention.update(
            num_heads=8, num_kv_heads=8, head_dim=16
        )  # one key/value head per rank
        config.runtime.simulated_devices = 8
        config.memory.tile_tokens = 32
        return config
    config.runtime.topology = "h100:1x8"
    config.data.seq_len = 8_388_608
    return config
