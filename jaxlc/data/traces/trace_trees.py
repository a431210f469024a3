"""Groups of traces as trees: a prefix that is stored once, and the branches that continue it.

The prefix has the common first tokens of the group, up to the first one in the loss of any trace, but without the last
of them. Every branch starts with a copy of that token, from which its first own token is predicted. So each position
has one target. The last token of a trace is a target only, so an answer of n tokens is a branch of n tokens.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from jaxlc.core.errors import UserError
from jaxlc.data.traces.trace_records import Trace


@dataclass(frozen=True, kw_only=True)
class Tree:
    """Traces that share their first tokens; num_prefix_tokens is 0 if they share none."""

    traces: tuple[Trace, ...]
    num_prefix_tokens: int

    @property
    def num_tokens(self) -> int:
        return self.num_prefix_tokens + sum(map(self.num_branch_tokens, self.traces))

    def num_branch_tokens(self, trace: Trace) -> int:
        return len(trace.tokens) - 1 - self.num_prefix_tokens


def groups_of(traces: Iterable[Trace]) -> Iterator[list[Trace]]:
    """Yields the traces of each group: of equal `group`, or neighbors with equal prompts.

    Raises:
      UserError: traces of equal `group` have different prompts.
    """
    groups: dict[object, list[Trace]] = {}
    previous: list[Trace] = []
    for number, trace in enumerate(traces):
        if trace.group is not None:
            previous = groups.setdefault(trace.group, [])
            if previous and previous[0].prompt != trace.prompt and previous[0].where != trace.where:
                raise UserError(
                    f"{previous[0].where} and {trace.where} have group {trace.group!r} and different prompts: a group"
                    " has the answers to one prompt; use other groups in each file"
                )
        elif not previous or previous[-1].group is not None or previous[-1].prompt != trace.prompt:
            previous = groups.setdefault(number, [])
        previous.append(trace)
    yield from groups.values()


def trees_of(group: Sequence[Trace], seq_len: int, *, shares: bool) -> Iterator[Tree]:
    """Yields the trees of a group, of at most `seq_len` tokens each: several, if they do not fit into one.

    Args:
      shares: False: each trace is a tree of its own.
    """
    num_prefix_tokens = _num_common_tokens(group) - 1 if shares and len(group) > 1 else 0
    if num_prefix_tokens < 1:
        yield from (Tree(traces=(trace,), num_prefix_tokens=0) for trace in group)
        return
    taken: list[Trace] = []
    num_tokens = num_prefix_tokens
    for trace in group:
        num_more = len(trace.tokens) - 1 - num_prefix_tokens
        if taken and num_tokens + num_more > seq_len:
            yield Tree(traces=tuple(taken), num_prefix_tokens=num_prefix_tokens)
            taken, num_tokens = [], num_prefix_tokens
        taken.append(trace)
        num_tokens += num_more
    yield Tree(traces=tuple(taken), num_prefix_tokens=num_prefix_tokens)


def _num_common_tokens(group: Sequence[Trace]) -> int:
    """Number of equal first tokens, none of which is in the loss; fewer than the tokens of any trace."""
    num_common = min(trace.num_prompt_tokens for trace in group)
    tokens = np.stack([trace.tokens[:num_common] for trace in group])
    differs = (tokens != tokens[0]).any(0)
    return int(differs.argmax()) if differs.any() else num_common
