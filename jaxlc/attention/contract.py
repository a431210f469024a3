"""What every attention implementation takes and returns.

    forward:  (q_BTNH, k_BSKH, v_BSKH, masks, spec) -> (out_BTNH, lse_BNT)
    backward: (q, k, v, masks, spec, out, lse, dout, dlse) -> (dq, dk, dv)

`lse` is the float32 natural log of the sum of exponentials of a row's scaled scores: with it, the results over
two sets of keys merge exactly (`merge.py`), so the same pair composes over blocks, ring hops and tiles. The
backward takes the out and lse of the *whole* row, over all keys on all devices, though k and v are one block;
its dk and dv are that block's, its dq is that block's share, all float32.

A row that sees no key has out 0, lse -inf and gradient 0.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """What is static about an attention call; hashable, so that it can be a static argument of `jit`."""

    causal: bool = True  # a query sees keys of its segment at its own and earlier positions
    window: int | None = None  # a query sees itself and the window - 1 tokens before it; only with causal
    scale: float | None = None  # multiplies q . k; None is 1/sqrt(H)
    query_block_tokens: int = 256  # tiles of the kernels that are tiled
    key_block_tokens: int = 256

    def __post_init__(self):
        assert self.window is None or (self.causal and self.window > 0), self

    def scale_for(self, head_dim: int) -> float:
        return 1.0 / math.sqrt(head_dim) if self.scale is None else self.scale


class Masks(NamedTuple):
    """Who may see whom, in O(T + S) numbers: a T x S mask exists nowhere but inside a tile.

    A query sees a key when their segment ids are equal and not 0 (0 is padding: it sees nothing and nobody
    sees it) and, if the spec is causal, when the key's position is not greater, nor smaller by the window or more.
    Positions count the tokens of a segment, from anywhere, so both row offsets and positions that restart per
    document serve.
    """

    # int32: float32 stops counting at 2^24. None: tokens are in natural order and the last query stands at the last
    # key, so that masks go by index, which is all that some kernels know.
    q_positions_BT: jax.Array | None
    k_positions_BS: jax.Array | None
    q_segments_BT: jax.Array | None  # int32. None: the whole row is one document, without padding
    k_segments_BS: jax.Array | None

    def dense_mask_BTS(self, spec: AttentionSpec) -> jax.Array | None:
        """The mask, written out: for one tile at a time, and for the oracle. None: everything is visible."""
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
        """The same masks with positions written out, for kernels that go by them."""
        if self.q_positions_BT is not None:
            return self
        (batch, num_queries, _, _), num_keys = q_BTNH.shape, k_BSKH.shape[1]
        first_query = num_keys - num_queries  # below 0 for queries that come before all keys
        positions_T, positions_S = jnp.arange(first_query, num_keys), jnp.arange(num_keys)
        # Tied to the queries for the reason that `api.make` gives: constants would be taken out of the loop over
        # layers, and with them all tiles of all masks.
        _, positions_T, positions_S = lax.optimization_barrier((q_BTNH, positions_T, positions_S))
        positions_BT, positions_BS = (
            jnp.broadcast_to(x.astype(jnp.int32), (batch, len(x))) for x in (positions_T, positions_S)
        )
        return self._replace(q_positions_BT=positions_BT, k_positions_BS=positions_BS)

    @classmethod
    def of_row(cls, positions_BT: jax.Array | None, segments_BT: jax.Array | None) -> "Masks":
        """Masks of a sequence that attends to itself."""
        return cls(positions_BT, positions_BT, segments_BT, segments_BT)


@dataclass(frozen=True, kw_only=True)
class AttentionProblem:
    """All that a choice of kernel may depend on."""

    platform: str  # as `jax.Device.platform` has it: "gpu", "cpu"
    compute_capability: str | None  # of a GPU: "9.0"
    dtype: str  # of q, k and v: "bfloat16"
    head_dim: int  # of queries and keys
    value_dim: int
    window: int | None
    implicit_positions: bool  # neither positions nor segment ids are needed: masks go by index, causal or not at all


class Kernel(Protocol):
    """Attention of one device's queries over one block of keys: no mesh, no collectives. A module."""

    def unsupported(self, case: AttentionProblem) -> str | None:
        """Why the kernel cannot do this, with the limit and the value: "head dim 256, and it does 64, 96 and 128"."""

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
