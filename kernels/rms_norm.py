"""RMSNorm over the last dimension."""

import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [*, D] / rms(x) * weight [D], in the dtype of x; the mean square is accumulated in fp32."""
    if weight.dtype != x.dtype:  # under autocast: fp32 parameters, bf16 activations
        weight = weight.to(x.dtype)
    return F.rms_norm(x, (x.shape[-1],), weight, eps)
