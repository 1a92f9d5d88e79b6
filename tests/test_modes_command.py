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
from lit_cifar.tools.doctor.mode_table import LocalMachine, ModeRow, mode_table
from lit_cifar.tools.modes import MODES, Mode

CONFIGS = Path(__file__).parents[1] / "configs" / "modes"
NAMES = ["single", "dp", "ddp", "ddp_spawn", "mp", "ddp_mp", "pp", "ddp_pp", "fsdp2", "tp"]


def table(*, num_gpus: int) -> dict[str, ModeRow]:
    """The rows of a made-up machine of 8 cores, by mode."""
    return {row.mode.name: row for row in mode_table(LocalMachine(num_cores=8, num_gpus=num_gpus))}


def flags(row: ModeRow) -> list[str]:
    """What a row's command passes to fit."""
    words = shlex.split(row.command)
    assert words[:4] == ["python", "-m", "lit_cifar", "fit"]
    return words[4:]


GLOO, VIRTUAL = "yes, gloo processes on 8 cores", "yes, on virtual devices of the CPU"
TWO, FOUR = "on the CPU alone: needs 2 GPUs", "on the CPU alone: needs 4 GPUs"
VERDICTS = {  # by the number of GPUs
    0: dict.fromkeys(NAMES, GLOO) | {"single": "yes, on the CPU", "dp": VIRTUAL, "mp": VIRTUAL},
    1: dict.fromkeys(NAMES, TWO)
    | {"single": "yes, on 1 GPU", "mp": "yes, all stages on the one GPU", "ddp_mp": FOUR, "ddp_pp": FOUR},
    2: {"single": "yes, on 1 GPU", "ddp": "yes, on 2 GPUs", "ddp_mp": FOUR},
    3: {"mp": "yes, on 2 to 3 GPUs", "tp": "yes, on 2 GPUs", "ddp_pp": FOUR},
    6: {"pp": "yes, on 2 to 6 GPUs", "tp": "yes, on 2 or 4 GPUs", "ddp_mp": "yes, on 4 or 6 GPUs"},
    8: {"ddp_mp": "yes, on 4, 6 or 8 GPUs", "ddp_pp": "yes, on 4, 6 or 8 GPUs", "fsdp2": "yes, on 2 to 8 GPUs"},
}


@pytest.mark.parametrize(("num_gpus", "verdicts"), VERDICTS.items())
def test_every_mode_runs_on_the_gpus_or_else_on_the_cpu(num_gpus: int, verdicts: dict[str, str]) -> None:
    rows = table(num_gpus=num_gpus)
    assert list(rows) == NAMES
    assert {name: rows[name].verdict for name in verdicts} == verdicts
    for name, row in rows.items():
        enough = num_gpus >= row.mode.min_devices or (name, num_gpus) == ("mp", 1)
        assert row.accelerator == ("cuda" if enough else "cpu")
        assert ("--trainer.accelerator=cpu" in flags(row)) != enough


@pytest.mark.parametrize(
    ("num_gpus", "name", "expected"),
    [
        (0, "single", "--trainer.devices=1 --trainer.accelerator=cpu"),
        (0, "pp", "--trainer.strategy=pp --trainer.devices=2 --trainer.accelerator=cpu"),
        (0, "ddp_pp", "--trainer.strategy=ddp_pp --trainer.devices=4 --trainer.accelerator=cpu"),
        (1, "single", "--trainer.devices=1"),
        (1, "dp", "--trainer.strategy=dp --trainer.devices=2 --trainer.accelerator=cpu"),
    ],
)
def test_what_to_type(num_gpus: int, name: str, expected: str) -> None:
    assert flags(table(num_gpus=num_gpus)[name]) == expected.split()


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
    assert command[1:] == ["--trainer.strategy.num_stages=2", "--trainer.devices=1"]
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
