"""Models of `benchmarks.gpu_comparison` in PyTorch: Llama, Qwen 3 and its mixture of experts.

Tensors have the names of Hugging Face files. Qwen 3.5 is the model of transformers, whose layers
are called in the same way. The module imports nothing of jaxlc.
"""

import math
from importlib import import_module  # the environment of jaxlc has no torch
from typing import Any

torch: Any = import_module("torch")
nn, F = torch.nn, torch.nn.functional


def make_model(config: dict[str, Any]) -> Any:
    """The model that a config.json describes, with random weights, on the default device."""
    if config["model_type"] == "qwen3_5_text":
        return _qwen3_5(config)
    return CausalLM(config)


def position_embeddings(model: Any, hidden: Any) -> tuple[Any, Any]:
    """Cosines and sines of RoPE for the positions of `hidden` [1, T, D]."""
    positions = torch.arange(hidden.shape[1], device=hidden.device)
    if hasattr(model.model, "rotary_emb"):  # of transformers
        return model.model.rotary_emb(hidden, positions.expand(3, 1, -1))
    angles = positions.double()[:, None] * _rope_frequencies(model.config).to(hidden.device)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().float(), angles.sin().float()


class CausalLM(nn.Module):
    """A decoder; `model` has the embedding, the layers and the last norm."""

    def __init__(self, config: dict[str, Any]):
        super().__init__()
        self.config = config
        vocab_size, model_dim = config["vocab_size"], config["hidden_size"]
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(vocab_size, model_dim)
        layers = (Layer(config) for _ in range(config["num_hidden_layers"]))
        self.model.layers = nn.ModuleList(layers)
        self.model.norm = RMSNorm(model_dim, config)
        if not config["tie_word_embeddings"]:
            self.lm_head = nn.Linear(model_dim, vocab_size, bias=False)


class Layer(nn.Module):
    def __init__(self, config: dict[str, Any]):
        super().__init__()
        self.input_layernorm = RMSNorm(config["hidden_size"], config)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config["hidden_size"], config)
        self.mlp = Experts(config) if "num_experts" in config else MLP(config)

    def forward(self, hidden, position_embeddings):
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), *position_embeddings)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class RMSNorm(nn.Module):
    def __init__(self, dim: int, config: dict[str, Any]):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.epsilon = config["rms_norm_eps"]

    def forward(self, x):
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.epsilon).to(x.dtype)


class Attention(nn.Module):
    """Causal attention with grouped heads, and the norms of queries and keys of Qwen 3."""

    def __init__(self, config: dict[str, Any]):
        super().__init__()
        self.head_dim, model_dim = config["head_dim"], config["hidden_size"]
        q_dim = config["num_attention_heads"] * self.head_dim
        kv_dim = config["num_key_value_heads"] * self.head_dim
        self.q_proj = nn.Linear(model_dim, q_dim, bias=False)
        self.k_proj = nn.Linear(model_dim, kv_dim, bias=False)
        self.v_proj = nn.Linear(model_dim, kv_dim, bias=False)
        self.o_proj = nn.Linear(q_dim, model_dim, bias=False)
        has_norms = config["model_type"].startswith("qwen3")
        self.q_norm = RMSNorm(self.head_dim, config) if has_norms else nn.Identity()
        self.k_norm = RMSNorm(self.head_dim, config) if has_norms else nn.Identity()

    def forward(self, x, cos, sin):
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = _rotated(self.q_norm(q), cos, sin), _rotated(self.k_norm(k), cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, config: dict[str, Any]):
        super().__init__()
        model_dim, ffn_dim = config["hidden_size"], config["intermediate_size"]
        self.gate_proj = nn.Linear(model_dim, ffn_dim, bias=False)
        self.up_proj = nn.Linear(model_dim, ffn_dim, bias=False)
        self.down_proj = nn.Linear(ffn_dim, model_dim, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Experts(nn.Module):
    """A router and experts, whose matrices are stacked. Tokens are sorted by expert for grouped
    products, and none is dropped.
    """

    def __init__(self, config: dict[str, Any]):
        super().__init__()
        num_experts, ffn_dim = config["num_experts"], config["moe_intermediate_size"]
        model_dim = config["hidden_size"]
        self.per_token, self.renormalizes = config["num_experts_per_tok"], config["norm_topk_prob"]
        self.gate = nn.Linear(model_dim, num_experts, bias=False)
        self.experts = nn.Module()
        gate_up_EFD = torch.empty(num_experts, 2 * ffn_dim, model_dim)
        self.experts.gate_up_proj = nn.Parameter(gate_up_EFD)
        self.experts.down_proj = nn.Parameter(torch.empty(num_experts, model_dim, ffn_dim))

    def forward(self, x):
        x_TD = x.flatten(0, 1)
        weights_TK, experts_TK = self.gate(x_TD).float().softmax(-1).topk(self.per_token)
        if self.renormalizes:
            weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
        experts, order = experts_TK.flatten().sort(stable=True)
        numbers = torch.arange(self.gate.out_features, device=x.device)
        ends = torch.searchsorted(experts, numbers, right=True).int()
        inverse = order.argsort()
        copies = x_TD[:, None].expand(-1, self.per_token, -1).flatten(0, 1)
        rows = _Permuted.apply(copies, order, inverse)
        gate, up = _grouped(rows, self.experts.gate_up_proj, ends).chunk(2, dim=-1)
        rows = _grouped(F.silu(gate) * up, self.experts.down_proj, ends)
        parts_TKD = _Permuted.apply(rows, inverse, order).unflatten(0, (-1, self.per_token))
        return (parts_TKD * weights_TK[..., None].to(x.dtype)).sum(1).view_as(x)


def _grouped(rows, weights_EFD, ends):
    """The product of the rows of each expert and its matrix; `ends` of the experts' rows."""
    if rows.dtype == torch.float32:  # tiny models: the kernel is for bf16
        numbers = torch.arange(len(rows), device=rows.device)
        weights_RFD = weights_EFD[torch.searchsorted(ends.long(), numbers, right=True)]
        return torch.einsum("RD,RFD->RF", rows, weights_RFD)
    return torch._grouped_mm(rows, weights_EFD.to(rows.dtype).transpose(-1, -2), offs=ends)


class _Permuted(torch.autograd.Function):
    """Rows in another order. The gradient is a gather, too; the gradient of indexing would be a
    scatter with atomic additions.
    """

    @staticmethod
    def forward(ctx, rows, order, inverse):
        ctx.save_for_backward(inverse)
        return rows[order]

    @staticmethod
    def backward(ctx, gradient):
        (inverse,) = ctx.saved_tensors
        return gradient[inverse], None, None


class Lora(nn.Module):
    """A frozen projection and its adapter. The initial output equals the projection's."""

    def __init__(self, base: Any, rank: int, alpha: float):
        super().__init__()
        self.base, self.scale = base, alpha / rank
        device = base.weight.device
        down = torch.randn(rank, base.in_features, device=device)  # the variance of peft
        self.down = nn.Parameter(down / math.sqrt(3 * base.in_features))
        self.up = nn.Parameter(torch.zeros(base.out_features, rank, device=device))

    def forward(self, x):
        return self.base(x) + self.scale * F.linear(F.linear(x, self.down), self.up)


def add_adapters(model: Any, rank: int, alpha: float) -> None:
    """Freezes all parameters, and adds adapters to the projections of all layers."""
    model.requires_grad_(False)
    for module in list(model.model.layers.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, Lora(child, rank, alpha))


def _rotated(x, cos, sin):
    first, second = x.float().chunk(2, dim=-1)
    return (x.float() * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)


def _rope_frequencies(config: dict[str, Any]) -> Any:
    """Frequencies [H / 2] in float64, with the scaling of Llama 3 if config.json has one."""
    rope, head_dim = config["rope_parameters"], config["head_dim"]
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim
    frequencies = rope["rope_theta"] ** -exponents
    if rope["rope_type"] == "default":
        return frequencies
    if rope["rope_type"] != "llama3":
        raise ValueError(f"unsupported RoPE {rope['rope_type']!r}: expected default or llama3")
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / rope["factor"])


def _qwen3_5(config: dict[str, Any]) -> Any:
    """The model of transformers, with the delta rule of flash-linear-attention if it is installed.

    The rule is not compiled: in PyTorch it is a loop over chunks.
    """
    transformers = import_module("transformers")
    modeling = import_module("transformers.models.qwen3_5.modeling_qwen3_5")
    try:
        rule = import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    except ImportError:
        rule = modeling.torch_chunk_gated_delta_rule
    modeling.torch_chunk_gated_delta_rule = torch.compiler.disable(rule)
    fields = transformers.AutoConfig.for_model(**config)
    return transformers.AutoModelForCausalLM.from_config(
        fields, attn_implementation="sdpa", dtype=torch.float32
    )
