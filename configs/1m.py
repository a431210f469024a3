r"""Llama 3.1 8B with sequences of 1,048,576 tokens on 64 GPUs of one GB200 NVL72 domain. Variants: h100, 70b, mini.

    jaxlc train --config=1m:mini                        # the same features in miniature, on 8 simulated CPU devices
    jaxlc plan --config=1m --topology=gb200:1x64        # ahead-of-time compilation, without a GPU

To train, start one process per GPU; docs/clusters.md has other launchers:

    sbatch --nodes=8 launch/slurm/train.sbatch jaxlc train --config=1m:h100 --workdir=DIRECTORY \
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
    config.data.seq_len = 1_048_576
    config.optimizer.warmup_steps = 100
    config.train.update(steps=1000, global_batch_size=4, gradient_accumulation_steps=4)  # 4,194,304 tokens a step
    config.train.update(eval_sequences=4, eval_every_steps=100, checkpoint_every_steps=100)

    if variant in ("", "h100"):
        config.mesh.update(fsdp=2, tensor=4)
        config.train.update(gradient_accumulation_steps=2)
    if variant == "h100":  # 8 nodes of 8
        config.runtime.topology = "h100:8x8"
    elif variant == "70b":
        config.model.preset = "llama3.1-70b"
        config.memory.remat = "full"
    elif variant == "mini":
        shrink_for_cpu(config)
        config.mesh.update(fsdp=2, context=2, tensor=2)
        config.train.global_batch_size = 4  # one sequence per replica and accumulation step
    return config
