"""Miniature traces with the planes, lines and statistics that JAX writes on GPUs (untested on a
GPU).
"""

from collections.abc import Sequence
from typing import NamedTuple

from jax.profiler import ProfileData


class Event(NamedTuple):
    line: str  # the stream, such as "Stream #13(Compute)"
    name: str
    start_us: float
    end_us: float
    stats: dict[str, str | int]


def profile_data(events_by_plane: dict[str, Sequence[Event]]) -> ProfileData:
    """The events by plane, as JAX reads them from a file."""
    return ProfileData.from_text_proto(_text(events_by_plane))


def profile_bytes(events_by_plane: dict[str, Sequence[Event]]) -> bytes:
    """The content of a file with these events."""
    return ProfileData.text_proto_to_serialized_xspace(_text(events_by_plane))


def _text(events_by_plane: dict[str, Sequence[Event]]) -> str:
    return "\n".join(_plane(*item) for item in events_by_plane.items())


def _plane(name: str, events: Sequence[Event]) -> str:
    names = {event.name: number for number, event in enumerate(events, 1)}
    stats = {
        stat: number
        for number, stat in enumerate(sorted({s for event in events for s in event.stats}), 1)
    }
    lines = "".join(
        f'lines {{ name: "{line}" {"".join(_event(e, names, stats) for e in events if e.line == line)} }}\n'
        for line in dict.fromkeys(event.line for event in events)
    )
    metadata = "".join(_metadata("event_metadata", *item) for item in names.items())
    metadata += "".join(_metadata("stat_metadata", *item) for item in stats.items())
    return f'planes {{ name: "{name}"\n{lines}{metadata}}}'


def _event(event: Event, names: dict[str, int], stats: dict[str, int]) -> str:
    values = "".join(
        f"stats {{ metadata_id: {stats[stat]} {'int64_value' if isinstance(value, int) else 'str_value'}:"
        f" {value if isinstance(value, int) else chr(34) + value + chr(34)} }} "
        for stat, value in event.stats.items()
    )
    offset, duration = round(1e6 * event.start_us), round(1e6 * (event.end_us - event.start_us))
    return f"events {{ metadata_id: {names[event.name]} offset_ps: {offset} duration_ps: {duration} {values}}} "


def _metadata(field: str, name: str, number: int) -> str:
    return f'{field} {{ key: {number} value {{ id: {number} name: "{name}" }} }}\n'
