"""`doctor`: each planted fault is found and named, a machine without one passes, every mode has its row."""

from io import StringIO

import pytest
import torch
from commands import run_here
from documents import ROOT
from lightning.pytorch.strategies import StrategyRegistry
from rich.console import Console

from lit_cifar.data.workers import num_cores
from lit_cifar.mode.table import MODES
from lit_cifar.reporting.run_report import counted
from lit_cifar.tools import doctor
from lit_cifar.tools.doctor import COPY_MODES, Check, MachineFinding, check_copies, mode_row

CPU = torch.device("cpu")


def test_copies_that_do_not_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = {("cuda:1", "cuda:0"): "of a copy of 4,096 bytes 8 did not arrive"}
    monkeypatch.setattr(doctor, "copy_faults", lambda devices: lost)
    (finding,) = check_copies([CPU, CPU]).findings
    said = "Copies between devices do not arrive (cuda:1 to cuda:0): of a copy of 4,096 bytes 8 did not arrive."
    assert (finding.problem, finding.modes) == (said, COPY_MODES)


def test_copies_that_arrive() -> None:
    assert check_copies([CPU, CPU]) == Check("copies", "all of 2 ordered pairs of GPUs copied every byte")
    assert check_copies([CPU]).seen == "not tried: that needs two GPUs, and torch sees 1"


NAMES = ["single", "dp", "ddp", "ddp_spawn", "mp", "ddp_mp", "pp", "ddp_pp", "fsdp2", "tp"]
GLOO, VIRTUAL = f"yes, gloo processes on {counted(num_cores(), 'core')}", "yes, on virtual devices of the CPU"
TWO, FOUR = "on the CPU alone: needs 2 GPUs", "on the CPU alone: needs 4 GPUs"
ONE_GPU = {"single": "yes, on 1 GPU", "mp": "yes, all stages on the one GPU", "ddp_mp": FOUR, "ddp_pp": FOUR}
VERDICTS = {  # by the number of GPUs
    0: dict.fromkeys(NAMES, GLOO) | {"single": "yes, on the CPU", "dp": VIRTUAL, "mp": VIRTUAL},
    1: dict.fromkeys(NAMES, TWO) | ONE_GPU,
    2: {"single": "yes, on 1 GPU", "ddp": "yes, on 2 GPUs or more", "ddp_mp": FOUR},
    8: {"ddp_mp": "yes, on 4 GPUs or more", "fsdp2": "yes, on 2 GPUs or more"},
}


@pytest.mark.parametrize(("num_gpus", "verdicts"), VERDICTS.items())
def test_every_mode_runs_on_the_gpus_or_else_on_the_cpu(num_gpus: int, verdicts: dict[str, str]) -> None:
    rows = {mode.name: mode_row(mode, num_gpus) for mode in MODES}
    assert list(rows) == NAMES
    assert {name: rows[name].verdict for name in verdicts} == verdicts
    for name, row in rows.items():
        enough = num_gpus >= row.mode.min_devices or (name, num_gpus) == ("mp", 1)
        assert ("--trainer.accelerator=cpu" in row.flags) != enough
    assert rows["ddp_pp"].flags[:2] == ["--trainer.strategy=ddp_pp", "--trainer.devices=4"]
    stages = ["--trainer.strategy=LayerParallelStrategy", "--trainer.strategy.num_stages=2", "--trainer.devices=1"]
    assert num_gpus != 1 or rows["mp"].flags == stages


def test_names_are_those_of_strategies_and_configs() -> None:
    assert {mode.name for mode in MODES} - {"single"} <= set(StrategyRegistry.available_strategies())
    assert {path.stem for path in (ROOT / "configs" / "modes").glob("*.yaml")} == set(NAMES)


def line_of(mode: str, lines: list[str]) -> str:
    (line,) = [line for line in lines if line.split()[:1] == [mode]]
    return line


def test_the_page_begins_with_what_is_wrong_and_what_mends_it() -> None:
    note, mend = MachineFinding("A name is missing.", "pip"), " ".join(["fit", *["--a_long_flag=1"] * 10])
    wrong = MachineFinding("Copies [cuda:0] are lost.", mend, COPY_MODES)
    checks = [Check("internals", "1 missing", [note]), Check("copies", "faults", [wrong])]
    doctor.print_page(checks, [mode_row(mode, 2) for mode in MODES], Console(file=(out := StringIO()), width=100))
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    begin = ["", "Not fit: 1 fault", "   1. Copies [cuda:0] are lost.", f"      {mend}", " note A name is missing."]
    assert lines[:6] == [*begin, "      pip"]
    assert "  copies       faults" in lines
    assert line_of("dp", lines).endswith("no, see 1")
    assert line_of("ddp", lines).endswith("yes, on 2 GPUs or more")


def test_this_machine_is_fit_and_a_fault_is_exit_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    result = run_here("doctor")
    lines = [line.rstrip() for line in result.stdout.splitlines()]
    assert "Fit: no fault was found, and 10 modes run here" in lines
    assert max(map(len, lines)) <= 120
    rows = [mode_row(mode, 0) for mode in MODES]
    assert all(line_of(row.mode.name, lines).endswith(row.verdict) for row in rows)
    commands = [" ".join(["  python -m lit_cifar fit", *row.flags]) for row in rows]
    assert [line for line in lines if "lit_cifar fit" in line] == commands
    wrong = MachineFinding("Copies are lost.", "use ddp", COPY_MODES)
    monkeypatch.setattr(doctor, "check_copies", lambda devices: Check("copies", "lost", [wrong]))
    result = run_here("doctor", check=False)
    assert result.status == 1
    assert "Not fit: 1 fault\n   1. Copies are lost.\n      use ddp\n" in result.stdout
