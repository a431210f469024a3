"""PyTorch's side of `benchmarks.cpu_comparison`: times one call per line of standard input, in a
Python with PyTorch.

    TORCH_PYTHON benchmarks/torch_cpu.py '{"seq_len": 8192, ...}'

The first line of output is a JSON object of versions. Then each line of input is the name of a
case, "attention" or "step", and each line of output the seconds of one call and the CPU seconds of
the process, as a JSON list. The module imports nothing of jaxlc, so that it runs in an environment
without JAX.
"""

import json
import sys
import time
from collections.abc import Callable
from importlib import import_module  # the environment of jaxlc has no torch


def attention(case: dict) -> Callable[[], object]:
    """Forward and backward of causal `scaled_dot_product_attention`, float32."""
    torch = import_module("torch")
    torch.manual_seed(0)
    shape = (1, case["num_heads"], case["seq_len"], case["head_dim"])
    q, k, v = (torch.randn(shape, requires_grad=True) for _ in range(3))
    dout = torch.randn(shape)

    def call():
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return torch.autograd.grad(out, (q, k, v), dout)

    return call


def step(case: dict) -> Callable[[], object]:
    """A training step of `LlamaForCausalLM` with AdamW and gradient clipping, float32."""
    torch, transformers = import_module("torch"), import_module("transformers")
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=case["vocab_size"],
            hidden_size=case["model_dim"],
            intermediate_size=case["ffn_dim"],
            num_hidden_layers=case["num_layers"],
            num_attention_heads=case["model_heads"],
            num_key_value_heads=case["model_kv_heads"],
            head_dim=case["model_head_dim"],
            tie_word_embeddings=True,
            max_position_embeddings=case["step_seq_len"],
            attn_implementation="sdpa",
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1)
    tokens = torch.randint(0, case["vocab_size"], (case["batch_size"], case["step_seq_len"]))

    def call():
        optimizer.zero_grad(set_to_none=True)
        model(input_ids=tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return call


def main() -> None:
    case = json.loads(sys.argv[1])
    torch, transformers = import_module("torch"), import_module("transformers")
    torch.set_num_threads(case["num_threads"])
    calls = {"attention": attention(case), "step": step(case)}
    versions = dict(
        torch=torch.__version__,
        transformers=transformers.__version__,
        num_threads=torch.get_num_threads(),
    )
    print(json.dumps(versions), flush=True)
    for line in sys.stdin:
        start_seconds, start_cpu_seconds = time.perf_counter(), time.process_time()
        calls[line.strip()]()
        print(
            json.dumps(
                [time.perf_counter() - start_seconds, time.process_time() - start_cpu_seconds]
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
