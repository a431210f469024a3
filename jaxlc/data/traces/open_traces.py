"""Opens the traces of a config: reads them, computes advantages, builds trees, and packs them."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from jaxlc.config import Config
from jaxlc.core.errors import UserError
from jaxlc.data.corpus import MANY
from jaxlc.data.sequences.loader import array_dtypes
from jaxlc.data.texts.documents import Notes
from jaxlc.data.texts.records import RECORD_SUFFIXES, BadRecord, Record, read_records
from jaxlc.data.texts.sources import list_files
from jaxlc.data.tokens.encoder import Encoder
from jaxlc.data.tokens.tokenizers import Tokenizer
from jaxlc.data.traces.packed_traces import PackedTraces, fingerprint, with_advantages
from jaxlc.data.traces.trace_records import CHOSEN, FIELDS, REJECTED, Trace, TraceReader
from jaxlc.data.traces.trace_trees import Tree, groups_of, trees_of

T = TypeVar("T")
_SETTING = "data.traces"


@dataclass(frozen=True, kw_only=True)
class TraceData:
    """Training and held-out sequences of traces. A group is in one of them as a whole."""

    train: PackedTraces
    heldout: PackedTraces | None  # None: no group is held out
    fingerprint: str
    description: str
    rewards: dict[str, float]  # means over the traces, or over the groups, for metrics
    warnings: tuple[str, ...]
    tokenizer: Tokenizer

    @property
    def traces(self) -> tuple[Trace, ...]:
        """The traces of training and held-out sequences."""
        return self.train.traces + (self.heldout.traces if self.heldout else ())


def open_traces(
    config: Config, tokenizer: Tokenizer, sources: Sequence[str] = (), *, holds_out: bool = True
) -> TraceData:
    """The traces of config.data.traces.

    Args:
      sources: instead of these.
      holds_out: hold out data.eval_fraction of the groups.
    Raises:
      UserError: a file or record cannot be read, lacks what posttrain.loss needs, or is longer than a sequence.
    """
    warnings: list[str] = []
    reader = _reader(config, tokenizer)
    read = _read(sources or config.data.traces, _SETTING, reader.read, FIELDS, reader, config, warnings)
    traces = list(_fitting(read, config, warnings))
    groups = list(groups_of(traces))
    _check_log_probs(traces, config)
    if config.posttrain.loss == "dpo":
        groups = list(_pairs(groups, config, warnings))
    if not groups:
        raise UserError("config.data.traces has no trace that can be used")
    if config.posttrain.loss:
        groups = [with_advantages(group, config.posttrain) for group in groups]
        warnings += _without_gradient(groups, config) if holds_out else []
    is_heldout = [holds_out and _hash_of(group) < config.data.eval_fraction for group in groups]
    parts = [[group for group, held in zip(groups, is_heldout) if held == which] for which in (False, True)]
    if not parts[0]:
        parts = [groups, []]
    trees_of_groups = [[list(_trees(group, config)) for group in part] for part in parts]
    num_repeated = sum(len(trees) - 1 for part in trees_of_groups for trees in part if trees[0].num_prefix_tokens)
    if num_repeated:
        warnings.append(f"data.traces: prefixes that are repeated, since a group does not fit: {num_repeated:,}")
    train_trees, heldout_trees = ([tree for trees in part for tree in trees] for part in trees_of_groups)
    train = PackedTraces(train_trees, config, config.data.seed)
    return TraceData(
        train=train,
        heldout=PackedTraces(heldout_trees, config, None) if heldout_trees else None,
        fingerprint=fingerprint(traces, config),
        rewards=_rewards(groups),
        description=_description(train_trees, train, len(parts[0]), len(parts[1])),
        warnings=tuple(warnings),
        tokenizer=tokenizer,
    )


class Prompt(NamedTuple):
    """A prompt of rollouts."""

    ids: np.ndarray  # int32 [tokens]
    text: str
    record: Mapping[str, Any]
    where: str


class Prompts(NamedTuple):
    prompts: list[Prompt]
    tokenizer: Tokenizer
    warnings: list[str]


def open_prompts(config: Config, tokenizer: Tokenizer) -> Prompts:
    """The prompts of config.rollouts.prompts.

    Raises:
      UserError: a file or record cannot be read, or a prompt does not fit into a sequence with an answer.
    """

    def read(record: Record) -> list[Prompt]:
        return [Prompt(*reader.prompt(record), record.values, record.where)]

    warnings: list[str] = []
    reader = _reader(config, tokenizer)
    prompts = list(_read(config.rollouts.prompts, "rollouts.prompts", read, None, reader, config, warnings))
    max_tokens, seq_len = config.rollouts.max_tokens, config.data.seq_len
    for prompt in prompts:
        num_tokens = len(prompt.ids) + max_tokens - 1
        if num_tokens > seq_len:
            raise UserError(
                f"{prompt.where}: a prompt of {len(prompt.ids):,} tokens and config.rollouts.max_tokens do not fit into"
                f" config.data.seq_len={seq_len:,}; increase it to {num_tokens:,}, or remove the prompt"
            )
    if not prompts:
        raise UserError("config.rollouts.prompts has no prompt")
    return Prompts(prompts, tokenizer, warnings)


def _reader(config: Config, tokenizer: Tokenizer) -> TraceReader:
    encoder = Encoder(tokenizer, config.data.chat_template, Notes(config.data.max_bad_records))
    return TraceReader(encoder, config.model.vocab_size)


def _read(
    sources: Sequence[str],
    setting: str,
    read: Callable[[Record], Iterable[T]],
    fields: Sequence[str] | None,
    reader: TraceReader,
    config: Config,
    warnings: list[str],
) -> Iterator[T]:
    """Yields what `read` makes of the records that can be used."""
    for file in list_files(sources, setting).files:
        for record in records_of(file.path, fields):
            try:
                yield from read(record)
            except BadRecord as error:
                reader.encoder.notes.skip(error)
    warnings += reader.encoder.notes.lines(setting)


def records_of(path: Path, fields: Sequence[str] | None = None) -> Iterator[Record]:
    """The records of a file of traces.

    Args:
      fields: of Parquet and Arrow files, the columns to read; None: all.
    Raises:
      UserError: the file cannot be read.
    """
    if not path.name.endswith(RECORD_SUFFIXES):
        raise UserError(f"{path} has no records of traces; expected a file {', '.join(RECORD_SUFFIXES)}")
    if not path.is_file():
        raise UserError(f"{path} does not exist")
    yield from read_records(path, "", others=fields, setting=_SETTING, field_setting=_SETTING)


def _fitting(traces: Iterator[Trace], config: Config, warnings: list[str]) -> Iterator[Trace]:
    """The traces that fit into a sequence; data.overlong_traces says what happens to others."""
    seq_len, rule, num_overlong = config.data.seq_len, config.data.overlong_traces, 0
    for trace in traces:
        if len(trace.tokens) - 1 <= seq_len:
            yield trace
            continue
        num_overlong += 1
        if rule == "error":
            raise UserError(
                f"{trace.where}: a trace of {len(trace.tokens):,} tokens is longer than"
                f" config.data.seq_len={seq_len:,}; increase it, or set config.data.overlong_traces to drop or truncate"
            )
        if rule == "truncate" and trace.num_prompt_tokens <= seq_len:
            yield trace.cut(seq_len + 1)
    if num_overlong:
        done = dict(drop="dropped", truncate="truncated, or dropped where only the prompt fits")[rule]
        warnings.append(f"data.traces: longer than data.seq_len={seq_len}: {num_overlong:,}; they are {done}")


def _check_log_probs(traces: Sequence[Trace], config: Config) -> None:
    advice = dict(
        reference_log_probs="set --config.posttrain.reference=model, or base with LoRA, or add them with `jaxlc"
        " logprobs`",
        old_log_probs="set --config.posttrain.old_log_probs=policy, or add them with `jaxlc logprobs`",
    )
    if config.posttrain.old_log_probs != "record":
        del advice["old_log_probs"]  # a metric uses them where they exist
    for name in set(array_dtypes(config)) & set(advice):
        for trace in traces:
            if name not in trace.log_probs:
                needs = f"config.posttrain.loss={config.posttrain.loss!r} needs"
                raise UserError(f"{trace.where}: no {name}, which {needs}; {advice[name]}")


def _trees(group: Sequence[Trace], config: Config) -> Iterator[Tree]:
    yield from trees_of(group, config.data.seq_len, shares=config.attention.shared_prefixes)


def _pairs(groups: Sequence[list[Trace]], config: Config, warnings: list[str]) -> Iterator[list[Trace]]:
    """The groups that are pairs for dpo, which is one tree of two branches; data.overlong_traces=drop drops others."""
    num_dropped = 0
    for group in groups:
        trees = list(_trees(group, config))
        is_pair = [trace.advantage for trace in group] == [CHOSEN, REJECTED]
        if is_pair and len(trees) == 1 and trees[0].num_prefix_tokens:
            yield group
        elif config.data.overlong_traces == "drop":
            num_dropped += 1
        else:
            raise UserError(
                f"{group[0].where}: config.posttrain.loss='dpo' needs chosen and rejected answers with a common prompt"
                f" of at least 2 tokens that fit into config.data.seq_len={config.data.seq_len:,} together; to drop"
                " others, set config.data.overlong_traces to drop"
            )
    if num_dropped:
        warnings.append(f"data.traces: no pairs that fit into data.seq_len, which are dropped: {num_dropped:,}")


def _hash_of(group: Sequence[Trace]) -> float:
    """From 0 to 1; of the prompt, so that it does not depend on the answers."""
    trace = group[0]
    digest = hashlib.sha256(trace.tokens[: trace.num_prompt_tokens].tobytes()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def _rewards(groups: Sequence[Sequence[Trace]]) -> dict[str, float]:
    traces = [trace for group in groups for trace in group]
    rewards = [trace.reward for trace in traces if trace.reward is not None]
    means = dict(
        answer_tokens=np.mean([trace.in_loss.sum() for trace in traces]),
        truncated=np.mean([trace.is_truncated for trace in traces]),
        no_advantage=_share_without_advantage(groups),
    )
    if rewards:
        means |= dict(reward=np.mean(rewards), reward_deviation=np.std(rewards))
        means |= dict(reward_min=min(rewards), reward_max=max(rewards))
    policy_steps = [trace.policy_step for trace in traces]
    if None not in policy_steps:
        means |= dict(policy_step=np.mean(policy_steps))
    return {name: float(x) for name, x in means.items()}


def _without_gradient(groups: Sequence[Sequence[Trace]], config: Config) -> Iterator[str]:
    """Warns about traces that are masked, and groups without an advantage, if they are many.

    Raises:
      UserError: all traces are masked.
    """
    num_traces = sum(map(len, groups))
    num_masked = sum(trace.is_truncated for group in groups for trace in group) * config.posttrain.mask_truncated
    if num_masked == num_traces:
        raise UserError(
            "config.posttrain.mask_truncated=True masks all traces of config.data.traces: no token has a loss"
        )
    for what, fraction in (
        ("truncated traces, which posttrain.mask_truncated masks", num_masked / num_traces),
        ("groups without an advantage, such as those with equal rewards", _share_without_advantage(groups)),
    ):
        if fraction > MANY:
            yield f"data.traces: {what}: {fraction:.0%}; they have no gradient"


def _share_without_advantage(groups: Sequence[Sequence[Trace]]) -> float:
    """The share of the groups without a gradient: of one trace, or of equal rewards."""
    return float(np.mean([not any(trace.advantage for trace in group) for group in groups]))


def _description(trees: Sequence[Tree], train: PackedTraces, num_groups: int, num_heldout: int) -> str:
    separate = sum(len(trace.tokens) - 1 for tree in trees for trace in tree.traces)
    is_shared = separate > train.num_tokens
    shared = f", {separate / train.num_tokens:.1f} times fewer than in separate rows" if is_shared else ""
    return (
        f"{train.num_traces:,} traces of {num_groups:,} groups in {train.num_sequences:,} sequences;"
        f" {train.num_tokens:,} tokens{shared}; held out: {num_heldout:,} groups"
    )
