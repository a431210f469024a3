r"""ProLong: extends Llama 3 8B Instruct to 524,288 tokens in two stages, then fine-tunes it. Variants: mini.

    jaxlc train --config=extend_512k:mini     # the same stages in miniature, on 8 simulated CPU devices
    jaxlc plan --config=extend_512k --topology=h100:8x8 --price-per-gpu-hour=2.5

Lengths, steps, batch sizes, learning rates and RoPE bases are those of Gao et al. 2024 (arXiv:2410.02660) and of their
training scripts train_64K.sh, train_512K.sh and train_sft.sh (github.com/princeton-nlp/ProLong); docs/recipes.md has
them with the data. To train on 64 H100s, start one process per GPU (docs/clusters.md):

    jaxlc train --config=extend_512k --config.model.init_from=meta-llama/Meta-Llama-3-8B-Instruct \
      --config.data.sources=TEXTS --config.stages.sft.data.sources=INSTRUCTIONS
"""

from ml_collections import ConfigDict

from jaxlc.config import check_variant, defaults, shrink_for_cpu

VARIANTS = ("mini",)


def get_config(variant: str = "") -> ConfigDict:
    check_variant(variant, VARIANTS)
    config = defaults()
    config.model.update(preset="llama3.1-8b", rope_scaling="none")  # Llama 3 has the same shape and no RoPE scaling
    config.mesh.update(fsdp=8, context=8)  # 8 nodes of 8
    config.runtime.topology = "h100:8x8"
    config.optimizer.update(beta1=0.9, beta2=0.95, weight_decay=0.1, max_grad_norm=1.0)
    config.optimizer.update(schedule="cosine", final_learning_rate_ratio=0.1)
    config.train.update(eval_sequences=8, eval_every_steps=250, checkpoint_every_steps=125)
    config.stages = [
        dict(
            name="64k",
            steps=5000,  # 21 billion tokens
            data=dict(seq_len=65_536),
            model=dict(rope_theta=8e6),
            optimizer=dict(learning_rate=1e-5, warmup_steps=500),
            train=dict(global_batch_size=64, gradient_accumulation_steps=8),
        ),
        dict(
            name="512k",
            steps=2500,  # 21 billion tokens
            optimizer_state="carry",
            data=dict(seq_len=524_288),
            model=dict(rope_theta=1.28e8),
            optimizer=dict(learning_rate=5e-6, warmup_steps=250),
            train=dict(global_batch_size=16, gradient_accumulation_steps=2),
        ),
        dict(
            name="sft",
            steps=250,  # 1 billion tokens
            optimizer_state="reset",
            data=dict(seq_len=65_536),
            model=dict(rope_theta=1.28e8),
            optimizer=dict(learning_rate=2e-5, warmup_steps=13),
            train=dict(global_batch_size=64, gradient_accumulation_steps=8),
        ),
    ]
    if variant == "mini":
        _shrink(config)
    return config


def _shrink(config: ConfigDict) -> None:
    """Sequences of 256 and 2,048 tokens, 28 steps in all."""
    shrink_for_cpu(config)
    config.mesh.update(fsdp=2, context=4)
    config.train.update(eval_sequences=2, eval_every_steps=0, checkpoint_every_steps=4)
    sizes = {"64k": (12, 256, 8), "512k": (10, 2048, 2), "sft": (6, 256, 8)}  # steps, seq_len, global batch size
    stages = []
    for stage in config.stages:
        num_steps, seq_len, batch_size = sizes[stage.name]
        optimizer = dict(learning_rate=3e-3, warmup_steps=2)
        train = dict(global_batch_size=batch_size, gradient_accumulation_steps=1)
        stages.append(stage.changed(steps=num_steps, data=dict(seq_len=seq_len), optimizer=optimizer, train=train))
    config.stages = stages
