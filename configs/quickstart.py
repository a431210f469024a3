"""The first run: a small Llama on the Python standard library's own sources, on eight simulated CPU devices.

    python -m jaxlc.train --config=configs/quickstart.py

Real documents, real ring attention over context=4 x tensor=2, a few minutes on two cores.
"""

from ml_collections import ConfigDict

from jaxlc.config import defaults


def get_config(variant: str = "") -> ConfigDict:
    if variant:
        raise ValueError(f"configs/quickstart.py has no variants, so {variant!r} is not one")
    config = defaults()
    config.model.preset = "tiny"
    config.model.vocab_size = 257  # bytes and the end of a document
    config.mesh.context = 4
    config.mesh.tensor = 2
    config.runtime.simulated_devices = 8
    config.data.seq_len = 4096
    config.optimizer.learning_rate = 3e-3
    config.optimizer.warmup_steps = 10
    config.memory.remat = "none"  # it fits, and nothing is computed twice
    config.train.steps = 150
    config.train.eval_sequences = 8
    config.train.eval_every_steps = 75
    config.train.checkpoint_every_steps = 50
    return config
