"""Results of a finished or interrupted sweep, for notebooks."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from jaxlc.core import extras, html
from jaxlc.core.errors import UserError
from jaxlc.runtime.worker_processes import Row
from jaxlc.search import ranking, runner

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TEXT_WIDTH = 160


@dataclass(frozen=True, repr=False)
class Ranking:
    """The points of a sweep, best first: those that fit, those that do not fit, those without results.

    `rows` are dictionaries with the settings and results of each point, for `pandas.DataFrame`. `print(ranking)` prints
    a table, and a notebook shows one.
    """

    rows: tuple[Row, ...]

    @property
    def title(self) -> str:
        """The model, and the GPUs of the estimates or measurements."""
        row = self.rows[0]
        return f"{row['model']}, {row['figures']} {'for' if row['figures'] == 'estimated' else 'on'} {row['topology']}"

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, rows: slice) -> "Ranking":
        """`ranking[:10]` is the ranking of the first ten points."""
        return Ranking(self.rows[rows])

    def __repr__(self) -> str:
        return f"<Ranking of {len(self.rows)} points: {self.title};\n first: {self.rows[0]['overrides']}>"

    def __str__(self) -> str:
        console = Console(width=_TEXT_WIDTH, highlight=False, force_jupyter=False)
        with console.capture() as capture:
            console.print(ranking.table(self.rows, self.title))
        return "\n".join([capture.get().rstrip(), *self._notes()])

    def _repr_html_(self) -> str:
        table = ranking.table(self.rows, self.title)
        rows = zip(*(column.cells for column in table.columns), strict=True)
        align = "".join("l" if column.justify == "left" else "r" for column in table.columns)
        shown = html.table([column.header for column in table.columns], rows, align=align)
        return "\n".join([html.paragraph(str(table.title)), shown, *map(html.paragraph, self._notes())])

    def figure(self) -> "Figure":
        """Tokens/s and memory per point at the longest sequence length, best first.

        Raises:
          UserError: no point completed, or matplotlib is not installed.
        """
        extras.require("matplotlib", "a figure of a sweep")
        from jaxlc.search import ranking_plots

        return ranking_plots.meshes_figure(self._done(), self.title)

    def transports_figure(self) -> "Figure":
        """Tokens/s over sequence length by transport. Raises UserError as `figure`."""
        extras.require("matplotlib", "a figure of a sweep")
        from jaxlc.search import ranking_plots

        return ranking_plots.transports_figure(self._done(), self.title)

    def _done(self) -> list[Row]:
        done = [row for row in self.rows if row["status"] == "done"]
        if not done:
            raise UserError("no point of this sweep completed; the table lists the reasons")
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
