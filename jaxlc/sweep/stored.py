"""Results of a finished or interrupted sweep, for notebooks."""

import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from jaxlc.core import extras
from jaxlc.core.errors import UserError
from jaxlc.sweep import ranking, runner
from jaxlc.sweep.worker import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TEXT_WIDTH = 160
_STYLE = """
.jaxlc-ranking { border-collapse: collapse; font-size: 13px; }
.jaxlc-ranking th, .jaxlc-ranking td { padding: 2px 10px; text-align: right; border: none; }
.jaxlc-ranking th { border-bottom: 1px solid rgba(128,128,128,0.6); }
.jaxlc-ranking tr.does-not-fit { opacity: 0.5; }
"""


@dataclass(frozen=True, repr=False)
class Ranking:
    """The points of a sweep, best first: those that fit, those that do not fit, those without figures.

    `rows` are the points as plain dictionaries with the settings and figures as columns, which pandas.DataFrame takes.
    `print(ranking)` prints a table, and a notebook shows it.
    """

    rows: tuple[Row, ...]

    @property
    def title(self) -> str:
        """Model, and the GPUs for which the figures are estimated or on which they were measured."""
        row = self.rows[0]
        return f"{row['model']}, {row['figures']} {'for' if row['figures'] == 'estimated' else 'on'} {row['topology']}"

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        return f"<Ranking of {len(self.rows)} points: {self.title};\n first: {self.rows[0]['overrides']}>"

    def __str__(self) -> str:
        console = Console(width=_TEXT_WIDTH, highlight=False)
        with console.capture() as capture:
            console.print(ranking.table(self.rows, self.title))
        return "\n".join([capture.get().rstrip(), *self._notes()])

    def _repr_html_(self) -> str:
        table = ranking.table(self.rows, self.title)
        columns = [list(column.cells) for column in table.columns]
        head = "".join(f"<th>{html.escape(str(column.header))}</th>" for column in table.columns)
        lines = []
        for cells in zip(*columns, strict=True):
            style = ' class="does-not-fit"' if cells[-1] else ""
            lines.append(f"<tr{style}>{''.join(f'<td>{html.escape(cell)}</td>' for cell in cells)}</tr>")
        title = html.escape(str(table.title)).replace("\n", "<br>")
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in self._notes())
        return (
            f'<style>{_STYLE}</style><p>{title}</p><table class="jaxlc-ranking"><tr>{head}</tr>'
            f"{''.join(lines)}</table>{notes}"
        )

    def figure(self) -> "Figure":
        """Tokens/s and memory per point at the longest sequence length, best first.

        Raises:
          UserError: no point has figures, or matplotlib is not installed.
        """
        extras.require("matplotlib", "a figure of a sweep")
        from jaxlc.sweep import ranking_plots  # matplotlib is slow to import

        return ranking_plots.meshes_figure(self._done(), self.title)

    def transports_figure(self) -> "Figure":
        """Tokens/s over sequence length by transport. Raises UserError as `figure`."""
        extras.require("matplotlib", "a figure of a sweep")
        from jaxlc.sweep import ranking_plots

        return ranking_plots.transports_figure(self._done(), self.title)

    def _done(self) -> list[Row]:
        done = [row for row in self.rows if row["status"] == "done"]
        if not done:
            raise UserError("no point of this sweep has figures; the table lists the reasons")
        return done

    def _notes(self) -> Sequence[str]:
        notes = [ranking.estimate_note(self.rows)] if self.rows[0]["figures"] == "estimated" else []
        return [*notes, *ranking.failures(self.rows)]


def load(path: str | Path) -> Ranking:
    """Reads the points of a sweep, ranked.

    Args:
      path: the directory of the sweep (`jaxlc sweep --out`), or its points.jsonl.
    Raises:
      UserError: there are no points.
    """
    file = Path(path) / runner.ROWS if Path(path).is_dir() else Path(path)
    rows = runner.read_rows(file)
    if not rows:
        raise UserError(f"no points in {file}; run jaxlc sweep --out={file.parent}")
    return Ranking(tuple(ranking.ranked(rows)))
