"""Estimates of a compiled step for packed sequences of a random mix, of a corpus and of given
lengths.
"""

import dataclasses
import json

import numpy as np
import pytest

from jaxlc import plan
from jaxlc.config import load
from jaxlc.config.flops import document_pairs
from jaxlc.core.errors import UserError
from jaxlc.data import data_sources
from jaxlc.plan import Plan
from jaxlc.plan.packing_estimates import mix_of_lengths, read_documents
from jaxlc.plan.report import page
from jaxlc.search.runner import row_of
from tests.plan.gpus import small_config


def packed_config(seq_len: int = 4096):
    config = small_config()
    config.attention.document_mask = True
    config.data.seq_len = seq_len
    return config


@pytest.fixture(scope="module")
def result():
    config = packed_config()
    config.mesh.update(fsdp=2, tensor=1)
    config.train.update(global_batch_size=4, gradient_accumulation_steps=2)
    return plan.plan(config, "h100:1x4", document_lengths="mix")


@pytest.mark.gpu_compiler
def test_plan_orders_sequences_by_work(result, tmp_path):
    best, typical, worst, mean = result.packing.estimates
    assert [row.name for row in (best, typical, worst, mean)] == [
        "best",
        "typical",
        "worst",
        "mean",
    ]
    assert best.attention_seconds < typical.attention_seconds < worst.attention_seconds
    assert best.attention_seconds < mean.attention_seconds < worst.attention_seconds
    assert best.replica_cost == worst.replica_cost == 1 < mean.replica_cost < 2  # two replicas
    assert all(
        0 < row.pairs_share < 1 <= row.ring_cost and row.padding_share == 0
        for row in (best, mean, worst)
    )
    predicted = result.predicted
    other_seconds = predicted.step_seconds - predicted.seconds_by_kind["attention"]
    for row in (best, typical, worst):  # further calls take more time
        assert row.step_seconds - row.attention_seconds > 0.8 * other_seconds

    path = tmp_path / "plan.json"
    path.write_text(json.dumps(result.to_json()))
    assert Plan.from_json(path) == result
    text = page(result, "")
    assert "document lengths: mix, 64 sequences" in text and max(map(len, text.splitlines())) <= 120
    assert "packed sequences" not in page(dataclasses.replace(result, packing=None), "")


@pytest.mark.gpu_compiler
def test_mfu_of_packed_sequences_counts_pairs_of_documents(result):
    config = load(packed_config())
    model, sequences, batch_size = (
        config.model,
        read_documents(config, "mix").sequences,
        config.train.global_batch_size,
    )
    mean_pairs = np.mean([document_pairs(model, lengths) for lengths in sequences])
    flops = 4 / batch_size * config.step_flops(batch_size * mean_pairs).total
    mean = result.packing.estimates[-1]
    assert mean.mfu_documents == pytest.approx(flops / (mean.step_seconds * 4 * 989.4e12))
    assert mean.pairs_share == pytest.approx(mean_pairs / document_pairs(model, [4096]))


@pytest.mark.gpu_compiler
def test_row_of_a_search_has_the_times_of_the_documents(result):
    row, mean = row_of(result, load(packed_config())), result.packing.estimates[-1]
    assert row["step_seconds"] == mean.step_seconds < result.predicted.step_seconds
    assert row["mfu_causal"] == mean.mfu_documents
    without = row_of(dataclasses.replace(result, packing=None), load(packed_config()))
    ratios = [
        row[name] / without[name]
        for name in ("step_seconds", "step_seconds_low", "step_seconds_high")
    ]
    np.testing.assert_allclose(ratios, ratios[0])


@pytest.mark.gpu_compiler
def test_ring_step_has_two_packed_calls_without_synchronization(result):
    calls = 2 * 2 * 2  # one per layer, microbatch and ring step
    passes = ("forward", "recomputation", "backward")
    assert all(result.kernels[f"cudnn_packed attention {name}"] == 2 * calls for name in passes)
    # their loop takes further documents: the host waits once if there are none
    own_blocks = len(passes) * calls // 2
    assert result.launches.host_synchronizations == own_blocks
    # 1,282; with tables of documents in each ring step instead of once per step, 1,719.
    assert result.launches.gpu_operations < 1500


def test_mix_has_60_percent_in_long_documents():
    rng = np.random.default_rng(0)
    for _ in range(10):
        lengths = mix_of_lengths(rng, 524_288)
        assert lengths.sum() == 524_288
        assert lengths[lengths >= 65_536].sum() <= 0.6 * 524_288 <= lengths[lengths >= 256].sum()
    assert mix_of_lengths(rng, 512).sum() == 512


@pytest.mark.parametrize("eval_sequences", [8, 0])
def test_read_documents_of_corpus_equals_segments(tmp_path, eval_sequences):
    """In a run without evaluation, no document is held out."""
    texts = tmp_path / "texts"
    texts.mkdir()
    for i in range(40):
        (texts / f"{i}.txt").write_text("word " * (10 + 17 * i))
    config = packed_config(seq_len=512)
    config.data.update(sources=(str(texts),), cache_dir=str(tmp_path / "cache"))
    config.train.eval_sequences = eval_sequences
    config = load(config)
    train = data_sources.open(config, is_trained=False).train
    documents = read_documents(config, "corpus")
    assert len(documents.sequences) == min(64, train.num_sequences)
    for i, lengths in enumerate(documents.sequences):
        segment_ids = train[i]["segment_ids"]
        np.testing.assert_array_equal(lengths, np.bincount(segment_ids)[1:])


@pytest.mark.parametrize("source, words", [
    ("4096,1", "4,097 tokens in total: expected at most config.data.seq_len=4096"),
    ("longest", "invalid document lengths 'longest': expected corpus, mix, or lengths in tokens such as 65536,1024x64"),
    ("12,,3", "invalid document lengths"),
    ("0", "invalid document lengths"),
    ("1024x99999999999", "invalid document lengths"),
    ("tree:100+2x(30+4x)", "invalid document lengths"),
])  # fmt: skip
def test_read_documents_with_invalid_lengths_raises(source, words):
    with pytest.raises(UserError, match=words):
        read_documents(load(packed_config()), source)
    assert [x.tolist() for x in read_documents(load(packed_config()), "2048, 16x3").sequences] == [
        [2048, 16, 16, 16]
    ]


def test_tree_is_a_prefix_and_its_branches():
    config = packed_config()
    config.attention.shared_prefixes = True
    documents = read_documents(load(config), "100,tree:1024+2x512,tree:64+1x8")
    assert documents.sequences[0].tolist() == [100, 1024, 512, 512, 64, 8]
    assert documents.prefixes == (0, 0, 2, 2, 0, 5)


def test_tree_of_two_levels():
    config, source = packed_config(), "7,tree:1000+2x(300+3x20)"
    rows = read_documents(load(config), source)
    assert [x.tolist() for x in rows.sequences] == [[1320] * 3, [7, 1320, 1320, 1320]]
    config.attention.shared_prefixes = 1
    with pytest.raises(UserError, match="has 2 levels of prefixes; set --config.attention.shared"):
        read_documents(load(config), source)
    config.attention.shared_prefixes = 2
    documents = read_documents(load(config), source)
    assert documents.sequences[0].tolist() == [7, 1000, *[300, 20, 20, 20] * 2]
    assert documents.prefixes == (0, 0, 2, 3, 3, 3, 2, 7, 7, 7)
    assert documents.longest_trace == 1320


def test_tree_without_sharing_is_separate_rows():
    documents = read_documents(load(packed_config()), "100,tree:1500+3x500,tree:64+1x8")
    assert [x.tolist() for x in documents.sequences] == [[2000, 2000, 72], [100, 2000]]
    assert not any(documents.prefixes) and documents.longest_trace == 2000
    with pytest.raises(UserError, match="a document of 4,100 tokens, with its prefix"):
        read_documents(load(packed_config()), "tree:4000+2x100")


def test_read_documents_without_document_mask_raises():
    with pytest.raises(
        UserError, match="document lengths have no effect with config.attention.document_mask=False"
    ):
        read_documents(load(small_config()), "mix")
