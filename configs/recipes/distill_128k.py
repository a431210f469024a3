r"""Distillation of Llama 3.1 70B into 8B on answers to prompts of up to 131,072 tokens, on 8 H100s.
Variants: mini.

    jaxlc train --config=distill_128k:mini        # in miniature, on 8 simulated CPU devices
    jaxlc plan --config=distill_128k --topology=h100:1x8

The loss is the KL divergence of the student from the teacher over the teacher's 64 most probable
next tokens and one bucket for all others (docs/post_training.md). Learning rate, steps and batch
are the same as in sft_128k; the number of tokens is our choice. To train:

    jaxlc logprobs meta-llama/Llama-3.1-70B-Instruct TRACES.jsonl DISTILL.jsonl --top_k=64
    jaxlc train --config=distill_128k --config.model.init_from=meta-llama/Llama-3.1-8B-Instruct \
      --config.data.traces=DISTILL.jsonl
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
    config.data.update(sources=(), traces="distill/*.jsonl", seq_len=131_072)
    config.posttrain.teacher_top_k = 64
    config.optimizer.update(
        learning_rate=2e-5, schedule="cosine", warmup_steps=13, weight_decay=0.1
    )
    config.train.update(steps=250, global_batch_size=32, gradient_accumulation_steps=32)
    config.train.update(eval_sequences=4, eval_every_steps=50, checkpoint_every_steps=50)

    if variant == "mini":
        shrink_for_cpu(config)
        # answers to sums, whose teacher also gives the next digits a probability
        config.data.traces = __file__.replace("distill_128k.py", "mini_teacher.jsonl")
        config.posttrain.teacher_top_k = 3
        config.train.update(steps=6, eval_every_steps=0, eval_sequences=1, checkpoint_every_steps=3)
    return config
