"""Options for GPUs in every mode: each cell of the table in docs/modes.md works, or is refused with its reason."""

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from commands import TINY, launch, mode_flags, run_here
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn

from lit_cifar import CIFAR10DataModule, LitResNet
from lit_cifar.checkpoints import read_checkpoint
from lit_cifar.cli import CLI
from lit_cifar.cli_errors import check_clipping
from lit_cifar.commands.verify import checkpoint as verified
from lit_cifar.commands.verify.checkpoint import Evaluation
from lit_cifar.commands.verify.compare import EXACT_BOUND
from lit_cifar.commands.verify.modes import Mode, modes
from lit_cifar.commands.verify.placing import placed
from lit_cifar.commands.verify.records import Record
from lit_cifar.commands.verify.rows import Row
from lit_cifar.commands.verify.runs import Outcome
from lit_cifar.commands.verify.settings import Settings
from lit_cifar.commands.verify.verifier import Verifier, _possible
from lit_cifar.errors import ConfigError
from lit_cifar.layout import Chunks, Layout
from lit_cifar.models import build_resnet, compiled
from lit_cifar.models.compiled import Compiled
from lit_cifar.models.memory_format import follow_parameters, plain, with_plain_gradient
from lit_cifar.strategies import DataParallelStrategy, OneDeviceDDPStrategy
from lit_cifar.strategies.loss_scaling import AgreedGradScaler, agree_on_overflow, loss_scale

PAGE = Path(__file__).parents[1] / "docs" / "modes.md"
DEVICES = {"single": 1, "ddp_mp": 4, "ddp_pp": 4}
HERE = str(Path(__file__).parent)
STEP: dict[str, Any] = {
    "loss": 1.0,
    "state": {"weight": torch.zeros(2)},
    "buffers": [],
    "optimizer": {"state": {}, "param_groups": []},
}

# ---------------------------------------------------------------- the table


def table() -> dict[tuple[str, str], str]:
    """What the page says of every option and mode: "yes", "GPU", or the letter of a reason why not."""
    lines = PAGE.read_text().split("## Options for GPUs")[1].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    (_, *names), _, *rest = rows[: next(i for i, row in enumerate(rows) if row[0] == "reason")]
    return {
        (" ".join(re.findall(r"--[^`]+", option)), name.strip("`").replace("one device", "single")): cell
        for option, *cells in rest
        for name, cell in zip(names, cells, strict=True)
    }


def reasons() -> dict[str, str]:
    """By letter, the words that a refusal begins with."""
    return dict(re.findall(r'^\| \(([a-z])\) \| "(.+?)" \|', PAGE.read_text(), flags=re.MULTILINE))


CELLS = table()


def test_the_table_is_whole() -> None:
    options, names = {option for option, _ in CELLS}, [name for option, name in CELLS if "compile" in option]
    assert names == ["single", "dp", "ddp", "ddp_spawn", "mp", "ddp_mp", "pp", "ddp_pp", "fsdp2", "tp"]
    assert len(CELLS) == len(options) * len(names)
    cells = {"d" if cell == "GPU" else cell.strip("()") for cell in CELLS.values()}
    assert cells == {"yes", *reasons()}
    for words in ("channels_last", "compile", "fused", "bf16-mixed", "16-mixed", "bf16-true", "64-true", "benchmark"):
        assert any(words in option for option in options)


REFUSED = [pytest.param(*key, cell, id=" ".join(key)) for key, cell in CELLS.items() if cell != "yes"]


@pytest.mark.parametrize(("option", "mode", "cell"), REFUSED)
def test_a_refusal_is_the_documented_one(option: str, mode: str, cell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, and before any process is started."""
    monkeypatch.setattr(CLI, "_run_subcommand", CLI._check)
    result = run_here("fit", *TINY, *mode_flags(mode, DEVICES.get(mode, 2)), *option.split())
    assert result.status == 2
    lines = [line for line in result.stderr.splitlines() if "Automatic Mixed Precision" not in line]
    assert 2 <= len(lines) <= 5
    assert reasons()["d" if cell == "GPU" else cell.strip("()")] in " ".join(" ".join(lines).split())


def test_synchronised_batchnorm_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CLI, "_run_subcommand", CLI._check)
    flags = [*TINY, *mode_flags("ddp"), "--model.compile=true", "--trainer.sync_batchnorm=true"]
    result = run_here("fit", *flags)
    assert result.status == 2
    assert "the communication in every BatchNorm layer" in result.stderr
    assert len(result.stderr.splitlines()) == 2


def test_a_backward_in_two_pieces_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CLI, "_run_subcommand", CLI._check)
    flags = [*mode_flags("PipelineStrategy"), "--trainer.strategy.schedule=ZBVZeroBubble", "--model.compile=true"]
    result = run_here("fit", *TINY, *flags)
    assert result.status == 2
    assert "ZBVZeroBubble cuts backward in two" in result.stderr
    assert len(result.stderr.splitlines()) == 2


# ---------------------------------------------------------------- what works

# Accumulated and clipped gradients, and a ragged last batch.
BASE = [
    "--model.arch=tiny",
    "--model.stem=imagenet",
    "--model.optimizer.lr=0.02",
    "--data.dataset=synthetic",
    "--data.num_train=175",
    "--data.val_size=15",
    "--data.batch_size=64",
    "--trainer.accumulate_grad_batches=2",
    "--trainer.gradient_clip_val=0.5",
]
ROUNDED = ("bf16-true", "16-true")  # too coarse for `verify`


def cells(*endings: str) -> list[Any]:
    """The option and the mode wherever an option works whose flags end so; the whole table takes many minutes."""
    works = [key for key, cell in CELLS.items() if cell == "yes" and key[0].endswith(endings)]
    return [pytest.param(*key, id=" ".join(key), marks=pytest.mark.exhaustive) for key in works]


class Verifiers:
    """One for each option; the one device is compared with several of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._found: dict[str, Verifier] = {}

    def of(self, option: str) -> Verifier:
        if option not in self._found:
            flags = [*BASE, *option.split()]
            flags += [] if "precision" in option else ["--trainer.precision=64-true"]
            if "compile" in option:
                flags.append("--trainer.callbacks+=option_backends.QuickCompiler")
            folder = self.folder / f"{len(self._found)}"
            folder.mkdir()
            settings = Settings.of(flags, devices=4, folder=folder)
            self._found[option] = Verifier(settings, 3, folder, lambda line: None)
            if not re.search("fused|bf16", option):  # the others change nothing in what one device computes
                self._found[option]._references = self._references
        return self._found[option]

    _references: dict[Any, Any] = {}  # noqa: RUF012  # of this module's runs


def compared(verifier: Verifier, mode: Mode) -> Row:
    reference = verifier.reference(verifier.chunks_of(mode))
    (row,) = [
        verifier.judge(mode, outcome, folder, reference) for _, outcome, folder in verifier.outcomes([(mode, None)])
    ]
    return row


@pytest.fixture(scope="module")
def verifiers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Verifiers]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", HERE)
        yield Verifiers(tmp_path_factory.mktemp("options"))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("option", "mode"), cells("=true", "=64-true"))
def test_a_mode_with_an_option_trains_what_one_device_trains_without(
    option: str, mode: str, verifiers: Verifiers
) -> None:
    row = compared(verifiers.of(option), modes(max(2, DEVICES.get(mode, 2)))[mode])
    assert row.problems == []
    assert max(row.differences.values()) <= EXACT_BOUND


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("option", "mode"), cells("bf16-mixed"))
def test_a_mode_rounds_as_one_device_rounds(option: str, mode: str, verifiers: Verifiers) -> None:
    row = compared(verifiers.of(option), modes(max(2, DEVICES.get(mode, 2)))[mode])
    assert row.problems == []


def losses(run: Path) -> list[float]:
    """Of every step, of the first process's share."""
    header, *lines = [line.split(",") for line in (run / "metrics.csv").read_text().splitlines()]
    column = header.index("train/loss")
    return [float(line[column]) for line in lines if line[column]]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("option", "mode"), cells(*ROUNDED))
def test_a_mode_trains_in_a_narrow_type(option: str, mode: str, tmp_path: Path) -> None:
    flags = [*TINY, *option.split(), "--model.optimizer.lr=0.001", "--watchdog.timeout_s=0"]
    launch("fit", *flags, *mode_flags(mode, DEVICES.get(mode, 2)), f"--run_dir={tmp_path / 'run'}")
    launch("fit", *flags, f"--run_dir={tmp_path / 'alone'}")
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "alone"), rel=0.1)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_the_one_device_goes_without_what_the_modes_are_to_show_equal(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []

    def note(self: Verifier, title: str, folder: Path, flags: list[str], trace: dict[str, str]) -> Outcome:
        started.append([*self.settings.flags, *flags])
        return Outcome(0, "", "", 0.0)

    monkeypatch.setattr(Verifier, "_fit", note)
    monkeypatch.setattr(Record, "num_steps", 2)
    monkeypatch.setattr(Record, "step", lambda self, number: STEP)
    config = {"trainer": {"precision": precision, "accelerator": "cpu"}, "data": {"batch_size": 8, "val_size": 0}}
    settings = Settings(("--model.compile=true", "--model.channels_last=true", f"--precision={precision}"), config)
    reference = Verifier(settings, 2, tmp_path, lambda line: None).reference(Chunks())
    last = [dict(flag.split("=", 1) for flag in flags if "=" in flag) for flags in started]
    assert all((flags["--model.compile"], flags["--model.channels_last"]) == ("false", "false") for flags in last)
    precisions = Counter(flags.get("--trainer.precision") for flags in last)
    assert precisions == {None: 3} | ({} if precision == "32-true" else {"32-true": 1})
    assert len(reference.bounds) == 2


@pytest.mark.parametrize(("right", "passes"), [(50, True), (54, True), (55, False), (45, False)])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_an_evaluation_may_differ_by_what_rounding_turns(
    right: int, passes: bool, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One answer of a hundred is another in float32: four times that."""

    def alone(path: Path, *, config: Any, precision: str | None = None) -> Evaluation:
        return Evaluation((50 if precision is None else 51, 100), {"val/acc": 0.5 if precision is None else 0.51})

    monkeypatch.setattr(verified, "evaluated_alone", alone)
    config = {"trainer": {"precision": precision}}
    found = {("val/acc", 3): right / 100}
    problems = verified.evaluation_problems(Path(), counts=(right, 100), found=found, config=config)
    assert (problems == []) == (passes and (right == 50 or precision == "bf16-mixed"))
    assert verified.evaluation_problems(Path(), counts=(50, 99), found={}, config=config) != []


# ---------------------------------------------------------------- channels_last


def channels_last(tensor: Tensor) -> bool:
    return tensor.is_contiguous(memory_format=torch.channels_last)


def data() -> CIFAR10DataModule:
    return CIFAR10DataModule(dataset="synthetic", num_train=40, num_test=1, val_size=8, batch_size=16)


def fit(model: LitResNet, folder: Path, **settings: Any) -> L.Trainer:
    trainer = L.Trainer(
        accelerator="cpu",
        logger=False,
        max_epochs=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=folder,
        **{"devices": 1} | settings,
    )
    trainer.fit(model, data())
    return trainer


class Seen(LitResNet):
    """Notes whether activations and the network's weights lie pixel by pixel."""

    def on_train_start(self) -> None:
        layer = self.network.layer1[0].conv2
        self.weight = channels_last(layer.weight)
        layer.register_forward_hook(lambda layer, inputs, output: setattr(self, "output", channels_last(output)))


# What Lightning says of this run, of few batches and in an old way of torch's.
short = pytest.mark.filterwarnings("ignore:.*(does not have many workers|smaller than the logging interval|LeafSpec)")


@short
@pytest.mark.parametrize(("mode", "weights"), [("auto", True), ("dp", True), ("mp", True)])
@pytest.mark.parametrize("asked", [True, False])
def test_activations_and_weights_lie_as_asked(mode: str, weights: bool, asked: bool, tmp_path: Path) -> None:
    model = Seen("tiny", stem="imagenet", channels_last=asked)
    fit(model, tmp_path, strategy=mode)
    assert (model.output, model.weight) == (asked, weights and asked)


@short
def test_checkpoints_lie_in_the_usual_order_and_are_read_into_the_one_asked_for(tmp_path: Path) -> None:
    paths, optimizers = {}, {}
    for asked in (True, False):
        L.seed_everything(0, verbose=False)
        model = LitResNet("tiny", stem="imagenet", channels_last=asked)
        trainer = fit(model, tmp_path, precision="64-true")
        paths[asked], optimizers[asked] = tmp_path / f"{asked}.ckpt", trainer.optimizers[0]
        trainer.save_checkpoint(paths[asked])
    found, expected = (read_checkpoint(paths[asked]) for asked in (True, False))
    assert list(found["state_dict"]) == list(expected["state_dict"])
    torch.testing.assert_close(found["state_dict"], expected["state_dict"], rtol=1e-9, atol=1e-9)
    momentum = [entry["momentum_buffer"] for entry in found["optimizer_states"][0]["state"].values()]
    assert all(tensor.is_contiguous() for tensor in (*found["state_dict"].values(), *momentum))

    optimizer = optimizers[True]
    optimizer.load_state_dict(found["optimizer_states"][0])
    assert all(state["momentum_buffer"].stride() == p.stride() for p, state in optimizer.state.items())


def test_a_fused_kernel_would_take_what_lies_otherwise_for_other_values() -> None:
    """Why an optimizer's state follows its parameters."""

    def stepped(*, follow: bool, fused: bool) -> Tensor:
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(8, 4, 3, 3).to(memory_format=torch.channels_last))
        optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9, fused=fused)
        if follow:
            optimizer.register_load_state_dict_post_hook(follow_parameters)
        for _ in range(2):
            weight.grad = torch.randn(8, 4, 3, 3).to(memory_format=torch.channels_last)
            optimizer.step()
            optimizer.load_state_dict(plain(optimizer.state_dict()))
        return weight.detach()

    expected = stepped(follow=False, fused=False)
    torch.testing.assert_close(stepped(follow=True, fused=True), expected)
    assert not torch.allclose(stepped(follow=False, fused=True), expected)  # torch 2.11 to 2.15


def test_a_gradient_lies_as_it_is_sent() -> None:
    x = torch.randn(2, 4, 3, 3, requires_grad=True)
    seen = []
    y = with_plain_gradient(x)
    y.register_hook(lambda grad: seen.append(grad.is_contiguous()))
    (grad,) = torch.autograd.grad(y, x, torch.ones_like(y).to(memory_format=torch.channels_last))
    assert grad.is_contiguous()
    assert seen == [False]


# ---------------------------------------------------------------- compile


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    """The shape of the images of every graph that is compiled, by a compiler that only writes that down."""
    found: list[tuple[int, ...]] = []

    def note(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        found.append(next(tuple(x.shape) for x in inputs if isinstance(x, Tensor) and not x.requires_grad))
        return graph.forward

    monkeypatch.setattr(compiled, "BACKEND", note)
    torch._dynamo.reset()
    limit = torch._dynamo.config.recompile_limit
    yield found
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = limit


def test_the_largest_batch_is_compiled_and_a_ragged_one_is_not(graphs: list[tuple[int, ...]]) -> None:
    network = nn.Sequential(nn.Linear(3, 3))
    run = Compiled(network)
    for num_samples in (4, 4, 2, 8, 8, 4):
        images = torch.randn(num_samples, 3)
        torch.testing.assert_close(run(images), network(images))
    assert graphs == [(4, 3), (8, 3)]
    network.eval()
    for num_samples in (6, 6, 2):
        run(torch.randn(num_samples, 3))
    assert graphs == [(4, 3), (8, 3), (6, 3)]


@short
def test_a_compiled_network_keeps_its_names_and_can_be_copied(
    graphs: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    found = {}
    for asked in (True, False):
        L.seed_everything(0, verbose=False)
        model = LitResNet("tiny", stem="imagenet", compile=asked)
        before = list(model.state_dict())
        trainer = fit(model, tmp_path, precision="64-true")
        assert list(model.state_dict()) == before
        deepcopy(model)
        trainer.save_checkpoint(tmp_path / "a.ckpt")
        found[asked] = read_checkpoint(tmp_path / "a.ckpt")["state_dict"]
    torch.testing.assert_close(found[True], found[False], rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kernels_are_made_for_the_ragged_batch_too(tmp_path: Path) -> None:
    """With torch's own compiler, in two processes, under a watchdog of short patience."""
    flags = [*TINY, "--data.num_train=60", "--trainer.strategy=ddp", "--trainer.devices=2", "--watchdog.timeout_s=5"]
    launch("fit", *flags, "--model.compile=true", f"--run_dir={tmp_path / 'run'}", timeout_s=580, ranks=2)
    launch("fit", *flags, f"--run_dir={tmp_path / 'plain'}", ranks=2)
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "plain"), rel=1e-2)


# ---------------------------------------------------------------- 16-mixed


def scaled(init_scale: float = 1024.0) -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=init_scale))


def test_a_scaler_keeps_its_settings_when_it_learns_to_ask() -> None:
    precision = scaled()
    agree_on_overflow(precision)
    assert isinstance(precision.scaler, AgreedGradScaler)
    assert float(loss_scale(precision, torch.device("cpu"))) == 1024.0
    assert loss_scale(MixedPrecision("bf16-mixed", "cpu"), torch.device("cpu")) == 1.0


@pytest.mark.parametrize(("fused", "clip", "refused"), [(True, 1.0, True), (True, None, False), (False, 1.0, False)])
def test_what_a_fused_kernel_scales_back_is_not_clipped(fused: bool, clip: float | None, refused: bool) -> None:
    trainer = L.Trainer(accelerator="cpu", plugins=[scaled()], gradient_clip_val=clip, logger=False)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1, fused=fused)
    with pytest.raises(ConfigError, match=r"clip_val=1\.0.*fused=true") if refused else nullcontext():
        check_clipping(trainer, optimizer)


@pytest.mark.parametrize("elsewhere", [0.0, 1.0])
def test_a_step_is_left_out_where_another_process_has_overflowed(
    elsewhere: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, op: tensor.clamp_(min=elsewhere))
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = AgreedGradScaler("cpu", init_scale=4.0)
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert (scaler.get_scale(), weight[0].item()) == ((2.0, 1.0) if elsewhere else (4.0, 0.0))


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("mode", "chunks"), [("pp", "num_microbatches=4"), ("fsdp2", "num_shards=2"), ("tp", "")])
def test_all_processes_leave_out_a_step_in_which_one_has_overflowed(mode: str, chunks: str, tmp_path: Path) -> None:
    """And otherwise train what one device trains in 16-mixed; on the CPU, where torch scales too, but Lightning not."""
    flags = [*TINY, "--model.optimizer.lr=0.01", "--trainer.plugins=lightning.pytorch.plugins.MixedPrecision"]
    flags += ["--trainer.plugins.precision=16-mixed", "--trainer.plugins.device=cpu"]
    flags += ["--trainer.callbacks+=option_backends.Overflow"]
    paths = {name: tmp_path / name for name in ("run", "alone")}
    of_mode = {"run": mode_flags(mode), "alone": [f"--model.batchnorm_chunks.{chunks}"] if chunks else []}
    for name, path in paths.items():
        arguments = [*flags, f"--trainer.callbacks.path={tmp_path / f'{name}_scale'}", *of_mode[name]]
        launch("fit", *arguments, f"--run_dir={path}", ranks=2 if name == "run" else 1)
    scales = [(tmp_path / name).read_text().split() for name in ("run_scale0", "run_scale1", "alone_scale0")]
    assert scales == [["1024.0", *["512.0"] * 4]] * 3
    found, expected = (read_checkpoint(path / "checkpoints" / "last.ckpt") for path in paths.values())
    assert found["MixedPrecision"] == expected["MixedPrecision"]
    assert all(tensor.isfinite().all() for tensor in found["state_dict"].values())
    assert losses(paths["run"]) == pytest.approx(losses(paths["alone"]), rel=0.02)


# ---------------------------------------------------------------- several parts on one GPU


def places(num_gpus: int, devices: int = 2) -> dict[str, tuple[str, int] | None]:
    """What every mode is started as, and on how many GPUs; None where it is left out."""
    found: dict[str, tuple[str, int] | None] = {}
    for name, mode in modes(devices).items():
        try:
            on = placed(mode, num_gpus=num_gpus)
            found[name] = on.strategy, on.devices
        except ConfigError:
            found[name] = None
    return found


def test_enough_gpus_and_the_cpu_leave_every_mode_as_it_is() -> None:
    usual = {name: (mode.strategy, mode.devices) for name, mode in modes(2).items()}
    assert places(0) == places(2) == places(8) == usual


def test_on_one_gpu_parts_share_it() -> None:
    assert places(1) == {
        "single": ("auto", 1),
        "dp": ("DataParallelStrategy", 1),
        "ddp": ("OneDeviceDDPStrategy", 1),
        "ddp-sync": ("OneDeviceDDPStrategy", 1),
        "ddp_spawn": ("OneDeviceDDPStrategy", 1),
        "mp": ("LayerParallelStrategy", 1),
        "mp-micro": ("LayerParallelStrategy", 1),
        "ddp_mp": ("OneDeviceDDPLayerParallelStrategy", 1),
        "pp": None,
        "ddp_pp": None,
        "fsdp2": None,
        "tp": ("OneDeviceShardedStrategy", 1),
    }
    assert places(1, devices=4)["fsdp2-tp"] is None
    assert places(3, devices=4)["dp"] == ("DataParallelStrategy", 1)


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("name", [name for name, place in places(1).items() if place])
def test_a_mode_that_shares_a_gpu_computes_the_same(name: str, devices: int) -> None:
    mode = modes(devices)[name]
    on = placed(mode, num_gpus=1)
    assert (on.num_processes, on.layout()) == (mode.num_processes, mode.layout())
    assert on.sync_batchnorm == mode.sync_batchnorm


def test_what_cannot_share_a_gpu_is_refused_by_its_name() -> None:
    with pytest.raises(ConfigError, match=r"pp on 2 devices sends activations.*\n.*--trainer\.accelerator=cpu"):
        placed(modes(2)["pp"], num_gpus=1)


def test_verify_puts_the_parts_of_a_mode_on_the_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name in ("module", "train_sampler"):
        monkeypatch.setattr(Settings, name, lambda self: None)
    monkeypatch.setattr(Mode, "check", lambda *args: None)
    found: dict[str, list[str]] = {}
    for accelerator in ("gpu", "cpu"):
        settings, said = Settings((), {"trainer": {"accelerator": accelerator}}), []
        wanted = [modes(2)[name] for name in ("single", "dp", "pp")]
        found[accelerator] = [mode.strategy for mode in _possible(wanted, settings, said.append, leave_out=True)] + said
    assert found["cpu"] == ["auto", "dp", "PipelineStrategy"]
    *places, on, left = found["gpu"]
    assert places == ["auto", "DataParallelStrategy"]
    assert on == "on one GPU: dp"
    assert left.startswith("left out pp: pp on 2 devices sends activations")


def test_replicas_on_one_device() -> None:
    strategy = DataParallelStrategy(num_replicas=3)
    strategy.parallel_devices = [torch.device("cpu")]
    assert Layout.of(strategy).replicas_per_shard == 3
    network = build_resnet("tiny", stem="imagenet")
    assert strategy.make_runner(network).num_replicas == 3  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"num_replicas=3.*\n.*num_replicas=4"):
        L.Trainer(accelerator="cpu", devices=2, strategy=DataParallelStrategy(num_replicas=3), logger=False)


def test_one_device_stands_for_several() -> None:
    trainer = L.Trainer(accelerator="cpu", devices=1, strategy=OneDeviceDDPStrategy(num_devices=3), logger=False)
    assert trainer.strategy.parallel_devices == [torch.device("cpu")] * 3
    assert (trainer.strategy.num_processes, trainer.strategy._process_group_backend) == (3, "gloo")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["dp", "ddp", "ddp_spawn", "ddp_mp", "tp"])
def test_parts_on_one_device_train_what_one_device_trains(name: str, verifiers: Verifiers) -> None:
    """On the CPU in place of the GPU, with everything else as it is there."""
    row = compared(verifiers.of("--model.channels_last=false"), placed(modes(2)[name], num_gpus=1))
    assert row.problems == []
    assert max(row.differences.values()) <= EXACT_BOUND
