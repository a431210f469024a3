"""The command line: the verbs, by subject. The flags of the verb NAME are the class NameFlags of its
module, whose docstring begins `jaxlc NAME --help`; run_NAME runs a parsed command, or NAME_main a
command line.

A module is imported when one of its verbs runs, and imports what needs JAX after the arguments are
parsed: so `--help` is fast.
"""

import functools
import importlib
import sys
from collections.abc import Callable, Sequence

from jaxlc.config import shipped_configs
from jaxlc.config.command_line import run_main
from jaxlc.config.other_names import meaning_of
from jaxlc.core import did_you_mean, text

# The module of each verb, and its line in `jaxlc --help`.
VERBS = {
    "init": ("planning", "write a commented config file for a model, data and GPUs"),
    "train": ("training", "train a model; resumes from the latest valid checkpoint in --workdir"),
    "plan": (
        "planning",
        "compile the training step ahead of time, without a GPU: memory, overlap, step time",
    ),
    "preflight": (
        "training",
        "check the machines of a run before it starts: versions, clocks, memory, disk",
    ),
    "recommend": ("planning", "search mesh, strategy and memory settings, and write a config file"),
    "sweep": ("planning", "plan or measure many meshes and rank them"),
    "data": (
        "training",
        "the data of a run: sources, shares and epochs (`data report`); examples (`data show`)",
    ),
    "profile": ("training", "compare a trace of training steps with the plan's estimate"),
    "generate": (
        "inference",
        "continue a prompt with the model of a run or of a Hugging Face directory",
    ),
    "chat": (
        "inference",
        "chat with the model of a run or of a Hugging Face directory, in a terminal",
    ),
    "eval": (
        "inference",
        "score runs and Hugging Face directories at chosen lengths: needle, passkey, RULER, loss",
    ),
    "logprobs": ("inference", "add the log-probabilities of a model to traces, for post-training"),
    "checkpoint": ("checkpoints", "list, verify and delete the checkpoints of a run"),
    "export": ("checkpoints", "write the weights of a run as a Hugging Face directory"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv` (default: sys.argv, program name first) and returns the exit
    status.

    Raises:
      SystemExit: the verb ended with its own exit status.
    """
    return text.guarded(lambda: _run(list(sys.argv if argv is None else argv)[1:]))


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("--help", "-help", "-h", "help"):
        print(help_text())
        return 0
    if arguments[0] == "--version":
        # An import of the package, which imports this one, is a cycle.
        print(f"jaxlc {sys.modules['jaxlc'].__version__}")
        return 0
    name = arguments[0]
    if name not in VERBS:
        print(
            f"error: unknown command {name!r}: {meaning_of(name) or did_you_mean(name, VERBS)}",
            file=sys.stderr,
        )
        return 2
    return main_of(name)([f"jaxlc {name}", *arguments[1:]])


def main_of(verb: str) -> Callable[[Sequence[str]], int]:
    """The function that runs a verb: it takes the command line, program name first, and returns the
    exit status.
    """
    module = vars(importlib.import_module(f"jaxlc.cli.{VERBS[verb][0]}"))
    if own := module.get(f"{verb}_main"):
        return own
    flags = module[f"{verb.capitalize()}Flags"]
    return functools.partial(run_main, module[f"run_{verb}"], flags=flags)


def help_text() -> str:
    """The text of `jaxlc --help`."""
    return "\n".join(
        [
            "usage: jaxlc VERB --config=NAME[:VARIANT] [--config.SECTION.KEY=VALUE ...] [--workdir=DIR]",
            "",
            *(f"  {name:<10} {summary}" for name, (_, summary) in VERBS.items()),
            "",
            "chat, checkpoint, eval, export, generate and profile take the directory of a run instead of --config.",
            "`jaxlc VERB --help` lists the arguments of a verb, and the sections of the settings if it takes --config.",
            f"Shipped configs: {', '.join(shipped_configs())}; or give the path of a .py file.",
        ]
    )
