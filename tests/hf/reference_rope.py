"""Frequencies of `transformers`, for tests/hf/test_rope_scaling.py. Runs in an environment of its
own:

    python tests/hf/reference_rope.py CASES.json OUT.json

CASES.json has a list of (config.json, length). OUT.json gets a list of (float32 frequencies,
factor).
"""

import json
import sys
from pathlib import Path

from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding


def frequencies(config: dict, seq_len: int) -> tuple[list[float], float]:
    config = LlamaConfig(**config)
    rope_type = config.rope_parameters["rope_type"]
    if rope_type == "default":  # Phi 3 has partial rotary embeddings, and Llama ignores them
        inverse, factor = Phi3RotaryEmbedding.compute_default_rope_parameters(config)
    else:
        inverse, factor = ROPE_INIT_FUNCTIONS[rope_type](config, "cpu", seq_len=seq_len)
    return inverse.tolist(), factor


def main(cases_path: str, out: str) -> None:
    cases = json.loads(Path(cases_path).read_text())
    Path(out).write_text(json.dumps([frequencies(*case) for case in cases]))


if __name__ == "__main__":
    main(*sys.argv[1:])
