"""Prompts against `transformers`: the tokens of a text, and those of a chat that an answer follows.

Needs JAXLC_TRANSFORMERS_PYTHON, as tests/hf/test_transformers.py.
"""

import json
import subprocess

from jaxlc.data.tokens.chat_templates import fitting_template
from jaxlc.data.tokens.tokenizers import load_tokenizer
from jaxlc.generation.generate_text import PromptEncoder
from tests.data.chat_styles import STYLES, write_tokenizer
from tests.generation.test_prompts import add_bos_processor
from tests.hf.comparison import PYTHON, needs_transformers

TEXT, PREFIX = "What is the number of the box?", "The number is"
# Post-processor with a start token, values of tokenizer_config.json.
START_CASES = [
    (False, {}), (True, {}), (True, dict(add_bos_token=False)), (False, dict(add_bos_token=True)),
    (True, dict(add_eos_token=False)), (True, dict(add_bos_token=True)),
]  # fmt: skip
_SCRIPT = """
import json, sys
from transformers import PreTrainedTokenizerFast
text, prefix, directories = json.load(open(sys.argv[1]))
results = []
for directory in directories:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    chat = None
    if tokenizer.chat_template:
        messages = [dict(role="user", content=text)]
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        chat = tokenizer(rendered + prefix, add_special_tokens=False).input_ids
    results.append([tokenizer(text).input_ids, chat])
print(json.dumps(results))
"""


@needs_transformers
def test_prompts_equal_those_of_transformers(tmp_path):
    directories = []
    for index, (has_processor, values) in enumerate(START_CASES):
        directories.append(write_tokenizer(tmp_path / str(index)))
        if has_processor:
            add_bos_processor(directories[-1])
        path = directories[-1] / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))
    directories += [
        write_tokenizer(tmp_path / style, template) for style, template in STYLES.items()
    ]
    (tmp_path / "jobs.json").write_text(
        json.dumps([TEXT, PREFIX, [str(directory) for directory in directories]])
    )
    done = subprocess.run(
        [PYTHON, "-c", _SCRIPT, str(tmp_path / "jobs.json")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    lengths = set()
    for directory, (text_ids, chat_ids) in zip(
        directories, json.loads(done.stdout.splitlines()[-1]), strict=True
    ):
        tokenizer = load_tokenizer(str(directory), end_token="</s>")
        encode = PromptEncoder(tokenizer=tokenizer)
        assert encode(TEXT).tolist() == text_ids, directory
        lengths.add(len(text_ids))
        if chat_ids is not None:
            chat = PromptEncoder(tokenizer=tokenizer, template=fitting_template("", tokenizer))
            assert chat(TEXT, PREFIX).tolist() == chat_ids, directory
    assert len(lengths) == 2  # with and without a start token
