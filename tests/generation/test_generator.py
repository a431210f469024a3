"""Prefill and decoding with a KV cache against one forward pass."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlc.attention.contract import AttentionProblem, AttentionSpec, KeyRanges
from jaxlc.attention.kernels.choose import KERNELS, KernelSelection
from jaxlc.config import AttentionConfig, MeshConfig
from jaxlc.core.errors import UserError
from jaxlc.data.tokens.encoder import Stops
from jaxlc.data.tokens.tokenizers import ByteTokenizer
from jaxlc.generation.generator import Batch, Generator, Output
from jaxlc.generation.sampling import Sampling
from jaxlc.models import cached_attention
from jaxlc.models.cached_attention import attend_one
from jaxlc.models.contract import CacheLayout, layout_for
from jaxlc.simulate.topology import make_mesh, topology
from jaxlc.step.language_model import LanguageModel
from jaxlc.step.state import bytes_per_device
from tests.attention import cudnn_stand_in
from tests.step.synthetic import (
    HYBRID,
    KIMI_DELTA,
    LATENT,
    MIXED_KINDS,
    lowered_decoding,
    put_params,
    small_config,
    small_step,
)

TOLERANCE = 1e-4
LENGTHS = (150, 7, 201, 64)
KINDS = dict(
    first_layer_kinds=("full",), layer_kinds=("sliding", "full", "nope"), window=20, num_layers=6
)
KINDS |= dict(attention_sinks=True, attention_gate=True, attention_out_bias=True)
KINDS |= dict(rope_scaling="yarn", rope_scaling_factor=4.0, rope_scaling_original_tokens=16)
KINDS |= dict(rope_scaling_query_beta=0.5, sliding_rope_scaling=True)
KINDS |= dict(mlp_bias=True, embedding_multiplier=1.5, residual_multiplier=0.4, logits_scaling=1.7)
MIXED = MIXED_KINDS | dict(num_layers=7, attention_sinks=True, attention_gate=True)
DYNAMIC = dict(rope_scaling="dynamic_ntk", rope_scaling_factor=4.0, rope_scaling_original_tokens=32)
NUM_DECODED = 70


def prompts_of(lengths=LENGTHS) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 61, length, dtype=np.int32) for length in lengths]


def generator_of(step, params) -> Generator:
    return Generator(step, params, ByteTokenizer())


@pytest.fixture(scope="module")
def one_device():
    """For each setting of the model: (parameters, logits of all tokens of each sequence) on one
    device.
    """
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


@pytest.fixture
def cudnn_over_cache(monkeypatch):
    """Calls over the cache go to a stand-in for cuDNN's packed calls if they have the form of
    documents.
    """

    def choose(name: str, problem: AttentionProblem) -> KernelSelection:
        return KernelSelection("cudnn" if problem.document_ranges else "blockwise", "")

    cudnn_stand_in.install(monkeypatch)
    monkeypatch.setattr(cached_attention, "choose_kernel", choose)


@pytest.mark.parametrize(("mesh", "model", "strategy"), [
    (dict(), dict(), "ring"), (dict(context=2), KINDS, "ulysses"), (dict(context=4, tensor=2), DYNAMIC, "ring"),
    (dict(context=2, fsdp=2, tensor=2), MIXED, "all_gather"), (dict(tensor=4, data=2), dict(), "ring"),
    # tests/step/recurrent_oracle.py also has recurrent layers, and latent_oracle.py latent ones, in float64
    pytest.param(dict(context=2, tensor=2), KIMI_DELTA, "ring", marks=pytest.mark.full),
    pytest.param(dict(context=8), HYBRID, "ring", marks=pytest.mark.full),
    pytest.param(dict(context=2, tensor=2), LATENT, "ring", marks=pytest.mark.full),
], ids=str)  # fmt: skip
def test_prefill_and_decode_equal_one_forward_pass(mesh, model, strategy, one_device):
    """Prompts of unequal lengths in chunks of 64 tokens, then the rest of each sequence token by
    token.
    """
    _assert_equals_forward_pass(
        small_config(mesh=mesh, model=model, attention=dict(strategy=strategy)), model, one_device
    )


def test_prefill_through_packed_calls_equals_one_forward_pass(one_device, cudnn_over_cache):
    _assert_equals_forward_pass(small_config(mesh=dict(context=8)), {}, one_device)


def _assert_equals_forward_pass(config, model, one_device):
    params, expected = one_device(**model)
    step = small_step(config)
    generator, sequences = generator_of(step, put_params(step, params)), prompts_of()
    num_decoded = [min(NUM_DECODED, len(tokens) - 1) for tokens in sequences]
    prompts = [tokens[: len(tokens) - count] for tokens, count in zip(sequences, num_decoded)]
    batch = Batch(generator, prompts, max_tokens=NUM_DECODED, chunk_tokens=64)
    progress = []
    logits = [np.asarray(batch.extend(progress=lambda *done: progress.append(done)))]
    longest = max(map(len, prompts))
    assert progress == [(first, longest) for first in range(64, longest, 64)]
    for index in range(NUM_DECODED):
        following = [
            tokens[min(len(p) + index, len(tokens) - 1)] for tokens, p in zip(sequences, prompts)
        ]
        logits.append(np.asarray(batch.decode(np.array(following))))
    for row, (full_logits, prompt, count) in enumerate(zip(expected, prompts, num_decoded)):
        got = np.stack([step_logits[row] for step_logits in logits[: count + 1]])
        np.testing.assert_allclose(
            got, full_logits[len(prompt) - 1 :], atol=TOLERANCE, rtol=TOLERANCE
        )


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
    stopped = generator(prompts[:1], max_tokens=12, stops=Stops([stop_id], []))[0]
    assert stopped.finish_reason == "stop" and len(stopped.tokens) == first + 1


def test_random_numbers_belong_to_the_index_of_a_request_in_batches_of_any_size(one_device):
    step = small_step(small_config())
    generator, sampling = generator_of(step, one_device()[0]), Sampling(temperature=1.0, seed=3)
    prompts = prompts_of((20,)) * 5
    together = [x.tokens.tolist() for x in generator(prompts, max_tokens=6, sampling=sampling)]
    alone = [
        generator(prompts[:1], max_tokens=6, sampling=sampling, indices=[i])[0].tokens.tolist()
        for i in (0, 4)
    ]
    assert alone == [together[0], together[4]] and len(set(map(tuple, together))) == 5


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([np.zeros(0, np.int32)], "expected at least one token"),
        ([np.array([61])], "expected integers from 0 to 60"),
        ([np.array([0.5])], "expected integers"),
        ([np.zeros((2, 3), np.int32)], "list of token ids"),
    ],
)
def test_invalid_prompt_raises(prompts, message, one_device):
    step = small_step(small_config())
    generator = generator_of(step, one_device()[0])
    with pytest.raises(UserError, match=message):
        generator(prompts, max_tokens=3)
    with pytest.raises(UserError, match="invalid value -1 for chunk_tokens: expected 0 or more"):
        generator([np.array([1])], max_tokens=3, chunk_tokens=-1)


@pytest.mark.parametrize(("gpu", "kernel", "tokens_per_rank", "expected"), [
    ("h100", "auto", 2**17, ("cudnn", "cudnn", "pallas")),
    ("h100", "cudnn", 2**17, ("cudnn", "cudnn", "pallas")),
    ("h100", "auto", 2**21, ("cudnn", "pallas", "pallas")),  # 2^31 elements
    ("a100", "auto", 2**17, ("cudnn", "pallas", "pallas")),  # no packed calls
    ("h100", "blockwise", 2**17, ("blockwise",) * 3),
])  # fmt: skip
def test_kernels_of_a_chunk_of_the_cache_and_of_decoding(gpu, kernel, tokens_per_rank, expected):
    mesh = make_mesh(topology(f"{gpu}:1x1"), MeshConfig())

    def kernels(num_tokens: int) -> list[str]:
        attention = cached_attention.CachedAttention(
            config=AttentionConfig(kernel=kernel),
            mesh=mesh,
            layout=CacheLayout(num_ranks=1, max_tokens=tokens_per_rank),
            window=None,
            q_like=jax.ShapeDtypeStruct((1, num_tokens, 32, 128), jnp.bfloat16),
            num_kv_heads=8,
        )
        return [selection.name for selection in attention.kernels.values()]

    assert (*kernels(2048), *kernels(1)) == expected


@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [("pallas", jnp.float32), ("pallas", jnp.bfloat16), ("blockwise", jnp.float32)],
)
@pytest.mark.parametrize("num_heads", [6, 2])
def test_one_query_over_a_layer_of_the_cache_equals_one_call(kernel, dtype, num_heads):
    """2,500 keys in several parts or blocks; one sequence has keys in some of them, and one has
    none.
    """
    keys = jax.random.split(jax.random.key(0), 3)
    q_B1NH = jax.random.normal(keys[0], (3, 1, num_heads, 16))
    k, v = (jax.random.normal(key, (3, 3, 2500, 2, 16)).astype(dtype) for key in keys[1:])
    num_keys_B, spec, layer = jnp.array([2500, 1100, 0]), AttentionSpec(causal=False), jnp.int32(1)
    ranges = KeyRanges(jnp.zeros((3, 1), jnp.int32), num_keys_B[:, None])
    expected = KERNELS["reference"].forward(q_B1NH, k[:, 1], v[:, 1], ranges, spec)
    got = jax.jit(functools.partial(attend_one, KERNELS[kernel], spec=spec))(
        q_B1NH, k, v, layer, num_keys_B
    )
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_decoding_copies_no_layer_of_the_cache(one_device):
    """Such a copy would be a temporary array. The cache is updated in place."""
    params, _ = one_device(**KINDS)
    step = small_step(small_config(model=KINDS | dict(window=30_000)))
    generator = generator_of(step, params)
    layout = layout_for(30_000, step.mesh)
    lowered = lowered_decoding(generator.cached_step, generator.params, layout)
    memory = lowered.compile().memory_analysis()
    cache_bytes = bytes_per_device(generator.cached_step.abstract_cache(layout, 2))
    assert memory.alias_size_in_bytes >= cache_bytes
    # keys of a layer: B, tokens, K, H, bytes
    assert memory.temp_size_in_bytes < 2 * 30_000 * 2 * 8 * 4


def test_stop_string_that_only_the_end_completes_is_the_reason():
    """The last token is the first byte of a character, which the end of the text replaces."""
    output = Output(ByteTokenizer(), Stops([], ["b\ufffd"]), max_tokens=3, prompt=np.array([97]))
    for number in b"ab\xc3":
        output.add(number, 0.0)
    assert output.finish_reason == "stop" and output.result().text == "a"
