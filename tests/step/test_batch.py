import jax
import numpy as np

from jaxlc.config import PRESETS
from jaxlc.config.flops import document_pairs
from jaxlc.config.models.model_schema import model_from
from jaxlc.step.batch import Batch, attention_pairs
from tests.step.synthetic import TOKENS, make_batch, natural_rows, small_config, small_step


def test_attention_pairs_count_documents_and_windows():
    """Two sequences, one with padding; a third of the layers has a window."""
    model = model_from(
        PRESETS["tiny"].by_path
        | {"num_layers": 6, "layer_kinds": ("sliding", "full", "nope"), "attention.window": 3}
    )
    documents, num_tokens = ([5, 1, 4], [7]), 10
    positions = [
        np.pad(np.concatenate([np.arange(n) for n in x]), (0, num_tokens - sum(x)))
        for x in documents
    ]
    segment_ids = [
        np.pad(np.repeat(np.arange(len(x)) + 1, x), (0, num_tokens - sum(x))) for x in documents
    ]
    batch = Batch(None, None, None, np.array(positions)[:, None], np.array(segment_ids)[:, None])
    expected = sum(document_pairs(model, lengths) for lengths in documents)
    assert attention_pairs(batch, model) == expected
    by_layer = [4 * sum(n * (n + 1) // 2 for x in documents for n in x), 2 * (12 + 1 + 9 + 18)]
    assert expected == sum(by_layer)


def test_attention_pairs_of_a_long_sequence_are_accurate():
    model, num_tokens = PRESETS["tiny"], 2**20
    positions = np.arange(num_tokens, dtype=np.int32)[None, None]
    batch = Batch(None, None, None, positions, np.ones_like(positions))
    np.testing.assert_allclose(
        attention_pairs(batch, model), document_pairs(model, [num_tokens]), rtol=1e-5
    )


def test_step_with_an_index_out_of_range_has_no_loss_and_changes_nothing():
    """Batches of other loops are not checked on the host, and JAX clamps indices."""
    plain = dict(memory=dict(remat="none"), attention=dict(kernel="reference"))
    # a seed that no integer of JAX holds
    step = small_step(small_config(train=dict(seed=2**64), **plain))
    run_step, valid = step.jitted, make_batch(step, natural_rows())
    wrong = {
        "tokens": valid.tokens.at[0, 0, 3].set(61),
        "targets": valid.targets.at[0, 0, 3].set(-1),
        "positions": valid.positions.at[0, 0, 3].set(TOKENS),
    }
    for name, array in wrong.items():
        state, metrics = run_step(step.init(), valid._replace(**{name: array}))
        assert not metrics.is_finite and np.isnan(metrics.loss), name
        jax.tree.map(np.testing.assert_array_equal, state.params, step.init().params)
    no_target = valid.targets.at[0, 3].set(-100)  # padding has no weight
    assert np.isfinite(run_step(step.init(), valid._replace(targets=no_target))[1].loss)
