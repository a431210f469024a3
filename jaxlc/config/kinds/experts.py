"""A mixture of experts: a router chooses some of E gated feed-forward blocks for each token; a
shared expert computes all tokens. `jaxlc.models.kinds.experts` has the computation.

Families store experts in four ways, which are tables of names: a tensor for each expert, with names
of two kinds; one for all, whose gate and up are rows, or columns; or where they are columns in turn.

The rows of each expert are padded to whole blocks. At most (rows + experts (m - 1)) / m blocks of m
rows are needed, whatever the routing.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from jaxlc.config.kinds.contract import (
    FeedForward,
    HasLimits,
    HasOwnSettings,
    Layer,
    LayerTensor,
    Matrix,
)
from jaxlc.config.kinds.dense import ffn_matrices, saved_ffn_bytes
from jaxlc.config.schema import PrecisionConfig, RunConfig
from jaxlc.config.values import Above0, From1

_PARTS = ("gate", "up", "down")
# an adapter or scale for each expert
EXPERT_PROJECTIONS = tuple(f"expert_{x}" for x in _PARTS)

# A tensor for each expert: transformers, models/qwen3_moe.
TENSORS = (
    LayerTensor("router", "mlp.gate.weight", 1),
    *(LayerTensor(f"expert_{x}", f"mlp.experts.{{expert}}.{x}_proj.weight", 1) for x in _PARTS),
)
# A tensor for all experts, an nn.Linear of each; its first rows are gate: transformers,
# models/qwen3_5_moe.
STACKED_LINEAR_TENSORS = (
    TENSORS[0],
    LayerTensor("expert_gate", "mlp.experts.gate_up_proj", 1, is_stacked=True),
    LayerTensor("expert_up", "mlp.experts.gate_up_proj", 1, is_stacked=True),
    LayerTensor("expert_down", "mlp.experts.down_proj", 1, is_stacked=True),
)
# A tensor for each expert, whose parts have the names of Mixtral; router and bias of the choice are float32: released
# files of MiniMax-M2; transformers, conversion_mapping.py.
MIXTRAL_TENSORS = (
    LayerTensor("router", "block_sparse_moe.gate.weight", 1, is_float32=True),
    LayerTensor("expert_gate", "block_sparse_moe.experts.{expert}.w1.weight", 1),
    LayerTensor("expert_up", "block_sparse_moe.experts.{expert}.w3.weight", 1),
    LayerTensor("expert_down", "block_sparse_moe.experts.{expert}.w2.weight", 1),
    LayerTensor("choice_bias", "block_sparse_moe.e_score_correction_bias", is_float32=True),
)
# The same with the last two dimensions exchanged: files of Qwen 3 VL.
TRANSPOSED_TENSORS = tuple(x._replace(is_transposed=x.is_stacked) for x in STACKED_LINEAR_TENSORS)
# The bias of the choice, which files have in float32: transformers, models/glm4_moe.
CHOICE_BIAS = LayerTensor("choice_bias", "mlp.gate.e_score_correction_bias", is_float32=True)


def shared_tensors(module: str) -> tuple[LayerTensor, ...]:
    """The shared expert of this name and its gate: transformers, models/qwen3_5_moe and glm4_moe."""
    parts = (LayerTensor(f"shared/w_{x}", f"mlp.{module}.{x}_proj.weight", 1) for x in _PARTS)
    return (*parts, LayerTensor("shared_gate", f"mlp.{module}_gate.weight", 1))


# Projections to the latent of experts and back: transformers, models/nemotron_h.
LATENT_TENSORS = (
    LayerTensor("latent/w_down", "mlp.fc1_latent_proj.weight", 1),
    LayerTensor("latent/w_up", "mlp.fc2_latent_proj.weight", 1),
)
# A tensor for all experts, whose columns are those of gate and up in turn: transformers,
# models/gpt_oss.
STACKED_TENSORS = (
    LayerTensor("router", "mlp.router.weight", 1),
    LayerTensor("router_bias", "mlp.router.bias"),
    LayerTensor("expert_gate", "mlp.experts.gate_up_proj", None, interleaved=0),
    LayerTensor("expert_up", "mlp.experts.gate_up_proj", None, interleaved=1),
    LayerTensor("gate_bias", "mlp.experts.gate_up_proj_bias", None, interleaved=0),
    LayerTensor("up_bias", "mlp.experts.gate_up_proj_bias", None, interleaved=1),
    LayerTensor("expert_down", "mlp.experts.down_proj", None),
    LayerTensor("down_bias", "mlp.experts.down_proj_bias", None),
)

# By runtime.expert_kernel; mosaic and pallas copy no weights for a block. Triton's products have at least 16 rows.
_BLOCK_ROWS = dict(blocks=(1, 512), mosaic=(1, 64), pallas=(16, 128))
_DIM_MULTIPLE = 64  # tiles of the kernels of models/expert_products.py
_ATTENTION_NAMES = "query,key,value,attention_projected"


def block_rows(num_rows: int, num_experts: int, kernel: str = "blocks") -> int:
    """Rows of a block: a power of two, so that padding is about an eighth of the rows if experts
    have equal loads, within the limits of the kernel.

    Args:
      kernel: config.runtime.expert_kernel.
    """
    mean = num_rows / num_experts
    fewest, most = _BLOCK_ROWS[kernel]
    return max(fewest, min(most, 2 ** int(math.log2(max(1.0, mean / 4)))))


def num_blocks(num_rows: int, num_experts: int, kernel: str = "blocks") -> int:
    """Blocks that are enough for every routing of `num_rows` rows."""
    rows = block_rows(num_rows, num_experts, kernel)
    return (num_rows + min(num_experts, num_rows) * (rows - 1)) // rows


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """A mixture of experts in the feed-forward blocks; docs/experts.md."""

    # number of experts in the feed-forward block of each layer. 0: dense layers, without experts.
    # model.kinds.NAME.feed_forward=dense makes the layers of a kind dense.
    num_experts: int = 0
    # experts that each token is routed to; "num_experts_per_tok" in Hugging Face configs
    experts_per_token: int = 0
    ffn_dim: int = 0  # width of each expert; "moe_intermediate_size" in Hugging Face configs
    # weights of the chosen experts. softmax: their probabilities among all experts, as in Qwen 3. topk_softmax: the
    # softmax of the logits of the chosen experts only, as in gpt-oss. sigmoid: the sigmoid of each logit, as in
    # DeepSeek V3 and GLM 4.5.
    router: Literal["softmax", "topk_softmax", "sigmoid"] = "softmax"
    # softmax and sigmoid router: the weights of the chosen experts are divided by their sum; "norm_topk_prob" in
    # Hugging Face configs.
    renormalize: bool = False
    # sigmoid and softmax router: a bias of each expert is added for the choice, and not for the weights. It has no
    # gradient; train.balance_bias_rate changes it. "e_score_correction_bias" in Hugging Face files.
    choice_bias: bool = False
    # sigmoid and softmax router: the experts are this many groups, in order. A token is routed to experts of some
    # groups: those with the largest sums of two scores, or, with softmax, with the largest score, as in DeepSeek V2.
    # "n_group" in Hugging Face configs.
    groups: From1[int] = 1
    groups_per_token: From1[int] = 1  # number of these groups; "topk_group" in Hugging Face configs
    # factor of the weights of the chosen experts; "routed_scaling_factor" in Hugging Face configs.
    scale: Above0[float] = 1.0
    bias: bool = False  # biases of the router and of all products of the experts, as in gpt-oss
    # width of a latent of each token, in which the experts compute, between projections to it and back, as in Nemotron
    # 3 Super; router and shared expert have the token itself. "moe_latent_size" in Hugging Face configs. 0: none.
    latent_dim: int = 0
    # width of the shared expert, a feed-forward block of all tokens whose output is added to that of the experts;
    # "shared_expert_intermediate_size" in Hugging Face configs. 0: none.
    shared_ffn_dim: int = 0
    # the output of the shared expert is multiplied by the sigmoid of a product of the input, as in
    # Qwen 3.5.
    shared_gate: bool = False


class ExpertsKind(FeedForward, HasLimits, HasOwnSettings):
    name = "experts"
    layers = "layers of experts"
    sizes = ()
    only_with = (
        *(f"model.experts.{name}" for name in vars(ExpertsConfig())),
        "train.balance_loss",
        "train.balance_loss_over",
        "train.balance_bias_rate",
        "train.router_z_loss",
        "runtime.expert_kernel",
    )
    tensors = TENSORS
    projections = {
        **{name: name for name in EXPERT_PROJECTIONS},
        **{f"mlp_{x}": f"shared/w_{x}" for x in _PARTS},
        "latent_down": "latent/w_down",
        "latent_up": "latent/w_up",
    }
    saved = ("mlp_gate", "mlp_up")

    def matrices(self, layer: Layer) -> dict[str, Matrix]:
        """router [D, E]; for each expert expert_gate and expert_up [D, F], expert_down [F, D]; the
        shared expert, and its gate [D, 1]."""
        sizes = layer.section(ExpertsConfig)
        model = dict(model=layer.model_dim)
        counts = (sizes.num_experts, sizes.experts_per_token)
        expert = ffn_matrices(layer, sizes.ffn_dim, sizes.latent_dim)
        shared = ffn_matrices(layer, sizes.shared_ffn_dim)
        matrices = dict(router=Matrix(model, dict(experts=sizes.num_experts)))
        for name, matrix in expert.items():
            name = name.replace("w_", "expert_")
            matrices[name] = Matrix(matrix.inputs, matrix.outputs, *counts)
        if sizes.latent_dim:
            latent = dict(latent=sizes.latent_dim)
            matrices |= {
                "latent/w_down": Matrix(model, latent),
                "latent/w_up": Matrix(latent, model),
            }
        if sizes.shared_ffn_dim:
            matrices |= {f"shared/{name}": matrix for name, matrix in shared.items()}
        return matrices | (
            dict(shared_gate=Matrix(model, dict(experts=1))) if sizes.shared_gate else {}
        )

    def num_vector_entries(self, layer: Layer) -> int:
        """Biases of the router, of its choice and of the experts."""
        sizes = layer.section(ExpertsConfig)
        expert = ffn_matrices(layer, sizes.ffn_dim, sizes.latent_dim).values()
        entries = 1 + sum(matrix.num_outputs for matrix in expert)
        return sizes.num_experts * (sizes.choice_bias + sizes.bias * entries)

    def saved_bytes(self, layer: Layer, config: RunConfig, itemsize: int) -> dict[str, float]:
        """Activations of the shared expert; experts name none."""
        width = layer.section(ExpertsConfig).shared_ffn_dim
        return saved_ffn_bytes(layer, itemsize * width) if width else {}

    def size_problems(self, layer: Layer, path: str) -> Iterator[str]:
        sizes = layer.section(ExpertsConfig)
        if not 1 <= sizes.experts_per_token <= sizes.num_experts:
            yield (
                f"config.model.experts.experts_per_token={sizes.experts_per_token} is not between 1 and"
                f" config.model.experts.num_experts={sizes.num_experts}: the number of experts of each"
                " token"
            )
        if sizes.ffn_dim < 1:
            yield "config.model.experts.num_experts needs --config.model.experts.ffn_dim=F, the width of each expert"
        if sizes.shared_gate and not sizes.shared_ffn_dim:
            yield (
                "config.model.experts.shared_gate=True has no effect without a shared expert; set"
                " config.model.experts.shared_ffn_dim, or remove it"
            )
        yield from _router_problems(sizes)

    def unsupported(self, layer: Layer, config: RunConfig) -> Iterator[str]:
        sizes = layer.section(ExpertsConfig)
        precision = config.precision
        if config.train.balance_bias_rate and not sizes.choice_bias:
            yield (
                f"config.train.balance_bias_rate={config.train.balance_bias_rate} has no effect without biases; set"
                " config.model.experts.choice_bias, or remove it"
            )
        if config.memory.parameters == "host":
            yield (
                "unsupported: config.memory.parameters='host' with experts, of which each layer copies all to the GPU;"
                " use --config.memory.parameters=device"
            )
        if precision.compute == "fp8" and {*precision.fp8_matmuls} & {*EXPERT_PROJECTIONS}:
            for name, value in (
                ("fp8_scaling", precision.fp8_scaling),
                ("bf16_layers", precision.bf16_layers),
            ):
                if value != vars(PrecisionConfig())[name]:
                    yield (
                        f"unsupported: FP8 products of experts with config.precision.{name}={value!r}; remove it, or"
                        f" use --config.precision.fp8_matmuls={_ATTENTION_NAMES}"
                    )
        if config.runtime.expert_kernel != "blocks":
            yield from _kernel_problems(layer, config)

    def mesh_problems(self, layer: Layer, config: RunConfig, path: str) -> Iterator[str]:
        sizes = layer.section(ExpertsConfig)
        tensor = config.mesh.tensor
        for name in ("ffn_dim", "shared_ffn_dim"):
            if vars(sizes)[name] % tensor:
                yield f"config.model.experts.{name}={vars(sizes)[name]} is not divisible by config.mesh.tensor={tensor}"

    def is_chosen(self, layer: Layer) -> bool:
        return layer.section(ExpertsConfig).num_experts > 0

    def active_ffn_dim(self, layer: Layer) -> int:
        """The width of the experts of a token, the shared one included. With a latent, it is the width
        at which experts without a latent have as many entries.
        """
        sizes = layer.section(ExpertsConfig)
        routed = sizes.experts_per_token * sizes.ffn_dim
        share = sizes.latent_dim / layer.model_dim if sizes.latent_dim else 1.0
        return round(routed * share) + sizes.shared_ffn_dim


def _router_problems(sizes: ExpertsConfig) -> Iterator[str]:
    """Contradictions among the settings of the router."""
    if sizes.renormalize and sizes.router == "topk_softmax":
        yield (
            f"config.model.experts.renormalize=True has no effect with config.model.experts.router={sizes.router!r},"
            " whose weights have the sum 1; remove it"
        )
    for name in ("choice_bias", "groups"):
        is_set = vars(sizes)[name] != vars(ExpertsConfig())[name]
        if is_set and sizes.router == "topk_softmax":
            yield (
                f"config.model.experts.{name}={vars(sizes)[name]} has no effect with config.model.experts.router="
                f"{sizes.router!r}; remove it, or use --config.model.experts.router=sigmoid"
            )
    groups = sizes.groups
    chosen = sizes.groups_per_token
    if sizes.num_experts % groups or (groups > 1 and sizes.num_experts < 2 * groups):
        yield (
            f"config.model.experts.groups={groups} does not divide config.model.experts.num_experts={sizes.num_experts}"
            " into groups of at least 2"
        )
    elif not chosen <= groups or sizes.experts_per_token > chosen * (sizes.num_experts // groups):
        yield (
            f"config.model.experts.groups_per_token={chosen} is more than config.model.experts.groups={groups}, or"
            f" these groups have fewer than config.model.experts.experts_per_token={sizes.experts_per_token} experts"
        )


def _kernel_problems(layer: Layer, config: RunConfig) -> Iterator[str]:
    """What the kernels of experts do not support. `step.build_step` checks the GPUs."""
    sizes = layer.section(ExpertsConfig)
    precision = config.precision
    kernel = f"config.runtime.expert_kernel={config.runtime.expert_kernel!r}"
    if precision.compute in ("fp32", "fp16"):
        yield f"unsupported: {kernel} with config.precision.compute={precision.compute!r}; use compute=bf16"
    if precision.compute == "fp8" and {*precision.fp8_matmuls} & {*EXPERT_PROJECTIONS}:
        yield (
            f"unsupported: {kernel} with FP8 products of experts; use --config.precision.fp8_matmuls="
            f"{_ATTENTION_NAMES}, or --config.runtime.expert_kernel=blocks"
        )
    if precision.reduce == "fp32" and config.runtime.expert_kernel == "mosaic":
        yield (
            f"unsupported: {kernel}, whose gradients of weights are bf16, with config.precision.reduce='fp32'; use"
            " --config.precision.reduce=compute, or --config.runtime.expert_kernel=blocks"
        )
    tensor = config.mesh.tensor
    for name, dim, factor in (
        (
            "experts.latent_dim" if sizes.latent_dim else "model_dim",
            sizes.latent_dim or layer.model_dim,
            1,
        ),
        ("experts.ffn_dim", sizes.ffn_dim, tensor),
    ):
        if dim % (_DIM_MULTIPLE * factor):
            split = f" x config.mesh.tensor={tensor}" if factor > 1 else ""
            yield (
                f"unsupported: {kernel} with config.model.{name}={dim} (supported: multiples of"
                f" {_DIM_MULTIPLE}{split}); use --config.runtime.expert_kernel=blocks"
            )
