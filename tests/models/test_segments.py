"""Layers in any order: their segments, and steps, generation and files equal to the same layers run one by one."""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.traverse_util import flatten_dict
from ml_collections import ConfigDict

import jaxlc
from jaxlc.checkpoints.pretrained import load_pretrained
from jaxlc.config import MemoryConfig, load
from jaxlc.config.flops import num_layers_by_kind, num_params
from jaxlc.config.models.model_schema import KindConfig, first_and_group, segments_of
from jaxlc.config.models.presets import PRESETS
from jaxlc.core.errors import UserError
from jaxlc.data.tokens.tokenizers import ByteTokenizer
from jaxlc.generation.generator import Generator
from jaxlc.models import decoder
from jaxlc.models.contract import LayerOutput, LayerTokens
from jaxlc.models.offloaded_layers import LayerParams
from jaxlc.step.language_model import LanguageModel
from jaxlc.step.remat import make_remat
from jaxlc.train.reports import run_report
from tests.models.small import context_of, small_inputs, small_mesh, small_model, small_params
from tests.step.synthetic import (
    HYBRID,
    gradients_and_loss,
    make_batch,
    natural_rows,
    put_params,
    small_config,
    small_step,
    without_padding,
)
from tests.tolerances import FLOAT32_DECAY_GRADIENT, FLOAT32_PARITY, max_relative_error
from tests.train.runs import save_step_0

# Letters of the published patterns: M Mamba-2, E experts, - dense, * attention; K Kimi Delta Attention, A attention, D
# K in a dense layer. With the segments, a group and its iterations each, and the layers in the program.
PUBLISHED = {
    "Nemotron 3 Nano": (
        "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        "MEMEM*E 5, ME 3, M*E 1, ME 4",
        14,
    ),
    "Nemotron-H 8B": (
        "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
        "M-M-M-M*-M- 4, M- 4",
        13,
    ),
    "Nemotron Nano v2 9B": (
        "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
        "M- 3, M 2, -M 3, *-M 1, -M-M*-M-M 3, M- 6",
        19,
    ),
    "Kimi Linear": ("DKKA" + 5 * "KKKA" + "KKA", "D 1, KKAK 6, KA 1", 7),
    "sliding from a layer on": (28 * "F" + 7 * "S", "F 28, S 7", 2),
    "no order": ("ABCDEFGHIJKLMNOPQRSTUVWXYZ", "ABCDEFGHIJKLMNOPQRSTUVWXYZ 1", 26),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_orders_have_few_layers_in_the_program(name):
    order, expected, num_compiled = PUBLISHED[name]
    first, group = first_and_group(order)
    segments = segments_of(first, group, len(order))
    assert "".join("".join(x.kinds) * x.num_iterations for x in segments) == order
    assert ", ".join(f"{''.join(x.kinds)} {x.num_iterations}" for x in segments) == expected
    assert sum(len(x.kinds) for x in segments) == num_compiled


@pytest.mark.parametrize(
    "preset, name",
    [("nemotron-3-nano-30b-a3b", "Nemotron 3 Nano"), ("kimi-linear-48b-a3b", "Kimi Linear")],
)
def test_presets_have_the_layers_of_the_published_order(preset, name):
    model, (order, segments, num_compiled) = PRESETS[preset], PUBLISHED[name]
    letters = dict(zip(dict.fromkeys(model.layer_kinds), dict.fromkeys(order)))
    assert "".join(letters[kind] for kind in model.layer_kinds) == order
    assert len(model.segments) == len(segments.split(","))
    assert model.num_compiled_layers == num_compiled


@pytest.mark.parametrize("preset", [x for x in PRESETS if len(PRESETS[x].layer_kinds) < 8])
def test_segments_of_presets_are_those_that_the_settings_name(preset):
    """So the layers in the program are as many, and checkpoints have the same parameters."""
    model = PRESETS[preset]
    first, group = model.first_layer_kinds, model.layer_kinds
    num_groups, num_last = divmod(model.num_layers - len(first), len(group))
    assert [*model.segments] == [
        *([("first_layers", first, 1)] if first else []),
        ("layers", group, num_groups),
        *([("last_layers", group[:num_last], 1)] if num_last else []),
    ]
    assert model.num_compiled_layers == len(first) + len(group) + num_last <= 6


def test_segments_of_few_layers_are_those_that_the_settings_name():
    """Two of one kind could be a loop of one layer, but parameters keep their names and programs."""
    segments = segments_of(("dense", "dense"), ("sliding", "full", "full"), 13)
    assert segments == (
        ("first_layers", ("dense", "dense"), 1),
        ("layers", ("sliding", "full", "full"), 3),
        ("last_layers", ("sliding", "full"), 1),
    )


def test_random_orders_have_no_more_layers_in_the_program_than_their_settings():
    rng = np.random.default_rng(0)
    for num_layers in range(1, 40):
        order = "".join(rng.choice([*"ABB"], num_layers))
        first, group = first_and_group(order)
        segments = segments_of(first, group, num_layers)
        assert "".join("".join(x.kinds) * x.num_iterations for x in segments) == order
        assert sum(len(x.kinds) for x in segments) <= len(first) + 2 * len(group)
        assert len({x.name for x in segments}) == len(segments)


KINDS = dict(
    mixer=dict(attention="sliding", feed_forward="none"),
    mlp=dict(attention="none"),
    attention=dict(attention="full", feed_forward="none"),
    both=dict(attention="nope", feed_forward="dense"),
)


def model_of(*order: str, **settings):
    """A model with these kinds of layers; `settings` override."""
    kinds = {kind: KINDS[kind] for kind in order}
    sizes = dict(num_layers=len(order), attention=dict(window=20), norm_placement="pre_and_post")
    return dict(layer_kinds=order, kinds=kinds) | sizes | settings


_ORDER = *("mlp",) * 4, *("mixer", "mlp") * 2, "attention"
_EXPERTS = dict(num_experts=4, experts_per_token=2, ffn_dim=24, renormalize=True)
_RECURRENT = dict(attention="gated_delta_net", feed_forward="none")
MODELS = {
    "dense": model_of(*_ORDER),
    # the last segment is one iteration of four layers, one of which has both blocks
    "experts": model_of(*_ORDER, "both", "mixer", "mlp", experts=_EXPERTS),
    "recurrent": HYBRID
    | model_of(
        *_ORDER,
        attention=dict(window=0),
        norm_placement="pre",
        kinds=model_of(*_ORDER)["kinds"] | dict(mixer=_RECURRENT),
    ),
}
# sections of models
SECTIONS = {
    "experts": dict(train=dict(balance_loss=0.5)),
    "LoRA": dict(
        lora=dict(rank=2, projections=("query", "attention_projected", "mlp_up")),
        precision=dict(frozen="fp32"),
        train=dict(trainable=("*norm*", "embedding")),
    ),
}


def one_by_one(self, tokens_BT, positions_BT, model, context, is_frozen):
    """`Decoder.__call__` without segments: a loop over model.layer_kinds, which names all layers."""
    x_BTD = self.embedded(tokens_BT, context.shard, context.compute_dtype)
    sums: dict[str, list[jax.Array]] = {}
    for layer, kind in enumerate(model.layer_kinds):
        path, layers = next(x for x in model.layer_stacks.items() if layer in x[1])
        stack = functools.reduce(operator.getitem, path[1:], getattr(self, path[0]))
        layer_def, params = nnx.split(stack)
        own = jax.tree.map(operator.itemgetter(layers.index(layer)), params)
        operands = LayerParams(own, {}), x_BTD, LayerTokens(positions_BT), context.ranges[kind]
        (x_BTD, own_sums), _ = context.run_layer[kind](layer_def, *operands, shard=context.shard)
        for name, x in own_sums.items():
            sums.setdefault(name, []).append(x)
    return LayerOutput(x_BTD, {name: jnp.stack(x) for name, x in sums.items()})


def _loss_and_gradients(memory=None, mesh=None):
    """Of a decoder with dense attention, which compiles fast."""
    order = MODELS["dense"]["layer_kinds"]
    kinds = tuple(KindConfig(name=kind, **KINDS[kind]) for kind in dict.fromkeys(order))
    model = small_model(**MODELS["dense"] | dict(kinds=kinds, attention=dict(window=5)))
    context = context_of(model, mesh)
    if memory is not None:
        context = context._replace(remat=make_remat(memory, model.num_compiled_layers))

    def objective(params):
        x_BTD, *_ = decoder.apply(decoder.Params(params), model, *small_inputs(model), context)
        return jnp.sin(x_BTD).sum()

    return jax.jit(jax.value_and_grad(objective))(small_params(model))


def test_decoder_equals_the_layers_one_by_one(monkeypatch):
    memory = MemoryConfig(remat="full", layers_per_remat_group=2)
    got = _loss_and_gradients(memory, small_mesh(context=2, tensor=2))
    monkeypatch.setattr(decoder.Decoder, "__call__", one_by_one)
    errors = jax.tree.map(max_relative_error, got, _loss_and_gradients())
    assert max(jax.tree.leaves(errors)) <= FLOAT32_PARITY, errors


def config_of(name: str, **sections):
    """`name`: a key of MODELS, or "LoRA"."""
    model = MODELS.get(name, MODELS["dense"])
    return small_config(**{"model": model, **SECTIONS.get(name, {}), **sections})


def test_absent_blocks_have_no_parameters_and_no_pairs():
    model = config_of("dense").model
    params = decoder.abstract_params(model, model.vocab_size)
    assert sum(x.size for x in jax.tree.leaves(params)) == num_params(model)
    assert num_layers_by_kind(model).keys() == {"mixer", "attention"}


@pytest.mark.parametrize(
    "memory",
    [
        dict(remat="attention"),
        dict(remat="full", layers_per_remat_group=2),
        dict(remat="full", tile_tokens=24),
    ],
    ids=str,
)
def test_layers_may_have_no_trained_parameters(memory):
    """Adapters of attention, in an iteration that has layers of a feed-forward block alone."""
    sections = SECTIONS["LoRA"] | dict(
        lora=dict(rank=2, projections=("query",)),
        train=dict(trainable=()),
        memory=memory,
    )
    step = small_step(small_config(model=MODELS["dense"], **sections))
    batch = make_batch(step, natural_rows())
    gradients, _ = jax.eval_shape(gradients_and_loss(step), step.abstract_state.params, batch)
    assert jax.tree.leaves(gradients)


def test_start_of_a_run_names_many_layers_in_the_program(monkeypatch):
    step = small_step(config_of("dense"))
    assert "compiled one by one" not in "\n".join(run_report.step_lines(step))
    monkeypatch.setattr(run_report, "_MANY_LAYERS", 3)
    assert "layers     4 of 9 are compiled one by one" in "\n".join(run_report.step_lines(step))


@functools.cache
def params_of(name: str):
    """Values of the size of initial ones, but norms are not 1, and adapters change the output.
    Recurrent layers have the initial values: others amplify rounding errors."""
    step, rng = small_step(config_of(name)), np.random.default_rng(0)
    if name == "recurrent":
        return step.init().params

    def draw(path, x):
        if path[-1].key == "scale":
            return rng.uniform(0.5, 1.5, x.shape).astype(np.float32)
        return (0.1 * rng.standard_normal(x.shape)).astype(np.float32)

    return jax.tree.map_with_path(draw, step.abstract_state.params)


@functools.cache
def reference(name: str):
    """(gradients, cross entropy) of the layers one by one, without rematerialization."""
    step = small_step(config_of(name, memory=dict(remat="none")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder.Decoder, "__call__", one_by_one)
        return jax.jit(gradients_and_loss(step))(params_of(name), make_batch(step, natural_rows()))


_RESIDUALS = dict(remat="full", offload=("residual",))
CASES = [
    ("dense", dict(context=2, tensor=2), _RESIDUALS | dict(layers_per_remat_group=2)),
    ("dense", dict(context=2), dict(remat="full", tile_tokens=24)),
    ("dense", dict(), dict(remat="attention")),
    ("dense", dict(fsdp=2), dict(remat="full", layers_per_remat_group=4)),
    ("experts", dict(context=2, tensor=2, fsdp=2), dict(remat="attention")),
    ("experts", dict(context=2), dict(remat="full", tile_tokens=24, layers_per_remat_group=2)),
    ("recurrent", dict(context=4, tensor=2), dict(remat="attention")),
    ("recurrent", dict(context=2), _RESIDUALS | dict(tile_tokens=24)),
    ("LoRA", dict(context=2), dict(remat="full", layers_per_remat_group=2)),
    ("LoRA", dict(), _RESIDUALS | dict(tile_tokens=24)),
]


@pytest.mark.full
@pytest.mark.parametrize(("name", "axes", "memory"), CASES, ids=str)
def test_step_equals_the_layers_one_by_one(name, axes, memory):
    """Loss and gradients, with packed documents."""
    gradients, loss = reference(name)
    step = small_step(config_of(name, mesh=axes, memory=memory))
    sizes = [(x.num_iterations, len(x.kinds)) for x in step.config.model.segments]
    assert sizes == [(4, 1), (2, 2), (1, 4 if name == "experts" else 1)]
    got, got_loss = jax.jit(gradients_and_loss(step))(
        put_params(step, params_of(name)), make_batch(step, natural_rows())
    )
    np.testing.assert_allclose(got_loss, loss, rtol=FLOAT32_PARITY)
    errors = jax.tree.map(lambda a, b: max_relative_error(without_padding(a, b), b), got, gradients)
    tolerance = FLOAT32_DECAY_GRADIENT if name == "recurrent" else FLOAT32_PARITY
    assert max(jax.tree.leaves(errors)) <= tolerance, errors


@pytest.mark.full
def test_generated_tokens_are_the_argmax_of_one_forward_pass():
    params = params_of("experts")
    prompt = np.random.default_rng(0).integers(0, 61, 70, dtype=np.int32)
    step = small_step(config_of("experts", mesh=dict(context=2, tensor=2)))
    generator = Generator(step, put_params(step, params), ByteTokenizer())
    tokens = generator([prompt], max_tokens=4, chunk_tokens=64)[0].tokens
    one_device = LanguageModel(small_step(config_of("experts")), params, ByteTokenizer())
    logits = one_device.logits(np.concatenate([prompt, tokens])[:-1], slice(len(prompt) - 1, None))
    np.testing.assert_array_equal(logits.argmax(-1), tokens)


def test_export_is_read_again_bit_for_bit(tmp_path):
    save_step_0(config_of("dense", data=dict(tokenizer="bytes")), tmp_path / "run")
    params = flatten_dict(jaxlc.load(tmp_path / "run").params, sep="/")
    assert params["layers_2/mixer/attention/wq"].shape == (2, 32, 4, 8)
    assert not any("mlp/attention" in name or "mixer/mlp" in name for name in params)
    exported = jaxlc.export(tmp_path / "run", tmp_path / "out", dtype="fp32")
    loaded = load(ConfigDict(dict(model=dict(init_from=str(exported)))))
    assert loaded.model.layer_kinds == _ORDER
    weights = flatten_dict(load_pretrained(small_step(loaded))[0], sep="/")
    assert weights.keys() == params.keys()
    for name, values in params.items():
        np.testing.assert_array_equal(weights[name], values, name)


def test_layers_without_both_blocks_raise():
    kinds = dict(KINDS, mlp=dict(attention="none", feed_forward="none"), both={})
    with pytest.raises(UserError, match="kinds.mlp has attention='none' and feed_forward='none'"):
        config_of("dense", model=model_of(*_ORDER, "both", kinds=kinds))
