import pytest

from jaxlc.core.text import did_you_mean, nearest_name, suggestion


def test_did_you_mean_near_name_is_a_question():
    assert did_you_mean("trian", ["train", "plan"]) == "did you mean train?"


def test_did_you_mean_without_near_name_lists_all_sorted():
    assert did_you_mean("x", ["train", "plan"]) == "expected one of plan, train"


@pytest.mark.parametrize(("name", "text"), [("trian", " (did you mean train?)"), ("x", "")])
def test_suggestion(name, text):
    assert suggestion(name, ("train", "plan")) == text


def test_nearest_name_below_the_cutoff_is_none():
    assert nearest_name("hidden", ["hidden_size"]) == "hidden_size"
    assert nearest_name("hidden", ["hidden_size"], cutoff=0.8) is None
