"""Searches the best configuration: formulas order the candidates, and the compiled step decides.

Candidates are compiled in order of their estimated score. The search ends when enough of them fit and no other one can
be better than the best by more than `TOLERANCE`: the formula's time, corrected by the median ratio of compiled to
estimated time so far and reduced by the formula's error, is not. Where the compiled step does not fit, the next memory
settings of the same layout are tried.
"""

import heapq
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jaxlc.config import Config, with_settings
from jaxlc.core.errors import UserError
from jaxlc.plan.report import format_seconds
from jaxlc.search.candidates import Candidate, Layout
from jaxlc.search.goals import Score, score

if TYPE_CHECKING:
    from jaxlc.plan import Plan

# Candidates that are better than the best by less are not searched: the plan cannot distinguish them.
TOLERANCE = 0.01
FORMULA_ERROR = 0.02  # of the time of candidates of one search relative to each other
# A compiled step, or the reason why there is none; one for each config, in the same order.
Compile = Callable[[Sequence[Config]], Sequence["Plan | str"]]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A candidate that was compiled."""

    candidate: Candidate
    config: Config  # checked
    plan: "Plan"

    def score(self, goal: str) -> Score:
        return score(
            goal,
            step_seconds=self.plan.predicted.step_seconds,
            num_gpus=self.plan.num_devices,
            tokens_per_step=self.plan.tokens_per_step,
            seq_len=self.plan.sequence_tokens,
        )


@dataclass
class Search:
    """State and result of a search."""

    base: Config
    goal: str
    num_best: int = 3  # candidates that fit and are reported
    trials: list[Trial] = field(default_factory=list)
    num_refused: int = 0  # candidates that the config checks or the compiler refuse
    num_left: int = 0  # layouts that could be better and were not compiled, because the time was over

    @property
    def fitting(self) -> list[Trial]:
        """Trials that fit, best first."""
        return sorted((x for x in self.trials if x.plan.memory.fits), key=lambda trial: trial.score(self.goal))

    @property
    def best(self) -> list[Trial]:
        return self.fitting[: self.num_best]

    def run(
        self,
        layouts: Sequence[Layout],
        compile_steps: Compile,
        *,
        batch_size: int,
        limit_seconds: float,
        log: Callable[[str], None],
    ) -> None:
        """Compiles candidates until the best are known or `limit_seconds` are over; at least until one fits.

        Args:
          batch_size: number of candidates that are compiled at the same time.
          log: called with a line for each compiled candidate.
        """
        self._queue = [entry for layout in layouts for entry in self._entries(layout, 0)]
        heapq.heapify(self._queue)
        start_seconds = time.monotonic()
        while self._queue and not self._is_decided():
            if self.fitting and time.monotonic() - start_seconds > limit_seconds:
                self.num_left = sum(self._can_be_better(entry) for entry in self._queue)
                break
            batch = list(itertools.islice(self._valid(), batch_size))
            results = compile_steps([config for _, config in batch])
            for (entry, config), result in zip(batch, results, strict=True):
                self._add(entry, config, result, log)

    def _add(self, entry: "_Entry", config: Config, result: "Plan | str", log: Callable[[str], None]) -> None:
        candidate = entry.candidate
        name = f"{len(self.trials) + self.num_refused + 1}. {candidate.config.runtime.topology} {candidate.name}"
        if isinstance(result, str):
            self.num_refused += 1
            log(f"{name}: {result}")
            self._push_next(entry, 1.0)
            return
        trial = Trial(candidate=candidate, config=config, plan=result)
        self.trials.append(trial)
        log(f"{name}: {trial_text(trial)}")
        if result.memory.fits and not self._queue:
            self._push_next(entry, 1.0)  # few layouts: also the next settings that need less memory
        elif not result.memory.fits:
            self._push_next(entry, result.memory.device_peak_bytes / candidate.memory.device_bytes)

    def _push_next(self, entry: "_Entry", memory_ratio: float) -> None:
        """Queues the next memory settings of the layout that fit, if estimates are wrong by `memory_ratio`."""
        used = entry.candidate.memory
        for index in range(entry.index + 1, len(entry.layout.candidates)):
            memory = entry.layout.candidates[index].memory
            is_smaller = (
                memory.device_bytes < used.device_bytes or memory.host_bytes_per_node < used.host_bytes_per_node
            )
            if is_smaller and memory_ratio * memory.device_bytes <= memory.usable_device_bytes:
                for following in self._entries(entry.layout, index):
                    heapq.heappush(self._queue, following)
                return

    def _entries(self, layout: Layout, index: int) -> "Iterator[_Entry]":
        for candidate in layout.candidates[index : index + 1]:
            yield _Entry(self._estimated_score(candidate, 1.0), next(_ORDER), layout, index)

    def _estimated_score(self, candidate: Candidate, ratio: float) -> Score:
        config = candidate.config
        return score(
            self.goal,
            step_seconds=ratio * candidate.time.step_seconds,
            num_gpus=candidate.gpus.num_gpus,
            tokens_per_step=config.tokens_per_step,
            seq_len=config.data.seq_len,
        )

    def _valid(self) -> "Iterator[tuple[_Entry, Config]]":
        """The next candidates that the config checks accept."""
        while self._queue and not self._is_decided():
            entry = heapq.heappop(self._queue)
            try:
                yield entry, with_settings(self.base, entry.candidate.settings)
            except UserError:
                self.num_refused += 1
                self._push_next(entry, 1.0)

    def _is_decided(self) -> bool:
        return len(self.best) == self.num_best and not self._can_be_better(self._queue[0])

    def _can_be_better(self, entry: "_Entry") -> bool:
        """Whether the candidate may be better than the best, or is needed because too few fit."""
        if len(self.best) < self.num_best:
            return True
        ratio = statistics.median(x.plan.predicted.step_seconds / x.candidate.time.step_seconds for x in self.trials)
        ratio *= (1 - FORMULA_ERROR) / (1 - TOLERANCE)
        return self._estimated_score(entry.candidate, ratio) < self.best[0].score(self.goal)


_ORDER = itertools.count()  # ties in the queue are broken by it, since layouts have no order


@dataclass(frozen=True, order=True)
class _Entry:
    """A candidate in the queue."""

    estimated: Score
    order: int
    layout: Layout = field(compare=False)
    index: int = field(compare=False)

    @property
    def candidate(self) -> Candidate:
        return self.layout.candidates[self.index]


def trial_text(trial: Trial) -> str:
    """Time and memory of a compiled candidate in one line."""
    predicted, memory = trial.plan.predicted, trial.plan.memory
    fits = "" if memory.fits else ", does not fit"
    on_host = f" and {memory.host_bytes_per_node / 2**30:,.0f} GiB of host memory" if memory.host_bytes_per_node else ""
    return (
        f"{format_seconds(predicted.step_seconds)} per step, {memory.device_peak_bytes / 2**30:,.1f} GiB{on_host}{fits}"
    )
