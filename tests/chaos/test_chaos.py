"""No sample is lost or used twice, and the end is that of an undisturbed run: `analysis.interrupted_runs` compares."""

import json
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import pytest
from commands import graded, mode_flags
from processes import marked

from analysis.interrupted_runs import largest_difference, metrics_without_clock
from chaos.audit import LoggedStep, batches, problems, read_log
from chaos.faults import ALL, EVERY_N_STEPS, Planned, drawn, num_steps
from chaos.job import Job
from chaos.trial import Trial

# A small training. The last batch of an epoch has 20 images, which divide among two replicas of two microbatches.
SMALL = [
    *("--model.arch=resnet10", "--model.stem=imagenet", "--model.optimizer.lr=1e-4"),
    *("--data.dataset=synthetic", "--data.num_train=648", "--data.num_test=1", "--data.val_size=20"),
    *("--data.batch_size=32", "--trainer.log_every_n_steps=10", "--trainer.max_epochs=-1", "--resume=auto"),
    *("--trainer.accelerator=cpu", "--trainer.num_sanity_val_steps=0", "--trainer.enable_progress_bar=false"),
    *("--watchdog.timeout_s=5", "--figures.every_n_epochs=0", f"--last_checkpoint.every_n_steps={EVERY_N_STEPS}"),
]
DDP, PP, FSDP2, TP = ({2: mode_flags(mode)} for mode in ("ddp", "pp", "fsdp2", "tp"))
RESIZED = {
    num_ranks: ["--virtual_replicas=4", *mode_flags(mode, num_ranks)]
    for num_ranks, mode in {2: "ddp", 1: "single", 4: "fsdp2"}.items()
}
RESIZES: tuple[Planned, ...] = (("resize", "step"), ("kill", "step"), ("resize", "step"), ("term", "save"))
FEW: tuple[Planned, ...] = (("kill", "save"), ("term", "save"), ("truncate", "step"), ("kill", "step"))


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("sizes", "faults", "under_torchrun"),
    graded(
        slow=[(DDP, ALL, True), (PP, FEW, False), (RESIZED, RESIZES, True)],
        exhaustive=[(PP, ALL, True), (FSDP2, ALL, True), (TP, ALL, True), (DDP, FEW, False)],
    ),
)
def test_nothing_is_lost(
    sizes: dict[int, list[str]], faults: Sequence[Planned], under_torchrun: bool, tmp_path: Path
) -> None:
    length = f"--trainer.max_steps={num_steps(len(faults))}"
    sizes = {num_ranks: [*SMALL, *flags, length] for num_ranks, flags in sizes.items()}
    folders = [tmp_path / name for name in ("undisturbed", "hit")]
    for folder, planned in zip(folders, ((), faults), strict=True):
        with Job(folder, under_torchrun) as job:
            Trial(job, sizes).run(drawn(planned, seed=len(ALL), num_ranks=min(sizes)))
    expected, found = (batches(read_log(folder / "sample_log")) for folder in folders)
    assert problems(found, expected) == []
    runs = [folder / "run" for folder in folders]
    assert largest_difference(*runs) == 0
    pd.testing.assert_frame_equal(*map(metrics_without_clock, runs))
    first, second = ((run / "sample_audit.csv").read_text() for run in runs)
    assert first == second
    assert marked(tmp_path) == []


# What the audit can see.

FIRST, SECOND = (1, 0), (1, 1)


def steps(starts: dict[tuple[int, int], range], *, num_ranks: int = 2) -> list[LoggedStep]:
    """Two epochs of three steps over ids 0 to 4, of which each start runs some of the six steps."""
    of_epoch = [[0, 1], [2, 3], [4]]
    return [
        LoggedStep(start, rank, rank, step // 3, step, of_epoch[step % 3][rank::num_ranks])
        for start, numbers in starts.items()
        for step in numbers
        for rank in range(num_ranks)
    ]


WHOLE = steps({FIRST: range(6)})
HALF_DONE = [line for line in steps({FIRST: range(4)}) if (line.step, line.rank) != (3, 1)]
# After a restart at step 1 the first batch comes again, and the epoch goes on from there.
TOO_EARLY = [line._replace(step=line.step + 1) for line in steps({SECOND: range(2)})]
ALONE = steps({FIRST: range(6)}, num_ranks=1)
FOUND: dict[str, tuple[list[LoggedStep], list[str]]] = {
    "the last run of a step counts": (steps({FIRST: range(4), SECOND: range(2, 6)}), []),
    "a step that only some processes finished": (HALF_DONE + steps({SECOND: range(3, 6)}), []),
    "another number of processes": (ALONE[:3] + steps({SECOND: range(3, 6)}), []),
    "processes that read the same": ([*ALONE, *(line._replace(rank=1) for line in ALONE)], []),
    "a lost step": (steps({FIRST: range(2), SECOND: range(3, 6)}), ["epoch 0, step 2: was never run"]),
    "a part that was lost": (
        [line for line in WHOLE if (line.step, line.rank) != (4, 1)],
        ["epoch 1, step 4: other samples"],
    ),
    "a loader that goes on too early": (
        steps({FIRST: range(1)}) + TOO_EARLY + steps({SECOND: range(3, 6)}),
        ["epoch 0, step 1: other samples", "epoch 0, step 2: other samples"],
    ),
    "a batch twice in one start": (WHOLE + steps({FIRST: range(5, 6)}), ["epoch 1, step 5: other samples"]),
}


@pytest.mark.parametrize(("lines", "words"), FOUND.values(), ids=FOUND)
def test_samples_are_compared_step_by_step(lines: list[LoggedStep], words: list[str]) -> None:
    assert problems(batches(lines), batches(WHOLE)) == words


def test_processes_that_should_read_the_same_are_compared() -> None:
    with pytest.raises(AssertionError, match=r"\(0, 0\): data-parallel rank 0 disagrees"):
        batches([*ALONE, ALONE[0]._replace(rank=1, ids=[1, 0])])


def test_a_line_that_is_being_written_waits(tmp_path: Path) -> None:
    (tmp_path / "rank0.jsonl").write_text(f"{json.dumps(WHOLE[0])}\n{json.dumps(WHOLE[1])[:9]}")
    assert read_log(tmp_path) == WHOLE[:1]
