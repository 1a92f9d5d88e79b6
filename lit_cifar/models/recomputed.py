"""Activation checkpointing: blocks whose activations backward computes again, which takes time in place of memory.

Chen et al. 2016, "Training deep nets with sublinear memory cost" (https://arxiv.org/abs/1604.06174), by
`torch.utils.checkpoint`. A block's second forward begins with the buffers and the generators of the first, and what it
leaves in the buffers is discarded. So weights, running statistics and draws have the same bits as without.
"""

from copy import deepcopy
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from lit_cifar.errors import ConfigError, one_line
from lit_cifar.models.blocks import layers_of_blocks

FLAG = "--model.recompute=true"


class Recomputed(nn.Module):
    """A block, of any class behind this one, that keeps its input alone when it is trained."""

    def forward(self, input: Tensor) -> Any:
        if not (self.training and torch.is_grad_enabled()):
            return super().forward(input)
        first = super().forward
        # Replicas may run on tensors in place of the block's own, see `torch.func.functional_call`.
        state = dict(self.named_parameters()) | {name: buffer.clone() for name, buffer in self.named_buffers()}
        runs = 0

        def run(input: Tensor) -> Any:
            nonlocal runs
            runs += 1
            return first(input) if runs == 1 else run_again(self, state, input)

        return checkpoint(run, input, use_reentrant=False)


def run_again(block: Recomputed, state: dict[str, Tensor], input: Tensor) -> Any:
    """The output of `block`, without its hooks, whose parameters and buffers are `state` meanwhile."""
    buffers = {name: state[name].clone() for name, _ in block.named_buffers()}  # a graph may be used more than once
    return functional_call(_Plain(block), {f"block.{name}": its for name, its in (state | buffers).items()}, (input,))


class _Plain(nn.Module):
    """A block as its own class has it."""

    def __init__(self, block: Recomputed) -> None:
        super().__init__()
        self.block = block

    def forward(self, input: Tensor) -> Any:
        return cast(Any, super(Recomputed, self.block)).forward(input)


def recompute_blocks(network: nn.Module) -> None:
    """Let the blocks of `network` that have several layers compute their activations twice, in place.

    Names and tensors stay.
    """
    for block in _of_several_layers(network):
        if not isinstance(block, Recomputed):
            block.__class__ = type(f"Recomputed{type(block).__name__}", (Recomputed, type(block)), {})


def keep_activations(network: nn.Module) -> None:
    """Undo `recompute_blocks`."""
    for block in network.modules():
        if isinstance(block, Recomputed):
            block.__class__ = type(block).__bases__[1]


def check_blocks(network: nn.Module, *, compile: bool | str = False) -> None:
    """Refuse a network that does not say its blocks, or has none of several layers, or is to be compiled."""
    if compile:
        raise ConfigError(
            f"{FLAG} with --model.compile={str(compile).lower()}: torch.compile chooses by itself what backward "
            "computes again, and in other kernels, which round differently",
            remedy="leave out one of the two",
        )
    if not _of_several_layers(network):
        raise ConfigError(
            f"{FLAG} computes blocks of several layers again, and {type(network).__name__} does not say that it has "
            "any",
            remedy="leave it out; or give the network a method blocks(), see lit_cifar.models.blocks",
        )


def _of_several_layers(network: nn.Module) -> list[nn.Module]:
    return [block for block in layers_of_blocks(network) if any(True for _ in block.children())]


def check_recomputed(network: nn.Module, image_shape: tuple[int, ...]) -> None:
    """Refuse a network whose blocks, computed twice, do not give the gradients and buffers of two images of noise."""
    found = []
    images = torch.randn(2, *image_shape, generator=torch.Generator().manual_seed(0))
    for twice in (False, True):
        alone = deepcopy(network).train()
        if twice:
            recompute_blocks(alone)
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.default_generator.manual_seed(0)
            try:
                alone(images).square().sum().backward()
            except Exception as error:  # the network is the user's own code
                raise _differs(network, f"{type(error).__name__}: {one_line(error)[:200]}") from error
        gradients = {name: its.grad for name, its in alone.named_parameters() if its.grad is not None}
        found.append(gradients | dict(alone.named_buffers()))
    once, again = found
    for name, tensor in once.items():
        if name not in again or not torch.equal(tensor.nan_to_num(), again[name].nan_to_num()):
            raise _differs(network, f"{name} differs")


def _differs(network: nn.Module, problem: str) -> ConfigError:
    return ConfigError(
        f"{FLAG}: a block of {type(network).__name__} does not compute the same twice: {problem}",
        remedy="leave it out; or let no block change its input in place, or remember anything outside of its buffers",
    )
