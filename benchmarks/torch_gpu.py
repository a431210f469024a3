"""PyTorch's side of `benchmarks.gpu_comparison`: measures training steps, in a Python with PyTorch.

    TORCH_PYTHON -m benchmarks.torch_gpu JOBS.json

JOBS.json is a list of jobs. The result of each is appended as a JSON line to the file `out` of the
job. The module imports nothing of jaxlc, so that it runs in an environment without JAX.
"""

import contextlib
import functools
import importlib.metadata
import json
import sys
import time
from collections.abc import Callable
from importlib import import_module  # the environment of jaxlc has no torch
from pathlib import Path
from typing import Any

from benchmarks import torch_models

torch: Any = torch_models.torch
checkpointing: Any = import_module("torch.utils.checkpoint")
attention: Any = import_module("torch.nn.attention")
PACKAGES = (
    *("torch", "transformers", "triton", "liger-kernel", "flash-linear-attention", "fla-core"),
    *("torchao", "flash-attn-3"),
)
_LOSS_CHUNK_TOKENS = 4096  # without Liger
_MIN_FP8_DIM = 512  # smaller products, such as of routers, stay in bf16
_MAX_ERROR_CHARS = 600


class Unavailable(Exception):
    """The column needs a package or a setting that is not there."""


def write_model(job: dict[str, Any]) -> dict[str, Any]:
    """Writes random weights as the file `model.safetensors` next to the config.json of the job."""
    directory = Path(job["directory"])
    config = json.loads((directory / "config.json").read_text())
    dtype = getattr(torch, config["torch_dtype"])
    torch.manual_seed(0)
    with _device(job):
        model = torch_models.make_model(config)
    for parameter in model.parameters():
        if parameter.ndim >= 2:  # others keep the values of their modules
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    tensors = {name: x.to(dtype).contiguous() for name, x in model.state_dict().items()}
    if config["tie_word_embeddings"]:
        tensors.pop("lm_head.weight", None)
    import_module("safetensors.torch").save_file(tensors, directory / "model.safetensors")
    return dict(parameters=sum(x.numel() for x in tensors.values()))


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Times the steps of a column, and traces the last ones.

    Returns:
      step_seconds: of the steps between the first and the traced ones. losses: of all steps.
      kernels: seconds and calls per step of each kernel of the traced steps, by name. peak_bytes.
    """
    with contextlib.ExitStack() as stack:
        _choose_attention(job, stack)
        with _device(job):
            run_step = _make_step(job)
        seconds, losses = [], []
        for _ in range(job["warm_up"] + job["repeats"]):
            start = time.perf_counter()
            losses.append(run_step())
            _wait(job)
            seconds.append(time.perf_counter() - start)
        activity = torch.profiler.ProfilerActivity
        activities = [activity.CPU if job["dry_run"] else activity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            for _ in range(job["traced"]):
                losses.append(run_step())
            _wait(job)
    return dict(
        step_seconds=seconds[job["warm_up"] :],
        first_step_seconds=seconds[0],
        losses=[float(x) for x in losses],
        kernels=_kernels(profile, job["traced"], is_cpu=job["dry_run"]),
        peak_bytes=None if job["dry_run"] else torch.cuda.max_memory_allocated(),
        head="Liger" if _liger(job) else "chunks",
        graphs=import_module("torch._dynamo.utils").counters["stats"]["unique_graphs"],
    )


def _make_step(job: dict[str, Any]) -> Callable[[], Any]:
    """A function that runs one training step and returns its loss, without waiting for it."""
    directory = Path(job["directory"])
    config = json.loads((directory / "config.json").read_text())
    model = torch_models.make_model(config)
    stored = import_module("safetensors.torch").load_file(directory / "model.safetensors")
    is_tied = config["tie_word_embeddings"]
    model.load_state_dict(stored, strict=not is_tied)
    del stored
    if job["lora"]:
        # frozen matrices in the data type of products; norms are float32
        compute = torch.float32 if job["dry_run"] else torch.bfloat16
        for module in model.modules():
            if isinstance(module, (torch.nn.Linear, torch.nn.Embedding)):
                module.to(compute)
        torch_models.add_adapters(model, **job["lora"])
    if job["fp8"]:
        _to_fp8(model.model.layers, job)
    backend = "aot_eager" if job["dry_run"] else "inductor"
    layers = [_Checkpointed(layer, job["checkpoint"], backend) for layer in model.model.layers]
    embedding = model.model.embed_tokens.weight
    head = embedding if is_tied else model.lm_head.weight
    trained = [x for x in model.parameters() if x.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, lr=job["learning_rate"], betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0,
        fused=not job["dry_run"],
    )  # fmt: skip
    tokens = torch.tensor(json.loads((directory / "tokens.json").read_text()))
    targets = tokens.roll(-1)
    loss_of = _liger(job) or functools.partial(_loss_in_chunks, backend)
    dtype = torch.float32 if job["dry_run"] else torch.bfloat16

    def run_step():
        with torch.autocast(tokens.device.type, dtype, enabled=not job["dry_run"]):
            hidden = torch.nn.functional.embedding(tokens[None], embedding).to(dtype)
            positions = torch_models.position_embeddings(model, hidden)
            for layer in layers:
                hidden = layer(hidden, position_embeddings=positions)
            loss = loss_of(head.to(dtype), model.model.norm(hidden)[0].to(dtype), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return run_step


def _liger(job: dict[str, Any]) -> Any:
    """Liger's loss (head, hidden, targets) with float32 sums; None if it is not installed."""
    if job["dry_run"]:
        return None
    try:
        liger = import_module("liger_kernel.transformers")
    except ImportError:
        return None
    return liger.LigerFusedLinearCrossEntropyLoss(accum_dtype=torch.float32)


def _loss_in_chunks(backend: str, head: Any, hidden: Any, targets: Any) -> Any:
    chunk_loss = torch.compile(_sum_of_losses, backend=backend)
    sums = [
        checkpointing.checkpoint(chunk_loss, head, x, y, use_reentrant=False)
        for x, y in zip(hidden.split(_LOSS_CHUNK_TOKENS), targets.split(_LOSS_CHUNK_TOKENS))
    ]
    return torch.stack(sums).sum() / len(targets)


def _sum_of_losses(head: Any, hidden: Any, targets: Any) -> Any:
    logits = torch.nn.functional.linear(hidden, head).float()
    return torch.nn.functional.cross_entropy(logits, targets, reduction="sum")


class _Checkpointed(torch.nn.Module):
    """A compiled layer with activation checkpointing.

    whole: only its input is saved. attention: also the results of attention. op: also every second
    matrix product, which is the selective checkpointing of torchtitan. Layers with a delta rule,
    which is not compiled, save their input: a graph that contains the checkpoint cannot have breaks.
    """

    def __init__(self, layer: Any, policy: str, backend: str):
        super().__init__()
        has_breaks = hasattr(layer, "linear_attn")
        self.layer, self.policy = layer, "whole" if has_breaks else policy
        (layer if has_breaks else self).compile(backend=backend)

    def forward(self, hidden, **others):
        if self.policy == "whole":
            return checkpointing.checkpoint(self.layer, hidden, use_reentrant=False, **others)
        contexts = _op_contexts if self.policy == "op" else _attention_contexts
        return checkpointing.checkpoint(
            self.layer, hidden, use_reentrant=False, context_fn=contexts, **others
        )


def _attention_contexts() -> tuple[Any, Any]:
    return _contexts(set())


def _op_contexts() -> tuple[Any, Any]:
    aten = torch.ops.aten
    return _contexts({aten.mm.default, aten._scaled_mm.default, aten._grouped_mm.default})


def _contexts(products: set[Any]) -> tuple[Any, Any]:
    """Saves attention and every second one of `products`, in the forward and when it runs again."""
    decision = checkpointing.CheckpointPolicy
    counts: dict[bool, int] = {False: 0, True: 0}

    def policy(context, operation, *args, **kwargs):
        is_saved = "scaled_dot_product" in str(operation)
        if operation in products:
            counts[context.is_recompute] += 1
            is_saved = counts[context.is_recompute] % 2 == 0
        return decision.MUST_SAVE if is_saved else decision.PREFER_RECOMPUTE

    return checkpointing.create_selective_checkpoint_contexts(policy)


def _to_fp8(layers: Any, job: dict[str, Any]) -> None:
    """FP8 products with dynamic scales of whole tensors."""
    if job["lora"]:
        raise Unavailable("torchao computes the gradients of frozen weights, too")
    try:
        float8 = import_module("torchao.float8")
    except ImportError as error:
        raise Unavailable(f"torchao: {error}") from error

    def is_large(module: Any, _: str) -> bool:
        return min(module.weight.shape) >= (16 if job["dry_run"] else _MIN_FP8_DIM)

    emulate = dict(config=float8.Float8LinearConfig(emulate=True)) if job["dry_run"] else {}
    float8.convert_to_float8_training(layers, module_filter_fn=is_large, **emulate)


def _choose_attention(job: dict[str, Any], stack: contextlib.ExitStack) -> None:
    backend = attention.SDPBackend
    if job["attention"] == "fa3":
        try:
            attention.activate_flash_attention_impl("FA3")
        except (AttributeError, ImportError, RuntimeError, ValueError) as error:
            raise Unavailable(f"FlashAttention-3: {error}") from error
        stack.enter_context(attention.sdpa_kernel(backend.FLASH_ATTENTION))
    elif not job["dry_run"]:
        stack.enter_context(attention.sdpa_kernel(backend.CUDNN_ATTENTION))


def _device(job: dict[str, Any]) -> Any:
    return torch.device("cpu" if job["dry_run"] else "cuda")


def _wait(job: dict[str, Any]) -> None:
    if not job["dry_run"]:
        torch.cuda.synchronize()


def _kernels(profile: Any, num_steps: int, *, is_cpu: bool) -> dict[str, tuple[float, float]]:
    """Seconds and calls per step of each kernel, or of each operation of a CPU, by name."""
    kernels = {}
    device_type = torch.autograd.DeviceType.CPU if is_cpu else torch.autograd.DeviceType.CUDA
    for event in profile.key_averages():
        if event.device_type == device_type:
            time_us = event.self_cpu_time_total if is_cpu else event.self_device_time_total
            kernels[event.key] = (1e-6 * time_us / num_steps, event.count / num_steps)
    return kernels


def versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def main() -> None:
    torch.set_num_threads(1)  # more do not help the tiny models of a dry run
    for job in json.loads(Path(sys.argv[1]).read_text()):
        start = time.perf_counter()
        try:
            result = write_model(job) if job["column"] == "weights" else measure(job)
        except Unavailable as error:
            result = dict(skipped=str(error))
        except Exception as error:  # the other jobs must still run
            result = dict(error=f"{type(error).__name__}: {str(error)[:_MAX_ERROR_CHARS]}")
        result |= dict(job_seconds=time.perf_counter() - start, versions=versions())
        with Path(job["out"]).open("a") as file:
            file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
