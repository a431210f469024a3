"""Compares recommendations (`jaxlc plan --recommend`) with sweeps, in ten cases; prints a table as Markdown.

    python -m benchmarks.recommendations --out=runs/recommendations
    python -m benchmarks.recommendations --cases=8b_256k_8gpu,70b_128k_64gpu
    python -m benchmarks.recommendations --cases=8b_1m_1gpu_lora --all_within=inf

For each case:

1. The recommendation is searched as the command does it.
2. The formulas estimate all combinations: the full sweep.
3. AOT compilation of the fastest combination of each layout and kind of saved activations, fastest first, until
   `--sweep` of them fit; for two cases with one GPU, and with `--all_within`, of all combinations within a share of the
   best time.
4. AOT compilation of `--random` further combinations, drawn from all with a fixed seed: the error of the formula.

Every compiled step is a line of points.jsonl in `out`; the same command resumes.
"""

import json
import math
import random
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from absl import app, flags

from jaxlc import plan, runtime
from jaxlc.config import Config, RuntimeConfig, load, read_config, to_dict, with_settings
from jaxlc.config.base_config import base_config
from jaxlc.core.errors import UserError
from jaxlc.search.candidate_search import Compile, Search, Trial
from jaxlc.search.candidates import Candidate, Layout, layouts
from jaxlc.search.recommendation import MEMORY_MARGIN, compile_in_processes, recommend
from jaxlc.simulate.roofline import Roofline
from jaxlc.simulate.topology import topology

_WINDOW = 0.05  # combinations that are slower by the formula are not in the sweep


class Case(NamedTuple):
    """A model and GPUs."""

    name: str
    topology: str
    make: Callable[[], Config]
    all_within: float | None = None  # all combinations are compiled whose time exceeds the best by at most this share


def _model(name: str, seq_len: str, **settings) -> Callable[[], Config]:
    """The default config with a model; one document per sequence, except for the packed case."""
    unmasked = {"attention.document_mask": False} | settings
    return lambda: with_settings(load(base_config(None, dict(model=name, seq_len=seq_len))), unmasked)


CASES = (
    Case("1b_32k_1gpu", "h100:1x1", _model("llama3.2-1b", "32K"), all_within=0.1),
    Case("1b_256k_8gpu", "h100:1x8", _model("llama3.2-1b", "256K")),
    Case("8b_32k_8gpu", "h100:1x8", _model("llama3.1-8b", "32K")),
    Case("8b_128k_8gpu_packed", "h100:1x8", lambda: load(read_config("sft_128k"))),
    Case("8b_256k_8gpu", "h100:1x8", _model("llama3.1-8b", "256K")),
    Case("8b_1m_8gpu", "h100:1x8", _model("llama3.1-8b", "1M")),
    Case("8b_1m_1gpu_lora", "h100:1x1", lambda: load(read_config("1m_1gpu:lora")), all_within=0.1),
    Case("8b_1m_64gpu", "h100:8x8", _model("llama3.1-8b", "1M")),
    Case("70b_32k_64gpu", "h100:8x8", _model("llama3.1-70b", "32K")),
    Case("70b_128k_64gpu", "h100:8x8", _model("llama3.1-70b", "128K")),
)


class Result(NamedTuple):
    """Of one case. Seconds are the plan's estimates of compiled steps."""

    case: Case
    combinations: Sequence[Candidate]  # that may fit
    recommended: Trial
    num_recommend: int  # compiled by the search
    sweep: Sequence[Trial]  # with those of the search
    sample: Sequence[Trial]  # random, not in the sweep

    @property
    def best(self) -> Trial:
        return min((x for x in (*self.sweep, *self.sample) if x.plan.memory.fits), key=_seconds)

    @property
    def slower(self) -> float:
        """By how much the recommendation is slower than the best compiled step."""
        return _seconds(self.recommended) / _seconds(self.best) - 1

    @property
    def possible(self) -> float:
        """By how much a step that was not compiled could be faster, if its formula is as exact as in the sweep."""
        compiled = {trial.candidate.name for trial in (*self.sweep, *self.sample)}
        others = [x.time.step_seconds for x in self.combinations if x.name not in compiled]
        ratio = min(_seconds(trial) / trial.candidate.time.step_seconds for trial in self.sweep)
        return max(0.0, _seconds(self.recommended) / (ratio * min(others)) - 1) if others else 0.0


def _seconds(trial: Trial) -> float:
    return trial.plan.predicted.step_seconds


def _kinds(pool: Iterable[Layout]) -> list[Layout]:
    """The candidates of each layout by saved activations, each as a layout of its own, fastest first."""
    kinds: dict[tuple, list[Candidate]] = {}
    for index, layout in enumerate(pool):
        for candidate in layout.candidates:
            memory = candidate.config.memory
            kinds.setdefault((index, memory.remat, memory.offload, memory.layers_per_remat_group), []).append(candidate)
    return [Layout(candidates=candidates, num_too_large=0) for candidates in kinds.values()]


class StoredCompiler:
    """Compiles steps that are not in points.jsonl of a directory, and returns stored plans for the others."""

    def __init__(self, directory: str):
        runtime.start(RuntimeConfig(num_processes=1))
        self._path, self._compile = Path(directory) / "points.jsonl", compile_in_processes(1)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._stored: dict[str, plan.Plan | str] = {}
        for line in self._path.read_text().splitlines() if self._path.exists() else ():
            row = json.loads(line)
            self._stored[row["config"]] = row["refused"] or plan.Plan.from_json(row["plan"])

    def __call__(self, configs: Sequence[Config]) -> Sequence[plan.Plan | str]:
        keys = [json.dumps(to_dict(config), sort_keys=True) for config in configs]
        new = [(key, config) for key, config in zip(keys, configs) if key not in self._stored]
        for key, result in zip((key for key, _ in new), self._compile([config for _, config in new]) if new else ()):
            refused = result if isinstance(result, str) else ""
            row = dict(config=key, refused=refused, plan=None if refused else result.to_json())
            with self._path.open("a") as file:
                file.write(json.dumps(row) + "\n")
            self._stored[key] = result
        return [self._stored[key] for key in keys]


def run_case(case: Case, compile_steps: Compile, num_sweep: int, num_random: int, log: Callable[[str], None]) -> Result:
    """The recommendation, the sweep and the sample of one case."""
    config, gpus = case.make(), topology(case.topology)
    result = recommend(config, gpus, compile_steps, roofline=Roofline(), limit_seconds=480, log=log)
    pool = list(layouts(config, gpus, Roofline(), MEMORY_MARGIN))
    combinations = [candidate for layout in pool for candidate in layout.candidates]
    fastest = min(candidate.time.step_seconds for candidate in combinations)
    limit = fastest * (1 + (_WINDOW if case.all_within is None else case.all_within))
    if case.all_within is None:
        swept = [kind for kind in _kinds(pool) if kind.candidates[0].time.step_seconds <= limit]
    else:
        num_sweep = len(combinations)
        swept = [_alone(candidate) for candidate in combinations if candidate.time.step_seconds <= limit]
    sweep = _compiled(config, swept, num_sweep, compile_steps, log)
    trials = {trial.candidate.name: trial for trial in (*result.search.trials, *sweep)}
    others = [candidate for candidate in combinations if candidate.name not in trials]
    drawn = random.Random(case.name).sample(others, min(num_random, len(others)))
    sample = _compiled(config, [_alone(candidate) for candidate in drawn], len(drawn), compile_steps, log)
    return Result(
        case=case,
        combinations=combinations,
        recommended=result.search.best[0],
        num_recommend=len(result.search.trials),
        sweep=list(trials.values()),
        sample=sample,
    )


def _alone(candidate: Candidate) -> Layout:
    return Layout(candidates=[candidate], num_too_large=0)


def _compiled(
    config: Config, pool: Sequence[Layout], num: int, compile_steps: Compile, log: Callable[[str], None]
) -> list[Trial]:
    """Compiles the layouts, fastest first, until `num` fit; where one does not fit, its next settings."""
    search = Search(base=config, goal="fastest", num_best=num)
    search.run(pool, compile_steps, batch_size=1, limit_seconds=math.inf, log=log)
    return search.trials


def table(results: Sequence[Result]) -> str:
    """Markdown."""
    heads = ("case", "GPUs", "may fit", "compiled by the command", "sweep", "recommended", "s per step",
             "best of sweep", "slower by", "error, sweep", "not compiled", "random", "error, random")  # fmt: skip
    lines = [f"| {' | '.join(heads)} |", f"| {' | '.join('---' for _ in heads)} |"]
    for result in results:
        num_fit = sum(trial.plan.memory.fits for trial in result.sweep)
        cells = (
            result.case.name,
            result.case.topology,
            f"{len(result.combinations):,}",
            result.num_recommend,
            f"{num_fit} of {len(result.sweep)}",
            result.recommended.candidate.name,
            f"{_seconds(result.recommended):,.2f}",
            f"{_seconds(result.best):,.2f}",
            f"{result.slower:.1%}",
            _errors_text(result.sweep),
            f"{result.possible:.1%}",
            f"{min(map(_seconds, result.sample)) / _seconds(result.recommended) - 1:+.1%}" if result.sample else "",
            _errors_text(result.sample),
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def _errors_text(trials: Sequence[Trial]) -> str:
    """The range of the formula's time over that of the compiled step, minus 1."""
    errors = [trial.candidate.time.step_seconds / _seconds(trial) - 1 for trial in trials]
    return f"{min(errors):+.1%} to {max(errors):+.1%}" if errors else ""


def define_flags(values: flags.FlagValues = flags.FLAGS) -> None:
    flags.DEFINE_list("cases", [case.name for case in CASES], "cases to run", flag_values=values)
    flags.DEFINE_integer("sweep", 8, "number of steps that fit in the sweep of a case", flag_values=values)
    flags.DEFINE_integer("random", 5, "number of random steps of a case", flag_values=values)
    flags.DEFINE_float(
        "all_within",
        None,
        "compile all combinations whose time by the formula exceeds the best by at most this share; inf: all that may"
        " fit (default: that of the case)",
        lower_bound=0.0,
        flag_values=values,
    )
    flags.DEFINE_string("out", "runs/recommendations", "directory of points.jsonl", flag_values=values)


def main(_) -> None:
    values = flags.FLAGS
    unknown = set(values.cases) - {case.name for case in CASES}
    if unknown:
        sys.exit(f"error: invalid --cases={','.join(unknown)}: expected {', '.join(case.name for case in CASES)}")
    compiler = StoredCompiler(values.out)
    log = lambda line: print(f"  {line}", file=sys.stderr, flush=True)
    results = []
    for case in CASES:
        if values.all_within is not None:
            case = case._replace(all_within=values.all_within)
        if case.name in values.cases:
            print(f"{case.name}, {case.topology}", file=sys.stderr, flush=True)
            try:
                results.append(run_case(case, compiler, values.sweep, values.random, log))
            except UserError as error:
                sys.exit(f"error: {case.name}: {error}")
    print(table(results))
    print(f"\nrandom steps of all cases: error {_errors_text([x for result in results for x in result.sample])}")


if __name__ == "__main__":
    define_flags()
    app.run(main)
