"""Suggestions for misspelled names, for error messages."""

import difflib
from collections.abc import Iterable


def nearest_name(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The name in `known` that is most similar to `name`; None if no similarity is at least `cutoff` (0 to 1)."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)), None)


def did_you_mean(name: str, known: Iterable[str], form: str = "{}") -> str:
    """A question with the nearest name, or the list of the known names if none is near.

    Args:
      form: how a name is written, such as "--{}".
    """
    known = list(known)
    nearest = nearest_name(name, known)
    if nearest is not None:
        return f"did you mean {form.format(nearest)}?"
    return f"expected one of {', '.join(sorted(map(form.format, known)))}"


def suggestion(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """ " (did you mean NAME?)" with the nearest name, or "" if none is near: for the end of a message."""
    nearest = nearest_name(name, known, cutoff)
    return "" if nearest is None else f" (did you mean {nearest}?)"
