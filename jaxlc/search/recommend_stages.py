"""`jaxlc recommend`: recommends a configuration for every stage, prints it and writes a config file."""

import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from jaxlc.config import Config, Stage, load_stages, read_config, with_settings
from jaxlc.config.base_config import set_model
from jaxlc.config.settings import defaults
from jaxlc.core.errors import UserError
from jaxlc.runtime.worker_processes import Row, default_num_workers
from jaxlc.search import recommendation_page, runner, worker
from jaxlc.search.best_first import Candidate, Compile
from jaxlc.search.config_file import check_path, config_source
from jaxlc.search.grid import Point
from jaxlc.search.recommendation import Recommendation, recommend
from jaxlc.simulate.roofline import from_file
from jaxlc.simulate.topology import Topology


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Of the command. None selects a default."""

    goal: str
    source: str  # name and variant of the given config; "": none, only a model
    model: str  # "": the config's
    path: Path  # the config file to write
    points: Path  # directory of compiled points
    limit_seconds: float  # of the search, for all stages
    num_workers: int | None
    price_per_gpu_hour: float | None
    constants: str
    host_memory_gib: float | None
    devices_per_process: int


def run(stages: Sequence[Stage], options: Options, gpus: Topology) -> int:
    """Prints a recommendation for each stage, and writes the config file.

    Returns:
      The exit status: 1 if no configuration of a stage fits.
    Raises:
      UserError: an invalid file to write; and as `recommendation.recommend`.
    """
    check_path(options.path)
    assert gpus.devices  # raises here, rather than for every candidate, if the compiler is not installed
    roofline = from_file(options.constants)
    num_workers = options.num_workers or default_num_workers()
    results: list[Recommendation] = []
    for stage in stages:
        _log(f"searching: {stage.name + ', ' if stage.name else ''}{gpus}, {options.goal}")
        result = recommend(
            _searchable(stage.config),
            gpus,
            compile_in_processes(stage.config, gpus, options, num_workers, _progress()),
            goal=options.goal,
            roofline=roofline,
            batch_size=num_workers,
            limit_seconds=options.limit_seconds / len(stages),
            log=_log,
        )
        results.append(result)
        if stage.name:
            print(f"STAGE {stage.name}")
        print(recommendation_page.page(result, options.price_per_gpu_hour, roofline.pair_spread), end="\n\n")
    if not all(result.search.best for result in results):
        return 1
    best = [result.search.best[0] for result in results]
    configs = [_final(stage.config, *chosen) for stage, chosen in zip(stages, best)]
    texts = (": ".join(filter(None, (x.name, recommendation_page.row_text(row)))) for x, (_, row) in zip(stages, best))
    title = f"Recommended for {gpus}, {options.goal}: {'; '.join(texts)}."
    base = _base(options.source, options.model, stages)
    options.path.write_text(config_source(options.source, options.model, title, base, configs))
    name = options.path
    print(f"wrote {name}: jaxlc plan --config={name}; jaxlc train --config={name} --config.data.sources=TEXTS")
    return 0


def compile_in_processes(
    config: Config, gpus: Topology, options: Options, num_workers: int, log: Callable[[str], None]
) -> Compile:
    """Compiles each candidate in a process of its own; results are rows of points.jsonl, as those of a sweep."""
    also = dict(host_memory_gib=options.host_memory_gib, devices_per_process=options.devices_per_process)
    about = runner.about_estimates(config, str(gpus), options.constants, **also)
    work = functools.partial(worker.estimate, topology="", constants=options.constants, **also)
    quiet = Console(quiet=True)

    def compile_candidates(candidates: Sequence[Candidate]) -> list[Row]:
        points = [_point(candidate) for candidate in candidates]
        rows = runner.run(points, work, about=about, out=options.points, num_workers=num_workers, console=quiet)
        by_overrides = {row["overrides"]: row for row in rows}
        results = [by_overrides[point.overrides] for point in points]
        for candidate, row in zip(candidates, results, strict=True):
            log(f"{candidate.name}: {recommendation_page.row_text(row)}")
        return results

    return compile_candidates


def _point(candidate: Candidate) -> Point:
    try:
        return Point(settings=candidate.settings, config=with_settings(candidate.base, candidate.settings))
    except UserError as error:
        return Point(settings=candidate.settings, config=None, refusal=str(error))


def _searchable(config: Config) -> Config:
    """Without settings of this machine."""
    runtime = dataclasses.replace(config.runtime, simulated_devices=0, num_processes=1, process_id=0)
    return dataclasses.replace(config, runtime=runtime)


def _final(given: Config, candidate: Candidate, row: Row) -> Config:
    """The given config with the recommended settings, and the sizes of memory pools that the step needs."""
    return with_settings(given, candidate.settings | row["pools"] | {"runtime.simulated_devices": 0})


def _base(source: str, model: str, stages: Sequence[Stage]) -> Sequence[Stage]:
    """The given config, without overrides of the command line; of its stages those that --stage=NAME selects."""
    config = read_config(source) if source else defaults()
    if model:
        set_model(config, model)
    names = [stage.name for stage in stages]
    return [stage for stage in load_stages(config) if stage.name in names]


def _progress() -> Callable[[str], None]:
    start_seconds = time.monotonic()
    return lambda line: _log(f"{time.monotonic() - start_seconds:5.0f} s  {line}")


def _log(line: str) -> None:
    """Progress goes to stderr, the recommendation to stdout."""
    print(line, file=sys.stderr, flush=True)
