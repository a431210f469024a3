"""usage: jaxlc runs DIR [--picture=FILE.png]

Lists the runs in DIR and its subdirectories, with their last losses, their speed and the settings in which they differ,
and draws their losses into one picture.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from jaxlc.config.command_line import ParsedCommand, VerbFlags, run_main
from jaxlc.core import extras
from jaxlc.core.atomic_files import replacing
from jaxlc.core.errors import UserError
from jaxlc.core.paths import displayed, local_path
from jaxlc.core.text_table import aligned

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from jaxlc.train.reports.history import History

PICTURE = "runs.png"
_MAX_LABELS = 12  # runs in the legend of the picture


@dataclass(frozen=True, kw_only=True)
class Flags(VerbFlags):
    positional: ClassVar[tuple[str, ...]] = ("directory",)

    directory: str  # directory that contains the workdirs of runs
    picture: str = ""  # file of the picture; default: DIR/runs.png


class StoredRun(NamedTuple):
    """What the files of a workdir say."""

    name: str  # its path below the directory
    history: "History"
    settings: dict[str, Any]
    manifest: dict[str, Any]


def main(argv: Sequence[str]) -> int:
    """Runs the command line `argv`, program name first; returns the exit status."""
    return run_main(_run, argv, description=__doc__, flags=Flags)


def _run(command: ParsedCommand[Flags]) -> int:
    directory = local_path(command.flags.directory)
    runs = stored_runs(directory)
    print("\n".join(table_lines(runs)))
    print("\n".join(["", *difference_lines(runs)]))
    if not extras.is_installed("matplotlib"):
        print(f"\npicture skipped, matplotlib is not installed: {extras.install_hint('matplotlib')}")
        return 0
    path = local_path(command.flags.picture) if command.flags.picture else directory / PICTURE
    with replacing(path) as out:
        losses_figure(runs).savefig(out, format="png", bbox_inches="tight")
    print(f"\npicture  {displayed(path)}")
    return 0


def stored_runs(directory: Path) -> list[StoredRun]:
    """The runs in `directory` and its subdirectories, in the order of their names.

    Raises:
      UserError: there are none.
    """
    from jaxlc.train.reports.config_copy import read_manifest, stored_settings
    from jaxlc.train.reports.history import History
    from jaxlc.train.reports.metrics import METRICS_FILE, read_rows

    workdirs = sorted(path.parent for path in directory.rglob(METRICS_FILE))
    if not workdirs:
        raise UserError(f"no run in {directory}: pass a directory that contains workdirs, which have a {METRICS_FILE}")
    return [
        StoredRun(
            str(path.relative_to(directory)) if path != directory else path.resolve().name,
            History(read_rows(path / METRICS_FILE)),
            stored_settings(path),
            read_manifest(path),
        )
        for path in workdirs
    ]


def table_lines(runs: Sequence[StoredRun]) -> list[str]:
    """A table with a line for each run."""
    rows = [("run", "step", "loss", "held-out loss", "tokens/s", "started", "devices", "commit")]
    for run in runs:
        losses, eval_losses = (run.history.column(name)[1] for name in ("loss", "eval_loss"))
        speed = run.history.median("tokens_per_second")
        rows.append(
            (
                run.name,
                str(max(run.history["step"], default=0)),
                f"{losses[-1]:.4f}" if len(losses) else "",
                f"{eval_losses[-1]:.4f}" if len(eval_losses) else "",
                "" if speed is None else f"{speed:,.0f}",
                run.manifest.get("started", "")[:16],
                run.manifest.get("devices", ""),
                run.manifest.get("commit", "")[:10],
            )
        )
    return aligned(rows, "lrrrrlll")


def difference_lines(runs: Sequence[StoredRun]) -> list[str]:
    """The settings and package versions in which the runs differ, one per line."""
    described = [(run.name, run.settings | run.manifest.get("packages", {})) for run in runs if run.settings]
    if len(described) < 2:
        return []
    names = dict.fromkeys(name for _, settings in described for name in settings)
    rows = []
    for name in names:
        values = [str(settings.get(name, "")) for _, settings in described]
        if len(set(values)) > 1:
            rows.append((name, *values))
    if not rows:
        return ["all settings are equal"]
    return aligned([("setting", *(name for name, _ in described)), *rows], "l" * (1 + len(described)))


def losses_figure(runs: Sequence[StoredRun]) -> "Figure":
    """Training losses as lines and held-out losses as dots, over steps, one color for each run."""
    from jaxlc.core.plot_style import CYCLE, new_figure, style_axes

    figure = new_figure(7.5, 4.4, dpi=150)
    axes = figure.subplots()
    for number, run in enumerate(runs):
        color, label = CYCLE[number % len(CYCLE)], run.name if number < _MAX_LABELS else None
        steps, losses = run.history.column("loss")
        axes.plot(steps, losses, color=color, linewidth=1.0, label=label)
        axes.plot(*run.history.column("eval_loss"), "o:", color=color, markersize=5, linewidth=0.8)
    axes.set(xlabel="step", ylabel="loss")
    axes.set_title("Training loss, and held-out loss (dots)", loc="left")
    axes.legend(frameon=False, fontsize=8)
    style_axes(axes, grid="y")
    return figure


if __name__ == "__main__":
    sys.exit(main(sys.argv))
