"""The comparison that shows that context is used: the ring that is broken on purpose, and the rows
and figure.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxlc
import jaxlc.train
from benchmarks import retrieval
from benchmarks.broken_ring import broken_ring
from jaxlc.config import load_stages, read_config
from jaxlc.sharding.document_layout import zigzag_order

CONTEXT, TOKENS = 4, 64


def _attention_and_gradients():
    """(output, gradients) of ring attention, and of attention to the keys of the own rank."""
    q, k, v, weights = jax.random.normal(jax.random.key(0), (4, 1, TOKENS, 2, 8))
    rank_of = np.empty(TOKENS, int)
    rank_of[zigzag_order(TOKENS, CONTEXT)] = np.repeat(np.arange(CONTEXT), TOKENS // CONTEXT)
    is_visible = (rank_of[:, None] == rank_of) & np.tri(TOKENS, dtype=bool)

    def own_rank(q, k, v):
        scores = jnp.where(is_visible, jnp.einsum("bqnh,bknh->bnqk", q, k) / np.sqrt(8), -jnp.inf)
        return jnp.einsum("bnqk,bknh->bqnh", jax.nn.softmax(scores), v)

    mesh = jaxlc.make_mesh(context=CONTEXT, devices=jax.devices()[:CONTEXT])

    def ring(q, k, v):
        return jaxlc.attend(q, k, v, mesh=mesh, causal=True)

    def results(attend):
        return jax.jit(
            jax.value_and_grad(lambda q, k, v: (weights * attend(q, k, v)).sum(), argnums=(0, 1, 2))
        )(q, k, v)

    return results(ring), results(own_rank)


def test_broken_ring_attends_to_keys_of_the_own_rank_only():
    with broken_ring():
        (loss, gradients), (own_loss, own_gradients) = _attention_and_gradients()
    np.testing.assert_allclose(loss, own_loss, rtol=1e-5)
    for gradient, own_gradient in zip(gradients, own_gradients):
        np.testing.assert_allclose(gradient, own_gradient, atol=1e-5)
    (loss, _), (own_loss, _) = _attention_and_gradients()  # the ring is whole again
    assert abs(loss - own_loss) > 0.1


def test_windowed_layers_attend_to_the_window_only():
    config = load_stages(read_config("retrieval"))[-1].config
    assert [config.model.window_of(kind) for kind in config.model.layer_kinds] == [3, None]
    with retrieval.windowed():
        assert [config.model.window_of(kind) for kind in config.model.layer_kinds] == [
            3,
            retrieval.WINDOW,
        ]
    assert config.model.window_of("nope") is None


def _row(variant: str, loss: float, score: float) -> dict:
    by_position = dict(first_position=[0, 1, 16], last_position=[0, 15, 255], loss=[5.0, 4.0, loss])
    by_position |= dict(low=[4.9, 3.9, loss - 0.1], high=[5.1, 4.1, loss + 0.1])
    return dict(variant=variant, by_position=by_position, scores={"100": score, "1500": score})


def test_figure_has_one_line_per_variant():
    losses, scores = retrieval.figure([_row("full", 1.0, 90.0), _row("broken", 3.0, 0.0)]).axes
    assert [line.get_label() for line in losses.lines] == ["full context", "broken ring"]
    assert [list(line.get_ydata()) for line in scores.lines] == [[90.0, 90.0], [0.0, 0.0]]
    assert "16 to    255  loss 1.000" in retrieval.summary(_row("full", 1.0, 90.0))


@pytest.mark.full
def test_first_stage_of_retrieval_learns_to_retrieve(tmp_path):
    """About a minute of training on sequences of 128 tokens."""
    config = read_config("retrieval")
    config.stages = [config.stages[0].changed(mesh=dict(data=8))]
    config.runtime.simulated_devices = 8  # those of the tests
    config.data.cache_dir = str(tmp_path / "cache")
    result = jaxlc.train.run(config, workdir=tmp_path / "run")
    assert retrieval.score(result, 100, 40) > 50
