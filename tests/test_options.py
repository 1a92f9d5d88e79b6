"""Options for GPUs in every mode: each cell in docs/gpu-options.md works, or is refused with its reason.

`test_cli` has options that do not go together.
"""

import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from commands import TINY, launch, mode_flags, refused
from short_fits import losses
from verifying import TINY as CUT

from lit_cifar.cli.main import CLI
from lit_cifar.data.ghost_batches import GhostBatches
from lit_cifar.tools.verify import verify
from lit_cifar.tools.verify.command import References
from lit_cifar.tools.verify.launcher import Configuration, Launcher
from lit_cifar.tools.verify.record import EXACT_BOUND, Record
from lit_cifar.tools.verify.runs import Outcome

PAGE = Path(__file__).parents[1] / "docs" / "gpu-options.md"
DEVICES = {"single": 1, "ddp_mp": 4, "ddp_pp": 4}

# ---------------------------------------------------------------- the table


def table() -> dict[tuple[str, str], str]:
    """What the page says of every option and mode: "yes", "GPU", or the letter of a reason why not."""
    lines = PAGE.read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    begin, end = (next(i for i, row in enumerate(rows) if word in row) for word in ("one device", "reason"))
    (_, *names), _, *rest = rows[begin:end]
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
    options, names = {option for option, _ in CELLS}, [name for option, name in CELLS if "compile=true" in option]
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
    said = refused("fit", *TINY, *mode_flags(mode, DEVICES.get(mode, 2)), *option.split())
    expected = f"{option} {reasons()['d']}" if cell == "GPU" else reasons()[cell.strip("()")]
    assert expected in " ".join(said.split())


# ---------------------------------------------------------------- what works


def works(*endings: str) -> list[Any]:
    """Each option whose flags end so, and the modes in which it works; the whole table takes many minutes."""
    modes: dict[str, list[str]] = {}
    for (option, mode), cell in CELLS.items():
        if cell == "yes" and option.endswith(endings):
            modes.setdefault(option, []).append(mode)
    return [pytest.param(*item, id=item[0], marks=pytest.mark.exhaustive) for item in modes.items()]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("option", "modes"), works("=true", "=64-true", "bf16-mixed"))
def test_modes_with_an_option_train_what_one_device_trains_without(
    option: str, modes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16 they round as one device does."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    flags = [*CUT, "--model.arch=tiny", *option.split()]
    if "compile" in option:
        flags.append("--trainer.callbacks+=option_backends.QuickCompiler")
    for devices in (2, 4):
        if chosen := [mode for mode in modes if max(2, DEVICES.get(mode, 2)) == devices]:
            rows = verify(chosen, devices=devices, args=flags)
            assert {row.mode: row.problems for row in rows} == {mode: [] for mode in chosen}
            assert "bf16" in option or max(max(row.differences.values()) for row in rows) <= EXACT_BOUND


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("option", "modes"), works("bf16-true", "16-true"))
def test_modes_train_in_a_type_too_narrow_for_verify(option: str, modes: list[str], tmp_path: Path) -> None:
    flags = [*TINY, *option.split(), "--model.optimizer.lr=0.001", "--watchdog.timeout_s=0"]
    launch("fit", *flags, f"--run_dir={tmp_path / 'alone'}")
    for mode in modes:
        launch("fit", *flags, *mode_flags(mode, DEVICES.get(mode, 2)), f"--run_dir={tmp_path / mode}")
        assert losses(tmp_path / mode) == pytest.approx(losses(tmp_path / "alone"), rel=0.1), mode


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_the_one_device_goes_without_what_the_modes_are_to_show_equal(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []

    def note(self: Launcher, title: str, folder: Path, flags: list[str], *, order: str) -> Outcome:
        started.append(dict(flag.split("=", 1) for flag in (*self.settings.flags, *flags) if "=" in flag))
        return Outcome(0, "", "", 0.0)

    monkeypatch.setattr(Launcher, "_fit", note)
    monkeypatch.setattr(Record, "steps", [])
    config = {"trainer": {"precision": precision, "accelerator": "cpu"}, "data": {"batch_size": 8, "val_size": 0}}
    settings = Configuration(("--model.compile=true", "--model.channels_last=true", f"--precision={precision}"), config)
    with ThreadPoolExecutor() as pool:
        References(Launcher(settings, 2, tmp_path), pool).start(GhostBatches())
    assert all((last["--model.compile"], last["--model.channels_last"]) == ("false", "false") for last in started)
    precisions = Counter(last.get("--trainer.precision") for last in started)
    assert precisions == {None: 3} | ({} if precision == "32-true" else {"32-true": 1})
