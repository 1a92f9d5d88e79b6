"""Step 7: a run that is stopped in the middle of an epoch goes on, on the device and on the CPU, whichever saved it."""

from functools import partial
from pathlib import Path

from gpu_visit.step import TINY, Check, FailedError, Step
from gpu_visit.steps.float64 import agreement, compared

# Two epochs of five steps.
_FLAGS = (*TINY, "--trainer.max_epochs=2", "--trainer.precision=64-true", "--model.optimizer.lr=1e-3")
_STOP = ("--trainer.callbacks+=gpu_visit.stop.Terminate", "--trainer.callbacks.step=3")
_STOPPED = 143
_ON_CPU = "--trainer.accelerator=cpu"


def take(step: Step) -> None:
    """A run that nobody disturbs, two that are stopped, then those that go on from there."""
    step.check_all(
        {
            "a whole run": partial(_whole, step),
            "SIGTERM on the device": partial(_stopped, step, "stopped"),
            "SIGTERM on the CPU": partial(_stopped, step, "stopped-cpu", _ON_CPU),
        }
    )
    later: dict[str, Check] = {
        "the same command goes on": partial(_resumed, step),
        "device to CPU": partial(_goes_on, step, "to-cpu", "stopped", _ON_CPU),
        "CPU to device": partial(_goes_on, step, "to-device", "stopped-cpu"),
        "test on both": partial(_tested, step),
    }
    step.check_all(later)
    names = {"stopped": "resumed", "to-cpu": "device to CPU", "to-device": "CPU to device"}
    pairs = {_checkpoint(step, name): _checkpoint(step, "whole") for name in names if _checkpoint(step, name).exists()}
    results = compared(step, pairs) if _checkpoint(step, "whole").exists() else {}
    for name, title in names.items():
        if found := results.get(str(_checkpoint(step, name))):
            step.check(f"{title}, against the whole run", partial(agreement, found))


def _checkpoint(step: Step, name: str) -> Path:
    return step.run_folder(name) / "checkpoints" / "last.ckpt"


def _whole(step: Step) -> str:
    step.fit("whole", *_FLAGS)
    return "10 steps"


def _stopped(step: Step, name: str, *flags: str) -> str:
    ended = step.run(name, *step.fit_words(name, *_FLAGS, *_STOP, *flags))
    if ended.status != _STOPPED or not _checkpoint(step, name).exists():
        raise FailedError(ended.last_words)
    (step.work / f"{name}.ckpt").write_bytes(_checkpoint(step, name).read_bytes())  # the run may go on
    return f"exit status {_STOPPED}, and a checkpoint"


def _resumed(step: Step) -> str:
    step.output_of("resumed", *step.fit_words("stopped", *_FLAGS, "--resume=auto"))
    return "to its end"


def _goes_on(step: Step, name: str, source: str, *flags: str) -> str:
    step.fit(name, *_FLAGS, *flags, f"--ckpt_path={step.work / source}.ckpt")
    return "to its end"


def _tested(step: Step) -> str:
    """The same images right on both."""
    tables = {}
    for name, flags in {"tested": [], "tested-cpu": [_ON_CPU]}.items():
        words = step.fit_words(name, *_FLAGS, *flags, f"--ckpt_path={_checkpoint(step, 'whole')}")
        words[1] = "test"
        step.output_of(name, *words)
        tables[name] = (step.run_folder(name) / "per_rank.csv").read_text()
    if len(set(tables.values())) != 1:
        raise FailedError(str(tables))
    return tables["tested"].splitlines()[-1]
