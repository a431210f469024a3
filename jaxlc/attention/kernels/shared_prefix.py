"""Attention of documents that share a prefix, by two calls of another kernel: the prefix is computed and stored once.

A tree is a prefix and the documents that continue it (branches): the first call computes prefix and branches as
documents of a packed sequence. The second computes the product of the branches' queries and the prefix's keys, in which
nothing is masked. The results merge exactly (merge.py). The backward of both calls takes out and lse over all keys.
"""

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxlc.attention.contract import AttentionProblem, AttentionSpec, Kernel, QueryResults, TreeRanges, prepared
from jaxlc.attention.merge import merge
from jaxlc.core import scopes


@dataclass(frozen=True)
class SharedPrefixKernel:
    """A kernel whose `ranges` are `TreeRanges`; otherwise as `contract.Kernel`."""

    kernel: Kernel

    def unsupported(self, problem: AttentionProblem) -> str | None:
        return self.kernel.unsupported(problem)

    def prepare(self, ranges: TreeRanges, num_keys: int, spec: AttentionSpec) -> TreeRanges:
        """As `contract.prepared` of the kernel, for both calls."""
        specs = spec, _of_prefix(spec)
        return TreeRanges(*(prepared(self.kernel, part, num_keys, spec) for part, spec in zip(ranges, specs)))

    def forward(self, q_BTNH, k_BSKH, v_BSKH, ranges: TreeRanges, spec: AttentionSpec):
        """(out_BTNH, lse_BNT), both float32."""
        own = self.kernel.forward(q_BTNH, k_BSKH, v_BSKH, ranges.own, spec)
        with jax.named_scope(scopes.SHARED_PREFIX):
            prefix = self.kernel.forward(q_BTNH, k_BSKH, v_BSKH, ranges.prefix, _of_prefix(spec))
        return merge(*(x.astype(jnp.float32) for x in (*own, *prefix)))

    def backward(self, q_BTNH, k_BSKH, v_BSKH, ranges: TreeRanges, spec: AttentionSpec, results: QueryResults):
        """(dq_BTNH, dk_BSKH, dv_BSKH), float32."""
        own = self.kernel.backward(q_BTNH, k_BSKH, v_BSKH, ranges.own, spec, results)
        with jax.named_scope(scopes.SHARED_PREFIX):
            prefix = self.kernel.backward(q_BTNH, k_BSKH, v_BSKH, ranges.prefix, _of_prefix(spec), results)
        return tuple(a.astype(jnp.float32) + b.astype(jnp.float32) for a, b in zip(own, prefix, strict=True))


def _of_prefix(spec: AttentionSpec) -> AttentionSpec:
    """The spec of the second call: all queries of a tree have the same keys, unless there is a window."""
    return dataclasses.replace(spec, causal=False, window=None, few_documents=False)
