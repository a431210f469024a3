"""Access to the figures that code under test writes, so that tests check their content."""

import pytest
from matplotlib.figure import Figure


def record_figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Returns a list to which every figure is appended when it is saved."""
    figures = []
    save = Figure.savefig

    def savefig(self, *args, **kwargs):
        figures.append(self)
        save(self, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", savefig)
    return figures
