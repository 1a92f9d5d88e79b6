"""`doctor`: each planted fault is found and named, a machine without one passes, every mode has its row."""

from io import StringIO

import pytest
import torch
from commands import run_here
from documents import ROOT
from lightning.pytorch.strategies import StrategyRegistry
from rich.console import Console

from lit_cifar.mode.table import MODES
from lit_cifar.tools import doctor
from lit_cifar.tools.doctor import COPY_MODES, Fault, lost_copies, mode_here

CPU = torch.device("cpu")


def test_copies_that_do_not_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [*lost_copies([CPU, CPU])] == []
    lost = {("cuda:1", "cuda:0"): "of a copy of 4,096 bytes 8 did not arrive"}
    monkeypatch.setattr(doctor, "copy_faults", lambda devices: lost)
    (fault,) = lost_copies([CPU, CPU])
    said = "Copies between devices do not arrive (cuda:1 to cuda:0): of a copy of 4,096 bytes 8 did not arrive."
    assert (fault.problem, fault.modes) == (said, COPY_MODES)


NAMES = ["single", "dp", "ddp", "ddp_spawn", "mp", "ddp_mp", "pp", "ddp_pp", "fsdp2", "tp"]
TWO, FOUR = "on the CPU alone: needs 2 GPUs", "on the CPU alone: needs 4 GPUs"
ONE_GPU = {"single": "yes, on 1 GPU", "mp": "yes, all stages on the one GPU", "ddp_mp": FOUR, "ddp_pp": FOUR}
VERDICTS = {  # by the number of GPUs
    0: dict.fromkeys(NAMES, "yes, on the CPU"),
    1: dict.fromkeys(NAMES, TWO) | ONE_GPU,
    2: {"single": "yes, on 1 GPU", "ddp": "yes, on 2 GPUs or more", "ddp_mp": FOUR},
    8: {"ddp_mp": "yes, on 4 GPUs or more", "fsdp2": "yes, on 2 GPUs or more"},
}


@pytest.mark.parametrize(("num_gpus", "verdicts"), VERDICTS.items())
def test_every_mode_runs_on_the_gpus_or_else_on_the_cpu(num_gpus: int, verdicts: dict[str, str]) -> None:
    found = {mode: mode_here(mode, num_gpus) for mode in MODES}
    assert [mode.name for mode in found] == NAMES
    assert {mode.name: said for mode, (said, _) in found.items() if mode.name in verdicts} == verdicts
    for mode, (_, flags) in found.items():
        enough = num_gpus >= mode.min_devices or (mode.name, num_gpus) == ("mp", 1)
        assert ("--trainer.accelerator=cpu" in flags) != enough
    of = {mode.name: flags for mode, (_, flags) in found.items()}
    assert of["ddp_pp"][:2] == ["--trainer.strategy=ddp_pp", "--trainer.devices=4"]
    stages = ["--trainer.strategy=LayerParallelStrategy", "--trainer.strategy.num_stages=2", "--trainer.devices=1"]
    assert num_gpus != 1 or of["mp"] == stages


def test_names_are_those_of_strategies_and_configs() -> None:
    assert {mode.name for mode in MODES} - {"single"} <= set(StrategyRegistry.available_strategies())
    assert {path.stem for path in (ROOT / "configs" / "modes").glob("*.yaml")} == set(NAMES)


def line_of(mode: str, lines: list[str]) -> str:
    (line,) = [line for line in lines if line.split()[:1] == [mode]]
    return line


def test_the_page_begins_with_what_is_wrong_and_what_mends_it() -> None:
    mend = " ".join(["fit", *["--a_long_flag=1"] * 10])
    faults = [Fault("Copies [cuda:0] are lost.", mend, COPY_MODES), Fault("A name is missing.", "pip", ())]
    doctor.print_page(faults, Console(file=(out := StringIO()), width=100), num_gpus=2)
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    begin = ["", "Not fit: 2 faults", "   1. Copies [cuda:0] are lost.", f"      {mend}", "   2. A name is missing."]
    assert lines[:6] == [*begin, "      pip"]
    assert line_of("dp", lines).endswith("no, see 1")
    assert line_of("ddp", lines).endswith("yes, on 2 GPUs or more")


def test_this_machine_is_fit_and_a_fault_is_exit_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    lines = [line.rstrip() for line in run_here("doctor").stdout.splitlines()]
    assert "Fit: no fault was found, and 10 modes run here" in lines
    assert max(map(len, lines)) <= 120
    here = [(mode, *mode_here(mode, 0)) for mode in MODES]
    assert all(line_of(mode.name, lines).endswith(verdict) for mode, verdict, _ in here)
    commands = [" ".join(["  python -m lit_cifar fit", *flags]) for _, _, flags in here]
    assert [line for line in lines if "lit_cifar fit" in line] == commands
    monkeypatch.setattr(doctor, "lost_copies", lambda gpus: [Fault("Copies are lost.", "use ddp", COPY_MODES)])
    result = run_here("doctor", check=False)
    assert result.status == 1
    assert "Not fit: 1 fault\n   1. Copies are lost.\n      use ddp\n" in result.stdout
