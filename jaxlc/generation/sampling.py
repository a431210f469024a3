"""The choice of the next token from its logits, and the text of a growing sequence of tokens, with
stop strings.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxlc.config.schema import SamplingSettings
from jaxlc.config.values import out_of_range
from jaxlc.core import UserError
from jaxlc.data.tokens.tokenizers import Tokenizer

_REPLACEMENT = "\ufffd"  # a tokenizer decodes the first bytes of a character to it
_CHARACTER_BYTES = 4  # at most, in UTF-8


class TextStream:
    """Decodes tokens as they come and finds stop strings, also in the text of special tokens.

    It decodes the prompt and the new tokens, and omits the text of the prompt: a token may be a
    part of a character or of a word that the tokenizer decodes differently at the start of a text.
    So only the last tokens are decoded, together with a few before them.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), prompt: Iterable[int] = ()):
        self._decode = tokenizer.decode
        self._stop = [text for text in stop if text]
        self._tokens = [int(token) for token in prompt]
        # Tokens before `_end` are in the text, and those from `_start` give the context. The last character of the
        # prompt may be incomplete: the characters of tokens before `_whole_end` are complete.
        self._start = 0
        self._end = len(self._tokens)
        ends = range(self._end, max(-1, self._end - _CHARACTER_BYTES), -1)
        self._whole_end = next(
            (end for end in ends if not self._text_of(0, end).endswith(_REPLACEMENT)), self._end
        )
        self._all_text = ""  # with hidden text
        self._is_shown: list[bool] = []  # for each character of `_all_text`
        self._num_taken = 0
        self.is_stopped = False  # a stop string occurred; the text ends before it

    def add(self, token: int, *, is_hidden: bool = False) -> None:
        """Adds a token. The text of a special token, or of one that is hidden, is only searched for
        stop strings.
        """
        alone = np.array([token], np.int32)
        if (is_hidden or not self._decode(alone)) and (
            hidden := self._decode(alone, special_tokens=True)
        ):
            self._append(hidden, is_shown=False)
            return
        self._tokens.append(token)
        new = self._new_text()
        if new and not new.endswith(_REPLACEMENT):
            self._append(new)
            self._start = self._whole_end
            self._end = len(self._tokens)
            self._whole_end = self._end

    def finish(self) -> None:
        """Adds the text of tokens that end within a character."""
        if not self.is_stopped and self._end < len(self._tokens):
            self._append(self._new_text())
            self._end = len(self._tokens)

    @property
    def text(self) -> str:
        """All text so far."""
        return self._shown(0, len(self._all_text))

    def take(self, *, is_last: bool) -> str:
        """The text that was not taken before, without an end that may become a stop string unless
        `is_last`.
        """
        stops = () if is_last or self.is_stopped else self._stop
        overlaps = [
            n for stop in stops for n in range(len(stop)) if self._all_text.endswith(stop[:n])
        ]
        end = len(self._all_text) - max(overlaps, default=0)
        taken = self._shown(self._num_taken, end)
        self._num_taken = max(end, self._num_taken)
        return taken

    def _new_text(self) -> str:
        """The text of the tokens from `_end`."""
        text = self._text_of(self._start, None)
        for end in (self._end, self._whole_end):
            context = self._text_of(self._start, end)
            if text.startswith(context):
                return text[len(context) :]
        # tokens for bytes: an incomplete character replaces all before it
        return self._text_of(self._end, None)

    def _text_of(self, begin: int, end: int | None) -> str:
        return self._decode(np.array(self._tokens[begin:end], np.int32))

    def _shown(self, begin: int, end: int) -> str:
        """The text from `begin` to `end` without hidden text."""
        span = slice(begin, end)
        return "".join(itertools.compress(self._all_text[span], self._is_shown[span]))

    def _append(self, new: str, is_shown: bool = True) -> None:
        self._is_shown += [is_shown] * len(new)
        searched = max(0, len(self._all_text) - max(map(len, self._stop), default=1) + 1)
        self._all_text += new
        ends = [at for stop in self._stop if (at := self._all_text.find(stop, searched)) >= 0]
        if ends:
            self._all_text = self._all_text[: min(ends)]
            self.is_stopped = True


@dataclass(frozen=True, kw_only=True)
class Sampling(SamplingSettings):
    """How tokens are chosen.

    Raises:
      UserError: a value is out of range, or has no effect.
    """

    # Log-probabilities are of the logits divided by the temperature; False: of the logits.
    scales_log_probs: bool = False

    @property
    def is_greedy(self) -> bool:
        """Quotients of a smaller temperature than 1e-5 may not fit float32."""
        return self.temperature <= 1e-5

    def __post_init__(self):
        for name, value, allowed in out_of_range(self):
            raise UserError(f"invalid value {value} for {name}: expected {allowed}")
        for name in ("top_p", "top_k", "min_p"):
            if self.is_greedy and vars(self)[name] != getattr(SamplingSettings, name):
                raise UserError(
                    f"{name}={vars(self)[name]} has no effect with temperature={self.temperature}, which is greedy;"
                    " set a temperature, such as 0.7"
                )


@jax.jit(static_argnames="sampling")
def choose_tokens(
    logits_BV: jax.Array,
    seed: jax.Array,
    indices_B: jax.Array,
    sampling: Sampling,
    seen_BV: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(tokens_B int32, their log-probabilities_B before top-p, float32, at temperature 1 or as sampled).

    The random numbers depend on the seed, the index of the sequence and the position only, so that a sequence gets the
    same tokens in any batch and on any mesh, whose logits may be rounded differently.

    Args:
      logits_BV: float32.
      seed: uint32, instead of the one of `sampling`, which would select another program.
      indices_B: int32 [2, B]: the index of each sequence among the prompts, and the position of the token.
      seen_BV: whether a token occurred, for the repetition penalty. None: there is no penalty.
    """
    if seen_BV is not None:
        penalty = sampling.repetition_penalty
        less_BV = jnp.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty)
        logits_BV = jnp.where(seen_BV, less_BV, logits_BV)
    scaled_BV = logits_BV if sampling.is_greedy else logits_BV / sampling.temperature

    def sample(scaled_V: jax.Array, sequence: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), sequence), position)
        probs_V = jax.nn.softmax(scaled_V)
        order_V = jnp.argsort(-probs_V)
        sorted_V = probs_V[order_V]
        if sampling.top_k:
            sorted_V = jnp.where(jnp.arange(len(sorted_V)) < sampling.top_k, sorted_V, 0.0)
            sorted_V /= sorted_V.sum()
        if sampling.min_p:
            sorted_V = jnp.where(sorted_V >= sampling.min_p * sorted_V[0], sorted_V, 0.0)
        before_V = jnp.cumsum(sorted_V) - sorted_V  # probability of the more likely tokens
        sorted_V = jnp.where(before_V < sampling.top_p, sorted_V, 0.0)
        # Random numbers belong to tokens, not to places of the order, which rounding may swap.
        kept_V = jnp.zeros_like(probs_V).at[order_V].set(sorted_V)
        return jax.random.categorical(key, jnp.log(kept_V)).astype(jnp.int32)

    log_probs_BV = jax.nn.log_softmax(scaled_BV if sampling.scales_log_probs else logits_BV)
    if sampling.is_greedy:
        tokens_B = jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    else:
        tokens_B = jax.vmap(sample)(scaled_BV, *indices_B)
    return tokens_B, jnp.take_along_axis(log_probs_BV, tokens_B[:, None], axis=1)[:, 0]
