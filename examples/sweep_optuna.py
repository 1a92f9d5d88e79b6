"""A sweep with Optuna, in which each trial is a `python -m lit_cifar fit` of its own, on as many devices as you like.

    pip install -e '.[sweeps]'
    python examples/sweep_optuna.py --folder=runs/sweep --trials=20 \
        --trainer.max_epochs=5 --trainer.strategy=ddp --trainer.devices=2

This process alone draws the parameters and ends bad trials early; all ranks of a trial get the same ones, as flags.
The same command goes on with a sweep that was stopped or killed, in the middle of its trial.
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

import optuna
from optuna.trial import Trial, TrialState


def parameters(trial: Trial) -> list[str]:
    """The search space: what is drawn, and the flag by which `fit` gets it."""
    return [
        f"--model.optimizer.lr={trial.suggest_float('lr', 1e-4, 1, log=True)}",
        f"--model.label_smoothing={trial.suggest_float('label_smoothing', 0, 0.2)}",
        f"--data.augment.padding={trial.suggest_int('padding', 0, 4)}",
    ]


def run_of(trial: Trial | optuna.trial.FrozenTrial) -> str:
    """Name of the trial's run folder: one that goes on with another trial has that trial's."""
    return str(trial.user_attrs.get("run", f"trial-{trial.number}"))


def validated(run: Path) -> list[float]:
    """The validation accuracy of each epoch so far, from a run folder that `fit` may be writing to."""
    path = run / "metrics.csv"
    rows = csv.DictReader(path.read_text().splitlines()) if path.exists() else []
    return [float(row["val/acc"]) for row in rows if row.get("val/acc")]


def end_with_parent() -> None:
    """Let the trial be stopped by SIGTERM, upon which it saves, when this process ends in any way (Linux)."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # 1 is PR_SET_PDEATHSIG


def train(trial: Trial, run: Path, flags: list[str]) -> tuple[int | None, list[float]]:
    """Run the trial to its end, or to the pruner's. Returns its exit status, None if pruned, and its accuracies."""
    command = [sys.executable, "-m", "lit_cifar", "fit", f"--run_dir={run}", "--resume=auto"]
    fit = subprocess.Popen([*command, *flags, *parameters(trial)], preexec_fn=end_with_parent)
    reached: list[float] = []
    while True:
        status = fit.poll()  # asked before the file is read, so that no epoch is missed
        for accuracy in validated(run)[len(reached) :]:
            trial.report(accuracy, step=len(reached))
            reached.append(accuracy)
            if trial.should_prune():
                fit.terminate()  # all ranks agree on a step, save and end
                fit.wait()
                return None, reached
        if status is not None:
            return status, reached
        time.sleep(0.5)


def main() -> None:
    parser = argparse.ArgumentParser(epilog="All other flags go to `python -m lit_cifar fit`.", allow_abbrev=False)
    parser.add_argument("--folder", type=Path, required=True, help="of the study, and of the run folders of its trials")
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--unpruned", type=int, default=5, help="so many trials are complete before one is pruned")
    options, flags = parser.parse_known_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    lock = (options.folder / ".lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: another sweep is at work here
    signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C reaches the trial too, whose status then ends the sweep
    storage, pruner = f"sqlite:///{options.folder}/study.db", optuna.pruners.MedianPruner(options.unpruned)
    study = optuna.create_study(
        storage=storage, study_name="sweep", load_if_exists=True, direction="maximize", pruner=pruner
    )
    for left in study.get_trials(states=[TrialState.RUNNING]):  # by a sweep that was killed: a new trial takes it over
        study.enqueue_trial(left.params, user_attrs={"run": run_of(left)})
        study.tell(left.number, state=TrialState.FAIL)
    while True:
        trials = study.get_trials()
        number = sum(each.state.is_finished() for each in trials) - sum("run" in each.user_attrs for each in trials)
        if number >= options.trials:
            break
        # Seeded by the number: a sweep that was killed draws what it would have drawn.
        study.sampler = optuna.samplers.TPESampler(seed=number)
        trial = study.ask()
        status, reached = train(trial, options.folder / run_of(trial), flags)
        if status in (2, 130, 143):  # refused or stopped: the next sweep in this folder tries it again
            sys.exit(status)
        state = {0: TrialState.COMPLETE, None: TrialState.PRUNED}.get(status, TrialState.FAIL)
        study.tell(trial, reached[-1] if status == 0 else None, state)
        print(f"{run_of(trial)}: {state.name.lower()}, val/acc {reached[-1:]}, {trial.params}", flush=True)
    best = study.best_trial
    print(f"best: {best.value} with {best.params}, in {options.folder / run_of(best)}")


if __name__ == "__main__":
    main()
