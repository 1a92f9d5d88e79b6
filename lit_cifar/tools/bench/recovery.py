"""How long a run under torchrun stands still when a rank is killed."""

from time import monotonic

import numpy as np
import torch

from lit_cifar.tools.bench import Row, Settings
from lit_cifar.tools.chaos.audit import SampleLogReader
from lit_cifar.tools.chaos.job import Job, wait_until

_RANKS = 2
_MOST_KILLS = 4
_LIMIT_S = 120.0  # of a restart


def measure(settings: Settings) -> list[Row]:
    """Kill a rank of a training in `ddp` some times, and time what follows until both ranks have taken a step.

    Python, torch and Lightning are imported anew by each new process, as in any run under torchrun.

    Raises:
        RuntimeError: The training failed.
    """
    folder = settings.folder / "recovery"
    log = folder / "samples"
    log.mkdir(parents=True)
    device = "gpu" if torch.cuda.device_count() >= _RANKS else "cpu"
    words = ["fit", "--trainer.strategy=ddp", f"--trainer.accelerator={device}", f"--trainer.devices={_RANKS}"]
    words += ["--resume=auto", "--data.dataset=synthetic"]
    words += ["--data.batch_size=32", f"--model.arch={settings.arch}", "--model.stem=imagenet"]
    words += ["--last_checkpoint.every_n_steps=2", f"--run_dir={folder / 'run'}"]
    words += ["--trainer.callbacks+=lit_cifar.tools.chaos.audit.SampleLog", f"--trainer.callbacks.folder={log}"]
    reader = SampleLogReader(log)
    with Job(lambda _: words, folder=folder, max_restarts=_MOST_KILLS) as job:
        job.start(_RANKS)
        seconds = []
        for kill in range(min(settings.rounds, _MOST_KILLS)):
            _wait_for_steps(job, reader, start=(1, kill), steps=3)
            job.ranks()[(kill + 1) % _RANKS].kill()
            killed = monotonic()
            _wait_for_steps(job, reader, start=(1, kill + 1), steps=1)
            seconds.append(monotonic() - killed)
    name = "from kill -9 of a rank to the next optimizer step, ddp on 2 processes under torchrun"
    return [Row(name, "s", np.array(seconds), f"on the {device.upper()}")]


def _wait_for_steps(job: Job, reader: SampleLogReader, *, start: tuple[int, int], steps: int) -> None:
    """Until each rank of that start of the processes has taken so many."""

    def taken() -> bool:
        reader.refresh()
        ranks = [line.rank for line in reader.lines if line.start == start]
        return all(ranks.count(rank) >= steps for rank in range(_RANKS))

    wait_until(lambda: taken() or job.status is not None, limit_s=_LIMIT_S, poll_s=0.01)
    if not taken():
        words = "\n".join(job.log_since(0)[-8:])
        raise RuntimeError(f"the training under torchrun failed:\n{words}")
