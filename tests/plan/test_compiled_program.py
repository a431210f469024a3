import jax
import pytest

from jaxlc.plan import program
from jaxlc.simulate.topology import FAILS_WITH_TRITON, NO_TRITON


@pytest.mark.parametrize(
    "message, num_calls", [(f"INTERNAL: {FAILS_WITH_TRITON}: %gemm", 2), ("INTERNAL: other", 1)]
)
def test_program_that_needs_autotuning_is_compiled_with_cublas(message, num_calls):
    calls = []

    def compile_with(options):
        calls.append(options)
        raise jax.errors.JaxRuntimeError(message if len(calls) == 1 else "INTERNAL: second")

    with pytest.raises(jax.errors.JaxRuntimeError, match="second" if num_calls == 2 else "other"):
        program._compiled_without_gpu(compile_with, {})
    assert len(calls) == num_calls
    assert [NO_TRITON.items() <= options.items() for options in calls] == [False, True][:num_calls]
