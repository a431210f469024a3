r"""DPO with LoRA on pairs of answers to prompts of up to 262,144 tokens, on 8 H100s: Llama 3.1 8B.
Variants: mini.

    jaxlc train --config=dpo_256k:mini        # in miniature, on 8 simulated CPU devices
    jaxlc plan --config=dpo_256k --topology=h100:1x8 --document_lengths=tree:245760+2x8192

The two answers of a pair continue one prompt, which is computed once, and the reference is the
model without adapters (docs/post_training.md). beta is that of the paper (arXiv:2305.18290); the
other settings are our choice. To train:

    jaxlc train --config=dpo_256k --config.model.init_from=meta-llama/Llama-3.1-8B-Instruct \
      --config.data.traces=PAIRS.jsonl
"""

from ml_collections import ConfigDict

from jaxlc.config import check_variant, defaults, shrink_for_cpu

VARIANTS = ("mini",)


def get_config(variant: str = "") -> ConfigDict:
    check_variant(variant, VARIANTS)
    config = defaults()
    config.model.preset = "llama3.1-8b"
    config.mesh.context = 8
    config.attention.shared_prefixes = 1
    config.runtime.topology = "h100:1x8"
    config.lora.rank = 32
    config.data.update(sources=(), traces="pairs/*.jsonl", seq_len=262_144)
    config.posttrain.update(loss="dpo", beta=0.1, reference="base")
    config.optimizer.update(
        learning_rate=5e-6, schedule="cosine", warmup_steps=20, weight_decay=0.0
    )
    config.train.update(steps=200, global_batch_size=16, gradient_accumulation_steps=16)
    config.train.update(
        checkpoint_every_steps=20, eval_sequences=4, eval_every_steps=50, checkpoint_frozen=False
    )

    if variant == "mini":
        shrink_for_cpu(config)
        config.lora.rank = 8
        config.data.traces = __file__.replace("dpo_256k.py", "mini_pairs.jsonl")
        config.train.update(steps=6, eval_every_steps=0, eval_sequences=1, checkpoint_every_steps=3)
    return config
