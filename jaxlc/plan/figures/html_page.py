"""The plan as one HTML page: verdict, estimates, figures as inline SVG, and the text page. No scripts, no links.

Text and lines of the figures take the color of the surrounding page, so that it is readable in light and dark mode.
"""

import io
import re
from collections.abc import Iterator, Mapping
from html import escape
from typing import TYPE_CHECKING

from jaxlc.config import defaults, load, to_dict
from jaxlc.config.differences import differences, setting_text
from jaxlc.core import html
from jaxlc.core.plot_style import FAINT, GRAY, RED, TEAL
from jaxlc.core.text import gib
from jaxlc.plan import report
from jaxlc.plan.record import PlanRecord
from jaxlc.simulate.interval import two_digits

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FONT = "font:14px/1.45 system-ui,sans-serif;color:currentColor"
_HEADING = "font-size:14px;font-weight:600;margin:20px 0 2px"
_NOTE = "opacity:0.75;font-size:12.5px;margin:2px 0"
_TILE = "border:1px solid rgba(128,128,128,0.4);border-radius:6px;padding:6px 12px"

_SMALLER = (  # (pattern, replacement): they halve the size of matplotlib's SVG
    (r"<metadata>.*?</metadata>", ""),
    (r"<!--.*?-->", ""),
    (r'<g id="[^"]*">', "<g>"),
    (r' ?font-family: [^;"]*;?', ""),  # text has the font of the element
    (r"(\d\.\d{2})\d+", r"\1"),  # hundredths of a point
    (r"\s*\n\s*", " "),
)


def document(title: str, body: str) -> str:
    """A complete HTML page around a fragment, in the light or dark colors that the browser is set to."""
    style = "margin:24px auto;max-width:1000px;padding:0 16px;background:Canvas;color:CanvasText"
    return (
        '<!doctype html>\n<html lang="en" style="color-scheme:light dark"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>{escape(title)}</title></head>\n<body style="{style}">{body}</body></html>\n'
    )


def fragment(plan: PlanRecord, figures: "Mapping[str, Figure]", text: str, totals: Mapping[str, str]) -> str:
    """The body of the page, for a notebook.

    Args:
      figures: heading -> figure.
      text: the plan as plain text.
      totals: further values, name -> text, such as the cost of the run.
    """
    parts = [f'<div style="{_FONT};max-width:1000px">', *_head(plan, totals)]
    for heading, figure in figures.items():
        figure.suptitle("")  # the page has a title and a heading
        parts += [f'<div style="{_HEADING}">{escape(heading)}</div>', svg(figure)]
    parts += [html.details("all values as text", html.preformatted(text), is_open=not figures), "</div>"]
    return "\n".join(parts)


def _head(plan: PlanRecord, totals: Mapping[str, str]) -> Iterator[str]:
    memory, predicted = plan.memory, plan.predicted
    color, verdict = (TEAL, "fits") if memory.fits else (RED, "does not fit")
    badge = f"background:{color};color:white;border-radius:5px;padding:2px 9px;font-size:14px"
    title = f'{escape(plan.title)} <span style="{badge}">{verdict}</span>'
    yield f'<div style="font-size:17px;font-weight:600">{title}</div>'
    if plan.context_warning:
        yield _note(f"WARNING: {plan.context_warning}")
    yield _note(f"attention kernel: {plan.kernel_choice}; {report.transport_text(plan)}")
    settings = _settings(plan)
    if settings:
        yield _note(f"settings other than the defaults: {settings}")
    yield from (_note(f"WARNING: {warning}.") for warning in report.warnings(plan))
    yield from (_note(f"hint: {hint}") for hint in plan.hints)
    exposed = predicted.exposed_communication_seconds / predicted.step_seconds
    tiles = {
        "GiB per GPU, AOT-compiled": f"{gib(memory.device_peak_bytes)} of {gib(memory.usable_bytes)}",
        "per step, estimated": report.step_text(predicted),
        "tokens/s per GPU, estimated": report.rate_text(predicted),
        "MFU (causal), estimated": report.mfu_text(predicted),
        "exposed communication, estimated": f"{two_digits(100 * exposed)}%",
        **totals,
    }
    cells = (_tile(name, value) for name, value in tiles.items())
    yield f'<div style="display:flex;flex-wrap:wrap;gap:8px;margin:12px 0">{"".join(cells)}</div>'
    yield _note(
        "Memory: the compiler's report for this step, plus upper bounds of library buffers. Times: median (80% interval"
        " of published runs, docs/calibration.md)."
    )
    if not memory.fits and plan.advice:
        rows = [
            (gib(change.device_peak_bytes), "fits" if change.fits else "", change.overrides, change.cost)
            for change in plan.advice
        ]
        yield html.table(("GiB per GPU", "", "change, compiled", "cost"), rows, align="rlll")


def _settings(plan: PlanRecord) -> str:
    """The settings of attention, memory and precision that differ from the defaults, as on the command line."""
    all_defaults = to_dict(load(defaults()))
    shown = {section: all_defaults[section] for section in ("attention", "memory", "precision")}
    changed = differences(plan.config, shown)
    return " ".join(f"{section}.{name}={setting_text(value)}" for section, name, value, _ in changed)


def _note(text: str) -> str:
    return f'<div style="{_NOTE}">{escape(text)}</div>'


def _tile(name: str, value: str) -> str:
    number = f'<div style="font-size:18px;font-weight:600">{value}</div>'
    return f'<div style="{_TILE}">{number}<div style="font-size:12px;opacity:0.75">{name}</div></div>'


def svg(figure: "Figure") -> str:
    """A figure as an SVG element with a transparent background, whose black text and lines take the page's color."""
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "jaxlc"}):  # text as text; reproducible ids
        figure.savefig(text, format="svg", transparent=True, bbox_inches="tight", metadata={"Date": None})
    element = text.getvalue()
    style = "width:100%;height:auto;display:block;overflow:visible;fill:currentColor;font-family:system-ui,sans-serif"
    element = f'<svg style="{style}"' + element[element.index("<svg") + len("<svg") :]
    for pattern, replacement in _SMALLER:
        element = re.sub(pattern, replacement, element, flags=re.DOTALL)
    element = element.replace("stroke: #000000", "stroke: currentColor")
    return element.replace(f"stroke: {FAINT}", "stroke: rgba(128,128,128,0.28)").replace(GRAY, "#808894")
