r"""GRPO of Qwen3-30B-A3B, a mixture of experts, with routing replay and trees of traces, on 8 H100s. Variants: mini.

    jaxlc train --config=grpo_qwen3_moe_128k:mini    # the same features in miniature, on 8 simulated CPU devices
    jaxlc plan --config=grpo_qwen3_moe_128k --topology=h100:1x8 --document_lengths=tree:131072+8x8192

The traces of a prompt of up to 131,072 tokens are trees of up to three levels of shared tokens, also of answers, as
those of agents that branch after some turns (docs/post_training.md). The records have the experts that the sampler
chose, and its log-probabilities: importance weights correct the difference that remains. The limits are those of
configs/recipes/grpo_128k.py and the defaults; YaRN is what the model card gives for 131,072 tokens; learning rate, rank
and the projections with adapters are our choice. Another program makes the rollouts, such as a vLLM server with
enable_return_routed_experts that loads the adapters which the run exports after each step. It writes
runs/grpo_moe/rollouts/STEP.parquet:

    jaxlc train --config=grpo_qwen3_moe_128k --config.model.init_from=Qwen/Qwen3-30B-A3B --workdir=runs/grpo_moe
"""

from ml_collections import ConfigDict

from jaxlc.config import check_variant, defaults, shrink_for_cpu

VARIANTS = ("mini",)


def get_config(variant: str = "") -> ConfigDict:
    check_variant(variant, VARIANTS)
    config = defaults()
    config.model.preset = "qwen3-30b-a3b"
    config.model.update(
        rope_scaling="yarn", rope_scaling_factor=4.0, rope_scaling_original_tokens=32_768
    )
    config.mesh.context = 8
    config.attention.update(strategy="ring", shared_prefixes=3)
    config.runtime.topology = "h100:1x8"
    config.lora.update(rank=32, projections=("query", "key", "value", "attention_projected"))
    config.data.update(sources=(), seq_len=131_072 + 8 * 8192)
    config.posttrain.update(loss="dapo", clip_low=0.2, clip_high=0.28)
    config.posttrain.update(replay_routing=True, importance_weights=True)
    # the adapters of each step make the next rollouts
    config.rollouts.update(source="files", export_every_steps=1)
    config.optimizer.update(
        learning_rate=1e-5, schedule="constant", warmup_steps=5, weight_decay=0.0
    )
    # 16 prompts a step
    config.train.update(steps=200, global_batch_size=16, gradient_accumulation_steps=16)
    config.train.update(checkpoint_every_steps=1, checkpoint_frozen=False)

    if variant == "mini":
        shrink_for_cpu(config)
        config.lora.rank = 8
        config.model.experts.update(
            num_experts=8, experts_per_token=2, ffn_dim=64, renormalize=True
        )
        recipes = __file__.removesuffix("grpo_qwen3_moe_128k.py")
        config.rollouts.update(
            source="model",
            prompts=f"{recipes}mini_prompts.jsonl",
            reward=f"{recipes}grpo_128k.py:reward",
        )
        config.rollouts.update(prompts_per_step=4, max_tokens=8, export_every_steps=0)
        config.train.update(steps=6, checkpoint_every_steps=3)
    return config
