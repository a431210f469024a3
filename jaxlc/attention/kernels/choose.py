"""Kernel selection: by name, or the fastest kernel that supports the problem; and kernels for
shared prefixes.

`SharedPrefixKernel` computes attention of documents that share prefixes by calls of another kernel,
so that a prefix is computed and stored once. In a tree, documents (branches) continue a prefix,
which may continue another one: the first call computes all of them as documents of a packed
sequence. There is one more call for each level of prefixes: the product of the keys of the prefixes
at this level and the queries of all branches under them, in which nothing is masked. The results
merge exactly (`contract.merge`). The backward of all calls takes out and lse over all keys.
"""

import dataclasses
import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxlc.attention.contract import (
    AttentionProblem,
    AttentionSpec,
    CallResults,
    Kernel,
    KernelOfCalls,
    QueryResults,
    TreeRanges,
    calls_of,
    merge,
    prepared,
)
from jaxlc.attention.kernels import blockwise, cudnn, fa3, mosaic, pallas, reference
from jaxlc.core import Unsupported, UserError, scopes


@dataclass(frozen=True)
class SharedPrefixKernel(KernelOfCalls):
    """A kernel whose `ranges` are `TreeRanges` and whose results are float32; otherwise as
    `contract.Kernel`.
    """

    kernel: Kernel

    def unsupported(self, problem: AttentionProblem) -> str | None:
        return self.kernel.unsupported(problem)

    def prepare(self, ranges: TreeRanges, num_keys: int, spec: AttentionSpec) -> TreeRanges:
        """As `contract.prepared` of the kernel, for all calls."""
        prefix_spec = _prefix_spec(spec)
        return TreeRanges(
            prepared(self.kernel, ranges.own, num_keys, spec),
            tuple(prepared(self.kernel, x, num_keys, prefix_spec) for x in ranges.prefixes),
        )

    def forward_calls(
        self, q_BTNH, k_BSKH, v_BSKH, ranges: TreeRanges, spec: AttentionSpec
    ) -> CallResults:
        calls = self._calls("forward", (q_BTNH, k_BSKH, v_BSKH), ranges, spec)
        return calls._replace(
            joined=lambda results: functools.reduce(
                lambda a, b: merge(*a, *b), calls.joined(results)
            )
        )

    def backward_calls(
        self, q_BTNH, k_BSKH, v_BSKH, ranges: TreeRanges, spec: AttentionSpec, results: QueryResults
    ) -> CallResults:
        calls = self._calls("backward", (q_BTNH, k_BSKH, v_BSKH), ranges, spec, results)
        return calls._replace(
            joined=lambda results: tuple(
                functools.reduce(jnp.add, parts) for parts in zip(*calls.joined(results))
            )
        )

    def _calls(
        self, direction: str, qkv: tuple, ranges: TreeRanges, spec: AttentionSpec, *others
    ) -> CallResults:
        """All calls; joined, they are the results of each in float32."""
        calls = [calls_of(self.kernel, direction, *qkv, ranges.own, spec, *others)]
        with jax.named_scope(scopes.SHARED_PREFIX):
            for prefixes in ranges.prefixes:
                call = calls_of(self.kernel, direction, *qkv, prefixes, _prefix_spec(spec), *others)
                calls.append(call)

        def joined(results):
            pairs = zip(calls, results, strict=True)
            return tuple(
                tuple(x.astype(jnp.float32) for x in call.joined(part)) for call, part in pairs
            )

        return CallResults(tuple(call.results for call in calls), joined)


def _prefix_spec(spec: AttentionSpec) -> AttentionSpec:
    """The spec of the other calls: all queries under a prefix have the same keys, unless there is a
    window.
    """
    return dataclasses.replace(spec, causal=False, window=None, few_documents=False)


KERNELS: dict[str, Kernel] = {
    "fa3": fa3,
    "cudnn": cudnn,
    "pallas": pallas,
    "blockwise": blockwise,
    "reference": reference,
    "mosaic": mosaic,
}
# The kernels that "auto" tries, fastest first. The last one supports every problem. On a CPU, pallas runs in an
# interpreter, for tests only. mosaic is not among them until a GPU has verified it. fa3 is the first one where it can
# be installed: on Hopper, with a JAX that it supports.
_AUTO_ORDER = {"gpu": ("cudnn", "pallas", "blockwise")}
_AUTO_ORDER_OTHER = ("blockwise",)


class KernelSelection(NamedTuple):
    """A kernel by name, and why it was selected."""

    name: str
    reason: str

    @property
    def kernel(self) -> Kernel:
        return KERNELS[self.name]


def choose_kernel(name: str, problem: AttentionProblem) -> KernelSelection:
    """The kernel `name` if it supports `problem`; for "auto", the fastest kernel that does.

    A kernel selected by name never falls back to another one.

    Raises:
      UserError: unknown kernel name.
      Unsupported: the named kernel does not support the problem; the message has the value and the limit.
    """
    if name == "auto":
        return _fastest(problem)
    if name not in KERNELS:
        raise UserError(
            f"unknown attention kernel {name!r}; known: auto, {', '.join(sorted(KERNELS))}"
        )
    limit = KERNELS[name].unsupported(problem)
    if limit is not None:
        raise Unsupported(f"unsupported by attention kernel {name}: {limit}; use kernel auto")
    return _selection(name, ["set by attention.kernel"], problem)


def _fastest(problem: AttentionProblem) -> KernelSelection:
    reasons = [f"fastest supported kernel on {problem.platform}"]
    names = _AUTO_ORDER.get(problem.platform, _AUTO_ORDER_OTHER)
    if fa3.is_candidate(problem):
        names = ("fa3", *names)
    for name in names:
        limit = KERNELS[name].unsupported(problem)
        if limit is None:
            return _selection(name, reasons, problem)
        reasons.append(f"{name} unsupported: {limit}")
    raise AssertionError(reasons)


def _selection(name: str, reasons: list[str], problem: AttentionProblem) -> KernelSelection:
    assumptions = {"cudnn": cudnn.assumption, "fa3": fa3.assumption}
    assumption = assumptions[name](problem) if name in assumptions else None
    return KernelSelection(name, "; ".join([*reasons, *([assumption] if assumption else [])]))
