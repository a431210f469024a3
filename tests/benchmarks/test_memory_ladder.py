"""The memory tables: the search for the maximum sequence length, the cases, and the plot.
Compilation is faked.
"""

import inspect
from collections.abc import Callable

import pytest

from benchmarks import memory_cases, memory_ladder
from benchmarks.memory_cases import Case, MaxSeqLen
from jaxlc.core.errors import UserError
from jaxlc.search import ranking, runner
from tests.benchmarks import ladder_fakes
from tests.helpers import record_figures


def row(case: Case) -> dict:
    """The row of `compile_cases`, without its processes."""
    point = memory_cases.point(case)
    return dict(layers_per_remat_group=1) | point.columns() | ladder_fakes.planned(point.config)


def all_cases() -> list[Case]:
    baselines = memory_cases.baselines()
    return [*memory_cases.ablation(), *(case for baseline in baselines for case in baseline.ours)]


def piecewise_linear(n: int) -> dict:
    """Fits up to 41: linear with an offset, and steeper from 50 on."""
    load = max(0.1 + 0.0218 * n, 0.1 * n - 3.81)
    host = dict(host_bytes_per_node=0, staging_bytes_per_node=0, host_usable_bytes_per_node=1)
    return dict(fits=load <= 1, device_peak_bytes=load, device_usable_bytes=1) | host


def counting(row_of: Callable[[int], dict], calls: list[int]) -> Callable[[int], dict]:
    def counted(n: int) -> dict:
        calls.append(n)
        return row_of(n)

    return counted


@pytest.mark.parametrize("first", [1, 7, 41, 60])
def test_largest_that_fits_needs_few_rows(first):
    calls = []
    largest = memory_cases.largest_that_fits(
        counting(piecewise_linear, calls), least=0, first=first
    )
    assert largest == (41, piecewise_linear(41), piecewise_linear(42))
    assert len(calls) == len(set(calls)) <= 6
    assert memory_cases.largest_that_fits(piecewise_linear, least=41, first=42) is None


@pytest.mark.parametrize("num_gpus, tokens, layers_per_remat_group, exceeds_host", [
    (1, 13 * 2**17, 1, False),
    (4, 4 * 6 * 2**18, 1, True),
    (8, 8 * 6 * 2**18, 2, True),  # groups of 1 reach 3 x 2^18 per GPU
    (32, 32 * 6 * 2**18, 2, True),
])  # fmt: skip
def test_max_seq_len_groups_layers_while_host_is_full(
    num_gpus, tokens, layers_per_remat_group, exceeds_host
):
    group_sizes = []

    def plan(case: Case) -> dict:
        group_sizes.append(case.settings["memory.layers_per_remat_group"])
        return row(case)

    result = memory_cases.max_seq_len(num_gpus, plan)
    assert set(group_sizes) == set(range(1, layers_per_remat_group + 1))
    assert len(group_sizes) <= 4 * layers_per_remat_group
    assert (result.fits["seq_len"], result.fits["layers_per_remat_group"]) == (
        tokens,
        layers_per_remat_group,
    )
    assert result.fits["fits"] and not result.too_long["fits"]
    host = " and host memory" if exceeds_host else ""
    assert result.bottleneck == f"GPU memory (bf16[1,2] 8.00 GiB){host}"


def test_max_seq_len_without_groups_host_is_bottleneck(monkeypatch):
    monkeypatch.setattr(memory_cases, "_GROUP_SIZES", (1,))
    result = memory_cases.max_seq_len(8, row)
    assert result.fits["seq_len"] == 8 * 3 * 2**18 and result.bottleneck == "host memory"


def test_max_seq_len_nothing_fits_raises_user_error():
    with pytest.raises(
        UserError, match="no sequence fits: even 131072 tokens exceed the memory of 1 GPUs"
    ):
        memory_cases.max_seq_len(1, lambda case: row(case) | dict(fits=False))


def test_cases_are_distinct_configs_that_use_all_gpus():
    cases = all_cases()
    for case in cases:
        domains, _, gpus = case.topology.partition(":")[2].partition("x")
        assert memory_cases.point(case).config.mesh.num_devices == int(domains) * int(gpus)
    assert len({str(memory_cases.point(case).config) for case in cases}) == len(cases)


def test_write_prints_a_line_per_case(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        memory_cases, "compile_cases", lambda cases, out: [row(case) for case in cases]
    )
    memory_ladder.write(memory_ladder.TABLES, [8], tmp_path)
    *tables, lengths = capsys.readouterr().out.strip().split("\n\n")
    assert sum(len(table.splitlines()) - 2 for table in tables) == len(all_cases())
    assert "| 8 | 12,582,912 | 2 | ulysses | 73.0 | 70.0 | 1,626.0 | 90.0 |" in lengths


def test_plot_shows_own_and_reported_lengths(tmp_path, monkeypatch):
    figures = record_figures(monkeypatch)
    results = {gpus: MaxSeqLen(dict(seq_len=gpus * 2**21), {}) for gpus in (1, 8)}
    memory_ladder.plot_max_seq_len(results, tmp_path / memory_ladder.PLOT)
    [axes] = figures[0].axes
    ours, *reported = axes.lines
    assert (list(ours.get_xdata()), list(ours.get_ydata())) == ([1, 8], [2**21, 2**24])
    assert [line.get_label() for line in reported] == [
        f"{name}, reported" for name in memory_ladder.REPORTED
    ]
    assert (
        axes.get_ylabel() == "sequence length, tokens" and (tmp_path / memory_ladder.PLOT).exists()
    )


def test_compile_cases_keeps_order_and_reuses_rows(tmp_path):
    cases = [*memory_cases.ablation()[1:3], memory_cases.baselines()[2].ours[0]]
    rows = memory_cases.compile_cases(cases, tmp_path, work=ladder_fakes.planned, num_workers=2)
    assert [(row["remat"], row["topology"]) for row in rows] == [
        ("attention", "h100:1x8"), ("full", "h100:1x8"), ("full", "h100:8x8")
    ]  # fmt: skip
    again = memory_cases.compile_cases(cases[::-1], tmp_path, work=ladder_fakes.refuses)
    assert [row["key"] for row in again] == [row["key"] for row in rows[::-1]]
    assert len((tmp_path / ranking.ROWS).read_text().splitlines()) == 3
    with pytest.raises(UserError, match="`remat=none` on h100:1x8: too large"):
        memory_cases.compile_cases(memory_cases.ablation()[:1], tmp_path, work=ladder_fakes.refuses)


def test_compile_cases_default_work_takes_config(monkeypatch, tmp_path):
    calls = []

    def run(points, work, **_):
        inspect.signature(work).bind(points[0].config)
        calls.append(work)
        return [{"overrides": point.overrides, "status": "done"} for point in points]

    monkeypatch.setattr(runner, "run", run)
    memory_cases.compile_cases(memory_cases.ablation()[:1], tmp_path)
    assert calls == [runner.estimate_point]


@pytest.mark.parametrize("gpus", [["eight"], ["0"], ["12"], ["8", "3"], ["-8"]])
def test_parse_num_gpus_invalid_raises_user_error(gpus):
    with pytest.raises(UserError, match="for --gpus: expected 1, 2, 4, or a multiple of 8"):
        memory_cases.parse_num_gpus(gpus)


def test_parse_num_gpus_valid():
    assert memory_cases.parse_num_gpus(["1", "4", "24"]) == [1, 4, 24]


def test_write_unknown_table_raises_user_error(tmp_path):
    with pytest.raises(
        UserError, match="invalid 'memory' for --tables: expected ablation, baselines, max_seq_len"
    ):
        memory_ladder.write(["memory"], [], tmp_path)
