"""Copies of the weights that each node gathers once per step: equal to gathers from all ranks in
each layer.
"""

import functools
import math

import jax
import numpy as np
import pytest

from jaxlc.checkpoints.restore import RestoreTarget
from jaxlc.checkpoints.save import Checkpoints
from jaxlc.core.errors import UserError
from jaxlc.hlo import analyze
from jaxlc.sharding.rules import is_copied
from jaxlc.simulate.topology import WITHOUT_GPU, make_mesh, topology
from jaxlc.step import verify_compiled
from jaxlc.step.step import build_step
from tests.step.synthetic import (
    HYBRID,
    MIXED_KINDS,
    make_batch,
    natural_rows,
    put_params,
    small_config,
    small_step,
    without_padding,
)
from tests.tolerances import FLOAT32_DECAY_GRADIENT, FLOAT32_PARITY, max_relative_error

EXPERTS = dict(num_experts=8, experts_per_token=2, expert_ffn_dim=24, renormalize_router=True)
GPT_OSS = dict(router="topk_softmax", renormalize_router=False, expert_bias=True)
LOSSES = dict(balance_loss=0.5, router_z_loss=0.1)
LORA = dict(rank=4, projections=("query", "value", "attention_projected", "mlp_down"))
# Two nodes of four devices, two microbatches.
NODES = dict(axes=dict(fsdp=2, context=2, tensor=2))


def _config(node_devices=0, axes=(), memory=(), train=(), **sections):
    memory = dict(memory, node_copy_devices=node_devices)
    train = dict(gradient_accumulation_steps=2) | dict(train)
    return small_config(mesh=dict(axes), memory=memory, train=train, **sections)


def _step(*args, **sections):
    return small_step(_config(*args, **sections))


def _loss_and_gradients(step, params):
    run = jax.jit(step.objective.loss_and_grads)
    return jax.device_get(run(put_params(step, params), make_batch(step, natural_rows())))[:2]


# (devices of a node, mesh, settings of memory, other sections)
CASES = [
    (2, dict(context=8), dict(remat="full", tile_tokens=6), dict(lora=LORA)),  # context is cut
    # fsdp is cut
    (4, dict(fsdp=2, context=2, tensor=2), {}, dict(model=EXPERTS | GPT_OSS, train=LOSSES)),
    (4, dict(context=4, data=2), dict(remat="matmuls"), dict(lora=LORA)),
    (2, dict(context=8), dict(remat="full", tile_tokens=6), dict(model=EXPERTS, train=LOSSES)),
    (
        4,
        dict(fsdp=4, context=2),  # fsdp is cut, and context is in a node
        dict(layers_per_remat_group=2),
        dict(precision=dict(reduce="fp32"), train=dict(gradient_accumulation_steps=1)),
    ),
    (
        2,
        dict(context=4, data=2),
        {},
        dict(model=dict(tie_embeddings=True, num_layers=4) | MIXED_KINDS),
    ),
    # maps of states by node, in the order of documents
    (4, dict(context=4, tensor=2), {}, dict(model=HYBRID)),
]


@pytest.mark.parametrize(
    ("node_devices", "axes", "memory", "sections"),
    [
        pytest.param(*case, marks=pytest.mark.full if i > 1 else pytest.mark.heavy)
        for i, case in enumerate(CASES)
    ],
    ids=str,
)
def test_loss_and_gradients_equal_one_device(node_devices, axes, memory, sections):
    one, step = _step(**sections), _step(node_devices, axes, memory, **sections)
    rng = np.random.default_rng(0)  # biases and half of the adapters are 0 at first
    params = jax.tree.map(
        lambda x: x + rng.normal(0, 0.02, x.shape).astype(x.dtype),
        jax.device_get(one.init().params),
    )
    (expected_loss, expected), (loss, gradients) = (
        _loss_and_gradients(one, params),
        _loss_and_gradients(step, params),
    )
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    errors = jax.tree.map(
        lambda a, b: max_relative_error(without_padding(a, b), b), gradients, expected
    )
    is_recurrent = sections.get("model") is HYBRID
    tolerance = FLOAT32_DECAY_GRADIENT if is_recurrent else FLOAT32_PARITY
    assert max(jax.tree.leaves(errors)) <= tolerance, errors


@functools.cache
def _compiled(node_devices):
    """(step, executable) of NODES."""
    step = _step(node_devices, **NODES)
    return step, step.compile()


def _trained(step, run, state, num_steps):
    batch, losses = make_batch(step, natural_rows()), []
    for _ in range(num_steps):
        state, metrics = run(state, batch)
        losses.append(float(metrics.loss))
    return state, losses


def test_three_steps_equal_gathers_in_each_layer_and_resume_from_them(tmp_path):
    """The first step gathers in each layer, and the others continue from its checkpoint; two
    microbatches each.
    """
    per_layer, run_per_layer = _compiled(0)
    per_node, run_per_node = _compiled(4)
    state, _ = _trained(per_layer, run_per_layer, per_layer.init(), 1)
    settings = dict(vocab_size=61, model_dim=32)
    checkpoints = Checkpoints(tmp_path, keep=1, warn=print)
    checkpoints.save(1, state, dict(step=1, next_row=4, corpus="a1b2", config=dict(model=settings)))
    checkpoints.wait()
    restored, _ = checkpoints.restore_latest(
        lambda _: RestoreTarget(per_node.abstract_state, settings)
    )
    checkpoints.close()
    embedding = restored.params["embedding"]
    assert embedding.sharding == per_node.abstract_state.params["embedding"].sharding
    # over all ranks, as without copies
    assert embedding.addressable_shards[0].data.size * 8 == embedding.size
    state, more = _trained(per_layer, run_per_layer, state, 2)
    got, got_more = _trained(per_node, run_per_node, restored, 2)
    np.testing.assert_allclose(got_more, more, rtol=1e-6)
    errors = jax.tree.map(
        max_relative_error, jax.device_get(got.params), jax.device_get(state.params)
    )
    assert max(jax.tree.leaves(errors)) <= FLOAT32_PARITY, errors


def test_weights_and_gradients_cross_nodes_once_per_step(monkeypatch):
    """Read from replica groups and trip counts of the compiled step: two layers and two
    microbatches.
    """
    monkeypatch.setattr(verify_compiled, "_SCALARS_BYTES", 2**9)
    (step, compiled), (_, without) = _compiled(4), _compiled(0)
    (line,) = verify_compiled.verify_compiled_step(step, compiled)
    assert line.startswith("weights of nodes of 4 devices: each device sends ")
    with pytest.raises(
        UserError, match=r"node_copy_devices=4, but the compiled step sends .* bytes between nodes"
    ):
        verify_compiled.verify_compiled_step(step, without)
    by_scope = {}
    for collective in analyze(compiled.as_text()).collectives:
        for scope in ("gather_node_copy", "sum_over_nodes"):
            if scope in collective.transfer.start.op_name and collective.sent_bytes:
                assert collective.times == 1
                assert len(collective.groups[0]) == 2
                assert {members[1] - members[0] for members in collective.groups} == {4}
                by_scope[scope] = by_scope.get(scope, 0) + collective.sent_bytes
    # Each device sends what it stores of the matrices to that of the other node, and as much of
    # their gradients.
    sizes = jax.tree.map(
        lambda x, dims: 4 * math.prod(x.sharding.shard_shape(x.shape)) * is_copied(dims),
        step.abstract_state.params,
        step.dims,
    )
    assert by_scope == dict.fromkeys(
        ("gather_node_copy", "sum_over_nodes"), sum(jax.tree.leaves(sizes))
    )


@pytest.mark.gpu_compiler
@pytest.mark.heavy
def test_step_for_h100_gathers_across_nodes_once():
    config = _config(
        4,
        dict(context=8),
        model=dict(EXPERTS, num_layers=2),
        precision=dict(compute="bf16"),
        attention=dict(kernel="blockwise", document_mask=False),
    )
    step = build_step(config, make_mesh(topology("h100:2x4"), config.mesh))
    compiled = step.compile(extra_options=dict(WITHOUT_GPU))
    assert any(
        "once per step" in line for line in verify_compiled.verify_compiled_step(step, compiled)
    )
    program = analyze(compiled.as_text())
    kinds = {c.kind for c in program.collectives if "sum_over_nodes" in c.transfer.start.op_name}
    assert kinds == {"reduce-scatter"}
