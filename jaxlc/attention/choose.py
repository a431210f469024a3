"""Which kernel runs: by name, or the first that can do what is asked."""

from typing import NamedTuple

from jaxlc.attention import blockwise, reference
from jaxlc.attention.contract import Kernel, KernelCase
from jaxlc.core.errors import UserError

KERNELS: dict[str, Kernel] = {"blockwise": blockwise, "reference": reference}
_BY_SPEED = ("blockwise",)  # what "auto" tries, fastest first; the last one can do everything


class Choice(NamedTuple):
    """A kernel, and a sentence that says why this one."""

    name: str
    reason: str

    @property
    def kernel(self) -> Kernel:
        return KERNELS[self.name]


def choose_kernel(name: str, case: KernelCase) -> Choice:
    """The kernel that `name` means for `case`. A named one never falls back; "auto" says why faster ones declined.

    Raises:
      UserError: there is no such kernel.
      NotImplementedError: the named kernel cannot do it; names the limit and the value.
    """
    if name == "auto":
        declined = []
        for candidate in _BY_SPEED:
            limit = KERNELS[candidate].unsupported(case)
            if limit is None:
                return Choice(candidate, "; ".join(["auto", *declined]))
            declined.append(f"not {candidate}: {limit}")
        raise AssertionError(declined)
    if name not in KERNELS:
        raise UserError(f"there is no attention kernel {name!r}; known: auto, {', '.join(sorted(KERNELS))}")
    limit = KERNELS[name].unsupported(case)
    if limit is not None:
        raise NotImplementedError(f"attention kernel {name} cannot do this: {limit}; choose kernel auto")
    return Choice(name, "named in the config")
