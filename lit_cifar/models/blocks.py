"""The chain of blocks of a network, between which it may be cut, and the layers of a block that may be split.

A network is a plain `nn.Module` from float images (n, 3, height, width) to logits (n, classes). Any network can be
trained in `dp`, `ddp`, `ddp_spawn` and `fsdp2`. It may tell more about itself:

- `mp`, `ddp_mp`, `pp` and `ddp_pp` cut it into stages between its blocks. A method `blocks()` returns them by name, in
  order; each takes what the one before returned, and all together are `forward`. An `nn.Sequential` needs no method.
- `tp` splits the layers that a module of it names in an attribute `tensor_split`, as Megatron does (Shoeybi et al.
  2019, https://arxiv.org/abs/1909.08053): `{"conv1": "columns", "bn1": "channels", "conv2": "rows"}`. Where outputs
    belong together, such as those of an attention head, they must be consecutive: `tensor_parts` such groups.

`verify` finds out whether a network tells the truth.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Literal

from torch import nn

# The part of a convolution or linear layer, or of a layer between two of them, that each process holds.
# "columns": some of the outputs, computed from the whole input, which is the same in all processes.
# "channels": some of the channels of a layer that treats each by itself, such as BatchNorm; it follows on "columns".
# "rows": some of the inputs, those that the layers before have left here; the outputs are summed over the processes.
# "head": of a linear layer some of the inputs, which are the same in all processes; the outputs are summed likewise.
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
    yield from dict.fromkeys(module for block in chain for module in topmost(block, parts))


def topmost(module: nn.Module, wanted: set[nn.Module]) -> Iterator[nn.Module]:
    """The `wanted` modules of a block: itself, or those in it that are in no other one."""
    if module in wanted:
        yield module
    else:
        for child in module.children():
            yield from topmost(child, wanted)


def tensor_split_of(network: nn.Module) -> dict[str, SplitKind]:
    """The layers that `tp` splits, by their names in the network."""
    return {
        f"{name}.{layer}" if name else layer: part
        for name, module in network.named_modules()
        for layer, part in _own_split(module).items()
    }


def num_tensor_parts(network: nn.Module) -> int:
    """Largest number of parts into which the split layers can be cut; its divisors work too. 0 if there are none."""
    return math.gcd(*(count for module in network.modules() for count in _numbers_of_parts(module)))


def _own_split(module: nn.Module) -> Mapping[str, SplitKind]:
    return getattr(module, "tensor_split", {})


def _numbers_of_parts(module: nn.Module) -> Iterator[int]:
    """Channels of each layer that begins a split, or the groups of a module whose channels belong together."""
    together: int | None = getattr(module, "tensor_parts", None)
    for layer, part in _own_split(module).items():
        if part in ("columns", "head"):
            num_outputs, num_inputs = module.get_submodule(layer).weight.shape[:2]  # type: ignore[index]
            yield num_inputs if part == "head" else together or num_outputs
