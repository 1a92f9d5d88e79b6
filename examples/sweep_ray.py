"""A sweep with Ray Tune, in which each trial is a `python -m lit_cifar fit` of its own, on as many devices as you like.

    pip install -e '.[sweeps]'
    python examples/sweep_ray.py --folder=runs/tuned --trials=20 --cpus=2 \
        --trainer.max_epochs=5 --trainer.strategy=ddp --trainer.devices=2

Tune draws the parameters in this process, and ends bad trials early (ASHA); all ranks of a trial get the same ones, as
flags. As many trials train at once as `--cpus` and `--gpus` of each let.
The same command goes on with a sweep that was stopped or killed, in the middle of its trials.
"""

import argparse
import csv
import ctypes
import fcntl
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ray import tune
from ray.tune.schedulers import ASHAScheduler
from ray.tune.search import BasicVariantGenerator

# The search space: what is drawn, by the flag through which `fit` gets it.
PARAMETERS = {
    "model.optimizer.lr": tune.loguniform(1e-4, 1),
    "model.label_smoothing": tune.uniform(0, 0.2),
    "data.augment.padding": tune.randint(0, 5),
}


def end_with_parent() -> None:
    """Let the trial be stopped by SIGTERM, upon which it saves, when its worker of Ray ends in any way (Linux)."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # 1 is PR_SET_PDEATHSIG


class Fit(tune.Trainable):
    """A trial. One that Tune starts again resumes, and reports the epochs before once more."""

    def setup(self, config: dict[str, Any], *, folder: Path, flags: list[str]) -> None:
        self.run = folder / f"trial-{int(self.trial_id.rpartition('_')[2])}"
        self.run.mkdir(exist_ok=True)
        lock = (self.run / ".sweep").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)  # held by `fit` too: one that a killed sweep has left is still saving
        command = [sys.executable, "-m", "lit_cifar", "fit", f"--run_dir={self.run}", "--resume=auto", *flags]
        command += [f"--{name}={value}" for name, value in config.items()]
        self.fit = subprocess.Popen(command, preexec_fn=end_with_parent, pass_fds=[lock.fileno()])
        lock.close()

    def step(self) -> dict[str, Any]:
        """Wait for an epoch; return its accuracy."""
        while True:
            status = self.fit.poll()  # asked before the file is read, so that no epoch is missed
            reached = self.validated()
            if len(reached) > self.iteration:
                return {"val_acc": reached[self.iteration]}
            if status == 0:
                return {"val_acc": reached[-1], "done": True}
            if status is not None:
                raise RuntimeError(f"fit ended with status {status}")
            time.sleep(0.5)

    def validated(self) -> list[float]:
        """The validation accuracy of each epoch so far, from a run folder that `fit` may be writing to."""
        path = self.run / "metrics.csv"
        rows = csv.DictReader(path.read_text().splitlines()) if path.exists() else []
        return [float(row["val/acc"]) for row in rows if row.get("val/acc")]

    def save_checkpoint(self, checkpoint_dir: str) -> dict[str, Any]:
        return {"run": str(self.run)}  # which has the checkpoints of `fit`; Tune adds the number of epochs

    def load_checkpoint(self, checkpoint: dict[str, Any] | None) -> None:
        pass

    def cleanup(self) -> None:
        self.fit.terminate()  # all ranks agree on a step, save and end
        self.fit.wait()


def main() -> None:
    parser = argparse.ArgumentParser(epilog="All other flags go to `python -m lit_cifar fit`.", allow_abbrev=False)
    parser.add_argument("--folder", type=Path, required=True, help="of Tune's state, and of the run folders of trials")
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--cpus", type=int, default=1, help="cores of each trial")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs of each trial")
    options, flags = parser.parse_known_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    fit: Any = tune.with_parameters(Fit, folder=folder, flags=flags)
    fit = tune.with_resources(fit, {"cpu": options.cpus, "gpu": options.gpus})
    if tune.Tuner.can_restore(str(folder / "tune")):
        tuner = tune.Tuner.restore(str(folder / "tune"), fit, resume_errored=True, param_space=PARAMETERS)
    else:
        config = tune.TuneConfig(
            metric="val_acc",
            mode="max",
            num_samples=options.trials,
            scheduler=ASHAScheduler(max_t=10_000, reduction_factor=2),
            search_alg=BasicVariantGenerator(random_state=0),
        )
        run_config = tune.RunConfig(name="tune", storage_path=str(folder))
        tuner = tune.Tuner(fit, param_space=PARAMETERS, tune_config=config, run_config=run_config)
    results = tuner.fit()
    for result in results:
        print(Path(result.path).name, result.error or result.metrics["val_acc"], result.config)
    best = results.get_best_result(scope="last")
    print(f"best: {best.metrics['val_acc']} with {best.config}")


if __name__ == "__main__":
    main()
