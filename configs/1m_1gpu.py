"""Llama 3 8B on rows of 1,048,576 tokens, a single H100 with 80 GB. Variants: mini.

    python -m jaxlc.train --config=configs/1m_1gpu.py:mini    the same in miniature, on 1 simulated CPU device
    python -m jaxlc.plan  --config=configs/1m_1gpu.py --topology=h100:1x1    compiled for GPUs that are not here

What makes it fit is under `memory`; docs/memory.md says what each setting saves and costs. To train, with 520 GiB of
host memory:

    python -m jaxlc.train --config=configs/1m_1gpu.py --config.data.sources=TEXTS --config.data.tokenizer=TOKENIZER.json
"""

from ml_collections import ConfigDict

from jaxlc.config import defaults

VARIANTS = ("mini",)


def get_config(variant: str = "") -> ConfigDict:
    if variant not in ("", *VARIANTS):
        raise ValueError(f"configs/1m_1gpu.py has no variant {variant!r}; there is mini")
    config = defaults()
    config.model.preset = "llama3-8b"
    config.attention.update(document_mask=False)  # a row is one document: cuDNN can do it
    config.runtime.update(topology="h100:1x1")
    config.data.seq_len = 1_048_576
    config.memory.update(remat="full", offload=("residual",), tile_tokens=32_768)
    config.memory.update(optimizer="host", parameters="host")
    config.optimizer.warmup_steps = 10
    config.train.update(steps=100, global_batch_size=1, eval_sequences=1, checkpoint_every_steps=10)

    if variant == "mini":  # the same axes and features, a small model on short rows
        config.model.update(preset="tiny", vocab_size=257, num_layers=2)  # bytes and the end of a document
        config.runtime.update(topology="", simulated_devices=1)
        config.data.seq_len = 1024
        config.memory.tile_tokens = 128
        config.optimizer.update(learning_rate=3e-3, warmup_steps=5)
        config.train.update(steps=20, eval_every_steps=10)
    return config
