"""torchvision's ResNets with a stem for 32 x 32 images, or with their own."""

from functools import partial
from typing import Any, Literal

from torch import nn
from torchvision.models.resnet import BasicBlock, ResNet

from lit_cifar.layout import Chunks
from lit_cifar.models.chunked_batchnorm import ChunkedBatchNorm2d

Arch = Literal["tiny", "resnet10", "resnet18", "resnet34"]
Stem = Literal["cifar", "strided", "imagenet"]

# Blocks per stage: He et al., "Deep residual learning for image recognition", 2016, table 1. The two with one block a
# stage are not in the paper. They are small networks for tests.
BLOCKS: dict[str, list[int]] = {
    "tiny": [1, 1, 1, 1],
    "resnet10": [1, 1, 1, 1],
    "resnet18": [2, 2, 2, 2],
    "resnet34": [3, 4, 6, 3],
}
NUM_FEATURES = {"tiny": 64, "resnet10": 512, "resnet18": 512, "resnet34": 512}
"""What the last stage hands to the classifier."""

_STRIDES: dict[str, int] = {"cifar": 1, "strided": 2}


def build_resnet(
    arch: Arch = "resnet34", *, stem: Stem = "cifar", num_classes: int = 10, batchnorm_chunks: Chunks | None = None
) -> ResNet:
    """A ResNet of basic blocks with torchvision's parameter names.

    Args:
        arch: How many blocks. "tiny" has as many as "resnet10", with an eighth of their channels.
        stem: "imagenet" is torchvision's own (7x7 convolution of stride 2, then max-pooling: the blocks see 8 x 8
            pixels of a 32 x 32 image); "cifar" is a 3x3 convolution of stride 1 and no pooling, which keeps all
            32 x 32, at 16 times the arithmetic; "strided" is the same with stride 2, 16 x 16 at 4 times, and the stem
            of Anthony Peng's articles. `conv1.weight` is (64, 3, 7, 7) for "imagenet", else (64, 3, 3, 3).
        num_classes: Size of the logits.
        batchnorm_chunks: Normalise each of these parts of a training batch by itself; None for the whole batch at once.

    Returns:
        A network from float (n, 3, 32, 32) to logits (n, num_classes).
    """
    norm_layer = None if batchnorm_chunks is None else partial(ChunkedBatchNorm2d, chunks=batchnorm_chunks)
    network_class = _TinyResNet if arch == "tiny" else ResNet
    network = network_class(BasicBlock, BLOCKS[arch], num_classes=num_classes, norm_layer=norm_layer)
    if stem != "imagenet":
        network.conv1 = nn.Conv2d(3, 64, kernel_size=3, stride=_STRIDES[stem], padding=1, bias=False)
        nn.init.kaiming_normal_(network.conv1.weight, mode="fan_out", nonlinearity="relu")  # as ResNet's own
        network.maxpool = nn.Identity()
    return network


class _TinyResNet(ResNet):  # type: ignore[misc]  # torchvision ships no types
    """With an eighth of the channels behind the stem: 0.1 M parameters."""

    def __init__(self, block: Any, layers: list[int], *, num_classes: int, **kwargs: Any) -> None:
        super().__init__(block, layers, num_classes=num_classes, **kwargs)
        self.fc = nn.Linear(NUM_FEATURES["tiny"], num_classes)

    def _make_layer(self, block: Any, planes: int, *args: Any, **kwargs: Any) -> nn.Sequential:
        layer: nn.Sequential = super()._make_layer(block, planes // 8, *args, **kwargs)
        return layer
