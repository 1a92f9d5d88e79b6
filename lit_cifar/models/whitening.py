"""The first layer of the fast network, which the training images set (Jordan 2024, section 3.2: see `fast`)."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Whitening(nn.Module):
    """A 2x2 convolution whose 24 outputs are uncorrelated and of about equal size, and GELU.

    Its filters are not trained. They are 0 until `whiten` sets them, or weights are loaded.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 24, kernel_size=2)
        for parameter in self.conv.parameters():
            nn.init.zeros_(parameter)
        self.conv.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.conv(x))

    @torch.no_grad()
    def whiten(self, images: Tensor) -> None:
        """Set the filters to the principal components of the patches of `images` (n, 3, height, width), and to their
        negatives, each divided by its standard deviation.

        Pixels are rounded to multiples of 1/1024: sums of products are exact, and the number of threads changes no bit.
        """
        products, num_patches = torch.zeros(12, 12, dtype=torch.float64), 0
        for part in torch.split(images, max(1, 500 * 32**2 // images[0, 0].numel())):
            patches = F.unfold((1024 * part.double()).round_(), kernel_size=2)  # (n, 12, places)
            products += torch.einsum("nip,njp->ij", patches, patches)
            num_patches += len(patches) * patches.shape[2]
        variances, components = torch.linalg.eigh(products / (num_patches * 1024**2))
        filters = components.T / (variances[:, None] + 5e-4).sqrt()
        self.conv.weight.copy_(torch.cat([filters, -filters]).view_as(self.conv.weight))
