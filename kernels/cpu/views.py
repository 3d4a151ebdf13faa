"""torch tensors as the NumPy arrays that compiled loops take."""

import numpy as np
import torch

_SEEN_AS = {torch.bfloat16: torch.uint16, torch.float8_e4m3fn: torch.uint8}


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """A view of a float32 tensor, of a bfloat16 tensor as uint16, of a float8 tensor as uint8; integer tensors as they are. No copy."""
    seen_as = _SEEN_AS.get(tensor.dtype)
    return tensor.numpy() if seen_as is None else tensor.view(seen_as).numpy()
