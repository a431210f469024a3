"""Context, tensor and fsdp parallelism against one device: equal loss and gradients."""

import ast
import collections
import dataclasses
import functools
import itertools
import re
import subprocess
import sys

import jax
import numpy as np
import pytest

from jaxlc.config import load
from tests.step.synthetic import (
    HYBRID,
    KIMI_DELTA,
    LATENT,
    MAMBA,
    MIXED_KINDS,
    TOKENS,
    gradients_and_loss,
    make_batch,
    natural_rows,
    put_params,
    small_config,
    small_step,
    with_mesh,
    without_padding,
)
from tests.tolerances import (
    BFLOAT16_GRADIENT,
    FLOAT32_DECAY_GRADIENT,
    FLOAT32_NORMED_DECAY_GRADIENT,
    FLOAT32_PARITY,
    max_relative_error,
)

# An odd ring; other tests have three axes together, four tensor ranks, and test_policy_loss.py a ring of 8.
_IN_EVERY_RUN = {(3, 2, 1)}
MESHES = [
    pytest.param(
        dict(context=context, tensor=tensor, fsdp=fsdp),
        id=f"context{context}-tensor{tensor}-fsdp{fsdp}",
        marks=[] if (context, tensor, fsdp) in _IN_EVERY_RUN else [pytest.mark.full],
    )
    for context, tensor, fsdp in itertools.product((1, 2, 3, 4, 6, 8), (1, 2), (1, 2))
    if context * tensor * fsdp <= 8
]


@functools.cache
def _on_one_device(**overrides):
    """(parameters, gradients, cross entropy) of one device; overrides are config sections as text."""
    config = small_config(
        **{section: ast.literal_eval(values) for section, values in overrides.items()}
    )
    step = small_step(config)
    params = jax.tree.map_with_path(_different_sinks, step.init().params)
    gradients, loss = jax.jit(gradients_and_loss(step))(params, make_batch(step, natural_rows()))
    return params, gradients, loss


def _different_sinks(path, x):
    """Initial sinks are 0. With other values, sinks of the wrong heads are detected."""
    return (
        np.linspace(-2, 3, x.size, dtype=np.float32).reshape(x.shape)
        if path[-1].key == "sinks"
        else x
    )


def _assert_close(got, gradients, tolerance=FLOAT32_PARITY):
    """Compares with `gradients` of one device, without padding."""
    errors = jax.tree.map(lambda a, b: max_relative_error(without_padding(a, b), b), got, gradients)
    assert max(jax.tree.leaves(errors)) <= tolerance, errors


def _assert_same(axes, tolerance=FLOAT32_PARITY, split=(), memory=(), order=range(4), **overrides):
    """Compares steps with equal parameters.

    Args:
      order: of the sequences in the batch of the step, which is natural on one device.
      split, memory: settings of the attention strategy and of memory, which the step on one device does not have.
    """
    frozen = {section: repr(values) for section, values in overrides.items()}
    params, gradients, loss = _on_one_device(**frozen)
    config = with_mesh(small_config(**overrides), **axes)
    config = dataclasses.replace(
        config,
        attention=dataclasses.replace(config.attention, **dict(split)),
        memory=dataclasses.replace(config.memory, **dict(memory)),
    )
    step = small_step(load(config))
    rows = [natural_rows()[i] for i in order]
    got, got_loss = jax.jit(gradients_and_loss(step))(
        put_params(step, params), make_batch(step, rows)
    )
    np.testing.assert_allclose(got_loss, loss, rtol=tolerance)
    _assert_close(got, gradients, tolerance)


@pytest.mark.parametrize("axes", MESHES)
def test_loss_and_gradients_on_mesh_equal_one_device(axes):
    _assert_same(axes)


@pytest.mark.parametrize(
    "axes, order, num_microbatches",
    [
        (dict(context=2, data=2), (0, 3, 2, 1), 2),
        pytest.param(dict(context=2, fsdp=2, tensor=2), (0, 1, 2, 3), 2, marks=pytest.mark.full),
        (dict(context=4), (0, 1, 2, 3), 4),  # skips ring steps of some sequences
    ],
    ids=["data, another order", "fsdp", "context"],
)
def test_accumulation_of_unequal_microbatches_equals_one_device(axes, order, num_microbatches):
    """The sums of unequal numbers of targets, 95, 91, 9 and 0, are added and divided once, in any
    order.
    """
    _assert_same(axes, order=order, train=dict(gradient_accumulation_steps=num_microbatches))


def test_accumulation_on_one_device_equals_one_batch():
    _, gradients, loss = _on_one_device()
    _, accumulated, accumulated_loss = _on_one_device(train="{'gradient_accumulation_steps': 4}")
    np.testing.assert_allclose(accumulated_loss, loss, rtol=FLOAT32_PARITY)
    _assert_close(accumulated, gradients)


@pytest.mark.full
def test_more_tensor_ranks_than_kv_heads_equals_one_device():
    """On tensor ranks alone; MIXED_CASES has them with context ranks."""
    _assert_same(dict(tensor=4))


# Every strategy with all kinds of layers, for packed documents and for one document per sequence. The other settings
# cover pairs of a strategy with whole groups of layers and with last layers, and pairs of remat settings with both.
_ONE_DOCUMENT = dict(attention=dict(document_mask=False), model=dict(num_layers=3))
_PACKED = dict(model=dict(num_layers=4))
# a gate of attention with a projection of its own
OWN_GATE = dict(attention=dict(gate=True, gate_projection=True))
KINDS = [
    ("ring", dict(context=4, tensor=2), _PACKED, dict(remat="attention")),
    ("ring", dict(context=4, fsdp=2), _ONE_DOCUMENT, dict(remat="full", layers_per_remat_group=3)),
    ("all_gather", dict(context=4, fsdp=2), _PACKED, dict(remat="none")),
    (
        "all_gather",
        dict(context=2, tensor=2),
        _ONE_DOCUMENT,
        dict(remat="full", offload=("residual",)),
    ),
    ("ulysses", dict(context=4, fsdp=2), _PACKED, dict(remat="full", layers_per_remat_group=3)),
    ("ulysses", dict(context=2, tensor=2), _ONE_DOCUMENT, dict(remat="matmuls")),
    (
        "hybrid",
        dict(context=4, fsdp=2),
        _PACKED,
        dict(remat="full", offload=("attention_out", "attention_lse")),
    ),
    ("hybrid", dict(context=4, tensor=2), _ONE_DOCUMENT, dict(remat="none")),
    (
        "ring",
        dict(context=2, fsdp=2),
        _PACKED,
        dict(remat="full", tile_tokens=24, offload=("residual", "attention_out", "attention_lse")),
    ),
    (
        "hybrid",
        dict(context=4),
        _ONE_DOCUMENT,
        dict(remat="attention", tile_tokens=12, layers_per_remat_group=3, parameters="host"),
    ),
]
# Layers of different shapes: whole groups of layers, last layers, and tiles.
MIXED_CASES = [
    (
        "ring",
        dict(context=2, tensor=2),
        dict(num_layers=7),
        dict(remat="full", offload=("residual",)),
    ),
    (
        "hybrid",
        dict(context=4, fsdp=2),
        dict(num_layers=6),
        dict(remat="attention", layers_per_remat_group=3),
    ),
    (
        "ring",
        dict(context=2, tensor=4),
        dict(num_layers=4, layer_kinds=("sliding", "wide"), attention_sinks=True, **OWN_GATE),
        dict(remat="full", tile_tokens=24),
    ),
]


# Packed; the ring is in MIXED_CASES and, with one document, in _COMBINATIONS. The hybrid strategy exchanges heads as
# Ulysses does.
@pytest.mark.parametrize(
    "strategy, axes, settings, memory",
    [
        pytest.param(*case, marks=[] if index in (2, 6) else pytest.mark.full)
        for index, case in enumerate(KINDS)
    ],
    ids=str,
)
def test_layer_kinds_equal_one_device(strategy, axes, settings, memory):
    kinds = dict(
        layer_kinds=("sliding", "full", "nope"),
        window=20,
        rope_scaling="linear",
        rope_scaling_factor=8.0,
    )
    kinds |= dict(attention_sinks=True)
    split = dict(strategy=strategy, ulysses_degree=2 if strategy == "hybrid" else 1)
    settings = settings | dict(model=settings["model"] | kinds)
    _assert_same(axes, split=split, memory=memory, **settings)


@pytest.mark.full
def test_sliding_layer_in_tiles_equals_one_device():
    memory = dict(
        remat="full", tile_tokens=24, offload=("residual", "attention_out", "attention_lse")
    )
    _assert_same(
        dict(context=2),
        memory=memory,
        model=dict(num_layers=1, layer_kinds=("sliding",), window=20),
    )


@pytest.mark.parametrize(
    ("strategy", "axes", "model", "memory"),
    [
        pytest.param(*case, marks=[] if index == 2 else pytest.mark.full)
        for index, case in enumerate(MIXED_CASES)
    ],
    ids=str,
)
def test_layers_of_different_shapes_equal_one_device(strategy, axes, model, memory):
    split = dict(strategy=strategy, ulysses_degree=2 if strategy == "hybrid" else 1)
    _assert_same(axes, split=split, memory=memory, model=MIXED_KINDS | model)


_RECURRENT = dict(layer_kinds=("gated_delta_net",), num_layers=1)
HYBRIDS = [
    # in the order of documents
    ("ring", dict(context=4, tensor=2), dict(num_layers=2), dict(remat="attention")),
    (
        "ring",
        dict(context=8),
        dict(num_layers=2),
        dict(remat="full", offload=("residual", "delta_states")),
    ),
    (
        "ulysses",
        dict(context=2, fsdp=2),
        dict(num_layers=3),
        dict(remat="full", layers_per_remat_group=2),
    ),
    ("all_gather", dict(context=2, tensor=2), dict(num_layers=2), dict(remat="matmuls")),
    ("hybrid", dict(context=4, data=2), dict(num_layers=2), dict(remat="none")),
    ("ring", dict(context=2, tensor=2), _RECURRENT, dict(remat="attention", tile_tokens=24)),
    (
        "ulysses",
        dict(context=2, fsdp=2),
        dict(num_layers=4),
        dict(remat="full", tile_tokens=16, layers_per_remat_group=2, offload=("residual",)),
    ),
    (
        "hybrid",
        dict(context=4, data=2),
        dict(num_layers=3),
        dict(remat="full", tile_tokens=12, offload=("residual", "attention_out", "attention_lse")),
    ),
]


@pytest.mark.parametrize(
    ("strategy", "axes", "model", "memory"),
    [
        # The full float64_parity.py has ranks of both axes, and whole sequences.
        pytest.param(*case, marks=[] if index == 5 else pytest.mark.full)
        for index, case in enumerate(HYBRIDS)
    ],
    ids=str,
)
def test_gated_delta_net_layers_equal_one_device(strategy, axes, model, memory):
    split = dict(strategy=strategy, ulysses_degree=2 if strategy == "hybrid" else 1)
    _assert_same(axes, FLOAT32_DECAY_GRADIENT, split=split, memory=memory, model=HYBRID | model)


MAMBAS = [
    ("ring", dict(context=2, tensor=4), dict(remat="attention", tile_tokens=24), "after_gate"),
    ("ulysses", dict(context=2, tensor=2), dict(remat="full"), "before_gate"),
    ("hybrid", dict(context=4, data=2), dict(remat="none"), "none"),
]


@pytest.mark.full  # .ci/run compares with an oracle, below
@pytest.mark.parametrize(("strategy", "axes", "memory", "norm"), MAMBAS, ids=str)
def test_mamba2_layers_equal_one_device(strategy, axes, memory, norm):
    """With fewer groups than tensor ranks, or as many."""
    split = dict(strategy=strategy, ulysses_degree=2 if strategy == "hybrid" else 1)
    model = MAMBA | dict(mamba2=MAMBA["mamba2"] | dict(norm=norm))
    tolerance = FLOAT32_NORMED_DECAY_GRADIENT if norm == "before_gate" else FLOAT32_PARITY
    _assert_same(axes, tolerance, split=split, memory=memory, model=model)


KIMI_DELTAS = [
    ("ring", dict(context=4, tensor=2), dict(remat="attention", tile_tokens=0)),
    ("ring", dict(context=2, tensor=2), dict(remat="attention", tile_tokens=24)),
    ("ulysses", dict(context=2, fsdp=2), dict(remat="full", offload=("residual", "delta_states"))),
    ("all_gather", dict(context=2, tensor=2), dict(remat="matmuls")),
    ("hybrid", dict(context=4, data=2), dict(remat="full", tile_tokens=12)),
]


@pytest.mark.full  # as Mamba-2
@pytest.mark.parametrize(("strategy", "axes", "memory"), KIMI_DELTAS, ids=str)
def test_kimi_delta_layers_equal_one_device(strategy, axes, memory):
    split = dict(strategy=strategy, ulysses_degree=2 if strategy == "hybrid" else 1)
    _assert_same(axes, FLOAT32_DECAY_GRADIENT, split=split, memory=memory, model=KIMI_DELTA)


LATENTS = [
    ("ring", dict(context=3, tensor=2), dict(remat="attention", save=("latent",))),
    ("hybrid", dict(context=4, fsdp=2), dict(remat="full", tile_tokens=12)),
    ("ulysses", dict(context=2, tensor=2), dict(remat="full", offload=("residual", "value"))),
    ("all_gather", dict(context=8), dict(remat="none")),
    ("ring", dict(context=2, tensor=4), dict(remat="attention", tile_tokens=24)),
]


@pytest.mark.parametrize(
    ("strategy", "axes", "memory"),
    [
        pytest.param(*case, marks=[] if index == 1 else pytest.mark.full)
        for index, case in enumerate(LATENTS)
    ],
    ids=str,
)
def test_latent_attention_equals_one_device(strategy, axes, memory):
    """The weights that expand the latents have adapters. latent_oracle.py has the ring of latents
    without tiles.
    """
    split = dict(strategy=strategy, ulysses_degree=2 if strategy == "hybrid" else 1)
    lora = dict(rank=2, projections=("latent", "key_value"))
    _assert_same(axes, split=split, memory=memory, model=LATENT, lora=lora)


def test_ring_of_latents_sends_them_and_their_gradients_in_float32():
    """Per token (rank + rotated dims), in 2 bytes, and 4 bytes for gradients; see test_plan.py."""
    sections = dict(model=LATENT, mesh=dict(context=4), precision=dict(compute="bf16"))
    step = small_step(small_config(**sections))
    params = jax.eval_shape(lambda: step.init().params)
    program = jax.jit(gradients_and_loss(step)).lower(params, make_batch(step, natural_rows()))
    sent = re.findall(r"collective_permute.*-> tensor<(\w+)>", program.as_text())
    size = f"{len(natural_rows())}x{TOKENS // 4}x{10 + 4}x"
    # before the loop over further steps, and in it, of both passes; gradients also after the loop
    assert collections.Counter(sent) == {size + "bf16": 4, size + "f32": 3}


@pytest.mark.full
def test_ring_of_keys_and_values_of_latents_equals_one_device():
    split = dict(ring_payload="keys_values")
    _assert_same(dict(context=2, tensor=2), split=split, model=LATENT)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("mixers", "flags", "num_cases"),
    [
        ("recurrent", [], 1),
        pytest.param("recurrent", ["--all"], 17, marks=pytest.mark.full),
        pytest.param("latent", ["--all"], 17, marks=pytest.mark.full),
    ],
)
def test_mixers_equal_oracles_in_float64(mixers, flags, num_cases):
    """Losses and gradients of packed documents and prefixes, and cached generation."""
    output = subprocess.run(
        [sys.executable, "-m", f"tests.step.{mixers}_oracle", *flags],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    errors = [[float(x) for x in line.split()[-2:]] for line in output.splitlines()]
    assert len(errors) == num_cases, output
    assert all(loss <= 1e-12 and gradient <= 1e-11 for loss, gradient in errors), output


def test_model_variants_equal_one_device():
    model = dict(
        qk_norm="projection",
        norm_placement="pre_and_post",
        qkv_bias=True,
        mlp_bias=True,
        query_scale_dim=5.5,
        embedding_multiplier=1.5,
        residual_multiplier=0.4,
        logits_scaling=1.7,
        attention_out_bias=True,
        attention=dict(gate=True, interleaved=True),
        zero_centered_norm=True,
        rope_fraction=0.5,
        rope_scaling="llama3",
        rope_scaling_factor=8.0,
        rope_scaling_original_tokens=32,
        tie_embeddings=True,
        vocab_size=64,
    )
    _assert_same(dict(context=2, tensor=2, fsdp=2), model=model)


@pytest.mark.parametrize(
    "memory",
    [
        pytest.param(dict(remat="full"), marks=pytest.mark.full),
        pytest.param(dict(remat="full", save=("mlp_gate", "query")), marks=pytest.mark.full),
        pytest.param(
            dict(remat="full", offload=("residual", "attention_out", "attention_lse")),
            marks=pytest.mark.full,
        ),
        pytest.param(dict(remat="attention", layers_per_remat_group=2), marks=pytest.mark.full),
        dict(
            remat="full",
            layers_per_remat_group=2,
            offload=("residual",),
            save=("attention_out", "attention_lse", "mlp_gate", "query"),
        ),
    ],
    ids=str,
)  # KINDS has remat "none" and "matmuls"; _COMBINATIONS has "attention" with groups of layers
def test_remat_settings_equal_one_device(memory):
    params, gradients, _ = _on_one_device()
    step = small_step(small_config(memory=memory, mesh=dict(context=2, tensor=2)))
    got, _ = jax.jit(gradients_and_loss(step))(
        put_params(step, params), make_batch(step, natural_rows())
    )
    _assert_close(got, gradients)


@pytest.mark.parametrize(
    "context", [*(pytest.param(x, marks=pytest.mark.full) for x in (1, 2, 4)), 8]
)
def test_bfloat16_error_does_not_grow_with_the_ring(context):
    """bfloat16 on a ring against float32 on one device: the same bound for every ring size."""
    params, gradients, loss = _on_one_device()
    step = small_step(small_config(precision=dict(compute="bf16"), mesh=dict(context=context)))
    got, got_loss = jax.jit(gradients_and_loss(step))(
        put_params(step, params), make_batch(step, natural_rows())
    )
    np.testing.assert_allclose(got_loss, loss, rtol=BFLOAT16_GRADIENT)
    _assert_close(got, gradients, BFLOAT16_GRADIENT)


def test_gradients_equal_finite_differences():
    """The gradient of the whole model along one random direction, on a mesh."""
    step = small_step(small_config(mesh=dict(context=2, tensor=2)))
    params, batch = step.init().params, make_batch(step, natural_rows())
    run = jax.jit(gradients_and_loss(step))
    gradients, _ = run(params, batch)
    keys = jax.random.split(jax.random.key(1), len(jax.tree.leaves(params)))
    keys = jax.tree.unflatten(jax.tree.structure(params), list(keys))
    direction = jax.tree.map(
        lambda p, key: jax.random.normal(key, p.shape) * np.abs(p).mean(), params, keys
    )

    def at(distance):
        moved = jax.tree.map(lambda p, d: p + distance * d, params, direction)
        return float(run(moved, batch)[1])

    slope = sum(
        float((g * d).sum()) for g, d in zip(jax.tree.leaves(gradients), jax.tree.leaves(direction))
    )
    assert abs((at(1e-2) - at(-1e-2)) / 2e-2 - slope) <= 2e-2 * abs(slope)


_WHOLE_TENSORS = ("residual", "attention_out", "attention_lse")


# every pair of a mesh, a strategy and two settings of memory; .ci/run has the first two
_COMBINATIONS = [
    (dict(context=6), dict(document_mask=False),
     dict(remat="full", tile_tokens=8, layers_per_remat_group=2, offload=_WHOLE_TENSORS, parameters="host",
          loss_chunk_tokens=7)),
    (dict(context=2, tensor=2, fsdp=2), dict(),
     dict(remat="attention", layers_per_remat_group=2, offload=_WHOLE_TENSORS, parameters="host", optimizer="host")),
    (dict(context=2, tensor=2, fsdp=2), dict(), dict(remat="attention", tile_tokens=16, parameters="host")),
    (dict(context=4, fsdp=2), dict(strategy="hybrid", ulysses_degree=2),
     dict(remat="full", tile_tokens=8, layers_per_remat_group=2, offload=_WHOLE_TENSORS, parameters="host",
          loss_chunk_tokens=7)),
    (dict(context=6), dict(document_mask=False), dict(remat="full", tile_tokens=8)),
    (dict(), dict(), dict(remat="full", tile_tokens=24)),
    (dict(context=2, fsdp=2), dict(strategy="ulysses"), dict(remat="attention", tile_tokens=12, loss_chunk_tokens=7)),
    (dict(context=2, tensor=4), dict(), dict(remat="full", tile_tokens=24, offload=("residual",), optimizer="host")),
    (dict(context=2), dict(strategy="ulysses", document_mask=False),
     dict(remat="full", tile_tokens=48, layers_per_remat_group=2, parameters="host", optimizer="host",
          loss_chunk_tokens=7)),
    (dict(context=4, data=2), dict(),
     dict(remat="full", tile_tokens=6, layers_per_remat_group=2, offload=("residual",))),
    (dict(context=8), dict(strategy="hybrid", ulysses_degree=2),
     dict(remat="attention", tile_tokens=4, layers_per_remat_group=2, optimizer="host")),
]  # fmt: skip


@pytest.mark.parametrize(
    "axes, attention, memory",
    [
        *_COMBINATIONS[:2],
        *(pytest.param(*case, marks=pytest.mark.full) for case in _COMBINATIONS[2:]),
    ],
    ids=str,
)
def test_memory_settings_equal_one_device(axes, attention, memory):
    """Gradients against one device with the state on the device; `test_host_state.py` tests the
    update.
    """
    mask = {key: value for key, value in attention.items() if key == "document_mask"}
    model = dict(attention_sinks=True, attention_gate=True)
    params, gradients, loss = _on_one_device(attention=str(mask), model=str(model))
    step = small_step(small_config(mesh=axes, model=model, attention=attention, memory=memory))
    got, got_loss = jax.jit(gradients_and_loss(step))(
        put_params(step, params), make_batch(step, natural_rows())
    )
    np.testing.assert_allclose(got_loss, loss, rtol=FLOAT32_PARITY)
    _assert_close(got, gradients)
