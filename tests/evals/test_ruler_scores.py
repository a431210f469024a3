"""Scores of stored predictions, compared with those of NVIDIA's own scorer.

ruler_scores.json has predictions of all 13 tasks and the scores that scripts/eval/evaluate.py of
NVIDIA/RULER printed for them, at the commit that the file names: right, partly right and wrong
predictions, other cases, line breaks, control characters, empty ones.
"""

import json
from pathlib import Path

import pytest

from jaxlc.evals import ruler
from jaxlc.evals.predictions import cleaned, score_of

STORED = json.loads((Path(__file__).parent / "ruler_scores.json").read_text())["tasks"]


def test_stored_scores_cover_all_tasks():
    assert STORED.keys() == ruler.TASKS.keys()
    assert all(0 < task["score"] < 100 for task in STORED.values())


@pytest.mark.parametrize("name", ruler.TASKS)
def test_score_equals_that_of_the_published_scorer(name):
    predictions = [
        (cleaned(row["prediction"]), row["references"]) for row in STORED[name]["predictions"]
    ]
    score = score_of([ruler.TASKS[name].match(*pair) for pair in predictions])
    assert round(score.score, 2) == STORED[name]["score"]
    assert sum(not prediction for prediction, _ in predictions) == STORED[name]["empty"]
