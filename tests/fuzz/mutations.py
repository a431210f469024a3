"""Changes of valid files, as strategies of hypothesis."""

import json
from typing import Any

from hypothesis import strategies as st

_NUMBERS = st.sampled_from(
    [0, -1, 1, 2**31, 2**63, -(2**63), 10**30, 1e308, float("nan"), float("inf"), 0.5]
)
_TEXTS = st.sampled_from(
    ["", "../../../etc/passwd", "/etc/passwd", "\x00", "\ud800", "a" * 1000, "F32", "😀"]
)
_LEAVES = st.one_of(st.none(), st.booleans(), _NUMBERS, _TEXTS)
_VALUES = st.recursive(
    _LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXTS, inner, max_size=3),
    max_leaves=6,
)
_DEEP = "[" * 20_000


@st.composite
def changed_bytes(draw: st.DrawFn, content: bytes) -> bytes:
    """`content` with a few bytes changed, removed, repeated or added, or cut."""
    changed = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        # Half of the positions are in the first 64 bytes, where most formats have their numbers.
        near = draw(st.booleans())
        at = draw(st.integers(0, max(0, min(len(changed), 64) - 1 if near else len(changed) - 1)))
        kind = draw(st.sampled_from(["flip", "number", "cut", "remove", "repeat", "add"]))
        if kind == "flip" and changed:
            changed[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == "number":
            changed[at : at + 8] = draw(
                st.sampled_from([0, 1, 2**31, 2**40, 2**63, 2**64 - 1])
            ).to_bytes(8, "little")
        elif kind == "cut":
            del changed[at:]
        elif kind == "remove":
            del changed[at : at + draw(st.integers(1, 16))]
        elif kind == "repeat":
            changed[at:at] = changed[at : at + 64]
        elif kind == "add":
            changed[at:at] = draw(st.binary(min_size=1, max_size=16))
    return bytes(changed)


@st.composite
def changed_json(draw: st.DrawFn, content: bytes) -> bytes:
    """`content`, which is JSON, with values replaced or removed, nested deeply, or changed as
    bytes.
    """
    kind = draw(
        st.sampled_from(["value", "value", "value", "remove", "add", "bytes", "deep", "twice"])
    )
    if kind == "bytes":
        return draw(changed_bytes(content))
    if kind == "deep":
        at = draw(st.integers(0, len(content)))
        return content[:at] + _DEEP.encode() + content[at:]
    value = json.loads(content)
    holders = list(_holders(value))
    if not holders:
        return draw(changed_bytes(content))
    holder, key = draw(st.sampled_from(holders))
    if kind == "value":
        holder[key] = draw(_VALUES)
    elif kind == "remove":
        del holder[key]
    elif isinstance(holder, dict):
        holder[draw(_TEXTS)] = draw(_VALUES)
    text = json.dumps(value)
    if kind == "twice" and isinstance(value, dict) and value:  # the same key twice
        text = (
            "{" + json.dumps(next(iter(value))) + ": " + json.dumps(draw(_VALUES)) + ", " + text[1:]
        )
    return text.encode(errors="surrogatepass")


def _holders(value: Any) -> Any:
    """(dictionary or list, key) of each value inside `value`."""
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from _holders(value[key])
