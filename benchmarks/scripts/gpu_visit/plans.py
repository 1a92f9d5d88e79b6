"""The steps of a visit: what matters most first. Here are those that train shortly."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from gpu_visit import proofs, records, speed
from gpu_visit.compare import agreement, logged
from gpu_visit.one_device import one_process
from gpu_visit.step import FailedError, Step

_ON_CPU = "--trainer.accelerator=cpu"
_TINY = ["--model.stem=imagenet", "--data.dataset=synthetic", "--data.num_train=96", "--data.num_test=100"]
_TINY += ["--data.val_size=16", "--data.batch_size=16", "--trainer.max_epochs=1", "--trainer.log_every_n_steps=1"]
_TINY += ["--trainer.enable_progress_bar=false", "--figures.every_n_epochs=0", "--model.optimizer.lr=0.1"]
_EXACT = [*_TINY, "--trainer.precision=64-true", "--model.optimizer.lr=1e-3"]
_TWO_EPOCHS = [*_EXACT, "--trainer.max_epochs=2"]
_STOP = ("--trainer.callbacks+=gpu_visit.callbacks.Terminate", "--trainer.callbacks.step=3")
_STOPPED = 143


def modes_on_one_gpu(step: Step) -> None:
    """By `verify`, with all parts of a mode on the one GPU."""
    step.check_all(proofs.on_one_gpu(step))


def waits(step: Step) -> None:
    """Does the host ever wait for the device between two log points? Every mode, and a planted wait."""

    def check(name: str, flags: list[str], expected: int) -> str:
        path = step.work / f"{name}.json"
        watch = ["--trainer.callbacks+=gpu_visit.callbacks.HostWaits", f"--trainer.callbacks.path={path}"]
        # Fifteen steps in an epoch, none of which is a log point.
        size = ["--data.num_train=256", "--trainer.log_every_n_steps=1000", "--trainer.limit_val_batches=0"]
        step.fit(name, *_TINY, *size, *watch, *flags)
        places: dict[str, int] = json.loads(path.read_text())
        if sum(places.values()) != expected:
            shown = "; ".join(f"{count} x {place}" for place, count in places.items())
            raise FailedError(f"{sum(places.values())} waits, not {expected}: {shown}")
        return "found" if expected else "no wait in 9 steps"

    runs = {name: (flags, 0) for name, flags in one_process(on_gpu=step.visit.on_gpu).items()}
    if step.visit.on_gpu:
        runs["a planted wait"] = (["--trainer.callbacks.plant=true"], 1)
        runs["single, bf16"] = (["--trainer.precision=bf16-mixed"], 0)
    step.check_all({name: partial(check, name, *how) for name, how in runs.items()})


def precisions(step: Step) -> None:
    """Does every mode train in mixed precision? On a CPU Lightning takes bfloat16 in place of 16-mixed."""

    def check(name: str, flags: list[str]) -> str:
        step.fit(name, *_TINY, *flags)
        losses = [*logged(step.run_folder(name), "train/loss_step").values()]
        # Ten classes, and a network that has learned nothing yet.
        if not all(map(math.isfinite, losses)) or not abs(losses[0] - math.log(10)) < 1:
            raise FailedError(f"losses {losses}")
        return f"losses {losses[0]:.3f} to {losses[-1]:.3f}"

    runs = {
        f"{mode}, {precision}": [*flags, f"--trainer.precision={precision}"]
        for precision in (["16-mixed", "bf16-mixed"] if step.visit.on_gpu else ["bf16-mixed"])
        for mode, flags in one_process(on_gpu=step.visit.on_gpu).items()
    }
    step.check_all({name: partial(check, name, flags) for name, flags in runs.items()})


def saving(step: Step) -> None:
    """A run that is stopped in an epoch goes on, on the device and on the CPU, whichever saved it."""

    def check(name: str, before: list[str], after: list[str]) -> tuple[str, dict[str, float]]:
        ended = step.run(name, *step.words("fit", name, *_TWO_EPOCHS, *_STOP, *before))
        if ended.status != _STOPPED:
            raise FailedError(ended.last_words)
        return agreement(step.fit(name, *_TWO_EPOCHS, "--resume=auto", *after), whole)

    whole = step.fit("whole", *_TWO_EPOCHS)
    ways = {"device to device": ([], []), "device to CPU": ([], [_ON_CPU]), "CPU to device": ([_ON_CPU], [])}
    step.check_all({name: partial(check, name, *flags) for name, flags in ways.items()})


@dataclass(frozen=True)
class Plan:
    """A step to take."""

    title: str
    take: Callable[[Step], None]
    limit_s: float  # after which it ends, whatever is left of it


# What a visit is for stands first, and takes some 13 minutes on one GPU.
PLANS = (
    Plan("the default recipe three times, to its end", records.default_runs, limit_s=240),
    Plan("fit beside a plain loop", speed.plain_loop, limit_s=200),
    Plan("every mode on one GPU, in float64", modes_on_one_gpu, limit_s=150),
    Plan("muon_12_epochs three times", partial(records.recipe_runs, "muon_12_epochs", seeds=3), limit_s=150),
    Plan("muon_23_epochs three times", partial(records.recipe_runs, "muon_23_epochs", seeds=3), limit_s=240),
    Plan("tests that start processes", partial(proofs.tests, marker="slow"), limit_s=150),
    Plan("tests in one process", partial(proofs.tests, marker="not slow"), limit_s=120),
    Plan("relations on the GPU", proofs.relations, limit_s=120),
    Plan("the same bits with virtual replicas", proofs.same_bits, limit_s=120),
    Plan("every mode on several GPUs, in float64", proofs.on_several_gpus, limit_s=200),
    Plan("images per second on several GPUs", speed.scaling, limit_s=200),
    Plan("images per second", speed.throughput, limit_s=240),
    Plan("no host waits between log points", waits, limit_s=120),
    Plan("mixed precision in every mode", precisions, limit_s=120),
    Plan("save, resume, SIGTERM", saving, limit_s=120),
    Plan("the articles' runs, to their end", records.articles_runs, limit_s=450),
    Plan("changes of a recipe, on held-out images", records.trials_of_recipe, limit_s=1200),
)
