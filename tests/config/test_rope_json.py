"""RoPE fields of config.json: reading both forms, writing them, and errors."""

import dataclasses

import numpy as np
import pytest

from jaxlc.config.models.families import FAMILIES
from jaxlc.config.models.model_schema import model_from, rope_problems
from jaxlc.config.models.rope_json import max_position_embeddings, rope_fields, rope_settings
from jaxlc.core.errors import Unsupported, UserError
from jaxlc.models.rope import rope_frequencies
from tests.models.plain_rope import LLAMA, SCALINGS, scaled_model, with_rope

FLAT = FAMILIES["llama"]
# as in Olmo 3
NESTED = dataclasses.replace(FLAT, rope_by_layer_type=True, defaults=dict(rope_theta=5e5))
# as in Gemma 3
LOCAL = dataclasses.replace(NESTED, defaults=dict(rope_theta=1e6, rope_local_base_freq=1e4))
KINDS = ("sliding", "full")
YARN = dict(rope_type="yarn", factor=8.0, original_max_position_embeddings=8192)
LINEAR = dict(rope_type="linear", factor=8.0)
LLAMA3 = dict(YARN, rope_type="llama3", low_freq_factor=1.0, high_freq_factor=4.0)


def read(config, family=FLAT, kinds=("full",)):
    return rope_settings(config, "config.json", family, kinds)


def written(model, family=FLAT):
    return rope_fields(model, family) | dict(
        max_position_embeddings=max_position_embeddings(model, 4096, 0)
    )


@pytest.mark.parametrize("form", ["old", "new", "both"])
@pytest.mark.parametrize("name", [name for name in SCALINGS if "partial" not in name])
def test_rope_fields_read_back_give_the_same_frequencies(name, form):
    model, fields = scaled_model(name), written(scaled_model(name))
    dropped = {"old": {"rope_parameters"}, "new": {"rope_theta", "rope_scaling"}, "both": set()}[
        form
    ]
    settings = read({field: value for field, value in fields.items() if field not in dropped})
    again = model_from(model.by_path | settings)
    # ntk is written as another rope_theta
    if model.rope.scaling != "ntk" and not name.startswith("longrope"):
        assert again == model
    for seq_len in (4096, 2**20):
        actual, expected = (rope_frequencies(x, "full", seq_len) for x in (again, model))
        np.testing.assert_allclose(actual.radians_per_token, expected.radians_per_token, rtol=1e-15)
        assert actual.attention_factor == expected.attention_factor


def test_rope_settings_accept_the_older_name_type():
    scaling = dict(type="linear", factor=4)
    assert read(dict(rope_theta=1e4, rope_scaling=scaling)) == read(
        dict(rope_parameters=dict(rope_type="linear", factor=4.0, rope_theta=10000))
    )


def test_rope_settings_of_mscale_are_an_attention_factor():
    """DeepSeek's: (0.1 mscale ln s + 1) / (0.1 mscale_all_dim ln s + 1); one alone has no effect."""
    both = read(dict(rope_scaling=dict(YARN, mscale=1.0, mscale_all_dim=0.5)))
    expected = (0.1 * np.log(8) + 1) / (0.05 * np.log(8) + 1)
    assert both["rope.attention_factor"] == pytest.approx(expected, rel=1e-12)
    assert read(dict(rope_scaling=dict(YARN, mscale=2.0)))["rope.attention_factor"] == 0


def test_rope_settings_of_longrope_take_lengths_outside_of_it():
    scaling = dict(type="longrope", short_factor=[1.0], long_factor=[2.0])
    outside = dict(max_position_embeddings=131072, original_max_position_embeddings=4096)
    settings = read(dict(outside, rope_scaling=scaling))
    assert (settings["rope.factor"], settings["rope.original_tokens"]) == (
        32.0,
        4096,
    )
    assert settings["rope.long_factors"] == (2.0,)


@pytest.mark.parametrize(
    ("scaling", "outside"),
    [
        (dict(LINEAR, factor=1.0), {}),
        (dict(YARN, factor=1), {}),
        (dict(YARN, factor=None), dict(max_position_embeddings=8192)),
        (dict(LLAMA3, factor=1.0), {}),
    ],
)
def test_rope_settings_of_factor_1_scale_nothing(scaling, outside):
    settings = read(dict(outside, rope_theta=5e5, rope_scaling=scaling))
    assert settings == read(dict(rope_theta=5e5))
    with_attention_factor = read(
        dict(outside, rope_scaling=dict(YARN, factor=1.0, attention_factor=1.3))
    )
    assert not list(rope_problems(model_from(LLAMA.by_path | with_attention_factor)))


@pytest.mark.parametrize(
    ("family", "config", "thetas"),
    [
        (LOCAL, dict(rope_theta=2e6, rope_local_base_freq=3e4, rope_scaling=LINEAR), (2e6, 3e4)),
        (LOCAL, dict(rope_scaling=LINEAR), (1e6, 1e4)),
        (
            LOCAL,
            dict(
                rope_parameters=dict(full_attention=LINEAR, sliding_attention=dict(rope_theta=7e4))
            ),
            (1e6, 7e4),
        ),
        (
            LOCAL,
            dict(rope_parameters=dict(full_attention=dict(LINEAR, rope_theta=2e6))),
            (2e6, 1e4),
        ),
        (NESTED, dict(rope_theta=3e5, rope_scaling=LINEAR), (3e5, 3e5)),
        (
            NESTED,
            dict(
                rope_parameters=dict(full_attention=LINEAR, sliding_attention=dict(rope_theta=7e4))
            ),
            (5e5, 7e4),
        ),
    ],
)
def test_rope_settings_by_layer_type(family, config, thetas):
    settings = read(config, family, KINDS)
    assert (settings["rope.theta"], settings["rope.sliding_theta"]) == thetas
    assert (settings["rope.scaling"], settings["rope.factor"]) == ("linear", 8.0)
    model = model_from(LLAMA.by_path | {"layer_kinds": KINDS, "attention.window": 4} | settings)
    fields = rope_fields(model, family)
    assert read(fields, family, KINDS) == settings
    assert ("rope_scaling" in fields) == (family is LOCAL or thetas[0] == thetas[1])


def test_rope_settings_of_one_rope_scale_sliding_layers_too():
    """Without parameters for each layer type, all layers have the same RoPE."""
    config = dict(rope_parameters=dict(YARN, truncate=False, rope_theta=2e6))
    settings = read(config, FLAT, KINDS)
    assert (settings["rope.sliding_theta"], settings["rope.sliding_scaling"]) == (2e6, True)
    model = model_from(LLAMA.by_path | {"layer_kinds": KINDS, "attention.window": 4} | settings)
    np.testing.assert_array_equal(
        *(rope_frequencies(model, kind, 4096).radians_per_token for kind in KINDS)
    )
    assert read(written(model), FLAT, KINDS) == settings
    assert read(dict(rope_theta=2e6), FLAT, KINDS)["rope.sliding_scaling"] is False


def test_partial_rotary_factor_is_read_and_written():
    family = FAMILIES["qwen3_5_text"]
    inside, outside = (
        dict(rope_parameters=dict(partial_rotary_factor=0.5)),
        dict(partial_rotary_factor=0.5),
    )
    configs = inside, outside, inside | dict(partial_rotary_factor=1), {}
    assert [read(config, family)["rope.fraction"] for config in configs] == [0.5, 0.5, 0.5, 0.25]
    for name in ("partial", "partial_yarn"):
        model = scaled_model(name)
        assert model_from(model.by_path | read(written(model, family), family)) == model


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            dict(rope_scaling=dict(rope_type="proportional", factor=2.0)),
            "RoPE of type 'proportional'; supported are",
        ),
        (dict(rope_scaling=dict(type="sub", factor=2.0)), "RoPE of type 'sub'"),
        (
            dict(rope_scaling=dict(rope_type="yarn", factor=4.0)),
            "type yarn without original_max_position_embeddings",
        ),
        (dict(rope_scaling=dict(YARN, factor=None)), "type yarn without factor"),
        (dict(rope_scaling=dict(YARN, beta=3)), "unknown RoPE parameter beta=3 for type yarn"),
        (
            dict(rope_scaling=dict(LINEAR, low_freq_factor=1)),
            "unknown RoPE parameter low_freq_factor=1",
        ),
        (
            dict(rope_scaling=dict(type="dynamic", factor=2.0)),
            "type dynamic without max_position_embeddings",
        ),
        (
            dict(rope_parameters=dict(YARN, partial_rotary_factor=0.5)),
            "partial_rotary_factor=0.5; only 1",
        ),
        (dict(rope_parameters=dict(full_attention=YARN)), "for full_attention layers"),
        (
            dict(rope_parameters=dict(YARN, llama_4_scaling_beta=0.1)),
            "llama_4_scaling_beta=0.1, which transformers ignores in models of type llama",
        ),
        (dict(rope_theta=None), "rope_theta=null"),
        (dict(rope_theta=1e4, rope_parameters=dict(rope_theta=2e4)), "which differ"),
    ],
)
def test_rope_settings_unsupported_field_raises(config, words):
    with pytest.raises(UserError) as error:
        read(config)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("family", "config", "words"),
    [
        (
            LOCAL,
            dict(rope_scaling=dict(YARN, truncate=False)),
            "truncate=false, which transformers ignores",
        ),
        (
            LOCAL,
            dict(rope_parameters=dict(sliding_attention=LINEAR)),
            "scales RoPE of sliding_attention layers",
        ),
        (
            LOCAL,
            dict(rope_parameters=dict(chunked_attention=LINEAR)),
            "for chunked_attention layers",
        ),
    ],
)
def test_rope_settings_unsupported_layer_type_raises(family, config, words):
    with pytest.raises(Unsupported, match=words):
        read(config, family, KINDS)


@pytest.mark.parametrize(
    ("family", "name", "settings", "words"),
    [
        (FLAT, "partial", {}, "rope.fraction=0.25, which transformers ignores"),
        (FLAT, "none", {}, "another RoPE in sliding layers"),
        (
            FLAT,
            "linear",
            dict(sliding_theta=5e5),
            "another RoPE in sliding layers",
        ),
        (
            NESTED,
            "linear",
            dict(sliding_scaling=True),
            r"rope.sliding_scaling=True .* \(supported: False",
        ),
        (
            NESTED,
            "yarn_options",
            {},
            "rope.truncate=False, which transformers ignores",
        ),
    ],
)
def test_rope_fields_that_transformers_ignores_raise(family, name, settings, words):
    model = dataclasses.replace(scaled_model(name, **settings), layer_kinds=KINDS)
    with pytest.raises(Unsupported, match=words):
        rope_fields(model, family)


def test_query_scale_is_read_written_and_the_default_of_ministral3():
    family = FAMILIES["ministral3"]
    default = read({}, family)
    assert (default["rope.query_beta"], default["rope.attention_factor"]) == (
        0.1,
        1,
    )
    # beta alone is a scaling
    one = dict(YARN, factor=1.0, attention_factor=1.0, llama_4_scaling_beta=0.2)
    settings = read(dict(rope_parameters=one), family)
    model = model_from(LLAMA.by_path | settings)
    assert not [*rope_problems(model)]
    assert rope_fields(model, family)["rope_parameters"] == one | dict(rope_theta=1e4)
    # transformers reads the field in any case
    unscaled = with_rope(model, query_beta=0.0, factor=8.0)
    assert rope_fields(unscaled, family)["rope_parameters"]["llama_4_scaling_beta"] == 0
    for other, changed in ((FLAT, model), (family, LLAMA)):
        with pytest.raises(Unsupported, match="rope.query_beta=.* of a model of type"):
            rope_fields(changed, other)


def test_max_position_embeddings_follow_the_scaling():
    assert max_position_embeddings(LLAMA, 4096, 2048) == 4096
    assert max_position_embeddings(LLAMA, 4096, 8192) == 8192
    assert max_position_embeddings(scaled_model("dynamic_ntk"), 2**20, 2**21) == 8192
    assert max_position_embeddings(scaled_model("yarn"), 4096, 2048) == 32 * 8192
