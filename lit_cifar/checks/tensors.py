"""What a tensor holds, however it is stored or divided, and a digest of it."""

import zlib
from typing import Any

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor
from torch.distributed.tensor import DTensor


def whole(tensor: Tensor) -> Tensor:
    """Gather a tensor that is divided over ranks, all of which must call this; return any other tensor as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def dense(tensor: Tensor) -> Tensor:
    """The tensor itself, with the zeros of a sparse one, and in memory what a complex one is the conjugate of."""
    strided = tensor if tensor.layout is torch.strided else tensor.to_dense()
    return strided.resolve_conj().resolve_neg()


def as_real(tensor: Tensor) -> Tensor:
    """The tensor itself, or real and imaginary parts of a complex one, which `Tensor.double` would drop."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def digest(value: Any) -> int:
    """Digest of a tensor's values, of all of them if ranks divide it; of a picture's or array's bytes, or a `repr`.

    Equal tensors have equal digests, with +0.0 and -0.0 taken as one.
    """
    if not isinstance(value, Tensor):
        is_whole = isinstance(value, Image) or (isinstance(value, np.ndarray) and not value.dtype.hasobject)
        return zlib.crc32(value.tobytes() if is_whole else repr(value).encode())
    plain = as_real(dense(whole(value.detach()))).contiguous()
    if plain.is_floating_point():
        plain = plain + 0.0
    bits = zlib.crc32(plain.cpu().reshape(-1).view(torch.uint8).numpy().data)
    return zlib.crc32(repr((plain.dtype, plain.shape)).encode(), bits)
