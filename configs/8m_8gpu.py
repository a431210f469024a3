r"""Llama 3.1 8B with sequences of 8,388,608 tokens on one node of 8 H100s. Variants: mini.

    jaxlc train --config=8m_8gpu:mini                # the same features in miniature, on 8 simulated CPU devices
    jaxlc plan --config=8m_8gpu --topology=h100:1x8  # ahead-of-time compilation, without a GPU

The settings under `memory` make it fit; docs/memory.md gives what each of them saves and costs. To train, start one
process per GPU as in configs/256k.py; the node needs 1,370 GiB of host memory.
"""

from ml_collections import ConfigDict

from jaxlc.config import check_variant, defaults, shrink_for_cpu

VARIANTS = ("mini",)


def get_config(variant: str = "") -> ConfigDict:
    check_variant(variant, VARIANTS)
    config = defaults()
    config.model.preset = "llama3.1-8b"
    config.mesh.context = 8
    config.attention.update(strategy="ulysses", document_mask=False)  # one document per sequence, for the cuDNN kernel
    config.runtime.update(topology="h100:1x8")
    config.data.seq_len = 8_388_608
    config.memory.update(remat="full", offload=("residual",), layers_per_remat_group=2, tile_tokens=32_768)
    config.memory.update(optimizer="host", parameters="host")
    config.optimizer.warmup_steps = 10
    config.train.update(steps=100, global_batch_size=1, eval_sequences=1, checkpoint_every_steps=10)

    if variant == "mini":
        shrink_for_cpu(config)
        config.model.update(num_heads=8, num_kv_heads=8, head_dim=16)  # one key/value head per rank
        config.memory.tile_tokens = 32
    return config
