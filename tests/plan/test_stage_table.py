"""The plan of a run with stages: totals, cost and verdicts in one table, from the command line."""

import json

import pytest

from jaxlc import plan
from jaxlc.cli import main_of, planning
from tests.plan.sample_plan import plan_of, with_temporaries

CONFIG = """
from tests.plan.gpus import small_config

def get_config(variant):
    config = small_config()
    config.stages = [dict(name="short", steps=1800), dict(name="long", steps=900, data=dict(seq_len=8192))]
    return config
"""


@pytest.fixture
def arguments(tmp_path, monkeypatch) -> list[str]:
    """A command line with two stages, of which only the first one fits; nothing is compiled."""

    def planned(config, topology, **options):
        return plan_of(with_temporaries(40 if config.data.seq_len < 8192 else 80))

    monkeypatch.setattr(planning, "start_on_cpu", lambda: None)  # JAX has started
    monkeypatch.setattr(plan, "plan", planned)
    path = tmp_path / "staged.py"
    path.write_text(CONFIG)
    return ["jaxlc.plan", f"--config={path}", "--topology=h100:1x4"]


def _run(arguments: list[str]) -> int:
    return main_of("plan")(arguments)


def test_plan_of_stages_prints_hours_and_cost_of_each_and_in_total(arguments, tmp_path, capsys):
    """Steps of 2 s, also in the median, on 4 GPUs: 1 h and 4 GPU-hours, 0.5 h and 2 GPU-hours."""
    path = tmp_path / "plan.json"
    assert _run([*arguments, "--price_per_gpu_hour=2.5", f"--json={path}"]) == 0
    output = capsys.readouterr().out
    rows = [line.split() for line in output.splitlines()]
    by_name = {row[0]: row[-3:] for row in rows if row and row[0] in ("short", "long", "total")}
    assert by_name == {
        "short": ["1.0", "4.0", "10"],
        "long": ["0.50", "2.0", "5.0"],
        "total": ["1.5", "6.0", "15"],
    }
    assert "short: VERDICT: fits" in output and "long: VERDICT: does not fit" in output
    assert "--stage=long --advise" in output
    values = json.loads(path.read_text())
    assert [(stage["name"], stage["gpu_hours"], stage["cost"]) for stage in values["stages"]] == [
        ("short", 4.0, 10.0), ("long", 2.0, 5.0)
    ]  # fmt: skip
    assert (
        values["stages"][0]["plan"]["memory"]["fits"]
        and not values["stages"][1]["plan"]["memory"]["fits"]
    )


def test_plan_of_one_stage_prints_its_page(arguments, capsys):
    assert _run([*arguments, "--stage=short"]) == 0
    output = capsys.readouterr().out
    assert "MEMORY per GPU" in output and "GPU-hours" not in output


def test_plan_of_one_stage_with_price_prints_its_verdict_once(arguments, capsys):
    assert _run([*arguments, "--stage=short", "--price_per_gpu_hour=0.01"]) == 0
    output = capsys.readouterr().out
    assert output.count("VERDICT") == 1
    (row,) = (line.split() for line in output.splitlines() if line.startswith("short "))
    assert row[-3:] == ["1.0", "4.0", "0.040"]


def test_plan_of_stages_with_invalid_flags_exits_with_status_2(arguments, capsys):
    for flags, words in [
        (["--price_per_gpu_hour=0"], "invalid --price_per_gpu_hour=0.0: expected greater than 0"),
        (["--html=plan.html"], "unsupported: --html for 2 stages; choose one with --stage=NAME"),
    ]:
        assert _run([*arguments, *flags]) == 2
        assert words in capsys.readouterr().err
