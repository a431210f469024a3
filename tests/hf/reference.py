"""Logits and gradients of `transformers`, for tests/hf/test_transformers.py. Runs in an environment of its own:

    python tests/hf/reference.py MODEL_DIRECTORY TOKENS.npy OUT.npz

float32, on CPU. The loss is the mean cross entropy of the next token. Without torch this file cannot be imported.
"""

import sys

import numpy as np
import torch
import transformers


def main(directory: str, tokens_path: str, out: str) -> None:
    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    ).train()
    tokens = torch.from_numpy(np.load(tokens_path))
    logits = model(input_ids=tokens, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    arrays = {f"gradient/{name}": parameter.grad.numpy() for name, parameter in model.named_parameters()}
    np.savez(out, logits=logits.detach().numpy(), loss=loss.item(), version=transformers.__version__, **arrays)


if __name__ == "__main__":
    main(*sys.argv[1:])
