"""A first run: a small Llama on the sources of Python's standard library, on 8 simulated CPU
devices. Variants: code.

    jaxlc train --config=quickstart:code      # `make train`

Ring attention over context=4 x tensor=2. The variant `code` has shorter sequences and tokens of
Python code (scripts/quickstart_tokenizer.py), so that the run writes code after a few minutes on
two cores. Without it, a token is a byte.
"""

from ml_collections import ConfigDict

from jaxlc.config import check_variant, defaults


def get_config(variant: str = "") -> ConfigDict:
    check_variant(variant, ("code",))
    config = defaults()
    config.model.preset = "tiny"
    config.model.vocab_size = 257  # 256 bytes and the end-of-document token
    config.mesh.context = 4
    config.mesh.tensor = 2
    config.runtime.simulated_devices = 8
    config.data.seq_len = 4096
    config.optimizer.learning_rate = 3e-3
    config.optimizer.warmup_steps = 10
    config.memory.remat = "none"  # all activations fit, so nothing is recomputed
    config.train.steps = 150
    config.train.eval_sequences = 8
    config.train.eval_every_steps = 75
    config.train.checkpoint_every_steps = 50

    if variant == "code":
        config.data.tokenizer = __file__.removesuffix(".py") + "_tokenizer.json"
        config.model.vocab_size = 4096
        config.data.seq_len = 1024
        config.train.update(steps=500, eval_every_steps=250, checkpoint_every_steps=250)
        config.train.update(log_every_steps=5, sample_every_steps=250)
        config.train.sample_prompts = ("def ", "import os\n\n\nclass ", "    def __init__(self")
    return config
