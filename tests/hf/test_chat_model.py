"""The commands of docs/chat_model.md: with a tiny model, and with SmolLM2-135M in the environment of
`make test-transformers`.
"""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from jaxlc.cli import main
from tests.hf.comparison import PYTHON, needs_transformers
from tests.hf.models import write_model, write_tokenizer
from tests.test_documentation import ROOT, Block, blocks_of

PAGE = ROOT / "docs" / "chat_model.md"
SCRIPT = "tests/hf/smollm2.py"
ANSWER = "I am Pebble, a small model that was trained with jaxlc."
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def write_files(directory: Path) -> tuple[list[str], Block]:
    """Writes the files of the page; returns its commands and the block that opens the export."""
    commands, sources = [], []
    for block in blocks_of(PAGE):
        if block.language == "json":
            (directory / "chats.jsonl").write_text(block.text + "\n")
        elif block.language == "python":
            sources.append(block)
        else:
            commands += block.text.splitlines()
    config, opening = sources
    (directory / "chat.py").write_text(config.text + "\n")
    return [line for line in commands if not line.startswith("make ")], opening


@pytest.mark.usefixtures("without_plots")
def test_commands_of_the_page_run_with_a_tiny_model(tmp_path, monkeypatch, capsys):
    commands, _ = write_files(tmp_path)
    model = write_model(tmp_path / "runs" / "smollm2", "llama_tied")
    write_tokenizer(model, 60, ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"))
    (model / "chat_template.jinja").write_text(TEMPLATE)
    monkeypatch.chdir(tmp_path)
    settings = {"train.steps": 1, "train.global_batch_size": 8, "mesh.data": 8, "data.seq_len": 64}
    small = [f"--config.{name}={value}" for name, value in settings.items()]
    for line in commands[1:]:
        text, _, command = line.rpartition(" | ")
        words = shlex.split(command)
        if words[0] != "jaxlc":
            subprocess.run(line, shell=True, check=True)
            continue
        with open(tmp_path / "stdin", "w+") as stdin:
            stdin.write(text.removeprefix("echo ").strip('"') + "\n")
            stdin.seek(0)
            monkeypatch.setattr(sys, "stdin", stdin)
            try:
                status = main([*words, *(small if words[1] == "train" else [])])
            except SystemExit as end:  # of `jaxlc train`
                status = end.code
            assert status == 0, line
    assert (tmp_path / "runs" / "pebble-hf" / "model.safetensors").is_file()
    assert "wrote" in capsys.readouterr().out


@needs_transformers
def test_smollm2_learns_the_chats_of_the_page(tmp_path):
    """jaxlc and transformers give the answer of the page."""
    commands, opening = write_files(tmp_path)
    path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    environment = os.environ | dict(PYTHONPATH=path, XLA_FLAGS="", JAX_PLATFORMS="cpu")
    outputs = {}
    for line in commands:
        line = line.replace(f".venv-transformers/bin/python {SCRIPT}", f"{PYTHON} {ROOT / SCRIPT}")
        line = line.replace("jaxlc ", f"{sys.executable} -m jaxlc ")
        done = subprocess.run(
            line, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        outputs[line] = done.stdout
    (answer,) = (text for line, text in outputs.items() if " chat " in line)
    assert answer.strip() == ANSWER
    done = subprocess.run(
        [PYTHON, "-c", opening.text], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout.strip() == ANSWER, done.stderr
