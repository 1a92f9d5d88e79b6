"""`fsdp2`, `tp` and both: processes that hold parts of every parameter train what one device trains."""

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
import torch.distributed as dist
from commands import TINY, launch, run_here
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard
from torchvision.models.resnet import ResNet

from lit_cifar import CIFAR10DataModule, LitResNet
from lit_cifar.checkpoint.format import read_checkpoint
from lit_cifar.errors import ConfigError
from lit_cifar.models import build_resnet
from lit_cifar.strategies import ShardedStrategy, fsdp2
from lit_cifar.strategies.state_dicts import local_slice
from lit_cifar.strategies.tp import sharding_lines

# 79 images in batches of 16: four steps and a ragged one of 15. Of 17 images to validate, the second of two processes
# has none in the last batch.
SETTINGS = [
    *TINY,
    "--data.val_size=17",
    "--best_checkpoint.save_top_k=-1",
    "--trainer.precision=64-true",
    "--model.optimizer.lr=0.01",
]
ADAMW = ["--model.optimizer=AdamW", "--model.optimizer.lr=1e-4", "--trainer.gradient_clip_algorithm=value"]
BOTH = [
    "--trainer.strategy=ShardedStrategy",
    "--trainer.strategy.data_parallel_size=2",
    "--trainer.strategy.tensor_parallel_size=2",
    "--trainer.devices=4",
]
# Flags of the mode, of the one device that it equals, and of both.
CASES: dict[str, tuple[list[str], list[str], list[str]]] = {
    "tp": (
        ["--trainer.strategy=tp", "--trainer.devices=2", "--trainer.sync_batchnorm=true"],
        [],
        [*ADAMW, "--trainer.gradient_clip_val=0.01"],
    ),
    "both": ([*BOTH, "--trainer.sync_batchnorm=true"], [], ["--trainer.gradient_clip_val=0.5"]),
}


def state_of(run: Path) -> dict[str, Any]:
    """Every number of a run's last checkpoint under a name of its own, in the order of the file."""
    checkpoint = read_checkpoint(run / "checkpoints" / "last.ckpt")
    optimizer = checkpoint["optimizer_states"][0]
    states = {f"{i} {name}": value for i, entry in optimizer["state"].items() for name, value in entry.items()}
    groups = {f"group {name}": value for name, value in optimizer["param_groups"][0].items()}
    return {"epoch": checkpoint["epoch"], **checkpoint["state_dict"], **states, **groups}


@pytest.mark.timeout(240)
@pytest.mark.filterwarnings("ignore:the learning rate schedule of the checkpoint")  # by the first run, which is shorter
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow if case == "both" else pytest.mark.exhaustive) for case in CASES]
)
def test_a_mode_goes_on_from_one_device_as_one_device_does(case: str, tmp_path: Path) -> None:
    """Parameters, running statistics and optimizer state, resumed and written; `fsdp2` alone is in `test_verify.py`."""
    mode, alone, shared = CASES[case]
    assert run_here("fit", *SETTINGS, *alone, *shared, f"--run_dir={tmp_path / 'first'}").status == 0
    resume = [*SETTINGS, *shared, "--trainer.max_epochs=2", f"--ckpt_path={tmp_path}/first/checkpoints/last.ckpt"]
    assert run_here("fit", *resume, *alone, f"--run_dir={tmp_path / 'alone'}").status == 0
    num_processes = int(next(flag for flag in mode if "devices" in flag).partition("=")[2])
    result = launch("fit", *resume, *mode, f"--run_dir={tmp_path / 'mode'}", timeout_s=200, ranks=num_processes)
    assert ("has no effect" in result.stderr) == (case == "tp")
    found, expected, before = (state_of(tmp_path / run) for run in ("mode", "alone", "first"))
    assert list(found) == list(expected)
    moved = 0.0
    for name, value in expected.items():
        if isinstance(value, Tensor):
            assert type(found[name]) is Tensor, name
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-9, msg=name)
            moved = max(moved, float((value.double() - before[name].double()).abs().max()))
        else:
            assert found[name] == value, name
    assert moved > 1e-3


# ---------------------------------------------------------------- one process, which takes the same path


@pytest.fixture
def _one_process() -> Iterator[None]:
    """A process group is made by the strategy, and Lightning leaves it and its address."""
    with mock.patch.dict(os.environ):
        yield
        if dist.is_initialized():
            dist.destroy_process_group()


def trainer(folder: Path, **settings: Any) -> L.Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return L.Trainer(
        **{"accelerator": "cpu", "devices": 1, "max_epochs": 1, "default_root_dir": folder}
        | quiet
        | {"enable_model_summary": False}
        | settings
    )


def data() -> CIFAR10DataModule:
    return CIFAR10DataModule(dataset="synthetic", num_train=40, num_test=8, val_size=8, batch_size=16)


class Watched(LitResNet):
    """Notes what kind of parameters it trains, and can fail while it does."""

    fail = False

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        self.kinds = {type(parameter.data) for parameter in self.network.parameters()}
        if self.fail:
            raise RuntimeError("stopped")
        return super().training_step(*args, **kwargs)


def module() -> Watched:
    L.seed_everything(0, verbose=False)
    return Watched("resnet10", stem="imagenet")


@pytest.mark.usefixtures("_one_process")
@pytest.mark.parametrize("mode", ["fsdp2", "tp"])
@pytest.mark.parametrize(("precision", "steps"), [("32-true", -1), ("bf16-mixed", 1)])
def test_the_module_has_its_plain_network_back_with_the_trained_values(
    mode: str, precision: Any, steps: int, tmp_path: Path
) -> None:
    """In bfloat16 one step: its roundings grow from step to step."""
    model, plain = module(), module()
    network = model.network
    settings = {"precision": precision, "max_steps": steps, "gradient_clip_val": 1.0}
    sharding = trainer(tmp_path, strategy=mode, **settings)
    sharding.fit(model, data())
    trainer(tmp_path, **settings).fit(plain, data())
    assert model.kinds == {DTensor}
    assert plain.kinds == {Tensor}
    assert model.network is network
    assert list(model.state_dict()) == list(plain.state_dict())
    for name, value in plain.state_dict().items():
        assert type(model.state_dict()[name]) is Tensor
        torch.testing.assert_close(model.state_dict()[name], value, msg=name)
    assert not torch.equal(plain.network.conv1.weight, module().network.conv1.weight)
    alone = trainer(tmp_path, precision=precision)
    assert sharding.test(model, data(), verbose=False)[0] == pytest.approx(
        alone.test(plain, data(), verbose=False)[0], rel=1e-2
    )


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


@pytest.mark.usefixtures("_one_process")
@pytest.mark.parametrize(("precision", "computed"), [("bf16-mixed", torch.bfloat16), ("32-true", torch.float32)])
def test_what_computes_in_bfloat16_is_gathered_so(
    precision: Any, computed: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients are summed in float32, which one process cannot show, and a ViT's blocks get float32."""
    policies: list[dict[str, Any]] = []

    def noted(**types: Any) -> MixedPrecisionPolicy:
        policies.append(types)
        return MixedPrecisionPolicy(**types)

    monkeypatch.setattr(fsdp2, "MixedPrecisionPolicy", noted)
    model = Narrow("resnet10", stem="imagenet")
    trainer(tmp_path, strategy="fsdp2", precision=precision, max_steps=1).fit(model, data())
    wide = torch.float32
    assert model.types == {"conv": computed, "fc": computed, "bn": wide, "gradients": {wide}}
    assert {p.dtype for p in model.network.parameters()} == {wide}
    narrow, summed = (computed, wide) if computed == torch.bfloat16 else (None, None)
    assert policies == [{"param_dtype": narrow, "reduce_dtype": summed, "cast_forward_inputs": False}]


@pytest.mark.usefixtures("_one_process")
def test_a_failure_gives_the_plain_network_back(tmp_path: Path) -> None:
    model = module()
    network, model.fail = model.network, True
    with pytest.raises(RuntimeError, match="stopped"):
        trainer(tmp_path, strategy="fsdp2").fit(model, data())
    assert model.kinds == {DTensor}
    assert model.network is network
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


# ---------------------------------------------------------------- tables


@pytest.mark.parametrize(
    ("placements", "coordinate", "rows", "columns"),
    [
        ((Replicate(), Replicate()), [1, 0], range(10), range(4)),
        ((Shard(0), Replicate()), [0, 1], range(0, 4), range(4)),
        ((Shard(0), Replicate()), [2, 1], range(8, 10), range(4)),
        ((Shard(0), Shard(1)), [1, 1], range(4, 8), range(2, 4)),
        # First the halves, 0 to 4 and 5 to 9, then each of them in three.
        ((Shard(0), Shard(0)), [0, 1], range(5, 7), range(4)),
        ((Shard(0), Shard(0)), [2, 0], range(4, 5), range(4)),
    ],
)
def test_parts_are_cut_along_the_model_axis_first(
    placements: Any, coordinate: list[int], rows: range, columns: range
) -> None:
    whole = torch.arange(40).view(10, 4)
    mesh = SimpleNamespace(shape=(3, 2), get_coordinate=lambda: coordinate)
    like: Any = SimpleNamespace(placements=placements, device_mesh=mesh)
    assert torch.equal(local_slice(whole, like), whole[rows.start : rows.stop, columns.start : columns.stop])


def test_a_process_beyond_the_last_row_has_an_empty_part() -> None:
    mesh = SimpleNamespace(shape=(4,), get_coordinate=lambda: [3])
    like: Any = SimpleNamespace(placements=(Shard(0),), device_mesh=mesh)
    assert local_slice(torch.zeros(3, 5), like).shape == (0, 5)


@pytest.mark.parametrize(
    ("sizes", "devices", "num_replicas", "name"),
    [((None, 1), 4, 4, "fsdp2"), ((1, None), 4, 1, "tp"), ((2, 2), 4, 2, "fsdp2"), ((None, 4), 8, 2, "fsdp2")],
)
def test_sizes(sizes: tuple[int | None, int | None], devices: int, num_replicas: int, name: str) -> None:
    strategy = ShardedStrategy(*sizes)
    L.Trainer(accelerator="cpu", devices=devices, strategy=strategy, logger=False)
    assert (strategy.num_replicas, strategy.processes_per_replica) == (num_replicas, devices // num_replicas)
    assert strategy.distributed_sampler_kwargs == {"num_replicas": num_replicas, "rank": 0}
    assert strategy.strategy_name == name


@pytest.mark.parametrize(
    ("sizes", "devices", "message"),
    [
        ((2, 1), 4, r"data_parallel_size=2 x tensor_parallel_size=1 is not 4 processes\n.*--trainer.devices=2"),
        ((3, None), 4, r"data_parallel_size=3 does not divide 4 processes\n.*--trainer.devices=3"),
        ((None, 0), 4, "tensor_parallel_size=0 is less than one"),
        ((None, None), 4, "both are null"),
    ],
)
def test_sizes_that_cannot_work(sizes: tuple[int | None, int | None], devices: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        L.Trainer(accelerator="cpu", devices=devices, strategy=ShardedStrategy(*sizes), logger=False)


@pytest.mark.parametrize(("arch", "num_parts"), [("resnet10", 64), ("vit_micro", 4)])
def test_parts_that_cannot_be_divided_among_the_processes(arch: Any, num_parts: int) -> None:
    strategy = L.Trainer(accelerator="cpu", devices=3, strategy="tp", logger=False).strategy
    with pytest.raises(ConfigError, match=rf"{num_parts} parts, among 3 processes\n.*--trainer.devices=2"):
        strategy.connect(LitResNet(arch))


def test_a_network_without_layers_to_split_is_refused() -> None:
    model = LitResNet("resnet10")
    model.network = torch.nn.Linear(1, 1)
    with pytest.raises(ConfigError, match="Linear does not say which can be split"):
        ShardedStrategy(1, None).connect(model)


def test_a_process_holds_as_much_as_the_plan_says(tmp_path: Path) -> None:
    network: ResNet = build_resnet("resnet10", stem="imagenet")
    whole = sum(parameter.numel() for parameter in network.parameters())
    assert sharding_lines(network, (3, 32, 32), num_replicas=1, each=1, num_bytes=4) == [
        f"a process holds {whole / 1e6:.2f} of {whole / 1e6:.2f} M parameters ({whole * 4 / 1e6:.1f} MB), and as much "
        "of gradients and of each optimizer state"
    ]
    held, sent = sharding_lines(network, (3, 32, 32), num_replicas=2, each=1, num_bytes=4)
    assert "holds 2.46 of 4.91 M parameters (9.8 MB)" in held
    assert f"{1.5 * whole * 4 / 1e6:.1f} MB sent" in sent
    strategy: Any = trainer(tmp_path, strategy="fsdp2", devices=2, precision="64-true").strategy
    strategy.connect(LitResNet("resnet10", stem="imagenet"))
    assert "holds 2.46 of 4.91 M parameters (19.6 MB)" in strategy.split_lines()[0]
    # Input and output of each of the four blocks: 64 x 8 x 8, then twice the channels on a quarter of the pixels.
    values = sum(before + after for before, after in [(4096, 4096), (4096, 2048), (2048, 1024), (1024, 512)])
    assert (
        f"{values / 1e6:.2f} M values" in sharding_lines(network, (3, 32, 32), num_replicas=1, each=2, num_bytes=4)[-1]
    )


# ---------------------------------------------------------------- optimizers


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad])
@pytest.mark.parametrize("mode", ["fsdp2", "tp"])
def test_a_fused_optimizer_that_cannot_step_parts_is_refused_before_the_start(
    mode: str, kind: type[torch.optim.Optimizer], tmp_path: Path
) -> None:
    model = LitResNet("resnet10", optimizer=partial(kind, lr=0.1, fused=True))
    with pytest.raises(ConfigError, match=f"{mode}.*\n.*fused=false") as refused:
        trainer(tmp_path, strategy=mode, devices=2).strategy.connect(model)
    assert kind.__name__ in refused.value.problem


@pytest.mark.usefixtures("_one_process")
def test_the_optimizer_of_any_module_is_looked_at(tmp_path: Path) -> None:
    class Other(Watched):
        """Says nowhere but here what its optimizer is."""

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.network.parameters(), lr=0.1, fused=True)

    with pytest.raises(ConfigError, match="fused SGD"):
        trainer(tmp_path, strategy="fsdp2").fit(Other("resnet10", stem="imagenet"), data())


@pytest.mark.usefixtures("_one_process")
@pytest.mark.parametrize("mode", ["fsdp2", "tp"])
@pytest.mark.parametrize(
    "make", [partial(torch.optim.AdamW, lr=1e-3, fused=True), partial(torch.optim.Adagrad, lr=1e-3)]
)
def test_other_optimizers_step_parts_as_they_step_the_whole(mode: str, make: Any, tmp_path: Path) -> None:
    """Adagrad too, whose state is there before the first step; so are the states that are saved. In channels_last."""
    runs = {}
    for strategy in (mode, "auto"):
        L.seed_everything(0, verbose=False)
        model = LitResNet("resnet10", stem="imagenet", optimizer=make, channels_last=strategy == mode)
        run = trainer(tmp_path, strategy=strategy, precision="64-true")
        run.fit(model, data())
        run.save_checkpoint(tmp_path / f"{strategy}.ckpt")
        runs[strategy] = read_checkpoint(tmp_path / f"{strategy}.ckpt")
    found, expected = runs[mode], runs["auto"]
    torch.testing.assert_close(found["state_dict"], expected["state_dict"], rtol=1e-9, atol=1e-9)
    states = [run["optimizer_states"][0]["state"] for run in (found, expected)]
    torch.testing.assert_close(*states, rtol=1e-9, atol=1e-9)
