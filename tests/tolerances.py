"""Every tolerance of the tests. Never loosened without a written reason."""

import numpy as np

# All are bounds on max_relative_error. float32: the same sums in another order.
FLOAT32_PARITY = 1e-5
# bfloat16 has 8 bits of mantissa (2^-9 = 0.002 a rounding). Operands are rounded, sums are float32: a few roundings
# for a result of attention, a chain of layers of them for a parameter's gradient. Neither grows with the ring.
BFLOAT16_ATTENTION = 2e-2
BFLOAT16_GRADIENT = 5e-2
# float16 has 11 bits (2^-12 = 0.00024 a rounding), and the same chain of layers.
FLOAT16_GRADIENT = 1e-2
# e4m3 rounds by up to 2^-4 and e5m2, which gradients are, by 2^-3: each value of a product is off by some percent, at
# random. A bound on ||a - b|| / ||b||, which is the mean over a gradient; wide models average more than tests' do.
FP8_GRADIENT = 0.3


def max_relative_error(a, b) -> float:
    """max|a - b| / max|b| over arrays of one shape; b is the reference. NaN where either has one."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert a.shape == b.shape, (a.shape, b.shape)
    return float(np.abs(a - b).max() / max(np.abs(b).max(), np.finfo(np.float32).tiny))
