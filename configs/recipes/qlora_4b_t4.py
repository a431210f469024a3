r"""QLoRA: trains adapters of Qwen3 4B, whose weights are in NF4, at 40,960 tokens on a free T4.
Variants: mini.

    jaxlc train --config=qlora_4b_t4:mini       # the same features in miniature, on 1 simulated CPU device
    jaxlc plan --config=qlora_4b_t4 --topology=t4:1x1 --host_memory_gib=12

Layer inputs stay on the GPU, so the small memory of the host does not limit the length. Other settings
are the same as in configs/recipes/qlora_8b_24gb.py. To train:

    jaxlc train --config=qlora_4b_t4 --config.model.init_from=unsloth/Qwen3-4B-bnb-4bit \
      --config.data.sources=TEXTS
"""

from ml_collections import ConfigDict

from jaxlc.config import check_variant, read_config

VARIANTS = ("mini",)


def get_config(variant: str = "") -> ConfigDict:
    check_variant(variant, VARIANTS)
    config = read_config("qlora_8b_24gb:mini" if variant == "mini" else "qlora_8b_24gb")
    config.model.rope.update(scaling="none", factor=1.0, original_tokens=0)
    config.precision.compute = "fp16"  # it has no bf16 products
    config.memory.offload = ()
    # larger blocks: `blockwise` starts several kernels for each, and waits for the host
    config.attention.update(query_block_tokens=1024, key_block_tokens=1024)

    if variant != "mini":
        config.model.preset = "qwen3-4b"
        config.runtime.topology = "t4:1x1"
        config.data.seq_len = 40_960
    return config
