"""The pause of a run when a rank is killed: under torchrun, and where `fit` starts its processes itself."""

from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from time import monotonic

import torch

from lit_cifar.tools.bench import Row, Settings, interleaved
from lit_cifar.tools.chaos.audit import SampleLogReader
from lit_cifar.tools.chaos.job import FIT, Job, wait_until

_RANKS = 2
_LIMIT_S = 120.0  # the longest start
_LAUNCHERS: dict[str, tuple[str, ...]] = {"under torchrun": (), "with --max_restarts": FIT}


def measure(settings: Settings) -> list[Row]:
    """Kill a rank of a training in `ddp`, and time the pause until both ranks have taken a step; several times."""
    device = "gpu" if torch.cuda.device_count() >= _RANKS else "cpu"
    measurements = {name: partial(_recovery, settings, words, device) for name, words in _LAUNCHERS.items()}
    found = interleaved(measurements, rounds=settings.rounds)
    what = "from kill -9 of a rank to the next optimizer step, ddp on 2 processes"
    return [Row(f"{what} {name}", "s", seconds, f"on the {device.upper()}") for name, seconds in found.items()]


def _recovery(settings: Settings, launcher: tuple[str, ...], device: str) -> float:
    folder = Path(mkdtemp(dir=settings.folder))
    log = folder / "samples"
    log.mkdir(parents=True)
    words = ["fit", "--trainer.strategy=ddp", f"--trainer.accelerator={device}", f"--trainer.devices={_RANKS}"]
    words += ["--resume=auto", "--data.dataset=synthetic", "--data.batch_size=32", f"--model.arch={settings.arch}"]
    words += ["--model.stem=imagenet", "--last_checkpoint.every_n_steps=2", f"--run_dir={folder / 'run'}"]
    words += ["--trainer.callbacks+=lit_cifar.tools.chaos.audit.SampleLog", f"--trainer.callbacks.folder={log}"]
    reader = SampleLogReader(log)
    with Job(lambda _: words, folder=folder, max_restarts=1, launcher=launcher) as job:
        job.start(_RANKS)
        _wait_for_steps(job, reader, start=(1, 0), steps=3)
        rank = job.ranks()[1]
        killed = monotonic()
        rank.kill()
        _wait_for_steps(job, reader, start=(1, 1), steps=1)
        return monotonic() - killed


def _wait_for_steps(job: Job, reader: SampleLogReader, *, start: tuple[int, int], steps: int) -> None:
    def taken() -> bool:
        reader.refresh()
        ranks = [line.rank for line in reader.lines if line.start == start]
        return all(ranks.count(rank) >= steps for rank in range(_RANKS))

    wait_until(lambda: taken() or job.status is not None, limit_s=_LIMIT_S, poll_s=0.01)
    if not taken():
        words = "\n".join(job.log_since(0)[-8:])
        raise RuntimeError(f"the training failed:\n{words}")
