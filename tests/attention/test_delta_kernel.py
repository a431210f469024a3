"""The Pallas kernels of the gated delta rule: in an interpreter beside the XLA form, and compiled for an
absent GPU.

Not tested: their results on a GPU. `sharded_rule.check_kernel` compares those before a run trains.
"""

import functools
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.row_plans import kernel_bytes
from jaxlc.attention import gated_delta_rule, natural_order, zigzag_order
from jaxlc.attention.recurrence import chunks, kernel, sharded_rule
from jaxlc.attention.recurrence.chunks import Rule, Tokens
from jaxlc.attention.recurrence.sharded_recurrence import Documents
from jaxlc.attention.recurrence.tiled_recurrence import TiledRecurrence
from jaxlc.core import CONTEXT, UserError
from jaxlc.hlo import analyze
from jaxlc.sharding.mesh import Ranks
from jaxlc.simulate.topology import WITHOUT_GPU, topology
from jaxlc.step import step as train_step
from tests.attention.test_delta_rule import (
    NAMES,
    SEGMENTS,
    mesh_of,
    mixed_in_tiles,
    operands,
    operands_of,
    oracle,
    values_and_gradients,
)
from tests.step.synthetic import HYBRID, KIMI_DELTA, small_config
from tests.tolerances import FLOAT32_PARITY, max_relative_error


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK_TOKENS", 16)
    monkeypatch.setattr(kernel, "KERNEL_TOKENS", 16)
    monkeypatch.setattr(kernel, "_COLUMNS", 16)
    monkeypatch.setattr(kernel, "_SCAN_COLUMNS", 16)
    jax.clear_caches()
    yield
    jax.clear_caches()


@functools.cache
def _expected():
    """Of the loop over tokens, in float64."""
    with jax.enable_x64(True):
        arrays = [x.astype(jnp.float64) for x in _operands()]
        results = values_and_gradients(
            functools.partial(oracle, segments=jnp.asarray(SEGMENTS)), arrays
        )
        return [np.asarray(x) for x in results]


def _operands():
    return operands("float32", key_dim=16, value_dim=32)


# The other tests have one rank.
@pytest.mark.parametrize("context", [pytest.param(1, marks=pytest.mark.full), 4])
def test_kernels_equal_a_loop_over_tokens(monkeypatch, context):
    """Documents cross chunks and ranks; there are padding, and gates of 0 and of -1000."""
    monkeypatch.setattr(sharded_rule, "GROUP_TOKENS", 128)
    monkeypatch.setattr(sharded_rule, "Rule", functools.partial(Rule, uses_kernel=True))
    order = zigzag_order(512, context)

    def ours(*arrays):
        out = gated_delta_rule(
            *(x[:, order] for x in arrays),
            mesh=mesh_of(context=context),
            segment_ids=jnp.asarray(SEGMENTS[:, order]),
            token_order="zigzag",
        )
        return out[:, natural_order(order)]

    for name, a, b in zip(NAMES, values_and_gradients(ours, _operands()), _expected(), strict=True):
        assert max_relative_error(a, b) < FLOAT32_PARITY, name


def test_kernels_equal_xla_form_in_tiles():
    keys = jax.random.split(jax.random.key(1), 3)
    arrays = _short()
    filters = [
        jax.random.normal(key, (4, *x.shape[2:]), x.dtype) for key, x in zip(keys, arrays[:3])
    ]
    mesh = mesh_of(context=1)
    documents = Documents(jnp.asarray(SEGMENTS[:, :128]), None)

    def results(uses_kernel):
        net = TiledRecurrence(mesh, Rule(0.25, uses_kernel=uses_kernel), 2, num_taps=4)
        return mixed_in_tiles(net, operands_of(*arrays, *filters), documents)

    assert max_relative_error(*(jax.jit(results, static_argnums=0)(x) for x in (True, False))) < (
        FLOAT32_PARITY
    )


@pytest.mark.parametrize("uses_kernel", [False, True])
def test_loop_over_groups_is_that_of_xla_form(monkeypatch, uses_kernel):
    """It would copy the operands of kernels, and their results."""
    monkeypatch.setattr(sharded_rule, "GROUP_TOKENS", 32)
    rule = Rule(1.0, uses_kernel=uses_kernel)
    tokens = Tokens(*_operands(), None, None, None)
    run = functools.partial(
        sharded_rule.recurrence, rule=rule, ranks=Ranks(CONTEXT, 1), num_fragments=1
    )
    rounds = re.findall(r"length=(\d+)", str(jax.make_jaxpr(run)(tokens)))
    assert ("4" in rounds) is not uses_kernel  # of 4 of the 16 groups


def _weighted(results, weights):
    return sum((x * w).sum() for x, w in zip(results, weights))


def test_kernels_equal_xla_form_with_an_entering_state():
    """Two sequences, one of which continues a segment; all gradients."""
    q, k, v, g, beta = (x.reshape(2, 64, *x.shape[2:]) for x in _short())
    S = jax.random.normal(jax.random.key(5), (2, 4, 16, 32))
    segments = jnp.asarray(np.repeat([[2, 3, 3, 4], [1, 1, 2, 0]], 16, axis=1).astype(np.int32))
    arrays = q, k, v, g, beta, S

    def run(arrays, uses_kernel):
        *tokens, S = arrays
        tokens = Tokens(*tokens, None, segments, jnp.array([2, 0]))
        return chunks.outputs(tokens, S, Rule(0.25, uses_kernel=uses_kernel))

    def results(uses_kernel):
        def loss(arrays):
            out, last = run(arrays, uses_kernel)
            weights = (jnp.sin(jnp.arange(x.size)).reshape(x.shape) for x in (out, last))
            return _weighted((out, last), weights), (out, last)

        return jax.tree.leaves(jax.jit(jax.value_and_grad(loss, has_aux=True))(arrays))

    for a, b in zip(results(True), results(False), strict=True):
        assert max_relative_error(a, b) < FLOAT32_PARITY


def _short():
    return operands("float32", num_tokens=128, key_dim=16, value_dim=32)


def test_inverse_of_equal_keys_is_accurate():
    """The product of (I + A^2), (I + A^4), ... has an error of 2e9 here."""
    A = np.tril(np.ones((64, 64), np.float32), -1)
    inverse = kernel._inverse(jnp.asarray(A))
    exact = np.linalg.inv(np.eye(64) + A.astype(np.float64))
    assert max_relative_error(inverse, exact) < FLOAT32_PARITY


def test_kernels_lower_for_gpus_with_values_wider_than_keys(monkeypatch):
    """Maps of states have 16 + 32 columns, and Triton only has arrays whose sizes are powers of 2."""
    monkeypatch.undo()
    tokens = Tokens(*_short(), None, jnp.ones((1, 128), jnp.int32), jnp.zeros(1, jnp.int32))

    def loss(arrays):
        own, reads = chunks.map_and_reads(
            Tokens(*arrays, *tokens[len(arrays) :]), Rule(0.25, uses_kernel=True)
        )
        return own.U.sum() + reads.sum()

    lowered = jax.jit(jax.grad(loss)).trace(tokens[:5]).lower(lowering_platforms=("cuda",))
    assert "delta_factors_gradient" in lowered.as_text()


def test_start_check_reports_a_wrong_kernel(monkeypatch):
    sizes = dict(key_dim=16, value_dim=16, dtype=jnp.float32)
    device = jax.devices()[0]
    assert "pallas for the delta rule: relative error" in sharded_rule.check_kernel(device, **sizes)
    run = kernel.outputs
    monkeypatch.setattr(kernel, "outputs", lambda first, *others: run(0 * first, *others))
    with pytest.raises(UserError, match=r"are wrong on .* set --config.runtime.delta_kernel=xla"):
        sharded_rule.check_kernel(device, **sizes)


def test_run_compares_the_kernels_with_the_sizes_of_its_layers(monkeypatch):
    monkeypatch.setattr(jax, "local_devices", lambda: [SimpleNamespace(platform="gpu")])
    monkeypatch.setattr(train_step, "check_kernel", lambda device, **sizes: sizes)
    model = HYBRID | dict(delta_key_dim=16, delta_value_dim=32)
    config = small_config(model=model, runtime=dict(delta_kernel="pallas"))
    step = SimpleNamespace(config=config, model=None, kernels={})
    assert train_step.check_kernels(step) == [dict(key_dim=16, value_dim=32)]


@pytest.mark.parametrize(
    ("model", "num_levels", "problem"),
    [
        (
            HYBRID | dict(delta_value_dim=24),
            0,
            "value_dim=24 .supported: powers of 2 from 16.; use",
        ),
        (
            HYBRID | dict(delta_key_dim=256, delta_value_dim=256),
            0,
            "key_dim=256 and value_dim=256 .supported: one of them above 128.; use",
        ),
        (HYBRID, 1, "with config.attention.shared_prefixes=1; use"),
        (KIMI_DELTA, 0, "delta_kernel='pallas' has no effect"),
    ],
    ids=["size", "sizes", "prefixes", "kimi_delta"],
)
def test_unsupported_layers_are_refused(model, num_levels, problem):
    sections = dict(runtime=dict(delta_kernel="pallas"), attention=dict(shared_prefixes=num_levels))
    with pytest.raises(UserError, match=problem):
        small_config(model=model, **sections)


def _figures(uses_kernel: bool, num_tokens: int) -> tuple[int, int, int]:
    """Launches, bytes of operands and results, and bytes of temporaries of one layer with
    recomputation, in a program for an H100."""
    rule = Rule(128**-0.5, uses_kernel=uses_kernel)
    mesh = jax.sharding.Mesh(topology("h100:1x1").devices, ("x",))
    replicated = jax.sharding.PartitionSpec()

    def layer(q, k, v, g, beta, S, segments):
        def run(q, k, v, g, beta, S):
            tokens = Tokens(q, k, v, g, beta, None, segments, jnp.zeros(1, jnp.int32))
            return chunks.outputs(tokens, S, rule)

        out, vjp = jax.vjp(jax.checkpoint(run), q, k, v, g, beta, S)
        return out, vjp(out)

    def array(dtype, *shape):
        sharding = jax.sharding.NamedSharding(mesh, replicated)
        return jax.ShapeDtypeStruct((1, *shape), dtype, sharding=sharding)

    keys, number = array("bfloat16", num_tokens, 16, 128), array("float32", num_tokens, 32)
    arrays = keys, keys, array("bfloat16", num_tokens, 32, 128), number, number
    arrays += array("float32", 32, 128, 128), array("int32", num_tokens)
    run = jax.shard_map(
        layer, mesh=mesh, in_specs=replicated, out_specs=replicated, check_vma=False
    )
    compiled = jax.jit(run).lower(*arrays).compile(compiler_options=dict(WITHOUT_GPU))
    num_bytes = list(kernel_bytes(analyze(compiled.as_text())))
    return len(num_bytes), sum(num_bytes), compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.full
@pytest.mark.gpu_compiler
@pytest.mark.usefixtures("ptxas")
def test_kernels_need_a_fifth_of_the_launches_and_bytes(monkeypatch):
    monkeypatch.undo()
    launches, num_bytes, _ = zip(*(_figures(x, 4096) for x in (True, False)))
    assert 5 * launches[0] < launches[1]
    assert 5 * num_bytes[0] < num_bytes[1]


@pytest.mark.full
@pytest.mark.gpu_compiler
@pytest.mark.usefixtures("ptxas")
@pytest.mark.parametrize(
    ("heads", "key_heads", "key_dim", "value_dim", "corrects", "most_gigabytes"),
    [
        pytest.param(64, 8, 128, 64, False, 6.5, id="mamba2"),
        pytest.param(32, 32, 128, 128, True, 32, id="kimi_delta"),
    ],
)
def test_bytes_of_forms_without_kernel(
    monkeypatch, heads, key_heads, key_dim, value_dim, corrects, most_gigabytes
):
    """Of 4,096 tokens with recomputation: arrays of groups are not transposed, no array of decays of pairs
    of tokens and channels is stored, and decays of heads do not multiply the keys that they share."""
    monkeypatch.undo()
    sharding = jax.sharding.SingleDeviceSharding(topology("h100:1x1").devices[0])

    def array(dtype, *shape):
        return jax.ShapeDtypeStruct((1, 4096, *shape), dtype, sharding=sharding)

    keys, number = array("bfloat16", key_heads, key_dim), array("float32", heads)
    gates = array("float32", heads, key_dim) if corrects else number
    arrays = keys, keys, array("bfloat16", heads, value_dim), gates, number

    def layer(*arrays):
        def run(*arrays):
            tokens = Tokens(*arrays, None, None, None)
            how = dict(ranks=Ranks(CONTEXT, 1), num_fragments=1)
            return sharded_rule.recurrence(tokens, Rule(1.0, corrects), **how)

        out, vjp = jax.vjp(jax.checkpoint(run), *arrays)
        return out, vjp(out)

    compiled = jax.jit(layer).lower(*arrays).compile(compiler_options=dict(WITHOUT_GPU))
    assert sum(kernel_bytes(analyze(compiled.as_text()))) < 1e9 * most_gigabytes


if __name__ == "__main__":  # benchmarks/2026-11-29-delta-kernel.md
    for form, x in (("xla", False), ("pallas", True)):
        launches, num_bytes, temp_bytes = _figures(x, 32_768)
        print(
            f"{form}: {launches:,} launches, {num_bytes / 1e9:.2f} GB, {temp_bytes / 2**30:.1f} GiB"
        )
