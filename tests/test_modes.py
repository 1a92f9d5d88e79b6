"""The four modes through the command line, with real processes where a mode has them."""

from pathlib import Path

import pytest
import torch
from commands import TINY, counts, launch, mode_flags, run_here

from lit_cifar.checkpoints import read_checkpoint

MODES = ["single", "dp", "ddp", "ddp_spawn"]


def run_mode(mode: str, subcommand: str, *args: str | Path, devices: int = 2) -> None:
    """One process is enough for `single` and `dp`: they run here, which saves the start of a process."""
    run = run_here if mode in ("single", "dp") else launch
    result = run(subcommand, *TINY, *mode_flags(mode, devices), *args)
    assert result.status == 0, result.stderr


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint written by each of the modes."""
    folder = tmp_path_factory.mktemp("written")
    for mode in MODES:
        run_mode(mode, "fit", f"--run_dir={folder / mode}")
    return {mode: folder / mode / "checkpoints" / "last.ckpt" for mode in MODES}


@pytest.fixture(scope="module")
def counted_alone(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, int]]:
    """What one device counts for each of the checkpoints."""
    folder = tmp_path_factory.mktemp("alone")
    for mode, path in checkpoints.items():
        run_mode("single", "test", f"--ckpt_path={path}", f"--run_dir={folder / mode}")
    return {mode: counts(folder / mode)["all"] for mode in checkpoints}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("reader", ["dp", "ddp", "ddp_spawn"])
def test_a_checkpoint_of_any_mode_counts_the_same_in_any_other(
    checkpoints: dict[str, Path], counted_alone: dict[str, tuple[int, int]], reader: str, tmp_path: Path
) -> None:
    for writer, path in checkpoints.items():
        run_mode(reader, "test", f"--ckpt_path={path}", f"--run_dir={tmp_path / writer}")
        assert counts(tmp_path / writer)["all"] == counted_alone[writer]
        assert counted_alone[writer][1] == 100


@pytest.mark.timeout(240)
def test_all_modes_write_the_same_keys(checkpoints: dict[str, Path]) -> None:
    states = {mode: read_checkpoint(path) for mode, path in checkpoints.items()}
    shapes = {mode: {k: v.shape for k, v in state["state_dict"].items()} for mode, state in states.items()}
    assert all(shape == shapes["single"] for shape in shapes.values())
    optimizers = {mode: state["optimizer_states"][0]["state"].keys() for mode, state in states.items()}
    assert all(keys == optimizers["single"] for keys in optimizers.values())


@pytest.mark.timeout(240)
def test_ddp_and_ddp_spawn_are_the_same_training(checkpoints: dict[str, Path]) -> None:
    ddp, spawn = (read_checkpoint(checkpoints[mode])["state_dict"] for mode in ("ddp", "ddp_spawn"))
    for name in ddp:
        torch.testing.assert_close(ddp[name], spawn[name])


@pytest.mark.timeout(240)
def test_one_checkpoint_counts_the_same_with_any_number_of_processes(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """10,000 images; 7 processes do not divide them."""
    flags = [f"--ckpt_path={checkpoints['single']}", "--data.num_test=10000"]
    expected = None
    for num_processes in (1, 2, 3, 4, 7):
        run = tmp_path / str(num_processes)
        mode = "single" if num_processes == 1 else "ddp"
        run_mode(mode, "test", *flags, f"--run_dir={run}", devices=num_processes)
        found = counts(run)
        expected = expected or found["all"]
        assert found["all"] == expected
        assert expected[1] == 10_000
        assert len(found) == num_processes + 1


@pytest.mark.timeout(120)
def test_padded_evaluation_counts_too_many(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    flags = [f"--ckpt_path={checkpoints['single']}", "--data.num_test=10000", "--data.pad_eval=true"]
    run_mode("ddp", "test", *flags, f"--run_dir={tmp_path / 'run'}", devices=3)
    totals = {rank: total for rank, (_, total) in counts(tmp_path / "run").items()}
    assert totals == {"0": 3334, "1": 3334, "2": 3334, "all": 10_002}
