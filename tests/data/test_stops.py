"""What ends an answer, for every kind of run and for models as others save them."""

import dataclasses
import json

import pytest
from ml_collections import ConfigDict

from jaxlc.config import Config, load
from jaxlc.config.models.pretrained import eos_token_ids
from jaxlc.core.errors import UserError
from jaxlc.data.tokens.chat_templates import fitting_template, without_generation_tags
from jaxlc.data.tokens.encoder import stops_of
from jaxlc.data.tokens.tokenizers import load_tokenizer
from tests.data.chat_styles import CHATML, SPECIAL_TOKENS, STYLES, write_tokenizer

END_OF_TURN, END = SPECIAL_TOKENS.index("<|im_end|>"), SPECIAL_TOKENS.index("</s>")
CHATS = dict(chats=dict(paths="x", chat_field="messages"))


def config_of(**settings) -> Config:
    config = load(ConfigDict(dict(model=dict(preset="tiny"))))
    data = {name: value for name, value in settings.items() if name != "prompts"}
    return dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, **data),
        rollouts=dataclasses.replace(config.rollouts, prompts=settings.get("prompts", ())),
    )


@pytest.mark.parametrize(("files", "ids"), [
    (dict(config=dict(eos_token_id=8)), [8]),
    (dict(config=dict(eos_token_id=8), generation_config=dict(eos_token_id=[7, 9])), [7, 9]),
    (dict(config=dict(eos_token_id=[8, 8, 2]), generation_config=dict(eos_token_id=None)), [8, 8, 2]),
    (dict(config=dict(eos_token_id=0), generation_config=dict(eos_token_id=[])), [0]),
    (dict(config=dict(model_type="x", text_config=dict(eos_token_id=[1, 106]))), [1, 106]),
    (dict(config=dict(eos_token_id=None, text_config=dict(eos_token_id=None)), generation_config={}), []),
    ({}, []),
])  # fmt: skip
def test_eos_token_ids_are_those_of_the_first_file_that_names_any(files, ids, tmp_path):
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    assert eos_token_ids(tmp_path) == ids


def test_eos_token_ids_of_a_damaged_file_raise(tmp_path):
    (tmp_path / "generation_config.json").write_text("garbage")
    with pytest.raises(UserError, match=r"cannot read .*generation_config.json"):
        eos_token_ids(tmp_path)


ENDS = dict(chatml="<|im_end|>", headers="<|eot_id|>", brackets="</s>", reasoning="<|im_end|>")


@pytest.mark.parametrize("style, end", ENDS.items())
def test_stops_have_the_end_of_turn_of_the_prompt_and_the_tokens_of_the_original(
    style, end, tmp_path
):
    tokenizer = load_tokenizer(str(write_tokenizer(tmp_path)), end_token="</s>")
    (tmp_path / "config.json").write_text(json.dumps(dict(eos_token_id=[END, 300])))
    config = config_of()
    config = dataclasses.replace(
        config, model=dataclasses.replace(config.model, init_from=str(tmp_path))
    )
    ids = list(dict.fromkeys([SPECIAL_TOKENS.index(end), END, 300]))
    for source in (STYLES[style], without_generation_tags(STYLES[style])):
        template = fitting_template(source, tokenizer)
        assert stops_of(config, tokenizer, None, template) == (ids, [])
    assert stops_of(config, tokenizer, None).ids == [END, 300]


@pytest.mark.parametrize("settings", [
    dict(mixture=CHATS), dict(traces=("x",)), dict(prompts=("x",)), dict(chat_template="chatml"),
], ids=str)  # fmt: skip
def test_stops_have_the_end_of_turn_wherever_chats_come_from(settings, tmp_path):
    if "mixture" in settings:
        settings = dict(
            mixture=load(ConfigDict(dict(model=dict(preset="tiny"), data=settings))).data.mixture
        )
    tokenizer = load_tokenizer(str(write_tokenizer(tmp_path, CHATML)), end_token="</s>")
    assert stops_of(config_of(**settings), tokenizer, None) == ([END_OF_TURN, END], [])
    assert stops_of(config_of(), tokenizer, None) == ([END], [])


def test_end_of_turn_that_is_no_token_is_a_stop_string():
    tokenizer = load_tokenizer("bytes")
    assert stops_of(config_of(chat_template="chatml"), tokenizer, None) == ([256], ["<|im_end|>"])


def test_traces_of_texts_need_no_template_and_a_broken_one_is_an_error(tmp_path):
    tokenizer = load_tokenizer(str(write_tokenizer(tmp_path)), end_token="</s>")
    assert stops_of(config_of(traces=("x",)), tokenizer, None) == ([END], [])
    (tmp_path / "chat_template.jinja").write_text("{% broken")
    assert stops_of(config_of(traces=("x",)), tokenizer, None) == ([END], [])
    with pytest.raises(UserError, match=r"none\.jinja"):
        stops_of(config_of(chat_template=str(tmp_path / "none.jinja")), tokenizer, None)
