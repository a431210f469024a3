"""usage: jaxlc generate SOURCE --prompt=TEXT [--max_tokens=N] [--temperature=T]

Continues a prompt with the model of a run or of a Hugging Face directory, on all devices of a mesh.
`jaxlc plan --prompt_tokens=TOKENS` prints the memory of a KV cache.
"""

import functools
import sys
from dataclasses import dataclass

import jaxlc
from jaxlc.cli.flags import SamplingFlags, mesh_sizes, sampling_settings
from jaxlc.config.command_line import ParsedCommand, run_main
from jaxlc.config.values import From1
from jaxlc.core.errors import UserError, reason_of
from jaxlc.core.files import local_path


@dataclass(frozen=True, kw_only=True)
class Flags(SamplingFlags):
    positional = ("source",)

    source: str  # workdir of a run, Hugging Face directory or hub id
    prompt: str | None = None  # text to continue
    prompt_file: str = ""  # file with the text to continue; -: standard input
    max_tokens: From1[int] = 256  # largest number of new tokens
    stop: list[str] | None = None  # string that ends the text; may be repeated
    chat: bool = False  # the prompt is a message of a user in the chat template of the model
    chunk_tokens: int = 0  # prompt tokens computed at once; 0: 2048 per rank


def _generate(command: ParsedCommand[Flags]) -> int:
    flags = command.flags
    if (flags.prompt is None) == (not flags.prompt_file):
        raise UserError("give one prompt: --prompt=TEXT or --prompt_file=FILE")
    if flags.simulated_devices:
        jaxlc.start(simulated_devices=flags.simulated_devices)
    text = flags.prompt if flags.prompt is not None else _read(flags.prompt_file)
    generation = jaxlc.generate(
        flags.source,
        text,
        max_tokens=flags.max_tokens,
        **sampling_settings(flags),
        stop=flags.stop or [],
        step=flags.step,
        mesh=mesh_sizes(flags.mesh),
        chunk_tokens=flags.chunk_tokens,
        chat=flags.chat,
        chat_template=flags.chat_template,
        adapter=flags.adapter,
        stream=lambda _, new: print(new, end="", flush=True),
    )
    print()
    print(
        f"prompt {generation.num_prompt_tokens:,} tokens, new {len(generation.tokens):,} tokens,"
        f" ended by {generation.finish_reason}",
        file=sys.stderr,
    )
    return 0


def _read(path: str) -> str:
    try:
        content = sys.stdin.buffer.read() if path == "-" else local_path(path).read_bytes()
    except OSError as error:
        raise UserError(f"cannot read --prompt_file={path} ({reason_of(error)})") from error
    return content.decode(errors="replace")


# (argv, program name first) -> exit status
main = functools.partial(run_main, _generate, description=__doc__, flags=Flags)
