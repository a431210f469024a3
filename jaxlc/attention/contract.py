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


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """What is static about an attention call; hashable, so that it can be a static argument of `jit`."""

    causal: bool = True  # a query sees keys of its segment at its own and earlier positions
    scale: float | None = None  # multiplies q . k; None is 1/sqrt(H)
    query_block_tokens: int = 256  # tiles of the kernels that are tiled
    key_block_tokens: int = 256

    def scale_for(self, head_dim: int) -> float:
        return 1.0 / math.sqrt(head_dim) if self.scale is None else self.scale


class Masks(NamedTuple):
    """Who may see whom, in O(T + S) numbers: a T x S mask exists nowhere but inside a tile.

    A query sees a key when their segment ids are equal and not 0 (0 is padding: it sees nothing and nobody
    sees it) and, if the spec is causal, when the key's position is not greater. Positions need only be
    ordered within a segment, so both row offsets and positions that restart per document serve.
    """

    q_positions_BT: jax.Array | None  # int32: float32 stops counting at 2^24. None only where nothing is causal
    k_positions_BS: jax.Array | None
    q_segments_BT: jax.Array | None  # int32. None: the whole row is one document, without padding
    k_segments_BS: jax.Array | None

    def visible_BTS(self, spec: AttentionSpec) -> jax.Array | None:
        """The mask, written out: for one tile at a time, and for the oracle. None: everything is visible."""
        visible_BTS = None
        if self.q_segments_BT is not None:
            q_segments_BT1 = self.q_segments_BT[:, :, None]
            visible_BTS = (q_segments_BT1 == self.k_segments_BS[:, None, :]) & (q_segments_BT1 != 0)
        if spec.causal:
            is_past_BTS = self.q_positions_BT[:, :, None] >= self.k_positions_BS[:, None, :]
            visible_BTS = is_past_BTS if visible_BTS is None else visible_BTS & is_past_BTS
        return visible_BTS

    @classmethod
    def of_row(cls, positions_BT: jax.Array | None, segments_BT: jax.Array | None) -> "Masks":
        """Masks of a sequence that attends to itself."""
        return cls(positions_BT, positions_BT, segments_BT, segments_BT)


class Kernel(Protocol):
    """Attention of one device's queries over one block of keys: no mesh, no collectives."""

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
