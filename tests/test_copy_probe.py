"""Do copies between devices arrive: each injected fault is found and named, and a training refuses what is found."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from commands import TINY, mode_flags, run_here
from faulty_ways import DiesAt, LosesUnderLoad, Raises, SpoiledCollectives
from torch import Tensor, nn
from torch.nn import functional as F

from lit_cifar.copy_probe import CopyFault, DeviceTransport, ProbeError, cache, collective_faults, probe, verdict
from lit_cifar.copy_probe.copy_fault import SENTINEL, classify
from lit_cifar.copy_probe.faulty import FaultyCopies, FaultyTransport
from lit_cifar.copy_probe.virtual_devices import VirtualDevices
from lit_cifar.errors import ConfigError
from lit_cifar.strategies import DataParallelStrategy, DDPLayerParallelStrategy, LayerParallelStrategy
from lit_cifar.strategies.custom_forward import CustomForwardStrategy
from lit_cifar.strategies.layer_parallel import StagedRunner
from lit_cifar.strategies.replicas import EmulatedReplicas

CPU = torch.device("cpu")
CUDA = [torch.device("cuda", 0), torch.device("cuda", 1)]
SIZES = (2**12, 2**16)
FAULT = CopyFault("cuda:0", "cuda:1", "lost", 2**20, "the destination kept its old content")


# ---------------------------------------------------------------- the probe


def test_a_clean_transport_passes_a_hundred_times() -> None:
    assert probe([CPU] * 2, sizes=SIZES, repeats=100) == []


@pytest.mark.parametrize("kind", ["lost", "stale", "torn", "delayed", "flipped"])
def test_each_fault_is_found_and_named_by_pair_kind_and_size(kind: Any) -> None:
    faults = probe([CPU] * 3, transport=FaultyTransport(kind, ("cpu:1", "cpu:2")), sizes=SIZES, repeats=2)
    assert {(fault.source, fault.destination) for fault in faults} == {("cpu:1", "cpu:2")}
    assert [fault.num_bytes for fault in faults if fault.kind == kind] == [*SIZES]
    # Nothing has been sent before the first copy.
    assert {fault.kind for fault in faults} <= ({"lost", "stale"} if kind == "stale" else {kind})


def test_a_copy_that_hangs_is_named_and_the_other_pairs_are_probed() -> None:
    faults = probe([CPU] * 2, transport=FaultyTransport("hung", ("cpu:0", "cpu:1")), sizes=SIZES, limit_s=4.0)
    assert [(fault.source, fault.destination, fault.kind) for fault in faults] == [("cpu:0", "cpu:1", "hung")]


def test_a_fault_of_every_tenth_copy_is_found() -> None:
    transport = FaultyTransport("lost", ("cpu:1", "cpu:0"), every=10)
    (fault,) = probe([CPU] * 2, transport=transport, sizes=SIZES[:1], repeats=10)
    assert (fault.source, fault.destination, fault.kind) == ("cpu:1", "cpu:0", "lost")
    assert "1 of 10 copies, idle" in fault.detail


def test_a_fault_that_needs_other_copies_in_flight_is_found() -> None:
    faults = probe([CPU] * 2, transport=LosesUnderLoad(), sizes=SIZES[:1], repeats=1)
    assert [(fault.source, fault.destination) for fault in faults] == [("cpu:0", "cpu:1"), ("cpu:1", "cpu:0")]
    assert all("under load" in fault.detail for fault in faults)


@pytest.mark.parametrize(
    ("transport", "detail"), [(DiesAt("cpu:1"), "its process ended"), (Raises("cpu:1"), "no link")]
)
def test_a_copy_that_ends_its_process_or_raises_is_named(transport: Any, detail: str) -> None:
    faults = probe([CPU] * 2, transport=transport, sizes=SIZES[:1], repeats=1)
    assert [(fault.source, fault.kind, fault.detail) for fault in faults] == [("cpu:1", "failed", detail)]


def test_too_little_memory_is_no_fault_of_the_copies() -> None:
    with pytest.raises(ProbeError, match="out of memory"):
        probe([CPU] * 2, transport=Raises("cpu:0", torch.OutOfMemoryError("out of memory")), sizes=SIZES[:1])


def test_a_kernel_brings_the_same_content() -> None:
    source, out = torch.arange(10), torch.zeros(10, dtype=torch.int64)
    DeviceTransport("kernel").copy(source, out)
    assert torch.equal(source, out)


SENT = torch.arange(1, 9)
OLD = torch.full((8,), SENTINEL)
HALF = torch.cat([SENT[:4], OLD[4:]])
BIT = SENT ^ torch.tensor([0, 0, 0, 2**40, 0, 0, 0, 0])


@pytest.mark.parametrize(
    ("arrived", "kind", "detail"),
    [
        (OLD, "lost", "old content"),
        (SENT + 100, "stale", "an earlier copy"),
        (HALF, "torn", "32 of 64 bytes did not arrive"),
        (BIT, "flipped", "1 bit of 512 differs"),
        (torch.zeros(8, dtype=torch.int64), "corrupt", "64 of 64 bytes are wrong, all of them zero"),
        (SENT * 1_000_003, "corrupt", "64 of 64 bytes are wrong"),
    ],
)
def test_what_arrived_tells_the_kind(arrived: Tensor, kind: str, detail: str) -> None:
    found, text = classify(arrived, SENT, earlier=[SENT + 100])
    assert found == kind
    assert detail in text


def test_a_fault_is_one_sentence() -> None:
    assert str(FAULT) == "a copy of 1 MiB from cuda:0 to cuda:1 was lost: the destination kept its old content"


# ---------------------------------------------------------------- collectives


def test_collectives_that_arrive() -> None:
    assert collective_faults("gloo", [CPU] * 2, sizes=SIZES) == []


def test_a_collective_with_a_wrong_result_names_rank_and_size() -> None:
    (fault,) = collective_faults("gloo", [CPU] * 2, sizes=SIZES, collectives=SpoiledCollectives(rank=1, hangs=False))
    assert fault.startswith("the all-reduce of 64 KiB went wrong on rank 1: ")


def test_a_collective_that_hangs_is_named() -> None:
    faults = collective_faults(
        "gloo", [CPU] * 2, sizes=SIZES, collectives=SpoiledCollectives(rank=1, hangs=True), limit_s=4.0
    )
    assert faults
    assert all(fault.startswith("the all-reduce of 64 KiB hung on rank ") for fault in faults)


# ---------------------------------------------------------------- what a training refuses


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with two GPUs, a boot id and an empty cache."""
    (tmp_path / "boot_id").write_text("first boot")
    monkeypatch.setattr(cache, "_BOOT_ID", tmp_path / "boot_id")
    monkeypatch.setattr(cache, "_identity", str)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def probes(monkeypatch: pytest.MonkeyPatch, *faults: CopyFault) -> list[Any]:
    """Let the probe find `faults`; returns what has been probed so far."""
    probed: list[Any] = []

    def found(devices: Any, **_: Any) -> Any:
        probed.append(devices)
        return iter(faults)

    monkeypatch.setattr(verdict, "faults_of", found)
    return probed


def test_a_fault_is_refused_with_the_pair_and_what_helps(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probed = probes(monkeypatch, FAULT)
    for _ in range(2):  # a fault is not remembered: it may have been mended
        with pytest.raises(ConfigError) as refused:
            verdict.refuse_faulty_copies(CUDA, strategy="dp")
    message = str(refused.value)
    assert len(message.splitlines()) <= 5
    for words in (str(FAULT), "NCCL_P2P_DISABLE=1", "--trainer.strategy=ddp", "--trainer.devices=1", "IOMMU"):
        assert words in message
    assert len(probed) == 2


def test_devices_without_a_fault_are_probed_once_per_boot(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probed = probes(monkeypatch)
    for _ in range(2):
        verdict.refuse_faulty_copies(CUDA, strategy="dp")
    assert len(probed) == 1
    verdict.refuse_faulty_copies([*CUDA, torch.device("cuda", 2)], strategy="dp")
    (machine / "boot_id").write_text("second boot")
    verdict.refuse_faulty_copies(CUDA, strategy="dp")
    assert len(probed) == 3


@pytest.mark.parametrize("content", ["", "{", '{"host": "another"}', "[]"])
def test_a_damaged_cache_is_no_result(machine: Path, monkeypatch: pytest.MonkeyPatch, content: str) -> None:
    cache.remember_clean(CUDA)
    (file,) = (machine / "cache").rglob("*.json")
    assert cache.known_clean(CUDA)
    file.write_text(content)
    assert not cache.known_clean(CUDA)


def test_nothing_is_remembered_without_a_boot_id_or_a_folder(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (machine / "cache").touch()  # a file
    cache.remember_clean(CUDA)
    assert not cache.known_clean(CUDA)
    (machine / "cache").unlink()
    (machine / "boot_id").unlink()
    cache.remember_clean(CUDA)
    assert not cache.known_clean(CUDA)


def test_a_probe_that_cannot_run_does_not_stop_a_training(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise ProbeError("no memory")

    monkeypatch.setattr(verdict, "faults_of", fails)
    with pytest.warns(UserWarning, match="no memory"):
        verdict.refuse_faulty_copies(CUDA, strategy="dp")
    assert not cache.known_clean(CUDA)


class Environment:
    """As much of a cluster environment as is asked."""

    def __init__(self, local_rank: int = 0) -> None:
        self.rank = local_rank

    def local_rank(self) -> int:
        return self.rank

    def world_size(self) -> int:
        return 2


def refused(monkeypatch: pytest.MonkeyPatch, strategy: CustomForwardStrategy, *, local_rank: int = 0) -> list[Any]:
    """The groups of devices that a strategy probes when it is set up."""
    found: list[Any] = []
    monkeypatch.setattr(
        "lit_cifar.strategies.custom_forward.refuse_faulty_copies", lambda devices, strategy: found.append(devices)
    )
    monkeypatch.setattr("lightning.pytorch.strategies.ParallelStrategy.setup_environment", lambda self: None)
    monkeypatch.setattr("lightning.pytorch.strategies.DDPStrategy.setup_environment", lambda self: None)
    strategy.cluster_environment = Environment(local_rank)  # type: ignore[assignment]
    strategy.setup_environment()
    return found


def test_modes_that_copy_between_cuda_devices_probe_them(monkeypatch: pytest.MonkeyPatch) -> None:
    four = [torch.device("cuda", index) for index in range(4)]
    assert refused(monkeypatch, DataParallelStrategy(parallel_devices=four)) == [four]
    assert refused(monkeypatch, LayerParallelStrategy(num_stages=4, parallel_devices=CUDA)) == [CUDA]
    ddp_mp = DDPLayerParallelStrategy(parallel_devices=four)
    assert refused(monkeypatch, ddp_mp) == [four[:2], four[2:]]
    assert refused(monkeypatch, ddp_mp, local_rank=1) == []


@pytest.mark.parametrize("devices", [[CPU, CPU], CUDA[:1], [torch.device("meta", 0), torch.device("meta", 1)]])
def test_other_devices_and_one_device_are_not_probed(
    devices: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert refused(monkeypatch, DataParallelStrategy(num_replicas=2, parallel_devices=devices)) == []
    assert refused(monkeypatch, LayerParallelStrategy(num_stages=2, parallel_devices=devices)) == []


def test_only_a_mode_of_one_process_probes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """With several processes the others would wait, and the watchdog would end them."""
    four = [torch.device("cuda", index) for index in range(4)]
    monkeypatch.setattr("lit_cifar.strategies.custom_forward.blame", lambda devices: (True, str(devices)))
    assert DataParallelStrategy(parallel_devices=CUDA).examine_copies() == (True, str(CUDA))
    assert LayerParallelStrategy(num_stages=4, parallel_devices=CUDA).examine_copies() == (True, str(CUDA))
    ddp_mp = DDPLayerParallelStrategy(parallel_devices=four)
    ddp_mp.cluster_environment = Environment()  # type: ignore[assignment]
    faulty, found = ddp_mp.examine_copies()
    assert not faulty
    assert "python -m lit_cifar doctor" in found
    assert DataParallelStrategy(parallel_devices=[CPU, CPU]).examine_copies() == (False, "")


# ---------------------------------------------------------------- a training over a faulty transport


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)
    return nn.Sequential(*layers).double()


def gradients(model: nn.Module, runner: Any) -> list[Tensor]:
    images = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    F.cross_entropy(runner(images), torch.arange(8) % 3).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None] + [*model.buffers()]


def test_replicas_that_copy_compute_what_replicas_of_one_memory_compute() -> None:
    with_copies, without = network(), network()
    devices = VirtualDevices(DeviceTransport())
    found = gradients(with_copies, EmulatedReplicas(with_copies, num_replicas=3, virtual_devices=devices))
    expected = gradients(without, EmulatedReplicas(without, num_replicas=3))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_stages_that_copy_compute_what_stages_of_one_memory_compute() -> None:
    found, expected = (
        gradients(model, StagedRunner([model[:2], model[2:]], [CPU, CPU], num_microbatches=2, virtual_devices=virtual))
        for model, virtual in ((network(), VirtualDevices(DeviceTransport())), (network(), None))
    )
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("mode", ["dp", "mp"])
def test_every_copy_of_a_mode_passes_the_transport(mode: str) -> None:
    """Parameters, buffers, images, logits; activations and logits; and the gradients of all of them."""
    model, transport = network(), FaultyTransport("lost", every=10**9)
    devices = VirtualDevices(transport)
    runner: Any = EmulatedReplicas(model, num_replicas=2, virtual_devices=devices)
    if mode == "mp":
        runner = StagedRunner([model[:2], model[2:]], [CPU, CPU], virtual_devices=devices)
    gradients(model, runner)
    # dp: 6 parameters, 2 statistics, a chunk and logits; back the gradients of the parameters and of the logits.
    assert transport.num_copies == {"dp": 6 + 2 + 1 + 1 + 6 + 1, "mp": 4}[mode]


def faulty(kind: str) -> list[str]:
    return [
        "--trainer.callbacks+=lit_cifar.copy_probe.faulty.FaultyCopies",
        f"--trainer.callbacks.kind={kind}",
        "--trainer.callbacks+=stopping.NotANumber",
        "--trainer.callbacks.step=2",
    ]


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        ("torn", "copies between the devices do not arrive, and may be the cause: a copy of 4 KiB from cpu:0 to cpu:1"),
        ("none", "copies between the devices arrive, they were probed again; so the optimisation has diverged"),
    ],
)
@pytest.mark.parametrize("mode", ["dp", "mp"])
def test_a_loss_that_is_not_finite_names_its_cause(kind: str, cause: str, mode: str, tmp_path: Path) -> None:
    result = run_here("fit", *TINY, *mode_flags(mode), *faulty(kind), f"--run_dir={tmp_path / 'run'}")
    assert result.status == 1
    assert cause in result.stderr
    assert len(result.stderr.splitlines()) <= 5


def test_a_small_network_meets_old_tensors_in_a_small_memory() -> None:
    strategy = mock.Mock(copying_devices=[[0, 1]], root_device=torch.device("cpu"))
    FaultyCopies("lost", memory_bytes=256).setup(mock.Mock(strategy=strategy), mock.Mock(), "fit")
    arrived = [strategy.virtual_devices.copy(torch.full((64,), value), 0, 1) for value in (1.0, 2.0)]
    assert [tensor.tolist() for tensor in arrived] == [[0.0] * 64] * 2, "nothing is sent from where it arrives"
    strategy.virtual_devices.copy(torch.full((64,), 3.0), 1, 0)
    assert strategy.virtual_devices.copy(torch.full((64,), 4.0), 0, 1).tolist() == [3.0] * 64


def test_without_copies_the_learning_rate_is_to_blame(tmp_path: Path) -> None:
    spoiled = ["--trainer.callbacks+=stopping.NotANumber", "--trainer.callbacks.step=2"]
    result = run_here("fit", *TINY, "--trainer.devices=1", *spoiled, f"--run_dir={tmp_path / 'run'}")
    assert "the optimisation has diverged: try a lower --model.optimizer.lr" in result.stderr
    assert "copies" not in result.stderr


def test_before_the_first_step_the_data_are_to_blame(tmp_path: Path) -> None:
    spoiled = ["--trainer.callbacks+=stopping.NotANumber", "--trainer.callbacks.step=0"]
    result = run_here("fit", *TINY, "--trainer.devices=1", *spoiled, f"--run_dir={tmp_path / 'run'}")
    assert "no step had been taken before: look at the images and labels" in result.stderr


def test_faulty_copies_need_devices_between_which_tensors_are_copied(tmp_path: Path) -> None:
    result = run_here("fit", *TINY, "--trainer.devices=1", *faulty("lost"), f"--run_dir={tmp_path / 'run'}")
    assert result.status == 2
    assert "--trainer.strategy=dp or mp" in result.stderr
