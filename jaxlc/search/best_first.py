"""The search for the best configuration: compiles the candidate that would be chosen, until the choice is compiled.

Candidates that were not compiled have estimates (`compile_order`), corrected by what was compiled of the same mesh and
strategy, or else of the same mesh, or of any. All are ranked together by `ranking`. So the search ends when no other
candidate can change the choice: not by 2% within a mesh, nor by 5% across meshes.
"""

import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from jaxlc.config import Config
from jaxlc.plan.memory import USABLE_SHARE
from jaxlc.runtime.worker_processes import Row
from jaxlc.search import ranking, space
from jaxlc.search.compile_order import Estimate
from jaxlc.search.goals import eligible
from jaxlc.search.space import Settings
from jaxlc.simulate.topology import Topology

NUM_MESHES = 3  # that are compiled and reported
_MARGIN = 0.9  # of corrected estimates of memory: what exceeds the memory by less is compiled
_FIRST_WORKING_RATIO = 0.5  # before anything was compiled
Compile = Callable[[Sequence["Candidate"]], Sequence[Row]]  # the rows of candidates, in the same order


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A configuration with its estimate."""

    settings: Settings  # on top of `base`
    base: Config
    gpus: Topology
    estimate: Estimate

    @cached_property
    def config(self) -> Config:
        """Not checked."""
        return space.unchecked(self.base, self.settings)

    @property
    def name(self) -> str:
        return f"{self.gpus} {space.name_of(self.config)}"

    def fits(self, working_ratio: float) -> bool:
        return self.estimate.fits(self.gpus, working_ratio)

    def tier(self, working_ratio: float) -> tuple[bool, bool]:
        """Whether it uses host memory, and whether its plan would warn about the size of JAX's memory pool."""
        estimate, device_bytes = self.estimate, self.gpus.device.memory_bytes
        pool_bytes = self.base.runtime.memory_fraction * device_bytes
        return estimate.uses_host, estimate.exact_bytes + working_ratio * estimate.working_bytes > pool_bytes

    def row(self, time_ratio: float, working_ratio: float) -> Row:
        """The columns of a compiled candidate that a ranking needs, from the corrected estimate."""
        config, estimate = self.config, self.estimate
        seconds = time_ratio * estimate.step_seconds
        device_bytes = estimate.exact_bytes + working_ratio * estimate.working_bytes
        uses_host, exceeds_pool = self.tier(working_ratio)
        return dict(
            status="done",
            topology=str(self.gpus),
            num_devices=self.gpus.num_gpus,
            seq_len=config.data.seq_len,
            gradient_accumulation_steps=config.train.gradient_accumulation_steps,
            **vars(config.mesh),
            step_seconds=seconds,
            tokens_per_second_per_device=config.tokens_per_step / seconds / self.gpus.num_gpus,
            device_peak_bytes=device_bytes,
            device_usable_bytes=USABLE_SHARE * self.gpus.device.memory_bytes,
            departures=len(space.departures(config)),
            fits=True,
            warnings="exceeds the memory pool" if exceeds_pool else "",
            host_bytes_per_node=estimate.host_bytes_per_node if uses_host else 0,
        )


class Group:
    """Candidates with one mesh, strategy and microbatch, and all memory settings, fastest first."""

    def __init__(self, candidates: Sequence[Candidate]):
        self.candidates = sorted(candidates, key=lambda candidate: candidate.estimate.step_seconds)
        config = candidates[0].config
        mesh = (str(candidates[0].gpus), config.data.seq_len, config.mesh)
        strategy = (config.attention.strategy, config.attention.ulysses_degree)
        steps = config.train.gradient_accumulation_steps
        # What was compiled with the first of these corrects the estimates.
        self.keys: tuple[Hashable, ...] = (
            (mesh, strategy, steps),
            (mesh, strategy),
            mesh,
            (config.mesh.context, config.mesh.tensor, strategy),
            (),
        )


class Search:
    """State and result of a search."""

    def __init__(self, goal: str, groups: Sequence[Group]):
        self.goal, self.groups = goal, groups
        self.rows: dict[int, Row] = {}  # of compiled candidates, by id
        self.num_left = 0  # candidates that could change the choice and were not compiled, because the time was over
        self._candidates = {id(x): (x, group) for group in groups for x in group.candidates}
        self._ratios: dict[Hashable, list[tuple[float, float]]] = {}  # key of a group -> compiled over estimated

    def run(self, compile_candidates: Compile, *, batch_size: int, limit_seconds: float) -> None:
        """Compiles candidates until the choice is known, or until one fits and `limit_seconds` are over."""
        start_seconds = time.monotonic()
        while pending := self._pending():
            if self.best and time.monotonic() - start_seconds > limit_seconds:
                self.num_left = len(pending)
                return
            batch = pending[:batch_size]
            for candidate, row in zip(batch, compile_candidates(batch), strict=True):
                self._add(candidate, row)

    @property
    def best(self) -> list[tuple[Candidate, Row]]:
        """Compiled candidates that fit, the best of each mesh; at most `NUM_MESHES`."""
        done = {id(row): key for key, row in self.rows.items() if row["status"] == "done" and row["fits"]}
        chosen = self._first_of_meshes([self.rows[key] for key in done.values()])
        return [(self._candidates[done[id(row)]][0], row) for row in chosen]

    @property
    def smallest(self) -> Row | None:
        """The compiled row that needs the least memory."""
        done = (row for row in self.rows.values() if row["status"] == "done")
        return min(done, key=lambda row: row["device_peak_bytes"], default=None)

    def working_ratio(self) -> float:
        """Compiled over estimated `Estimate.working_bytes`; 1 before anything was compiled."""
        return statistics.median(memory for _, memory in self._ratios.get((), [(1.0, 1.0)]))

    def _add(self, candidate: Candidate, row: Row) -> None:
        self.rows[id(candidate)] = row
        if row["status"] != "done":
            return
        estimate = candidate.estimate
        working = (row["device_peak_bytes"] - estimate.exact_bytes) / estimate.working_bytes
        for key in self._candidates[id(candidate)][1].keys:
            self._ratios.setdefault(key, []).append((row["step_seconds"] / estimate.step_seconds, working))

    def _pending(self) -> list[Candidate]:
        """Candidates on which the choice depends and that were not compiled: none if it is known."""
        candidate_of: dict[int, Candidate] = {}
        rows = []
        for candidate, row in self._view():
            candidate_of[id(row)] = candidate
            rows.append(row)
        choices = eligible(self.goal, rows)
        if not choices:
            return []
        decisive = [choices[index] for index in ranking.decisive([ranking.entry_of(row) for row in choices])]
        pending = (candidate_of[id(row)] for row in (*decisive, *self._first_of_meshes(rows)))
        return list({id(x): x for x in pending if id(x) not in self.rows}.values())

    def _first_of_meshes(self, rows: Sequence[Row]) -> list[Row]:
        by_mesh: dict[Hashable, Row] = {}
        for row in ranking.ranked(eligible(self.goal, rows)):
            by_mesh.setdefault(ranking.entry_of(row).mesh, row)
        return list(by_mesh.values())[:NUM_MESHES]

    def _view(self) -> Iterator[tuple[Candidate, Row]]:
        """Candidates that fit: compiled ones, and of the others those that may stand for their group."""
        for group in self.groups:
            time_ratio, working_ratio = self._ratios_of(group)
            fastest: dict[Hashable, float] = {}  # of each tier of the ranking
            for candidate in group.candidates:
                if id(candidate) in self.rows:
                    row = self.rows[id(candidate)]
                    if row["status"] == "done" and row["fits"]:
                        yield candidate, row
                elif candidate.fits(_MARGIN * working_ratio):
                    tier, seconds = candidate.tier(working_ratio), candidate.estimate.step_seconds
                    if ranking.is_equal(seconds, fastest.setdefault(tier, seconds)):
                        yield candidate, candidate.row(time_ratio, working_ratio)

    def _ratios_of(self, group: Group) -> tuple[float, float]:
        for key in group.keys:
            if key in self._ratios:
                times, memories = zip(*self._ratios[key])
                return statistics.median(times), statistics.median(memories)
        return 1.0, _FIRST_WORKING_RATIO
