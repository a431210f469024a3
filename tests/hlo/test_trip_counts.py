import pytest

from jaxlc.hlo import parse
from jaxlc.hlo.trip_counts import executions
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


def test_the_condition_tells_the_rounds_where_the_compiler_does_not():
    assert executions(parse(RING)) == dict(main=1, body=3, condition=3)


def test_loops_multiply_and_call_sites_add():
    text = program(
        "%x = f32[] constant(1)",
        '%w.1 = f32[] while(%x), condition=%c, body=%outer, backend_config={"known_trip_count":{"n":"2"}}',
        "ROOT %f.1 = f32[] conditional(%x, %w.1), branch_computations={%leaf, %inner}",
        more=NESTED,
    )
    times = executions(parse(text))
    assert (times["outer"], times["inner"], times["leaf"]) == (2, 11, 12)


def test_a_loop_of_unknown_length_is_an_error():
    text = program("%x = f32[] constant(1)", "ROOT %w.1 = f32[] while(%x), condition=%c, body=%outer", more=NESTED)
    with pytest.raises(ValueError, match="rounds of loop %w.1"):
        executions(parse(text))
