"""Fingerprints of what results depend on: stored beside them, and compared before they are resumed or reused."""

import hashlib
from pathlib import Path
from typing import Any

_LETTERS = 16  # of a SHA-256 digest


def fingerprint_of(content: object) -> str:
    """The fingerprint of a text, or of what `repr` shows of a value."""
    text = content if isinstance(content, str) else repr(content)
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:_LETTERS]


def file_fingerprint(path: Path) -> str:
    """The fingerprint of the content of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:_LETTERS]


def difference(stored: dict[str, Any], identity: dict[str, Any]) -> str:
    """The names and values of `identity` that the stored one does not have; empty: it has all."""
    names = [name for name in identity if stored.get(name) != identity[name]]
    return ", ".join(f"{name} {stored.get(name)!r} instead of {identity[name]!r}" for name in names)
