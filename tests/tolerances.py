"""All tolerances of the tests. A change that loosens one must state the reason."""

import jax
import numpy as np

# All are bounds on max_relative_error. float32: the same sums in a different order.
FLOAT32_PARITY = 1e-5
# A loss, relative to the sum of the magnitudes of its terms: the rounding errors of many terms
# cancel.
FLOAT32_LOSS = 1e-6
# relative_norm_error of all gradients of a step, of sums in a different order: 6e-7 to 1.3e-6,
# depending on the CPU.
FLOAT32_GRADIENTS = 2e-6
# Updates of Muon, whose five iterations amplify the rounding errors of small singular values.
MUON_PARITY = 1e-4
# Gradients of the decay of gated_delta_net, sums over all tokens that cancel: 2e-5 between one device and tiles, of
# which 1.9e-5 are errors of one device. Of all parameters of three layers, 1.15e-5 between one device and hybrid with
# tiles: compared with float64 for three sets of parameters, one device has errors of 1.0e-5, 1.6e-5 and 1.0e-5, and
# hybrid 1.9e-5, 0.9e-5 and 1.2e-5. With copies of nodes, 1.1e-5, where both have errors of 8e-6. Of kimi_delta,
# 1.03e-5 in a convolution between one device and context=4.
FLOAT32_DECAY_GRADIENT = 2e-5
# The same of mamba2 with the norm before the gate, which makes outputs independent of a factor of the state, so that
# the terms cancel further: 2e-5 between one device and ulysses. Compared with float64, one device has an error of
# 2e-5, where all tokens are in one sum, and ulysses, a ring with tiles and hybrid have 3e-6 to 5e-6.
FLOAT32_NORMED_DECAY_GRADIENT = 3e-5
# bfloat16 has 8 bits of mantissa (a relative rounding error of 2^-9 = 0.002). Operands are rounded, sums are float32: a
# few roundings for an attention output, and a few per layer for a parameter's gradient. Neither depends on the number
# of ring steps.
BFLOAT16_ATTENTION = 2e-2
BFLOAT16_GRADIENT = 5e-2
# float16 has 11 bits (a relative rounding error of 2^-12 = 0.00024), and as many roundings.
FLOAT16_GRADIENT = 1e-2
# Rounding errors are up to 2^-4 in e4m3 and 2^-3 in e5m2 (gradients), so every product has a random error of some
# percent. This is a bound on ||a - b|| / ||b||, the mean over a gradient; wider models average over more products.
FP8_GRADIENT = 0.3


def max_relative_error(a, b) -> float:
    """max|a - b| / max|b| over arrays of equal shape; b is the reference. NaN if either contains
    NaN.
    """
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert a.shape == b.shape, (a.shape, b.shape)
    return float(np.abs(a - b).max() / max(np.abs(b).max(), np.finfo(np.float32).tiny))


def relative_norm_error(a, b) -> float:
    """|a - b| / |b| in the 2-norm, over the arrays of two trees as one vector; b is the reference."""
    a, b = (
        np.concatenate([np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(tree)])
        for tree in (a, b)
    )
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))
