"""usage: jaxlc data report --config=NAME[:VARIANT] [--config.SECTION.KEY=VALUE ...] [--workdir=DIR]

Prints the documents and tokens of each source by length, and the shares and epochs of the run, and writes a picture of
them to WORKDIR/data.png. Sources that are not tokenized yet are tokenized, as a run would do. JAX does not start.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from jaxlc.config.command_line import ConfigFlags, ParsedCommand, run_main
from jaxlc.core import extras
from jaxlc.core.errors import UserError
from jaxlc.core.paths import displayed
from jaxlc.core.suggestions import did_you_mean

PLOT_FILE = "data.png"


@dataclass(frozen=True, kw_only=True)
class Flags(ConfigFlags):
    positional: ClassVar[tuple[str, ...]] = ("action",)

    action: str  # report


def main(argv: Sequence[str]) -> int:
    """Runs the command line `argv`, program name first; returns the exit status."""
    kept = "interrupted; tokenized sources are kept in config.data.cache_dir, and the same command resumes"
    return run_main(_report, argv, description=__doc__, flags=Flags, interrupted=kept)


def _report(command: ParsedCommand[Flags]) -> int:
    if command.flags.action != "report":
        raise UserError(f"unknown command {command.flags.action!r}: {did_you_mean(command.flags.action, ['report'])}")
    from jaxlc.data.corpus import open_corpus
    from jaxlc.data.reports.data_report import report_text, source_lengths, stage_shares

    sources, stages, warnings = {}, [], {}
    for stage in command.stages:
        config = stage.config
        corpus = open_corpus(config.data, log=lambda line: print(line, file=sys.stderr))
        warnings |= dict.fromkeys(corpus.warnings)
        sources |= {source.name: source for source in source_lengths(corpus)}
        stages.append(stage_shares(stage.name, corpus, stage.num_steps * config.train.global_batch_size))
    for warning in warnings:  # each once, in order
        print(f"warning: {warning}", file=sys.stderr)
    print(report_text(list(sources.values()), stages))
    if extras.is_installed("matplotlib"):
        from jaxlc.data.reports.data_report_plot import report_figure

        path = Path(command.workdir) / PLOT_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        report_figure(list(sources.values()), stages).savefig(path)
        print(f"\nplot  {displayed(path)}")
    else:
        print(f"\nplot skipped, matplotlib is not installed: {extras.install_hint('matplotlib')}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
