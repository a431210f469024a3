"""Traces: records of one prompt and one answer each, or of a pair of answers, in JSON, Parquet or
Arrow files.

    {"tokens": [...], "loss_mask": [0, 0, 1, ...]}          token ids; 1: the token is in the loss
    {"messages": [...], "tools": [...]}                      a chat; the answers of the assistant are in the loss
    {"conversations": [...]}, {"instruction": "..."}         the same in other formats; see `data.texts.documents`
    {"prompt": ..., "completion": ...}                       the completion is in the loss
    {"prompt": ..., "chosen": ..., "rejected": ...}          a pair

Prompts and answers are texts, lists of messages, or lists of token ids. A text that is an answer
ends with the end-of-document token, which is in the loss, unless it is truncated. Recorded
log-probabilities are of tokens that have been sampled: prompt and answer are then encoded apart,
and the end has a loss only if it has a log-probability.

The other fields are optional. Pairs have only reference_log_probs, as {"chosen": [...], "rejected":
[...]}:

    group                 a string or number: traces of one prompt. Without it, neighbors of a file with equal prompts.
    trajectory            a string or number: traces of a group with equal ones are contexts of one trajectory, such as
                          before and after a summary. They may have other prompts, and share reward and advantage
    reward, advantage     a number; advantages are computed from the rewards of a group
    label                 of kto: true if the answer is desirable, or false. A pair has an answer of each
    sampled_log_probs     a number for each token in the loss, in order: of the sampler
    old_log_probs         the same, of the trainer before its first update on the trace
    reference_log_probs   the same, of the reference model
    truncated             true: the answer was cut off at its maximum length
    policy_step           of rollouts: the training step after which the weights that made the answer were exported
    failed                of rollouts: why there is no reward; the record is counted and not trained on

With posttrain.teacher_top_k, they have the teacher's candidates for each token in the loss, in order, as arrays in the
format of .npy files (as the next ones) or lists, [tokens in the loss, posttrain.teacher_top_k or more]:

    teacher_tokens        token ids, integers
    teacher_log_probs     their log-probabilities
    teacher_tokenizer     the fingerprint of the teacher's tokenizer, which must be that of the run

With posttrain.replay_routing, they have the experts of each token but the last, which is no input:

    routed_experts            an array in the format of NumPy's .npy files, integers [tokens - 1, layers, experts per
                              token]: bytes in Parquet and Arrow, base64 text in JSON, as vLLM returns it. -1, or the
                              largest value of an unsigned dtype: no record. Or base64 text of the integers alone, as
                              SGLang returns it. Layers are those with experts, or all
    routed_experts_dtype      of integers alone: int32 (default), uint16 or uint8
    routed_experts_start_len  tokens without a record, before those that have one
"""

import base64
import dataclasses
import hashlib
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxlc.config import ModelConfig
from jaxlc.core import UserError, reason_of
from jaxlc.core.files import Arrays
from jaxlc.data.sequences.loader import experts_dtype
from jaxlc.data.sequences.user_batches import check_range
from jaxlc.data.texts.documents import (
    CHAT_FIELDS,
    OTHER_FIELDS,
    UNSUPPORTED_FIELDS,
    Chat,
    check_fields,
    is_chat,
    located,
    read_answer,
    read_chat,
)
from jaxlc.data.texts.records import BadRecord, Record, array_of, kind_of, token_ids
from jaxlc.data.tokens.chat_templates import MarkedText
from jaxlc.data.tokens.encoder import Encoder
from jaxlc.data.tokens.tokenizers import with_start

FAILED = "failed"  # the field of a record that is not trained on: why
FIELDS = (  # all that a record of traces may have
    "tokens", "loss_mask", "prompt", "completion", "chosen", "rejected", "group", "trajectory", "reward", "advantage",
    "label", "sampled_log_probs", "old_log_probs", "reference_log_probs", "truncated", "policy_step", FAILED,
    *dict.fromkeys([*CHAT_FIELDS.values(), *sum(OTHER_FIELDS.values(), ())]), *UNSUPPORTED_FIELDS,
)  # fmt: skip
TEACHER = ("teacher_tokens", "teacher_log_probs")
TEACHER_FIELDS = (*TEACHER, "teacher_tokenizer")
EXPERTS_FIELDS = ("routed_experts", "routed_experts_dtype", "routed_experts_start_len")
EXPERTS = "experts"  # the array of a batch
# in the order of fingerprints
LOG_PROBS = ("old_log_probs", "reference_log_probs", "sampled_log_probs")
_FLOAT32_END = 3.4e38
CHOSEN, REJECTED = 1.0, -1.0  # advantages of the answers of a pair


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A prompt and an answer, or several turns of both."""

    where: str  # FILE:NUMBER, for errors; empty: a mismatched answer, see `trees.labeled_steps`
    tokens: np.ndarray  # int32 [n]
    in_loss: np.ndarray  # bool [n]; False for the first token
    prompt: bytes  # a hash of what precedes the first answer
    group: str | None = None
    trajectory: str | None = None  # contexts of one trajectory have equal ones
    reward: float | None = None
    advantage: float | None = None
    label: bool | None = None
    # False: a mismatched answer, or a truncated one with posttrain.mask_truncated
    has_loss: bool = True
    is_truncated: bool = False
    policy_step: int | None = None
    # by name: float32 [n] of LOG_PROBS, 0 for tokens that are not in the loss; [n, posttrain.teacher_top_k] of TEACHER;
    # EXPERTS, of `loader.experts_dtype` [n]. Those that are read
    recorded: Arrays = field(default_factory=dict)

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
            recorded={name: x[:num_tokens] for name, x in self.recorded.items()},
        )


# tokens int [n], which are in the loss, bool [n], and what precedes the first answer
_Encoded = tuple[np.ndarray, np.ndarray, bytes]


@dataclass(frozen=True)
class TraceReader:
    """Reads traces from records."""

    encoder: Encoder
    vocab_size: int  # of the model, which may have more ids than the tokenizer, and sample them
    experts_of: ModelConfig | None = (
        None  # whose recorded experts are read; None: these are ignored
    )
    teacher_top_k: int = 0  # candidates of the teacher that are read; 0: these are ignored
    refuses_labels: bool = False  # a text or chat whose label is false cannot be used

    def read(self, record: Record, *, is_sampled: bool = False) -> list[Trace]:
        """The trace of a record, or the two of a pair; none if an agent or a reward has failed.

        Args:
          is_sampled: as if the record had log-probabilities.
        Raises:
          BadRecord: the record has another form, or nothing in it is in the loss.
          UserError: the record is a chat, and there is no chat template.
        """
        values = _values(record)
        where = record.where
        if values.get(FAILED):  # it may have no tokens
            return []
        is_sampled |= any(name in values for name in (*LOG_PROBS, *TEACHER))
        if "chosen" not in values and "rejected" not in values:
            fields = _other_fields(values, where)
            if not self.refuses_labels:
                values.pop("label", None)
            return [self._trace(values, "completion", where, is_sampled, **fields)]
        traces = []
        for answer, advantage in (("chosen", CHOSEN), ("rejected", REJECTED)):
            own = dict(values)
            for name in filter(own.__contains__, LOG_PROBS):
                if not isinstance(values[name], dict) or answer not in values[name]:
                    raise BadRecord(
                        f'{where}: expected {name} of a pair as {{"chosen": [...], "rejected": [...]}}'
                    )
                own[name] = values[name][answer]
            fields = dict(group=f"pair {where}", advantage=advantage, label=advantage == CHOSEN)
            traces.append(self._trace(own, answer, where, is_sampled, **fields))
        chosen, rejected = traces
        if chosen.prompt != rejected.prompt:
            raise BadRecord(f"{where}: the prompts of chosen and rejected differ")
        if np.array_equal(chosen.tokens, rejected.tokens):
            self.encoder.notes.add(
                "pairs with equal chosen and rejected answers, which have no gradient", where
            )
        return traces

    def prompt(self, record: Record) -> tuple[np.ndarray, str]:
        """The token ids and the text of the field prompt: a text, a list of messages, or token ids.

        Raises:
          BadRecord: the record has no such field, or it has another form.
        """
        values = _values(record)
        where = record.where
        value = values.get("prompt")
        if value is None:
            raise BadRecord(f"{where}: no field prompt (the fields are {', '.join(values)})")
        if isinstance(value, str):
            _check_text(values, where)
            ids, text = self.encoder.prompt(value, where)
        elif is_chat(value):
            chat = read_chat(value, values, "", "prompt", where)
            ids, text = self.encoder.prompt(chat, where)
        else:
            ids = _token_ids(value, "prompt", where)
            text = self.encoder.tokenizer.decode(ids)
        if not len(ids):
            raise BadRecord(f"{where}: the field prompt is an empty text")
        return self._checked(ids, where), text

    def _trace(
        self, values: Mapping[str, Any], answer: str, where: str, is_sampled: bool, **fields: Any
    ) -> Trace:
        tokens, in_loss, prompt = self._encoded(values, answer, where, is_sampled)
        tokens = self._checked(tokens, where)
        in_loss[:1] = False  # the first token has no earlier one
        if not in_loss.any():
            raise BadRecord(f"{where}: no token is in the loss")
        recorded = {
            name: _log_probs(values[name], name, in_loss, where)
            for name in LOG_PROBS
            if name in values
        }
        if self.experts_of is not None:
            recorded[EXPERTS] = recorded_experts(values, len(tokens), self.experts_of, where)
        if self.teacher_top_k:
            recorded |= self._teacher(values, in_loss, where)
        return Trace(
            where=where,
            tokens=tokens,
            in_loss=in_loss,
            prompt=hashlib.sha256(prompt).digest()[:16],
            is_truncated=bool(values.get("truncated")),
            recorded=recorded,
            **fields,
        )

    def _teacher(self, values: Mapping[str, Any], in_loss: np.ndarray, where: str) -> Arrays:
        top_k = self.teacher_top_k
        fingerprint = self.encoder.tokenizer.fingerprint
        if (known := values.get("teacher_tokenizer")) != fingerprint:
            raise UserError(
                f"{where}: teacher_tokenizer is {known!r}, and the tokenizer of the run has the fingerprint"
                f" {fingerprint!r}: config.posttrain.teacher_top_k needs equal vocabularies; add the fields with `jaxlc"
                f" logprobs TEACHER TRACES OUT --top_k={top_k}`, or record this value if the vocabularies are equal"
            )
        tokens, log_probs = arrays = [stored_array(values, name, where) for name in TEACHER]
        is_valid = tokens.ndim == 2 and np.issubdtype(tokens.dtype, np.integer)
        expected = (int(in_loss.sum()), top_k)
        if not is_valid or len(tokens) != expected[0] or tokens.shape[1] < top_k:
            raise BadRecord(
                f"{where}: teacher_tokens is {tokens.dtype}{list(tokens.shape)}, expected integers {list(expected)}:"
                " tokens in the loss, and config.posttrain.teacher_top_k or more"
            )
        is_number = np.issubdtype(log_probs.dtype, np.number) and log_probs.shape == tokens.shape
        if not is_number or not (np.exp(log_probs).sum(1) <= 1.001).all():
            raise BadRecord(
                f"{where}: teacher_log_probs are not the logarithms of probabilities of teacher_tokens"
            )
        if (np.diff(np.sort(tokens, axis=1)) == 0).any():
            raise BadRecord(f"{where}: teacher_tokens names a token twice for a token in the loss")
        check_range("token", tokens, self.vocab_size, f"teacher_tokens of {where}")
        best = np.argsort(-log_probs, axis=1, kind="stable")[:, :top_k]
        result = {}
        for name, array, missing, dtype in zip(TEACHER, arrays, (-1, 0), ("i4", "f4")):
            result[name] = np.full((len(in_loss), top_k), missing, dtype)
            result[name][in_loss] = np.take_along_axis(array, best, 1)
        return result

    def _encoded(
        self, values: Mapping[str, Any], name: str, where: str, is_sampled: bool
    ) -> _Encoded:
        prompt = values.get("prompt")
        answer = values.get(name)
        is_truncated = bool(values.get("truncated"))
        if "tokens" in values:
            tokens = _token_ids(values["tokens"], "tokens", where)
            in_loss = array_of(values.get("loss_mask", ()))
            if in_loss.shape != tokens.shape or not np.isin(in_loss, (0, 1)).all():
                raise BadRecord(
                    f"{where}: expected a loss_mask of {len(tokens)} numbers 0 or 1, as many as tokens"
                )
            in_loss = in_loss.astype(bool)
            return tokens, in_loss, _bytes_of(tokens[: in_loss.argmax()])
        if is_chat(answer) or (answer is not None and is_chat(prompt)):
            return self._encoded_chat(read_answer(values, name, where), where, is_truncated)
        for chat_format, key in CHAT_FIELDS.items():
            if key in values and name == "completion" != key:
                chat_format = chat_format if chat_format == "alpaca" else ""
                return self._encoded_chat(
                    read_chat(values[key], values, chat_format, key, where), where, is_truncated
                )
        if prompt is None or answer is None:
            raise BadRecord(
                f"{where}: no trace (the fields are {', '.join(values)}); expected tokens and loss_mask, messages,"
                " prompt and completion, or prompt, chosen and rejected"
            )
        is_text = isinstance(prompt, str)
        is_text_answer = isinstance(answer, str)
        if is_text:
            _check_text(values, where)
        if is_text_answer and not answer:
            raise BadRecord(f"{where}: the field {name!r} is an empty answer")
        if is_text and is_text_answer and not is_sampled:
            self.encoder.note_text(prompt + answer, where)
            text = prompt + answer
            marked = MarkedText(text, where, ((len(prompt), len(text)),))
            tokens, in_loss = self._with_mask(marked, special_tokens=False)
        else:
            parts = [
                self.encoder.plain(x, where) if isinstance(x, str) else _token_ids(x, key, where)
                for x, key in ((prompt, "prompt"), (answer, name))
            ]
            tokens = np.concatenate(parts)
            in_loss = np.arange(len(tokens)) >= len(parts[0])
        if is_text:
            tokens = with_start(tokens, self.encoder.tokenizer)
            in_loss = np.pad(in_loss, (len(tokens) - len(in_loss), 0))
        without_end = (in_loss[1:].sum(),)
        lacks_end = any(array_of(values.get(x)).shape == without_end for x in LOG_PROBS)
        if is_text_answer and not is_truncated and not lacks_end:
            tokens = np.append(tokens, self.encoder.tokenizer.end_of_document_id)
            in_loss = np.append(in_loss, True)
        return tokens, in_loss, _bytes_of(prompt)

    def _encoded_chat(self, chat: Chat, where: str, is_truncated: bool) -> _Encoded:
        marked = self.encoder.render(chat, where)
        if is_truncated:  # without the end of its last answer
            begin, end = marked.answers[-1]
            text = marked.text[:end].removesuffix(self.encoder.template.end_of_turn)
            marked = marked._replace(text=text, answers=(*marked.answers[:-1], (begin, len(text))))
        prompt = marked.text[: marked.answers[0][0]]
        return *self._with_mask(marked), _bytes_of(prompt)

    def _with_mask(
        self, marked: MarkedText, special_tokens: bool = True
    ) -> tuple[np.ndarray, np.ndarray]:
        """The token ids, and which of them belong to an answer."""
        ((tokens, spans),) = self.encoder.encode([marked], special_tokens=special_tokens)
        mask = np.zeros(len(tokens), bool)
        for begin, end in spans:
            mask[begin:end] = True
        return tokens, mask

    def _checked(self, tokens: np.ndarray, where: str) -> np.ndarray:
        wrong = tokens[(tokens < 0) | (tokens >= self.vocab_size)]
        if wrong.size:
            expected = f"expected 0 to {self.vocab_size - 1} (config.model.vocab_size)"
            raise BadRecord(f"{where}: token {wrong[0]}, {expected}")
        return tokens.astype(np.int32)


def _values(record: Record) -> dict[str, Any]:
    """The fields that are not null."""
    if isinstance(record.values, BadRecord):
        raise record.values
    values = {name: x for name, x in record.values.items() if x is not None}
    for name in {"label", "truncated"} & values.keys():
        if values[name] not in (True, False):
            raise BadRecord(f"{record.where}: {name} is {values[name]!r}, expected true or false")
    return values


def _check_text(values: Mapping[str, Any], where: str) -> None:
    """Raises BadRecord if a prompt that is a text has fields of chats."""
    with located(where):
        check_fields(values)
        for name in ("system", "tools"):
            if values.get(name):
                raise BadRecord(
                    f"the field {name!r} has no effect on a text: write the prompt as a list of messages"
                )


def _bytes_of(prompt: str | Sequence[int] | np.ndarray) -> bytes:
    if isinstance(prompt, str):
        return prompt.encode(errors="replace")
    return np.asarray(prompt, np.int64).tobytes()


def _token_ids(value: Any, name: str, where: str) -> np.ndarray:
    ids = token_ids(value, name, where, "text or a list of token ids")
    if not len(ids):
        raise BadRecord(f"{where}: {name} is an empty list, expected text or a list of token ids")
    return ids


def _other_fields(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    fields: dict[str, Any] = {
        name: str(values[name]) for name in ("group", "trajectory") if name in values
    }
    if "trajectory" in fields and "group" not in fields:
        raise BadRecord(f"{where}: a trajectory without a group; record the group, too")
    policy_step = values.get("policy_step")
    if policy_step is not None and not (isinstance(policy_step, int) and policy_step >= 0):
        raise BadRecord(
            f"{where}: policy_step is {policy_step!r}, expected the number of a training step"
        )
    fields |= dict(policy_step=policy_step, label=values.get("label"))
    for name in {"reward", "advantage"} & values.keys():
        value = values[name]
        if not (isinstance(value, (int, float)) and abs(value) < _FLOAT32_END):
            raise BadRecord(f"{where}: {name} is {value!r}, expected a finite number")
        fields[name] = float(value)
    return fields


def _log_probs(value: Sequence[float], name: str, in_loss: np.ndarray, where: str) -> np.ndarray:
    numbers = array_of(value)
    num_expected = int(in_loss.sum())
    if numbers.shape != (num_expected,) or not np.issubdtype(numbers.dtype, np.number):
        raise BadRecord(
            f"{where}: expected {num_expected} numbers in {name}, one for each token in the loss"
        )
    if not (np.isfinite(numbers) & (numbers <= 1e-3)).all():
        raise BadRecord(f"{where}: {name} has a number that is no logarithm of a probability")
    result = np.zeros(len(in_loss), np.float32)
    result[in_loss] = numbers
    return result


_NPY_MAGIC = b"\x93NUMPY"


def recorded_experts(
    values: Mapping[str, Any], num_tokens: int, model: ModelConfig, where: str
) -> np.ndarray:
    """The experts that a record has, of `loader.experts_dtype` [num_tokens]; the largest value: none.

    Raises:
      UserError: it has none, or those of another model or of other tokens.
    """
    dtype = experts_dtype(model)
    num_experts = model.experts.num_experts
    num_layers, num_chosen = dtype.shape
    first = values.get("routed_experts_start_len", 0)
    if not isinstance(first, int) or not 0 <= first < num_tokens:
        raise BadRecord(
            f"{where}: routed_experts_start_len is {first!r}, expected an integer from 0 to"
            f" {num_tokens - 1}"
        )
    if not isinstance(value := values.get("routed_experts"), (bytes, str)):
        problem = "no routed_experts" if value is None else f"routed_experts is {kind_of(value)}"
        raise BadRecord(
            f"{where}: {problem}, expected the bytes of a .npy file, in JSON as base64 text, which"
            " config.posttrain.replay_routing=True needs; record them in sampling, or set it to False"
        )
    expected = num_tokens - 1 - first, num_chosen
    rows = stored_array(
        values, "routed_experts", where, values.get("routed_experts_dtype", "int32")
    )
    if rows.ndim == 1 and all(expected) and not rows.size % math.prod(expected):
        rows = rows.reshape(expected[0], -1, num_chosen)
    if (
        rows.ndim != 3
        or rows.shape[::2] != expected
        or rows.shape[1] not in (num_layers, model.num_layers)
        or not np.issubdtype(rows.dtype, np.integer)
    ):
        layers = " or ".join(dict.fromkeys(map(str, (num_layers, model.num_layers))))
        raise BadRecord(
            f"{where}: routed_experts is {rows.dtype}{list(rows.shape)}, expected integers [{expected[0]}, {layers},"
            f" {num_chosen}]: tokens but the last, layers, config.model.experts.experts_per_token; record them with"
            " this model"
        )
    if rows.shape[1] != num_layers:
        rows = rows[:, model.layers_with_experts]
    end = np.iinfo(rows.dtype).max
    is_missing = rows == (end if rows.dtype.kind == "u" and end >= num_experts else -1)
    experts = np.where(is_missing, 0, rows)
    expected = (
        f"0 to {num_experts - 1} (config.model.experts.num_experts); record it with this model"
    )
    check_range("expert", experts, num_experts, f"routed_experts of {where}", expected)
    result = np.full((num_tokens, *dtype.shape), np.iinfo(dtype.base).max, dtype.base)
    np.copyto(result[first:-1], experts, where=~is_missing, casting="unsafe")
    return result


def stored_array(values: Mapping[str, Any], name: str, where: str, dtype: Any = None) -> np.ndarray:
    """The array of a field: of a .npy file, or of numbers of `dtype` alone, from bytes or their base64
    text; or of a list.
    """
    try:
        value = values[name]
        content = base64.b64decode(value, validate=True) if isinstance(value, str) else value
        if not isinstance(content, bytes):
            return array_of(content)
        if content.startswith(_NPY_MAGIC):
            return np.load(io.BytesIO(content), allow_pickle=False)
        return np.frombuffer(content, dtype)
    except Exception as error:  # numpy raises several for wrong headers
        raise BadRecord(
            f"{where}: {name} is no array ({reason_of(error)}), expected the bytes of a .npy file, in JSON as base64"
            " text"
        ) from error


def encoded_array(array: np.ndarray) -> bytes:
    """The value of a field that has an array, such as routed_experts."""
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()
