"""Weights, gradients and moments in host memory: equal steps, and GPU programs that never copy all
of them.

CPUs have host memory from JAX 0.11 on. Before, the streamed update is tested with arrays on the
device.
"""

import itertools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlc.checkpoints.restore import RestoreTarget
from jaxlc.checkpoints.save import Checkpoints
from jaxlc.config import load, to_dict
from jaxlc.core.errors import UserError
from jaxlc.hlo import analyze, parse
from jaxlc.hlo.collectives import find_host_copies
from jaxlc.hlo.kernel_costs import calls_within
from jaxlc.hlo.parser import Program, transfers
from jaxlc.plan.program import compile_step
from jaxlc.simulate.topology import WITHOUT_GPU, make_mesh, topology
from jaxlc.step import update, verify_compiled
from jaxlc.step.objective import Objective
from jaxlc.step.state import (
    DEVICE,
    HOST,
    PINNED_HOST,
    bytes_per_device,
    lacks_host_memory,
    memory_lines,
)
from jaxlc.step.step import TrainStep, build_step
from jaxlc.step.update import learning_rate_schedule, make_optimizer
from jaxlc.step.verify_compiled import place_state
from tests.plan import gpus
from tests.step.synthetic import (
    HYBRID,
    MIXED_KINDS,
    make_batch,
    natural_rows,
    small_config,
    small_step,
    without_padding,
)
from tests.tolerances import FLOAT32_PARITY, max_relative_error

pytestmark = pytest.mark.jax_version

WEIGHTS_OF_A_LAYER = 9
ON_HOST = dict(parameters="host", optimizer="host")
REFUSAL = lacks_host_memory(small_step(small_config()).mesh)
needs_host_memory = pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL))

DIMS = {
    "embedding": ("vocab", "model"),
    "layers": {"w": ("layers", "model", "ffn"), "n": ("layers", "norm")},
}
SHAPES = {"embedding": (5, 4), "layers": {"w": (3, 4, 6), "n": (3, 4)}}
# Stacks of two kinds of layers.
DIMS["last_layers"] = dict.fromkeys(("a", "b"), DIMS["layers"])
SHAPES["last_layers"] = {"a": SHAPES["layers"], "b": {"w": (2, 4, 5), "n": (2, 4)}}


def _tree(seed: int):
    keys = iter(jax.random.split(jax.random.key(seed), 7))
    return jax.tree.map(
        lambda shape: jax.random.normal(next(keys), shape),
        SHAPES,
        is_leaf=lambda x: type(x) is tuple,
    )


def _close(a, b, tolerance=1e-6):
    errors = jax.tree.map(max_relative_error, a, b)
    assert max(jax.tree.leaves(errors)) <= tolerance, errors


@pytest.fixture
def both_ways(monkeypatch: pytest.MonkeyPatch):
    """Calls a function of `update` without and with streaming, and returns both results."""

    def run(function, *arguments):
        plain = jax.jit(lambda *x: function(*x))(*arguments)
        monkeypatch.setattr(update, "is_on_host", lambda *_: True)
        return plain, jax.jit(lambda *x: function(*x))(*arguments)

    return run


# the latter, as with LoRA
@pytest.mark.parametrize("names", [("embedding", "layers", "last_layers"), ("layers",)])
@pytest.mark.parametrize("grad_norm", [0.5, 20.0])  # below and above the clipping norm
def test_streamed_update_equals_plain_update(both_ways, grad_norm: float, names: tuple[str, ...]):
    step = small_step(small_config())
    dims, params, gradients = (
        {name: tree[name] for name in names} for tree in (DIMS, _tree(0), _tree(1))
    )
    config = step.config.optimizer
    schedule = learning_rate_schedule(config, 20)
    make = lambda dims: make_optimizer(config, schedule, dims, step.mesh)  # noqa: E731
    start = update.ParamsAndOptState(params, make(dims).init(params))

    def two_steps(weights, gradients):
        for is_finite in (True, False, True):
            weights = update.update(
                make,
                dims,
                weights,
                gradients,
                scale=0.1,
                grad_norm=grad_norm,
                is_finite=jnp.asarray(is_finite),
            )
        return weights

    plain, streamed = both_ways(two_steps, start, gradients)
    assert jax.tree.structure(plain) == jax.tree.structure(streamed) == jax.tree.structure(start)
    _close(streamed, plain)
    counts = [x for x in jax.tree.leaves(streamed) if x.dtype == jnp.int32]
    # the step that was not finite does not count
    assert counts and all(count == 2 for count in counts)


def test_streamed_gradient_norm_equals_plain_norm(both_ways):
    _close(*both_ways(lambda g: update.gradient_norm(g, DIMS, 0.5), _tree(0)))


def test_streamed_gradient_sum_equals_plain_sum(both_ways):
    _close(*both_ways(lambda a, b: update.add(a, b, DIMS), _tree(0), _tree(1)))


def _three_steps(model=(), lora=(), settings=(), **memory):
    """(step, state, losses and norms) after three steps of two microbatches; `model`, `lora` and
    `settings` of the optimizer: settings.
    """
    sections = dict(model=dict(model), lora=dict(lora), optimizer=dict(settings))
    sections |= dict(train=dict(gradient_accumulation_steps=2))
    step = small_step(small_config(mesh=dict(context=2, tensor=2), memory=memory, **sections))
    state, batch, run = step.init(), make_batch(step, natural_rows()), step.compile()
    seen = []
    for _ in range(3):
        state, metrics = run(state, batch)
        seen.append([metrics.loss, metrics.grad_norm, metrics.learning_rate])
    return step, state, np.array(seen)


@pytest.fixture(scope="module")
def on_device():
    return _three_steps()


@needs_host_memory
@pytest.mark.parametrize("memory", [
    pytest.param(dict(optimizer="host"), marks=pytest.mark.full), pytest.param(ON_HOST, marks=pytest.mark.full),
    dict(**ON_HOST, layers_per_remat_group=2), dict(**ON_HOST, tile_tokens=24),
], ids=str)  # fmt: skip
def test_steps_with_state_in_host_memory_equal_device(on_device, memory):
    _, state, seen = _three_steps(**memory)
    np.testing.assert_allclose(seen, on_device[2], rtol=FLOAT32_PARITY)
    _close(state.params, on_device[1].params, FLOAT32_PARITY)
    _close(state.opt_state, on_device[1].opt_state, FLOAT32_PARITY)
    where = {x.sharding.memory_kind for x in jax.tree.leaves(state.params)}
    assert where == ({PINNED_HOST} if "parameters" in memory else {"device"})
    assert PINNED_HOST in {x.sharding.memory_kind for x in jax.tree.leaves(state.opt_state)}


@needs_host_memory
@pytest.mark.parametrize(
    ("model", "num_at_once"),
    [
        pytest.param(
            dict(num_layers=5, layer_kinds=("sliding", "full"), window=20),
            2,
            marks=pytest.mark.full,
        ),
        (dict(**MIXED_KINDS, num_layers=7), 1),
        pytest.param(dict(**MIXED_KINDS, num_layers=7), 3, marks=pytest.mark.full),
    ],
    ids=["kinds", "shapes", "groups of shapes"],
)
def test_steps_of_layer_kinds_in_host_memory_equal_device(model, num_at_once: int):
    """Two groups of layers in the loop, and a last layer."""
    (_, state, seen), (_, expected, expected_seen) = (
        _three_steps(model, **memory)
        for memory in (dict(**ON_HOST, layers_per_remat_group=num_at_once), {})
    )
    np.testing.assert_allclose(seen, expected_seen, rtol=FLOAT32_PARITY)
    _close(state.params, expected.params, FLOAT32_PARITY)
    _close(state.opt_state, expected.opt_state, FLOAT32_PARITY)


@pytest.mark.full
@needs_host_memory
def test_steps_of_muon_in_host_memory_equal_device():
    """The update is made layer by layer, each with its own matrices."""
    (_, state, seen), (_, expected, expected_seen) = (
        _three_steps(settings=dict(name="muon"), **memory) for memory in (ON_HOST, {})
    )
    np.testing.assert_allclose(seen, expected_seen, rtol=FLOAT32_PARITY)
    _close(state.opt_state, expected.opt_state, FLOAT32_PARITY)


@needs_host_memory
@pytest.mark.parametrize("tile_tokens", [0, pytest.param(24, marks=pytest.mark.full)])
def test_steps_of_lora_in_host_memory_equal_device(tile_tokens: int):
    """The frozen weights are fetched layer by layer, and have no gradients to copy back."""
    (_, state, seen), (_, expected, expected_seen) = (
        _three_steps(lora=dict(rank=4), tile_tokens=tile_tokens, **memory)
        for memory in (ON_HOST, {})
    )
    np.testing.assert_allclose(seen, expected_seen, rtol=FLOAT32_PARITY)
    # not the parameters: Adam divides the small first gradients of b, rounding errors included
    if not tile_tokens:
        _close(state.opt_state, expected.opt_state, FLOAT32_PARITY)
    assert {x.sharding.memory_kind for x in jax.tree.leaves(state.params)} == {PINNED_HOST}


@needs_host_memory
@pytest.mark.parametrize("to_host", [True, False])
def test_checkpoint_restores_to_other_memory_and_mesh(tmp_path, to_host: bool):
    there, here = (
        small_step(small_config(mesh=mesh, memory=ON_HOST if is_host else {}))
        for mesh, is_host in (
            (dict(context=2, tensor=2), not to_host),
            (dict(fsdp=4, context=2), to_host),
        )
    )
    state, model = there.init(), to_dict(there.config)["model"]
    checkpoints = Checkpoints(tmp_path, keep=1, warn=pytest.fail)
    checkpoints.save(1, state, dict(config=dict(model=model)))
    jax.tree.map(lambda x: x.delete(), state.params)  # as donation to a step does
    checkpoints.wait()
    restored, _ = checkpoints.restore_latest(lambda _: RestoreTarget(here.abstract_state, model))
    expected = there.init()
    for got, expected_leaf, like in zip(
        *map(jax.tree.leaves, (restored, expected, here.abstract_state))
    ):
        assert got.sharding == like.sharding
        expected_leaf = without_padding(expected_leaf, got)
        np.testing.assert_array_equal(without_padding(got, expected_leaf), expected_leaf)


@pytest.mark.skipif(REFUSAL is None, reason="this jax has host memory on CPU")
def test_state_without_host_memory_stays_on_device_and_says_so():
    step = small_step(small_config(memory=ON_HOST))
    assert {x.sharding.memory_kind for x in jax.tree.leaves(step.abstract_state)} == {
        x.sharding.memory_kind for x in jax.tree.leaves(small_step(small_config()).abstract_state)
    }
    (line,) = memory_lines(step.config.memory, step.mesh)
    assert "parameters and optimizer (config.memory) stored on the device: jax" in line


@pytest.mark.skipif(REFUSAL is None, reason="this jax has host memory on CPU")
def test_offload_without_host_memory_saves_on_device_and_says_so():
    """The step has out_shardings, with which the partitioner does not support offloading."""
    step = small_step(
        small_config(mesh=dict(context=2), memory=dict(remat="full", offload=("residual",)))
    )
    step.compile()
    (line,) = memory_lines(step.config.memory, step.mesh)
    assert "residual (config.memory) stored on the device: jax" in line


def test_host_parameters_with_remat_none_raises():
    with pytest.raises(
        UserError, match="memory.remat='none', which would keep the copied weights of all layers"
    ):
        small_config(memory=dict(parameters="host", remat="none"))


def _gpu_step(**memory) -> TrainStep:
    config = gpus.small_config()
    config.model.num_layers = 4
    config.memory.update(ON_HOST | memory)
    config = load(config)
    return build_step(config, make_mesh(topology("h100:1x4"), config.mesh))


def _compile(step: TrainStep) -> jax.stages.Compiled:
    lowered = step.lower()
    place_state(step, lowered)
    return step.compile(extra_options=dict(WITHOUT_GPU), lowered=lowered)


@pytest.fixture(scope="module")
def on_gpu():
    """A step with state and saved activations in host memory, compiled for H100s: (step,
    executable, its thunks).
    """
    step = _gpu_step(offload=("residual",))
    program = compile_step(step)
    return step, program.compiled, program.dump.thunks


@pytest.mark.gpu_compiler
def test_gpu_step_moves_host_arrays_by_copy_engines(on_gpu):
    """Weights, gradients, moments and saved activations, in the loops over layers; not the fetches
    before them.
    """
    _, compiled, thunks = on_gpu
    program = analyze(compiled.as_text(), thunks)
    verify_compiled.check_host_copies(program)
    in_loops = [
        copy
        for name, copies in program.host_copies.items()
        if name != program.entry.name
        for copy in copies
    ]
    moved = Counter(copy.is_to_host for copy in in_loops if copy.start.name in thunks)
    # Weights: forward, backward, norm, and four arrays in the update. Gradients, and the three
    # arrays of the update.
    assert moved == {False: 7 * WEIGHTS_OF_A_LAYER + 1, True: 4 * WEIGHTS_OF_A_LAYER + 1}


@pytest.mark.gpu_compiler
def test_gpu_program_has_state_in_host_memory_and_aliases_it(on_gpu):
    step, compiled, _ = on_gpu
    verify_compiled.check_memory(step, parse(compiled.as_text()))
    stats, spaces = compiled.memory_analysis(), step.memory_spaces
    on_host, params = (
        bytes_per_device(tree, its_spaces, HOST)
        for tree, its_spaces in (
            (step.abstract_state, spaces),
            (step.abstract_state.params, spaces.params),
        )
    )
    assert (
        stats.host_argument_size_in_bytes
        == stats.host_alias_size_in_bytes
        == on_host
        > 0.99 * bytes_per_device(step.abstract_state)
    )
    residuals = (
        step.config.model.num_layers
        * step.config.data.seq_len
        * step.config.model.model_dim
        * 2
        // 4
    )
    assert residuals < stats.host_temp_size_in_bytes <= params + residuals  # and the gradients
    on_device = bytes_per_device(step.abstract_state, spaces, DEVICE) + bytes_per_device(
        step.abstract_batch
    )
    assert stats.argument_size_in_bytes <= on_device + 1024


@pytest.mark.gpu_compiler
def test_check_memory_with_state_on_gpu_raises(on_gpu):
    step, compiled, _ = on_gpu
    program = parse(compiled.as_text().replace(":S(5)", ""))  # all arrays are on the GPU
    with pytest.raises(
        UserError, match="arrays of the compiled step's state are not in host memory"
    ):
        verify_compiled.check_memory(step, program)


@pytest.mark.full
@pytest.mark.gpu_compiler
def test_check_memory_with_moments_on_gpu_raises_if_they_belong_in_host_memory():
    program = parse(_compile(_gpu_step(optimizer="device", layers_per_remat_group=2)).as_text())
    verify_compiled.check_memory(_gpu_step(optimizer="device"), program)
    with pytest.raises(
        UserError, match="arrays of the compiled step's state are not in host memory"
    ):
        verify_compiled.check_memory(_gpu_step(), program)


@pytest.mark.heavy
@pytest.mark.gpu_compiler
def test_check_memory_with_all_layers_copied_raises(monkeypatch: pytest.MonkeyPatch):
    run = Objective._hidden_and_head
    fetches_all = lambda objective, params, *rest: run(
        objective, jax.device_put(params, DEVICE), *rest
    )  # noqa: E731
    monkeypatch.setattr(Objective, "_hidden_and_head", fetches_all)
    step = _gpu_step()
    program = parse(_compile(step).as_text())
    with pytest.raises(UserError, match="copies all layers' .* to the GPU at once"):
        verify_compiled.check_memory(step, program)


def _fetches_of_layers(program: Program) -> list[list[set[str]]]:
    """For each loop over layers: the passes of attention that overlap each copy from the host."""
    loops = []
    for computation in program:
        from_host = {
            copy.done for copy in find_host_copies(program, computation) if not copy.is_to_host
        }
        fetches = [
            transfer for transfer in transfers(program, computation) if transfer.done in from_host
        ]
        if fetches and computation is not program.entry:
            calls = [
                [calls_within(program, computation, op) for op in fetch.overlapped_ops]
                for fetch in fetches
            ]
            loops.append(
                [
                    {call.pass_name for call in itertools.chain(*overlapping)}
                    for overlapping in calls
                ]
            )
    return loops


@pytest.mark.gpu_compiler
@pytest.mark.heavy
@pytest.mark.parametrize("memory", [
    pytest.param({}, marks=pytest.mark.full), pytest.param(dict(remat="attention"), marks=pytest.mark.full),
    dict(tile_tokens=512, layers_per_remat_group=2),
])  # fmt: skip
def test_weight_prefetch_overlaps_attention_of_previous_layer(memory):
    forward, backward, *update_fetches = _fetches_of_layers(
        parse(_compile(_gpu_step(**memory)).as_text())
    )
    assert len(forward) == len(backward) == WEIGHTS_OF_A_LAYER
    assert all(overlapping == {"forward"} for overlapping in forward)
    assert all("backward" in overlapping for overlapping in backward)
    assert not any(overlapping for loop in update_fetches for overlapping in loop)


@pytest.mark.full
@pytest.mark.gpu_compiler
def test_copy_engines_move_offloaded_activations_of_quantized_layers_in_groups():
    """Groups of two kinds of layers; each matrix in NF4 has a number for each layer."""
    config = gpus.small_config()
    config.model.update(num_layers=4, **HYBRID)
    config.mesh.update(context=1, tensor=1)
    config.lora.rank = 4
    config.precision.frozen = "nf4"
    config.memory.update(remat="full", offload=("residual",), tile_tokens=512)
    config = load(config)
    step = build_step(config, make_mesh(topology("h100:1x1"), config.mesh))
    verify_compiled.check_host_copies(compile_step(step).program)
