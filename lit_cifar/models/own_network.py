"""A network of the user's, tried with images of noise before a run begins."""

from collections import Counter
from collections.abc import Sequence
from copy import deepcopy

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn
from torch.nn.parameter import is_lazy

from lit_cifar.errors import ConfigError, one_line
from lit_cifar.models.blocks import blocks_of


@torch.no_grad()
def check_network(network: nn.Module, image_shape: Sequence[int], *, num_classes: int) -> None:
    """Refuse a network that does not return logits for two images of noise, or whose blocks compute something else."""
    name = type(network).__name__
    if extra := [key for key in network.state_dict() if key.endswith("_extra_state")]:
        problem = f"{name} has {extra[0]}, and a checkpoint holds weights as tensors alone"
        raise ConfigError(problem, remedy="make it a buffer: register_buffer")
    lazy = [key for key, tensor in network.named_parameters() if is_lazy(tensor)]
    images = torch.randn(2, *image_shape, generator=torch.Generator().manual_seed(0))
    for training in (True, False):
        mode = "training" if training else "evaluation"
        try:
            with isolate_rng(include_cuda=False):
                logits = _copied(network).train(training)(images)
            outputs, alone = images, _copied(network).train(training)
            with isolate_rng(include_cuda=False):  # layers draw the same again
                for block in (blocks_of(alone) or {"forward": alone}).values():
                    outputs = block(outputs)
        except Exception as error:  # the network is the user's own code
            problem = f"{name} cannot take images {tuple(image_shape)}: {type(error).__name__}: {one_line(error)[:200]}"
            raise ConfigError(problem, remedy="correct it, or its arguments: --model.network.NAME=VALUE") from error
        if lazy:
            layer = lazy[0].rpartition(".")[0]
            problem = f"{name} has the lazy layer {layer}, and an optimizer needs all parameters before the first batch"
            raise ConfigError(problem, remedy=f"make it nn.{alone.get_submodule(layer)}")
        shape = tuple(getattr(logits, "shape", ()))
        if shape != (2, num_classes):
            found = f"{shape or type(logits).__name__} for 2 images in {mode}"
            remedy = f"pass --model.network.num_classes={num_classes}, if it has such"
            raise ConfigError(f"{name} returns {found}, not logits of {num_classes} classes", remedy=remedy)
        if not torch.allclose(logits, outputs, rtol=0, atol=0, equal_nan=True):
            remedy = "let blocks() return all of them in order, with what happens between them"
            problem = f"in {mode} the blocks of {name}, one after the other, do not compute its forward()"
            raise ConfigError(problem, remedy=remedy)


def unreached_parameters(network: nn.Module, image_shape: Sequence[int]) -> tuple[list[str], list[str]]:
    """Names of parameters that get no gradient from the logits of 2 images of noise: never, and in some of 8 draws."""
    alone = _copied(network).train()
    trained = {name: parameter for name, parameter in alone.named_parameters() if parameter.requires_grad}
    counts = Counter[str]()
    with isolate_rng(include_cuda=False), torch.enable_grad():
        for draw in range(1, 9):
            torch.default_generator.manual_seed(draw)  # not those of GPUs, which are not brought back
            images = torch.randn(2, *image_shape)
            alone.zero_grad()
            alone(images).sum().backward()
            counts.update(name for name, parameter in trained.items() if parameter.grad is None)
    never = [name for name in trained if counts[name] == draw]
    return never, [name for name in trained if 0 < counts[name] < draw]


def _copied(network: nn.Module) -> nn.Module:
    """A copy, with what has a graph, such as a weight of `prune`, which `deepcopy` refuses."""
    held = [its for layer in network.modules() for its in vars(layer).values() if isinstance(its, torch.Tensor)]
    return deepcopy(network, {id(its): its.detach().clone() for its in held})
