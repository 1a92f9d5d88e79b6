"""Options in every mode: each works, or is refused in the words of `lit_cifar/mode/refusals.py`.

`test_cli` has options that do not go together.
"""

import math
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from commands import TINY, launch, losses, mode_flags, refused
from verifying import TINY as CUT

from lit_cifar.cli.main import CLI
from lit_cifar.data.ghost_batches import GhostBatches
from lit_cifar.launch.forked import EndedRun
from lit_cifar.mode import refusals
from lit_cifar.tools.verify.command import verify
from lit_cifar.tools.verify.configuration import Configuration
from lit_cifar.tools.verify.record import EXACT_BOUND, Record
from lit_cifar.tools.verify.verifier import Verifier

DEVICES = {"single": 1, "ddp_mp": 4, "ddp_pp": 4}


def mode_name(name: str) -> str:
    """What `--modes` calls it."""
    return "single" if name == "single_device" else name


FROM_REFUSALS = {
    (option, name): row
    for option in dict.fromkeys(row.option for row in refusals.TABLE)
    for name in refusals.NAMES
    if (row := refusals.refusal_of(option, name)) is not None
}
IN_THIS_FILE = [
    *(f"--model.{words}" for words in ("channels_last=true", "compile=true", "optimizer.fused=true")),
    *(f"--trainer.precision={name}" for name in ("bf16-mixed", "16-mixed", "bf16-true", "16-true", "64-true")),
    *(f"--trainer.{name}=true" for name in ("benchmark", "deterministic")),
]


@pytest.mark.parametrize(
    ("option", "name"), [pytest.param(*key, id=" ".join(key)) for key in FROM_REFUSALS if key[1] != "single_device"]
)
def test_options_are_refused_in_the_words_of_the_table(option: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, and before any process is started."""
    monkeypatch.setattr(CLI, "_run_subcommand", CLI._check)
    row = FROM_REFUSALS[option, name]
    optimizer = "MuonSGD" if "Muon" in option else "NesterovSGD"
    mode = f"--trainer.strategy={name}"
    problem = row.problem.format(option=option, mode=mode, optimizer=optimizer, parts=4)
    refused("fit", *TINY, *mode_flags(name, DEVICES.get(name, 2)), *option.split(), says=[problem, row.remedy])


@pytest.mark.parametrize("option", refusals.NEED_GPU)
@pytest.mark.parametrize("name", ["single_device", "ddp"])
def test_what_needs_a_gpu_says_so(option: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CLI, "_run_subcommand", CLI._check)
    flags = [*mode_flags(mode_name(name), 2), *option.split()]
    refused("fit", *TINY, *flags, says=[f"{option} needs a GPU"])


def works(*endings: str) -> list[Any]:
    """Each option whose flags end so, and the modes in which it works; the whole table takes many minutes."""
    modes: dict[str, list[str]] = {}
    for option, name in product(IN_THIS_FILE, refusals.NAMES):
        takes = refusals.refusal_of(option, name) is None and option not in refusals.NEED_GPU
        if takes and option.endswith(endings):
            modes.setdefault(option, []).append(mode_name(name))
    return [pytest.param(*item, id=item[0], marks=pytest.mark.exhaustive) for item in modes.items()]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("option", "modes"), works("=true"))
def test_modes_with_an_option_train_what_one_device_trains_without(
    option: str, modes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    flags = [*CUT, "--model.arch=tiny", *option.split()]
    if "compile" in option:
        flags.append("--trainer.callbacks+=recorder.QuickCompiler")
    for devices in (2, 4):
        if chosen := [mode for mode in modes if max(2, DEVICES.get(mode, 2)) == devices]:
            rows = verify(chosen, devices=devices, args=flags)
            assert {row.mode: row.problems for row in rows} == {mode: [] for mode in chosen}
            assert max(max(row.differences.values()) for row in rows) <= EXACT_BOUND


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("option", "modes"), works("bf16-mixed", "bf16-true", "16-true"))
def test_modes_train_in_a_type_too_narrow_for_verify(option: str, modes: list[str], tmp_path: Path) -> None:
    flags = [*TINY, *option.split(), "--model.optimizer.lr=0.001", "--watchdog.timeout_s=0"]
    launch("fit", *flags, f"--run_dir={tmp_path / 'alone'}")
    for mode in modes:
        launch("fit", *flags, *mode_flags(mode, DEVICES.get(mode, 2)), f"--run_dir={tmp_path / mode}")
        assert losses(tmp_path / mode) == pytest.approx(losses(tmp_path / "alone"), rel=0.1), mode
        assert all(map(math.isfinite, losses(tmp_path / mode)))


def test_one_device_goes_without_what_modes_are_to_show_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: dict[str, str] = {}

    def note(self: Verifier, title: str, folder: Path, flags: list[str], *_: Any) -> EndedRun:
        started.update(flag.split("=", 1) for flag in (*self.settings.flags, *flags) if "=" in flag)
        return EndedRun(0, "", "", 0.0)

    monkeypatch.setattr(Verifier, "_fit", note)
    monkeypatch.setattr(Record, "steps", [1, 2])
    config = {"trainer": {"precision": "32-true", "accelerator": "cpu"}, "data": {"batch_size": 8, "val_size": 0}}
    settings = Configuration(("--model.compile=true", "--model.channels_last=true"), config)
    Verifier(settings, 2, tmp_path).run_alone("reference", GhostBatches())
    assert (started["--model.compile"], started["--model.channels_last"]) == ("false", "false")
