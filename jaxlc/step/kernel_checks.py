"""Checks of kernels on the GPU that is about to train, before the step is compiled."""

import jax

from jaxlc.attention.kernels.cudnn import check_deterministic
from jaxlc.attention.kernels.packed_check import check_packed_cudnn
from jaxlc.models.blocks.mosaic_check import check_mosaic_product
from jaxlc.step.step import TrainStep


def check_kernels(step: TrainStep) -> list[str]:
    """Checks kernels on a GPU of this process, if the step has them: compares cuDNN's calls for packed documents and
    the Mosaic products of experts with the reference, and the version of cuDNN with what config.runtime.deterministic
    needs.

    Returns:
      Lines with the errors; none without such kernels.
    Raises:
      UserError: as `check_packed_cudnn`, `check_deterministic` and `check_mosaic_product`.
    """
    config, device = step.config, jax.local_devices()[0]
    if device.platform != "gpu" or step.model is not None:
        return []
    lines = _check_cudnn(step, device)
    if config.runtime.expert_kernel == "mosaic":
        model = config.model
        ffn_dim = model.expert_ffn_dim // config.mesh.tensor
        sizes = dict(num_experts=model.num_experts, model_dim=model.model_dim, ffn_dim=ffn_dim)
        lines.append(check_mosaic_product(device, **sizes))
    return lines


def _check_cudnn(step: TrainStep, device: jax.Device) -> list[str]:
    config, kernels = step.config, step.kernels
    if not any(kernel.name == "cudnn" for kernel in kernels.values()):
        return []
    if config.runtime.deterministic:
        check_deterministic(device)
    if not config.attention.document_mask:
        return []
    shapes = dict.fromkeys(config.model.of_kind(kind) for kind in kernels if kernels[kind].name == "cudnn")
    lines = [
        check_packed_cudnn(
            device,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            dtype=step.compute_dtype,
        )
        for shape in shapes
    ]
    return list(dict.fromkeys(lines))
