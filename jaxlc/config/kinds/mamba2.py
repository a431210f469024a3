"""Mamba-2: H heads with a state that decays and is not corrected; G groups of them share what is
written and read. Computed by `jaxlc.models.kinds.mamba2`.

Tensors: transformers, models/granitemoehybrid; a tensor has all projections, and one all
convolutions.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from jaxlc.config.kinds.contract import PROJECTIONS, Layer, LayerTensor, RecurrentKind, conv_tensors
from jaxlc.config.values import Above0, From1


@dataclass(frozen=True, kw_only=True)
class Mamba2Config:
    """Mamba-2, a state space layer: the settings of mamba2 layers."""

    heads: int = 0  # number of heads; "mamba_num_heads" in Hugging Face configs
    head_dim: int = 0  # width of a head
    # groups of heads that share the vectors that are written to and read from their states; "n_groups"
    groups: From1[int] = 1
    state_dim: int = 0  # width of these vectors; "ssm_state_size"
    conv_taps: int = 0  # tokens that the convolutions read; "conv_kernel"
    conv_bias: bool = True  # the convolutions have biases
    # RMSNorm of the output, in groups of heads. after_gate: of the product with the gate, as in Nemotron-H and
    # Granite 4. before_gate: the product follows it. none: no norm, as in Falcon-H1.
    norm: Literal["after_gate", "before_gate", "none"] = "after_gate"
    # the smallest step size of the state; "time_step_limit" of Hugging Face configs has this and the next one
    smallest_step: float = 0.0
    largest_step: float = 0.0  # the largest step size. 0: no bound.
    # factor of the projection of the gate, as in Falcon-H1; "ssm_multipliers" of Hugging Face configs has this one and
    # the next four
    gate_multiplier: Above0[float] = 1.0
    value_multiplier: Above0[float] = (
        1.0  # factor of the projection of what is written to the states
    )
    key_multiplier: Above0[float] = 1.0  # factor of the vectors that it is written to
    query_multiplier: Above0[float] = 1.0  # factor of the vectors that are read
    step_multiplier: Above0[float] = 1.0  # factor of the projection of the step sizes
    output_multiplier: Above0[float] = 1.0  # factor of the projected output; "ssm_out_multiplier"


_NEMOTRON_3_NANO = dict(heads=64, head_dim=64, state_dim=128, conv_taps=4)


class Mamba2Kind(RecurrentKind):
    name = "mamba2"
    section = "mamba2"
    settings = Mamba2Config
    widths = dict(
        key_heads="groups",
        key_dim="state_dim",
        value_heads="heads",
        value_dim="head_dim",
        conv_taps="conv_taps",
        conv_bias="conv_bias",
    )
    published = _NEMOTRON_3_NANO
    published_model = "Nemotron 3 Nano"
    products_per_token = 2  # the state is written and read
    layer_types: Mapping[str, str] = {}  # of each family
    tensors = (
        *(LayerTensor(f"w{x}", "mamba.in_proj.weight", 1) for x in "zvkqb"),
        *conv_tensors("mamba.conv1d.weight", "vkq"),
        *(LayerTensor(f"bias_{x}", "mamba.conv1d.bias") for x in "vkq"),
        LayerTensor("log_decay", "mamba.A_log"),
        LayerTensor("decay_bias", "mamba.dt_bias"),
        LayerTensor("skip", "mamba.D"),
        LayerTensor("out_norm/scale", "mamba.norm.weight"),
        LayerTensor("wo", "mamba.out_proj.weight", 2),
    )
    # the value is x, which is written to the state at the key B, and which the query C reads
    projections = PROJECTIONS | dict(delta_gate="wz", delta_step="wb")

    def num_vector_entries(self, layer: Layer) -> int:
        """The convolutions, three numbers of each head, and the norm of the output."""
        sizes = layer.section(Mamba2Config)
        widths = self.recurrence(layer)
        norm = 0 if sizes.norm == "none" else widths.values
        return widths.conv_entries + 3 * sizes.heads + norm

    def size_problems(self, layer: Layer, path: str) -> Iterator[str]:
        yield from super().size_problems(layer, path)
        sizes = layer.section(Mamba2Config)
        if 0 < sizes.largest_step < sizes.smallest_step:
            yield (
                f"config.model.mamba2.largest_step={sizes.largest_step} is below smallest_step={sizes.smallest_step};"
                " use a larger one, or 0 for no bound"
            )
