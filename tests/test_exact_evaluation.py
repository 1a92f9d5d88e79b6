"""Each image is counted once, whatever the number of processes; unless padding is asked for."""

from pathlib import Path

import pytest
from commands import TINY, counts, launch, mode_flags, run_here


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Written by one device."""
    folder = tmp_path_factory.mktemp("written")
    assert run_here("fit", *TINY, *mode_flags("single"), f"--run_dir={folder / 'run'}").status == 0
    return folder / "run" / "checkpoints" / "last.ckpt"


def evaluated(run: Path, *flags: str, num_processes: int) -> dict[str, tuple[int, int]]:
    """What each process has counted, and all together."""
    mode = mode_flags("ddp", num_processes) if num_processes > 1 else mode_flags("single")
    words = ["test", *TINY, *mode, "--data.num_test=10000", *flags, f"--run_dir={run}"]
    result = launch(*words, ranks=num_processes) if num_processes > 1 else run_here(*words)
    assert result.status == 0, result.stderr
    return counts(run)


@pytest.mark.parametrize("num_processes", [3, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (2, 4, 7))])
def test_one_checkpoint_counts_the_same_with_any_number_of_processes(
    num_processes: int, checkpoint: Path, tmp_path: Path
) -> None:
    """3 and 7 processes do not divide the images."""
    weights = f"--ckpt_path={checkpoint}"
    expected = evaluated(tmp_path / "alone", weights, num_processes=1)["all"]
    found = evaluated(tmp_path / "run", weights, num_processes=num_processes)
    assert found["all"] == expected
    assert expected[1] == 10_000
    assert len(found) == num_processes + 1


@pytest.mark.timeout(120)
def test_padded_evaluation_counts_too_many(checkpoint: Path, tmp_path: Path) -> None:
    found = evaluated(tmp_path / "run", f"--ckpt_path={checkpoint}", "--data.pad_eval=true", num_processes=3)
    totals = {rank: total for rank, (_, total) in found.items()}
    assert totals == {"0": 3334, "1": 3334, "2": 3334, "all": 10_002}
