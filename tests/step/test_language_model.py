"""Log-probabilities of candidates; `tests/train/test_run_api.py` has the other methods of
`LanguageModel`.
"""

import jax
import numpy as np
import pytest

from jaxlc.data.tokens.tokenizers import ByteTokenizer, load_tokenizer
from jaxlc.step.language_model import LanguageModel
from tests.step.synthetic import HYBRID, put_params, small_config, small_step
from tests.tolerances import FLOAT32_PARITY, max_relative_error


@pytest.mark.parametrize("is_pretrained", [False, True])
def test_log_probs_have_the_rope_of_logits(is_pretrained):
    """The frequencies of dynamic NTK depend on data.seq_len, or on the length of the text."""
    scaling = dict(
        rope_scaling="dynamic_ntk", rope_scaling_factor=8.0, rope_scaling_original_tokens=8
    )
    step = small_step(small_config(model=scaling))
    params = jax.tree.map(lambda x: 8 * x, step.init().params)  # large attention logits
    model = LanguageModel(step, params, load_tokenizer("bytes"), is_pretrained=is_pretrained)
    ids = np.random.default_rng(0).integers(0, 61, (1, 20))
    expected_V = np.asarray(jax.nn.log_softmax(model.logits(ids)[0, 19]))
    log_probs, *_ = model.scores(ids, np.full((1, 61), 19), np.arange(61)[None])
    np.testing.assert_allclose(log_probs[0], expected_V, rtol=1e-4, atol=1e-5)


def test_logits_of_a_hybrid_equal_those_of_one_device():
    """A batch has the fragments of ranks: `SequenceOrder.arranged`."""
    ids = np.random.default_rng(0).integers(0, 61, (2, 50))
    one, split = (
        small_step(small_config(model=HYBRID, mesh=dict(context=context))) for context in (1, 2)
    )
    params = jax.device_get(one.init().params)
    expected, actual = (
        LanguageModel(step, put_params(step, params), load_tokenizer("bytes")).logits(ids)
        for step in (one, split)
    )
    assert split.sequence_order.chained is not None
    assert max_relative_error(actual, expected) < FLOAT32_PARITY


def test_text_starts_with_the_start_token_and_token_ids_do_not():
    class Starting(ByteTokenizer):
        start_ids = np.array([7], np.int32)

    step = small_step(small_config())
    params = step.init().params
    model, plain = (
        LanguageModel(step, params, tokenizer()) for tokenizer in (Starting, ByteTokenizer)
    )
    ids = [1, 2, 3]
    text = bytes(ids).decode()
    np.testing.assert_array_equal(model.token_losses(text), plain.token_losses([7, *ids]))
    assert model.loss(text) == model.loss([7, *ids]) != plain.loss(text) == model.loss(ids)
    assert model.logits(text).shape[0] == 4
