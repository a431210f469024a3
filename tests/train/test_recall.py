"""A task that needs attention across ranks: learned on a ring of four, not learned when the ring
sends nothing.
"""

import jax
import numpy as np
import pytest

from jaxlc.attention.strategies import ring
from jaxlc.sharding.document_layout import zigzag_order
from jaxlc.step.batch import Batch
from tests.step.synthetic import small_config, small_step

ROWS, TOKENS, CONTEXT, STEPS = 16, 64, 4, 60
FACTS = 8  # tokens 0..7 are facts, 8 is the question, 9..15 are noise
ASK, CHANCE = 8, np.log(FACTS)
FACT_POSITION = 20  # chunk 2 of 8, on rank 2; the question is asked in chunk 7, on rank 0


def _rows(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """A fact among noise; the last token asks for it. Only the answer has a loss weight."""
    tokens = rng.integers(ASK + 1, 16, (1, ROWS, TOKENS), dtype=np.int32)
    facts = rng.integers(0, FACTS, (1, ROWS), dtype=np.int32)
    tokens[..., FACT_POSITION], tokens[..., -1] = facts, ASK
    targets, weights = np.zeros_like(tokens), np.zeros(tokens.shape, np.float32)
    targets[..., -1], weights[..., -1] = facts, 1.0
    positions = np.broadcast_to(np.arange(TOKENS, dtype=np.int32), tokens.shape)
    return dict(
        tokens=tokens,
        targets=targets,
        loss_weights=weights,
        positions=positions,
        segment_ids=np.ones_like(tokens),
    )


def _final_loss() -> float:
    config = small_config(
        model=dict(vocab_size=16, num_layers=1),
        mesh=dict(context=CONTEXT),
        data=dict(seq_len=TOKENS),
        optimizer=dict(learning_rate=1e-2, schedule="constant", warmup_steps=1, weight_decay=0.0),
        train=dict(global_batch_size=ROWS, steps=STEPS),
    )
    step = small_step(config)
    order, rng = zigzag_order(TOKENS, CONTEXT), np.random.default_rng(0)
    state, compiled = step.init(), step.compile()
    losses = []
    for _ in range(STEPS):
        arrays = {name: array[..., order] for name, array in _rows(rng).items()}
        shardings = {
            name: like.sharding
            for name, like in step.abstract_batch._asdict().items()
            if like is not None
        }
        batch = Batch(
            **{name: jax.device_put(arrays[name], sharding) for name, sharding in shardings.items()}
        )
        state, metrics = compiled(state, batch)
        losses.append(float(metrics.loss))
    return float(np.mean(losses[-10:]))


def test_fact_on_another_rank_is_learned():
    assert _final_loss() < 0.1 * CHANCE


@pytest.mark.heavy
def test_fact_on_another_rank_without_sends_is_not_learned(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ring.RingState, "send", lambda self, x, distance=1: x)
    assert _final_loss() > 0.9 * CHANCE
