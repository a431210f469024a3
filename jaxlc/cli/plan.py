"""usage: jaxlc plan --config=NAME[:VARIANT] --topology=GPU:DOMAINSxGPUS [--config.SECTION.KEY=VALUE
...] [--advise]

Compiles the training step ahead of time, without a GPU, and prints its memory, collectives, kernels
and estimated time. For a config with stages it compiles the step of every stage and prints one
table; --stage=NAME plans one of them. With --prompt_tokens it prints the memory of the KV cache of
`jaxlc generate` instead, and compiles nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxlc.cli.flags import (
    NodeFlags,
    check_output_file,
    progress,
    start_on_cpu,
    target_topology,
    with_transport,
    write_json,
)
from jaxlc.config import Config
from jaxlc.config.command_line import ParsedCommand, run_main
from jaxlc.config.values import Tokens
from jaxlc.core import errors
from jaxlc.core.errors import UserError
from jaxlc.core.text import gib


@dataclass(frozen=True, kw_only=True)
class Flags(NodeFlags):
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


def main(argv: Sequence[str]) -> int:
    """Runs the command line `argv`, program name first; returns the exit status."""
    command_line = " ".join(["jaxlc plan", *argv[1:]])
    return run_main(
        lambda command: _plan(command, command_line), argv, description=__doc__, flags=Flags
    )


def _plan(command: ParsedCommand[Flags], command_line: str) -> int:
    """Plans every stage, prints the result, and writes the output files."""
    flags, stages = command.flags, command.stages
    configs = [with_transport(stage.config, flags.transport) for stage in stages]
    topology = target_topology(flags.topology, configs[0])
    _check_output_files(flags, len(stages))
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
        plans[0].timeline_figure().savefig(flags.timeline)
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


def _check_output_files(flags: Flags, num_stages: int) -> None:
    """Raises UserError for an output file that cannot be written, or not for several stages."""
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
