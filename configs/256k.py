"""Llama 3 8B on rows of 262,144 tokens, 64 GPUs of one GB200 NVL72 domain. Variants: h100, 70b, mini.

    python -m jaxlc.train --config=configs/256k.py:mini    the same in miniature, on 8 simulated CPU devices
    python -m jaxlc.plan  --config=configs/256k.py --topology=gb200:1x64    compiled for GPUs that are not here

To train, one process for each GPU, with Slurm and CUDA_VISIBLE_DEVICES=$SLURM_LOCALID in each:

    python -m jaxlc.train --config=configs/256k.py --config.data.sources=TEXTS --config.data.tokenizer=TOKENIZER.json
      --config.runtime.num_processes=64 --config.runtime.process_id=$SLURM_PROCID
      --config.runtime.coordinator_address=FIRST_HOST:9753
"""

from ml_collections import ConfigDict

from jaxlc.config import defaults

VARIANTS = ("h100", "70b", "mini")


def get_config(variant: str = "") -> ConfigDict:
    if variant not in ("", *VARIANTS):
        raise ValueError(f"configs/256k.py has no variant {variant!r}; there are {', '.join(VARIANTS)}")
    config = defaults()
    config.model.preset = "llama3-8b"
    config.mesh.update(context=8, tensor=8)
    config.runtime.update(topology="gb200:1x64", transport="nvshmem")
    config.data.seq_len = 262_144
    config.optimizer.warmup_steps = 100
    config.train.update(steps=1000, global_batch_size=16, gradient_accumulation_steps=16)  # 4,194,304 tokens a step
    config.train.update(eval_sequences=4, eval_every_steps=100, checkpoint_every_steps=100)

    if variant == "":  # the first of docs/sweep.md, by predicted speed; the five after it are within 2.1%
        config.mesh.update(fsdp=16, context=4, tensor=1)
        config.train.update(gradient_accumulation_steps=1, eval_sequences=16)
        config.runtime.nvshmem_heap_bytes = 2 * 2**30  # hops take 1.5 GiB of it
    elif variant == "h100":  # 8 nodes of 8
        config.runtime.topology = "h100:8x8"
    elif variant == "70b":
        config.model.preset = "llama3-70b"
        config.memory.remat = "full"
    elif variant == "mini":  # the same axes and features, a small model on short rows
        config.model.update(preset="tiny", vocab_size=257, num_layers=2)  # bytes and the end of a document
        config.mesh.update(fsdp=2, context=4, tensor=1)
        config.runtime.update(topology="", simulated_devices=8)
        config.data.seq_len = 1024
        config.optimizer.update(learning_rate=3e-3, warmup_steps=5)
        config.train.update(steps=20, global_batch_size=2, gradient_accumulation_steps=1)
        config.train.update(eval_sequences=2, eval_every_steps=10, checkpoint_every_steps=10)
    return config
