r"""Llama 3.1 8B with sequences of 1,048,576 tokens on a single H100 with 80 GB. Variants: fast,
lora, mini.

    jaxlc train --config=1m_1gpu:mini                # the same features in miniature, on 1 simulated CPU device
    jaxlc plan --config=1m_1gpu --topology=h100:1x1  # ahead-of-time compilation, without a GPU

The settings under `memory` make it fit; docs/memory.md gives what each of them saves and costs. To
train, on a machine with 620 GiB of host memory:

    jaxlc train --config=1m_1gpu --config.data.sources=TEXTS --config.data.tokenizer=TOKENIZER.json

`fast` also saves the results of attention in host memory instead of computing them again. A step
takes a fifth less time and needs 632 GiB of host memory instead of 372 GiB, so a machine with 910
GiB.

`lora` trains adapters of rank 32 (docs/lora.md), with the frozen weights in bf16 on the GPU, and
needs 320 GiB of host memory, for the saved activations.
"""

from ml_collections import ConfigDict

from jaxlc.config import check_variant, defaults, shrink_for_cpu

VARIANTS = ("fast", "lora", "mini")


def get_config(variant: str = "") -> ConfigDict:
    check_variant(variant, VARIANTS)
    config = defaults()
    config.model.preset = "llama3.1-8b"
    # a sequence is one document, which the cuDNN kernel supports
    config.attention.update(document_mask=False)
    config.runtime.update(topology="h100:1x1")
    config.data.seq_len = 1_048_576
    config.memory.update(remat="full", offload=("residual",), tile_tokens=32_768)
    config.memory.update(optimizer="host", parameters="host")
    config.optimizer.warmup_steps = 10
    config.train.update(steps=100, global_batch_size=1, eval_sequences=1, checkpoint_every_steps=10)

    if variant == "fast":
        config.memory.offload = ("residual", "attention_out", "attention_lse")

    if variant == "lora":
        config.lora.rank = 32
        config.memory.update(optimizer="device", parameters="device")
        config.optimizer.learning_rate = 2e-4
        config.train.checkpoint_frozen = False

    if variant == "mini":
        shrink_for_cpu(config, simulated_devices=1)
        config.memory.tile_tokens = 128
    return config
