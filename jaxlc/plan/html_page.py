"""The plan as one HTML page: verdict, estimates, figures as inline SVG, and the text page. No scripts, no links.

Text and lines of the figures take the color of the surrounding page, so that it is readable in light and dark mode.
"""

import html
import io
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from jaxlc.core.plot_style import FAINT, GRAY, RED, TEAL
from jaxlc.plan import report
from jaxlc.plan.record import PlanRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STYLE = """
.jaxlc-plan { font: 14px/1.45 system-ui, sans-serif; max-width: 1000px; }
.jaxlc-plan h2 { font-size: 17px; font-weight: 600; margin: 4px 0 2px; }
.jaxlc-plan h3 { font-size: 14px; font-weight: 600; margin: 20px 0 2px; }
.jaxlc-plan .note { opacity: 0.72; font-size: 12.5px; margin: 0; }
.jaxlc-plan .verdict { color: white; border-radius: 5px; padding: 2px 9px; font-weight: 600; }
.jaxlc-plan .tiles { display: flex; flex-wrap: wrap; gap: 8px; margin: 12px 0; }
.jaxlc-plan .tile { border: 1px solid rgba(128,128,128,0.4); border-radius: 6px; padding: 6px 12px; }
.jaxlc-plan .tile b { display: block; font-size: 18px; font-weight: 600; }
.jaxlc-plan .tile span { font-size: 12px; opacity: 0.72; }
.jaxlc-plan svg { width: 100%; height: auto; display: block; }
.jaxlc-plan svg text { fill: currentColor; }
.jaxlc-plan pre { font-size: 12px; line-height: 1.35; overflow-x: auto; }
.jaxlc-plan summary { cursor: pointer; margin-top: 14px; }
"""
_FIT, _NO_FIT = TEAL, RED


def document(title: str, body: str) -> str:
    """A complete HTML page around a fragment, in the light or dark colors that the browser is set to."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>\n'
        "<style>:root { color-scheme: light dark } body { margin: 24px auto; max-width: 1000px; padding: 0 16px;"
        f" background: Canvas; color: CanvasText }}</style></head>\n<body>{body}</body></html>\n"
    )


def fragment(plan: PlanRecord, figures: "Mapping[str, Figure]", text: str) -> str:
    """The page without its frame, for a notebook.

    Args:
      figures: by heading.
      text: the plan as plain text.
    """
    parts = [f'<div class="jaxlc-plan"><style>{_STYLE}</style>', *_head(plan)]
    for heading, figure in figures.items():
        figure.suptitle("")  # the page has a title and a heading
        parts += [f"<h3>{html.escape(heading)}</h3>", svg(figure)]
    is_open = "" if figures else " open"
    parts.append(
        f"<details{is_open}><summary>all figures as text</summary><pre>{html.escape(text)}</pre></details></div>"
    )
    return "\n".join(parts)


def _head(plan: PlanRecord) -> Iterator[str]:
    fits = plan.memory.fits
    color, verdict = (_FIT, "fits") if fits else (_NO_FIT, "does not fit")
    badge = f'<span class="verdict" style="background:{color}">{verdict}</span>'
    yield f"<h2>{html.escape(plan.title)} {badge}</h2>"
    yield (
        f'<p class="note">attention kernel: {html.escape(plan.kernel_choice)}. transport:'
        f" {html.escape(plan.transport_choice)}.</p>"
    )
    for hint in plan.hints:
        yield f'<p class="note">hint: {html.escape(hint)}</p>'
    predicted, memory = plan.predicted, plan.memory
    tiles = {
        "GiB per GPU, AOT-compiled": f"{report.gib(memory.device_peak_bytes)} of {report.gib(memory.usable_bytes)}",
        "per step, estimated": report.format_seconds(predicted.step_seconds),
        "tokens/s per GPU, estimated": f"{predicted.tokens_per_second_per_device:,.0f}",
        "MFU (causal), estimated": f"{predicted.mfu_causal:.1%}",
        "exposed communication, estimated": f"{predicted.exposed_communication_seconds / predicted.step_seconds:.1%}",
    }
    cells = (f'<div class="tile"><b>{value}</b><span>{name}</span></div>' for name, value in tiles.items())
    yield f'<div class="tiles">{"".join(cells)}</div>'
    yield (
        '<p class="note">Memory is what the compiler reports for this step, plus upper bounds of library buffers.'
        " Times are estimated: analytical, not validated on hardware (docs/calibration.md).</p>"
    )


def svg(figure: "Figure") -> str:
    """A figure as an SVG element with a transparent background, whose black text and lines take the page's color."""
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "jaxlc"}):  # text as text; reproducible ids
        figure.savefig(text, format="svg", transparent=True, bbox_inches="tight", metadata={"Date": None})
    element = text.getvalue()
    element = element[element.index("<svg") :]
    element = re.sub(r"<metadata>.*?</metadata>", "", element, flags=re.DOTALL)
    element = re.sub(r"\n\s*", "\n", element)
    element = re.sub(r"(\d\.\d{2})\d+", r"\1", element)  # hundredths of a point; a third of the size
    element = element.replace("stroke: #000000", "stroke: currentColor").replace("'DejaVu Sans'", "system-ui")
    return element.replace(f"stroke: {FAINT}", "stroke: rgba(128,128,128,0.28)").replace(GRAY, "#808894")
