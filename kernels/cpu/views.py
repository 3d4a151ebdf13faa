"""torch tensors as the NumPy arrays that compiled loops take."""

import numpy as np
import torch


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """A view of a float32 tensor, or of a bfloat16 tensor as uint16; integer tensors as they are. No copy."""
    return tensor.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()
