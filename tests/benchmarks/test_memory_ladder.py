"""The search for the longest rows, the steps that are compared, and the tables; what they compile is faked."""

from collections.abc import Callable

import pytest

from benchmarks import memory_ladder, memory_ladder_page
from benchmarks.memory_ladder import Case
from jaxlc.core.errors import UserError
from jaxlc.sweep import runner
from tests.benchmarks import ladder_fakes


def row(case: Case) -> dict:
    """As `compile_cases` has it, without its processes."""
    point = memory_ladder.point(case)
    return dict(layers_per_remat_group=1) | point.columns() | ladder_fakes.planned(point.config)


def all_cases() -> list[Case]:
    return [*memory_ladder.rungs(), *(case for rival in memory_ladder.baselines() for case in rival.ours)]


def bent(n: int) -> dict:
    """Fits up to 41: a straight line with an offset, and from 50 on a steeper one."""
    load = max(0.1 + 0.0218 * n, 0.1 * n - 3.81)
    host = dict(host_bytes_per_node=0, staging_bytes_per_node=0, host_usable_bytes_per_node=1)
    return dict(fits=load <= 1, device_peak_bytes=load, device_usable_bytes=1) | host


def counting(row_of: Callable[[int], dict], calls: list[int]) -> Callable[[int], dict]:
    def counted(n: int) -> dict:
        calls.append(n)
        return row_of(n)

    return counted


@pytest.mark.parametrize("first", [1, 7, 41, 60])
def test_the_largest_that_fits_is_found_in_few_tries(first):
    calls = []
    most, fits, beyond = memory_ladder.most_that_fit(counting(bent, calls), least=0, first=first)
    assert most == 41 and fits == bent(41) and beyond == bent(42)
    assert len(calls) == len(set(calls)) <= 6
    assert memory_ladder.most_that_fit(bent, least=41, first=42) is None


@pytest.mark.parametrize("num_gpus, tokens, layers_per_remat_group, is_host_full_too", [
    (1, 13 * 2**17, 1, False),
    (4, 4 * 6 * 2**18, 1, True),
    (8, 8 * 6 * 2**18, 2, True),  # 3 x 2^18 with each layer's input on the host
    (32, 32 * 6 * 2**18, 2, True),
])  # fmt: skip
def test_layers_are_grouped_where_the_host_holds_back(num_gpus, tokens, layers_per_remat_group, is_host_full_too):
    planned = []

    def plan(case: Case) -> dict:
        planned.append(case.settings["memory.layers_per_remat_group"])
        return row(case)

    found = memory_ladder.longest(num_gpus, plan)
    assert set(planned) == set(range(1, layers_per_remat_group + 1)) and len(planned) <= 4 * layers_per_remat_group
    assert (found.fits["seq_len"], found.fits["layers_per_remat_group"]) == (tokens, layers_per_remat_group)
    assert found.fits["fits"] and not found.beyond["fits"]
    and_the_host = " and the host's memory" if is_host_full_too else ""
    assert found.obstacle == f"the GPU's memory (bf16[1,2] 8.00 GiB){and_the_host}"


def test_the_host_may_be_what_is_in_the_way(monkeypatch):
    monkeypatch.setattr(memory_ladder, "_GROUP_SIZES", (1,))
    found = memory_ladder.longest(8, row)
    assert found.fits["seq_len"] == 8 * 3 * 2**18 and found.obstacle == "the host's memory"


def test_gpus_that_hold_no_row_at_all_are_told():
    with pytest.raises(UserError, match="1 GPUs do not even hold rows of 131072 tokens"):
        memory_ladder.longest(1, lambda case: row(case) | dict(fits=False))


def test_every_step_is_another_config_for_its_gpus():
    cases = all_cases()
    for case in cases:
        domains, _, gpus = case.topology.partition(":")[2].partition("x")
        assert memory_ladder.point(case).config.mesh.num_devices == int(domains) * int(gpus)
    assert len({str(memory_ladder.point(case).config) for case in cases}) == len(cases)


def test_tables_and_picture(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(memory_ladder, "compile_cases", lambda cases, out: [row(case) for case in cases])
    memory_ladder_page.write(["rungs", "baselines", "longest"], [1, 8], tmp_path)
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    assert len(lines) == 3 * 2 + len(all_cases()) + 2
    assert all(line.startswith("| ") and line.endswith(" |") for line in lines)
    assert "| 8 | 12,582,912 | 2 | ulysses | 73.0 | 70.0 | 1,626.0 | 90.0 |" in lines[-1]
    assert (tmp_path / memory_ladder_page.PICTURE).stat().st_size > 10_000


def test_rows_come_in_the_order_of_their_steps_and_are_made_once(tmp_path):
    cases = [*memory_ladder.rungs()[1:3], memory_ladder.baselines()[2].ours[0]]
    found = memory_ladder.compile_cases(cases, tmp_path, work=ladder_fakes.planned, num_workers=2)
    assert [(each["remat"], each["topology"]) for each in found] == [
        ("attention", "h100:1x8"), ("full", "h100:1x8"), ("full", "h100:8x8")
    ]  # fmt: skip
    again = memory_ladder.compile_cases(cases[::-1], tmp_path, work=ladder_fakes.refuses)
    assert [each["key"] for each in again] == [each["key"] for each in found[::-1]]
    assert len(runner.read_rows(tmp_path / runner.ROWS)) == 3


def test_a_step_that_does_not_compile_is_an_error(tmp_path):
    with pytest.raises(UserError, match="`remat=none` on h100:1x8: too large"):
        memory_ladder.compile_cases(memory_ladder.rungs()[:1], tmp_path, work=ladder_fakes.refuses)


@pytest.mark.parametrize("gpus", [["eight"], ["0"], ["12"], ["8", "3"], ["-8"]])
def test_numbers_of_gpus_that_make_no_nodes(gpus):
    with pytest.raises(UserError, match="is no number of GPUs here; use 1, 2, 4, or a multiple of 8"):
        memory_ladder.numbers_of_gpus(gpus)


def test_numbers_of_gpus():
    assert memory_ladder.numbers_of_gpus(["1", "4", "24"]) == [1, 4, 24]


def test_a_table_that_there_is_not(tmp_path):
    with pytest.raises(UserError, match="no table 'rung'; there are rungs, baselines, longest"):
        memory_ladder_page.write(["rung"], [], tmp_path)
