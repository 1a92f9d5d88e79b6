"""torchvision's ResNets with a stem for small images, or with their own."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import nn
from torchvision.models import resnet as torchvision_resnet

from lit_cifar.models.blocks import SplitKind

Arch = Literal[
    "tiny",
    "tiny_bottleneck",
    "resnet10",
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet101",
    "resnet152",
    "wide_resnet50_2",
    "wide_resnet101_2",
]
Stem = Literal["cifar", "strided", "imagenet"]


class BasicBlock(torchvision_resnet.BasicBlock):  # type: ignore[misc]  # torchvision ships no types
    """Both convolutions are split, the first by output channel. Shortcut and second BatchNorm are not."""

    tensor_split: ClassVar[dict[str, SplitKind]] = {"conv1": "columns", "bn1": "channels", "conv2": "rows"}


class Bottleneck(torchvision_resnet.Bottleneck):  # type: ignore[misc]
    """The last two convolutions are split. They hold 13 of every 17 weights of most blocks of ResNet50.

    The first two have more values to sum where the block has a stride.
    """

    tensor_split: ClassVar[dict[str, SplitKind]] = {"conv2": "columns", "bn2": "channels", "conv3": "rows"}


class ResNet(torchvision_resnet.ResNet):  # type: ignore[misc]
    """torchvision's ResNet, which can be cut between its residual blocks."""

    tensor_split: ClassVar[dict[str, SplitKind]] = {"fc": "head"}

    def blocks(self) -> dict[str, nn.Module]:
        """The stem, "layer1.0" and all other residual blocks, the head."""
        chain: dict[str, nn.Module] = {"stem": nn.Sequential(self.conv1, self.bn1, self.relu, self.maxpool)}
        for name in ("layer1", "layer2", "layer3", "layer4"):
            chain |= {f"{name}.{index}": block for index, block in enumerate(getattr(self, name))}
        return chain | {"head": nn.Sequential(self.avgpool, nn.Flatten(1), self.fc)}


class TinyResNet(ResNet):
    """A ResNet with an eighth of the channels behind the stem."""

    def __init__(self, block: Any, layers: list[int], *, num_classes: int, **kwargs: Any) -> None:
        super().__init__(block, layers, num_classes=num_classes, **kwargs)
        self.fc = nn.Linear(self.inplanes, num_classes)

    def _make_layer(self, block: Any, planes: int, *args: Any, **kwargs: Any) -> nn.Sequential:
        layer: nn.Sequential = super()._make_layer(block, planes // 8, *args, **kwargs)
        return layer


@dataclass(frozen=True)
class _Shape:
    num_blocks: tuple[int, ...]  # number of blocks of each of the four layers
    block: type[nn.Module] = BasicBlock  # class of the blocks
    width: int = 64  # channels of the 3x3 convolutions in the first layer


# He et al., "Deep residual learning for image recognition", 2016, table 1; the wide ones: Zagoruyko and Komodakis,
# "Wide residual networks", 2016. Networks with one block a layer are in neither: they are for tests.
SHAPES: dict[str, _Shape] = {
    "tiny": _Shape((1, 1, 1, 1), width=8),
    "tiny_bottleneck": _Shape((1, 1, 1, 1), Bottleneck, width=8),
    "resnet10": _Shape((1, 1, 1, 1)),
    "resnet18": _Shape((2, 2, 2, 2)),
    "resnet34": _Shape((3, 4, 6, 3)),
    "resnet50": _Shape((3, 4, 6, 3), Bottleneck),
    "resnet101": _Shape((3, 4, 23, 3), Bottleneck),
    "resnet152": _Shape((3, 8, 36, 3), Bottleneck),
    "wide_resnet50_2": _Shape((3, 4, 6, 3), Bottleneck, width=128),
    "wide_resnet101_2": _Shape((3, 4, 23, 3), Bottleneck, width=128),
}


def build_resnet(
    arch: Arch = "resnet34", *, stem: Stem = "cifar", num_classes: int = 10, zero_init_residual: bool = False
) -> ResNet:
    """A ResNet with torchvision's parameter names, from float (n, 3, height, width) to logits (n, num_classes).

    The stem "imagenet" is torchvision's own: 7x7 convolution of stride 2, then max-pooling, so that the blocks see
    8 x 8 pixels of a 32 x 32 image. "cifar" is a 3x3 convolution of stride 1 and no pooling, which keeps all 32 x 32,
    at 16 times the arithmetic; "strided" is the same with stride 2, 16 x 16 at 4 times, and the stem of Anthony Peng's
    articles. With `zero_init_residual` a block's last BatchNorm weight is 0: the identity (Goyal et al., 2017).
    """
    shape = SHAPES[arch]
    network_class = TinyResNet if shape.width < 64 else ResNet
    network = network_class(
        shape.block,
        list(shape.num_blocks),
        num_classes=num_classes,
        width_per_group=max(64, shape.width),
        zero_init_residual=zero_init_residual,
    )
    if stem != "imagenet":
        network.conv1 = nn.Conv2d(3, 64, kernel_size=3, stride=2 if stem == "strided" else 1, padding=1, bias=False)
        nn.init.kaiming_normal_(network.conv1.weight, mode="fan_out", nonlinearity="relu")  # ResNet's initialisation
        network.maxpool = nn.Identity()
    return network
