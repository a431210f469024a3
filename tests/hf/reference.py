"""Results of `transformers` for tests/hf/test_transformers.py. Runs in an environment of its own:

    python tests/hf/reference.py JOBS.json

JOBS.json is a list of jobs. Each has `directory` (a model), `out` (an .npz file to write), and the
fields of one of the functions below. All are on CPU in float32, unless `float64` is true. Without
torch this file cannot be imported.
"""

import contextlib
import json
import math
import pathlib
import sys

import numpy as np
import torch
import transformers

CROSS_ENTROPY = torch.nn.functional.cross_entropy


def open_model(directory: str):
    fields = json.loads((pathlib.Path(directory) / "config.json").read_text())
    auto = transformers.AutoModelForCausalLM
    if "vision_config" in fields:
        auto = transformers.AutoModelForImageTextToText
    elif fields["model_type"] == "mistral4":  # which AutoModelForCausalLM does not know
        auto = transformers.Mistral4ForCausalLM
    model = auto.from_pretrained(
        directory, config=config_of(directory), dtype=torch.float32, attn_implementation="eager"
    )
    return with_step_limit(model, fields).train()


def with_step_limit(model, fields: dict):
    """transformers bounds the steps of nemotron_h by time_step_min, and does not read this field."""
    for module in model.modules():
        if fields["model_type"] == "nemotron_h" and hasattr(module, "time_step_limit"):
            module.time_step_limit = tuple(fields["time_step_limit"])
    return model


def config_of(directory: str):
    """The config of a model; transformers 4 does not read rope_parameters."""
    path = pathlib.Path(directory) / "config.json"
    # as transformers writes numbers that JSON does not have
    fields = json.loads(
        path.read_text(),
        object_hook=lambda x: float(x.get("__float__", 0)) if x.keys() == {"__float__"} else x,
    )
    parameters = fields.get("rope_parameters")
    if transformers.__version__.startswith("4.") and parameters and "rope_theta" not in fields:
        fields["rope_theta"] = parameters["rope_theta"]
        fields["rope_scaling"] = None if parameters["rope_type"] == "default" else parameters
    return transformers.AutoConfig.for_model(**fields)


def logits_and_loss(model, tokens: np.ndarray, first_position: int = 0):
    """Logits [B, T, V], and the mean cross entropy of the next token."""
    tokens = torch.from_numpy(tokens)
    positions = first_position + torch.arange(tokens.shape[1])
    logits = model(
        input_ids=tokens, position_ids=positions[None].expand_as(tokens), use_cache=False
    ).logits
    return logits, CROSS_ENTROPY(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def gradients(
    directory: str, tokens: list, first_position: int = 0, float64: bool = False
) -> dict[str, np.ndarray]:
    """Logits and gradients of the loss; positions count from `first_position`."""
    model = open_model(directory)
    with in_float64(model) if float64 else contextlib.nullcontext():
        logits, loss = logits_and_loss(model, np.array(tokens), first_position)
        loss.backward()
    arrays = {
        f"gradient/{name}": parameter.grad.numpy()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None  # of images
    }
    return dict(
        logits=logits.detach().numpy(), loss=loss.detach().numpy(), **_by_expert(arrays, model)
    )


def logits(directory: str, tokens: list) -> dict[str, np.ndarray]:
    result, _ = logits_and_loss(open_model(directory).eval(), np.array(tokens))
    return dict(logits=result.detach().numpy())


def save(
    config: dict, tokens: list, directory: str, wrapper: str = "", **options
) -> dict[str, np.ndarray]:
    """Saves a random model of config.json with save_pretrained, and returns its logits.

    Args:
      wrapper: its model_type if it is one with images; then `config` is its text_config.
      options: of save_pretrained.
    """
    fields = dict(config)
    if wrapper:
        vision = dict(
            depth=1,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
        )
        vision |= dict(num_heads=2, out_hidden_size=32, num_position_embeddings=16)
        fields = dict(model_type=wrapper, text_config=fields, vision_config=vision)
        fields["tie_word_embeddings"] = config["tie_word_embeddings"]
    auto = (
        transformers.AutoModelForImageTextToText if wrapper else transformers.AutoModelForCausalLM
    )
    described = transformers.AutoConfig.for_model(**fields)
    model = auto.from_config(described, dtype=torch.float32, attn_implementation="eager")
    with_step_limit(model, fields)
    generator = torch.Generator().manual_seed(0)
    for name, x in sorted(model.state_dict().items()):
        if "rotary_emb" not in name:
            x.copy_(_random(name, x.shape, generator))
    model.save_pretrained(directory, **options)
    logits = model.eval()(input_ids=torch.tensor(tokens), use_cache=False).logits
    return dict(logits=logits.detach().numpy())


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Values with which every tensor has an effect, and logits a standard deviation above 1."""
    if name.endswith(("A_log", "dt_bias")):
        return 3 * torch.rand(shape, generator=generator) - 3
    if len(shape) == 1:
        return 0.5 + torch.rand(shape, generator=generator)
    return torch.randn(shape, generator=generator) * 1.5 / math.prod(shape[1:]) ** 0.5


def _by_expert(arrays: dict[str, np.ndarray], model) -> dict[str, np.ndarray]:
    """The gradients of stacked experts by the names of released files, which have a tensor for each
    expert, except those of gpt-oss, Qwen 3.5 and Qwen 3 VL.
    """
    result, model_type = {}, model.config.model_type
    if model_type in ("minimax_m2", "mixtral"):
        arrays = {name.replace(".mlp.", ".block_sparse_moe."): x for name, x in arrays.items()}
    if model_type == "hy_v3":
        for name, own in {"mlp.gate.": "mlp.router.gate.", "shared_experts": "shared_mlp"}.items():
            arrays = {x.replace(name, own): array for x, array in arrays.items()}
    for full_name, array in arrays.items():
        name = full_name.replace("model.language_model.", "model.")
        stem, _, last = name.rpartition(".experts.")
        if stem and model_type == "qwen3_vl_moe":
            result[name] = array.swapaxes(1, 2)
            continue
        if model_type == "kimi_linear":
            name = name.replace("forget_gate.", "")
            if name.endswith("conv1d.weight"):
                parts = np.split(array, 3)
                result |= {name.replace("conv1d", f"{x}_conv1d"): y for x, y in zip("qkv", parts)}
                continue
            stem = stem.replace(".mlp", ".block_sparse_moe")
            if any(x in name for x in ("mlp.gate.", "mlp.shared_experts.")):
                name = name.replace(".mlp.", ".block_sparse_moe.")
        if model_type.startswith("granitemoe") and "block_sparse_moe" in name:
            modules = {"experts.gate_up_proj": "input_linear.weight"}
            modules |= {"experts.down_proj": "output_linear.weight"}
            modules |= {"router.weight": "router.layer.weight"}
            module, _, part = name.partition("block_sparse_moe.")
            result[f"{module}block_sparse_moe.{modules[part]}"] = array
            continue
        if not stem or model_type in ("gpt_oss", "qwen3_5_moe_text", "mistral3"):
            result[name] = array
            continue
        for expert, x in enumerate(array):
            parts = (
                dict(zip(("gate_proj", "up_proj"), np.split(x, 2)))
                if last == "gate_up_proj"
                else {last: x}
            )
            is_mixtral = model_type in ("minimax_m2", "mixtral", "kimi_linear")
            names = dict(gate_proj="w1", up_proj="w3", down_proj="w2") if is_mixtral else {}
            result |= {
                f"{stem}.experts.{expert}.{names.get(part, part)}.weight": y
                for part, y in parts.items()
            }
    return result


def balance_gradients(directory: str, tokens: list, coefficient: float) -> dict[str, np.ndarray]:
    """As `gradients`, with the balance loss of transformers, times a coefficient, added to the
    loss.
    """
    model = open_model(directory)
    tokens = torch.tensor(tokens)
    output = model(input_ids=tokens, output_router_logits=True, use_cache=False)
    loss = CROSS_ENTROPY(output.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    (loss + coefficient * output.aux_loss).backward()
    arrays = {
        f"gradient/{name}": parameter.grad.numpy() for name, parameter in model.named_parameters()
    }
    losses = dict(balance_loss=output.aux_loss.detach().numpy())
    return dict(logits=output.logits.detach().numpy(), **losses, **_by_expert(arrays, model))


def dequantize(directory: str) -> dict[str, np.ndarray]:
    """The bits of the bfloat16 weights of experts that are stored in MXFP4, by name."""
    from safetensors.torch import load_file
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    tensors = {}
    for path in pathlib.Path(directory).glob("*.safetensors"):
        tensors |= load_file(path)
    names = [name.removesuffix("_blocks") for name in tensors if name.endswith("_blocks")]
    weights = {
        x: convert_moe_packed_tensors(tensors[f"{x}_blocks"], tensors[f"{x}_scales"]) for x in names
    }
    return {name: x.contiguous().view(torch.uint16).numpy() for name, x in weights.items()}


def nf4(directory: str, quantized: str, config: dict, tokens: list) -> dict[str, np.ndarray]:
    """Writes a random model in bfloat16, and the same in NF4 by bitsandbytes; returns its
    dequantized weights, and logits of these in float32.
    """
    from bitsandbytes.functional import dequantize_4bit

    torch.manual_seed(0)
    auto = transformers.AutoModelForCausalLM
    model = auto.from_config(transformers.AutoConfig.for_model(**config))
    model.to(torch.bfloat16).save_pretrained(directory)
    options = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    )
    in_nf4 = auto.from_pretrained(directory, quantization_config=options, dtype=torch.bfloat16)
    in_nf4.save_pretrained(quantized)
    weights = {
        name: dequantize_4bit(x.data, x.quant_state).float()
        for name, x in in_nf4.named_parameters()
        if hasattr(x, "quant_state")
    }
    whole = open_model(directory)  # not `model`, whose buffers are in bfloat16
    whole.load_state_dict(weights, strict=False)
    found = logits_and_loss(whole.eval(), np.array(tokens))[0]
    return {name: x.numpy() for name, x in weights.items()} | {"logits": found.detach().numpy()}


def weights(directory: str) -> dict[str, np.ndarray]:
    """The bits of all weights in bfloat16, by the names of released files. On CPU, transformers
    dequantizes weights in FP8 when it opens a model.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    bits = {name: x.bfloat16().view(torch.uint16).numpy() for name, x in model.state_dict().items()}
    return _by_expert(bits, model)


def resize(directory: str, num_tokens: int) -> dict[str, np.ndarray]:
    """The embedding and the head after more tokens were added."""
    torch.manual_seed(0)
    model = open_model(directory)
    model.resize_token_embeddings(num_tokens)
    names = "model.embed_tokens.weight", "lm_head.weight"
    return {name: model.state_dict()[name].numpy() for name in names}


def peft_gradients(directory: str, adapters: str, tokens: list) -> dict[str, np.ndarray]:
    """As `gradients`, in float64, of a model with the adapters in another directory; of the trained
    parameters only.
    """
    import peft

    model = peft.PeftModel.from_pretrained(
        open_model(directory), adapters, is_trainable=True
    ).train()
    with in_float64(model):
        logits, loss = logits_and_loss(model, np.array(tokens))
        loss.backward()
    trained = {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    arrays = {f"gradient/{name}": parameter.grad.numpy() for name, parameter in trained.items()}
    return dict(logits=logits.detach().numpy(), loss=loss.detach().numpy(), **arrays)


def peft_save(directory: str, adapters: str, tokens: list, **fields) -> dict[str, np.ndarray]:
    """Writes random adapters of a model with peft, and returns its logits with them.

    Args:
      fields: of LoraConfig.
    """
    import peft

    config = peft.LoraConfig(task_type="CAUSAL_LM", **fields)
    model = peft.get_peft_model(open_model(directory), config)
    generator = torch.Generator().manual_seed(0)
    for name, x in sorted(model.named_parameters()):
        if "lora_" in name:
            x.data = torch.randn(x.shape, generator=generator) / 5
    model.save_pretrained(adapters)
    logits, _ = logits_and_loss(model.eval(), np.array(tokens))
    return dict(logits=logits.detach().numpy())


@contextlib.contextmanager
def in_float64(model):
    """Converts the model, and lets the names of float32 mean float64: RoPE and norms use float32 in
    every model.
    """
    names = torch.float, torch.float32, torch.Tensor.float
    torch.float, torch.float32, torch.Tensor.float = (
        torch.float64,
        torch.float64,
        torch.Tensor.double,
    )
    torch.set_default_dtype(torch.float64)
    model.double()
    model.config._experts_implementation = "eager"  # torch's grouped product has no float64
    for module in model.modules():
        for name, child in list(module.named_children()):
            if type(child).__name__.endswith("RotaryEmbedding") and hasattr(child, "config"):
                setattr(module, name, type(child)(child.config))  # computes the frequencies again
    try:
        yield
    finally:
        torch.float, torch.float32, torch.Tensor.float = names
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def without_bfloat16():
    """torch.optim.Muon iterates in the dtype of the gradients."""
    original = torch.Tensor.bfloat16
    torch.Tensor.bfloat16 = lambda self: self
    try:
        yield
    finally:
        torch.Tensor.bfloat16 = original


def train(
    directory: str,
    batches: list,
    learning_rate: float,
    weight_decay: float,
    float64: bool = False,
    muon: bool = False,
) -> dict[str, np.ndarray]:
    """The loss of each step of AdamW, and the parameters after the first; biases and norms have no
    weight decay. With `muon`, Muon updates the matrices of layers.
    """
    model, losses, updated = open_model(directory), [], {}
    with in_float64(model) if float64 else contextlib.nullcontext():
        named = dict(model.named_parameters())
        # A_log of kimi_linear has four dimensions, of which one is not 1
        vectors = [name for name, x in named.items() if x.ndim < 2 or name.endswith("A_log")]
        matrices = [x for x in named.keys() - {*vectors} if muon and ".layers." in x]
        others = [named[x] for x in named.keys() - {*vectors, *matrices}]
        groups = [
            dict(params=others, weight_decay=weight_decay),
            dict(params=[named[x] for x in vectors], weight_decay=0.0),
        ]
        optimizers = [torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), eps=1e-8)]
        if muon:
            settings = dict(lr=learning_rate, weight_decay=weight_decay)
            params = [named[x] for x in matrices]
            optimizers.append(torch.optim.Muon(params, **settings, adjust_lr_fn="match_rms_adamw"))
        for tokens in batches:
            model.zero_grad()
            _, loss = logits_and_loss(model, np.array(tokens))
            loss.backward()
            with without_bfloat16():
                for optimizer in optimizers:
                    optimizer.step()
            losses.append(loss.item())
            updated = updated or {
                f"updated/{name}": x.detach().numpy().copy() for name, x in named.items()
            }
    return dict(losses=np.array(losses), **_by_expert(updated, model))


def generate(directory: str, prompt: list, num_tokens: int) -> dict[str, np.ndarray]:
    """Prompt and greedily generated tokens, and the difference of the two largest logits of each
    new token.
    """
    model = open_model(directory).eval()
    tokens = torch.tensor([prompt])
    output = model.generate(
        # without it, tokens that equal pad_token_id are masked
        tokens, attention_mask=torch.ones_like(tokens),
        max_new_tokens=num_tokens, do_sample=False, eos_token_id=None, pad_token_id=0,
        output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    largest = torch.stack(output.logits)[:, 0].topk(2).values
    return dict(tokens=output.sequences[0].numpy(), gaps=(largest[:, 0] - largest[:, 1]).numpy())


def default_config(directory: str, model_type: str) -> dict[str, np.ndarray]:
    """The fields of a config without settings, as JSON."""
    del directory
    return dict(json=np.array(json.dumps(transformers.AutoConfig.for_model(model_type).to_dict())))


def read_config(directory: str) -> dict[str, np.ndarray]:
    """The fields of config.json as transformers reads them, as JSON."""
    return dict(json=np.array(transformers.AutoConfig.from_pretrained(directory).to_json_string()))


def chat(directory: str, message: str, num_tokens: int) -> dict[str, np.ndarray]:
    """The answer of the text-generation pipeline, its new tokens, and the lengths that the files of
    a model name.
    """
    pipeline = transformers.pipeline("text-generation", model=directory, dtype=torch.float32)
    messages = [dict(role="user", content=message)]
    (result,) = pipeline(messages, max_new_tokens=num_tokens, do_sample=False)
    inputs = pipeline.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    tokens = pipeline.model.generate(**inputs, max_new_tokens=num_tokens, do_sample=False)[0]
    return dict(
        text=np.array(result["generated_text"][-1]["content"]),
        tokens=tokens[inputs["input_ids"].shape[1] :].numpy(),
        temperature=np.array(pipeline.model.generation_config.temperature or 0.0),
        lengths=np.array(
            [pipeline.tokenizer.model_max_length, pipeline.model.config.max_position_embeddings]
        ),
    )


def main(jobs_path: str) -> None:
    torch.set_num_threads(1)
    jobs = json.loads(pathlib.Path(jobs_path).read_text())
    functions = {
        function.__name__: function
        for function in (
            gradients,
            logits,
            save,
            balance_gradients,
            dequantize,
            nf4,
            weights,
            resize,
            peft_gradients,
            peft_save,
            train,
            generate,
            default_config,
            read_config,
            chat,
        )
    }
    for job in jobs:
        arguments = {name: value for name, value in job.items() if name not in ("job", "out")}
        np.savez(job["out"], version=transformers.__version__, **functions[job["job"]](**arguments))


if __name__ == "__main__":
    main(sys.argv[1])
