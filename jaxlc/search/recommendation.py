"""Recommends configurations for a model and GPUs: formulas prune, AOT compilation decides."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxlc.config import Config
from jaxlc.config.checks.mesh_checks import nearest_multiples
from jaxlc.core.errors import UserError
from jaxlc.runtime.worker_processes import run_in_processes
from jaxlc.search import aot
from jaxlc.search.candidate_search import Compile, Search
from jaxlc.search.candidates import Layout, layouts
from jaxlc.search.goals import lengths, topologies
from jaxlc.simulate.roofline import Roofline
from jaxlc.simulate.topology import Topology, full_domain_size, part_of

if TYPE_CHECKING:
    from jaxlc.plan import Plan

# Candidates are compiled if this fraction of their estimated memory fits: the formula's error, see tests/plan.
MEMORY_MARGIN = 0.94
_CHUNK_TOKENS = 256  # of a GPU: attention kernels have tiles of 128 tokens, and zigzag order two chunks
_MAX_DOMAINS = 512  # of the search for a number of GPUs that would do


@dataclass(frozen=True, kw_only=True)
class Alternatives:
    """What would fit instead, by the formulas, where nothing fits."""

    seq_len: int | None  # the longest sequence on these GPUs; None: none fits
    gpus: Topology | None  # the fewest GPUs of this kind for the sequence; None: not even the largest number tried


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """The result of a search."""

    base: Config
    gpus: Topology
    search: Search
    alternatives: Alternatives | None = None  # None: something fits


def recommend(
    config: Config,
    gpus: Topology,
    compile_steps: Compile,
    *,
    goal: str = "fastest",
    roofline: Roofline,
    batch_size: int = 1,
    limit_seconds: float,
    log: Callable[[str], None] = lambda line: None,
) -> Recommendation:
    """Searches meshes, attention strategies, microbatches and memory settings for `config` on `gpus`.

    Model, data, mask, precision, trained parameters, sequence length and global batch size are those of `config`; with
    the goal "longest" the sequence length varies, and a step has about as many tokens, in at least one sequence.

    Args:
      compile_steps: compiles candidates; see `compile_in_processes`.
      batch_size: number of candidates in a call of `compile_steps`.
      limit_seconds: the search ends after this time; candidates in progress are completed.
      log: called with lines that report progress.
    Raises:
      UserError: no mesh of the GPUs divides model, sequence and batch.
    """
    pool: list[Layout] = []
    for part in topologies(goal, gpus):
        for variant in variants_to_search(config, part, goal, roofline):
            pool += layouts(variant, part, roofline, MEMORY_MARGIN)
    if not pool:
        raise UserError(_no_layout(config, gpus))
    usable = [layout for layout in pool if layout.candidates]
    num_candidates = sum(len(layout.candidates) for layout in usable)
    num_all = num_candidates + sum(layout.num_too_large for layout in pool)
    log(
        f"{num_all:,} combinations of mesh, strategy, microbatches and memory settings; {num_candidates:,} in"
        f" {len(usable):,} layouts may fit by the memory formula; compiling the fastest first"
    )
    search = Search(base=config, goal=goal)
    search.run(usable, compile_steps, batch_size=batch_size, limit_seconds=limit_seconds, log=log)
    if not usable:
        log("nothing to compile")
    elif search.num_left:
        log(f"stopped after {limit_seconds / 60:.3g} minutes; {search.num_left} layouts could still be among the best")
    else:
        log(f"done: no other layout can be among the best; {len(search.trials)} compiled")
    alternatives = None if search.best else _alternatives(config, gpus, roofline)
    return Recommendation(base=config, gpus=gpus, search=search, alternatives=alternatives)


def compile_in_processes(num_workers: int, **options) -> Compile:
    """Compiles each config for its runtime.topology in a process of its own.

    Args:
      options: further arguments of `jaxlc.plan.plan`.
    """

    def compile_steps(configs: Sequence[Config]) -> "Sequence[Plan | str]":
        results: dict[int, Plan | str] = {}
        for index, row in run_in_processes(configs, functools.partial(aot.plan_of, **options), num_workers):
            results[index] = row["plan"] if row["status"] == "done" else f"{row['status']}: {row['reason']}"
        return [results[index] for index in range(len(configs))]

    return compile_steps


def variants_to_search(config: Config, gpus: Topology, goal: str, roofline: Roofline) -> list[Config]:
    """`config`, or for the goal "longest" with the longest sequences that may fit."""
    if goal != "longest":
        return [config]
    variants = [_with_length(config, length) for length in lengths(gpus.num_gpus)]
    index = _first(len(variants), lambda i: _may_fit(variants[i], gpus, roofline))
    return variants[index : index + 3]


def _with_length(config: Config, seq_len: int) -> Config:
    """`config` with another length and about as many tokens per step, in at least one sequence. It is not checked."""
    batch = dict(global_batch_size=max(1, config.tokens_per_step // seq_len), gradient_accumulation_steps=1)
    return dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, seq_len=seq_len),
        train=dataclasses.replace(config.train, **batch),
    )


def _first(num: int, holds: Callable[[int], bool]) -> int:
    """The smallest index in range(num) for which `holds`, which is false before and true after it; num if none."""
    low, high = 0, num
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low


def _may_fit(config: Config, gpus: Topology, roofline: Roofline, margin: float = MEMORY_MARGIN) -> bool:
    return any(layout.candidates for layout in layouts(config, gpus, roofline, margin))


def _alternatives(config: Config, gpus: Topology, roofline: Roofline) -> Alternatives:
    """Without the margin, because they are not compiled."""
    shorter = [_with_length(config, length) for length in lengths(gpus.num_gpus) if length < config.data.seq_len]
    index = _first(len(shorter), lambda i: _may_fit(shorter[i], gpus, roofline, margin=1.0))
    larger = (part for part in _larger(gpus) if _may_fit(config, part, roofline, margin=1.0))
    return Alternatives(
        seq_len=shorter[index].data.seq_len if index < len(shorter) else None,
        gpus=next(larger, None),
    )


def _larger(gpus: Topology) -> Iterator[Topology]:
    """More GPUs of this kind: doublings within a domain up to its full size, then of the domains."""
    size = gpus.gpus_per_domain
    while 2 * size <= full_domain_size(gpus) and gpus.num_domains == 1:
        size *= 2
        yield part_of(gpus, 1, size)
    num_domains = 2 * gpus.num_domains
    while num_domains <= _MAX_DOMAINS:
        yield part_of(gpus, num_domains, size)
        num_domains *= 2


def _no_layout(config: Config, gpus: Topology) -> str:
    num_tokens, num_sequences, num_gpus = config.data.seq_len, config.train.global_batch_size, gpus.num_gpus
    return (
        f"no mesh of {num_gpus} GPUs divides the sequence of {num_tokens:,} tokens, the {num_sequences} sequences of a"
        f" step and the {config.model.num_heads} query heads; use"
        f" --config.train.global_batch_size={nearest_multiples(num_sequences, num_gpus)}, or"
        f" --config.data.seq_len={nearest_multiples(num_tokens, _CHUNK_TOKENS * num_gpus)}"
    )
