"""The contract of attention kernels: arguments, results, masks.

    forward:  (q_BTNH, k_BSKH, v_BSKH, masks, spec) -> (out_BTNH, lse_BNT)
    backward: (q, k, v, masks, spec, out, lse, dout, dlse) -> (dq, dk, dv)

`lse` is the natural logarithm of the sum of exponentials of a query's scaled scores, float32. With it, results over
two disjoint sets of keys merge exactly (`merge.py`), so the same two functions compose over KV blocks, ring steps and
tiles. The backward takes out and lse over *all* keys on all devices, even where k and v are one block. Its dk and dv
are the gradients of that block, its dq is the contribution of that block to dq; all three are float32.

A query without visible keys (a fully masked row) has out 0, lse -inf and gradient 0.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """The static parameters of an attention call; hashable, so that it can be a static argument of `jit`."""

    causal: bool = True  # a query attends to keys of its segment at its own and earlier positions
    window: int | None = None  # a query attends to itself and the window - 1 tokens before it; only with causal
    scale: float | None = None  # multiplies q . k; None: 1/sqrt(H)
    query_block_tokens: int = 256  # upper limits of the block sizes of kernels that work in blocks
    key_block_tokens: int = 256

    def __post_init__(self):
        assert self.window is None or (self.causal and self.window > 0), self

    def scale_for(self, head_dim: int) -> float:
        return 1.0 / math.sqrt(head_dim) if self.scale is None else self.scale


class Masks(NamedTuple):
    """The attention mask as positions and segment ids, O(T + S) memory. A dense mask exists per block only.

    A query attends to a key if their segment ids are equal and not 0 and, if the spec is causal, if
    0 <= query position - key position < window. Segment id 0 is padding, which neither attends nor is attended to.
    Only differences of positions within a segment matter, so positions may count from the start of the sequence or
    restart with each document.
    """

    # int32, since float32 has no exact integers above 2^24. None: implicit positions. Tokens are in natural order and
    # the last query is aligned with the last key; some kernels support implicit positions only.
    q_positions_BT: jax.Array | None
    k_positions_BS: jax.Array | None
    q_segments_BT: jax.Array | None  # int32. None: the whole sequence is one document, without padding
    k_segments_BS: jax.Array | None

    def dense_mask_BTS(self, spec: AttentionSpec) -> jax.Array | None:
        """The dense mask, for one pair of blocks at a time and for the reference. None: nothing is masked."""
        dense_mask_BTS = None
        if self.q_segments_BT is not None:
            q_segments_BT1 = self.q_segments_BT[:, :, None]
            dense_mask_BTS = (q_segments_BT1 == self.k_segments_BS[:, None, :]) & (q_segments_BT1 != 0)
        if spec.causal:
            age_BTS = self.q_positions_BT[:, :, None] - self.k_positions_BS[:, None, :]
            is_past_BTS = age_BTS >= 0 if spec.window is None else (age_BTS >= 0) & (age_BTS < spec.window)
            dense_mask_BTS = is_past_BTS if dense_mask_BTS is None else dense_mask_BTS & is_past_BTS
        return dense_mask_BTS

    def with_positions(self, q_BTNH: jax.Array, k_BSKH: jax.Array) -> "Masks":
        """The same masks with explicit positions, for kernels that need them."""
        if self.q_positions_BT is not None:
            return self
        (batch, num_queries, _, _), num_keys = q_BTNH.shape, k_BSKH.shape[1]
        first_query = num_keys - num_queries  # below 0 for queries that come before all keys
        positions_T, positions_S = jnp.arange(first_query, num_keys), jnp.arange(num_keys)
        # Tied to the queries, see `api.make`: XLA and autodiff would hoist constants out of the loop over layers, and
        # with them the dense masks of all blocks.
        _, positions_T, positions_S = lax.optimization_barrier((q_BTNH, positions_T, positions_S))
        positions_BT, positions_BS = (
            jnp.broadcast_to(x.astype(jnp.int32), (batch, len(x))) for x in (positions_T, positions_S)
        )
        return self._replace(q_positions_BT=positions_BT, k_positions_BS=positions_BS)

    @classmethod
    def self_attention(cls, positions_BT: jax.Array | None, segments_BT: jax.Array | None) -> "Masks":
        """Masks of a sequence that attends to itself."""
        return cls(positions_BT, positions_BT, segments_BT, segments_BT)


@dataclass(frozen=True, kw_only=True)
class AttentionProblem:
    """The properties of an attention call that the choice of a kernel depends on."""

    platform: str  # `jax.Device.platform`: "gpu", "cpu"
    compute_capability: str | None  # of a GPU, such as "9.0"
    dtype: str  # of q, k and v: "bfloat16"
    head_dim: int  # of queries and keys
    value_dim: int
    window: int | None
    implicit_positions: bool  # neither positions nor segment ids are passed; see Masks


class Kernel(Protocol):
    """Attention of one device's queries over one block of keys, without mesh or collectives. Modules implement it."""

    def unsupported(self, problem: AttentionProblem) -> str | None:
        """Why the kernel does not support `problem`: the value and the limit. None: it is supported.

        Example: "head dim 256 (supported: multiples of 8 up to 128)".
        """

    def forward(
        self, q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, masks: Masks, spec: AttentionSpec
    ) -> tuple[jax.Array, jax.Array]:
        """Returns (out_BTNH, lse_BNT), both float32."""

    def backward(
        self,
        q_BTNH: jax.Array,
        k_BSKH: jax.Array,
        v_BSKH: jax.Array,
        masks: Masks,
        spec: AttentionSpec,
        out_BTNH: jax.Array,
        lse_BNT: jax.Array,
        dout_BTNH: jax.Array,
        dlse_BNT: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns (dq_BTNH, dk_BSKH, dv_BSKH), all float32."""
