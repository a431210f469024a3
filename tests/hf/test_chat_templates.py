"""Chats against `transformers`: token IDs and assistant masks of templates in the styles of
published models.

Needs JAXLC_TRANSFORMERS_PYTHON, as tests/hf/test_transformers.py.
"""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

from jaxlc.data.texts.documents import Chat
from jaxlc.data.tokens.chat_templates import load_chat_template
from jaxlc.data.tokens.encoder import Encoder
from jaxlc.data.tokens.tokenizers import load_tokenizer
from tests.data.chat_styles import cases, without_markers, write_tokenizer
from tests.hf.comparison import PYTHON, needs_transformers

CASES = cases()
_SCRIPT = """
import json, sys
from transformers import PreTrainedTokenizerFast
results = {}
for name, job in json.load(open(sys.argv[1])).items():
    tokenizer = PreTrainedTokenizerFast.from_pretrained(job["tokenizer"])
    encoded = tokenizer.apply_chat_template(
        job["messages"], tools=job.get("tools"), return_assistant_tokens_mask=True, return_dict=True
    )
    results[name] = [list(encoded["input_ids"]), list(encoded["assistant_masks"])]
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> dict[str, list[list[int]]]:
    """The IDs and the assistant mask of each case from transformers, in one process."""
    directory = tmp_path_factory.mktemp("chats")
    jobs = {
        name: {**chat, "tokenizer": str(write_tokenizer(directory / name, template))}
        for name, (template, chat) in CASES.items()
    }
    (directory / "jobs.json").write_text(json.dumps(jobs))
    command = [PYTHON, "-c", _SCRIPT, str(directory / "jobs.json")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@needs_transformers
@pytest.mark.parametrize("has_markers", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_answers_equal_assistant_masks_of_transformers(
    expected, tmp_path: Path, case: str, has_markers: bool
):
    """Also for the templates without markers, for which transformers has no masks: those with
    markers are compared.
    """
    template, chat = CASES[case]
    directory = write_tokenizer(tmp_path, template if has_markers else without_markers(template))
    chat_template = load_chat_template("", directory / "tokenizer.json")
    tokenizer = load_tokenizer(str(directory), end_token="</s>")
    rendered = chat_template.render(Chat(chat["messages"], chat.get("tools")), "chat")
    ((ids, answers),) = Encoder(tokenizer).encode([rendered])
    expected_ids, expected_mask = expected[case]
    assert ids.tolist() == expected_ids
    mask = np.zeros(len(ids), int)
    for begin, end in answers:
        mask[begin:end] = 1
    assert mask.tolist() == expected_mask and 0 < mask.sum() < len(mask)
