"""`fsdp2` and `tp`: processes that hold parts of every parameter train what one device trains."""

from collections.abc import Iterable
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from checkpoints import assert_same_checkpoint
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.strategies import DDPStrategy
from own_networks import LayerScale, Standardised
from short_fits import data, fit, short
from threads import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn.utils import prune
from torch.testing._internal.distributed.fake_pg import FakeStore

from lit_cifar import LitResNet
from lit_cifar.checkpoint.format import read_checkpoint
from lit_cifar.errors import ConfigError
from lit_cifar.mode.tensors import local_part
from lit_cifar.models import build_network
from lit_cifar.models.blocks import blocks_of
from lit_cifar.models.memory_format import Plain
from lit_cifar.strategies import ShardedStrategy, fsdp2, mesh, tp
from lit_cifar.strategies.virtual_replicas import VirtualReplicas

pytestmark = [short, pytest.mark.usefixtures("one_process")]


class Watched(LitResNet):
    """Notes what kind of parameters it trains."""

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        self.kinds = {type(parameter.data) for parameter in self.network.parameters()}
        return super().training_step(*args, **kwargs)


def module(**settings: Any) -> Watched:
    L.seed_everything(0, verbose=False)
    return Watched("tiny", stem="imagenet", **settings)


@pytest.mark.parametrize(
    ("mode", "precision", "optimizer"),
    [
        ("fsdp2", "64-true", partial(torch.optim.AdamW, lr=1e-3, fused=True)),
        *((mode, "64-true", partial(torch.optim.Adagrad, lr=1e-3)) for mode in ("fsdp2", "tp")),
        *((mode, "bf16-mixed", partial(torch.optim.SGD, lr=0.01)) for mode in ("fsdp2", "tp")),
    ],
)
def test_parts_are_trained_as_the_whole_and_the_module_has_its_plain_network_back(
    mode: str, precision: Any, optimizer: Any, tmp_path: Path
) -> None:
    """Clipped. Adagrad's state is there before the first step. In float64 in channels_last, in bfloat16 one step."""
    wide = precision == "64-true"
    runs, models = [], []
    for strategy in (mode, "auto"):
        models.append(module(optimizer=optimizer, channels_last=wide and strategy == mode))
        network = models[-1].network
        settings = {"precision": precision, "max_steps": -1 if wide else 1, "gradient_clip_val": 1.0}
        runs.append(fit(models[-1], tmp_path, strategy=strategy, **settings))
        runs[-1].save_checkpoint(tmp_path / f"{strategy}.ckpt")
        assert models[-1].network is network
    model, plain = models
    assert (model.kinds, plain.kinds) == ({DTensor}, {Tensor})
    assert {type(value) for value in model.state_dict().values()} == {Tensor}
    found, expected = (read_checkpoint(tmp_path / f"{strategy}.ckpt") for strategy in (mode, "auto"))
    assert_same_checkpoint(found, expected, tolerance=1e-9 if wide else 1e-5)
    assert not plain.network.conv1.weight.equal(module().network.conv1.weight.to(plain.network.conv1.weight))
    of_parts, of_whole = (run.test(each, data(), verbose=False)[0] for run, each in zip(runs, models, strict=True))
    assert of_parts == pytest.approx(of_whole, rel=1e-2)


class Narrow(LitResNet):
    """Notes in which types a block computes, and those of the gradients."""

    def on_train_start(self) -> None:
        block = self.network.layer1[0]
        self.types: dict[str, Any] = {}
        for name, layer in (("conv", block.conv1), ("bn", block.bn1), ("fc", self.network.fc)):
            layer.register_forward_pre_hook(
                lambda layer, inputs, name=name: self.types.update({name: layer.weight.dtype})
            )

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.types["gradients"] = {p.grad.dtype for p in self.network.parameters() if p.grad is not None}


def test_what_computes_in_bfloat16_is_gathered_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are summed in float32, which one process cannot show, and a ViT's blocks get float32."""
    policies: list[dict[str, Any]] = []

    def noted(**types: Any) -> MixedPrecisionPolicy:
        policies.append(types)
        return MixedPrecisionPolicy(**types)

    monkeypatch.setattr(fsdp2, "MixedPrecisionPolicy", noted)
    model = Narrow("tiny", stem="imagenet")
    fit(model, tmp_path, strategy="fsdp2", precision="bf16-mixed", max_steps=1)
    narrow, wide = torch.bfloat16, torch.float32
    assert model.types == {"conv": narrow, "fc": narrow, "bn": wide, "gradients": {wide}}
    assert {p.dtype for p in model.network.parameters()} == {wide}
    assert policies == [{"param_dtype": narrow, "reduce_dtype": wide, "cast_forward_inputs": False}]


@pytest.mark.parametrize("strategy", ["auto", "fsdp2"])
def test_a_parameter_beside_layers_computes_as_on_one_device(strategy: str, tmp_path: Path) -> None:
    """And one of two layers, and those of a layer whose own `forward` uses them before autocast takes them."""
    head = (Standardised(4, 4, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10))
    tied = nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 4, kernel_size=1))
    tied[1].bias = tied[0].bias
    network = nn.Sequential(nn.Conv2d(3, 4, kernel_size=3, stride=4), LayerScale(4), tied, *head)
    LayerScale.seen.clear()
    fit(LitResNet(network=network), tmp_path, strategy=strategy, precision="bf16-mixed", max_steps=1)
    assert {*LayerScale.seen} == {torch.float32}
    network.first = network[0].weight  # a name that no block has
    with pytest.raises(ConfigError, match="first = 0.weight is") if strategy == "fsdp2" else nullcontext():  # noqa: RUF043
        fit(LitResNet(network=network), tmp_path, strategy=strategy, max_steps=1)


class Learning(LitResNet):
    """Learns a number that is no part of its network, a penalty, from half of the loss, or by another forward."""

    def __init__(self, what: str) -> None:
        super().__init__("tiny", stem="imagenet")
        self.what, self.temperature = what, nn.Parameter(torch.ones(()), requires_grad=what == "temperature")

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        if self.what == "other images":
            args = (args[0]._replace(images=args[0].images.flip(3)), *args[1:])
        loss = super().training_step(*args, **kwargs)
        if self.what == "images again":
            self(args[0].images)
        if self.what == "penalty":
            return loss + sum(p.abs().sum() for p in self.network.parameters())
        return loss / 2 if "half" in self.what else loss * self.temperature


@pytest.mark.parametrize(
    ("what", "mode", "says"),
    [
        *(("temperature", mode, "temperature is no part of the module's network") for mode in ("fsdp2", "ddp_flat")),
        *((what, "pp", "a pipeline trains by loss\\(\\) alone") for what in ("penalty", "half", "half of parts")),
        *((what, "pp", "other images than its batch's") for what in ("other images", "images again")),
    ],
)
def test_what_a_mode_would_not_train_is_refused(what: str, mode: str, says: str, tmp_path: Path) -> None:
    callbacks = [VirtualReplicas(4)] if "parts" in what else []
    with pytest.raises(ConfigError, match=says):
        fit(Learning(what), tmp_path, strategy=mode, max_steps=1, callbacks=callbacks)


class Keeps(nn.Module):
    """Keeps what it computes when it is first called."""

    def forward(self, x: Tensor) -> Tensor:
        return x * vars(self).setdefault("kept", x.new_full((), 2.0))


def test_layers_that_keep_what_they_compute_or_write_over_it_are_cut_too(tmp_path: Path) -> None:
    first = nn.Conv2d(3, 4, 3, stride=4)
    prune.identity(first, "weight")  # type: ignore[no-untyped-call]
    module = LitResNet(network=nn.Sequential(first, Keeps(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10)))
    modules = {strategy: deepcopy(module) for strategy in ("auto", "pp")}
    for strategy, each in modules.items():
        fit(each, tmp_path, strategy=strategy, max_steps=2)
    torch.testing.assert_close(*(each.network.state_dict() for each in modules.values()))
    nn.Sequential(Plain(), nn.ReLU(inplace=True))(torch.ones(2, requires_grad=True)).sum().backward()


@pytest.mark.parametrize("mode", ["pp", "ddp_flat", "fsdp2", "tp"])
def test_a_script_may_not_average_parts_of_weights(mode: str, tmp_path: Path) -> None:
    average = EMAWeightAveraging()
    with pytest.raises(ConfigError, match="averages weights, of which a process has parts"):
        fit(LitResNet("tiny", stem="imagenet"), tmp_path, strategy=mode, max_steps=1, callbacks=[average])


@pytest.mark.parametrize("strategy", ["auto", "pp"])
def test_backward_computes_in_the_types_of_forward(strategy: str, tmp_path: Path) -> None:
    seen: list[bool] = []
    network = nn.Sequential(nn.Conv2d(3, 4, 3, stride=4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10))

    def watch(layer: nn.Module, given: Any, out: Tensor) -> None:
        if out.requires_grad:
            out.register_hook(lambda _: seen.append(torch.is_autocast_enabled("cpu")))  # type: ignore[no-untyped-call]

    network[3].register_forward_hook(watch)
    fit(LitResNet(network=network), tmp_path, strategy=strategy, precision="bf16-mixed", max_steps=1)
    assert {*seen} == {False}


@pytest.mark.parametrize("sizes", [{}, {"splits_layers": True}], ids=["fsdp2", "tp"])
def test_a_device_never_holds_more_than_its_parts_and_a_block(sizes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the first of 8 processes, of which there is no other: a block is moved at a time, and parts of it stay."""
    moved: list[int] = []

    def note(tensors: Iterable[Tensor], *where: Any) -> None:
        tensors = [*tensors]
        moved.append(sum(tensor.nbytes for tensor in tensors))
        mesh.move_and_broadcast(tensors, *where)

    for module in (fsdp2, tp):
        monkeypatch.setattr(module, "move_and_broadcast", note)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    strategy, model = ShardedStrategy(**sizes), LitResNet("resnet10")
    monkeypatch.setattr(ShardedStrategy, "root_device", torch.device("cpu"))
    strategy.mesh = mesh.make_mesh("cpu", model_size=8 if sizes else 1, timeout=None)
    strategy.model = strategy._lightning_module = model
    whole, *blocks = (
        sum(tensor.nbytes for tensor in chain(module.parameters(), module.buffers()))
        for module in (model.network, *(blocks_of(model.network) or {}).values())
    )
    with monkeypatch.context() as patch:
        patch.setattr(model.network, "_apply", pytest.fail)  # the whole is not moved with the rest
        strategy.model_to_device()
    strategy.make_forward_fn(model.network)
    held = [local_part(tensor) for tensor in chain(model.network.parameters(), model.network.buffers())]
    assert whole / 8 < sum(tensor.untyped_storage().nbytes() for tensor in held) < whole / 3
    assert max(moved) <= max(blocks) < sum(moved) == whole


def test_what_tp_does_not_split_cannot_drift_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of two processes rounds otherwise than the first, by 1e-7."""
    monkeypatch.setattr(DDPStrategy, "optimizer_step", lambda *args, **kwargs: None)
    whole = build_network("tiny", stem="imagenet", num_classes=10, image_size=32)

    def stepped(rank: int) -> dict[str, Tensor]:
        strategy = ShardedStrategy(splits_layers=True)
        strategy.mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "model"))
        network = deepcopy(whole)
        tp.split_tensors(network, strategy.mesh["model"], torch.device("cpu"))
        strategy._lightning_module = SimpleNamespace(network=network)  # type: ignore[assignment]
        for tensor in network.state_dict().values():
            local_part(tensor).add_(rank * 1e-7 if tensor.is_floating_point() else 0)
        strategy.optimizer_step()
        return {name: local_part(tensor) for name, tensor in network.state_dict().items()}

    first, second = on_ranks(2, stepped)
    values = whole.state_dict()
    replicated = [name for name in first if first[name].shape == values[name].shape]
    assert {"conv1.weight", "bn1.running_mean", "layer1.0.bn2.bias", "fc.bias"} <= {*replicated} < {*first}
    assert [name for name in replicated if not first[name].equal(second[name])] == []
    assert [name for name in replicated if not first[name].equal(whole.state_dict()[name])] == []
    split = [name for name in first if name not in replicated]
    assert [name for name in split if first[name].equal(second[name])] == []


def test_a_sum_keeps_the_type_of_its_terms_though_its_bias_has_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tp, "_all_reduce", lambda tensor, group: tensor)
    layer: Any = nn.Linear(4, 3)
    tp._derive(layer, tp._SENDING["rows"])
    layer.group = None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(torch.randn(2, 4)).dtype == torch.bfloat16
