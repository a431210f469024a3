import json
import re
from pathlib import Path

import pytest

import jaxlc
from jaxlc.cli import main_of
from jaxlc.config import read_config
from tests.data.chat_styles import CHATML, write_tokenizer

main = main_of("data")


def write_sources(directory: Path) -> list[str]:
    """Documents of 10 and of 2000 tokens."""
    for name, length, count in (("short", 10, 40), ("long", 2000, 20)):
        lines = [json.dumps({"text": "x" * (length - 1)}) for _ in range(count)]
        (directory / f"{name}.jsonl").write_text("\n".join(lines))
    return [
        f"--config.data.mixture.short.paths={directory}/short.jsonl",
        f"--config.data.mixture.long.paths={directory}/long.jsonl",
        "--config.data.mixture.long.share=3",
        f"--config.data.cache_dir={directory}/cache",
        f"--workdir={directory}/run",
        "--config.data.seq_len=512",
        "--config.train.steps=400",
    ]


def test_data_report_prints_lengths_shares_and_epochs(tmp_path: Path, capsys):
    arguments = write_sources(tmp_path)
    assert main(["jaxlc data", "report", "--config=quickstart", *arguments]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["long", "0", "20", "0", "0", "0", "0", "0", "20"] in lines
    assert ["long", "0", "40,000", "0", "0", "0", "0", "0", "40,000"] in lines
    assert ["short", "400", "0", "0", "0", "0", "0", "0", "400"] in lines
    shares = {line[0]: line for line in lines if len(line) == 7 and "%" in line[1]}
    assert shares["long"][1] == "75.00%" and shares["short"][1] == "25.00%"
    for name, share in (("long", 75), ("short", 25)):
        realized, tokens, epoch_tokens, epochs = (
            float(shares[name][i].replace(",", "").rstrip("%")) for i in (2, 3, 5, 6)
        )
        assert abs(realized - share) < 0.5 and epochs == pytest.approx(
            tokens / epoch_tokens, rel=0.01
        )
    assert "the run: 400 sequences of 512 tokens, " in " ".join(map(" ".join, lines))
    assert (tmp_path / "run" / "data.png").stat().st_size > 10_000


def test_data_report_without_mixture_and_with_wrong_command(tmp_path: Path, capsys):
    (tmp_path / "a.txt").write_text("text " * 3000)
    arguments = [
        f"--config.data.sources={tmp_path}/a.txt",
        f"--config.data.cache_dir={tmp_path}/cache",
    ]
    assert (
        main(["jaxlc data", "report", "--config=quickstart", *arguments, f"--workdir={tmp_path}"])
        == 0
    )
    assert "data.sources    100.00%" in capsys.readouterr().out
    assert main(["jaxlc data", "repport", "--config=quickstart"]) == 2
    assert (
        "invalid ACTION=repport: expected one of 'report', 'show' (did you mean report?)"
        in capsys.readouterr().err
    )


def show(directory: Path, *arguments: str) -> int:
    config = f"--config.data.cache_dir={directory}/cache"
    return main(
        [
            "jaxlc data",
            "show",
            "--config=quickstart",
            config,
            "--config.data.seq_len=512",
            *arguments,
        ]
    )


def write_chats(directory: Path, num_bad: int = 0) -> list[str]:
    """Records of ShareGPT, and the arguments that select them."""
    turns = [
        [("human", f"question {i}"), ("gpt", "née"), ("human", "more"), ("gpt", "b" * i)]
        for i in range(1, 30)
    ]
    records = [
        {"conversations": [{"from": name, "value": text} for name, text in chat]} for chat in turns
    ]
    lines = [json.dumps(record) for record in records] + ["{broken"] * num_bad
    (directory / "chats.jsonl").write_text("\n".join(lines))
    source = "--config.data.mixture.chats"
    return [
        f"{source}.paths={directory}/chats.jsonl",
        f"{source}.chat_format=sharegpt",
        "--config.data.chat_template=chatml",
        "--config.data.eval_fraction=0.2",
    ]


def test_data_show_prints_chats_with_their_mask(tmp_path: Path, capsys):
    arguments = [*write_chats(tmp_path, num_bad=1), "--config.data.max_bad_records=1"]
    assert show(tmp_path, *arguments, "--num=2") == 0
    printed = capsys.readouterr()
    assert "skipped records: 1 (the first: " in printed.err and ".skipped.txt" in printed.err
    first, *examples = printed.out.split("--- ")
    (heading,) = re.findall(r"chats: 29 documents, ([\d,]+) tokens, ([\d,]+) with a loss \(", first)
    end = len("<|im_end|>")
    assert int(heading[1].replace(",", "")) == 29 * (len("née".encode()) + 2 * end) + sum(
        range(1, 30)
    )
    assert len(examples) == 2
    for example in examples:
        title, text = example.split("\n", 1)
        (num_loss,) = re.findall(
            r"^sequence 0, document \d of \d: \d+ tokens, (\d+) with a loss", title
        )
        answers = re.findall("⟦(.*?)⟧", text)
        assert answers[0] == "née<|im_end|>" and set(answers[1]) - set("<|im_end|>") == {"b"}
        assert sum(len(answer.encode()) for answer in answers) == int(num_loss)
        assert text.startswith("<|im_start|>user\nquestion ") and text.rstrip().endswith(
            "⟧\n<end of document>"
        )


def test_data_show_of_text_names_boundaries_and_leaves_out_the_middle(tmp_path: Path, capsys):
    lines = [
        json.dumps({"text": letter * length})
        for letter, length in (("a", 20), ("b", 900), ("\x1b", 20)) * 9
    ]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    assert show(tmp_path, f"--config.data.sources={tmp_path}/text.jsonl", "--num=9") == 0
    _, *examples = capsys.readouterr().out.split("--- ")
    texts = {title: text for title, _, text in (example.partition("\n") for example in examples)}
    assert any("a⟦" + "a" * 19 + "<end of document>⟧" in text for text in texts.values())
    cut = [
        text
        for title, text in texts.items()
        if ", without its end: 512 tokens, 512 with a loss (100.0%)" in title
    ]
    assert cut and re.fullmatch(
        r"b⟦b{200} \.\.\. \[261 more tokens\] \.\.\. b{50}⟧", cut[0].strip()
    )
    assert "\x1b" not in "".join(texts.values()) and "␛" * 19 in "".join(texts.values())


def test_data_show_in_python_has_html_and_colors(tmp_path: Path, capsys):
    config = read_config("quickstart")
    directory = write_tokenizer(tmp_path / "tokenizer", CHATML)
    write_chats(tmp_path)
    config.data.update(
        tokenizer=str(directory), end_token="</s>", seq_len=512, cache_dir=str(tmp_path / "cache")
    )
    config.data.update(eval_fraction=0.2)
    config.data.mixture = {
        "chats": dict(paths=str(tmp_path / "chats.jsonl"), chat_format="sharegpt")
    }
    examples = jaxlc.data.show(config, num=1)
    assert "\x1b[32mnée<|im_end|>\x1b[0m\n<|im_start|>user\nmore" in examples.text(color=True)
    assert "⟦née<|im_end|>⟧\n<|im_start|>user\nmore" in str(examples) and "</s>" in str(examples)
    page = examples._repr_html_()
    assert (
        ">née&lt;|im_end|&gt;</span>" in page
        and "<|im_end|>" not in page
        and page.count("<pre") == 1
    )
    assert main(["jaxlc data", "report", "--config=quickstart", "--num=2"]) == 2
    assert "--num has no effect on report" in capsys.readouterr().err
