"""Stages of a network, of about equal cost or as asked for, and what passes from one to the next."""

import math
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import accumulate, pairwise
from types import MethodType

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from lit_cifar import internals
from lit_cifar.errors import ConfigError
from lit_cifar.models.blocks import blocks_of


@dataclass(frozen=True)
class Block:
    """A piece of a network that is not cut further: in a ResNet a residual block, the stem, or the head."""

    name: str  # its name in the network
    # Floating-point operations of one image's forward pass, by torch's counter. Backward has twice as many.
    flop: int
    num_parameters: int
    output_shape: tuple[int, ...]  # shape for one image, without the batch axis


@dataclass(frozen=True)
class Partition:
    """The stages of a network, in order: consecutive blocks, which run on one device."""

    stages: tuple[tuple[Block, ...], ...]  # each takes what the one before returned

    @classmethod
    def cut(cls, network: nn.Module, image_shape: Sequence[int], *, num_stages: int) -> "Partition":
        """Cut `network`, which says its blocks, so that the stage with the most FLOP has as few as possible.

        `image_shape` is without the batch axis.
        """
        blocks = measure(network, image_shape)
        if not 1 <= num_stages <= len(blocks):
            remedy = f"ask for 1 to {len(blocks)}, by --trainer.devices or --trainer.strategy.num_stages"
            raise ConfigError(f"{num_stages} stages of a network of {len(blocks)} blocks", remedy=remedy)
        costs = [block.flop for block in blocks]
        edges = (0, *balanced(costs, num_stages), len(blocks))
        return cls(tuple(blocks[a:b] for a, b in pairwise(edges)))

    def outputs(self, network: nn.Module, images: Tensor) -> list[tuple[torch.Size, torch.dtype]]:
        """Shape without the batch axis, and dtype under the present autocast, of what each stage returns."""
        held = [each for layer in network.modules() for each in internals.tree_leaves(vars(layer))]
        same = {id(each): each for each in held if isinstance(each, Tensor | MethodType)}
        modules = self.modules(deepcopy(network, same))  # layers may keep what they compute, and here it is not real
        found = []
        with internals.FakeTensorMode(allow_non_fake_inputs=True):
            x = torch.empty(2, *images.shape[1:], dtype=images.dtype, device=images.device)
            for module in modules:
                # All tensors, also buffers that are not saved, and each once.
                state = dict(module.named_parameters()) | dict(module.named_buffers())
                unreal = {name: torch.empty(t.shape, dtype=t.dtype, device=x.device) for name, t in state.items()}
                x = functional_call(module, unreal, (x,))
                found.append((x.shape[1:], x.dtype))
        return found

    def modules(self, network: nn.Module) -> list[nn.Sequential]:
        """The stages as modules made of the network's own layers: nothing is copied."""
        chain = blocks_of(network) or {}
        return [nn.Sequential(*(chain[block.name] for block in stage)) for stage in self.stages]

    def table(self, places: Sequence[str]) -> list[str]:
        """One line for each stage: its place, blocks, share of FLOP, parameters and bytes sent on (float32)."""
        total = sum(block.flop for stage in self.stages for block in stage)
        lines = []
        for index, (stage, place) in enumerate(zip(self.stages, places, strict=True)):
            span = " to ".join(dict.fromkeys((stage[0].name, stage[-1].name)))
            share = sum(block.flop for block in stage) / total
            size = f"{share:>6.1%} of FLOP  {sum(block.num_parameters for block in stage) / 1e6:6.2f} M parameters"
            sent = f"{4 * math.prod(stage[-1].output_shape) / 1024:g} KiB per image"
            sends = sent if index + 1 < len(self.stages) else "-"
            lines.append(f"{index}  {place:<12}{span:<24}{size}  sends {sends}")
        return lines


@torch.no_grad()
def measure(network: nn.Module, image_shape: Sequence[int]) -> tuple[Block, ...]:
    """FLOP, parameters and output shape of every block, from a run on the meta device, which computes nothing."""
    # Evaluation takes the same FLOP, and no layer then asks for more than one image.
    chain = blocks_of(deepcopy(network).to("meta", torch.float32).eval()) or {}
    x = torch.empty(1, *image_shape, device="meta")
    blocks = []
    for name, block in chain.items():
        with FlopCounterMode(display=False) as counter, torch.device("meta"):
            x = block(x)
        num_parameters = sum(parameter.numel() for parameter in block.parameters())
        blocks.append(Block(name, counter.get_total_flops(), num_parameters, tuple(x.shape[1:])))
    return tuple(blocks)


def balanced(costs: Sequence[int], num_stages: int) -> tuple[int, ...]:
    """Where the second and later stages begin, so that the largest costs least, by dynamic programming."""
    flop = [*accumulate(costs, initial=0)]
    best: dict[int, tuple[int, tuple[int, ...]]] = {end: (flop[end], ()) for end in range(1, len(flop))}
    for _ in range(num_stages - 1):
        best = {
            end: min(
                (max(worst, flop[end] - flop[cut]), (*bounds, cut))
                for cut, (worst, bounds) in best.items()
                if cut < end
            )
            for end in range(min(best) + 1, len(flop))
        }
    return best[len(costs)][1]
