"""Prefill and decoding with a KV cache against one forward pass."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxlc.data.tokenizers import ByteTokenizer
from jaxlc.generation.generator import Generator, _Batch
from jaxlc.train.language_model import LanguageModel
from tests.train.synthetic import put_params, small_config, small_step

TOLERANCE = 1e-4
LENGTHS = (150, 7, 201, 64)
KINDS = dict(layer_kinds=("sliding", "full", "nope"), window=20, num_layers=5)
NUM_DECODED = 70


def prompts_of(lengths=LENGTHS) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 61, length, dtype=np.int32) for length in lengths]


def generator_of(step, params) -> Generator:
    return Generator(step.config, step.mesh, params, ByteTokenizer(), compute_dtype=jnp.float32)


@pytest.fixture(scope="module")
def one_device():
    """For each setting of the model: (parameters, logits of all tokens of each sequence) on one device."""
    results = {}

    def of(**model):
        key = str(model)
        if key not in results:
            step = small_step(small_config(model=model))
            params = step.init().params
            language_model = LanguageModel(step, params, ByteTokenizer())
            results[key] = params, [language_model.logits(tokens) for tokens in prompts_of()]
        return results[key]

    return of


@pytest.mark.parametrize(("mesh", "model"), [
    (dict(), dict()), (dict(context=2), KINDS), (dict(context=4, tensor=2), dict()), (dict(context=8), dict()),
    (dict(context=2, fsdp=2, tensor=2), KINDS), (dict(tensor=4, data=2), dict()),
], ids=str)  # fmt: skip
def test_prefill_and_decode_equal_one_forward_pass(mesh, model, one_device):
    """Prompts of unequal lengths in chunks of 64 tokens, then the rest of each sequence token by token."""
    params, expected = one_device(**model)
    step = small_step(small_config(mesh=mesh, model=model))
    generator, sequences = generator_of(step, put_params(step, params)), prompts_of()
    num_decoded = [min(NUM_DECODED, len(tokens) - 1) for tokens in sequences]
    prompts = [tokens[: len(tokens) - count] for tokens, count in zip(sequences, num_decoded)]
    batch = _Batch(generator, prompts, max_tokens=NUM_DECODED, chunk_tokens=64)
    logits = [np.asarray(batch.prefill())]
    for index in range(NUM_DECODED):
        following = [tokens[min(len(p) + index, len(tokens) - 1)] for tokens, p in zip(sequences, prompts)]
        logits.append(np.asarray(batch.decode(np.array(following))))
    for row, (of_all, prompt, count) in enumerate(zip(expected, prompts, num_decoded)):
        got = np.stack([of_step[row] for of_step in logits[: count + 1]])
        np.testing.assert_allclose(got, of_all[len(prompt) - 1 :], atol=TOLERANCE, rtol=TOLERANCE)
