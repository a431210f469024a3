"""usage: jaxlc recommend --config=NAME[:VARIANT] --topology=GPU:DOMAINSxGPUS
[--config.SECTION.KEY=VALUE ...]

Searches mesh, attention strategy, microbatches and memory settings, without a GPU: compiles
candidates ahead of time (AOT), prints up to three meshes to measure, and writes a config file.
--model instead of --config needs no config:

    jaxlc recommend --model=llama3.1-8b --seq_len=1M --topology=h100:1x8

The same command resumes an interrupted search.
"""

import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from jaxlc.cli.flags import NodeFlags, check_output_file, start_on_cpu, target_topology
from jaxlc.config import load_stages, read_config, with_settings
from jaxlc.config.command_line import ParsedCommand, run_main
from jaxlc.config.files import base_config, set_model
from jaxlc.config.frozen import Stage
from jaxlc.config.settings import defaults
from jaxlc.config.values import Above0, From1
from jaxlc.core.errors import UserError
from jaxlc.core.text import print_to_stderr as log
from jaxlc.core.text import progress_lines
from jaxlc.runtime.worker_processes import Row, default_num_workers
from jaxlc.search import runner, space
from jaxlc.search.ranking import row_text
from jaxlc.search.runner import IsOver

if TYPE_CHECKING:
    from jaxlc.search.best_first import Candidate, Compile
    from jaxlc.search.recommendation import Recommendation


_ANY_MACHINE = {"runtime.simulated_devices": 0, "runtime.num_processes": 1, "runtime.process_id": 0}


@dataclass(frozen=True, kw_only=True)
class Flags(NodeFlags):
    # what is best: the fastest, the cheapest or the fewest GPUs, or the longest sequence that fits
    goal: Literal["fastest", "cheapest", "fewest_gpus", "longest"] = "fastest"
    model: str | None = None  # instead of --config: a preset, a Hugging Face directory or hub id
    # times for packed sequences with these documents, as those of jaxlc plan: corpus, mix, or lengths such as
    # 65536,1024x64 or tree:131072+8x8192. Empty: each sequence is one document.
    document_lengths: str = ""
    seq_len: str | None = None  # sequence length in tokens, such as 131072, 32K or 1M
    search_minutes: Above0[float] = 8.0  # time limit of the command
    # number of concurrent compilations; default: as many as cores and memory allow
    workers: From1[int] | None = None
    out: str = "recommended.py"  # config file to write


def recommend_stages(command: ParsedCommand[Flags], verb: str = "recommend") -> int:
    """Prints a recommendation for each stage, and writes the config file if each has one.

    Args:
      verb: of the command. `init` writes a file that does not depend on the given config, unless that has stages.
    """
    start_seconds = time.monotonic()
    flags, stages, path = command.flags, command.stages, Path(command.flags.out)
    source, model = flags.config, flags.model or ""
    topology = target_topology(flags.topology, stages[0].config)
    check_path(path)
    start_on_cpu()
    from jaxlc.plan.packing_estimates import read_documents
    from jaxlc.search.recommendation import config_source, page, recommend
    from jaxlc.simulate.roofline import from_file
    from jaxlc.simulate.topology import topology as parse_topology

    options = dict(
        devices_per_process=flags.devices_per_process, host_memory_gib=flags.host_memory_gib
    )
    gpus = parse_topology(topology, **options)
    roofline = from_file(flags.constants)
    points = Path("runs") / f"recommend_{Path(command.workdir if source else model).name}"
    results: list[Recommendation] = []
    for number, stage in enumerate(stages, start=1):
        if flags.document_lengths:
            read_documents(stage.config, flags.document_lengths)  # raises an error
        # The devices raise an error here, rather than for every candidate, if the compiler is not
        # installed.
        log(
            f"searching: {stage.name + ', ' if stage.name else ''}{gpus}, {len(gpus.devices)} GPUs, {flags.goal}"
        )
        result = recommend(
            space.unchecked(stage.config, _ANY_MACHINE),
            gpus,
            _compile_in_processes(flags, topology, points),
            goal=flags.goal,
            roofline=roofline,
            batch_size=flags.workers or default_num_workers(),
            end_seconds=start_seconds + 60 * flags.search_minutes * number / len(stages),
            log=log,
        )
        results.append(result)
        if stage.name:
            print(f"STAGE {stage.name}")
        print(page(result, flags.price_per_gpu_hour, roofline.pair_spread), end="\n\n")
    choices = [result.choice for result in results if result.choice]
    if len(choices) < len(stages):
        return 1
    configs = [
        with_settings(stage.config, settings | {"runtime.simulated_devices": 0})
        for stage, (settings, _) in zip(stages, choices)
    ]
    texts = (
        ": ".join(filter(None, (stage.name, text))) for stage, (_, text) in zip(stages, choices)
    )
    title = f"Recommended for {gpus}, {flags.goal}: {'; '.join(texts)}."
    kept = source if verb == "recommend" or stages[0].name else ""
    base = _base(kept, model, stages)
    path.write_text(config_source(kept, model, title, base, configs, verb), encoding="utf-8")
    texts = "" if verb == "init" else " --config.data.sources=TEXTS"
    print(f"wrote {path}: jaxlc plan --config={path}; jaxlc train --config={path}{texts}")
    return 0


def check_path(path: Path) -> None:
    """Checks that the config file can be written.

    Raises:
      UserError: the file cannot be written, or this command did not write the existing file.
    """
    if path.suffix != ".py":
        raise UserError(
            f"invalid --out={path}: expected the name of a config file, such as recommended.py"
        )
    check_output_file("out", path)
    if not path.exists():
        return
    from jaxlc.search.recommendation import MARK

    if MARK not in path.read_text(errors="replace"):
        raise UserError(
            f"--out={path}: the file exists, and this command did not write it; choose another name"
        )


def _compile_in_processes(flags: Flags, topology: str, points: Path) -> "Compile":
    """Compiles each candidate in a process of its own; results are rows of points.jsonl, as those
    of a sweep.
    """
    start_seconds = time.monotonic()

    def compile_candidates(candidates: "Sequence[Candidate]", is_over: IsOver) -> list[Row]:
        with progress_lines(f"compiling {len(candidates)} combinations", log=log):
            rows = runner.estimate(
                candidates,
                topology,
                flags.constants,
                out=points,
                num_workers=len(candidates),
                log=lambda line: None,
                is_over=is_over,
                host_memory_gib=flags.host_memory_gib,
                devices_per_process=flags.devices_per_process,
                document_lengths=flags.document_lengths or None,
            )
        for candidate, row in zip(candidates, rows, strict=True):
            name = f"{candidate.gpus} {space.name_of(candidate.config)}"
            log(f"{time.monotonic() - start_seconds:5.0f} s  {name}: {row_text(row)}")
        return rows

    return compile_candidates


def _base(source: str, model: str, stages: Sequence[Stage]) -> Sequence[Stage]:
    """The given config, without overrides of the command line; of its stages those that
    --stage=NAME selects.
    """
    config = read_config(source) if source else defaults()
    if model:
        set_model(config, model)
    names = [stage.name for stage in stages]
    return [stage for stage in load_stages(config) if stage.name in names]


# (argv, program name first) -> exit status
main = functools.partial(
    run_main,
    recommend_stages,
    description=__doc__,
    flags=Flags,
    base=base_config,
    interrupted="interrupted; compiled steps are kept, and the same command resumes",
)
