r"""QLoRA: trains adapters of Qwen3 8B, whose weights are in NF4, at 98,304 tokens on one RTX 4090.
Variants: mini.

    jaxlc train --config=qlora_8b_24gb:mini       # the same features in miniature, on 1 simulated CPU device
    jaxlc plan --config=qlora_8b_24gb --topology=rtx4090:1x1 --host_memory_gib=32

Layer inputs are offloaded, so the host's memory limits the length: docs/recipes.md has the longest
ones. To train:

    jaxlc train --config=qlora_8b_24gb --config.model.init_from=unsloth/Qwen3-8B-bnb-4bit \
      --config.data.sources=TEXTS
"""

from ml_collections import ConfigDict

from jaxlc.config import check_variant, defaults, shrink_for_cpu

VARIANTS = ("mini",)


def get_config(variant: str = "") -> ConfigDict:
    check_variant(variant, VARIANTS)
    config = defaults()
    config.model.preset = "qwen3-8b"
    config.model.rope.update(scaling="yarn", factor=4.0, original_tokens=32_768)  # of its card
    config.precision.frozen = "nf4"
    config.lora.rank = 16
    config.runtime.update(topology="rtx4090:1x1")
    config.data.seq_len = 98_304
    config.memory.update(remat="full", offload=("residual",), tile_tokens=4096)
    config.optimizer.update(learning_rate=2e-4, warmup_steps=10)
    config.train.update(steps=100, global_batch_size=1, eval_sequences=1, checkpoint_every_steps=10)
    config.train.checkpoint_frozen = False

    if variant == "mini":
        shrink_for_cpu(config, simulated_devices=1)
        config.memory.tile_tokens = 128
        config.train.update(
            steps=6, checkpoint_frozen=False, eval_every_steps=0, checkpoint_every_steps=3
        )
    return config
