"""Test-time augmentation: the mean of the logits of several views of an image."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

NumViews = Literal[1, 2, 6]


def mean_logits(forward: Callable[[Tensor], Tensor], images: Tensor, num_views: NumViews) -> Tensor:
    """Logits (n, num_classes) of images (n, 3, height, width); `forward` computes those of one view of each.

    With 6 views the images and their mirror images have half of the weight. The other half have both moved by one
    pixel, up and left, and down and right (Jordan, 2024, https://arxiv.org/abs/2404.00498).
    """
    if num_views == 1:
        return forward(images)
    views = [(images, 1 / 2)]
    if num_views == 6:
        padded = F.pad(images, [1] * 4, mode="reflect")
        views = [(images, 1 / 4), (padded[:, :, 2:, 2:], 1 / 8), (padded[:, :, :-2, :-2], 1 / 8)]
    # The product is made at once: a CUDA graph overwrites the logits.
    logits = [weight * forward(each) for view, weight in views for each in (view.contiguous(), view.flip(3))]
    return torch.stack(logits).sum(dim=0)
