"""channels_last: what lies how in memory, in the run, in messages and in checkpoints."""

from pathlib import Path

import pytest
import torch
from short_fits import fit, short
from torch import Tensor

from lit_cifar import LitResNet
from lit_cifar.checkpoint.format import read_checkpoint
from lit_cifar.models.memory_format import with_plain_gradient


def channels_last(tensor: Tensor) -> bool:
    return tensor.is_contiguous(memory_format=torch.channels_last)


class Seen(LitResNet):
    """Notes whether activations and the network's weights lie pixel by pixel."""

    def on_train_start(self) -> None:
        layer = self.network.layer1[0].conv2
        self.weight = channels_last(layer.weight)
        layer.register_forward_hook(lambda layer, inputs, output: setattr(self, "output", channels_last(output)))


@short
@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(
    ("mode", "asked", "weights"),
    [("auto", False, False), ("auto", True, True), ("dp", True, True), ("mp", True, True), ("fsdp2", True, False)],
)
def test_activations_and_weights_lie_as_asked(mode: str, asked: bool, weights: bool, tmp_path: Path) -> None:
    """Where the weights cannot, the activations follow the images."""
    model = Seen("tiny", stem="imagenet", channels_last=asked)
    fit(model, tmp_path, strategy=mode)
    assert (model.output, model.weight) == (asked, weights)


@short
def test_checkpoints_lie_in_the_usual_order_and_are_read_into_the_one_asked_for(tmp_path: Path) -> None:
    model = LitResNet("tiny", stem="imagenet", channels_last=True)
    trainer = fit(model, tmp_path)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    found, (optimizer,) = read_checkpoint(tmp_path / "a.ckpt"), trainer.optimizers
    momentum = [entry["momentum_buffer"] for entry in found["optimizer_states"][0]["state"].values()]
    assert all(tensor.is_contiguous() for tensor in (*found["state_dict"].values(), *momentum))
    optimizer.load_state_dict(found["optimizer_states"][0])
    assert all(state["momentum_buffer"].stride() == p.stride() for p, state in optimizer.state.items())


def test_a_gradient_lies_as_it_is_sent() -> None:
    x = torch.randn(2, 4, 3, 3, requires_grad=True)
    seen = []
    y = with_plain_gradient(x)
    y.register_hook(lambda grad: seen.append(grad.is_contiguous()))
    (grad,) = torch.autograd.grad(y, x, torch.ones_like(y).to(memory_format=torch.channels_last))
    assert grad.is_contiguous()
    assert seen == [False]
