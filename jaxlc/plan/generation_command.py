"""usage: jaxlc generate --plan --config=NAME[:VARIANT] --topology=GPU:DOMAINSxGPUS [--prompt_tokens=TOKENS]

Compiles generation ahead of time, without a GPU, and prints the memory and the time of a prompt, and of decoding.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxlc import plan
from jaxlc.config.base_config import base_config
from jaxlc.config.command_line import ParsedCommand, run_main
from jaxlc.config.ranges import From1
from jaxlc.config.values import Tokens
from jaxlc.plan.output_files import check_output_file, write_json
from jaxlc.plan.terminal import TargetFlags, progress, start_on_cpu, target_topology, with_transport


@dataclass(frozen=True, kw_only=True)
class Flags(TargetFlags):
    plan: bool = True  # compile generation ahead of time instead of generating text
    model: str | None = None  # instead of --config: a preset, a Hugging Face directory or hub id
    transport: str = ""  # short for --config.runtime.transport: auto, nccl, nvshmem, symmetric or peer
    prompt_tokens: Tokens | None = None  # tokens of each prompt, such as 131072 or 1M; default: config.data.seq_len
    new_tokens: From1[int] = 256  # new tokens of each prompt
    batch_size: From1[int] = 1  # prompts that are generated together
    cache_dtype: str = ""  # dtype of the KV cache, bf16, fp16 or fp32; default: the compute dtype
    chunk_tokens: int = 0  # prompt tokens computed at once; 0: 2048 per context rank
    json: str = ""  # output file for the plan as JSON


def main(argv: Sequence[str]) -> int:
    """Runs the command line `argv`, program name first; returns the exit status, 2 after a UserError."""
    return run_main(_plan_generation, argv, description=__doc__, flags=Flags, base=base_config)


def _plan_generation(command: ParsedCommand[Flags]) -> int:
    flags = command.flags
    config = with_transport(command.config, flags.transport)
    topology = target_topology(flags.topology, config)
    if flags.json:
        check_output_file("json", flags.json)
    start_on_cpu()
    with progress() as starting:
        result = plan.plan_generation(
            config,
            topology,
            prompt_tokens=flags.prompt_tokens or config.data.seq_len,
            new_tokens=flags.new_tokens,
            batch_size=flags.batch_size,
            cache_dtype=flags.cache_dtype,
            chunk_tokens=flags.chunk_tokens,
            constants=flags.constants,
            starting=starting,
        )
    print(result)
    if flags.json:
        write_json(flags.json, result.to_json())
    return 0
