"""The data source of traces: reads them, computes advantages, builds trees and packs them. Reads
prompts, too.
"""

import contextlib
import functools
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from jaxlc.config import Config, DataConfig, unchecked
from jaxlc.config.checks.all_checks import check
from jaxlc.config.schema import PosttrainConfig
from jaxlc.core import UserError
from jaxlc.data.sequences.loader import (
    MANY,
    DataSource,
    Inputs,
    ShownTokens,
    SourceShare,
    SourceView,
    array_dtypes,
)
from jaxlc.data.sequences.packing import epoch_order
from jaxlc.data.texts.documents import Notes
from jaxlc.data.texts.records import RECORD_SUFFIXES, BadRecord, Record, has_suffix, read_records
from jaxlc.data.texts.sources import list_files
from jaxlc.data.tokens.encoder import Encoder
from jaxlc.data.tokens.tokenizers import Tokenizer
from jaxlc.posttrain.records import (
    CHOSEN,
    EXPERTS_FIELDS,
    FIELDS,
    REJECTED,
    TEACHER_FIELDS,
    Trace,
    TraceReader,
)
from jaxlc.posttrain.trees import (
    PackedTraces,
    Tree,
    experts_differ,
    fingerprint,
    groups_of,
    labeled_steps,
    trajectories_of,
    trees_of,
    with_advantages,
)

T = TypeVar("T")
Group = Sequence[Trace]
_SETTING = "data.traces"


@dataclass(frozen=True, kw_only=True)
class Traces(DataSource):
    """Training and held-out sequences of traces. A group is in one of them as a whole."""

    train: PackedTraces
    heldout: PackedTraces | None  # None: no group is held out
    # means over the traces, the groups, or the tokens of prefixes, for metrics
    rewards: dict[str, float]

    @classmethod
    def open(cls, config: Config, inputs: Inputs) -> "Traces":
        with inputs.progress("reading the traces"):
            return open_traces(config, inputs.tokenizer)

    @property
    def epoch_sequences(self) -> int:
        return self.train.num_sequences

    @property
    def traces(self) -> tuple[Trace, ...]:
        """The traces of training and held-out sequences."""
        return self.train.traces + (self.heldout.traces if self.heldout else ())

    def views(self) -> list[SourceView]:
        """The traces, as trees."""
        return [
            SourceView(
                name=_SETTING,
                unit="trace",
                lengths=np.array([len(trace.tokens) for trace in self.traces]),
                num_loss_tokens=_num_in_loss(self.traces),
                examples=([*self._shown(tree)] for tree in self.train.trees),
            )
        ]

    def shares(self, num_sequences: int) -> list[SourceShare]:
        num_epochs = num_sequences / self.train.num_sequences
        num_tokens = round(self.train.num_tokens * num_epochs)
        return [
            SourceShare(
                _SETTING,
                1.0,
                1.0,
                num_tokens,
                num_epochs,
                len(self.train.traces),
                self.train.num_tokens,
            )
        ]

    def details(self) -> list[str]:
        """Groups, shared prefixes, tokens in the loss and means of rewards."""
        num_tokens = sum(len(trace.tokens) for trace in self.train.traces)
        num_in_loss = _num_in_loss(self.train.traces)
        shared = [
            node.end - node.first
            for tree in self.train.trees
            for _, node in tree.nodes()
            if len(node.traces) > 1
        ]
        return [
            f"traces     {self.description}",
            f"loss       {num_in_loss:,} of {num_tokens:,} tokens ({num_in_loss / max(1, num_tokens):.1%})",
            f"prefixes   {len(shared):,} shared ones of {sum(shared):,} tokens",
            "means      " + ", ".join(f"{name} {x:.4g}" for name, x in self.rewards.items()),
        ]

    def _shown(self, tree: Tree) -> Iterator[ShownTokens]:
        """The nodes, each with the token that its last one predicts."""
        titles = {
            id(trace): _title(trace, f"answer {number} of {len(tree.traces)}")
            for number, trace in enumerate(tree.traces, start=1)
        }
        for depth, node in tree.nodes():
            shared = [f"shared by {len(node.traces)} answers"] * (len(node.traces) > 1)
            ending = [titles[id(x)] for x in node.traces if len(x.tokens) - 1 <= node.end]
            tokens = node.trace.tokens[node.first : node.end + 1]
            has_loss = np.zeros(len(tokens), bool)
            for trace in node.traces:
                if trace.has_loss:
                    in_loss = trace.in_loss[node.first + 1 : node.end + 1]
                    has_loss[: len(in_loss)] |= in_loss
            yield ShownTokens("; ".join([*shared, *ending]), tokens, has_loss, depth)


def _num_in_loss(traces: Group) -> int:
    return int(sum(trace.in_loss.sum() for trace in traces if trace.has_loss))


def _title(trace: Trace, number: str) -> str:
    group = None if (trace.group or "").startswith("pair ") else trace.group
    known = dict(
        group=group, trajectory=trace.trajectory, reward=trace.reward, advantage=trace.advantage
    )
    parts = [trace.where or "mismatched", number]
    parts += [
        f"{name} {x if isinstance(x, str) else f'{x:.4g}'}"
        for name, x in known.items()
        if x is not None
    ]
    return ", ".join(parts + ["truncated"] * trace.is_truncated)


def open_traces(
    config: Config, tokenizer: Tokenizer, sources: Sequence[str] = (), *, step: int | None = None
) -> Traces:
    """The traces of config.data.traces.

    Args:
      sources: instead of these.
      step: of rollouts: the training step that uses them. No group is held out, and those that are packed may be none.
    Raises:
      UserError: a file or record cannot be read, lacks what posttrain.loss needs, or is longer than a sequence.
    """
    data = config.data
    posttrain = config.posttrain
    dtypes = array_dtypes(config)
    fields = FIELDS
    if posttrain.replay_routing:
        fields += EXPERTS_FIELDS
    if posttrain.teacher_top_k:
        fields += TEACHER_FIELDS
    read, notes = _read(
        config, tokenizer, sources or data.traces, _SETTING,
        lambda reader, record: reader.read(record) or [None], fields,
    )  # fmt: skip
    traces = list(_fitting(filter(None, read), data, notes))
    num_read = len(traces)
    if step is not None:
        traces = _recent(traces, step, config.rollouts.max_policy_age)
    _check_log_probs(traces, dtypes, posttrain)
    traces = [_prepared(trace, posttrain) for trace in traces]
    levels = config.attention.shared_prefixes
    trees = functools.partial(trees_of, seq_len=data.seq_len, levels=levels)
    groups = list(groups_of(traces))
    if posttrain.is_pairwise:
        groups = list(_pairs(groups, trees, config, notes))
    if not groups:
        raise UserError("config.data.traces has no trace that can be used")
    if posttrain.loss:
        groups = [with_advantages(group, posttrain) for group in groups]
    rewards = _rewards(groups, step) | dict(too_old=num_read - len(traces))
    is_checked = posttrain.loss and step is None
    without_gradient = [*_without_gradient(rewards, posttrain.mask_truncated)] if is_checked else []
    train_groups, heldout_groups = _split(groups, data.eval_fraction if step is None else 0.0)
    num_groups = len(train_groups)
    if posttrain.loss and posttrain.no_advantage == "drop":
        train_groups = [group for group in train_groups if _has_advantage(group)]
        if not train_groups and step is None:
            raise UserError(
                "no group of config.data.traces has an advantage, so no token has a gradient: give the answers of a"
                " prompt different rewards, or set config.posttrain.no_advantage to keep"
            )
    heldout_trees = [tree for group in heldout_groups for tree in trees(group)]
    sequences = None
    if posttrain.loss == "kto":
        sequences = _steps(train_groups, config)
        train_trees = list(itertools.chain(*sequences))
    else:
        train_trees = [tree for group in train_groups for tree in trees(group)]
    all_trees = [*train_trees, *heldout_trees]
    for tree in all_trees:
        if tree.repeats:
            notes.add("prefixes that are repeated, since a group does not fit", tree.trace.where)
    rewards["failed"] = float(read.count(None))
    if posttrain.replay_routing:
        rewards["experts_differ"] = experts_differ(all_trees)
    packed = functools.partial(
        PackedTraces, seq_len=data.seq_len, dtypes=dtypes, shared_tokens=data.shared_tokens
    )
    train = packed(train_trees, seed=data.seed, sequences=sequences)
    settings = _settings(config, num_groups - len(train_groups))
    return Traces(
        tokenizer=tokenizer,
        train=train,
        heldout=packed(heldout_trees) if heldout_trees else None,
        fingerprint=fingerprint(traces, settings, dtypes),
        description=_description(train, len(train_groups), len(heldout_groups)),
        warnings=(*notes.lines(_SETTING), *without_gradient),
        rewards=rewards,
    )


def _steps(groups: Sequence[Group], config: Config) -> list[list[Tree]]:
    """The trees of each sequence of kto."""
    data = config.data
    shuffled = epoch_order(len(groups), data.seed, 0)
    traces = [trace for number in shuffled for trace in groups[number]]
    levels = config.attention.shared_prefixes
    return labeled_steps(traces, data.seq_len, config.train.global_batch_size, levels=levels)


def _settings(config: Config, num_dropped: int) -> tuple[object, ...]:
    """What the sequences depend on, besides traces."""
    data = config.data
    posttrain = config.posttrain
    levels = config.attention.shared_prefixes
    return (
        data.seq_len,
        data.seed,
        data.eval_fraction,
        posttrain.scale_advantages,
        posttrain.mask_truncated,
        *([num_dropped] if num_dropped else []),
        *([levels, data.shared_tokens] if levels > 1 else []),
        *([config.train.global_batch_size] if posttrain.loss == "kto" else []),
    )


class Prompt(NamedTuple):
    """A prompt of rollouts."""

    ids: np.ndarray  # int32 [tokens]
    text: str
    record: Mapping[str, Any]
    where: str


def open_prompts(
    config: Config, tokenizer: Tokenizer, name: str = "prompts"
) -> tuple[list[Prompt], list[str]]:
    """The prompts of config.rollouts.prompts, none if it is empty, and warnings.

    Args:
      name: "eval_prompts": of that setting.
    Raises:
      UserError: a file or record cannot be read, or a prompt does not fit into a sequence with an answer.
    """

    def read(reader: TraceReader, record: Record) -> list[Prompt]:
        return [Prompt(*reader.prompt(record), record.values, record.where)]

    rollouts = config.rollouts
    seq_len = config.data.seq_len
    setting = f"rollouts.{name}"
    sources = vars(rollouts)[name]
    prompts, notes = _read(config, tokenizer, sources, setting, read)
    for prompt in prompts:
        num_tokens = len(prompt.ids) + rollouts.max_tokens - 1
        if num_tokens > seq_len:
            raise UserError(
                f"{prompt.where}: a prompt of {len(prompt.ids):,} tokens and config.rollouts.max_tokens do not fit into"
                f" config.data.seq_len={seq_len:,}; increase it to {num_tokens:,}, or remove the prompt"
            )
    if sources and not prompts:
        raise UserError(f"config.{setting} has no prompt")
    return prompts, notes.lines(setting)


def _read(
    config: Config,
    tokenizer: Tokenizer,
    sources: Sequence[str],
    setting: str,
    read: Callable[[TraceReader, Record], Iterable[T]],
    fields: Sequence[str] | None = None,
) -> tuple[list[T], Notes]:
    """What `read` makes of the records that can be used, and what was noticed."""
    notes = Notes(config.data.max_bad_records)
    encoder = Encoder(tokenizer, config.data.chat_template, notes)
    reader = TraceReader(
        encoder,
        config.model.vocab_size,
        config.model if config.posttrain.replay_routing else None,
        config.posttrain.teacher_top_k,
        refuses_labels=not config.posttrain.is_labeled,
    )
    items = []
    for file in list_files(sources, setting).files:
        for record in records_of(file.path, fields):
            try:
                items += read(reader, record)
            except BadRecord as error:
                notes.skip(error)
    return items, notes


def records_of(path: Path, fields: Sequence[str] | None = None) -> Iterator[Record]:
    """The records of a file of traces.

    Args:
      fields: of Parquet and Arrow files, the columns to read; None: all.
    Raises:
      UserError: the file cannot be read.
    """
    if not has_suffix(path, RECORD_SUFFIXES):
        raise UserError(
            f"{path} has no records of traces; expected a file {', '.join(RECORD_SUFFIXES)}"
        )
    if not path.is_file():
        raise UserError(f"{path} does not exist")
    yield from read_records(path, "", others=fields, setting=_SETTING)


def _fitting(traces: Iterable[Trace], data: DataConfig, notes: Notes) -> Iterator[Trace]:
    """The traces that fit into a sequence; data.overlong_traces says what happens to others."""
    seq_len = data.seq_len
    rule = data.overlong_traces
    for trace in traces:
        if len(trace.tokens) - 1 <= seq_len:
            yield trace
            continue
        if rule == "error":
            raise UserError(
                f"{trace.where}: a trace of {len(trace.tokens):,} tokens is longer than"
                f" config.data.seq_len={seq_len:,}; increase it, or set config.data.overlong_traces to drop or truncate"
            )
        is_kept = rule == "truncate" and trace.num_prompt_tokens <= seq_len
        done = "truncated" if is_kept else "dropped"
        notes.add(f"traces longer than data.seq_len={seq_len}, which are {done}", trace.where)
        if is_kept:
            yield trace.cut(seq_len + 1)


def _check_log_probs(
    traces: Group, dtypes: Mapping[str, np.dtype], posttrain: PosttrainConfig
) -> None:
    advice = dict(
        reference_log_probs="set --config.posttrain.reference=model, or base with LoRA, or add them with `jaxlc"
        " logprobs`",
        old_log_probs="set --config.posttrain.old_log_probs=policy, or add them with `jaxlc logprobs`",
        sampled_log_probs="record the values of the sampler, or set --config.posttrain.importance_weights=False,"
        " off_policy_mask_threshold=0 and old_log_probs=policy",
    )
    if not posttrain.uses_sampled:
        del advice["sampled_log_probs"]  # metrics use them where they exist
    for name in set(dtypes) & set(advice):
        for trace in traces:
            if name not in trace.recorded:
                needs = f"config.posttrain.loss={posttrain.loss!r} needs"
                raise UserError(f"{trace.where}: no {name}, which {needs}; {advice[name]}")
    if posttrain.importance_weights and posttrain.old_log_probs == "record":
        pairs = [(x.recorded["old_log_probs"], x.recorded["sampled_log_probs"]) for x in traces]
        if pairs and all(itertools.starmap(np.array_equal, pairs)):
            raise UserError(
                f"{traces[0].where}: old_log_probs are the sampler's, since they equal sampled_log_probs of all traces,"
                " and config.posttrain.importance_weights=True compares both; compute old_log_probs with `jaxlc"
                " logprobs`, or set --config.posttrain.old_log_probs=policy"
            )


def with_reference(config: Config) -> Config:
    """The config with the meaning of posttrain.reference=auto: record if the first record of a
    file of config.data.traces has the field, or no other reference is set.

    Raises:
      UserError: the meaning contradicts other settings.
    """
    posttrain = config.posttrain
    named = config.posttrain.reference_model or config.model.init_from
    if not posttrain.uses_reference or posttrain.reference != "auto":
        return config
    meaning = "record"
    if posttrain.loss == "kto" or not _has_reference(config.data.traces):
        if config.lora.rank and not config.train.trainable:
            meaning = "base"
        elif named or posttrain.loss == "kto":
            meaning = "model"
    resolved = unchecked(config, {"posttrain.reference": meaning})
    check(resolved, on_devices=False)
    return resolved


def _has_reference(sources: Sequence[str]) -> bool:
    """Whether the first record of a file has log-probabilities of a reference; False if there are no
    files.
    """
    with contextlib.suppress(UserError):
        for file in list_files(sources, _SETTING).files if sources else ():
            for record in records_of(file.path, ("reference_log_probs",)):
                values = record.values
                if isinstance(values, Mapping) and "reference_log_probs" in values:
                    return True
                break
    return False


def _prepared(trace: Trace, posttrain: PosttrainConfig) -> Trace:
    """The trace with the advantage that its label or the loss means; truncated ones may be masked."""
    advantage = trace.advantage
    if posttrain.is_labeled:
        if trace.label is None:
            raise UserError(
                f"{trace.where}: no label, which config.posttrain.loss={posttrain.loss!r} needs; record true for a"
                " desirable answer and false for others, or chosen and rejected answers"
            )
        advantage = CHOSEN if trace.label else REJECTED
    if posttrain.loss == "reverse_kl":  # the loss computes an advantage for each token
        advantage = 1.0
    has_loss = not (posttrain.mask_truncated and trace.is_truncated)
    return replace(trace, advantage=advantage, has_loss=has_loss)


def _pairs(
    groups: Sequence[list[Trace]],
    trees: Callable[[Group], list[Tree]],
    config: Config,
    notes: Notes,
) -> Iterator[list[Trace]]:
    """The groups that are pairs, which is one tree of two branches; data.overlong_traces=drop drops
    others.
    """
    data = config.data
    for group in groups:
        is_pair = [trace.advantage for trace in group] == [CHOSEN, REJECTED]
        parts = trees(group)
        if is_pair and len(parts) == 1:
            yield group
        elif data.overlong_traces == "drop":
            note = "groups that are no pair that fits into data.seq_len, which are dropped"
            notes.add(note, group[0].where)
        else:
            raise UserError(
                f"{group[0].where}: config.posttrain.loss={config.posttrain.loss!r} needs chosen and rejected answers"
                " with a common prompt of at least 2 tokens that fit into"
                f" config.data.seq_len={data.seq_len:,} together; to drop others, set config.data.overlong_traces to"
                " drop"
            )


def _split(groups: Sequence[Group], eval_fraction: float) -> tuple[list[Group], list[Group]]:
    """The groups to train on, and the held-out ones, by a hash of the prompt; all for training if
    it is on one side.
    """
    train: list[Group] = []
    heldout: list[Group] = []
    for group in groups:
        trace = group[0]
        digest = hashlib.sha256(trace.tokens[: trace.num_prompt_tokens].tobytes()).digest()
        is_heldout = int.from_bytes(digest[:8], "big") / 2**64 < eval_fraction
        (heldout if is_heldout else train).append(group)
    return (train, heldout) if train else (heldout, [])


def _recent(traces: Sequence[Trace], step: int, limit: int) -> list[Trace]:
    """The traces of at most the age `limit`, training steps between the weights that made a trace
    and those that `step` updates; -1: of any age.

    Raises:
      UserError: there are none, or a trace is of weights that do not exist before the step.
    """
    recent = []
    for trace in traces:
        if (trace.policy_step or 0) >= step:
            raise UserError(
                f"{trace.where}: policy_step is {trace.policy_step}, and rollouts of step {step} are by the weights"
                f" after step {step - 1} or an earlier one; record the step of the weights that made them"
            )
        if limit >= 0 and trace.policy_step is None:
            raise UserError(
                f"{trace.where}: no policy_step, which config.rollouts.max_policy_age needs; record it, or set that to"
                " -1"
            )
        if limit < 0 or step - 1 - trace.policy_step <= limit:
            recent.append(trace)
    if traces and not recent:
        raise UserError(
            f"{traces[0].where}: all rollouts of step {step} are older than config.rollouts.max_policy_age={limit};"
            " increase it, or make rollouts with newer weights"
        )
    return recent


def _rewards(groups: Sequence[Group], step: int | None) -> dict[str, float]:
    traces = [trace for group in groups for trace in group]
    trajectories = [traces for group in groups for traces in trajectories_of(group)]
    rewards = [x[-1].reward for x in trajectories if x[-1].reward is not None]
    num_equal = sum(not _has_advantage(group) for group in groups)
    means = dict(
        answer_tokens=np.mean([trace.in_loss.sum() for trace in traces]),
        truncated=np.mean([trace.is_truncated for trace in traces]),
        no_advantage=num_equal / len(groups),
        no_advantage_groups=num_equal,
    )
    if rewards:
        means |= dict(reward=np.mean(rewards), reward_deviation=np.std(rewards))
        names = "reward_p10", "reward_p90", "reward_min", "reward_max"
        means |= zip(names, np.quantile(rewards, (0.1, 0.9, 0, 1)))
    versions = [trace.policy_step for trace in traces]
    if step is not None and None not in versions:
        ages = step - 1 - np.array(versions)
        means |= dict(policy_age=ages.mean(), policy_age_max=ages.max())
    return {name: float(x) for name, x in means.items()}


def _without_gradient(means: Mapping[str, float], masks_truncated: bool) -> Iterator[str]:
    """Warns about traces that are masked, and groups without an advantage, if they are many.

    Args:
      means: of `_rewards`.
    Raises:
      UserError: all traces are masked.
    """
    masked = means["truncated"] * masks_truncated
    if masked == 1:
        raise UserError(
            "config.posttrain.mask_truncated=True masks all traces of config.data.traces: no token has a loss"
        )
    for what, fraction in (
        ("truncated traces, which posttrain.mask_truncated masks", masked),
        ("groups without an advantage, such as those with equal rewards", means["no_advantage"]),
    ):
        if fraction > MANY:
            yield f"data.traces: {what}: {fraction:.0%}; they have no gradient"


def _has_advantage(group: Group) -> bool:
    return any(trace.advantage for trace in group)


def _description(train: PackedTraces, num_groups: int, num_heldout: int) -> str:
    ratio = sum(len(trace.tokens) - 1 for trace in train.traces) / max(1, train.num_tokens)
    shared = f", {ratio:.1f} times fewer than in separate rows" if ratio > 1 else ""
    return (
        f"{len(train.traces):,} traces of {num_groups:,} groups in {train.num_sequences:,} sequences;"
        f" {train.num_tokens:,} tokens{shared}; held out: {num_heldout:,} groups"
    )
