r"""GRPO of Qwen3-30B-A3B, a mixture of experts, with routing replay and trees of traces, on 8 H100s. Variants: mini.

    jaxlc train --config=grpo_qwen3_moe_128k:mini    # the same features in miniature, on 8 simulated CPU devices
    jaxlc plan --config=grpo_qwen3_moe_128k --topology=h100:1x8 --document_lengths=tree:131072+8x8192

The traces of a prompt of up to 131,072 tokens are trees of up to three levels of shared tokens, which may be tokens of
answers, as when agents branch after some turns (docs/post_training.md). The records have the experts that the sampler
chose, and its log-probabilities: importance weights correct the difference that remains. Loss, limits, rank and
optimizer are the settings of configs/recipes/grpo_128k.py; YaRN is what the model card gives for 131,072 tokens; the
projections with adapters are our choice. Another program makes the rollouts, such as a vLLM server with
enable_return_routed_experts that loads the adapters which the run exports after each step. It writes
runs/grpo_moe/rollouts/STEP.parquet:

    jaxlc train --config=grpo_qwen3_moe_128k --config.model.init_from=Qwen/Qwen3-30B-A3B --workdir=runs/grpo_moe
"""

from ml_collections import ConfigDict

from jaxlc.config import check_variant, read_config

VARIANTS = ("mini",)


def get_config(variant: str = "") -> ConfigDict:
    check_variant(variant, VARIANTS)
    config = read_config("grpo_128k:mini" if variant == "mini" else "grpo_128k")
    config.model.rope.update(scaling="yarn", factor=4.0, original_tokens=32_768)
    config.attention.update(strategy="ring", shared_prefixes=3)
    config.lora.projections = ("query", "key", "value", "attention_projected")
    config.posttrain.update(replay_routing=True, importance_weights=True)

    if variant == "mini":
        config.model.experts.update(
            num_experts=8, experts_per_token=2, ffn_dim=64, renormalize=True
        )
    else:
        config.model.preset = "qwen3-30b-a3b"
    return config
