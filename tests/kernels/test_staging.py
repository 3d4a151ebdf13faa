"""Host arrays reach a device with their dtypes, shapes and values."""

from __future__ import annotations

import numpy as np
import torch

from dspark.kernels.staging import Places, pack, stage


def test_arrays_of_all_kinds_come_out_as_they_went_in() -> None:
    """ "cpu:0" takes the way of every device that is not plainly "cpu"."""
    arrays = [
        np.arange(7, dtype=np.int32),
        np.arange(12, dtype=np.int64).reshape(3, 4)[:, ::2],
        np.empty(0, np.int64),
        np.array([[1.5, -2.0]], np.float32),
        np.arange(3, dtype=np.uint8),
        np.arange(5, dtype=np.int64),
    ]
    for array, tensor in zip(arrays, stage(arrays, "cpu:0"), strict=True):
        assert tensor.shape == array.shape and tensor.dtype == torch.from_numpy(array).dtype
        assert tensor.numpy().tolist() == array.tolist()


def test_a_plain_cpu_copies_nothing() -> None:
    array = np.arange(4)
    (tensor,) = stage([array], "cpu")
    array[0] = 9
    assert tensor[0] == 9


def test_places_take_what_was_packed() -> None:
    """Inputs of several steps go to a device together and into their places one step at a time; arrays begin where they did."""
    first = [np.arange(3, dtype=np.int32), np.array([[1.5, 2.5]]), np.arange(5, dtype=np.uint8)]
    second = [array + 1 for array in first]
    places = Places(first, "cpu")
    for arrays in (first, second):
        (packed,) = stage([pack(arrays)], "cpu:0")
        places.take(packed)
        for array, tensor in zip(arrays, places.tensors, strict=True):
            assert tensor.numpy().tolist() == array.tolist()
