"""The sizes of a network, counted without computing anything."""

from collections.abc import Iterator, Sequence
from copy import deepcopy
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.utils.flop_counter import FlopCounterMode

from lit_cifar.bench.forecast.inputs import Layer, Network
from lit_cifar.models.blocks import tensor_split_of
from lit_cifar.models.partition import chain_of
from lit_cifar.strategies.tensor_parallel import placements

_FEW, _MANY = 2, 4  # images: the difference is what one more needs. BatchNorm refuses a single value.


def count(network: nn.Module, image_shape: Sequence[int]) -> Network:
    """What a forecast needs of a network that says its blocks; `image_shape` is without the batch axis."""
    few, many = (_Pass(network, image_shape, num_images) for num_images in (_FEW, _MANY))
    parameters = list(_parameter_bytes(network))
    layers = []
    for a, b, (whole, split) in zip(few.blocks, many.blocks, parameters, strict=True):
        one = [(right - left) // (_MANY - _FEW) for left, right in zip(a, b, strict=True)]
        flop, split_flop, kept, split_kept, output = one
        layers.append(
            Layer(
                flop=flop,
                parameter_bytes=whole,
                output_bytes=output,
                kept_bytes=kept,
                split_flop=split_flop,
                split_parameter_bytes=split,
                split_kept_bytes=split_kept,
            )
        )
    sums = tuple(num_bytes // _FEW for num_bytes in few.sums)
    return Network(layers=tuple(layers), image_bytes=4 * prod(image_shape), sums=sums)


def _parameter_bytes(network: nn.Module) -> Iterator[tuple[int, int]]:
    """Of each block, and of those that `tp` splits."""
    placed = placements(network)
    names = {parameter: name for name, parameter in network.named_parameters()}
    for block in chain_of(network).values():
        own = list(block.parameters())
        split = [each for each in own if not isinstance(placed[names[each]], Replicate)]
        yield sum(each.nbytes for each in own), sum(each.nbytes for each in split)


class _Pass:
    """A forward pass on the meta device, followed by hooks.

    Attributes:
        blocks: Of each block flop, split flop, bytes kept, split bytes kept, and bytes of its output.
        sums: Bytes of each tensor that `tp` sums over the devices.
    """

    def __init__(self, network: nn.Module, image_shape: Sequence[int], num_images: int) -> None:
        skeleton = deepcopy(network).to("meta", torch.float32).train()
        self.blocks: list[tuple[int, ...]] = []
        self.sums: list[int] = []
        self._split_since: int | None = None  # FLOP when a layer began whose outputs are split
        self._in_split = False  # behind such a layer
        # Held until the end, so that no other storage takes the place of one.
        self._seen: dict[int, Tensor] = {_storage(tensor): tensor for tensor in skeleton.parameters()}
        self._split_flop = self._kept = self._split_kept = 0
        self._follow(skeleton)
        self._counter = FlopCounterMode(display=False)
        x = torch.empty(num_images, *image_shape, device="meta")
        with self._counter, torch.autograd.graph.saved_tensors_hooks(self._keep, lambda kept: kept):
            for block in chain_of(skeleton).values():
                before = self._counts()
                x = block(x)
                counted = (after - start for start, after in zip(before, self._counts(), strict=True))
                self.blocks.append((*counted, x.nbytes))

    def _counts(self) -> tuple[int, int, int, int]:
        return self._counter.get_total_flops(), self._split_flop, self._kept, self._split_kept

    def _follow(self, skeleton: nn.Module) -> None:
        for name, part in tensor_split_of(skeleton).items():
            layer = skeleton.get_submodule(name)
            if part in ("columns", "head"):
                layer.register_forward_pre_hook(self._begin_split)
            if part == "columns":
                layer.register_forward_pre_hook(lambda layer, inputs: self.sums.append(inputs[0].nbytes))
                layer.register_forward_hook(self._behind_columns)
            if part == "rows":
                layer.register_forward_hook(lambda layer, inputs, output: self.sums.append(output.nbytes))
            if part in ("rows", "head"):
                layer.register_forward_hook(self._end_split)

    def _begin_split(self, layer: nn.Module, inputs: Any) -> None:
        self._split_since = self._counter.get_total_flops()

    def _behind_columns(self, layer: nn.Module, inputs: Any, output: Any) -> None:
        self._in_split = True

    def _end_split(self, layer: nn.Module, inputs: Any, output: Any) -> None:
        assert self._split_since is not None
        self._split_flop += self._counter.get_total_flops() - self._split_since
        self._in_split = False

    def _keep(self, tensor: Tensor) -> Tensor:
        if _storage(tensor) not in self._seen:
            self._seen[_storage(tensor)] = tensor
            self._kept += tensor.nbytes
            self._split_kept += tensor.nbytes * self._in_split
        return tensor


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
