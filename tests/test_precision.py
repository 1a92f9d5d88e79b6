"""What `fit` chooses by the processor: it leaves alone what a user has set and what a run had before."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import TINY, run_here
from jsonargparse import Namespace

from lit_cifar.models import precision
from lit_cifar.models.precision import choose_fast, keep_choice
from lit_cifar.reporting.run_folder import of_checkpoint

NAMES = ("trainer.precision", "model.channels_last", "trainer.benchmark", "model.optimizer.init_args.fused")
CHOSEN_ON_CPU, CHOSEN_ON_GPU = ("bf16-mixed", True, None, None), ("bf16-mixed", True, True, True)
OTHERS = {"trainer.deterministic": None, "trainer.num_nodes": 1, "trainer.strategy": "ddp", "virtual_replicas": None}
OTHERS |= {"trainer.plugins": None, "model.network": None, "model.optimizer.class_path": "lit_cifar.NesterovSGD"}


def settings(accelerator: str = "cpu", **given: Any) -> Namespace:
    """Settings of a fit; of a name in `given` two underscores are a dot."""
    asked = Namespace()
    for name, value in (dict.fromkeys(NAMES) | OTHERS | {"trainer.accelerator": accelerator} | given).items():
        asked[name.replace("__", ".")] = value
    return asked


@pytest.mark.parametrize("accelerator", ["cpu", "auto"])
@pytest.mark.parametrize(
    ("has_bf16", "given", "chosen"),
    [
        (True, {}, ...),
        (True, {"trainer__precision": "bf16-mixed"}, ...),
        (True, {"model__channels_last": False}, ...),
        (False, {}, (None, None, None, None)),
        (True, {"trainer__precision": "64-true"}, ("64-true", None, None, None)),
        (False, {"trainer__precision": "bf16-mixed"}, ("bf16-mixed", None, None, None)),
        (False, {"model__channels_last": True}, (None, True, None, None)),
        (True, {"trainer__deterministic": True}, (None, None, None, None)),
        (True, {"trainer__num_nodes": 2}, (None, None, None, None)),
        (True, {"virtual_replicas": 4}, (None, None, None, None)),
        (True, {"trainer__plugins": ["MixedPrecision"]}, (None, None, None, None)),
        (True, {"model__network": Namespace(class_path="torch.nn.Flatten")}, (None, None, None, None)),
    ],
)
def test_what_is_fast_here_and_left_open_is_chosen(
    has_bf16: bool, given: dict[str, Any], chosen: Any, accelerator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "cpu_has_bf16", lambda: has_bf16)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation: has_bf16)
    asked = settings(accelerator, **given)
    said = choose_fast(asked)
    if chosen is ...:
        usual = CHOSEN_ON_CPU if accelerator == "cpu" else CHOSEN_ON_GPU
        chosen = tuple(given.get(name.replace(".", "__"), value) for name, value in zip(NAMES, usual, strict=True))
    assert tuple(asked.get(name) for name in NAMES) == chosen
    assert bool(said) == (asked.trainer.precision == "bf16-mixed" and "trainer__precision" not in given)


REFUSING_FUSED: dict[str, Any] = {"trainer__strategy": "fsdp2", "model__optimizer__init_args__foreach": True}
REFUSING_FUSED |= {"model__optimizer__class_path": "torch.optim.Adagrad", "trainer__gradient_clip_val": 1.0}


@pytest.mark.parametrize("name", REFUSING_FUSED)
def test_no_fused_optimizer_is_chosen_or_kept_where_one_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation: True)
    asked = settings("auto", **{name: REFUSING_FUSED[name]})
    choose_fast(asked)
    keep_choice(asked, before={"model": {"optimizer": {"init_args": {"fused": True}}}})
    assert tuple(asked.get(name) for name in NAMES) == ("bf16-mixed", True, True, None)


def test_nothing_is_chosen_under_a_launcher_on_several_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "cpu_has_bf16", lambda: True)
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    assert choose_fast(settings()) == ""


def test_a_checkpoint_is_of_the_run_in_whose_folder_of_checkpoints_it_lies(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    assert of_checkpoint(tmp_path / "saved/last.ckpt") is None
    assert of_checkpoint(tmp_path / "checkpoints/last.ckpt") == tmp_path


@pytest.mark.parametrize("resume", ["--resume=auto", "--ckpt_path={}/checkpoints/last.ckpt"])
def test_a_run_that_goes_on_keeps_its_choice(resume: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("warnings.warn", lambda *args, **kwargs: None)
    flags = ["fit", *TINY, "--trainer.precision=null", "--model.lr_scheduler=ConstantLR"]
    for has_bf16, epochs, how in ((True, 1, "--resume=auto"), (False, 2, resume)):
        monkeypatch.setattr(precision, "cpu_has_bf16", lambda has_bf16=has_bf16: has_bf16)
        run = tmp_path / ("run" if "auto" in how else "other")
        going_on = [how.format(tmp_path / "run"), f"--run_dir={run}"]
        done = run_here(*flags, *going_on, f"--trainer.max_epochs={epochs}")
        assert "cpu, bf16-mixed" in done.stdout
        assert ("--trainer.precision=32-true takes it back" in done.stdout) == (epochs == 1)
        config = yaml.safe_load((run / "config.yaml").read_text())
        assert (config["trainer"]["precision"], config["model"]["channels_last"]) == ("bf16-mixed", True)
