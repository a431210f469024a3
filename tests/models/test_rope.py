"""RoPE against float64, at positions where float32 angles are wrong."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlc.config.models.model_schema import model_from
from jaxlc.config.models.presets import PRESETS
from jaxlc.models.contract import Rotation
from jaxlc.models.kinds import stacked_tables
from jaxlc.models.kinds.attention import SoftmaxAttention
from jaxlc.models.rope import LOW_TOKENS, apply_rope, rope_frequencies, rope_tables
from tests.models.plain_rope import SCALINGS, plain_rope, scaled_model

MAX_TOKENS = 2**26


def _x(num_tokens, head_dim):
    return np.random.default_rng(0).standard_normal((num_tokens, head_dim)).astype(np.float32)


@pytest.mark.parametrize("preset", ["tiny", "llama3.1-8b", "llama3.2-1b", "qwen3-8b"])
@pytest.mark.parametrize("start", [0, LOW_TOKENS - 8, 2**20 - 8, 2**25 - 8, 2**26 - 16])
def test_apply_rope_is_within_1e_6_of_float64(preset, start):
    """One unit vector per pair, so that the error is that of cos and sin."""
    model = PRESETS[preset]
    positions = np.arange(start, start + 16, dtype=np.int32)
    x_TH = np.concatenate(
        [
            np.ones((16, model.attention.head_dim // 2)),
            np.zeros((16, model.attention.head_dim // 2)),
        ],
        axis=-1,
    )
    got = apply_rope(
        jnp.asarray(x_TH, jnp.float32)[None, :, None],
        positions[None],
        rope_tables(model, "full", MAX_TOKENS),
    )
    np.testing.assert_allclose(got[0, :, 0], plain_rope(x_TH, positions, model), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["full", "sliding"])
@pytest.mark.parametrize("name", SCALINGS)
def test_apply_rope_with_scaling_is_within_1e_6(name, kind):
    """At positions up to 2^26, and for dynamic_ntk and longrope also in a run within the original
    context.
    """
    model = scaled_model(name)
    half = model.attention.head_dim // 2
    x_TH = np.concatenate([np.ones((16, half)), np.zeros((16, half))], axis=-1).astype(np.float32)
    for seq_len, starts in {
        4096: (0,),
        MAX_TOKENS: (LOW_TOKENS - 8, 2**20 - 8, 2**25 - 8, 2**26 - 16),
    }.items():
        tables = rope_tables(model, kind, seq_len)
        for start in starts:
            positions = np.arange(start, start + 16, dtype=np.int32)
            got = apply_rope(x_TH[None, :, None], positions[None], tables)[0, :, 0]
            expected = plain_rope(x_TH, positions, model, kind=kind, seq_len=seq_len)
            np.testing.assert_allclose(got, expected, rtol=0, atol=1e-6)


def test_stacked_tables_rotate_each_sequence_as_its_own():
    model, lengths = scaled_model("dynamic_ntk"), (4096, 10_000, 40_000)
    x_BTNH = (
        np.random.default_rng(0)
        .standard_normal((3, 16, 1, model.attention.head_dim))
        .astype(np.float32)
    )
    positions_BT = np.arange(3 * 16, dtype=np.int32).reshape(3, 16) + 5000
    got = jax.jit(apply_rope)(x_BTNH, positions_BT, stacked_tables(model, 6000, lengths)["full"])
    for row, length in enumerate(lengths):
        expected = plain_rope(x_BTNH[row, :, 0], positions_BT[row], model, seq_len=length)
        np.testing.assert_allclose(got[row, :, 0], expected, rtol=0, atol=1e-5)


def test_rope_scalings_differ_from_one_another():
    """So that the comparison above can fail: each changes at least one frequency by 5%, or the
    attention factor.
    """
    full = {
        name: rope_frequencies(scaled_model(name), "full", 2**20)
        for name in SCALINGS
        if "partial" not in name
    }
    for name, frequencies in full.items():
        for other_name in full.keys() - {name}:
            other = full[other_name]
            change = np.abs(np.log(frequencies.radians_per_token / other.radians_per_token)).max()
            assert change > 0.05 or frequencies.attention_factor != other.attention_factor, (
                name,
                other_name,
            )


def test_rope_tables_of_nope_are_none():
    x = jnp.ones((1, 2, 1, 8))
    tables = rope_tables(PRESETS["tiny"], "nope", 16)
    assert tables is None
    assert apply_rope(x, np.zeros((1, 2), np.int32), tables) is x


def test_apply_rope_partial_leaves_the_other_dimensions():
    model, x = scaled_model("partial"), jnp.asarray(_x(16, 128), jnp.bfloat16)[None, :, None]
    got = apply_rope(
        x, np.arange(16, dtype=np.int32)[None] + 2**20, rope_tables(model, "full", 2**21)
    )
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got[..., 32:], x[..., 32:])
    assert (got[..., :32] != x[..., :32]).mean() > 0.9


def test_float32_angles_are_wrong_at_2_25():
    """The reason for the tables: at 2^25, float32 angles have an error above half a radian."""
    model, position = PRESETS["llama3.1-8b"], 2**25 - 1
    frequencies = model.rope.theta ** -(
        np.arange(0, model.attention.head_dim, 2) / model.attention.head_dim
    )
    plain_float32 = np.float32(position) * frequencies.astype(np.float32)
    assert np.abs(plain_float32 - position * frequencies).max() > 0.5


def test_apply_rope_equals_hugging_face():
    model = model_from(PRESETS["llama3.1-8b"].by_path | {"attention.head_dim": 8})
    x_BTNH = _x(2 * 5000 * 3, 8).reshape(2, 5000, 3, 8)
    positions_BT = np.stack([np.arange(5000), np.arange(5000)[::-1]]).astype(np.int32)
    got = jax.jit(apply_rope)(x_BTNH, positions_BT, rope_tables(model, "full", 5000))
    for b, n in ((0, 0), (1, 2)):
        expected = plain_rope(x_BTNH[b, :, n].astype(np.float64), positions_BT[b], model)
        np.testing.assert_allclose(got[b, :, n], expected, atol=3e-6)


def test_rope_scores_depend_only_on_distance():
    model = PRESETS["llama3.1-8b"]
    tables, (q, k) = rope_tables(model, "full", MAX_TOKENS), _x(2, 128)

    def score(q_position, k_position):
        at = lambda x, position: apply_rope(
            x[None, None, None], np.array([[position]], np.int32), tables
        )
        return float((at(q, q_position) * at(k, k_position)).sum())

    assert score(2**25 + 100, 2**25 + 7) == pytest.approx(score(93, 0), abs=1e-4)


def test_apply_rope_computes_in_float32_and_keeps_dtype():
    model = PRESETS["tiny"]
    x, positions = (
        jnp.asarray(_x(16, 32), jnp.bfloat16)[None, :, None],
        np.arange(16, dtype=np.int32)[None],
    )
    got = apply_rope(x, positions, rope_tables(model, "full", 16))
    assert got.dtype == jnp.bfloat16
    exact = apply_rope(x.astype(jnp.float32), positions, rope_tables(model, "full", 16))
    np.testing.assert_array_equal(got, exact.astype(jnp.bfloat16))


def test_interleaved_rope_rotates_neighboring_dimensions():
    """Of a part of a head: scores equal products of complex numbers, and of the other dimensions."""
    model = model_from(PRESETS["tiny"].by_path | {"rope.fraction": 0.5})
    tables = rope_tables(model, "full", 64)
    dim = model.rotated_dim
    mixer = SimpleNamespace(is_interleaved=True)
    positions = np.arange(64)
    x_TH, y_TH = _x(64, model.attention.head_dim), _x(64, model.attention.head_dim)[::-1]
    q_TH, k_TH = (
        SoftmaxAttention.rotated(mixer, x[None, :, None], Rotation(positions[None], tables))[
            0, :, 0
        ]
        for x in (x_TH, y_TH)
    )

    def complex_pairs(x):
        pairs = x[:, :dim:2] + 1j * x[:, 1:dim:2]
        return pairs * np.exp(1j * np.outer(positions, rope_frequencies(model, "full", 64)[0]))

    expected = (complex_pairs(x_TH) @ complex_pairs(y_TH).conj().T).real
    expected += x_TH[:, dim:] @ y_TH[:, dim:].T
    np.testing.assert_allclose(q_TH @ k_TH.T, expected, rtol=0, atol=1e-4)


def test_rope_tables_are_small():
    tables = rope_tables(PRESETS["llama3.1-8b"], "full", 2**20)
    assert tables.high_cos.shape == (256, 64) and tables.low_sin.shape == (4096, 64)
    assert {table.dtype for table in tables} == {np.dtype(np.float32)}
    assert rope_tables(PRESETS["llama3.1-8b"], "full", 100).low_cos.shape == (100, 64)
