import json
from pathlib import Path

import pytest

from jaxlc.data.__main__ import main


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
        assert abs(realized - share) < 0.5 and epochs == pytest.approx(tokens / epoch_tokens, rel=0.01)
    assert "the run: 400 sequences of 512 tokens, " in " ".join(map(" ".join, lines))
    assert (tmp_path / "run" / "data.png").stat().st_size > 10_000


def test_data_report_without_mixture_and_with_wrong_command(tmp_path: Path, capsys):
    (tmp_path / "a.txt").write_text("text " * 3000)
    arguments = [f"--config.data.sources={tmp_path}/a.txt", f"--config.data.cache_dir={tmp_path}/cache"]
    assert main(["jaxlc data", "report", "--config=quickstart", *arguments, f"--workdir={tmp_path}"]) == 0
    assert "data.sources    100.00%" in capsys.readouterr().out
    assert main(["jaxlc data", "repport", "--config=quickstart"]) == 2
    assert "unknown command 'repport': did you mean report?" in capsys.readouterr().err
