r"""Supervised fine-tuning of Llama 3.1 8B on chats and agent traces of up to 131,072 tokens.
Variants: mini.

    jaxlc train --config=sft_128k:mini        # the same features in miniature, on 8 simulated CPU devices
    jaxlc plan --config=sft_128k --topology=h100:1x8 --price_per_gpu_hour=2.5

Learning rate, tokens per step, steps and warm-up are those of ProLong's fine-tuning (train_sft.sh
in github.com/princeton-nlp/ProLong) at twice its length. Chats are packed, do not attend to each
other, and only answers have a loss; docs/data.md has the format of chats. To train on 8 H100s,
start one process per GPU (docs/clusters.md):

    jaxlc train --config=sft_128k --config.model.init_from=meta-llama/Llama-3.1-8B-Instruct \
      --config.data.mixture.chats.paths=CHATS.jsonl
"""

from ml_collections import ConfigDict

from jaxlc.config import check_variant, defaults, shrink_for_cpu

VARIANTS = ("mini",)


def get_config(variant: str = "") -> ConfigDict:
    check_variant(variant, VARIANTS)
    config = defaults()
    config.model.preset = "llama3.1-8b"
    config.mesh.update(context=8)
    # in one NVLink domain 5% faster than the ring, by its estimate
    config.attention.strategy = "ulysses"
    config.runtime.topology = "h100:1x8"
    config.data.seq_len = 131_072
    config.data.mixture = dict(chats=dict(paths="chats/*.jsonl", chat_field="messages"))
    config.optimizer.update(
        learning_rate=2e-5, schedule="cosine", warmup_steps=13, weight_decay=0.1
    )
    # 4,194,304 tokens a step
    config.train.update(steps=250, global_batch_size=32, gradient_accumulation_steps=32)
    config.train.update(eval_sequences=4, eval_every_steps=50, checkpoint_every_steps=50)

    if variant == "mini":
        shrink_for_cpu(config)
        config.model.attention.update(
            num_heads=8, head_dim=16
        )  # ulysses splits them over 8 devices
        config.data.chat_template = "chatml"
        # 160 chats
        config.data.mixture.chats.paths = __file__.removesuffix("sft_128k.py") + "mini_chats.jsonl"
        config.mesh.update(context=8)
        config.train.update(steps=6, eval_every_steps=0, eval_sequences=2, checkpoint_every_steps=3)
    return config
