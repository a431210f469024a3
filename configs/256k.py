r"""Llama 3.1 8B with sequences of 262,144 tokens on 64 GPUs of one GB200 NVL72 domain. Variants: h100, 70b, mini.

    jaxlc train --config=256k:mini                        # the same features in miniature, on 8 simulated CPU devices
    jaxlc plan --config=256k --topology=gb200:1x64        # ahead-of-time compilation, without a GPU

To train, start one process per GPU; docs/clusters.md has other launchers:

    sbatch --nodes=8 launch/slurm/train.sbatch jaxlc train --config=256k:h100 --workdir=DIRECTORY \
      --config.data.sources=TEXTS --config.data.tokenizer=TOKENIZER.json
"""

from ml_collections import ConfigDict

from jaxlc.config import check_variant, defaults, shrink_for_cpu

VARIANTS = ("h100", "70b", "mini")


def get_config(variant: str = "") -> ConfigDict:
    check_variant(variant, VARIANTS)
    config = defaults()
    config.model.preset = "llama3.1-8b"
    config.mesh.update(context=8, tensor=8)
    config.runtime.update(topology="gb200:1x64", transport="nvshmem")
    config.data.seq_len = 262_144
    config.optimizer.warmup_steps = 100
    config.train.update(steps=1000, global_batch_size=16, gradient_accumulation_steps=16)  # 4,194,304 tokens a step
    config.train.update(eval_sequences=4, eval_every_steps=100, checkpoint_every_steps=100)

    if variant == "":  # first by estimated speed in benchmarks/2026-11-21-mesh-sweep.md
        config.mesh.update(fsdp=16, context=4, tensor=1)
        config.train.update(gradient_accumulation_steps=1, eval_sequences=16)
        config.runtime.nvshmem_heap_bytes = 2 * 2**30  # the K and V sends of the ring take 1.5 GiB of it
    elif variant == "h100":  # 8 nodes of 8: each node is a ring
        config.runtime.topology = "h100:8x8"
        config.mesh.update(fsdp=8, tensor=1)
        config.train.update(gradient_accumulation_steps=2, eval_sequences=8)
    elif variant == "70b":
        config.model.preset = "llama3.1-70b"
        config.memory.remat = "full"
    elif variant == "mini":
        shrink_for_cpu(config)
        config.mesh.update(fsdp=2, context=4, tensor=1)
        config.train.gradient_accumulation_steps = 1
    return config
