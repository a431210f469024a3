"""`jaxlc recommend`: the order of candidates, the search, the page, the config file, the command."""

import collections
import contextlib
import dataclasses
import functools
import itertools
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import Mock

import pytest
from ml_collections import ConfigDict

from jaxlc.cli import main_of
from jaxlc.cli.planning import InitFlags, _base, _note_missing, check_path
from jaxlc.config import Config, defaults, load, load_stages, read_config, unchecked, with_settings
from jaxlc.config.command_line import ConfigFlags, parse
from jaxlc.config.files import base_config, set_model
from jaxlc.config.values import Tokens, typed
from jaxlc.core.errors import UserError
from jaxlc.plan import result as plan_result
from jaxlc.plan.program import host_pools_per_node_bytes
from jaxlc.runtime.memory import STAGING_BYTES, host_pool_bytes
from jaxlc.search import ranking, runner, space
from jaxlc.search.analytic_cost import Estimate, Layout, Rates
from jaxlc.search.best_first import Candidate, Search, eligible
from jaxlc.search.ranking import Entry
from jaxlc.search.recommendation import (
    LORA,
    MARK,
    Recommendation,
    candidates,
    config_source,
    lengths,
    page,
    recommend,
    topologies,
)
from jaxlc.search.runner import STOPPED
from jaxlc.simulate.roofline import Roofline
from jaxlc.simulate.topology import topology
from jaxlc.step.memory import pinned_bytes
from tests.advice import followed

init_main = main_of("init")
plan_main = main_of("plan")
main = main_of("recommend")

GIB = 2**30
NO_FLAGS = dict(model=None, seq_len=None)
# Rows of `jaxlc recommend --config=64k:ring --topology=h100:1x8`, and of the config itself; JAX
# 0.10.1.
STORED = [
    json.loads(line) for line in (Path(__file__).parents[1] / "goldens/search_64k.jsonl").open()
]


def entry(
    mesh: str = "a", seconds: float = 100.0, left: float = 10, departures: int = 0, **flags
) -> Entry:
    return Entry(mesh, flags.pop("microbatches", 1), seconds, left * GIB, departures, **flags)


@pytest.mark.parametrize(
    ("entries", "first"),
    [
        ([entry(seconds=100), entry(seconds=103, left=50)], 0),  # one mesh: more than 2% decide
        # less do not: the simpler one
        ([entry(seconds=100, departures=2), entry(seconds=101, departures=1)], 1),
        # or the one with more memory left
        ([entry(seconds=100, left=5), entry(seconds=101, left=9)], 1),
        # two meshes: less than 5% do not decide
        ([entry("a", 100, left=5), entry("b", 104, left=9)], 1),
        # or other microbatches
        ([entry("a", 100, left=5), entry("a", 104, left=9, microbatches=2)], 1),
        ([entry("a", 100, left=5), entry("b", 106, left=9)], 0),
        # equal memory: the simpler one
        ([entry("a", 100, departures=2), entry("b", 104, departures=1)], 1),
        # A mesh is represented by its choice, not by a slow configuration with much memory.
        ([entry("a", 100, left=5), entry("b", 101, left=4), entry("b", 104, left=70)], 0),
        ([entry("a", 100, has_warnings=True), entry("b", 200)], 1),
        ([entry("a", 100, fits=False), entry("b", 200, has_warnings=True)], 1),
        # copies to the host have to pay
        ([entry("a", 100, left=50, host_kinds=1), entry("b", 104)], 1),
        ([entry("a", 100, left=50, host_kinds=1), entry("b", 106)], 0),
        (
            [
                entry("a", 100, left=50, host_kinds=2),
                entry("b", 104, host_kinds=1),
                entry("c", 106),
            ],
            1,
        ),
        (
            [
                entry("a", 100, has_warnings=True, left=50, host_kinds=1),
                entry("b", 104, has_warnings=True),
            ],
            1,
        ),
    ],
)
def test_places_first_follows_the_rules(entries, first):
    entries = dict(enumerate(entries))
    assert ranking.places(entries)[0] == first == ranking.decisive(entries)[0]
    assert sorted(ranking.places(entries)) == list(entries)


def test_stored_search_of_64k_prefers_ulysses_with_saved_mlp():
    """The fastest steps copy the optimizer to the host or exceed JAX's memory pool; the config's
    ring takes longer.
    """
    rows = ranking.ranked(STORED)
    first, ring = rows[0], next(row for row in rows if row["overrides"] == "")
    assert (first["strategy"], first["context"], first["save"]) == (
        "ulysses",
        8,
        ["mlp_gate", "mlp_up"],
    )
    assert first["step_seconds"] == pytest.approx(104, rel=0.005)
    # leaves 0.3 GiB less
    assert (rows[1]["strategy"], rows[1]["fsdp"], rows[1]["departures"]) == ("ring", 4, 0)
    assert ring["step_seconds"] == pytest.approx(118, rel=0.005)
    faster = [row for row in rows if row["step_seconds"] < first["step_seconds"]]
    assert {row["context"] for row in faster} >= {4, 8} and any(row["pools"] for row in faster)
    assert all(first["step_seconds"] < 1.05 * row["step_seconds"] for row in faster)


@pytest.mark.gpu_compiler
def test_search_of_64k_compiles_ulysses_with_saved_mlp_among_the_first():
    """The space has it, and rough estimates expect it to be one of few that may be the choice."""
    compiled = []

    def compile_candidates(candidates, is_over):
        compiled.extend(candidates)
        raise KeyboardInterrupt

    config = with_settings(load(read_config("64k:ring")), {"runtime.transport": "auto"})
    options = dict(roofline=Roofline(), end_seconds=math.inf, batch_size=12)
    with pytest.raises(KeyboardInterrupt):
        recommend(config, topology("h100:1x8"), compile_candidates, **options)
    names = [space.name_of(candidate.config) for candidate in compiled]
    (index,) = (
        index
        for index, name in enumerate(names)
        if name.startswith("context=8 ulysses, 64 microbatches")
    )
    assert index < 5
    assert {"mlp_gate", "mlp_up"} <= set(compiled[index].settings["memory.save"])
    assert space.overrides(compiled[index].settings) in [row["overrides"] for row in STORED]


@pytest.mark.gpu_compiler
def test_batch_that_no_mesh_divides_names_one_that_works():
    def search(settings):
        config = with_settings(small(), {"runtime.transport": "nccl", **settings})
        with contextlib.suppress(KeyboardInterrupt):
            recommend(config, topology("h100:1x7"), stop, roofline=Roofline(), end_seconds=math.inf)

    def stop(candidates, is_over):
        raise KeyboardInterrupt

    assert "no mesh of 7 GPUs divides the sequence of 512 tokens" in followed(search)


@pytest.mark.full
@pytest.mark.gpu_compiler
def test_command_64k_writes_ring_with_saved_products(tmp_path, monkeypatch):
    """Compiles about ten full-size steps. Of several meshes within 5%, this one leaves the most
    memory.
    """
    monkeypatch.chdir(tmp_path)
    assert (
        main(
            [
                "recommend",
                "--config=64k:ring",
                "--config.runtime.transport=auto",
                "--search_minutes=60",
            ]
        )
        == 0
    )
    config = load(read_config("recommended.py"))
    assert (config.attention.strategy, config.mesh.context, config.mesh.tensor) == ("ring", 4, 2)
    assert config.memory.save == ("query", "key", "value", "mlp_gate", "mlp_up")


def small() -> Config:
    config = defaults()
    config.model.update(num_layers=2)
    config.data.seq_len = 512
    config.train.update(global_batch_size=4)
    return load(config)


def candidate(seconds: float, gib: float = 10, **settings) -> Candidate:
    settings = {"mesh.context": 2, "train.global_batch_size": 840} | settings
    estimate = Estimate(seconds, gib / 2 * GIB, gib / 2 * GIB, 0)
    return Candidate(settings=settings, base=small(), gpus=topology("h100:1x2"), estimate=estimate)


def steps(number: int) -> dict[str, int]:
    return {"train.gradient_accumulation_steps": number}


def tensor(number: int) -> dict[str, int]:
    return {"mesh.tensor": 2, "mesh.context": 1} | steps(number)


class StubCompiler:
    """Rows of compiled steps by `train.gradient_accumulation_steps`: (seconds, GiB), or a reason."""

    def __init__(self, results):
        self.results, self.compiled = results, []

    def __call__(self, candidates, is_over=None):
        return [self._row(candidate) for candidate in candidates]

    def _row(self, candidate):
        key = candidate.config.train.gradient_accumulation_steps
        self.compiled.append(key)
        if isinstance(self.results[key], str):
            return dict(status="refused", reason=self.results[key])
        seconds, gib = self.results[key]
        config = candidate.config
        return candidate.columns() | dict(
            status="done",
            figures="estimated",
            model="tiny",
            topology=str(candidate.gpus),
            seq_len=config.data.seq_len,
            **vars(config.mesh),
            strategy=config.attention.strategy,
            ulysses_degree=1,
            remat=config.memory.remat,
            transport="nccl",
            gradient_accumulation_steps=config.train.gradient_accumulation_steps,
            step_seconds=seconds,
            step_seconds_low=seconds / 2,
            step_seconds_high=2 * seconds,
            tokens_per_second_per_device=candidate.config.tokens_per_step
            / seconds
            / candidate.gpus.num_gpus,
            device_peak_bytes=gib * GIB,
            device_usable_bytes=75 * GIB,
            departures=len(space.departures(config)),
            fits=gib < 75,
            host_bytes_per_node=0,
            warnings="",
            pools={},
            time_by_resource="compute 0.9",
            overrides=space.overrides(candidate.settings),
        )


def searched(
    results, *pool: list[Candidate], limit_seconds: float = 1e9
) -> tuple[Search, StubCompiler]:
    compiler, search = (
        StubCompiler(results),
        Search("fastest", [x for group in pool for x in group]),
    )
    search.run(compiler, lambda rows: bool(search.best) and limit_seconds == 0)
    return search, compiler


def test_search_ends_when_no_other_can_change_the_choice():
    pool = [candidate(10, **steps(1))], [candidate(11, **tensor(2)), candidate(12, **tensor(3))]
    search, compiler = searched({1: (20.0, 10), 2: (22.0, 10)}, *pool)
    # one of each mesh; the third is 9% slower than the second of its mesh
    assert compiler.compiled == [1, 2]
    assert [row["step_seconds"] for _, row in search.best] == [20.0, 22.0] and search.num_left == 0


def test_search_compiles_what_a_corrected_estimate_makes_the_choice():
    """The estimate of the first mesh is too fast by a factor of 2, of the other one by 1.5."""
    pool = (
        [candidate(10, 10, **steps(1))],
        [candidate(14, 10, **tensor(2)), candidate(14.1, 6, **tensor(3))],
    )
    search, compiler = searched({1: (20.0, 40), 2: (20.8, 30), 3: (20.9, 20)}, *pool)
    assert compiler.compiled == [1, 2, 3]
    assert [row["step_seconds"] for _, row in search.best] == [20.9, 20.0]


def test_search_step_does_not_fit_corrects_the_memory():
    tight, similar, less = (
        candidate(10, 50, **steps(1)),
        candidate(10.1, 51, **steps(2)),
        candidate(12, 30, **steps(3)),
    )
    search, compiler = searched({1: (10.0, 100), 3: (12.0, 60)}, [tight, similar, less])
    assert compiler.compiled == [1, 3]  # by the first, 51 GiB are 102
    assert [row["step_seconds"] for _, row in search.best] == [12.0]


def test_search_time_of_tiles_does_not_correct_other_estimates():
    """Tiles take 1.5 times as long as estimated. With 15 s, the other one would not be compiled."""
    in_tiles = candidate(10, 4, **{"memory.tile_tokens": 256}, **steps(1))
    search, compiler = searched(
        {1: (15.0, 10), 2: (10.5, 20)}, [in_tiles, candidate(10.4, 8, **steps(2))]
    )
    assert compiler.compiled == [1, 2]
    assert [row["step_seconds"] for _, row in search.best] == [10.5]


def test_search_refused_candidate_is_replaced():
    pool = [candidate(10, **steps(1)), candidate(11, **steps(2))]
    search, compiler = searched({1: "unsupported", 2: (11.0, 9)}, pool)
    assert compiler.compiled == [1, 2] and len(search.best) == 1


def test_candidate_whose_host_pools_exceed_the_node_has_a_warning():
    """A pool per GPU and staging buffers per process: fewer processes need less."""
    gpus = [topology("h100:1x8", devices_per_process=number) for number in (1, 8)]
    assert [host_pools_per_node_bytes(100 * GIB, x) for x in gpus] == [928 * GIB, 816 * GIB]
    free = candidate(1.0)
    pools = dataclasses.replace(free, estimate=free.estimate._replace(host_pools_bytes=2048 * GIB))
    assert [x.entry(1.0, 1.0).has_warnings for x in (free, pools)] == [False, True]


def test_candidate_counts_kinds_of_arrays_in_host_memory():
    on_host = {"memory.optimizer": "host", "memory.remat": "full", "memory.offload": ("residual",)}
    assert [
        candidate(1.0, **settings).entry(1.0, 1.0).host_kinds for settings in ({}, on_host)
    ] == [0, 2]


@pytest.mark.gpu_compiler
def test_estimate_counts_host_pools_of_a_node():
    config = with_settings(
        load(model("llama3.1-8b")), {"memory.optimizer": "host", "mesh.context": 8}
    )
    rates = Rates(topology("h100:1x8"), Roofline())
    estimate = Layout(config, rates, {"full": "cudnn"}).estimate(config.memory)
    pools_bytes = 8 * (host_pool_bytes(config.runtime, pinned_bytes(config).pooled) + STAGING_BYTES)
    assert pools_bytes < estimate.host_pools_bytes < pools_bytes + 100 * GIB  # and a checkpoint
    on_device = dataclasses.replace(config.memory, optimizer="device")
    assert Layout(config, rates, {"full": "cudnn"}).estimate(on_device).host_pools_bytes == 0


def test_search_limit_ends_it_after_first_fit():
    pool = [candidate(10, **steps(1))], [candidate(11, **tensor(2))]
    search, compiler = searched({1: (11.0, 10), 2: (12.0, 10)}, *pool, limit_seconds=0)
    assert compiler.compiled == [1] and search.num_left == 1


@pytest.mark.gpu_compiler
@pytest.mark.parametrize("compile_seconds", [60, 200])
def test_search_ends_at_the_limit_also_without_a_result(compile_seconds):
    """A limit of 100 s; estimates take one, and the first compilation ends before or after it."""
    now, compiler = [0.0], StubCompiler(collections.defaultdict(lambda: (1.0, 10)))
    is_compiled = compile_seconds < 100

    def compile_candidates(candidates, is_over):
        for _ in range(compile_seconds):
            if is_over([]):
                return [STOPPED] * len(candidates)
            now[0] += 1
        return compiler(candidates)

    def log(line):
        now[0] += "combinations" in line

    config = load(base_config(None, dict(model="llama3.2-1b", seq_len="32K")))
    gpus, options = topology("h100:1x2"), dict(roofline=Roofline(), end_seconds=100.0)
    result = recommend(config, gpus, compile_candidates, **options, clock=lambda: now[0], log=log)
    assert now[0] == 100 and len(result.search.rows) == len(compiler.compiled) == is_compiled
    assert result.choice is not None and bool(result.search.best) == is_compiled
    settings, figures = result.choice
    assert ("not compiled" in figures) == (not is_compiled)
    assert ("--search_minutes" in page(result, None)) == (not is_compiled)
    assert settings["data.seq_len"] == 2**15


def test_page_names_what_the_estimate_cannot_order():
    search, _ = searched(
        {1: (20.0, 20), 2: (20.4, 10)}, [candidate(10, **steps(1))], [candidate(11, **tensor(2))]
    )
    result = Recommendation(base=small(), gpus=topology("h100:1x2"), search=search)
    text = page(result, 2.0)
    assert (
        "The estimate cannot order 1 and 2: they differ by less than the 80% interval of a ratio, 39% (docs"
        in text
    )
    assert (
        text.index("1: tensor=2, 2 microbatches")
        < text.index("leaves 65 GiB")
        < text.index("2: context=2 ring, 1 microbatch,")
    )
    assert "20 s (10 to 40)" in text and "cost per 1B tokens" in text
    assert "cannot order" not in page(result, None, pair_spread=0.01)


def test_page_offers_fp8_with_its_measured_gain_where_it_is_supported():
    def offers(gpus: str, **settings) -> bool:
        search, _ = searched({1: (20.0, 20)}, [candidate(10, **steps(1), **settings)])
        text = page(Recommendation(base=small(), gpus=topology(gpus), search=search), None)
        return "--config.precision.compute=fp8. Measured on one H100" in text

    assert offers("h100:1x2") and not offers("a100:1x2")
    assert not offers("h100:1x2", **{"precision.compute": "fp8"})
    assert not offers("h100:1x2", **{"precision.reduce": "fp32"})  # unsupported with FP8


def test_eligible_rows_meet_the_goal():
    one, two = candidate(1.0), candidate(2.0, **{"data.seq_len": 1024})
    two = dataclasses.replace(two, gpus=topology("h100:1x8"))
    entries = {one: entry(), two: entry()}
    assert [*eligible("fewest_gpus", entries)] == [one] and [*eligible("longest", entries)] == [two]
    assert eligible("cheapest", entries) == entries and eligible("longest", {}) == {}


def test_plan_of_part_has_fewer_devices_per_process(monkeypatch):
    def plan_step(config, gpus, *_, **options):
        return str(gpus), gpus.devices_per_process

    monkeypatch.setattr(plan_result, "plan_step", plan_step)
    monkeypatch.setattr(runner, "row_of", lambda result, config: result)
    for name, expected in (("h100:2x8", 8), ("h100:1x4", 4), ("h100:1x6", 2)):
        config = with_settings(small(), {"runtime.topology": name})
        assert runner.estimate_point(config, devices_per_process=8) == (name, expected)


def test_topologies_of_cheapest_are_parts():
    names = [str(gpus) for gpus in topologies("cheapest", topology("h100:4x8"))]
    assert names == ["h100:4x8", "h100:2x8", "h100:1x8", "h100:1x4", "h100:1x2", "h100:1x1"]
    assert [str(gpus) for gpus in topologies("fastest", topology("h100:4x8"))] == ["h100:4x8"]
    names = [str(gpus) for gpus in topologies("fewest_gpus", topology("h100:3x6"))]
    assert names == [
        "h100:3x6",
        "h100:2x6",
        "h100:1x6",
        "h100:1x4",
        "h100:1x3",
        "h100:1x2",
        "h100:1x1",
    ]


@pytest.mark.gpu_compiler
def test_candidates_divide_batch_and_keep_settings():
    config = with_settings(small(), {"lora.rank": 8, "data.seq_len": 2048})
    pool = list(candidates(config, Rates(topology("h100:1x4"), Roofline()), 2048))
    for found in {(x.config.mesh, x.config.attention): x for x in pool}.values():
        # raises UserError if they contradict each other
        checked = with_settings(config, found.settings)
        assert (
            checked.lora.rank == 8
            and checked.data.seq_len == 2048
            and checked.tokens_per_step == 4 * 2048
        )
        assert checked.mesh.num_devices == 4
    meshes = {tuple(vars(found.config.mesh).values()) for found in pool}
    assert {(1, 4, 1, 1), (1, 1, 4, 1), (1, 1, 1, 4), (1, 2, 2, 1), (4, 1, 1, 1)} <= meshes
    saved = {found.config.memory.save for found in pool}
    assert {(), ("mlp_gate", "mlp_up"), ("query", "key", "value")} <= saved


def test_space_follows_the_layer_kinds():
    """Ulysses degrees split the heads of every kind, and sliding layers run in tiles and in remat
    groups.
    """
    model = dict(layer_kinds="sliding,wide", window=512, num_layers=5, num_heads=8, num_kv_heads=8)
    model |= dict(kinds=dict(wide=dict(attention="full")))
    config = load(ConfigDict(dict(model=model, data=dict(seq_len=2**18))))
    wide = with_settings(
        config, {"model.kinds.wide.num_heads": 12, "model.kinds.wide.num_kv_heads": 6}
    )
    mesh = dict(vars(config.mesh), context=8)
    assert space.ulysses_degrees(config, mesh) == [4, 2] and space.ulysses_degrees(wide, mesh) == [
        2
    ]
    settings = list(space.memory_settings(wide))
    assert {x["memory.tile_tokens"] for x in settings} == {0, 8192, 16_384, 32_768}
    assert {x["memory.layers_per_remat_group"] for x in settings} == {1, 2}


def test_estimate_counts_the_gate_of_the_query_projection():
    rates = Rates(topology("h100:1x1"), Roofline())
    config = load(model("llama3.2-1b"))
    seconds = [
        Layout(changed, rates, {"full": "cudnn"}).layer_seconds(0)[0]
        for changed in (config, with_settings(config, {"model.attention.gate": True}))
    ]
    assert seconds[1]["query"] > seconds[0]["query"] and seconds[1]["key"] == seconds[0]["key"]


def test_estimate_counts_the_projections_of_latents_and_what_a_ring_sends_of_them():
    config = load(model("deepseek-v2-lite"))
    settings = {"mesh.context": 8, "attention.strategy": "ring"}
    latents, keys_values = (
        Layout(changed, Rates(topology("h100:1x8"), Roofline()), {}).dims
        for changed in (
            with_settings(config, settings | {"attention.ring_payload": payload})
            for payload in ("latents", "keys_values")
        )
    )
    down, up = 512 + 64, 512 * 16 * 256 / 2048
    assert latents.sent == down and keys_values.sent == 2 * 16 * 192
    assert latents.keys_values == keys_values.expanded == down + up
    assert latents.expanded == down + 8 * up and latents.queries == 16 * 192


@pytest.mark.gpu_compiler
def test_estimate_state_and_saved_activations_are_a_lower_bound():
    """What the compiled steps need beyond them is less than twice the working set and NCCL's
    buffers.
    """
    rates = Rates(topology("h100:1x8"), Roofline())
    config = with_settings(load(read_config("64k:ring")), {"runtime.transport": "auto"})
    for row in STORED:
        settings = {f"mesh.{axis}": row[axis] for axis in vars(config.mesh)}
        settings |= {f"attention.{name}": row[name] for name in ("strategy", "ulysses_degree")}
        settings |= {"train.gradient_accumulation_steps": row["gradient_accumulation_steps"]}
        settings |= {
            f"memory.{name}": row[name]
            for name in ("remat", "optimizer", "parameters", "tile_tokens")
        }
        settings |= {f"memory.{name}": tuple(row[name]) for name in ("save", "offload")}
        changed = unchecked(config, settings)
        estimate = Layout(changed, rates, rates.kernels(changed)).estimate(changed.memory)
        assert estimate.exact_bytes < row["device_peak_bytes"], row["overrides"]
        if row["remat"] == "none":  # what is between the named tensors is not estimated
            continue
        assert (
            row["device_peak_bytes"] < estimate.exact_bytes + 2 * estimate.working_bytes + 6 * GIB
        )
        assert estimate.step_seconds == pytest.approx(row["step_seconds"], rel=0.2)


@pytest.mark.gpu_compiler
def test_recommend_longest_of_odd_number_of_gpus():
    """More GPUs than 4 fit longer sequences than 4 of them, also where a power of two is not
    divisible by them.
    """
    longest = [recommend_longest(topology(f"h100:1x{gpus}"))[0] for gpus in (4, 6, 7)]
    assert 2**20 < longest[0] < min(longest[1:])


def recommend_longest(gpus):
    """The recommended length if every step takes as much memory as estimated, and the compiled
    candidates.
    """
    config = with_settings(load(model("llama3.2-1b")), {"attention.document_mask": False})
    compiled = []

    def compile_candidates(candidates, is_over):
        compiled.extend(candidates)
        row = StubCompiler(collections.defaultdict(lambda: (1.0, 10)))
        return [row([candidate])[0] for candidate in candidates]

    result = recommend(
        config,
        gpus,
        compile_candidates,
        goal="longest",
        roofline=Roofline(),
        end_seconds=1.0,
        clock=lambda: float(bool(compiled)),
    )
    return result.search.best[0][1]["seq_len"], compiled


def test_recommend_out_of_time_while_it_estimates_raises():
    """The best of some of the combinations is no advice."""
    config, ticks = load(model("llama3.2-1b")), itertools.count()
    with pytest.raises(UserError, match=r"over before all combinations .* --search_minutes"):
        recommend(
            config,
            topology("h100:1x2"),
            StubCompiler({}),
            roofline=Roofline(),
            end_seconds=3,
            clock=lambda: next(ticks),
        )


def test_recommend_longest_compiles_the_longest_sequence():
    seq_len, compiled = recommend_longest(topology("h100:1x1"))
    assert seq_len == compiled[0].config.data.seq_len > 2**20 and seq_len in lengths(1)
    # a step of 4,194,304 tokens, rounded up to one sequence
    assert compiled[0].config.train.global_batch_size == 1


@pytest.mark.gpu_compiler
def test_recommend_nothing_fits_names_fewest_gpus():
    config = with_settings(
        load(model("llama3.1-70b")), {"data.seq_len": 2**20, "train.global_batch_size": 1}
    )
    too_large = StubCompiler(collections.defaultdict(lambda: (1.0, 200)))
    result = recommend(
        config, topology("h100:1x1"), too_large, roofline=Roofline(), end_seconds=math.inf
    )
    text = page(result, None)
    assert "nothing fits" in text and "16 GPUs would do: --topology=h100:2x8" in text
    reason = "needs at least 526 GiB of each GPU (75 usable), or 2,103 GiB of host memory per node (1,843 usable, with"
    assert f"no sequence length fits h100:1x1: the training state {reason}" in text
    short = with_settings(config, {"data.seq_len": 2**15})
    refused = StubCompiler(collections.defaultdict(lambda: "too large"))
    result = recommend(
        short, topology("h100:1x1"), refused, roofline=Roofline(), end_seconds=math.inf
    )
    assert "LoRA would fit: --config.lora.rank=16" in page(result, None)
    lora = with_settings(short, LORA)
    found = candidates(lora, Rates(topology("h100:1x1"), Roofline()), 2**15)
    assert any(candidate.estimate.fits(candidate.gpus) for candidate in found)


@pytest.mark.gpu_compiler
def test_recommend_no_mesh_names_batch_that_works():
    config = load(base_config(None, dict(model="llama3.2-1b", seq_len="128K")))
    gpus = topology("h100:1x6")
    with pytest.raises(
        UserError, match="global_batch_size=30 or 36, or --config.data.seq_len=130560 or 132096"
    ):
        recommend(config, gpus, StubCompiler({}), roofline=Roofline(), end_seconds=math.inf)
    for changed in ({"train.global_batch_size": 36}, {"data.seq_len": 132_096}):
        config = with_settings(config, changed)
        assert any(candidates(config, Rates(gpus, Roofline()), config.data.seq_len))


def model(name: str):
    return base_config(None, dict(model=name, seq_len=None))


@pytest.mark.parametrize(("text", "tokens"), [("1M", 2**20), ("32k", 32_768), ("131_072", 131_072)])
def test_length_units(text, tokens):
    assert typed("--seq_len", text, Tokens) == tokens


@pytest.mark.parametrize("text", ["1X", "0", "1.5M", "-8", ""])
def test_length_invalid_is_error(text):
    with pytest.raises(UserError, match="--seq_len"):
        typed("--seq_len", text, Tokens)


def test_base_config_model_and_length():
    config = load(base_config(None, dict(model="llama3.1-8b", seq_len="512K")))
    assert (
        config.model.num_layers == 32
        and config.data.seq_len == 524_288
        and config.tokens_per_step == 4_194_304
    )
    changed = load(
        base_config(read_config("1m_1gpu:lora"), dict(model="llama3.2-1b", seq_len="64K"))
    )
    assert (
        changed.lora.rank == 32
        and changed.model.num_layers == 16
        and changed.data.seq_len == 65_536
    )
    assert base_config(None, NO_FLAGS) is None
    assert (
        load(base_config(None, dict(model="llama3.1-8b", seq_len="1000"))).train.global_batch_size
        == 4096
    )


@dataclass(frozen=True, kw_only=True)
class ModelFlags(ConfigFlags):
    base = base_config

    model: str | None = None
    seq_len: str | None = None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model=llama3.1-8"], "did you mean llama3.1-8b"),
        (["--seq_len=1M"], "no model is given"),
        (["--config=extend_512k", "--seq_len=1M"], "config with stages"),
    ],
)
def test_base_config_errors(flags, message):
    with pytest.raises(UserError, match=message):
        parse(["recommend", *flags], flags=ModelFlags)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--goal=best"], "expected one of 'fastest'"),
        (["--workers=0"], "--workers=0"),
        (["--search_minutes=soon"], "invalid --search_minutes=soon: expected a finite number"),
        (["--out=recommended.txt"], "recommended.py"),
        (["--out=/"], "expected the name of a config file"),
    ],
)
def test_command_invalid_flag_is_error(flags, message, capsys):
    assert main(["recommend", "--model=llama3.1-8b", "--topology=h100:1x8", *flags]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--config=64k:h100", "--json=/"], "--json=/ is a directory"),
        (["--config=64k:h100", "--timeline=plan.xyz"], "ends with .png"),
    ],
)
def test_plan_command_invalid_flag_is_error(flags, message, capsys):
    assert plan_main(["plan", "--topology=h100:1x8", *flags]) == 2
    assert message in capsys.readouterr().err


def stages_of(source: str, model: str = ""):
    config = read_config(source) if source else defaults()
    if model:
        config.model.preset = model
    return load_stages(config)


@pytest.mark.parametrize(
    ("source", "model"),
    [("", "llama3.1-8b"), ("sft_128k", ""), ("extend_512k", ""), ("1m_1gpu:lora", "llama3.2-1b")],
)
def test_config_file_loads_as_recommended(source, model, tmp_path):
    base = stages_of(source, model)
    settings = {
        "memory.remat": "full",
        "memory.offload": ("residual",),
        "runtime.memory_fraction": 0.88,
    }
    configs = [
        with_settings(stage.config, settings | {"attention.strategy": "ring"}) for stage in base
    ]
    path = tmp_path / "recommended.py"
    path.write_text(config_source(source, model, "Recommended.", base, configs))
    written = load_stages(read_config(str(path)))
    assert [stage.config for stage in written] == configs
    assert [(stage.name, stage.num_steps) for stage in written] == [
        (stage.name, stage.num_steps) for stage in base
    ]
    assert MARK in path.read_text() and len(path.read_text().splitlines()) < 40


def test_config_file_has_the_layer_kinds_of_flags(tmp_path):
    kinds = {"model.layer_kinds": ("full", "wide"), "model.kinds.wide.head_dim": 64}
    config = with_settings(load(defaults()), kinds)
    path = tmp_path / "recommended.py"
    path.write_text(
        config_source("quickstart", "", "Recommended.", stages_of("quickstart"), [config])
    )
    assert load(read_config(str(path))) == config


def test_config_file_of_hugging_face_directory_loads(tmp_path):
    shape = dict(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=320,
    )
    values = dict(
        model_type="llama", num_key_value_heads=2, rms_norm_eps=1e-5, rope_theta=1e4, **shape
    )
    (tmp_path / "config.json").write_text(json.dumps(values))
    given = base_config(None, dict(model=str(tmp_path), seq_len="4K"))
    assert load(given).model.model_dim == 64
    base = defaults()
    set_model(base, str(tmp_path))
    recommended = with_settings(load(given), {"memory.remat": "full"})
    path = tmp_path / "recommended.py"
    path.write_text(
        config_source("", str(tmp_path), "Recommended.", load_stages(base), [recommended])
    )
    assert load(read_config(str(path))) == recommended


def test_check_path_keeps_other_files(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("print()")
    with pytest.raises(UserError, match="another name"):
        check_path(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="another name"):
        check_path(path)
    path.write_text(f'"""{MARK}."""')
    check_path(path)
    (tmp_path / "directory.py").mkdir()
    with pytest.raises(UserError, match="is a directory"):
        check_path(tmp_path / "directory.py")


@pytest.mark.gpu_compiler
@pytest.mark.heavy
def test_command_small_model_writes_config_that_plans(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("JAX_PLATFORMS", "TF_CPP_MIN_LOG_LEVEL"):
        monkeypatch.setenv(name, os.environ.get(name, ""))  # restored after the test
    Path("base.py").write_text(
        "from tests.plan.gpus import small_config\n\ndef get_config(variant):\n    return small_config()\n"
    )
    flags = ["--config=base.py", "--topology=h100:1x2", "--workers=1", "--search_minutes=0.01"]
    arguments = ["recommend", *flags, "--config.mesh.tensor=1", "--price_per_gpu_hour=2"]
    points, end_at_point = Path("runs/recommend_base/points.jsonl"), 1

    def clock() -> float:
        num_points = len(points.read_text().splitlines()) if points.exists() else 0
        return math.inf if num_points >= end_at_point else 0.0

    recommend_until = functools.partial(recommend, clock=clock)
    monkeypatch.setattr("jaxlc.search.recommendation.recommend", recommend_until)
    assert main(arguments) == 0
    captured = capsys.readouterr()
    assert "RECOMMENDATION, fastest" in captured.out and "cost per 1B" in captured.out
    assert "combinations of mesh" in captured.err and "h100:1x2 context=2" in captured.err
    config = load(read_config("recommended.py"))
    assert config.mesh.num_devices == 2 and config.runtime.topology == "h100:1x2"
    assert config.model.num_layers == 2 and not config.attention.document_mask
    assert len(points.read_text().splitlines()) == 1
    end_at_point = 2
    assert main(arguments) == 0  # the stored point, and the next one
    assert len(points.read_text().splitlines()) <= 2
    end_at_point = 3
    written, full = Path("recommended.py").read_text(), OSError(28, "No space left on device")
    monkeypatch.setattr(os, "fsync", Mock(side_effect=full))
    assert main(arguments) == 1
    assert "(No space left on device): free space, then run" in capsys.readouterr().err
    assert Path("recommended.py").read_text() == written


@pytest.mark.gpu_compiler
def test_stored_points_of_changed_documents_are_not_used(tmp_path, monkeypatch):
    """After the files have changed under the same names, candidates are compiled again."""
    monkeypatch.chdir(tmp_path)
    for name in ("JAX_PLATFORMS", "TF_CPP_MIN_LOG_LEVEL"):
        monkeypatch.setenv(name, os.environ.get(name, ""))  # restored after the test
    Path("base.py").write_text(
        "from tests.plan.gpus import small_config\n\ndef get_config(variant):\n"
        "    config = small_config()\n"
        "    config.data.update(sources='texts.jsonl', tokenizer='bytes')\n"
        "    config.attention.document_mask = True\n    return config\n"
    )
    keys = []

    def run(points, work, *, about, **_):
        keys.append(json.dumps(about, sort_keys=True))
        raise KeyboardInterrupt

    monkeypatch.setattr("jaxlc.search.runner.run", run)
    flags = ["--config=base.py", "--topology=h100:1x2", "--document_lengths=corpus"]
    for num_words in (4000, 4000, 2000):
        words = json.dumps(dict(text="word " * num_words)) + "\n"
        Path("texts.jsonl").write_text(words * (80_000 // num_words))
        assert main(["recommend", *flags]) == 130
    assert keys[0] == keys[1] != keys[2]


INIT = [
    "jaxlc init",
    "--config=sft_128k",
    "--model=qwen2.5-7b",
    "--data=chats.jsonl",
    "--topology=h100:1x4",
]


def test_init_writes_a_commented_config_of_recipe_model_and_data(tmp_path):
    command = parse(INIT, flags=InitFlags)
    found = with_settings(command.config, {"mesh.context": 4, "runtime.topology": "h100:1x4"})
    base = _base("", "qwen2.5-7b", command.stages)
    text = config_source("", "qwen2.5-7b", "For h100:1x4.", base, [found], "init")
    path = tmp_path / "my_config.py"
    path.write_text(text)
    assert load(read_config(str(path))) == found
    assert found.model.num_layers == 28 and found.attention.strategy == "ring"
    assert found.data.mixture[0].paths == ("chats.jsonl",)
    assert found.optimizer.learning_rate == load(read_config("sft_128k")).optimizer.learning_rate
    settings = [line for line in text.splitlines() if line.startswith(" " * 8 + '"')]
    assert 25 <= len(text.splitlines()) <= 45 and len(settings) >= 12
    assert all("  # " in line and len(line) <= 118 for line in settings)
    assert "`jaxlc init`" in text and "read_config" not in text
    check_path(path)  # the command may write it again


def test_init_with_several_sources_names_a_setting_for_each():
    arguments = ["jaxlc init", "--config=extend_512k", "--data=texts", "--topology=h100:8x8"]
    with pytest.raises(UserError, match="--config.data.mixture.books.paths=PATHS"):
        parse(arguments, flags=InitFlags)
    with pytest.raises(UserError, match="use --model=NAME, or --config=RECIPE"):
        parse(["jaxlc init", "--topology=h100:1x1"], flags=InitFlags)


@pytest.mark.parametrize(
    ("data", "note"),
    [
        ("missing.jsonl", "--data: 'missing.jsonl' does not exist"),
        ("a.jsonl,b.bin", "--data: 'b.bin' contains no file with a supported suffix"),
        ("a.jsonl,hub:org/talk,s3://bucket/a,phone-book", ""),
        ("", ""),
    ],
)
def test_init_warns_of_data_that_is_not_here(data, note, tmp_path, monkeypatch, capsys):
    """It may be on the machine of the GPUs."""
    monkeypatch.chdir(tmp_path)
    for name in ("a.jsonl", "b.bin"):
        Path(name).touch()
    _note_missing(data)
    printed = capsys.readouterr().err
    assert printed.startswith(f"warning: {note}") if note else not printed


@pytest.mark.full
@pytest.mark.gpu_compiler
def test_command_init_writes_a_config_that_loads(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = ["--model=llama3.2-1b", "--seq_len=32K", "--data=t/*.jsonl", "--topology=h100:1x1"]
    assert init_main(["jaxlc init", *arguments, "--search_minutes=0.1"]) == 0
    config = load(read_config("my_config.py"))
    assert config.data.sources == ("t/*.jsonl",) and config.data.seq_len == 32_768


@pytest.mark.parametrize("name", ["x.yaml", "configs/sft.yml"])
def test_yaml_config_names_init_and_the_page_of_names(name):
    with pytest.raises(UserError, match=r"`jaxlc init .*docs/other_programs\.md"):
        read_config(name)
