"""Prefill and decoding with a KV cache against one forward pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlc.attention.contract import AttentionSpec, KeyRanges
from jaxlc.attention.kernels.choose import KERNELS
from jaxlc.core.errors import UserError
from jaxlc.data.tokens.tokenizers import ByteTokenizer
from jaxlc.generation import cached_attention
from jaxlc.generation.generator import Generator, _Batch, _Output
from jaxlc.simulate.topology import topology
from jaxlc.step.language_model import LanguageModel
from tests.step.synthetic import put_params, small_config, small_step

TOLERANCE = 1e-4
LENGTHS = (150, 7, 201, 64)
KINDS = dict(layer_kinds=("sliding", "full", "nope"), window=20, num_layers=5)
KINDS |= dict(attention_sinks=True, attention_gate=True, attention_out_bias=True)
DYNAMIC = dict(rope_scaling="dynamic_ntk", rope_scaling_factor=4.0, rope_scaling_original_tokens=32)
NUM_DECODED = 70


def prompts_of(lengths=LENGTHS) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 61, length, dtype=np.int32) for length in lengths]


def generator_of(step, params) -> Generator:
    return Generator(step, params, ByteTokenizer())


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
    (dict(), dict()), (dict(context=2), KINDS), (dict(context=4, tensor=2), DYNAMIC), (dict(context=8), dict()),
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
    progress = []
    logits = [np.asarray(batch.prefill(lambda *done: progress.append(done)))]
    longest = max(map(len, prompts))
    assert progress == [(first, longest) for first in range(64, longest, 64)]
    for index in range(NUM_DECODED):
        following = [tokens[min(len(p) + index, len(tokens) - 1)] for tokens, p in zip(sequences, prompts)]
        logits.append(np.asarray(batch.decode(np.array(following))))
    for row, (full_logits, prompt, count) in enumerate(zip(expected, prompts, num_decoded)):
        got = np.stack([step_logits[row] for step_logits in logits[: count + 1]])
        np.testing.assert_allclose(got, full_logits[len(prompt) - 1 :], atol=TOLERANCE, rtol=TOLERANCE)


def test_generation_of_several_prompts_equals_single_ones(one_device):
    """Also greedy tokens equal the argmax of a forward pass, and stop ids end a sequence."""
    params, _ = one_device()
    step = small_step(small_config(mesh=dict(context=2, fsdp=2)))
    generator = generator_of(step, put_params(step, params))
    prompts = prompts_of((33, 1, 300))
    together = generator(prompts, max_tokens=12, chunk_tokens=64)
    alone = generator(prompts[1:2], max_tokens=12)
    np.testing.assert_array_equal(together[1].tokens, alone[0].tokens)
    np.testing.assert_allclose(together[1].log_probs, alone[0].log_probs, atol=TOLERANCE)
    assert [generation.finish_reason for generation in together] == ["length"] * 3

    model = LanguageModel(step, put_params(step, params), ByteTokenizer())
    whole = np.concatenate([prompts[0], together[0].tokens])
    logits = model.logits(whole[:-1], slice(len(prompts[0]) - 1, None))
    np.testing.assert_array_equal(logits.argmax(-1), together[0].tokens)

    stop_id = int(together[0].tokens[3])
    first = int(np.flatnonzero(together[0].tokens == stop_id)[0])
    stopped = generator(prompts[:1], max_tokens=12, stop_ids=[stop_id])[0]
    assert stopped.finish_reason == "stop" and len(stopped.tokens) == first + 1


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([np.zeros(0, np.int32)], "expected at least one token"),
        ([np.array([61])], "expected integers from 0 to 60"),
        ([np.array([0.5])], "expected integers"),
        ([np.zeros((2, 3), np.int32)], "expected at least one token"),
    ],
)
def test_invalid_prompt_raises(prompts, message, one_device):
    step = small_step(small_config())
    generator = generator_of(step, one_device()[0])
    with pytest.raises(UserError, match=message):
        generator(prompts, max_tokens=3)
    with pytest.raises(UserError, match="invalid value -1 for chunk_tokens: expected 0 or more"):
        generator([np.array([1])], max_tokens=3, chunk_tokens=-1)


@pytest.mark.parametrize("name", ["auto", "cudnn"])
def test_kernel_on_hopper_takes_the_ranges_of_a_cache(name):
    """Not cudnn, whose packed calls expect that all queries of a document have the same keys."""
    (device, *_) = topology("h100:1x1").devices
    assert cached_attention.kernel_for(name, device, dtype=jnp.bfloat16, head_dim=128).kernel is KERNELS["pallas"]


@pytest.mark.parametrize("num_heads", [8, 2])
def test_forward_in_parts_equals_one_call(num_heads):
    """Few queries and 4,096 keys: 8 parts; some parts and one query have no keys."""
    keys = jax.random.split(jax.random.key(0), 3)
    q_BTNH = jax.random.normal(keys[0], (2, 3, num_heads, 16))
    k_BSKH, v_BSKH = (jax.random.normal(key, (2, 4096, 2, 16)) for key in keys[1:])
    ranges = KeyRanges(jnp.array([[0, 5, 0], [0, 0, 2000]]), jnp.array([[700, 4096, 0], [1, 4000, 2300]]))
    spec, kernel = AttentionSpec(causal=False), KERNELS["reference"]
    expected = kernel.forward(q_BTNH, k_BSKH, v_BSKH, ranges, spec)
    got = cached_attention.forward_in_parts(kernel, q_BTNH, k_BSKH, v_BSKH, ranges, spec)
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_stop_string_that_only_the_end_completes_is_the_reason():
    """The last token is the first byte of a character, which the end of the text replaces."""
    output = _Output(ByteTokenizer(), ["b\ufffd"], [], max_tokens=3, num_prompt_tokens=1)
    for number in b"ab\xc3":
        output.add(number, 0.0)
    assert output.finish_reason == "stop" and output.result().text == "a"
