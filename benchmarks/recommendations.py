"""Compares recommendations (`jaxlc plan --recommend`) with sweeps, in ten cases; prints a table as Markdown.

    python -m benchmarks.recommendations --out=runs/recommendations
    python -m benchmarks.recommendations --cases=8b_256k,70b_128k

For each case the recommendation is searched as the command does it. Then the sweep compiles further layouts, fastest
first by the formulas, also those that the recommendation did not need to compile. Every compiled step is a line of
points.jsonl in `out`; the same command resumes.
"""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from absl import app, flags

from jaxlc import plan, runtime
from jaxlc.config import Config, RuntimeConfig, load, read_config, to_dict, with_settings
from jaxlc.core.errors import UserError
from jaxlc.plan.recommend.base_config import base_config
from jaxlc.plan.recommend.candidates import Candidate, Layout, layouts
from jaxlc.plan.recommend.recommendation import MEMORY_MARGIN, compile_in_processes, recommend
from jaxlc.plan.recommend.search import Compile, Search
from jaxlc.simulate.roofline import Roofline
from jaxlc.simulate.topology import topology

POINTS = "points.jsonl"


class Case(NamedTuple):
    """A model and GPUs."""

    name: str
    topology: str
    make: Callable[[], Config]


def _model(name: str, seq_len: str, **settings) -> Callable[[], Config]:
    """The default config with a model; one document per sequence, except for the packed case."""
    unmasked = {"attention.document_mask": False} | settings
    return lambda: with_settings(load(base_config(None, dict(model=name, seq_len=seq_len))), unmasked)


CASES = (
    Case("1b_32k_1gpu", "h100:1x1", _model("llama3.2-1b", "32K")),
    Case("1b_256k_8gpu", "h100:1x8", _model("llama3.2-1b", "256K")),
    Case("8b_32k_8gpu", "h100:1x8", _model("llama3.1-8b", "32K")),
    Case("8b_128k_8gpu_packed", "h100:1x8", lambda: load(read_config("sft_128k"))),
    Case("8b_256k_8gpu", "h100:1x8", _model("llama3.1-8b", "256K")),
    Case("8b_1m_8gpu", "h100:1x8", _model("llama3.1-8b", "1M")),
    Case("8b_1m_1gpu_lora", "h100:1x1", lambda: load(read_config("1m_1gpu:lora"))),
    Case("8b_1m_64gpu", "h100:8x8", _model("llama3.1-8b", "1M")),
    Case("70b_32k_64gpu", "h100:8x8", _model("llama3.1-70b", "32K")),
    Case("70b_128k_64gpu", "h100:8x8", _model("llama3.1-70b", "128K")),
)


class Result(NamedTuple):
    """Of one case. Seconds are the plan's estimates of compiled steps."""

    case: Case
    num_combinations: int
    num_recommend: int  # compiled by the search
    num_sweep: int  # compiled in total
    recommended: Candidate
    recommended_seconds: float
    best_seconds: float  # of all compiled steps that fit
    formula_errors: list[float]  # formula over compiled time, minus 1

    @property
    def regret(self) -> float:
        """By how much the recommendation is slower than the best of the sweep."""
        return self.recommended_seconds / self.best_seconds - 1


def _variants(layout: Layout) -> list[Layout]:
    """The fastest settings of a layout by rematerialization, offloading and microbatches, without the first."""
    fastest: dict[tuple, Candidate] = {}
    for candidate in layout.candidates:
        memory = candidate.config.memory
        key = (memory.remat, memory.offload, candidate.config.train.gradient_accumulation_steps)
        fastest.setdefault(key, candidate)
    return [Layout(candidates=[candidate], num_too_large=0) for candidate in list(fastest.values())[1:]]


class StoredCompiler:
    """Compiles steps that are not in the file, and returns stored plans for the others."""

    def __init__(self, path: Path, compile_steps: Compile):
        self._path, self._compile = path, compile_steps
        self._stored: dict[str, plan.Plan | str] = {}
        for line in path.read_text().splitlines() if path.exists() else ():
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


def run_case(case: Case, compile_steps: Compile, num_sweep: int, log: Callable[[str], None]) -> Result:
    """The recommendation, and a sweep: the fastest layouts by the formulas, and other settings of the first one.

    It ends when `num_sweep` steps fit.
    """
    config, gpus = case.make(), topology(case.topology)
    result = recommend(config, gpus, compile_steps, roofline=Roofline(), limit_seconds=480, log=log)
    pool = [layout for layout in layouts(config, gpus, Roofline(), MEMORY_MARGIN) if layout.candidates]
    pool.sort(key=lambda layout: layout.candidates[0].time.step_seconds)
    sweep = Search(base=config, goal="fastest", num_best=num_sweep)
    sweep.run([*pool, *_variants(pool[0])], compile_steps, batch_size=1, limit_seconds=1e9, log=log)
    trials = {id(trial.candidate): trial for trial in (*result.search.trials, *sweep.trials)}.values()
    best, best_of_sweep = result.search.best[0], sweep.fitting[0]
    seconds = [x.plan.predicted.step_seconds for x in (best, best_of_sweep)]
    return Result(
        case=case,
        num_combinations=sum(len(layout.candidates) for layout in pool),
        num_recommend=len(result.search.trials),
        num_sweep=len({trial.candidate.name for trial in trials}),
        recommended=best.candidate,
        recommended_seconds=seconds[0],
        best_seconds=min(seconds),
        formula_errors=[x.candidate.time.step_seconds / x.plan.predicted.step_seconds - 1 for x in trials],
    )


def table(results: Sequence[Result]) -> str:
    """Markdown."""
    heads = ("case", "GPUs", "may fit", "compiled", "sweep", "recommended", "s per step", "best of sweep", "slower by",
             "formula error")  # fmt: skip
    lines = [f"| {' | '.join(heads)} |", f"| {' | '.join('---' for _ in heads)} |"]
    for result in results:
        errors = f"{min(result.formula_errors):+.1%} to {max(result.formula_errors):+.1%}"
        cells = (result.case.name, result.case.topology, f"{result.num_combinations:,}", result.num_recommend,
                 result.num_sweep, result.recommended.name, f"{result.recommended_seconds:,.2f}",
                 f"{result.best_seconds:,.2f}", f"{result.regret:.1%}", errors)  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def define_flags(values: flags.FlagValues = flags.FLAGS) -> None:
    flags.DEFINE_list("cases", [case.name for case in CASES], "cases to run", flag_values=values)
    flags.DEFINE_integer("sweep", 8, "number of layouts that fit in the sweep of a case", flag_values=values)
    flags.DEFINE_string("out", "runs/recommendations", "directory of points.jsonl", flag_values=values)


def main(_) -> None:
    values = flags.FLAGS
    runtime.start(RuntimeConfig(num_processes=1))
    out = Path(values.out)
    out.mkdir(parents=True, exist_ok=True)
    unknown = set(values.cases) - {case.name for case in CASES}
    if unknown:
        sys.exit(f"error: invalid --cases={','.join(unknown)}: expected {', '.join(case.name for case in CASES)}")
    results = []
    for case in CASES:
        if case.name in values.cases:
            print(f"{case.name}, {case.topology}", file=sys.stderr, flush=True)
            compiler = StoredCompiler(out / POINTS, compile_in_processes(1))
            log = lambda line: print(f"  {line}", file=sys.stderr, flush=True)
            try:
                results.append(run_case(case, compiler, values.sweep, log))
            except UserError as error:
                sys.exit(f"error: {case.name}: {error}")
    print(table(results))


if __name__ == "__main__":
    define_flags()
    app.run(main)
