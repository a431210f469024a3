"""Traces: records of one prompt and one answer each, or of a pair of answers, in JSON lines, Parquet or Arrow files.

    {"tokens": [...], "loss_mask": [0, 0, 1, ...]}          token ids; 1: the token is in the loss
    {"messages": [...], "tools": [...]}                      a chat; the answers of the assistant are in the loss
    {"prompt": "...", "completion": "..."}                   text; the completion is in the loss
    {"prompt": ..., "chosen": ..., "rejected": ...}          a pair: texts, lists of messages, or lists of token ids

The other fields are optional. Pairs have only reference_log_probs, as {"chosen": [...], "rejected": [...]}:

    group                 a string or number: traces of one prompt. Without it, neighbors of a file with equal prompts.
    reward, advantage     a number; advantages are computed from the rewards of a group
    old_log_probs         a number for each token in the loss, in order
    reference_log_probs   as old_log_probs
    truncated             true: the answer was cut off at its maximum length
    policy_step           of rollouts: the training step after which the weights that made the answer were exported
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxlc.data.texts.chats import is_chat, read_chat
from jaxlc.data.texts.records import BadRecord, Record, kind_of
from jaxlc.data.tokens.chat import ChatTemplate, encode_chats, load_chat_template
from jaxlc.data.tokens.tokenizers import Tokenizer

FIELDS = ("tokens", "messages", "prompt")  # one of them is in every record
OTHER_FIELDS = (
    "loss_mask", "tools", "completion", "chosen", "rejected", "group", "reward", "advantage", "old_log_probs",
    "reference_log_probs", "truncated", "policy_step",
)  # fmt: skip
LOG_PROBS = ("old_log_probs", "reference_log_probs")
CHOSEN, REJECTED = 1.0, -1.0  # advantages of the answers of a pair


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A prompt and an answer, or several turns of both."""

    where: str  # FILE:NUMBER, for errors
    tokens: np.ndarray  # int32 [n]
    in_loss: np.ndarray  # bool [n]; False for the first token
    group: str | None = None
    reward: float | None = None
    advantage: float | None = None
    is_truncated: bool = False
    policy_step: int | None = None
    # float32 [n] by name, "old_log_probs" and "reference_log_probs"; 0 for tokens that are not in the loss.
    log_probs: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens before the first one that is in the loss."""
        return int(self.in_loss.argmax())

    def cut(self, num_tokens: int) -> "Trace":
        """The first tokens of the trace, as a truncated one."""
        return dataclasses.replace(
            self,
            tokens=self.tokens[:num_tokens],
            in_loss=self.in_loss[:num_tokens],
            is_truncated=True,
            log_probs={name: x[:num_tokens] for name, x in self.log_probs.items()},
        )


class TraceReader:
    """Reads traces from records."""

    def __init__(self, tokenizer: Tokenizer, chat_template: str, vocab_size: int):
        """
        Args:
          chat_template: the setting data.chat_template.
          vocab_size: of the model, which may have more ids than the tokenizer, and sample them.
        """
        self._tokenizer, self._chat_template, self._vocab_size = tokenizer, chat_template, vocab_size

    def read(self, record: Record) -> Iterator[Trace]:
        """Yields the trace of a record, or the two of a pair.

        Raises:
          BadRecord: the record has another form, or nothing in it is in the loss.
          UserError: the record is a chat, and there is no chat template.
        """
        if isinstance(record.values, BadRecord):
            raise record.values
        values, where = {name: x for name, x in record.values.items() if x is not None}, record.where
        if "chosen" in values or "rejected" in values:
            for name, advantage in (("chosen", CHOSEN), ("rejected", REJECTED)):
                tokens, in_loss = self._checked(*self._of_pair(values, name, where), where)
                log_probs = values.get("reference_log_probs")
                fields = {} if log_probs is None else {"reference_log_probs": _of_answer(log_probs, name, where)}
                yield Trace(
                    where=where, tokens=tokens, in_loss=in_loss, group=f"pair {where}", advantage=advantage,
                    log_probs=_all_log_probs(fields, in_loss, where),
                )  # fmt: skip
        else:
            tokens, in_loss = self._checked(*self._of_answer(values, where), where)
            yield Trace(where=where, tokens=tokens, in_loss=in_loss, **_other_fields(values, in_loss, where))

    def prompt(self, record: Record) -> tuple[np.ndarray, str]:
        """The token ids and the text of the field prompt: a text, a list of messages, or token ids.

        Raises:
          BadRecord: the record has no such field, or it has another form.
        """
        if isinstance(record.values, BadRecord):
            raise record.values
        value = record.values.get("prompt")
        if value is None:
            raise BadRecord(f"{record.where}: no field prompt (the fields are {', '.join(record.values)})")
        if is_chat(value):
            text = self.template.prompt(value)
            ((ids, _),) = self._tokenizer.encode_with_offsets([text])
            return ids, text
        ids = self._ids(value, "prompt", record.where)
        return ids, value if isinstance(value, str) else self._tokenizer.decode(ids)

    def _of_answer(self, values: Mapping[str, Any], where: str) -> tuple[np.ndarray, np.ndarray]:
        if "tokens" in values:
            tokens = _token_ids(values["tokens"], "tokens", where)
            in_loss = _array(values.get("loss_mask", ()))
            if in_loss.shape != tokens.shape or not np.isin(in_loss, (0, 1)).all():
                raise BadRecord(f"{where}: expected a loss_mask of {len(tokens)} numbers 0 or 1, as many as tokens")
            return tokens, in_loss.astype(bool)
        if "messages" in values:
            return self._of_chat(values["messages"], values, where)
        if "prompt" in values and "completion" in values:
            return self._joined(values["prompt"], values["completion"], "completion", where)
        raise BadRecord(
            f"{where}: no trace (the fields are {', '.join(values)}); expected tokens and loss_mask, messages, prompt"
            " and completion, or prompt, chosen and rejected"
        )

    def _of_pair(self, values: Mapping[str, Any], name: str, where: str) -> tuple[np.ndarray, np.ndarray]:
        prompt, answer = values.get("prompt"), values.get(name)
        if is_chat(answer):
            if prompt is not None and not is_chat(prompt):
                raise BadRecord(f"{where}: prompt is {kind_of(prompt)} and {name} a list of messages; use two lists")
            tokens, in_loss = self._of_chat([*(prompt or ()), *answer], values, where)
            answers = np.flatnonzero(np.diff(in_loss.astype(int), prepend=0) == 1)
            in_loss[: answers[-1]] = False  # only the last answer
            return tokens, in_loss
        if answer is None or prompt is None:
            raise BadRecord(f"{where}: a pair has the fields prompt, chosen and rejected")
        return self._joined(prompt, answer, name, where)

    def _joined(self, prompt: Any, answer: Any, name: str, where: str) -> tuple[np.ndarray, np.ndarray]:
        parts = [self._ids(x, name, where) for x, name in ((prompt, "prompt"), (answer, name))]
        in_loss = np.repeat([False, True], [len(part) for part in parts])
        return np.concatenate(parts), in_loss

    def _ids(self, value: Any, name: str, where: str) -> np.ndarray:
        return self._tokenizer.encode(value.encode()) if isinstance(value, str) else _token_ids(value, name, where)

    def _of_chat(self, value: Any, values: Mapping[str, Any], where: str) -> tuple[np.ndarray, np.ndarray]:
        chat = read_chat(value, values, "messages", "messages", where)
        ((tokens, spans),) = encode_chats([self.template.render(*chat, where)], self._tokenizer)
        in_loss = np.zeros(len(tokens), bool)
        for begin, end in spans:
            in_loss[begin:end] = True
        return tokens, in_loss

    @functools.cached_property
    def template(self) -> ChatTemplate:
        """The template of chats. Raises UserError if there is none."""
        return load_chat_template(self._chat_template, self._tokenizer.file)

    def _checked(self, tokens: np.ndarray, in_loss: np.ndarray, where: str) -> tuple[np.ndarray, np.ndarray]:
        wrong = tokens[(tokens < 0) | (tokens >= self._vocab_size)]
        if wrong.size:
            expected = f"expected 0 to {self._vocab_size - 1} (config.model.vocab_size)"
            raise BadRecord(f"{where}: token {wrong[0]}, {expected}")
        in_loss[:1] = False  # the first token has no earlier one
        if not in_loss.any():
            raise BadRecord(f"{where}: no token is in the loss")
        return tokens.astype(np.int32), in_loss


def _array(value: Any) -> np.ndarray:
    """The value as an array; of no numeric dtype if lists in it have different lengths."""
    try:
        return np.asarray(value)
    except ValueError:
        return np.asarray(value, object)


def _token_ids(value: Any, name: str, where: str) -> np.ndarray:
    ids = _array(value)
    if ids.ndim != 1 or not len(ids) or not np.issubdtype(ids.dtype, np.integer):
        raise BadRecord(f"{where}: {name} is {kind_of(value)}, expected text or a list of token ids")
    return ids


def _other_fields(values: Mapping[str, Any], in_loss: np.ndarray, where: str) -> dict[str, Any]:
    numbers = {}
    for name in ("reward", "advantage"):
        value = values.get(name)
        is_number = isinstance(value, (int, float)) and math.isfinite(value)
        if value is not None and not is_number:
            raise BadRecord(f"{where}: {name} is {value!r}, expected a finite number")
        numbers[name] = None if value is None else float(value)
    group, policy_step = values.get("group"), values.get("policy_step")
    if policy_step is not None and not (isinstance(policy_step, int) and policy_step >= 0):
        raise BadRecord(f"{where}: policy_step is {policy_step!r}, expected the number of a training step")
    return dict(
        **numbers,
        policy_step=policy_step,
        group=None if group is None else str(group),
        is_truncated=bool(values.get("truncated", False)),
        log_probs=_all_log_probs(values, in_loss, where),
    )


def _of_answer(log_probs: Any, name: str, where: str) -> Any:
    if not isinstance(log_probs, dict) or name not in log_probs:
        raise BadRecord(f'{where}: expected reference_log_probs of a pair as {{"chosen": [...], "rejected": [...]}}')
    return log_probs[name]


def _all_log_probs(values: Mapping[str, Any], in_loss: np.ndarray, where: str) -> dict[str, np.ndarray]:
    names = [name for name in LOG_PROBS if name in values]
    return {name: _log_probs(values[name], name, in_loss, where) for name in names}


def _log_probs(value: Sequence[float], name: str, in_loss: np.ndarray, where: str) -> np.ndarray:
    numbers = _array(value)
    num_expected = int(in_loss.sum())
    if numbers.shape != (num_expected,) or not np.issubdtype(numbers.dtype, np.number):
        raise BadRecord(f"{where}: expected {num_expected} numbers in {name}, one for each token in the loss")
    if not (np.isfinite(numbers) & (numbers <= 1e-3)).all():
        raise BadRecord(f"{where}: {name} has a number that is no logarithm of a probability")
    result = np.zeros(len(in_loss), np.float32)
    result[in_loss] = numbers
    return result
