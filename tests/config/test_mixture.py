import copy
import json
import re

import pytest

from jaxlc.config import defaults, from_dict, load, to_dict
from jaxlc.config.command_line import parse
from jaxlc.config.loading import with_settings
from jaxlc.core.errors import SettingError, UserError
from tests.advice import flags, followed

MIXTURE = {
    "code": dict(paths="repos", share="0.7", length_limits="8192", length_weights=(1, 2.5)),
    "books": {"paths": ["a.jsonl", "b"], "share": 0.3, "pool": "full_length"},
}


def settings_with(**sources):
    settings = defaults()
    settings.data.mixture = sources or MIXTURE
    return settings


def test_mixture_values_are_converted_and_sorted():
    books, code = load(settings_with()).data.mixture
    assert (books.name, books.paths, books.share, books.pool) == (
        "books",
        ("a.jsonl", "b"),
        0.3,
        "full_length",
    )
    assert (code.paths, code.share, code.length_limits, code.length_weights) == (
        ("repos",),
        0.7,
        (8192,),
        (1.0, 2.5),
    )
    assert (code.min_tokens, code.text_field) == (0, "text")
    other_order = {name: MIXTURE[name] for name in ("books", "code")}
    assert load(settings_with(**other_order)) == load(settings_with())


def test_mixture_survives_json_copies_and_changes():
    settings = settings_with()
    config = load(settings)
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config
    assert load(copy.deepcopy(settings)) == config == load(config)
    settings.data.mixture.books.share = 0.5
    settings.data.mixture.web = dict(paths="web")
    settings.update_from_flattened_dict(
        {"data.mixture.books.max_tokens": "1e6", "data.mixture.more.paths": "m"}
    )
    mixture = {source.name: source for source in load(settings).data.mixture}
    assert (mixture["books"].share, mixture["books"].max_tokens, mixture["more"].paths) == (
        0.5,
        1_000_000,
        ("m",),
    )
    assert "web" in mixture and mixture["books"].pool == "full_length"
    assert with_settings(config, {"data.mixture.code.share": 0.1}).data.mixture[1].share == 0.1
    assert (
        "mixture.books.paths=a.jsonl,b mixture.books.share=0.3 mixture.books.pool=full_length"
        in repr(config)
    )


def test_mixture_of_command_line_adds_and_changes_sources():
    argv = [
        "t",
        "--config=quickstart",
        "--config.data.mixture.x.paths=a,b",
        "--config.data.mixture.x.share=.5",
    ]
    config = parse(
        [
            *argv,
            "--config.data.mixture.y.paths=c",
            "--config.data.mixture.y.paths=d",
            "--config.data.seq_len=64",
        ]
    ).config
    assert [(s.name, s.paths, s.share) for s in config.data.mixture] == [
        ("x", ("a", "b"), 0.5),
        ("y", ("c", "d"), 1.0),
    ]
    assert config.data.seq_len == 64


@pytest.mark.parametrize(
    "flag, message",
    [
        (
            "books.shar=1",
            r"config.data.mixture.books.shar: did you mean config.data.mixture.books.share\?",
        ),
        (
            "books.share=many",
            "'many' for config.data.mixture.books.share: expected a finite number",
        ),
        ("books.pool=full", "expected one of 'packed', 'full_length'"),
        (
            "books=a",
            "mixture.books is a section: set one of its settings, such as config.data.mixture.books.paths",
        ),
        (
            "boks.share=0.5",
            r"mixture.boks.paths is \(\): give files.*; did you mean the source books\?",
        ),
        ("books.share", "write it as --name=value"),
        ("a b.share=1", "invalid name 'a b'"),
        (
            "books.share=-1",
            "invalid value -1.0 for config.data.mixture.books.share: expected at least 0",
        ),
        ("books.length_weights=1,2", "length_weights has 2 values and length_limits 0"),
        ("books.chunk_tokens=8192", "chunk_tokens=8192: expected 1 to config.data.seq_len="),
        ("books.answer_weights=answer", "answer_weights='answer' has no effect without chat_field"),
        (
            "books.max_tokens=-1",
            "invalid value -1 for config.data.mixture.books.max_tokens: expected at least 0",
        ),
    ],
)
def test_mixture_invalid_flag_is_refused(flag: str, message: str):
    argv = [
        "t",
        "--config=quickstart",
        "--config.data.mixture.books.paths=a",
        f"--config.data.mixture.{flag}",
    ]
    assert re.search(message, followed(lambda settings: parse([*argv, *flags(settings)])))


def test_mixture_invalid_assignment_is_refused_at_once():
    settings = settings_with()
    for change, message in (
        (lambda: setattr(settings.data.mixture.books, "shar", 1), "did you mean .*share"),
        (lambda: setattr(settings.data.mixture.books, "share", "x"), "expected a finite number"),
        (
            lambda: setattr(settings.data.mixture.bok, "share", 1),
            r"unknown source .*bok: did you mean books\?",
        ),
        (
            lambda: setattr(settings.data, "mixture", 3),
            "expected a dictionary of sources by name; to .*--config.data.mixture.NAME.paths=",
        ),
        (
            lambda: setattr(settings.data, "mixture", {"a": 3}),
            "data.mixture.a is a section: set one of its settings",
        ),
    ):
        with pytest.raises(SettingError, match=message):
            change()


def test_mixture_with_sources_or_without_shares_is_refused(tmp_path):
    settings = settings_with(a=dict(paths="x", share=0))
    with pytest.raises(UserError, match="all shares of config.data.mixture are 0"):
        load(settings)
    settings = settings_with(a=dict(paths="x", chat_format="alpaca", token_field="ids"))
    with pytest.raises(
        UserError, match="a.token_field='ids' and chat_format='alpaca' are both set"
    ):
        load(settings)
    settings = settings_with(a=dict(paths="x", chat_field="messages", text_field="body"))
    with pytest.raises(
        UserError, match="a.text_field='body' has no effect with chat_field='messages'"
    ):
        load(settings)
    settings = settings_with()
    settings.data.sources = "x"
    with pytest.raises(
        UserError, match=r"are both set: .* clear them with (--config.data.sources=)$"
    ) as error:
        load(settings)
    config, mixture = tmp_path / "sources.py", "--config.data.mixture.a.paths=x"
    config.write_text(
        "from jaxlc.config import defaults\n"
        "def get_config(variant):\n"
        "    config = defaults()\n"
        "    config.data.sources = 'x'\n"
        "    return config\n"
    )
    clear = str(error.value).rpartition(" ")[2]
    assert parse(["", f"--config={config}", mixture, clear]).config.data.sources == ()
    with pytest.raises(UserError, match="are both set"):
        parse(["", f"--config={config}", mixture])
    with pytest.raises(UserError, match=r"config.data.sources is empty"):
        parse(["", f"--config={config}", clear])
