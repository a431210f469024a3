"""Kernel selection: by name, or the fastest kernel that supports the problem."""

from typing import NamedTuple

from jaxlc.attention.contract import AttentionProblem, Kernel
from jaxlc.attention.kernels import blockwise, cudnn, mosaic, pallas, reference
from jaxlc.core.errors import Unsupported, UserError

KERNELS: dict[str, Kernel] = {
    "cudnn": cudnn,
    "pallas": pallas,
    "blockwise": blockwise,
    "reference": reference,
    "mosaic": mosaic,
}
# The kernels that "auto" tries, fastest first. The last one supports every problem. On a CPU, pallas runs in an
# interpreter, for tests only. mosaic is not among them until a GPU has verified it.
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
        raise UserError(f"unknown attention kernel {name!r}; known: auto, {', '.join(sorted(KERNELS))}")
    limit = KERNELS[name].unsupported(problem)
    if limit is not None:
        raise Unsupported(f"unsupported by attention kernel {name}: {limit}; use kernel auto")
    return _selection(name, ["set by attention.kernel"], problem)


def _fastest(problem: AttentionProblem) -> KernelSelection:
    reasons = [f"fastest supported kernel on {problem.platform}"]
    for name in _AUTO_ORDER.get(problem.platform, _AUTO_ORDER_OTHER):
        limit = KERNELS[name].unsupported(problem)
        if limit is None:
            return _selection(name, reasons, problem)
        reasons.append(f"{name} unsupported: {limit}")
    raise AssertionError(reasons)


def _selection(name: str, reasons: list[str], problem: AttentionProblem) -> KernelSelection:
    assumption = cudnn.assumption(problem) if name == "cudnn" else None
    return KernelSelection(name, "; ".join([*reasons, *([assumption] if assumption else [])]))
