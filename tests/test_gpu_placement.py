"""`verify` with fewer GPUs than devices: parts that share one, and modes that are left out."""

from pathlib import Path

import lightning as L
import pytest
import torch
from verifying import settings

from lit_cifar.errors import ConfigError
from lit_cifar.mode import mode_of
from lit_cifar.models import build_resnet
from lit_cifar.strategies import DataParallelStrategy, OneDeviceDDPStrategy
from lit_cifar.tools.modes import placed, sized_modes
from lit_cifar.tools.verify.command import _placed_here, verify_modes
from lit_cifar.tools.verify.configuration import Configuration
from lit_cifar.tools.verify.record import EXACT_BOUND
from lit_cifar.tools.verify.verifier import Verifier
from tests.mutations.self_test import ARGS


@pytest.mark.parametrize(("num_gpus", "suffice"), [(0, True), (1, False), (3, False), (4, True), (8, True)])
def test_parts_share_one_gpu_and_several_leave_every_mode_as_it_is(num_gpus: int, suffice: bool) -> None:
    """On one they have the layout that they have on four."""
    for name, mode in sized_modes(4).items():
        on = placed(mode, num_gpus=num_gpus)
        assert (on == mode) == (suffice or name == "single")
        assert on.devices == (mode.devices if suffice else 1)
        assert on.layout() == mode.layout()


@pytest.mark.filterwarnings("ignore:GPU available but not used")
def test_verify_puts_parts_on_the_one_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    own, wanted = settings(), [sized_modes(2)[name] for name in ("single", "dp", "pp")]
    assert _placed_here(wanted, own) == wanted
    own.config["trainer"]["accelerator"] = "gpu"
    strategies = [mode.strategy for mode in _placed_here(wanted, own)]
    assert strategies == ["auto", "DataParallelStrategy", "OneDevicePipelineStrategy"]
    assert capsys.readouterr().out == "on one GPU: dp\non one GPU: pp\n"


def test_one_device_stands_for_several() -> None:
    strategy = DataParallelStrategy(num_replicas=3)
    strategy.parallel_devices = [torch.device("cpu")]
    assert mode_of(strategy).layout.local_replicas == 3
    assert strategy.make_forward_fn(build_resnet("tiny", stem="imagenet")).num_replicas == 3  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"num_replicas=3.*\n.*num_replicas=4"):
        L.Trainer(accelerator="cpu", devices=2, strategy=DataParallelStrategy(num_replicas=3), logger=False)
    trainer = L.Trainer(accelerator="cpu", devices=1, strategy=OneDeviceDDPStrategy(num_devices=3), logger=False)
    assert trainer.strategy.parallel_devices == [torch.device("cpu")] * 3
    assert (trainer.strategy.num_processes, trainer.strategy._process_group_backend) == (3, "gloo")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_parts_on_one_device_train_what_one_device_trains(tmp_path: Path) -> None:
    """On the CPU in place of the GPU, with everything else as it is there."""
    on_one = [placed(mode, num_gpus=1) for mode in sized_modes(2).values()]
    settings = Configuration.from_flags([*ARGS, "--data.order.drop_last=true"], devices=2, folder=tmp_path)
    rows = verify_modes(Verifier(settings, 3, tmp_path), on_one)
    assert {row.mode: row.problems for row in rows} == {mode.name: [] for mode in on_one}
    assert max(max(row.differences.values()) for row in rows) <= EXACT_BOUND
