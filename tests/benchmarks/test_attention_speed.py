"""The benchmark's dry run: every contestant of ours on small shapes, and what is written."""

import json

import pytest

from benchmarks import attention_speed
from benchmarks.attention_contestants import Case
from jaxlc.config import MeshConfig
from jaxlc.core.errors import UserError

SHAPE = dict(num_heads=4, num_kv_heads=2, head_dim=8)


def test_rows_table_and_picture(tmp_path, capsys):
    cases = attention_speed.cases(["ring", "all_gather", "hybrid"], [64, 128], ulysses_degree=2, window=20, **SHAPE)
    rows = attention_speed.run(cases, MeshConfig(context=2), 2, tmp_path)
    written = [json.loads(line) for line in (tmp_path / "attention.jsonl").read_text().splitlines()]
    assert written == rows and len(rows) == 6
    assert all(row["seconds"] >= row["seconds_min"] > 0 and row["temp_bytes"] > 0 for row in rows)
    assert rows[0]["mesh"] == "context=2" and rows[0]["share_of_peak"] is None and rows[0]["commit"] is not None
    assert (tmp_path / "attention.png").stat().st_size > 5000
    assert "all_gather" in capsys.readouterr().out


def test_causal_flops():
    """One head of one pair: 4 H, and 3.5 times that with the backward."""
    case = Case(strategy="ring", seq_len=1, num_heads=1, num_kv_heads=1, head_dim=16)
    assert case.causal_flops == 3.5 * 64
    assert Case(**{**vars(case), "backward": False, "seq_len": 3}).causal_flops == 6 * 64
    assert Case(**{**vars(case), "backward": False, "seq_len": 3, "window": 2}).causal_flops == 5 * 64


def test_too_few_devices_and_no_contestant_are_told(tmp_path):
    with pytest.raises(UserError, match="the mesh needs 16 devices and there are 8"):
        attention_speed.run(attention_speed.cases(["ring"], [64], **SHAPE), MeshConfig(context=16), 1, tmp_path)
    with pytest.raises(UserError, match="pip install ringattention"):
        attention_speed.run(attention_speed.cases(["ringattention"], [64], **SHAPE), MeshConfig(context=2), 1, tmp_path)
