"""Greedy text against `transformers`, for the models of tests/hf/models.py: prompts longer than their windows."""

import numpy as np
import pytest

from jaxlc.checkpoints.pretrained_params import load_pretrained
from jaxlc.data.tokens.tokenizers import ByteTokenizer
from jaxlc.generation.generator import Generator
from tests.hf.comparison import MESHES, needs_transformers, run_jobs, step_of, tokens_of
from tests.hf.models import CASES, write_model

pytestmark = needs_transformers
PROMPT_TOKENS, NEW_TOKENS = 90, 24
MIN_GAP = 1e-4  # between the two largest logits: the next token of a smaller gap depends on rounding


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {case: write_model(root / case, case, dtype=np.float32) for case in CASES}


@pytest.fixture(scope="module")
def references(models, tmp_path_factory):
    prompt = tokens_of(PROMPT_TOKENS)[0].tolist()
    jobs = {
        case: dict(job="generate", directory=str(directory), prompt=prompt, num_tokens=NEW_TOKENS)
        for case, directory in models.items()
    }
    return run_jobs(tmp_path_factory.mktemp("references"), jobs)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_equal_transformers(case, mesh, models, references):
    """Up to the first token whose two largest logits are nearly equal, with the settings of a text of this length."""
    step = step_of(models[case], 128, MESHES[mesh])
    params, _ = load_pretrained(step)
    generator = Generator(step, params, ByteTokenizer())
    prompt = tokens_of(PROMPT_TOKENS)[0]
    prompts = [prompt, prompt[:7]]  # a batch of unequal lengths
    generation, _ = generator(prompts, max_tokens=NEW_TOKENS, chunk_tokens=32)
    expected, gaps = references[case]["tokens"][PROMPT_TOKENS:], references[case]["gaps"]
    num_compared = int(np.argmax(gaps < MIN_GAP)) if (gaps < MIN_GAP).any() else NEW_TOKENS
    assert num_compared >= NEW_TOKENS // 2, gaps
    np.testing.assert_array_equal(generation.tokens[:num_compared], expected[:num_compared])
