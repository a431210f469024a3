"""Counts, sizes and durations as they are displayed."""


def count_text(number: int, noun: str, plural_ending: str = "s") -> str:
    """A count with its noun: "1 GPU", "1,024 GPUs", or "2 processes" with the ending "es"."""
    return f"{number:,} {noun}{'' if number == 1 else plural_ending}"


def gib(num_bytes: float) -> str:
    """Bytes in GiB with two decimals, without the unit."""
    return f"{num_bytes / 2**30:,.2f}"


def duration_text(seconds: float) -> str:
    """Minutes and seconds, "1:07", from an hour on with hours: "2:01:07"."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
