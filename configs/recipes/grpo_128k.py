r"""GRPO with LoRA on prompts of up to 131,072 tokens, 8 answers each, on 8 H100s: Llama 3.1 8B. Variants: mini.

    jaxlc train --config=grpo_128k:mini        # the policy makes the rollouts, in miniature, on 8 simulated CPU devices
    jaxlc plan --config=grpo_128k --topology=h100:1x8 --document_lengths=tree:131072+8x8192

A prompt and its 8 answers of up to 8,192 tokens are one tree, whose prompt is computed once (docs/post_training.md).
The loss has the clip limits and the mean over tokens of DAPO (arXiv:2503.14476); the number of answers, the learning
rate and the rank are our choice. The limits have an effect with --config.posttrain.old_log_probs=record, for rollouts
that are older than the policy. Another program makes the rollouts, such as an inference server that loads the adapters
which the run exports after each step (config.rollouts.export_command). It writes runs/grpo_128k/rollouts/STEP.jsonl:

    jaxlc train --config=grpo_128k --config.model.init_from=meta-llama/Llama-3.1-8B-Instruct --workdir=runs/grpo_128k
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
    config.data.update(sources=(), seq_len=131_072 + 8 * 8192)
    config.posttrain.update(loss="dapo", clip_low=0.2, clip_high=0.28)
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
        config.rollouts.update(
            source="model", prompts=__file__.replace("grpo_128k.py", "mini_prompts.jsonl")
        )
        config.rollouts.update(
            reward=f"{__file__}:reward", prompts_per_step=4, max_tokens=8, export_every_steps=0
        )
        config.train.update(steps=6, checkpoint_every_steps=3)
    return config


def reward(prompt: str, answer: str, record: dict) -> float:
    """Of the mini variant: the fraction of the characters of the answer that are the letter which
    is asked for.
    """
    return answer.count(record["letter"]) / max(1, len(answer))
