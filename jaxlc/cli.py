"""The `jaxlc` console command: `jaxlc VERB ...` is `python -m jaxlc.VERB ...`."""

import runpy
import sys
from collections.abc import Sequence
from typing import NamedTuple

from jaxlc import __version__
from jaxlc.config import shipped_configs
from jaxlc.config.other_names import meaning_of
from jaxlc.core import text
from jaxlc.core.text import did_you_mean


class Verb(NamedTuple):
    package: str  # its __main__ module reads sys.argv
    summary: str  # one line of `jaxlc --help`


VERBS = {
    "train": Verb("jaxlc.train", "train a model; resumes from the latest valid checkpoint in --workdir"),
    "plan": Verb("jaxlc.plan", "compile the training step ahead of time, without a GPU: memory, overlap, step time"),
    "preflight": Verb("jaxlc.preflight", "check the machines of a run before it starts: versions, memory, disk, links"),
    "recommend": Verb("jaxlc.recommend", "search mesh, strategy and memory settings, and write a config file"),
    "sweep": Verb("jaxlc.sweep", "plan or measure many meshes and rank them"),
    "data": Verb("jaxlc.data", "the data of a run: sources, shares and epochs (`data report`); examples (`data show`)"),
    "profile": Verb("jaxlc.profile", "compare a trace of training steps with the plan's estimate"),
    "generate": Verb("jaxlc.generation", "continue a prompt with the model of a run or of a Hugging Face directory"),
    "eval": Verb(
        "jaxlc.evals", "score runs and Hugging Face directories at chosen context lengths: needle, passkey, RULER, loss"
    ),
    "logprobs": Verb("jaxlc.logprobs", "add the log-probabilities of a model to traces, for post-training"),
    "checkpoint": Verb("jaxlc.checkpoints", "list, verify and delete the checkpoints of a run"),
    "export": Verb("jaxlc.exporting", "write the weights of a run as a Hugging Face directory"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv` (default: sys.argv, program name first) and returns the exit status.

    Raises:
      SystemExit: the verb ended with its own exit status.
    """
    return text.guarded(lambda: _run(list(sys.argv if argv is None else argv)[1:]))


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("--help", "-help", "-h", "help"):
        print(help_text())
        return 0
    if arguments[0] == "--version":
        print(f"jaxlc {__version__}")
        return 0
    name = arguments[0]
    if name not in VERBS:
        print(f"error: unknown command {name!r}: {meaning_of(name) or did_you_mean(name, VERBS)}", file=sys.stderr)
        return 2
    sys.argv = [f"jaxlc {name}", *arguments[1:]]
    runpy.run_module(VERBS[name].package, run_name="__main__", alter_sys=True)
    return 0


def help_text() -> str:
    """The text of `jaxlc --help`."""
    return "\n".join(
        [
            "usage: jaxlc VERB --config=NAME[:VARIANT] [--config.SECTION.KEY=VALUE ...] [--workdir=DIR]",
            "",
            *(f"  {name:<10} {verb.summary}" for name, verb in VERBS.items()),
            "",
            "checkpoint, eval, export, generate and profile take the directory of a run instead of --config.",
            "`jaxlc VERB --help` lists the arguments of a verb, and the sections of the settings if it takes --config.",
            f"Shipped configs: {', '.join(shipped_configs())}; or give the path of a .py file.",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
