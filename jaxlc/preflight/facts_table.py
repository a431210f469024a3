"""The table of `jaxlc preflight`: a row per process, with the worst value of each column marked."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from jaxlc.core.counts import gib
from jaxlc.core.text_table import aligned
from jaxlc.preflight.facts import Facts
from jaxlc.preflight.findings import clock_offsets, seconds_of
from jaxlc.preflight.link_speed import ALL_PAIRS, RING, sent_bytes
from jaxlc.preflight.needs import Figures
from jaxlc.train import stragglers
from jaxlc.train.stragglers import COPY, PRODUCT, UPLOAD

MARK = "*"  # the worst value of a column
_MAX_ROWS = 64  # of more processes, only the first ones and those with a worst value
_UNKNOWN = 2**60  # bytes


class _Column(NamedTuple):
    head: str
    values: list[float | None]  # None: not known
    is_worst: Callable[[list[float]], float]  # which of the values is the worst
    text: Callable[[float], str]


def table_lines(facts: Sequence[Facts], figures: Figures | None) -> list[str]:
    """A row per process and, with `figures`, one of the plan's rates."""
    columns = _columns(facts)
    worst = [_worst_index(column) for column in columns]
    rows = [
        (
            str(own.process_id),
            own.host,
            *(_cell(column, index, worst[at]) for at, column in enumerate(columns)),
        )
        for index, own in enumerate(facts)
    ]
    shown = [index for index in range(len(rows)) if len(rows) <= _MAX_ROWS or index < _MAX_ROWS or index in worst]
    lines = [("process", "host", *(column.head for column in columns)), *(rows[index] for index in shown)]
    if figures is not None:
        plan = {head: f"{rate:.3g}" for head, rate in _rates(figures.seconds, facts[0].platform, _total(facts)).items()}
        lines.append(("plan", "", *(plan.get(column.head, "") for column in columns)))
    text = aligned(lines, "rl" + "r" * len(columns))
    if len(shown) < len(rows):
        text.append(f"{len(rows) - len(shown)} more processes without a worst value")
    return [*text, f"{MARK} the worst of the column" + (f"; plan: estimated for {figures.source}" if figures else "")]


def _total(facts: Sequence[Facts]) -> int:
    return sum(own.num_devices for own in facts)


def _columns(facts: Sequence[Facts]) -> list[_Column]:
    offsets = clock_offsets(facts)
    amounts = {
        "free GPU GiB": [min(own.gpu_free_bytes, default=None) for own in facts],
        "free host GiB": [own.host_bytes for own in facts],
        "ulimit -l GiB": [own.locked_bytes for own in facts],
    }
    known = {name: [x if x is not None and x < _UNKNOWN else None for x in values] for name, values in amounts.items()}
    memory = [_Column(name, values, min, gib) for name, values in known.items() if any(x is not None for x in values)]
    clock = _Column("clock s", list(offsets), lambda xs: max(xs, key=abs), lambda x: f"{x:+.2f}")
    rates = [_rates({name: seconds_of(own, name) for name in _HEADS}, own.platform, _total(facts)) for own in facts]
    speeds = [_Column(head, [row.get(head) for row in rates], min, lambda x: f"{x:.3g}") for head in _HEADS.values()]
    return [*memory, clock, *(column for column in speeds if any(x is not None for x in column.values))]


_HEADS = {
    PRODUCT: "TFLOP/s",
    COPY: "to host GB/s",
    UPLOAD: "from host GB/s",
    RING: "ring GB/s",
    ALL_PAIRS: "all pairs GB/s",
}


def _rates(seconds: dict[str, float | None], platform: str, num_devices: int) -> dict[str, float]:
    """Rate of a device by the head of its column."""
    size, dtype = stragglers.operand(platform)
    amounts = {
        PRODUCT: stragglers.NUM_PRODUCTS * 2e-12 * size**3,
        COPY: 1e-9 * size * size * dtype.itemsize,
        UPLOAD: 1e-9 * size * size * dtype.itemsize,
        RING: 1e-9 * sent_bytes(RING, platform, num_devices),
        ALL_PAIRS: 1e-9 * sent_bytes(ALL_PAIRS, platform, num_devices),
    }
    return {head: amounts[name] / x for name, head in _HEADS.items() if (x := seconds.get(name))}


def _worst_index(column: _Column) -> int | None:
    """None: all values are equal, as they are displayed."""
    known = [x for x in column.values if x is not None]
    if len({column.text(x) for x in known}) < 2:
        return None
    return column.values.index(column.is_worst(known))


def _cell(column: _Column, index: int, worst: int | None) -> str:
    value = column.values[index]
    return "-" if value is None else column.text(value) + (MARK if index == worst else " ")
