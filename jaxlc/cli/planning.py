"""The verbs that choose and plan a run without its GPUs: `plan`, `sweep`, `recommend` and `init`."""

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ml_collections import ConfigDict

from jaxlc.cli.flags import (
    NodeFlags,
    TargetFlags,
    check_output_file,
    progress,
    start_on_cpu,
    target_topology,
)
from jaxlc.config import (
    AttentionConfig,
    Config,
    MemoryConfig,
    MeshConfig,
    Stage,
    defaults,
    load_stages,
    read_config,
    unchecked,
    with_settings,
)
from jaxlc.config.command_line import ParsedCommand
from jaxlc.config.files import base_config, set_model
from jaxlc.config.models.hub import DATASET_PREFIX
from jaxlc.config.models.presets import model_name
from jaxlc.config.settings import hint_at
from jaxlc.config.values import Above0, From1, Tokens, typed
from jaxlc.core import CONTEXT, TENSOR, UserError, errors, gib, mesh_text, progress_lines
from jaxlc.core import print_to_stderr as log
from jaxlc.core.axes import FSDP
from jaxlc.core.files import local_path, replacing, write_json
from jaxlc.core.processes import Row, default_num_workers, run_in_processes
from jaxlc.search import runner, space
from jaxlc.search.ranking import Ranking, ranked, row_text
from jaxlc.search.runner import IsOver
from jaxlc.search.space import Point

if TYPE_CHECKING:
    from jaxlc.search.best_first import Candidate, Compile
    from jaxlc.search.recommendation import Recommendation


@dataclass(frozen=True, kw_only=True)
class PlanFlags(NodeFlags):
    """usage: jaxlc plan --config=NAME[:VARIANT] --topology=GPU:DOMAINSxGPUS [--config.SECTION.KEY=VALUE
    ...] [--advise]

    Compiles the training step ahead of time, without a GPU, and prints its memory, collectives, kernels
    and estimated time. For a config with stages it compiles the step of every stage and prints one
    table; --stage=NAME plans one of them. With --prompt_tokens it prints the memory of the KV cache of
    `jaxlc generate` instead, and compiles nothing.
    """

    fixed: ClassVar[dict[str, Any]] = {"runtime.simulated_devices": 0}

    # short for --config.runtime.transport: auto, nccl, nvshmem, symmetric or peer
    transport: str = ""
    json: str = ""  # output file for the plan as JSON, for jaxlc.plan.Plan.from_json
    html: str = ""  # output file for the plan as a page with figures, such as plan.html
    # output file for a plot of one layer's estimated timeline, such as timeline.png
    timeline: str = ""
    # also compile the evaluation of held-out sequences and print its peak memory
    evaluation: bool = False
    # estimate packed sequences too: corpus, mix, or lengths: 65536,1024x64,tree:8192+4x512
    document_lengths: str = ""
    # print the memory of generation after a prompt of this length, such as 1M
    prompt_tokens: Tokens | None = None
    # if the step does not fit, compile it with changed settings until some fit
    advise: bool = False


def run_plan(command: ParsedCommand[PlanFlags]) -> int:
    """Plans every stage, prints the result, and writes the output files."""
    command_line = " ".join(["jaxlc plan", *command.arguments])
    flags = command.flags
    stages = command.stages
    configs = [stage.config for stage in stages]
    if flags.transport:
        configs = [with_settings(x, {"runtime.transport": flags.transport}) for x in configs]
    topology = target_topology(flags.topology, configs[0])
    num_stages = len(stages)
    for name, path in (("json", flags.json), ("html", flags.html), ("timeline", flags.timeline)):
        if not path:
            continue
        check_output_file(name, path, is_image=name == "timeline")
        if name != "json":
            errors.require("matplotlib", f"--{name}")
            if num_stages > 1:
                raise UserError(
                    f"unsupported: --{name} for {num_stages} stages; choose one with --stage=NAME"
                )
    start_on_cpu()
    if flags.prompt_tokens:
        _print_generation_memory(configs[0], topology, flags.prompt_tokens)
        return 0
    from jaxlc.plan import plan, report
    from jaxlc.plan.result import StagePlan, StagesPlan

    with progress() as starting:
        plans = [
            plan(
                config,
                topology,
                devices_per_process=flags.devices_per_process,
                host_memory_gib=flags.host_memory_gib,
                advise=flags.advise,
                evaluation=flags.evaluation,
                constants=flags.constants,
                document_lengths=flags.document_lengths,
                starting=starting,
            )
            for config in configs
        ]
    result = StagesPlan(
        stages=tuple(
            StagePlan(name=stage.name, num_steps=stage.num_steps, plan=stage_plan)
            for stage, stage_plan in zip(stages, plans)
        ),
        price_per_gpu_hour=flags.price_per_gpu_hour,
    )
    if len(stages) == 1:
        print(report.page(plans[0], advise_command=f"{command_line} --advise"))
    if len(stages) > 1 or flags.price_per_gpu_hour is not None:
        print(result.table(command_line))
    if flags.json:
        write_json(flags.json, result.to_json() if len(stages) > 1 else plans[0].to_json())
    if flags.html:
        plans[0].save(flags.html, result.totals())
    if flags.timeline:
        plans[0].timeline_figure().savefig(local_path(flags.timeline))
    return 0


def _print_generation_memory(config: Config, topology: str, prompt_tokens: int) -> None:
    """The bytes of a prompt and its answer in the KV cache, from the shapes of the arrays."""
    from jaxlc.generation.generate_text import generation_memory
    from jaxlc.plan.result import on_gpus
    from jaxlc.simulate.topology import make_mesh
    from jaxlc.simulate.topology import topology as parse_topology
    from jaxlc.step.step import build_step

    gpus = parse_topology(topology)
    memory = generation_memory(
        build_step(on_gpus(config, gpus), make_mesh(gpus, config.mesh)), 1, prompt_tokens
    )
    print(
        f"generation on {gpus}, GiB per GPU, without temporaries; one sequence of {prompt_tokens:,} tokens"
    )
    print(f"  KV cache  {gib(memory.cache_bytes):>9}")
    print(f"  weights   {gib(memory.weights_bytes):>9}")


@dataclass(frozen=True, kw_only=True)
class SweepFlags(TargetFlags):
    """usage: jaxlc sweep --config=NAME[:VARIANT] --topology=GPU:DOMAINSxGPUS
    [--config.SECTION.KEY=VALUE ...]

    Compiles the training step ahead of time (AOT) for every mesh of the target GPUs, which need not be
    attached, and ranks the meshes by estimated tokens/s. The same command resumes an interrupted sweep.
    With --run, the steps are measured on the devices of this machine instead, one configuration at a
    time:

        jaxlc sweep --config=256k:mini --run --axes=context,tensor
    """

    interrupted = "interrupted; finished points are kept, and the same command resumes"

    # mesh axes to vary; the others keep the size of the config
    axes: tuple[str, ...] = (CONTEXT, TENSOR, FSDP)
    # attention strategies to compare, such as ring,hybrid; default: the config's
    strategies: tuple[str, ...] = ()
    # rematerialization policies to compare, such as attention,full; default: the config's
    remat: tuple[str, ...] = ()
    # sequence lengths to compare, such as 64K,262144; default: the config's
    seq_len: tuple[Tokens, ...] = ()
    # transports to compare, such as nccl,nvshmem; default: the config's
    transports: tuple[str, ...] = ()
    # number of concurrent compilations; default: as many as cores and memory allow
    workers: From1[int] | None = None
    out: str = ""  # directory for points, ranking and plots; default: runs/sweep_NAME
    # measure on the devices of this machine, or on config.runtime.simulated_devices
    run: bool = False


def run_sweep(command: ParsedCommand[SweepFlags]) -> int:
    """Prints the ranking and writes it to --out; returns the exit status, 1 if no point completed."""
    flags = command.flags
    config = command.config
    out = local_path(flags.out or f"runs/sweep_{Path(command.workdir).name}")
    ranking = _measured(config, flags, out) if flags.run else estimated(config, flags, out)
    print(ranking)
    print(*ranking.write(out), sep=", ")
    if ranking.rows[0]["status"] != "done":
        return 1
    print(f"first: {ranking.rows[0]['overrides']}")
    return 0


def estimated(config: Config, flags: SweepFlags, out: Path) -> Ranking:
    """AOT-compiles every point for --topology and ranks them by estimated speed."""
    topology = target_topology(flags.topology, config)
    start_on_cpu()
    from jaxlc.simulate.roofline import from_file
    from jaxlc.simulate.topology import topology as parse_topology

    roofline = from_file(flags.constants)  # an invalid file is reported once, not for every point
    gpus = parse_topology(topology)
    points = grid(unchecked(config, {"runtime.topology": topology}), gpus.num_gpus, flags)
    log(f"starting the GPU compiler for {topology}")
    _ = gpus.devices  # a missing compiler is reported once, too
    workers = flags.workers or default_num_workers()
    rows = runner.estimate(points, topology, flags.constants, out=out, num_workers=workers)
    return Ranking(tuple(ranked(rows)), pair_spread=roofline.pair_spread)


def _measured(config: Config, flags: SweepFlags, out: Path) -> Ranking:
    """Measures every point on the devices of this machine, one at a time, and ranks them by speed."""
    for name in ("topology", "workers", "constants"):
        if value := getattr(flags, name):
            raise UserError(
                f"--{name}={value} is unsupported with --run, which measures on this machine; remove one"
            )
    log("starting JAX")
    # In another process: JAX in this one would reserve the memory of the devices.
    ((_, local),) = run_in_processes([config], runner.local_devices, num_workers=1)
    if local["status"] != "done":
        raise UserError(f"JAX does not start: {local['reason']}")
    devices = f"{local['num_devices']} x {local['device']}"
    about: Row = dict(figures="measured", topology=devices, model=model_name(vars(config.model)))
    points = grid(config, local["num_devices"], flags)
    return Ranking(
        tuple(ranked(runner.run(points, runner.measure_point, about=about, out=out, num_workers=1)))
    )


def grid(config: Config, num_devices: int, flags: SweepFlags) -> list[Point]:
    """All combinations of the values in the flags; logs the number of skipped duplicates.

    With context=1 all strategies compile to the same program, so only the first is kept. Hybrid is skipped where
    context has no divisor that splits it into an all-to-all group and a ring: it would equal ulysses or ring. The
    global batch size does not change. Gradient accumulation steps follow from the number of replicas, so that the
    microbatch per replica stays the same. Points that the config checks reject are included.

    Raises:
      UserError: an unknown name; no mesh of these axes has `num_devices` devices, or none of them splits context for
        hybrid.
    """
    for axis in flags.axes:
        hint_at(f"mesh.{axis}")  # raises for an unknown one
    meshes = list(space.meshes(config, num_devices, flags.axes))
    if not meshes:
        fixed = mesh_text(
            {axis: size for axis, size in vars(config.mesh).items() if axis not in flags.axes}
        )
        raise UserError(
            f"no mesh of {num_devices} devices: --axes={','.join(flags.axes)} cannot complete {fixed};"
            " add axes to --axes"
        )
    train = config.train
    replicas = config.mesh.num_replicas
    sequences = max(1, train.global_batch_size // (train.gradient_accumulation_steps * replicas))
    if config.runtime.simulated_devices:
        config = unchecked(config, {"runtime.simulated_devices": num_devices})
    names = _choices("strategies", flags.strategies, config, "attention.strategy")
    choices = {
        "data.seq_len": list(dict.fromkeys(flags.seq_len or (config.data.seq_len,))),
        "runtime.transport": _choices("transports", flags.transports, config, "runtime.transport"),
        "memory.remat": _choices("remat", flags.remat, config, "memory.remat"),
    }
    points = [
        Point(
            base=config,
            settings=space.mesh_settings(mesh)
            | strategy
            | dict(zip(choices, values))
            | space.batch_settings(config, mesh, sequences),
        )
        for values in itertools.product(*choices.values())
        for mesh in meshes
        for strategy in space.strategies(config, mesh, names, max_degrees=1)
    ]
    if not points:
        raise UserError(
            "no points: hybrid needs a context axis that splits into Ulysses ranks and a ring, such as context=4, and a"
            " Ulysses degree that divides the heads; add axes to --axes, or strategies to --strategies"
        )
    num_duplicates = len(meshes) * len(names) * math.prod(map(len, choices.values())) - len(points)
    log(
        f"{len(points)} points"
        + (f"; {num_duplicates} duplicate configurations skipped" if num_duplicates else "")
    )
    return points


def _choices(flag: str, names: Sequence[str], config: Config, path: str) -> list[str]:
    """The values of a setting that a flag names; without any, the value of the config."""
    return [
        typed(f"--{flag}", name, hint_at(path))
        for name in dict.fromkeys(names or [space.value_of(config, path)])
    ]


@dataclass(frozen=True, kw_only=True)
class RecommendFlags(NodeFlags):
    """usage: jaxlc recommend --config=NAME[:VARIANT] --topology=GPU:DOMAINSxGPUS
    [--config.SECTION.KEY=VALUE ...]

    Searches mesh, attention strategy, microbatches and memory settings, without a GPU: compiles
    candidates ahead of time (AOT), prints up to three meshes to measure, and writes a config file.
    --model instead of --config needs no config:

        jaxlc recommend --model=llama3.1-8b --seq_len=1M --topology=h100:1x8

    The same command resumes an interrupted search.
    """

    base = base_config
    interrupted = "interrupted; compiled steps are kept, and the same command resumes"

    # what is best: the fastest, the cheapest or the fewest GPUs, or the longest sequence that fits
    goal: Literal["fastest", "cheapest", "fewest_gpus", "longest"] = "fastest"
    model: str | None = None  # instead of --config: a preset, a Hugging Face directory or hub id
    # times for packed sequences with these documents, as in jaxlc plan: corpus, mix, or lengths such as
    # 65536,1024x64 or tree:131072+8x8192. Empty: each sequence is one document.
    document_lengths: str = ""
    seq_len: str | None = None  # sequence length in tokens, such as 131072, 32K or 1M
    search_minutes: Above0[float] = 8.0  # time limit of the command
    # number of concurrent compilations; default: as many as cores and memory allow
    workers: From1[int] | None = None
    out: str = "recommended.py"  # config file to write


def run_recommend(command: ParsedCommand[RecommendFlags]) -> int:
    """Prints a recommendation for each stage, and writes the config file if each has one. The file
    of `init` does not depend on the given config, unless the config has stages.
    """
    start_seconds = time.monotonic()
    flags = command.flags
    stages = command.stages
    path = local_path(command.flags.out)
    verb = "init" if isinstance(flags, InitFlags) else "recommend"
    source, model = flags.config, flags.model or ""
    topology = target_topology(flags.topology, stages[0].config)
    check_path(path)
    start_on_cpu()
    if isinstance(flags, InitFlags):
        _note_missing(flags.data)
    from jaxlc.plan.packing_estimates import read_documents
    from jaxlc.plan.result import ANY_MACHINE
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
        documents = None
        if flags.document_lengths:  # raises an error
            documents = read_documents(stage.config, flags.document_lengths).fingerprint
        # The devices raise an error here, rather than for every candidate, if the compiler is not
        # installed.
        log(
            f"searching: {stage.name + ', ' if stage.name else ''}{gpus}, {len(gpus.devices)} GPUs, {flags.goal}"
        )
        result = recommend(
            unchecked(stage.config, ANY_MACHINE),
            gpus,
            _compile_in_processes(flags, topology, points, documents),
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
    with replacing(path) as out:
        out.write(config_source(kept, model, title, base, configs, verb).encode())
    texts = "" if verb == "init" else " --config.data.sources=TEXTS"
    print(f"wrote {path}: jaxlc plan --config={path}; jaxlc train --config={path}{texts}")
    return 0


def _note_missing(data: str) -> None:
    """Prints a warning before the search if files of --data are not here or cannot be used; they may
    be on another machine.
    """
    from jaxlc.data.texts.sources import PHONE_BOOK, list_files

    names = [x for x in data.split(",") if x not in ("", PHONE_BOOK) and "://" not in x]
    try:
        list_files([x for x in names if not x.startswith(DATASET_PREFIX)], "--data")
    except UserError as error:
        log(f"warning: {error}")


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


def _compile_in_processes(
    flags: RecommendFlags, topology: str, points: Path, documents: str | None
) -> "Compile":
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
                documents=documents,
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


def recipe_config(config: ConfigDict | None, flags: Mapping[str, Any]) -> ConfigDict | None:
    """The recipe with the model and the data of the flags, and the defaults of what the search chooses.

    Raises:
      UserError: there is neither a recipe nor a model, or the recipe has several sources.
    """
    config = base_config(config, flags)
    if config is None:
        raise UserError("no model is given: use --model=NAME, or --config=RECIPE")
    config.mesh.update(vars(MeshConfig()))
    config.memory.update(vars(MemoryConfig()))
    attention = AttentionConfig()
    config.attention.update(strategy=attention.strategy, ulysses_degree=attention.ulysses_degree)
    if paths := tuple(filter(None, flags["data"].split(","))):
        data = config.data
        sources = [*data.mixture]
        if config.rollouts.source == "model":
            config.rollouts.prompts = paths
        elif data.traces or config.posttrain.loss:
            data.update(sources=(), traces=paths)
        elif len(sources) > 1:
            names = " ".join(f"--config.data.mixture.{name}.paths=PATHS" for name in sources)
            raise UserError(f"unsupported: --data for a recipe with several sources; use {names}")
        elif sources:
            data.mixture[sources[0]].paths = paths
        else:
            data.sources = paths
    return config


@dataclass(frozen=True, kw_only=True)
class InitFlags(RecommendFlags):
    """usage: jaxlc init --config=RECIPE --model=MODEL --data=PATHS --topology=GPU:DOMAINSxGPUS
    [--config.SECTION.KEY=VALUE ...]

    Writes a config file for a model, data and GPUs, with a comment on each setting: the settings of
    the recipe, and mesh, attention strategy, microbatches and memory as `jaxlc recommend` finds
    them. Without --config, it is a config to train on texts.

        jaxlc init --config=sft_128k --model=Qwen/Qwen3-8B --data=chats.jsonl --topology=h100:1x8
    """

    base = recipe_config

    model: str | None = None  # a preset, a Hugging Face directory or hub id; also with --config
    # files, directories or glob patterns, separated by commas; of traces or prompts for a recipe that trains on these
    data: str = ""
    out: str = "my_config.py"  # config file to write


run_init = run_recommend
