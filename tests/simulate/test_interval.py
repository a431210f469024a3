"""The text of estimates: two significant digits, the scaled median with its interval."""

import pytest

from jaxlc.simulate.roofline import (
    PUBLISHED,
    Interval,
    estimate_text,
    range_text,
    seconds_text,
    two_digits,
)


@pytest.mark.parametrize("value, text", [
    (0.0, "0"), (0.0523, "0.052"), (0.996, "1.0"), (1.0, "1.0"), (9.96, "10"), (40.4, "40"), (1234.5, "1,200"),
])  # fmt: skip
def test_two_digits(value, text):
    assert two_digits(value) == text


@pytest.mark.parametrize("seconds, text", [
    (40.4, "40 s"), (0.9996, "1.0 s"), (0.25, "250 ms"), (25e-6, "25 us"),
])  # fmt: skip
def test_seconds_text_selects_the_unit(seconds, text):
    assert seconds_text(seconds) == text


def test_estimate_text_is_scaled_median_with_interval():
    assert estimate_text(36.4) == "about 39 s (22 to 69)"
    # one unit, that of the median
    assert estimate_text(0.5, Interval(1.0, 4.0)) == "about 1.0 s (0.50 to 2.0)"
    assert range_text(1200, "", PUBLISHED.inverse) == "about 1,100 (630 to 2,000)"
