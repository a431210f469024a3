"""usage: jaxlc plan --config=NAME[:VARIANT] --topology=GPU:DOMAINSxGPUS [--config.SECTION.KEY=VALUE ...] [--advise]

Compiles the training step ahead of time, without a GPU, and prints its memory, collectives, kernels and estimated time.
For a config with stages it compiles the step of every stage and prints one table; --stage=NAME plans one of them.

    jaxlc plan --config=64k:h100 --prompt-tokens=1M --generate

compiles generation instead and prints the memory and the time of a prompt, and of decoding. `jaxlc recommend` searches
mesh, strategy and memory settings.
"""

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from jaxlc import plan, runtime
from jaxlc.config import Config, RuntimeConfig, transport_settings, with_settings
from jaxlc.config.base_config import base_config
from jaxlc.config.command_line import ParsedCommand, run_main
from jaxlc.config.values import parse_length
from jaxlc.core import extras
from jaxlc.core.errors import UserError
from jaxlc.plan.output_files import check_output_file

_FLAGS = {
    "stage": "name of one stage to plan in detail, for a config with stages",
    "price-per-gpu-hour": "price of one GPU for one hour, in any currency; prints the cost of the run",
    "topology": "target GPUs, NVLink domains x GPUs per domain: h100:8x8 (default: config.runtime.topology)",
    "transport": "short for --config.runtime.transport: auto, nccl, nvshmem, symmetric or peer",
    "devices-per-process": "GPUs per process (default: 1)",
    "host-memory-gib": "host memory of one node in GiB (default: a typical value for these GPUs)",
    "json": "output file for the plan as JSON, for jaxlc.plan.Plan.from_json",
    "html": "output file for the plan as a page with figures, such as plan.html",
    "timeline": "output file for a plot of one layer's estimated timeline, such as timeline.png",
    "constants": "JSON file of measured efficiencies and latencies (default: those of jaxlc/core/hardware.py)",
    "evaluation": "also compile the evaluation of held-out sequences and print its peak memory",
    "document-lengths": "estimate packed sequences too: corpus, mix, or lengths in tokens such as 65536,1024x64",
    "generate": "plan generation instead of training: memory and time of prefill and decoding",
    "prompt-tokens": "with --generate: tokens of each prompt, such as 131072 or 1M (default: config.data.seq_len)",
    "new-tokens": "with --generate: new tokens of each prompt (default: 256)",
    "batch-size": "with --generate: prompts that are generated together (default: 1)",
    "cache-dtype": "with --generate: dtype of the KV cache, bf16, fp16 or fp32 (default: the compute dtype)",
    "chunk-tokens": "with --generate: prompt tokens computed at once (default: 2048 per context rank)",
    "model": "with --generate, instead of --config: a preset, a Hugging Face directory or hub id",
    "advise": "if the step does not fit, compile it with changed settings until some fit",
}
_SWITCHES = ("advise", "evaluation", "generate")
_GENERATION_FLAGS = ("prompt-tokens", "new-tokens", "batch-size", "cache-dtype", "chunk-tokens")
_TRAINING_FLAGS = (  # not with --generate
    "price-per-gpu-hour", "devices-per-process", "host-memory-gib", "html", "timeline", "evaluation",
    "document-lengths", "advise",
)  # fmt: skip


def main(command: ParsedCommand) -> int:
    """Runs the command. The exit status is 0 whether the step fits or not; the page and the JSON have the verdict.

    It is 130 after Ctrl-C.
    """
    try:
        return _run(command)
    except KeyboardInterrupt:
        print("interrupted; no file was written", file=sys.stderr)
        return 130


def _run(command: ParsedCommand) -> int:
    flags, stages = command.extra, command.stages
    if flags["transport"] is not None:
        settings = transport_settings(flags["transport"])
        stages = [dataclasses.replace(stage, config=with_settings(stage.config, settings)) for stage in stages]
    name = flags["topology"] or stages[0].config.runtime.topology
    _check_flags(flags, name, len(stages))
    _start_on_cpu()
    if flags["generate"] is not None:
        return _plan_generation(flags, stages[0].config, name)
    from jaxlc.plan import report
    from jaxlc.plan.stage_table import StagePlan, StagesPlan

    price = _positive(flags, "price-per-gpu-hour")
    with _progress() as starting:
        plans = [
            plan.plan(
                stage.config,
                name,
                devices_per_process=_whole(flags, "devices-per-process", 1),
                host_memory_gib=_positive(flags, "host-memory-gib"),
                advise=flags["advise"] is not None,
                evaluation=flags["evaluation"] is not None,
                constants=flags["constants"] or "",
                document_lengths=flags["document-lengths"] or "",
                starting=starting,
            )
            for stage in stages
        ]
    result = StagesPlan(
        stages=tuple(
            StagePlan(name=stage.name, num_steps=stage.num_steps, plan=stage_plan)
            for stage, stage_plan in zip(stages, plans)
        ),
        price_per_gpu_hour=price,
    )
    command_line = " ".join(["jaxlc plan", *sys.argv[1:]])
    if len(stages) == 1:
        print(report.page(plans[0], advise_command=f"{command_line} --advise"))
    if len(stages) > 1 or price is not None:
        print(result.table(command_line))
    if flags["json"]:
        values = result.to_json() if len(stages) > 1 else plans[0].to_json()
        Path(flags["json"]).write_text(json.dumps(values, indent=1) + "\n")
    if flags["html"]:
        plans[0].save(flags["html"])
    if flags["timeline"]:
        plans[0].timeline_figure().savefig(flags["timeline"])
    return 0


def _plan_generation(flags: Mapping[str, str | None], config: Config, topology: str) -> int:
    """Runs the command with --generate."""
    length = flags["prompt-tokens"]
    with _progress() as starting:
        result = plan.plan_generation(
            config,
            topology,
            prompt_tokens=config.data.seq_len if length is None else parse_length(length, "prompt-tokens"),
            new_tokens=_whole(flags, "new-tokens", 256),
            batch_size=_whole(flags, "batch-size", 1),
            cache_dtype=flags["cache-dtype"] or "",
            chunk_tokens=_whole(flags, "chunk-tokens", 0),
            constants=flags["constants"] or "",
            starting=starting,
        )
    print(result)
    if flags["json"]:
        Path(flags["json"]).write_text(json.dumps(result.to_json(), indent=1) + "\n")
    return 0


def _check_flags(flags: Mapping[str, str | None], topology: str, num_stages: int) -> None:
    """Raises UserError for a missing topology, an invalid number, or an output file that cannot be written."""
    if flags["model"] is not None and flags["generate"] is None:
        raise UserError(f"--model={flags['model']} is a flag of --generate and of jaxlc recommend; use --config=NAME")
    if not topology:
        raise UserError("no topology: pass target GPUs, such as --topology=h100:8x8")
    _whole(flags, "devices-per-process", 1, least=1)
    is_generation = flags["generate"] is not None
    unused = _TRAINING_FLAGS if is_generation else _GENERATION_FLAGS
    for flag in unused:
        if flags[flag] is not None:
            raise UserError(f"unsupported: --{flag} {'with' if is_generation else 'without'} --generate")
    if is_generation and num_stages > 1:
        raise UserError(f"unsupported: --generate for {num_stages} stages; choose one with --stage=NAME")
    for flag in ("json", "html", "timeline"):
        if flags[flag]:
            check_output_file(flag, flags[flag], is_image=flag == "timeline")
    for flag in ("html", "timeline"):
        if flags[flag]:
            extras.require("matplotlib", f"--{flag}")
            if num_stages > 1:
                raise UserError(f"unsupported: --{flag} for {num_stages} stages; choose one with --stage=NAME")


def _whole(flags: Mapping[str, str | None], name: str, default: int, *, least: int = 0) -> int:
    """The whole number of a flag, at least `least`; `default` if it is not given."""
    text = flags[name]
    if text is not None and not (text.isdecimal() and int(text) >= least):
        limit = f", at least {least}" if least else ""
        raise UserError(f"invalid --{name}={text}: expected a whole number{limit}")
    return default if text is None else int(text)


def _positive(flags: Mapping[str, str | None], name: str) -> float | None:
    """The positive number of a flag; None if it is not given."""
    text = flags[name]
    if text is None:
        return None
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise UserError(f"invalid --{name}={text}: expected a positive number")
    return number


def _start_on_cpu() -> None:
    """Starts JAX on the CPU, whether or not there are GPUs, and without XLA's log messages about them."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # errors are raised as exceptions
    runtime.start(RuntimeConfig(num_processes=1))


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Yields a function that shows what is compiled, on stderr: a spinner in a terminal, plain lines elsewhere."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task("starting", total=None)

        def starting(description: str) -> None:
            bars.reset(task, description=f"compiling {description}")
            if not console.is_terminal:
                console.print(f"compiling {description} ...", markup=False)

        yield starting


def run(argv: Sequence[str]) -> int:
    """Runs the command line `argv`, program name first; returns the exit status."""
    if any(arg.lstrip("-").partition("=")[0] == "recommend" for arg in argv[1:]):
        print("error: --recommend is a command: use jaxlc recommend, with the same flags", file=sys.stderr)
        return 2
    return run_main(main, argv, description=__doc__, extra_flags=_FLAGS, switches=_SWITCHES, base=base_config)


if __name__ == "__main__":
    sys.exit(run(sys.argv))
