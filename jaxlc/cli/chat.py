"""usage: jaxlc chat SOURCE [--system=TEXT] [--temperature=T]

Chats with the model of a run or of a Hugging Face directory. The model is loaded once, and each turn computes its new
tokens only. Ctrl-C ends an answer; Ctrl-D, or /exit, the chat; /undo removes the last turn.
"""

import contextlib
import functools
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jaxlc
from jaxlc.cli.flags import SamplingFlags, mesh_sizes, sampling_settings
from jaxlc.config.command_line import ParsedCommand, run_main
from jaxlc.config.values import From1
from jaxlc.core.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Flags(SamplingFlags):
    positional = ("source",)

    source: str  # workdir of a run, Hugging Face directory or hub id
    system: str = ""  # the system prompt
    max_tokens: From1[int] = 1024  # largest number of tokens of an answer
    # largest number of tokens of the chat, for which the KV cache has memory
    max_context: From1[int] = 32_768


def _chat(command: ParsedCommand[Flags]) -> int:
    flags = command.flags
    if flags.simulated_devices:
        jaxlc.start(simulated_devices=flags.simulated_devices)
    from jaxlc.generation.chat import ChatSession
    from jaxlc.generation.sampling import Sampling

    session = ChatSession(
        jaxlc.load(
            flags.source, step=flags.step, mesh=mesh_sizes(flags.mesh), adapter=flags.adapter
        ),
        system=flags.system,
        sampling=Sampling(**sampling_settings(flags)),
        max_tokens=flags.max_tokens,
        max_context=flags.max_context,
        chat_template=flags.chat_template,
    )
    for line in _lines():
        if line == "/undo":
            session.undo()
            continue
        try:
            with _interrupts() as is_interrupted:
                answer = session.say(
                    line, lambda _, new: print(new, end="", flush=True), is_interrupted
                )
        except UserError as error:  # such as a chat that is too long; the history stays
            print(f"error: {error}", file=sys.stderr)
            continue
        print("" if answer.finish_reason == "stop" else f" [{answer.finish_reason}]")
    return 0


def _lines() -> Iterator[str]:
    """The messages of the user, without empty ones."""
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        if line == "/exit":
            return
        if line:
            yield line


@contextlib.contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """While it is entered, Ctrl-C is only noted: an exception would leave a donated cache. Yields a function that says
    whether there was one.
    """
    noted = threading.Event()
    previous = signal.signal(signal.SIGINT, lambda number, frame: noted.set())
    try:
        yield noted.is_set
    finally:
        signal.signal(signal.SIGINT, previous)


# (argv, program name first) -> exit status
main = functools.partial(run_main, _chat, description=__doc__, flags=Flags)
