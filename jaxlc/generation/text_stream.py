"""Text of a growing sequence of tokens, with stop strings."""

from collections.abc import Callable, Sequence

import numpy as np

_REPLACEMENT = "\ufffd"  # a tokenizer decodes the first bytes of a character to it


class TextStream:
    """Decodes tokens as they come and finds stop strings.

    A token may be a part of a character or of a word that the tokenizer decodes differently at the start of a text. So
    only the last tokens are decoded, together with a few before them.
    """

    def __init__(self, decode: Callable[[np.ndarray], str], stop: Sequence[str] = ()):
        self._decode, self._stop = decode, [text for text in stop if text]
        self._tokens: list[int] = []
        self._start, self._end = 0, 0  # tokens before `_end` are in `_decoded`; those from `_start` give the context
        self._decoded = ""
        self._num_taken = 0
        self.is_stopped = False  # a stop string occurred; the text ends before it

    def add(self, token: int) -> None:
        self._tokens.append(token)
        context = self._decode(np.array(self._tokens[self._start : self._end], np.int32))
        text = self._decode(np.array(self._tokens[self._start :], np.int32))
        if len(text) > len(context) and not text.endswith(_REPLACEMENT):
            self._append(text[len(context) :])
            self._start, self._end = self._end, len(self._tokens)

    def finish(self) -> None:
        """Adds the text of tokens that end within a character."""
        if not self.is_stopped and self._end < len(self._tokens):
            context = self._decode(np.array(self._tokens[self._start : self._end], np.int32))
            self._append(self._decode(np.array(self._tokens[self._start :], np.int32))[len(context) :])
            self._end = len(self._tokens)

    @property
    def text(self) -> str:
        """All text so far."""
        return self._decoded

    def take(self, *, is_last: bool) -> str:
        """The text that was not taken before, without an end that may become a stop string unless `is_last`."""
        held = 0 if is_last or self.is_stopped else max((self._overlap(stop) for stop in self._stop), default=0)
        end = len(self._decoded) - held
        taken = self._decoded[self._num_taken : end]
        self._num_taken = max(end, self._num_taken)
        return taken

    def _overlap(self, stop: str) -> int:
        """The length of the longest end of the text that is a start of `stop`."""
        return next((n for n in range(len(stop) - 1, 0, -1) if self._decoded.endswith(stop[:n])), 0)

    def _append(self, new: str) -> None:
        searched = max(0, len(self._decoded) - max(map(len, self._stop), default=1) + 1)
        self._decoded += new
        ends = [at for stop in self._stop if (at := self._decoded.find(stop, searched)) >= 0]
        if ends:
            self._decoded, self.is_stopped = self._decoded[: min(ends)], True
