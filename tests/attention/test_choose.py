"""Which kernel runs, and what a user reads about it."""

import pytest

from jaxlc.attention.choose import KERNELS, choose_kernel
from jaxlc.attention.contract import AttentionProblem

H100 = dict(platform="gpu", compute_capability="9.0")
A100 = dict(platform="gpu", compute_capability="8.0")
V100 = dict(platform="gpu", compute_capability="7.0")
MI300 = dict(platform="gpu", compute_capability="gfx942")
CPU = dict(platform="cpu", compute_capability=None)


def _case(device=H100, **other) -> AttentionProblem:
    plain = dict(dtype="bfloat16", head_dim=128, value_dim=128, window=None, implicit_positions=True)
    return AttentionProblem(**{**plain, **device, **other})


CUDNN_DECLINES = {
    "cpu": (_case(CPU), "it needs an NVIDIA GPU, and this is cpu"),
    "V100": (_case(V100), "it needs compute capability 8.0, and this GPU has 7.0"),
    "AMD": (_case(MI300), "it needs compute capability 8.0, and this GPU has gfx942"),
    "float32": (_case(dtype="float32"), "dtype float32, and it does bfloat16 and float16"),
    "head dim 256": (_case(head_dim=256, value_dim=256), "head dim 256, and it does multiples of 8 up to 128"),
    "head dim 100": (_case(head_dim=100, value_dim=100), "head dim 100, and it does multiples of 8 up to 128"),
    "value dim": (_case(value_dim=64), "values of head dim 64 for queries of 128, and it does equal ones"),
    "packed": (
        _case(implicit_positions=False),
        "it masks by index, which is not enough for documents, windows in a ring or all_gather",
    ),
}
declines = pytest.mark.parametrize(("case", "limit"), CUDNN_DECLINES.values(), ids=CUDNN_DECLINES.keys())


@pytest.mark.parametrize(
    "case",
    [_case(), _case(A100), _case(dtype="float16"), _case(head_dim=64, value_dim=64), _case(window=100)],
    ids=["H100", "A100", "float16", "head dim 64", "window"],
)
def test_auto_is_cudnn_where_it_can(case):
    assert choose_kernel("auto", case) == ("cudnn", "the fastest on gpu")


@declines
def test_auto_takes_one_that_can_and_says_why_faster_ones_declined(case, limit):
    choice = choose_kernel("auto", case)
    assert choice.name != "cudnn" and choice.kernel.unsupported(case) is None
    assert choice.reason.startswith(f"the fastest on {case.platform}")
    if case.platform == "gpu":
        assert f"; not cudnn: {limit}" in choice.reason


def test_auto_on_a_cpu_is_the_portable_one():
    assert choose_kernel("auto", _case(CPU)) == ("blockwise", "the fastest on cpu")


@declines
def test_a_named_kernel_never_falls_back(case, limit):
    with pytest.raises(NotImplementedError) as refusal:
        choose_kernel("cudnn", case)
    assert str(refusal.value) == f"attention kernel cudnn cannot do this: {limit}; choose kernel auto"


@pytest.mark.parametrize("name", KERNELS)
def test_a_named_kernel_is_taken_though_another_is_faster(name):
    assert choose_kernel(name, _case()).name == name


def test_an_unknown_kernel():
    with pytest.raises(ValueError, match="there is no attention kernel 'fastest'; known: auto, .*blockwise, cudnn"):
        choose_kernel("fastest", _case())
