import pytest

from jaxlc.hlo import analyze
from tests.hlo.snippets import RING, program

NESTED = """
%leaf (p: f32[]) -> f32[] {
  ROOT %p = f32[] parameter(0)
}
%c (p.1: f32[]) -> pred[] {
  ROOT %p.1 = pred[] parameter(0)
}
%inner (p.2: f32[]) -> f32[] {
  %p.2 = f32[] parameter(0)
  ROOT %f = f32[] fusion(%p.2), kind=kLoop, calls=%leaf
}
%outer (p.3: f32[]) -> f32[] {
  %p.3 = f32[] parameter(0)
  ROOT %w = f32[] while(%p.3), condition=%c, body=%inner, backend_config={"known_trip_count":{"n":"5"}}
}
"""


def test_execution_counts_come_from_loop_condition():
    assert analyze(RING).execution_counts == dict(main=1, body=3, condition=3)


def test_execution_counts_multiply_in_loops_and_add_over_calls():
    text = program(
        "%x = f32[] constant(1)",
        '%w.1 = f32[] while(%x), condition=%c, body=%outer, backend_config={"known_trip_count":{"n":"2"}}',
        "ROOT %f.1 = f32[] conditional(%x, %w.1), branch_computations={%leaf, %inner}",
        more=NESTED,
    )
    counts = analyze(text).execution_counts
    assert (counts["outer"], counts["inner"], counts["leaf"]) == (2, 11, 12)


def test_execution_counts_of_a_ring_that_may_skip_steps_are_those_of_one_branch():
    first_steps = """
%first_steps (p.4: f32[]) -> f32[] {
  %p.4 = f32[] parameter(0)
  ROOT %e = f32[] exponential(%p.4), metadata={op_name="jit(_step)/core_attention/cond/first_ring_steps/ring_step/exp"}
}
"""
    text = program(
        "%x = f32[] constant(1)",
        "ROOT %f.1 = f32[] conditional(%x, %x, %x), true_computation=%inner, false_computation=%first_steps",
        more=NESTED + first_steps,
    )
    analyzed = analyze(text)
    for counts, expected in (
        (analyzed.execution_counts, (1, 0)),
        (analyzed.skipping_ring_steps.execution_counts, (0, 1)),
    ):
        assert (counts["inner"], counts["first_steps"]) == expected


def test_execution_counts_of_unknown_loop_raise():
    text = program(
        "%x = f32[] constant(1)",
        "ROOT %w.1 = f32[] while(%x), condition=%c, body=%outer",
        more=NESTED,
    )
    with pytest.raises(ValueError, match="unknown trip count of loop %w.1"):
        _ = analyze(text).execution_counts


def test_execution_count_of_loop_over_further_documents_is_zero():
    """Its condition compares two values that depend on the data."""
    metadata = 'metadata={op_name="jit(_step)/core_attention/more_documents/while"}'
    loop = f"ROOT %w.1 = f32[] while(%x), condition=%c, body=%outer, {metadata}"
    counts = analyze(program("%x = f32[] constant(1)", loop, more=NESTED)).execution_counts
    assert (counts["outer"], counts["inner"]) == (0, 0)
