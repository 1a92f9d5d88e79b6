"""`--model.compile` and `--model.channels_last`: what is compiled or laid out otherwise, and what stays as it is."""

from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from short_fits import fit, short
from torch import Tensor, nn

from lit_cifar import LitResNet
from lit_cifar.checkpoint.format import read_checkpoint
from lit_cifar.models import compiled
from lit_cifar.models.compiled import Compiled
from lit_cifar.strategies import LayerParallelStrategy

pytestmark = [short, pytest.mark.usefixtures("one_process")]


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    """The shape of the images of every graph that is compiled, by a compiler that only writes that down."""
    found: list[tuple[int, ...]] = []

    def note(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        found.append(next(tuple(x.shape) for x in inputs if isinstance(x, Tensor) and not x.requires_grad))
        return graph.forward

    monkeypatch.setattr(compiled, "BACKEND", note)
    torch._dynamo.reset()
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 8)  # torch's own
    yield found
    torch._dynamo.reset()


def test_the_largest_batch_is_compiled_and_a_ragged_one_is_not(graphs: list[tuple[int, ...]]) -> None:
    """More often than torch compiles the same code by itself, as a network's blocks share theirs."""
    network = nn.Sequential(nn.Linear(3, 3))
    run = Compiled(network)
    for num_samples in (4, 4, 2, 8, 8, 4):
        images = torch.randn(num_samples, 3)
        torch.testing.assert_close(run(images), network(images))
    assert graphs == [(4, 3), (8, 3)]
    with torch.no_grad():  # whether or not the module knows that it is evaluated, as a stage does not
        for num_samples in (6, 6, 2):
            run(torch.randn(num_samples, 3))
    assert graphs == [(4, 3), (8, 3), (6, 3)]
    for width in range(4, 14):
        Compiled(nn.Sequential(nn.Linear(3, width)))(torch.randn(4, 3))
    assert len(graphs) == 13


def test_a_compiled_network_keeps_its_names_can_be_copied_and_is_plain_after_the_run(
    graphs: list[tuple[int, ...]], tmp_path: Path
) -> None:
    model = LitResNet("tiny", stem="imagenet", compile=True)
    before = list(model.state_dict())
    fit(model, tmp_path, max_steps=1)
    assert list(model.state_dict()) == before
    deepcopy(model)
    num_graphs = len(graphs)
    assert num_graphs
    model(torch.zeros(64, 3, 32, 32))
    assert len(graphs) == num_graphs


@pytest.mark.parametrize(
    ("strategy", "parts"),
    [
        ("auto", ["TinyResNet"]),
        (LayerParallelStrategy(num_stages=2), ["Sequential"] * 2),
        ("pp", ["Sequential"]),
        ("fsdp2", ["BasicBlock"] * 4),
    ],
    ids=["one device", "mp", "pp", "fsdp2"],
)
def test_parts_are_compiled(strategy: Any, parts: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One process of a mode with processes; those take the same path."""
    ran = set()

    class Noting(nn.Module):
        def __init__(self, call: Any, **_: Any) -> None:
            super().__init__()
            self.call = call

        def forward(self, images: Tensor) -> Any:
            ran.add(getattr(self.call, "__self__", self.call))
            return self.call(images)

    monkeypatch.setattr(torch, "compile", Noting)
    fit(LitResNet("tiny", stem="imagenet", compile=True), tmp_path, strategy=strategy, max_steps=1)
    assert sorted(type(module).__name__.removeprefix("FSDP") for module in ran) == parts


@pytest.mark.parametrize("strategy", ["auto", "ddp_flat"])
def test_cuda_graphs_are_torchs_least_overhead(strategy: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a CPU torch makes none, and the kernels are the same; no gradient of a step is there in the next forward."""
    asked, gradients = [], []

    def note(call: Callable[[Tensor], Tensor], **options: Any) -> Callable[[Tensor], Tensor]:
        asked.append((options["mode"], options["dynamic"]))

        def run(images: Tensor) -> Tensor:
            gradients.extend(parameter.grad for parameter in call.parameters())  # type: ignore[attr-defined]
            return call(images)

        return run

    monkeypatch.setattr(torch, "compile", note)
    fit(LitResNet("tiny", stem="imagenet", compile="cuda_graphs"), tmp_path, strategy=strategy, max_steps=2)
    assert set(asked) == {("reduce-overhead", False)}
    assert gradients
    assert set(gradients) == {None}


def channels_last(tensor: Tensor) -> bool:
    return tensor.is_contiguous(memory_format=torch.channels_last)


class Seen(LitResNet):
    """Notes whether activations and the network's weights lie pixel by pixel."""

    def on_train_start(self) -> None:
        layer = self.network.layer1[0].conv2
        self.weight = channels_last(layer.weight)
        layer.register_forward_hook(lambda layer, inputs, output: setattr(self, "output", channels_last(output)))


@pytest.mark.parametrize(
    ("mode", "asked", "weights"),
    [("auto", False, False), ("auto", True, True), ("dp", True, True), ("mp", True, True), ("fsdp2", True, False)],
)
def test_activations_and_weights_lie_as_asked(mode: str, asked: bool, weights: bool, tmp_path: Path) -> None:
    """Where the weights cannot, the activations follow the images."""
    model = Seen("tiny", stem="imagenet", channels_last=asked)
    fit(model, tmp_path, strategy=mode)
    assert (model.output, model.weight) == (asked, weights)


def test_checkpoints_lie_in_the_usual_order_and_are_read_into_the_one_asked_for(tmp_path: Path) -> None:
    model = LitResNet("tiny", stem="imagenet", channels_last=True)
    trainer = fit(model, tmp_path)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    found, (optimizer,) = read_checkpoint(tmp_path / "a.ckpt"), trainer.optimizers
    momentum = [entry["momentum_buffer"] for entry in found["optimizer_states"][0]["state"].values()]
    assert momentum
    assert all(tensor.is_contiguous() for tensor in (*found["state_dict"].values(), *momentum))
    optimizer.load_state_dict(found["optimizer_states"][0])
    assert all(state["momentum_buffer"].stride() == p.stride() for p, state in optimizer.state.items())
