"""The chain of blocks of a network, which is cut into stages, and the layers of a block that may be split.

A network is a plain `nn.Module` from float images (n, 3, height, width) to logits (n, classes). Any network can be
trained in `dp`, `ddp`, `ddp_spawn` and `fsdp2`. It may tell more about itself:

- `mp`, `ddp_mp`, `pp` and `ddp_pp` cut it into stages between its blocks. A method `blocks()` returns them by name, in
  order; each takes what the one before returned, and all together are `forward`. An `nn.Sequential` needs no method.
- `tp` splits the layers that a module of it names in an attribute `tensor_split`, as Megatron does (Shoeybi et al.
  2019, https://arxiv.org/abs/1909.08053): `{"conv1": "columns", "bn1": "channels", "conv2": "rows"}`. Where outputs
    belong together, such as those of a head of attention, they must be consecutive, and `tensor_parts` is the number of
    such groups.

`verify` finds out whether a network tells the truth.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.flop_counter import FlopCounterMode

from lit_cifar.errors import ConfigError, one_line

# The part of a convolution or linear layer, or of a layer between two of them, that each process holds.
# "columns": some of the outputs, computed from the whole input, which is the same in all processes.
# "channels": some of the channels of a layer that treats each by itself, such as BatchNorm; it follows on "columns".
# "rows": some of the inputs, those that the layers before have left here; the outputs are summed over the processes.
# "head": some of the inputs, of an input that is the same in all processes; the outputs are summed likewise.
SplitKind = Literal["columns", "channels", "rows", "head"]


def blocks_of(network: nn.Module) -> dict[str, nn.Module] | None:
    """The chain of blocks, made of the network's own layers; None where the network does not say it."""
    # Only the class is asked: networks keep lists of layers under this name.
    if callable(getattr(type(network), "blocks", None)):
        chain: dict[str, nn.Module] = network.blocks()  # type: ignore[operator]
        return chain
    if isinstance(network, nn.Sequential) and type(network).forward is nn.Sequential.forward:
        return {name: its for name, its in network.named_modules(remove_duplicate=False) if name and "." not in name}
    return None


def layers_of_blocks(network: nn.Module) -> Iterator[nn.Module]:
    """The blocks of the network; a block that the network makes anew at each call is replaced by its layers."""
    parts = set(network.modules())
    chain = (blocks_of(network) or {}).values()
    yield from dict.fromkeys(module for block in chain for module in _topmost(block, parts))


def _topmost(module: nn.Module, wanted: set[nn.Module]) -> Iterator[nn.Module]:
    if module in wanted:
        yield module
    else:
        for child in module.children():
            yield from _topmost(child, wanted)


@torch.no_grad()
def check_network(network: nn.Module, image_shape: Sequence[int], *, num_classes: int) -> None:
    """Refuse a network that does not return logits for two images of noise, or whose blocks compute something else."""
    name = type(network).__name__
    lazy = [key for key, tensor in network.named_parameters() if is_lazy(tensor)]
    alone = deepcopy(network).eval()
    images = torch.randn(2, *image_shape, generator=torch.Generator().manual_seed(0))
    try:
        logits = alone(images)
        outputs = images
        for block in (blocks_of(alone) or {"forward": alone}).values():
            outputs = block(outputs)
    except Exception as error:  # the network is the user's own code
        problem = f"{name} cannot take images {tuple(image_shape)}: {type(error).__name__}: {one_line(error)[:200]}"
        raise ConfigError(problem, remedy="correct it, or its arguments: --model.network.NAME=VALUE") from error
    if lazy:
        layer = lazy[0].rpartition(".")[0]
        raise ConfigError(
            f"{name} has the lazy layer {layer}, and an optimizer needs all parameters before the first batch",
            remedy=f"make it nn.{alone.get_submodule(layer)}",
        )
    shape = tuple(getattr(logits, "shape", ()))
    if shape != (2, num_classes):
        raise ConfigError(
            f"{name} returns {shape or type(logits).__name__} for 2 images, not logits of {num_classes} classes",
            remedy=f"let it return (2, {num_classes}), by --model.network.num_classes={num_classes} if it has such",
        )
    if not torch.equal(logits, outputs):
        raise ConfigError(
            f"the blocks of {name}, one after the other, do not compute its forward()",
            remedy="let blocks() return all of them in order, with what happens between them",
        )


def unreached_parameters(network: nn.Module, image_shape: Sequence[int]) -> tuple[list[str], list[str]]:
    """The parameters that get no gradient from the logits of two images of noise: the names of those that never do.

    Then the names of those that do for some of eight draws of the network's random numbers, and for others not.
    """
    alone = deepcopy(network).train()
    trained = {name: parameter for name, parameter in alone.named_parameters() if parameter.requires_grad}
    counts = Counter[str]()
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        images = torch.randn(2, *image_shape)
        for draw in range(1, 9):
            torch.default_generator.manual_seed(draw)  # not those of GPUs, which the fork does not bring back
            before = torch.get_rng_state()
            alone.zero_grad()
            alone(images).sum().backward()
            counts.update(name for name, parameter in trained.items() if parameter.grad is None)
            if torch.get_rng_state().equal(before):  # it draws nothing
                break
    never = [name for name in trained if counts[name] == draw]
    return never, [name for name in trained if 0 < counts[name] < draw]


def tensor_split_of(network: nn.Module) -> dict[str, SplitKind]:
    """The layers that `tp` splits, by their names in the network."""
    return {
        f"{name}.{layer}" if name else layer: part
        for name, module in network.named_modules()
        for layer, part in _own_split(module).items()
    }


def num_tensor_parts(network: nn.Module) -> int:
    """Largest number of parts into which the split layers can be cut; its divisors work too. 0 if there are none."""
    return math.gcd(*(count for module in network.modules() for count in _counts(module)))


def _own_split(module: nn.Module) -> Mapping[str, SplitKind]:
    return getattr(module, "tensor_split", {})


def _counts(module: nn.Module) -> Iterator[int]:
    """Channels of each layer that begins a split, or the groups of a module whose channels belong together."""
    together: int | None = getattr(module, "tensor_parts", None)
    for layer, part in _own_split(module).items():
        if part in ("columns", "head"):
            num_outputs, num_inputs = module.get_submodule(layer).weight.shape[:2]  # type: ignore[index]
            yield num_inputs if part == "head" else together or num_outputs


@dataclass(frozen=True)
class Block:
    """A piece of a network that is not cut further: in a ResNet a residual block, the stem, or the head."""

    name: str  # its name in the network
    # Floating-point operations of one image's forward pass, counted by torch's flop counter. Backward takes twice as
    # many, so that shares are the same.
    flop: int
    num_parameters: int
    output_shape: tuple[int, ...]  # shape for one image, without the batch axis


@dataclass(frozen=True)
class Stage:
    """Consecutive blocks that run on one device."""

    blocks: tuple[Block, ...]

    @property
    def flop(self) -> int:
        return sum(block.flop for block in self.blocks)

    @property
    def num_parameters(self) -> int:
        return sum(block.num_parameters for block in self.blocks)

    @property
    def output_shape(self) -> tuple[int, ...]:
        return self.blocks[-1].output_shape

    @property
    def span(self) -> str:
        """The first and the last block, e.g. "stem to layer3.0"."""
        first, last = self.blocks[0].name, self.blocks[-1].name
        return first if first == last else f"{first} to {last}"

    def module(self, network: nn.Module) -> nn.Sequential:
        """The stage as a module made of the network's own layers: nothing is copied."""
        chain = blocks_of(network) or {}
        return nn.Sequential(*(chain[block.name] for block in self.blocks))


@dataclass(frozen=True)
class Partition:
    """The stages of a network, in order."""

    stages: tuple[Stage, ...]  # each takes what the one before returned
    image_shape: tuple[int, ...]  # shape of an image that enters the first stage, without the batch axis

    @classmethod
    def of(
        cls, network: nn.Module, image_shape: Sequence[int], *, num_stages: int, cuts: Sequence[str] | None = None
    ) -> "Partition":
        """Cut `network`, which says its blocks, so that the stage with the most FLOP has as few as possible.

        With `cuts`, names of blocks, the second and later stages begin with these instead. `image_shape` is without the
        batch axis.
        """
        blocks = measure(network, image_shape)
        if not 1 <= num_stages <= len(blocks):
            raise ConfigError(
                f"{num_stages} stages of a network of {len(blocks)} blocks",
                remedy=f"ask for 1 to {len(blocks)}, e.g. --trainer.devices=2",
            )
        bounds = (
            balanced([block.flop for block in blocks], num_stages) if cuts is None else _named(blocks, num_stages, cuts)
        )
        edges = (0, *bounds, len(blocks))
        return cls(tuple(Stage(blocks[a:b]) for a, b in pairwise(edges)), tuple(image_shape))

    def shapes(self, network: nn.Module, image_shape: Sequence[int]) -> list[tuple[int, ...]]:
        """The output shape of each stage for images of this shape, both without the batch axis."""
        if tuple(image_shape) == self.image_shape:
            return [stage.output_shape for stage in self.stages]
        outputs = {block.name: block.output_shape for block in measure(network, image_shape)}
        return [outputs[stage.blocks[-1].name] for stage in self.stages]

    def modules(self, network: nn.Module) -> list[nn.Sequential]:
        """The stages of `network` as modules, see `Stage.module`."""
        return [stage.module(network) for stage in self.stages]

    def table(self, places: Sequence[str]) -> list[str]:
        """One line for each stage: its place, blocks, share of FLOP, parameters and bytes sent on (float32)."""
        total = sum(stage.flop for stage in self.stages)
        lines = []
        for index, (stage, place) in enumerate(zip(self.stages, places, strict=True)):
            sent = (
                f"{4 * math.prod(stage.output_shape) / 1024:g} KiB per image" if index + 1 < len(self.stages) else "-"
            )
            lines.append(
                f"{index}  {place:<12}{stage.span:<24}{stage.flop / total:>6.1%} of FLOP  "
                f"{stage.num_parameters / 1e6:6.2f} M parameters  sends {sent}"
            )
        return lines


@torch.no_grad()
def measure(network: nn.Module, image_shape: Sequence[int]) -> tuple[Block, ...]:
    """FLOP, parameters and output shape of every block, from a run on the meta device, which computes nothing."""
    # Evaluation takes the same FLOP, and no layer then asks for more than one image.
    chain = blocks_of(deepcopy(network).to("meta", torch.float32).eval()) or {}
    x = torch.empty(1, *image_shape, device="meta")
    blocks = []
    for name, block in chain.items():
        with FlopCounterMode(display=False) as counter:
            x = block(x)
        num_parameters = sum(parameter.numel() for parameter in block.parameters())
        blocks.append(Block(name, counter.get_total_flops(), num_parameters, tuple(x.shape[1:])))
    return tuple(blocks)


def balanced(costs: Sequence[int], num_stages: int) -> tuple[int, ...]:
    """Positions at which the second and later stages begin, so that the largest stage costs as little as possible.

    This is dynamic programming over the first `end` blocks.
    """
    flop = [0]
    for cost in costs:
        flop.append(flop[-1] + cost)
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


def _named(blocks: tuple[Block, ...], num_stages: int, cuts: Sequence[str]) -> tuple[int, ...]:
    names = [block.name for block in blocks]
    bounds = tuple(names.index(cut) for cut in cuts if cut in names[1:])
    if len(cuts) != num_stages - 1 or len(bounds) != len(cuts) or list(bounds) != sorted(set(bounds)):
        raise ConfigError(
            f"cuts {list(cuts)} do not make {num_stages} stages",
            remedy=f"name {num_stages - 1} of these blocks in this order, each the first of a stage: "
            f"{', '.join(names[1:])}",
        )
    return bounds
