"""Each image is counted once, whatever the number of processes; unless padding is asked for."""

from pathlib import Path

import pytest
from commands import TINY, counts, launch, mode_flags, run_here

TESTED = ["--data.num_test=10000"]


def run_mode(mode: str, subcommand: str, *args: str | Path, devices: int = 2) -> None:
    """One process is enough for `single` and `dp`: they run here, which saves the start of a process."""
    command = [subcommand, *TINY, *mode_flags(mode, devices), *args]
    result = run_here(*command) if mode in ("single", "dp") else launch(*command, ranks=devices)
    assert result.status == 0, result.stderr


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Written by one device."""
    folder = tmp_path_factory.mktemp("written")
    run_mode("single", "fit", f"--run_dir={folder / 'run'}")
    return folder / "run" / "checkpoints" / "last.ckpt"


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> tuple[int, int]:
    """What one process counts, of 10,000 images."""
    run = checkpoint.parents[1].with_name("alone")
    run_mode("single", "test", *TESTED, f"--ckpt_path={checkpoint}", f"--run_dir={run}")
    return counts(run)["all"]


@pytest.mark.parametrize("num_processes", [3, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (2, 4, 7))])
def test_one_checkpoint_counts_the_same_with_any_number_of_processes(
    num_processes: int, expected: tuple[int, int], checkpoint: Path, tmp_path: Path
) -> None:
    """3 and 7 processes do not divide the images."""
    run = tmp_path / "run"
    run_mode("ddp", "test", *TESTED, f"--ckpt_path={checkpoint}", f"--run_dir={run}", devices=num_processes)
    found = counts(run)
    assert found["all"] == expected
    assert expected[1] == 10_000
    assert len(found) == num_processes + 1


@pytest.mark.timeout(120)
def test_padded_evaluation_counts_too_many(checkpoint: Path, tmp_path: Path) -> None:
    flags = [f"--ckpt_path={checkpoint}", "--data.pad_eval=true"]
    run_mode("ddp", "test", *TESTED, *flags, f"--run_dir={tmp_path / 'run'}", devices=3)
    totals = {rank: total for rank, (_, total) in counts(tmp_path / "run").items()}
    assert totals == {"0": 3334, "1": 3334, "2": 3334, "all": 10_002}
