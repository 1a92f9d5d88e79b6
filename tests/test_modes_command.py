"""`python -m lit_cifar modes`: the table on made-up machines, and on this one."""

import contextlib
import shlex
from pathlib import Path

import lightning as L
import pytest
from commands import TINY, run_here
from lightning.pytorch.strategies import StrategyRegistry

from lit_cifar import LitResNet, strategies
from lit_cifar.errors import ConfigError
from lit_cifar.strategies.modes import MODES, Mode
from lit_cifar.tools.doctor.mode_table import LocalMachine, ModeRow, mode_table

CONFIGS = Path(__file__).parents[1] / "configs" / "modes"
NAMES = ["single", "dp", "ddp", "ddp_spawn", "mp", "ddp_mp", "pp", "ddp_pp", "fsdp2", "tp"]
ONE_PROCESS = ["single", "dp", "mp"]


def table(*, num_gpus: int) -> dict[str, ModeRow]:
    """The rows of a made-up machine of 8 cores, by mode."""
    return {row.mode.name: row for row in mode_table(LocalMachine(num_cores=8, num_gpus=num_gpus))}


def flags(row: ModeRow) -> list[str]:
    """What a row's command passes to fit."""
    words = shlex.split(row.command)
    assert words[:4] == ["python", "-m", "lit_cifar", "fit"]
    return words[4:]


def test_without_a_gpu_every_mode_runs_on_the_cpu() -> None:
    rows = table(num_gpus=0)
    assert list(rows) == NAMES
    assert {row.accelerator for row in rows.values()} == {"cpu"}
    assert {name: row.verdict for name, row in rows.items()} == {
        "single": "yes, on the CPU",
        "dp": "yes, on virtual devices of the CPU",
        "mp": "yes, on virtual devices of the CPU",
    } | {name: "yes, gloo processes on 8 cores" for name in NAMES if name not in ONE_PROCESS}
    assert all(flags(row)[-1] == "--trainer.accelerator=cpu" for row in rows.values())
    assert flags(rows["single"])[:-1] == ["--trainer.devices=1"]
    assert flags(rows["pp"])[:-1] == ["--trainer.strategy=pp", "--trainer.devices=2"]
    assert flags(rows["ddp_pp"])[:-1] == ["--trainer.strategy=ddp_pp", "--trainer.devices=4"]


def test_one_gpu_runs_one_device_and_all_stages() -> None:
    rows = table(num_gpus=1)
    assert [name for name, row in rows.items() if row.accelerator == "cuda"] == ["single", "mp"]
    assert rows["single"].verdict == "yes, on 1 GPU"
    assert flags(rows["single"]) == ["--trainer.devices=1"]
    assert rows["mp"].verdict == "yes, all stages on the one GPU"
    assert flags(rows["mp"])[1:] == ["--trainer.strategy.num_stages=2", "--trainer.devices=1"]
    others = {row.verdict for name, row in rows.items() if row.accelerator == "cpu"}
    assert others == {"on the CPU alone: needs 2 GPUs", "on the CPU alone: needs 4 GPUs"}
    assert rows["ddp_mp"].verdict == rows["ddp_pp"].verdict == "on the CPU alone: needs 4 GPUs"
    assert flags(rows["dp"]) == ["--trainer.strategy=dp", "--trainer.devices=2", "--trainer.accelerator=cpu"]


@pytest.mark.parametrize(
    ("num_gpus", "verdicts"),
    [
        (2, {"single": "yes, on 1 GPU", "ddp": "yes, on 2 GPUs", "ddp_mp": "on the CPU alone: needs 4 GPUs"}),
        (3, {"mp": "yes, on 2 to 3 GPUs", "tp": "yes, on 2 GPUs", "ddp_pp": "on the CPU alone: needs 4 GPUs"}),
        (6, {"pp": "yes, on 2 to 6 GPUs", "tp": "yes, on 2 or 4 GPUs", "ddp_mp": "yes, on 4 or 6 GPUs"}),
        (8, {"ddp_mp": "yes, on 4, 6 or 8 GPUs", "ddp_pp": "yes, on 4, 6 or 8 GPUs", "fsdp2": "yes, on 2 to 8 GPUs"}),
    ],
)
def test_several_gpus(num_gpus: int, verdicts: dict[str, str]) -> None:
    rows = table(num_gpus=num_gpus)
    assert {name: rows[name].verdict for name in verdicts} == verdicts
    for row in rows.values():
        enough = num_gpus >= row.mode.min_devices
        assert row.accelerator == ("cuda" if enough else "cpu")
        assert ("--trainer.accelerator=cpu" in flags(row)) != enough


@pytest.mark.parametrize("mode", MODES[1:], ids=lambda mode: mode.name)
def test_the_counts_are_those_that_the_strategy_accepts(mode: Mode) -> None:
    accepted, module = [], LitResNet("resnet10")
    for num_devices in range(mode.min_devices, 9):
        with contextlib.suppress(ConfigError):
            quiet = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
            strategy = L.Trainer(strategy=mode.name, devices=num_devices, **quiet).strategy
            if mode.name == "tp":  # asks the network
                strategy.connect(module)
            accepted.append(num_devices)
    assert mode.counts(8) == accepted


def test_names_are_those_of_strategies_and_configs() -> None:
    assert {mode.name for mode in MODES} - {"single"} <= set(StrategyRegistry.available_strategies())
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == set(NAMES)


def test_the_form_with_a_class_trains(tmp_path: Path) -> None:
    """What one GPU is told to run as `mp`, on the CPU."""
    command = flags(table(num_gpus=1)["mp"])
    assert hasattr(strategies, command[0].removeprefix("--trainer.strategy="))
    done = run_here("fit", *TINY, f"--run_dir={tmp_path / 'run'}", *command)
    assert done.status == 0, done.stderr
    assert "split       0  cpu 0" in done.stdout


def test_output_is_a_table_and_commands_to_paste() -> None:
    done = run_here("modes")
    assert done.status == 0
    lines = done.stdout.splitlines()
    assert max(len(line) for line in lines) <= 120
    rows = mode_table(LocalMachine.here())
    for row in rows:
        (line,) = [line for line in lines if line.split()[:1] == [row.mode.name]]
        assert row.mode.splits in line
        assert line.rstrip().endswith(row.verdict)
    commands = [line.strip() for line in lines if "lit_cifar fit" in line]
    assert commands == [row.command for row in rows]
