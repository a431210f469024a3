"""The attention benchmark: its flags, rows and plot on small shapes, and its FLOP count."""

import json
import sys

import jax
import pytest
from absl import flags

from benchmarks import attention_speed
from benchmarks.attention_speed import AttentionCase
from jaxlc.attention import zigzag_order
from jaxlc.config import MeshConfig
from jaxlc.core.errors import UserError
from jaxlc.sharding.mesh import make_mesh
from tests.helpers import record_figures

SMALL = ["--num_heads=4", "--num_kv_heads=2", "--head_dim=8"]


def cases(*arguments: str) -> list[AttentionCase]:
    values = flags.FlagValues()
    attention_speed.define_flags(values)
    values(["attention_speed", *SMALL, *arguments])
    return attention_speed.cases_from_flags(values)


def test_measure_writes_rows_table_and_plot(tmp_path, capsys, monkeypatch):
    figures = record_figures(monkeypatch)
    strategies = ["ring", "all_gather", "hybrid"]
    flag_values = [
        f"--strategies={','.join(strategies)}",
        "--seq_len=64,128",
        "--ulysses_degree=2",
        "--window=20",
    ]
    rows = attention_speed.measure(cases(*flag_values), MeshConfig(context=2), 2, tmp_path)
    written = [json.loads(line) for line in (tmp_path / "attention.jsonl").read_text().splitlines()]
    assert written == rows and len(rows) == 6
    assert all(row["seconds"] >= row["seconds_min"] > 0 and row["temp_bytes"] > 0 for row in rows)
    assert (
        rows[0]["mesh"] == "context=2"
        and rows[0]["share_of_peak"] is None
        and rows[0]["commit"] is not None
    )
    assert {
        (row["strategy"], row["seq_len"], row["window"], row["num_kv_heads"]) for row in rows
    } == {(strategy, seq_len, 20, 2) for strategy in strategies for seq_len in (64, 128)}
    assert "all_gather" in capsys.readouterr().out
    [axes] = figures[0].axes
    assert [line.get_label() for line in axes.lines] == strategies
    for line in axes.lines:
        tflops = [row["tflops"] for row in rows if row["strategy"] == line.get_label()]
        assert (list(line.get_xdata()), list(line.get_ydata())) == ([64, 128], tflops)
    assert "TFLOP/s" in axes.get_ylabel() and (tmp_path / "attention.png").exists()


def test_causal_flops_counts_visible_pairs():
    """One head, one pair: 4 H FLOPs forward, 3.5 times that with the backward."""
    shape = dict(strategy="ring", num_heads=1, num_kv_heads=1, head_dim=16)
    assert AttentionCase(**shape, seq_len=1).causal_flops == 3.5 * 64
    assert AttentionCase(**shape, seq_len=3, backward=False).causal_flops == 6 * 64
    assert AttentionCase(**shape, seq_len=3, backward=False, window=2).causal_flops == 5 * 64
    assert (
        AttentionCase(**shape, seq_len=6, backward=False, num_documents=2).causal_flops == 12 * 64
    )


def test_compile_case_with_documents_masks_other_documents():
    mesh = make_mesh(MeshConfig(context=2), jax.devices()[:2])
    shape = dict(
        strategy="ring", seq_len=64, num_heads=2, num_kv_heads=2, head_dim=8, backward=False
    )
    plain, packed = (
        attention_speed.compile_case(AttentionCase(**shape, num_documents=n), mesh) for n in (1, 4)
    )
    # the last token attends to 64 keys, and to the 16 of its document
    last = int(zigzag_order(64, 2).argmax())
    q, k, v = plain.inputs
    first = int(zigzag_order(64, 2).argmin())
    other = v.at[:, first].add(1.0)  # the first token is in another document
    for compiled, is_masked in ((plain, False), (packed, True)):
        difference = compiled.compiled(q, k, other) - compiled.compiled(q, k, v)
        assert (float(abs(difference[:, last]).max()) == 0) == is_masked


def test_cases_from_flags_nobackward_times_forward_only():
    [case] = cases("--nobackward", "--seq_len=64", "--dtype=bfloat16", "--kernel=pallas")
    assert (case.backward, case.dtype, case.kernel) == (False, "bfloat16", "pallas")


def test_measure_unavailable_mesh_or_package_raises_user_error(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="the mesh needs 16 devices, but JAX has 8"):
        attention_speed.measure(cases("--seq_len=64"), MeshConfig(context=16), 1, tmp_path)
    monkeypatch.setitem(sys.modules, "ringattention", None)  # as if not installed
    monkeypatch.setitem(sys.modules, "ringattention.ringattention_jax", None)
    comparison = cases("--strategies=ringattention", "--seq_len=64")
    with pytest.raises(UserError, match="pip install ringattention"):
        attention_speed.measure(comparison, MeshConfig(context=2), 1, tmp_path)
