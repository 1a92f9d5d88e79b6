"""No sample is lost or used twice, and the end is that of an undisturbed run: `analysis.interrupted_runs` compares."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import pytest
from commands import graded, mode_flags
from processes import marked

from analysis.interrupted_runs import largest_difference, metrics_without_clock
from chaos.faults import ALL, EVERY_N_STEPS, Kind, drawn, num_steps
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
RESIZES: tuple[Kind, ...] = ("resize", "kill", "resize", "term")
FEW: tuple[Kind, ...] = ("kill", "term", "stop")


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("sizes", "faults", "under_torchrun"),
    graded(
        slow=[(DDP, ALL, True), (PP, FEW, False), (RESIZED, RESIZES, True)],
        exhaustive=[(PP, ALL, True), (FSDP2, ALL, True), (TP, ALL, True), (DDP, FEW, False)],
    ),
)
def test_nothing_is_lost(
    sizes: dict[int, list[str]], faults: Sequence[Kind], under_torchrun: bool, tmp_path: Path
) -> None:
    length = f"--trainer.max_steps={num_steps(len(faults))}"
    sizes = {num_ranks: [*SMALL, *flags, length] for num_ranks, flags in sizes.items()}
    folders = [tmp_path / name for name in ("undisturbed", "hit")]
    for folder, planned in zip(folders, ((), faults), strict=True):
        with Job(folder, under_torchrun) as job:
            Trial(job, sizes).run(drawn(planned, seed=len(ALL), num_ranks=min(sizes)))
    runs = [folder / "run" for folder in folders]
    assert largest_difference(*runs) == 0
    pd.testing.assert_frame_equal(*map(metrics_without_clock, runs))
    first, second = ((run / "sample_audit.csv").read_text() for run in runs)
    assert first == second
    assert marked(tmp_path) == []
