"""Loss and embedding compiled for H100s: what they gather, and that all temporaries are smaller
than x, so that there is no other array of full sequence length."""

from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxlc.config import MeshConfig
from jaxlc.core.axes import CONTEXT, TENSOR
from jaxlc.hlo import analyze
from jaxlc.models.decoder import lookup
from jaxlc.sharding.rules import Sharder, storage_spec
from jaxlc.simulate.topology import WITHOUT_GPU, make_mesh, topology
from jaxlc.step.loss import LossSpec, loss_sums

pytestmark = [pytest.mark.gpu_compiler, pytest.mark.jax_version]
TILES, TOKENS, D, V, CHUNK = 4, 65_536, 256, 4096, 256  # tokens of one GPU, over all tiles
X_BYTES = TOKENS * D * 2


def _arguments(mesh: Mesh):
    """x in bfloat16, ids, weights, and two float32 matrices with storage shardings: head_DV,
    embedding_VD.
    """
    shape, tokens = (TILES, 1, mesh.size * TOKENS // TILES), (None, None, (CONTEXT, TENSOR))

    def put(shape, dtype, spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    def stored(dims, shape):
        return put(shape, jnp.float32, storage_spec(dims, shape, mesh))

    x = put((*shape, D), jnp.bfloat16, PartitionSpec(*tokens))
    ids, weights = (put(shape, dtype, PartitionSpec(*tokens)) for dtype in (jnp.int32, jnp.float32))
    return x, ids, weights, stored(("model", "vocab"), (D, V)), stored(("vocab", "model"), (V, D))


def _compile(function, *arguments, out_shardings, donate=()):
    lowered = jax.jit(function, out_shardings=out_shardings, donate_argnums=donate).lower(
        *arguments
    )
    return lowered.compile(compiler_options=dict(WITHOUT_GPU))


@pytest.mark.parametrize("axes", [dict(context=2), dict(tensor=2)], ids=str)
def test_loss_for_h100_has_small_temporaries(axes):
    mesh = make_mesh(topology("h100:1x2"), MeshConfig(**axes))
    shard = Sharder(mesh)
    spec = LossSpec(mesh=mesh, vocab_size=V, chunk_tokens=CHUNK, z_loss=0.0, norm_epsilon=1e-5)
    x, ids, weights, head, _ = _arguments(mesh)

    def objective(x, head, scale, ids, weights):
        return loss_sums(
            x, scale, shard.head(head, ("model", "vocab"), x.dtype), ids, weights, spec
        ).objective

    compiled = _compile(
        jax.grad(objective, (0, 1)), x, head, jnp.ones(D), ids, weights,
        out_shardings=(x.sharding, head.sharding), donate=0,
    )  # fmt: skip
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= X_BYTES  # dx overwrites x
    # logits, their gradient, rounded and transposed copies for the matmul
    in_chunks = 4 * CHUNK * V * 4
    # head, and its float32 gradient
    assert memory.temp_size_in_bytes <= D * V * (2 + 4) + in_chunks < X_BYTES
    collectives = analyze(compiled.as_text()).collectives
    sums = Counter(collective.kind for collective in collectives if collective.sent_bytes > D * V)
    # the head's gradient
    assert sums == (Counter({"reduce-scatter": 1}) if CONTEXT in axes else Counter())
    gathers = Counter(
        collective.times for collective in collectives if collective.kind == "all-gather"
    )
    # of the head; of the chunks
    assert gathers == ({1: 1} if CONTEXT in axes else {TOKENS // (CHUNK // 2): 1})


@pytest.mark.parametrize("axes", [dict(context=2), dict(tensor=2)], ids=str)
def test_embedding_for_h100_has_small_temporaries(axes, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("jaxlc.models.decoder._LOOKUP_CHUNK_TOKENS", CHUNK)
    mesh = make_mesh(topology("h100:1x2"), MeshConfig(**axes))
    x, ids, _, _, embedding = _arguments(mesh)

    def forward(embedding, ids):
        return lookup(embedding, ids, Sharder(mesh), jnp.bfloat16)

    def backward(embedding, ids, dx):
        return jax.vjp(lambda e: forward(e, ids), embedding)[1](dx)[0]

    table_bytes = D * V * 4
    for compiled in (
        _compile(forward, embedding, ids, out_shardings=x.sharding),
        _compile(backward, embedding, ids, x, out_shardings=embedding.sharding),
    ):
        assert compiled.memory_analysis().temp_size_in_bytes <= 2.25 * table_bytes < X_BYTES
