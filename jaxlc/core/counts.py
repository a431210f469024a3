"""Counts and sizes as they are displayed."""


def count_text(number: int, noun: str, plural_ending: str = "s") -> str:
    """A count with its noun: "1 GPU", "1,024 GPUs", or "2 processes" with the ending "es"."""
    return f"{number:,} {noun}{'' if number == 1 else plural_ending}"


def gib(num_bytes: float) -> str:
    """Bytes in GiB with two decimals, without the unit."""
    return f"{num_bytes / 2**30:,.2f}"
