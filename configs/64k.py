r"""Llama 3.1 8B with sequences of 65,536 tokens on 8 GPUs of one GB200 NVL72 domain. Variants:
h100, ring, 70b, mini.

    jaxlc train --config=64k:mini                        # the same features in miniature, on 8 simulated CPU devices
    jaxlc plan --config=64k --topology=gb200:1x8        # ahead-of-time compilation, without a GPU

To train, start one process per GPU; docs/clusters.md has other launchers:

    sbatch --nodes=1 launch/slurm/train.sbatch jaxlc train --config=64k:h100 --workdir=DIRECTORY \
      --config.data.sources=TEXTS --config.data.tokenizer=TOKENIZER.json

Within one NVLink domain `ulysses` is faster than the ring by the plan's estimate, and leaves memory
for the activations of the MLP. On 8 H100s, two groups of four GPUs (`h100`) take 107 s a step, one
group of eight 111 s, and `ring`, one group with the ring and without these activations, 124 s.
"""

from ml_collections import ConfigDict

from jaxlc.config import check_variant, defaults, shrink_for_cpu

VARIANTS = ("h100", "ring", "70b", "mini")


def get_config(variant: str = "") -> ConfigDict:
    check_variant(variant, VARIANTS)
    config = defaults()
    config.model.preset = "llama3.1-8b"
    config.mesh.update(context=8)
    config.runtime.topology = "gb200:1x8"
    config.data.seq_len = 65_536
    config.optimizer.warmup_steps = 100
    # 4,194,304 tokens a step
    config.train.update(steps=1000, global_batch_size=64, gradient_accumulation_steps=64)
    config.train.update(eval_sequences=4, eval_every_steps=100, checkpoint_every_steps=100)

    if variant in ("h100", "ring"):  # one node
        config.runtime.topology = "h100:1x8"
    if variant == "h100":
        config.mesh.update(fsdp=2, context=4)
        config.train.gradient_accumulation_steps = 32
    if variant not in ("ring", "70b"):
        config.attention.strategy = "ulysses"
        config.memory.save = ("mlp_gate", "mlp_up")
    if variant == "70b":
        config.model.preset = "llama3.1-70b"
        config.mesh.update(context=8, tensor=8)
        config.runtime.topology = "gb200:1x64"
        config.memory.remat = "full"
    elif variant == "mini":
        shrink_for_cpu(config)
        config.model.attention.update(
            num_heads=8, head_dim=16
        )  # ulysses splits them over 8 devices
        config.mesh.update(context=8)
    return config
