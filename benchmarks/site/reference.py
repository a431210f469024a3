"""Reference pages that are generated from the code: the settings of a config, and the fields of
`jaxlc plan --json`.
"""

import inspect
import re
import typing
from collections.abc import Iterator
from typing import Any

from jaxlc.config import other_names
from jaxlc.config.command_line import (
    HELP_SECTIONS,
    Setting,
    field_comments,
    section_text,
    settings_of,
)
from jaxlc.hlo.memory_dump import Launches, LiveTensor
from jaxlc.plan.packing_estimates import PackingEstimate, PackingEstimates
from jaxlc.plan.program import CollectiveStats, Memory, Ring
from jaxlc.plan.report import DERIVED_MEMORY, Change, PlanRecord
from jaxlc.plan.result import StagePlan, StagesPlan
from jaxlc.simulate.timeline import LayerEvent, Prediction

_RECORDS = {  # heading on the page -> class
    "predicted": Prediction,
    "memory": Memory,
    "memory.largest": LiveTensor,
    "collectives": CollectiveStats,
    "ring": Ring,
    "launches": Launches,
    "advice": Change,
    "layer_timeline": LayerEvent,
    "packing": PackingEstimates,
    "packing.estimates": PackingEstimate,
}
_DERIVED = {  # properties that the JSON has
    Memory: DERIVED_MEMORY,
    StagePlan: ("num_tokens", "hours", "gpu_hours"),
}


_PRESET = "from the preset"


def settings() -> str:
    """Tables of all settings of a config, by section."""
    lines: list[str] = []
    for section in HELP_SECTIONS:
        lines += [
            f"## {section}",
            "",
            section_text(section),
            "",
            "| setting | default | meaning |",
            "| --- | --- | --- |",
        ]
        lines += [*map(_setting_row, settings_of(section)), ""]
    return "\n".join(lines)


def _setting_row(setting: Setting) -> str:
    default = setting.default if setting.default in ("", _PRESET) else f"`{setting.default}`"
    return f"| `{setting.key}` | {default} | {_cell(setting.meaning)} |"


def other_names_table() -> str:
    """The table of names in other programs."""
    lines = ["| there | here |", "| --- | --- |"]
    for text, names in other_names.rows():
        here = re.sub(r"(config\.[\w.]*\w(=\w+)?|--\w+)", r"`\1`", _cell(text))
        lines.append(f"| {' '.join(f'`{name}`' for name in names)} | {here} |")
    return "\n".join(lines)


def plan_fields() -> str:
    """Tables of the fields in the JSON of a plan."""
    lines = [*record_rows(PlanRecord), ""]
    for heading, kind in _RECORDS.items():
        lines += [f"## `{heading}`", "", _first_paragraph(kind), "", *record_rows(kind), ""]
    lines += [
        "## Configs with stages",
        "",
        _first_paragraph(StagesPlan),
        "",
        *record_rows(StagesPlan),
    ]
    lines += ["", "Each element of `stages`:", "", *record_rows(StagePlan)]
    return "\n".join(lines)


def record_rows(kind: type) -> Iterator[str]:
    """The table of the fields of a dataclass or NamedTuple, and of its properties with a docstring."""
    comments = field_comments(kind)
    yield from ("| field | type | meaning |", "| --- | --- | --- |")
    for name, hint in typing.get_type_hints(kind).items():
        heading = next((heading for heading in _RECORDS if heading.split(".")[-1] == name), None)
        if not comments[name] and heading is None:
            raise ValueError(f"the field {name} of {kind.__name__} has no comment")
        text = (
            _cell(comments[name]) if heading is None else f"[fields](#{heading.replace('.', '')})"
        )
        yield f"| `{name}` | {_type_text(hint)} | {text} |"
    for name in _DERIVED.get(kind, ()):
        value = inspect.getattr_static(kind, name)
        hint = typing.get_type_hints(value.fget)["return"]
        yield f"| `{name}` | {_type_text(hint)} | {_cell(value.__doc__)} |"


def _type_text(hint: Any) -> str:
    """A type as JSON has it."""
    text = hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)
    text = re.sub(r"\b(?:\w+\.)+(?=\w)", "", text)  # modules
    return f"`{text.replace(', ...', '').replace(' | ', ' or ')}`"


def _first_paragraph(kind: type) -> str:
    return " ".join((inspect.getdoc(kind) or "").split("\n\n")[0].split())


def _cell(text: str) -> str:
    return with_links(" ".join(text.split())).replace("|", "\\|")


def with_links(text: str) -> str:
    """`text` with links to the pages that it names as docs/NAME.md."""
    return re.sub(r"docs/(\w+)\.md", r"[\1](\1.md)", text)
