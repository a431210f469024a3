"""Estimated times of a step for packed sequences with given documents: the best, a typical and the
worst sequence.
"""

import dataclasses
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxlc.config import Config
from jaxlc.config.flops import document_pairs
from jaxlc.core import UserError
from jaxlc.core.files import fingerprint_of
from jaxlc.data import open_corpus
from jaxlc.data.data_sources import with_used_split
from jaxlc.data.sequences.packing import best_fit
from jaxlc.plan.program import StepProgram
from jaxlc.simulate.packed_work import (
    AttentionWork,
    SequenceWork,
    ancestors_of,
    mean_of_microbatches,
    num_ring_steps,
    sequence_work,
)
from jaxlc.simulate.timeline import Prediction, predict

CORPUS = "corpus"
MIX = "mix"
_MIN_SEQUENCES = 64
_MIX_LONG_SHARE = 0.6  # fraction of the tokens of a sequence of the mix
_MIX_MIN_TOKENS = 256


@dataclass(frozen=True, kw_only=True)
class PackingEstimate:
    """Estimates for one representative sequence (best, typical, worst), or for the mean step."""

    name: str  # "best", "typical", "worst" or "mean"; "each" if there is one sequence
    num_documents: float  # documents per sequence
    longest_document: int  # tokens
    padding_share: float  # fraction of the tokens
    # pairs of a query and a key, relative to one document of the same number of tokens
    pairs_share: float
    # sum over ring steps of the slowest rank's pairs, relative to the mean of the ranks
    ring_cost: float
    # pairs of the slowest replica of each microbatch, relative to the mean of the replicas
    replica_cost: float
    attention_seconds: float  # all attention kernels of the step
    step_seconds: float  # one optimizer step
    tokens_per_second_per_device: float  # padding included
    # model FLOPs with the pairs of the documents, over the bf16 peak of all devices
    mfu_documents: float


@dataclass(frozen=True, kw_only=True)
class PackingEstimates:
    """Estimates for sequences of one source; best, typical (median) and worst by attention work."""

    source: str  # "corpus", "mix", or lengths of documents
    order: str  # order of the tokens
    num_sequences: int  # whose documents were counted
    estimates: tuple[PackingEstimate, ...]


class Documents(NamedTuple):
    """Packed sequences, as the lengths of their documents in tokens."""

    source: str
    sequences: list[np.ndarray]
    prefixes: tuple[int, ...] = ()  # of the only sequence: see `packed_work.sequence_work`

    @property
    def fingerprint(self) -> str:
        return fingerprint_of([x.tolist() for x in self.sequences])

    @property
    def longest_trace(self) -> int:
        """Tokens of the longest document, with the prefixes that it continues."""
        if not any(self.prefixes):
            return max(int(x.max()) for x in self.sequences)
        lengths = self.sequences[0]
        return int((lengths + _tokens_before(lengths, self.prefixes)).max())


def read_documents(config: Config, source: str) -> Documents:
    """The documents of some sequences.

    Args:
      source: "corpus": the first sequences of a run; "mix": random ones with 60% of the tokens in documents of an
        eighth of the sequence or more; or the lengths of the documents of one sequence, "65536,1024x64", in which
        "tree:131072+8x8192" is a prefix that 8 documents continue, and in "tree:65536+4x(16384+4x4096)" 4 others
        continue each of 4 such documents. Without attention.shared_prefixes, the former are 8 documents of 139,264
        tokens, which may take several sequences.
    Raises:
      UserError: none of these, the documents do not fit a sequence, or the corpus cannot be read.
    """
    if not config.attention.document_mask:
        raise UserError(
            "document lengths have no effect with config.attention.document_mask=False: a sequence is one document"
        )
    seq_len = config.data.seq_len
    num_sequences = max(_MIN_SEQUENCES, config.train.global_batch_size)
    if source == MIX:
        rng = np.random.default_rng(0)
        return Documents(source, [mix_of_lengths(rng, seq_len) for _ in range(num_sequences)])
    if source == CORPUS:
        train = open_corpus(with_used_split(config).data).train
        return Documents(
            source,
            [train.document_lengths(i) for i in range(min(train.num_sequences, num_sequences))],
        )
    lengths, prefixes = _parse(source)
    if any(prefixes) and not config.attention.shared_prefixes:
        # each document that no other one continues repeats its prefixes
        is_leaf = ~np.isin(np.arange(len(lengths)) + 1, prefixes)
        rows = np.add(lengths, _tokens_before(lengths, prefixes))[is_leaf]
        if rows.max() > seq_len:
            raise UserError(
                f"the document lengths {source} have a document of {rows.max():,} tokens, with its prefix: expected at"
                f" most config.data.seq_len={seq_len}"
            )
        bins = best_fit(rows, seq_len)
        return Documents(source, [rows[bins == number] for number in range(bins.max() + 1)])
    # of the document with the most prefixes
    num_levels = ancestors_of(prefixes).shape[1]
    if num_levels > config.attention.shared_prefixes:
        raise UserError(
            f"the tree of {source} has {num_levels} levels of prefixes; set"
            f" --config.attention.shared_prefixes={num_levels}, or False for separate rows"
        )
    if sum(lengths) > seq_len:
        raise UserError(
            f"the document lengths {source} have {sum(lengths):,} tokens in total: expected at most"
            f" config.data.seq_len={seq_len}"
        )
    return Documents(source, [np.array(lengths)], tuple(prefixes))


def _tokens_before(lengths: Sequence[int], prefixes: Sequence[int]) -> np.ndarray:
    """int64 [documents]: tokens of all prefixes that each document continues."""
    return np.append(0, lengths)[ancestors_of(prefixes)].sum(1)[1:]


def mix_of_lengths(rng: np.random.Generator, num_tokens: int) -> np.ndarray:
    """Documents of one sequence without padding: 60% of the tokens are in documents of at least an
    eighth of the sequence, the others in shorter ones from 256 tokens. Both kinds are log-uniform,
    in random order."""
    lengths: list[int] = []
    shortest = max(1, min(_MIX_MIN_TOKENS, num_tokens // 8))
    longest_short = max(num_tokens // 8, shortest + 1)
    for share, low, high in (
        (_MIX_LONG_SHARE, longest_short, num_tokens),
        (1.0, shortest, longest_short),
    ):
        while (budget := int(share * num_tokens) - sum(lengths)) > 0:
            lengths.append(min(int(np.exp(rng.uniform(np.log(low), np.log(high)))), budget))
    return rng.permutation(lengths)


def _parse(source: str) -> tuple[list[int], list[int]]:
    """ "65536,1024x64" as one length and 64 equal ones; and the numbers of the documents that they
    continue.
    """
    lengths: list[int] = []
    prefixes: list[int] = []
    for part in source.split(","):
        plain = re.fullmatch(r"([1-9]\d*)(?:x([1-9]\d{0,6}))?", part.strip())
        if plain:
            nodes = [(int(plain[1]), 0)] * int(plain[2] or 1)
        else:
            nodes = _nodes(part.strip().removeprefix("tree:")) if "tree:" in part else []
        if not nodes:
            raise UserError(
                f"invalid document lengths {source!r}: expected {CORPUS}, {MIX}, or lengths in tokens such as"
                " 65536,1024x64 or tree:131072+8x8192"
            )
        prefixes += [prefix and prefix + len(prefixes) for _, prefix in nodes]
        lengths += [length for length, _ in nodes]
    return lengths, prefixes


def _nodes(tree: str) -> list[tuple[int, int]]:
    """The length of each document of "16384+4x4096" and the number, from 1, of the one that it
    continues; none if `tree` is invalid.
    """
    parts = re.fullmatch(r"([1-9]\d*)\+([1-9]\d*)x(?:([1-9]\d*)|\((.*)\))", tree)
    if parts is None:
        return []
    nodes = [(int(parts[1]), 0)]
    branch = [(int(parts[3]), 0)] if parts[3] else _nodes(parts[4])
    for _ in range(int(parts[2])):
        first = len(nodes)
        nodes += [(length, prefix + first if prefix else 1) for length, prefix in branch]
    return nodes if branch else []


def estimate_packing(documents: Documents, program: StepProgram) -> PackingEstimates:
    """Estimates of the compiled step for these sequences.

    In the mean, each microbatch takes as long as the replica with the most work, since replicas
    wait for each other.
    """
    config = program.model.config
    order = program.step.sequence_order
    sequences = [
        sequence_work(
            config,
            order.of,
            lengths,
            documents.prefixes,
            few_documents=order.few_documents,
            skips_ring_steps=order.skips_ring_steps,
        )  # fmt: skip
        for lengths in documents.sequences
    ]
    by_work = sorted(sequences, key=lambda sequence: sequence.work.total)
    chosen = {"best": by_work[0], "typical": by_work[len(by_work) // 2], "worst": by_work[-1]}
    if len(by_work) == 1:
        chosen = {"each": by_work[0]}
    estimates = [
        _estimate(name, [sequence], [(1.0, sequence.work)], program)
        for name, sequence in chosen.items()
    ]
    if len(by_work) > 1:
        estimates.append(
            _estimate("mean", sequences, mean_of_microbatches(config, sequences), program)
        )
    return PackingEstimates(
        source=documents.source,
        order=order.description,
        num_sequences=len(sequences),
        estimates=tuple(estimates),
    )


def _estimate(
    name: str,
    sequences: Sequence[SequenceWork],
    works: Sequence[tuple[float, AttentionWork]],
    program: StepProgram,
) -> PackingEstimate:
    """`works`: shares of the microbatches, and their work."""
    config = program.model.config
    gpus = program.model.gpus
    num_tokens = config.data.seq_len
    predictions = [(share, _predict(work, program)) for share, work in works]
    step_seconds = sum(share * prediction.step_seconds for share, prediction in predictions)
    pairs = _mean(sequence.pairs for sequence in sequences)
    flops = config.step_flops(config.train.global_batch_size * pairs).total
    pairs_of_ranks = sum(share * work.total for share, work in works)
    return PackingEstimate(
        name=name,
        num_documents=_mean(len(sequence.lengths) for sequence in sequences),
        longest_document=max(max(sequence.lengths, default=0) for sequence in sequences),
        padding_share=1 - _mean(sum(sequence.lengths) for sequence in sequences) / num_tokens,
        pairs_share=pairs / document_pairs(config.model, [num_tokens]),
        ring_cost=_mean(sequence.ring_cost for sequence in sequences),
        replica_cost=pairs_of_ranks / _mean(sequence.work.total for sequence in sequences),
        attention_seconds=sum(
            share * x.seconds_by_kind.get("attention", 0.0) for share, x in predictions
        ),
        step_seconds=step_seconds,
        tokens_per_second_per_device=config.train.global_batch_size
        * num_tokens
        / (step_seconds * gpus.num_gpus),
        mfu_documents=flops / (step_seconds * gpus.num_gpus * gpus.device.bf16_flops_per_second),
    )


def _predict(work: AttentionWork, program: StepProgram) -> Prediction:
    skips = work.num_other_steps < num_ring_steps(program.model.config) - 1
    analyzed = program.program.skipping_ring_steps if skips else program.program
    return predict(analyzed, dataclasses.replace(program.model, work=work))


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))
