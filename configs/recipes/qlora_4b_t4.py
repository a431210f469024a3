r"""QLoRA: trains adapters of Qwen3 4B, whose weights are in NF4, at 40,960 tokens on a free T4.
Variants: mini.

    jaxlc train --config=qlora_4b_t4:mini       # the same features in miniature, on 1 simulated CPU device
    jaxlc plan --config=qlora_4b_t4 --topology=t4:1x1 --host_memory_gib=12

Layer inputs stay on the GPU, so the small memory of the host does not limit the length. To train:

    jaxlc train --config=qlora_4b_t4 --config.model.init_from=unsloth/Qwen3-4B-bnb-4bit \
      --config.data.sources=TEXTS
"""

from ml_collections import ConfigDict

from jaxlc.config import check_variant, defaults, shrink_for_cpu

VARIANTS = ("mini",)


def get_config(variant: str = "") -> ConfigDict:
    check_variant(variant, VARIANTS)
    config = defaults()
    config.model.preset = "qwen3-8b"
    if variant != "mini":  # Qwen3 4B
        config.model.update(model_dim=2560, ffn_dim=9728, tie_embeddings=True)
    config.precision.update(frozen="nf4", compute="fp16")  # it has no bf16 products
    config.lora.rank = 16
    config.runtime.update(topology="t4:1x1")
    config.data.seq_len = 40_960
    config.memory.update(remat="full", tile_tokens=4096)
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
