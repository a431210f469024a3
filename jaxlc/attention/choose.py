"""Which kernel runs: by name, or the fastest that can do what is asked."""

from typing import NamedTuple

from jaxlc.attention import blockwise, cudnn, pallas, reference
from jaxlc.attention.contract import AttentionProblem, Kernel
from jaxlc.core.errors import Unsupported, UserError

KERNELS: dict[str, Kernel] = {  # fastest first
    "cudnn": cudnn,
    "pallas": pallas,
    "blockwise": blockwise,
    "reference": reference,
}
# What "auto" tries, by platform; the last one can do everything. On a CPU only the portable one is meant for use.
_BY_SPEED = {"gpu": ("cudnn", "pallas", "blockwise")}
_BY_SPEED_ELSEWHERE = ("blockwise",)


class KernelSelection(NamedTuple):
    """A kernel, and a sentence that says why this one."""

    name: str
    reason: str

    @property
    def kernel(self) -> Kernel:
        return KERNELS[self.name]


def choose_kernel(name: str, case: AttentionProblem) -> KernelSelection:
    """The kernel that `name` means for `case`. A named one never falls back; "auto" says why faster ones declined.

    Raises:
      UserError: there is no such kernel.
      Unsupported: the named kernel cannot do it; names the limit and the value.
    """
    if name == "auto":
        return _fastest(case)
    if name not in KERNELS:
        raise UserError(f"there is no attention kernel {name!r}; known: auto, {', '.join(sorted(KERNELS))}")
    limit = KERNELS[name].unsupported(case)
    if limit is not None:
        raise Unsupported(f"attention kernel {name} cannot do this: {limit}; choose kernel auto")
    return KernelSelection(name, "named in the config")


def _fastest(case: AttentionProblem) -> KernelSelection:
    reasons = [f"the fastest on {case.platform}"]
    for name in _BY_SPEED.get(case.platform, _BY_SPEED_ELSEWHERE):
        limit = KERNELS[name].unsupported(case)
        if limit is None:
            return KernelSelection(name, "; ".join(reasons))
        reasons.append(f"not {name}: {limit}")
    raise AssertionError(reasons)
