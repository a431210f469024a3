"""Continues a prompt with the model of a run or of a Hugging Face directory, on all devices of a mesh."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import jaxlc
from jaxlc.core.errors import UserError, reason_of


def main(argv: Sequence[str]) -> int:
    """Runs the command line `argv`, program name first; returns the exit status, 2 after a UserError."""
    parser = argparse.ArgumentParser(prog="jaxlc generate", description=__doc__)
    parser.add_argument("source", metavar="SOURCE", help="workdir of a run, or a Hugging Face directory")
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", help="text to continue")
    prompt.add_argument("--prompt_file", help="file with the text to continue; -: standard input")
    parser.add_argument("--max_tokens", type=int, default=256, help="largest number of new tokens; default: 256")
    parser.add_argument("--temperature", type=float, default=0.0, help="0, the default: greedy")
    parser.add_argument("--top_p", type=float, default=1.0, help="sample from the likeliest tokens of this probability")
    parser.add_argument("--stop", action="append", default=[], help="string that ends the text; may be repeated")
    parser.add_argument("--chat", action="store_true", help="the prompt is a message of a user in the chat template")
    parser.add_argument("--seed", type=int, default=0, help="of random sampling; default: 0")
    parser.add_argument("--step", type=int, help="checkpoint to use; default: the latest")
    parser.add_argument("--mesh", help="sizes of mesh axes, such as context=4,tensor=2; default: the mesh of the run")
    parser.add_argument("--chunk_tokens", type=int, default=0, help="prompt tokens computed at once; 0: 2048 per rank")
    parser.add_argument("--simulated_devices", type=int, default=0, help="number of CPU devices to simulate")
    flags = parser.parse_args(argv[1:])
    try:
        if flags.simulated_devices:
            jaxlc.start(simulated_devices=flags.simulated_devices)
        text = flags.prompt if flags.prompt is not None else _read(flags.prompt_file)
        generation = jaxlc.generate(
            flags.source,
            text,
            max_tokens=flags.max_tokens,
            temperature=flags.temperature,
            top_p=flags.top_p,
            stop=flags.stop,
            seed=flags.seed,
            step=flags.step,
            mesh=mesh_sizes(flags.mesh),
            chunk_tokens=flags.chunk_tokens,
            chat=flags.chat,
            stream=lambda _, new: print(new, end="", flush=True),
        )
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print()
    print(
        f"prompt {generation.num_prompt_tokens:,} tokens, new {len(generation.tokens):,} tokens,"
        f" ended by {generation.finish_reason}",
        file=sys.stderr,
    )
    return 0


def _read(path: str) -> str:
    try:
        content = sys.stdin.buffer.read() if path == "-" else Path(path).expanduser().read_bytes()
    except OSError as error:
        raise UserError(f"cannot read --prompt_file={path} ({reason_of(error)})") from error
    return content.decode(errors="replace")


def mesh_sizes(mesh: str | None) -> dict[str, int] | None:
    """The sizes of --mesh, "context=4,tensor=2", by axis; None without the flag.

    Raises:
      UserError: another form.
    """
    if mesh is None:
        return None
    sizes = {}
    for part in mesh.split(","):
        axis, _, size = part.partition("=")
        if not size.isdecimal() or int(size) < 1:
            raise UserError(f"invalid value {mesh!r} for --mesh: expected sizes of axes, such as context=4,tensor=2")
        sizes[axis.strip()] = int(size)
    return sizes


if __name__ == "__main__":
    sys.exit(main(sys.argv))
