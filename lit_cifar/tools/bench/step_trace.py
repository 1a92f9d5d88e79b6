"""One training step, recorded in every process by torch's profiler, and written.

The first steps warm up. One is timed as it is, as profiling takes time, one lets the profiler warm up, and the next is
recorded.
"""

import json
from contextlib import AbstractContextManager
from pathlib import Path
from time import monotonic_ns, perf_counter, time_ns
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.profiler import profile, record_function

from lit_cifar.errors import ConfigError
from lit_cifar.tools.bench.timeline import StageRecorder, observe_stages

STEP = "one training step"  # name of the recorded step among the events
STAGE = "stage"  # the category of a stage's work on a microbatch, in modes that have stages
_PLAIN, _PROFILED, _RECORDED, NUM_STEPS = range(2, 6)  # number of optimizer steps before each of them begins


class StepTrace(Callback):
    """Writes `rank0.json` and so on into a folder: the arguments of a `RankStep`, with events by the time of day.

    A step lasts from the end of the one before it, so it includes fetching its batch.
    """

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self._steps = 0
        self._start = 0.0
        self._plain_ms = 0.0
        self._recorder = StageRecorder()  # recorder of stages, in modes that have some

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        observe_stages(trainer, self._recorder)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        needed, there = NUM_STEPS * trainer.accumulate_grad_batches, trainer.num_training_batches
        if there < needed:
            problem = f"a trace needs {needed} batches in an epoch, and there are {there}"
            raise ConfigError(problem, remedy="pass a larger --data.num_train or a smaller --data.batch_size")
        self._profile = profile()
        self._step: AbstractContextManager[Any] = record_function(STEP)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step == self._steps:  # gradients are being accumulated
            return
        self._steps = trainer.global_step
        if pl_module.device.type == "cuda":
            torch.cuda.synchronize(pl_module.device)
        if self._steps == _PLAIN:
            self._start = perf_counter()
        elif self._steps == _PROFILED:
            self._plain_ms = 1000 * (perf_counter() - self._start)
            self._profile.start()
        elif self._steps == _RECORDED:
            self._recorder.begin(self._steps, pl_module)
            self._step.__enter__()
        elif self._steps == NUM_STEPS:
            self._step.__exit__(None, None, None)
            self._profile.stop()
            self._write(trainer)

    def _write(self, trainer: Trainer) -> None:
        file = self.folder / f"rank{trainer.global_rank}.json"
        self._profile.export_chrome_trace(str(file))
        profiled = json.loads(file.read_text())
        base_us = profiled.get("baseTimeNanoseconds", 0) / 1e3
        found = (event for event in profiled["traceEvents"] if event["ph"] == "X" and event.get("cat") != "Trace")
        ahead_us = (time_ns() - monotonic_ns()) / 1e3  # lead of the profiler's clock over the recorder's
        stages = [
            span | {"cat": STAGE, "tid": f"stage {span['tid']}", "ts": span["ts"] + ahead_us}
            for span in self._recorder.spans()
        ]
        events = [*(event | {"ts": base_us + event["ts"]} for event in found), *stages]
        file.write_text(json.dumps({"rank": trainer.global_rank, "events": events, "plain_ms": self._plain_ms}))
