"""The search for the best configuration: compiles the candidate that would be chosen, until the
choice is compiled.

Candidates that were not compiled have estimates (`analytic_cost`), corrected by what was compiled
of the same mesh and strategy, or else of the same mesh, or of any. All are ranked together by
`ranking`. So the search ends when no other candidate can change the choice: not by 2% within a
mesh, nor by 5% across meshes.

`with_advice` searches settings of memory only, for the mesh and strategy of a step that does not
fit.
"""

import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ml_collections import ConfigDict

from jaxlc.config import Config, unchecked
from jaxlc.core import Log, UserError
from jaxlc.core.processes import Row
from jaxlc.plan.report import Change
from jaxlc.plan.result import Plan, on_gpus, plan_step
from jaxlc.search import ranking, space
from jaxlc.search.analytic_cost import Estimate, Layout, Rates, usable_memory
from jaxlc.search.ranking import NUM_MESHES, Entry
from jaxlc.search.runner import STOPPED, IsOver, row_of
from jaxlc.search.space import Point
from jaxlc.simulate.roofline import Roofline
from jaxlc.simulate.topology import Topology

# factor on corrected estimates of memory: what exceeds the memory by less is compiled
_MARGIN = 0.9
_FIRST_WORKING = 0.5  # compiled / estimated working memory, before anything was compiled
# The rows of candidates, in the same order; the function ends compilations.
Compile = Callable[[Sequence["Candidate"], IsOver], Sequence[Row]]


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidate(Point):
    """A configuration with its estimate."""

    gpus: Topology
    estimate: Estimate

    @cached_property
    def columns_of_entry(self) -> Row:
        """Those that do not depend on figures."""
        config = self.config
        return dict(
            topology=str(self.gpus),
            seq_len=config.data.seq_len,
            **vars(config.mesh),
            **vars(config.memory),
            gradient_accumulation_steps=config.train.gradient_accumulation_steps,
            departures=len(space.departures(config)),
        )

    @cached_property
    def similar(self) -> tuple[Hashable, ...]:
        """What was compiled with the first of these corrects the estimate of the memory."""
        attention = self.config.attention
        mesh = ranking.mesh_of(self.columns_of_entry)
        return (mesh, attention.strategy, attention.ulysses_degree), mesh, ()

    @cached_property
    def similar_in_time(self) -> tuple[Hashable, ...]:
        """What was compiled with the first of these corrects the estimate of the time."""
        is_tiled = self.config.memory.tile_tokens > 0
        return tuple((is_tiled, key) for key in self.similar)

    def entry(self, time_ratio: float, working_ratio: float) -> Entry:
        """Its place among compiled candidates, by the corrected estimate."""
        config, estimate = self.config, self.estimate
        usable_bytes, usable_host_bytes = usable_memory(self.gpus)
        device_bytes = estimate.exact_bytes + working_ratio * estimate.working_bytes
        seconds = time_ratio * estimate.step_seconds * self.gpus.num_gpus
        figures = dict(
            fits=True,
            tokens_per_second_per_device=config.tokens_per_step / seconds,
            device_usable_bytes=usable_bytes,
            device_peak_bytes=device_bytes,
            # It exceeds JAX's memory pool, or the pools of pinned host memory exceed the node.
            warnings=device_bytes > config.runtime.memory_fraction * self.gpus.device.memory_bytes
            or estimate.host_pools_bytes > usable_host_bytes,
        )
        return ranking.entry_of(self.columns_of_entry | figures)


_AIMS: Mapping[str, Callable[[Candidate], int]] = {  # less is better, whatever the time
    "fewest_gpus": lambda candidate: candidate.gpus.num_gpus,
    "longest": lambda candidate: -candidate.config.data.seq_len,
}


def eligible(goal: str, fitting: Mapping[Candidate, Entry]) -> dict[Candidate, Entry]:
    """Candidates that meet the goal; their GPU time per token decides among them."""
    aim = _AIMS.get(goal, lambda candidate: 0)
    least = min(map(aim, fitting), default=0)
    return {candidate: entry for candidate, entry in fitting.items() if aim(candidate) == least}


class Search:
    """State and result of a search."""

    def __init__(self, goal: str, candidates: Sequence[Candidate]):
        self.goal, self.candidates = goal, candidates
        self.rows: dict[Candidate, Row] = {}  # compiled candidates
        # candidates that could change the choice and were not compiled, because the time was over
        self.num_left = 0
        # compiled over estimated figures, by what compiled candidates have in common with others
        self._ratios: defaultdict[Hashable, list[float]] = defaultdict(list)

    def run(self, compile_candidates: Compile, is_over: IsOver, batch_size: int = 1) -> None:
        """Compiles candidates until the choice is known, or `is_over` for the rows so far."""
        while pending := self.pending():
            if is_over(self.rows.values()):
                self.num_left = len(pending)
                return
            batch = pending[:batch_size]
            for candidate, row in zip(batch, compile_candidates(batch, is_over), strict=True):
                if row is not STOPPED:
                    self.add(candidate, row)

    @property
    def best(self) -> list[tuple[Candidate, Row]]:
        """Compiled candidates that fit, the best of each mesh; at most `NUM_MESHES`."""
        entries = eligible(self.goal, self._compiled())
        return [(candidate, self.rows[candidate]) for candidate in _first_of_meshes(entries)]

    def _compiled(self) -> dict[Candidate, Entry]:
        """The compiled candidates that fit."""
        return {
            x: ranking.entry_of(row)
            for x, row in self.rows.items()
            if row["status"] == "done" and row["fits"]
        }

    @property
    def smallest(self) -> Row | None:
        """The compiled row that needs the least memory."""
        done = (row for row in self.rows.values() if row["status"] == "done")
        return min(done, key=lambda row: row["device_peak_bytes"], default=None)

    def working_ratio(self) -> float:
        """Compiled over estimated `Estimate.working_bytes`; 1 before anything was compiled."""
        return self._ratio([()], 1.0)

    def _ratio(self, keys: Sequence[Hashable], default: float) -> float:
        """The median of what was added for the first of `keys` that has something."""
        return statistics.median(
            next((self._ratios[key] for key in keys if key in self._ratios), [default])
        )

    def add(self, candidate: Candidate, row: Row) -> None:
        """Adds what was compiled."""
        self.rows[candidate] = row
        if row["status"] == "done":
            estimate = candidate.estimate
            working = (row["device_peak_bytes"] - estimate.exact_bytes) / estimate.working_bytes
            for key in candidate.similar:
                self._ratios[key].append(working)
            for key in candidate.similar_in_time:
                self._ratios[key].append(row["step_seconds"] / estimate.step_seconds)

    def pending(self) -> list[Candidate]:
        """Candidates on which the choice depends and that were not compiled: none if it is known."""
        fitting = self._compiled()
        for candidate in (x for x in self.candidates if x not in self.rows):
            working_ratio = self._ratio(candidate.similar, _FIRST_WORKING)
            if candidate.estimate.fits(candidate.gpus, _MARGIN * working_ratio):
                time_ratio = self._ratio(candidate.similar_in_time, 1.0)
                fitting[candidate] = candidate.entry(time_ratio, working_ratio)
        entries = eligible(self.goal, fitting)
        decisive = ranking.decisive(entries) if entries else []
        return [
            x for x in dict.fromkeys((*decisive, *_first_of_meshes(entries))) if x not in self.rows
        ]


def _first_of_meshes(entries: Mapping[Candidate, Entry]) -> list[Candidate]:
    """The best candidate of each mesh, at most `NUM_MESHES`."""
    by_mesh: dict[Hashable, Candidate] = {}
    for candidate in ranking.places(entries):
        by_mesh.setdefault(entries[candidate].mesh, candidate)
    return list(by_mesh.values())[:NUM_MESHES]


_NUM_FITTING = 2  # the search ends after this many changes that fit; later ones cost more time
_NUM_COMPILED = 6  # or after this many changes


def with_advice(
    plan: Plan,
    config: ConfigDict | Config,
    gpus: Topology,
    starting: Log,
    roofline: Roofline,
) -> Plan:
    """The plan of `config`, whose step does not fit, with changes that were compiled.

    Args:
      starting: called with a description of each program before it is compiled.
    """
    config = on_gpus(config, gpus)
    rates = Rates(gpus, roofline)
    layouts = dict[int, Layout]()
    candidates = []  # `config` itself, then its changes
    for settings in ({}, *space.changes(config, gpus.device)):
        changed = unchecked(config, settings)
        steps = changed.train.gradient_accumulation_steps
        if steps not in layouts:
            layouts[steps] = Layout(changed, rates, rates.kernels(changed) or {})
        estimate = layouts[steps].estimate(changed.memory)
        candidates.append(Candidate(settings=settings, base=config, gpus=gpus, estimate=estimate))
    given, *changes = candidates
    search = Search("fastest", changes)
    search.add(given, _row(given, plan))
    advice: list[Change] = []

    def compile_one(candidates: Sequence[Candidate], _is_over: IsOver) -> list[Row]:
        (candidate,) = candidates
        overrides = candidate.overrides
        try:
            result = plan_step(
                candidate.checked(), gpus, lambda: starting(f"with {overrides}"), roofline=roofline
            )
        except UserError as error:  # invalid for this config, or refused by the compiler
            return [dict(status="refused", reason=str(error))]
        advice.append(Change(
            overrides=overrides,
            cost=space.cost(config, candidate.settings),
            device_peak_bytes=result.memory.device_peak_bytes,
            host_bytes_per_node=result.memory.host_bytes_per_node,
            fits=result.memory.fits,
        ))  # fmt: skip
        return [_row(candidate, result)]

    search.run(
        compile_one,
        lambda _: (
            len(advice) >= _NUM_COMPILED or sum(change.fits for change in advice) >= _NUM_FITTING
        ),
    )
    return dataclasses.replace(plan, advice=tuple(advice))


def _row(candidate: Candidate, plan: Plan) -> Row:
    return row_of(plan, candidate.config) | candidate.columns_of_entry | dict(status="done")
