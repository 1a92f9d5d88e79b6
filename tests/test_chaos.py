"""`chaos`: its plan and its judgement as plain functions, its tools on real processes, and a short run of it."""

import errno
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from commands import TINY, launch, mode_flags, run_here
from processes import marked
from rich.console import Console
from torch import Tensor

from lit_cifar.data import Batch
from lit_cifar.launch.forked import ForkedRun
from lit_cifar.tools.chaos.audit import (
    Batches,
    audit,
    distance,
    effective,
    metric_problems,
    num_repeated,
    position_problems,
    receipt_problems,
)
from lit_cifar.tools.chaos.experiment import JobResult, plan_for
from lit_cifar.tools.chaos.faults import (
    CAN_FILL,
    EQUAL_SIZE,
    Fault,
    equal_size_faults,
    fill_disk,
    resized_faults,
    schedule_faults,
    shares,
)
from lit_cifar.tools.chaos.injector import Event, Trial, TrialError
from lit_cifar.tools.chaos.job import ANEW, WORKERS, TorchrunJob, Worker, is_anew, read_workers, wait_until
from lit_cifar.tools.chaos.sample_log import LAUNCH, LoggedStep, SampleLog, SampleLogReader, Start
from lit_cifar.tools.chaos.training import Configuration, Training, chosen_modes
from lit_cifar.tools.commands.chaos import result_table
from lit_cifar.tools.commands.terminal import exit_orderly_when_terminated

FIRST, SECOND, THIRD = (1, 0), (1, 1), (2, 0)
SMALL = Configuration(flags=(), steps_per_epoch=20, precision="32-true")

# The plan.


@pytest.mark.parametrize(("num_faults", "parts"), [(1, (1, 0)), (2, (1, 1)), (4, (3, 1)), (20, (14, 6))])
def test_most_faults_hit_a_job_that_keeps_its_size(num_faults: int, parts: tuple[int, int]) -> None:
    assert shares(num_faults) == parts


@pytest.mark.parametrize("resized", [False, True])
def test_a_seed_means_one_plan(resized: bool) -> None:
    training = Training.under(SMALL, chosen_modes(["ddp"], devices=2)[0], 14, resized=resized)
    plans = [plan_for(training, 14, seed=seed) for seed in (3, 3, 4)]
    assert plans[0] == plans[1] != plans[2]


@pytest.mark.parametrize("seed", range(5))
def test_a_plan_hits_with_every_kind_at_every_part_of_the_training(seed: int) -> None:
    faults = schedule_faults(equal_size_faults(16, seed=seed), seed=seed, sizes=[2], first_step=10, last_step=170)
    assert [fault.number for fault in faults] == [*range(1, 17)]
    assert all(10 * part <= fault.step < 10 * (part + 1) for part, fault in enumerate(faults, 1))
    assert sorted((fault.kind, fault.aim) for fault in faults) == sorted(2 * EQUAL_SIZE)
    assert {fault.rank for fault in faults if fault.kind in ("kill", "term", "stop")} == {0, 1}
    assert all((fault.rank is None) == (fault.kind in ("truncate", "disk")) for fault in faults)
    assert all((fault.keep is not None) == (fault.kind == "truncate") for fault in faults)
    assert all((fault.part is not None) == (fault.aim == "start") for fault in faults)
    assert {fault.size for fault in faults} == {2}


def test_a_resized_job_goes_through_all_sizes_and_only_its_own_ranks_are_hit() -> None:
    faults = schedule_faults(resized_faults(8), seed=0, sizes=[2, 1], first_step=0, last_step=80)
    assert [fault.kind for fault in faults] == ["resize", "kill", "resize", "term"] * 2
    assert [fault.size for fault in faults] == [1, 1, 2, 2] * 2
    assert [fault.rank for fault in faults[1::4]] == [0, 0]
    assert {fault.rank for fault in faults[3::4]} == {0, 1}


def test_without_a_disk_to_fill_the_others_remain() -> None:
    assert {kind for kind, _ in equal_size_faults(12, seed=0, full_disk=False)} == {"kill", "term", "stop", "truncate"}


def test_more_faults_than_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="3 faults do not fit"):
        schedule_faults(resized_faults(3), seed=0, sizes=[2, 1], first_step=5, last_step=7)


@pytest.mark.parametrize("num_faults", [1, 4, 20, 100])
def test_the_training_is_long_enough_for_its_faults(num_faults: int) -> None:
    for resized, count in zip((False, True), shares(num_faults), strict=True):
        training = Training.under(SMALL, chosen_modes(["ddp"], devices=2)[0], count, resized=resized)
        faults = plan_for(training, count, seed=0)
        assert all(10 <= fault.step < training.num_steps - 8 for fault in faults)


def test_what_one_process_does_alone_is_what_the_mode_does() -> None:
    """Flags alone: the same number of images normalised together."""
    alone = {mode.name: mode.flags[1] for mode in chosen_modes(["ddp", "pp", "fsdp2", "tp"], devices=2)}
    separate = "--model.ghost_batchnorm."
    assert {name: f"{separate}num_shards=2" in flags for name, flags in alone.items()} == {
        "ddp": False,
        "pp": False,
        "fsdp2": True,
        "tp": False,
    }
    assert f"{separate}num_microbatches=2" in alone["pp"]
    assert not any(flag.startswith(separate) for flag in (*alone["ddp"], *alone["tp"]))


def test_with_virtual_replicas_a_job_goes_to_other_sizes_and_modes_and_keeps_its_bits() -> None:
    ddp, pipelines = chosen_modes(["ddp", "ddp_pp"], devices=4, num_parts=4)
    assert ddp.sizes == (4, 1)  # 8 do not divide the 4 parts
    assert not any("microbatches" in flag for flag in pipelines.flags[4])
    (ddp,) = chosen_modes(["ddp"], devices=2, num_parts=4)
    assert {size: flags[1] for size, flags in ddp.flags.items()} == {
        2: "--trainer.strategy=ddp",
        1: "--trainer.strategy=auto",
        4: "--trainer.strategy=fsdp2",
    }
    assert all(flags[0] == "--virtual_replicas=4" for flags in ddp.flags.values())
    (ddp_of_two,) = chosen_modes(["ddp"], devices=2, num_parts=1)
    assert ddp_of_two.num_processes == 2  # not one instead: `fit` refuses it
    training = Training.under(SMALL, ddp, 3, resized=True)
    assert (training.precision, training.has_same_bits) == ("32-true", True)
    assert [fault.size for fault in plan_for(training, 6, seed=0)[::2]] == [1, 4, 2]


# The samples.


def training(starts: dict[Start, range], *, num_ranks: int = 2) -> list[LoggedStep]:
    """Two epochs of three steps over ids 0 to 4, of which each start runs some of the six steps."""
    batches = [[0, 1], [2, 3], [4]]
    return [
        LoggedStep(start=start, rank=rank, dp_rank=rank, epoch=step // 3, step=step, ids=tuple(ids[rank::num_ranks]))
        for start, steps in starts.items()
        for step in steps
        for rank in range(num_ranks)
        for ids in [batches[step % 3]]
    ]


BASELINE: Batches = effective(training({FIRST: range(6)}))[0]


def without(lines: list[LoggedStep], *, step: int, rank: int | None = None) -> list[LoggedStep]:
    return [line for line in lines if line.step != step or rank not in (None, line.rank)]


def test_the_last_run_of_a_step_counts() -> None:
    found = audit(training({FIRST: range(4), SECOND: range(2, 5), THIRD: range(4, 6)}), baseline=BASELINE)
    assert (found.missing, found.doubled, found.moved, found.problems) == (0, 0, 0, [])
    assert found.repeated == 2 + 1


SOUND = {
    "a step that only some processes finished": without(training({FIRST: range(4)}), step=3, rank=1)
    + training({SECOND: range(3, 6)}),
    "another number of processes": training({FIRST: range(4)}) + training({SECOND: range(3, 6)}, num_ranks=1),
    "several loader steps of one optimizer step": [
        replace(line, ids=(i,)) for line in training({FIRST: range(6)}) for i in line.ids
    ],
}


@pytest.mark.parametrize("lines", SOUND.values(), ids=SOUND)
def test_what_does_no_harm(lines: list[LoggedStep]) -> None:
    assert audit(lines, baseline=BASELINE).problems == []
    assert num_repeated(SOUND["several loader steps of one optimizer step"]) == 0


WHOLE = training({FIRST: range(6)})
LOST = training({FIRST: range(2), SECOND: range(3, 6)})
# After a restart at step 1 the first batch comes again, and the epoch goes on from there.
AGAIN = [replace(line, step=line.step + 1) for line in training({SECOND: range(2)})]
SWAPPED = [replace(line, step={0: 1, 1: 0}.get(line.step, line.step)) for line in WHOLE]
FOREIGN = [replace(line, ids=(7,)) if line.ids == (4,) and line.epoch else line for line in WHOLE]
TOO_MANY = LoggedStep(start=FIRST, rank=0, dp_rank=0, epoch=2, step=6, ids=(0, 1))
HARM: dict[str, tuple[list[LoggedStep], tuple[int, int, int], str]] = {
    "a lost step": (LOST, (1, 0, 1), "epoch 0, step 2: was never run\nepoch 0: 1 samples are missing, e.g. 4"),
    "a part that was lost": (without(WHOLE, step=4, rank=1), (1, 0, 1), "epoch 1"),
    "a loader that goes on too early": (
        training({FIRST: range(1)}) + AGAIN + training({SECOND: range(3, 6)}),
        (1, 2, 2),
        "2 samples are unknown or counted too often, e.g. 0",
    ),
    "a batch twice in one start": (WHOLE + training({FIRST: range(5, 6)}), (0, 1, 1), "epoch 1"),
    "steps that changed places in a whole epoch": (SWAPPED, (0, 0, 2), "other samples than in the uninterrupted run"),
    "a foreign sample": (FOREIGN, (1, 1, 1), "epoch 1"),
    "a step too many": ([*WHOLE, TOO_MANY], (0, 2, 1), "epoch 2, step 6: is not in the uninterrupted run"),
}


@pytest.mark.parametrize(("lines", "counts", "words"), HARM.values(), ids=HARM)
def test_harm_is_found(lines: list[LoggedStep], counts: tuple[int, int, int], words: str) -> None:
    found = audit(lines, baseline=BASELINE)
    assert (found.missing, found.doubled, found.moved) == counts
    assert words in "\n".join(found.problems)


def test_processes_of_one_dp_rank_must_read_the_same() -> None:
    lines = training({FIRST: range(6)}, num_ranks=1)
    twins = [replace(line, rank=1) for line in lines]
    assert audit([*lines, *twins], baseline=BASELINE).problems == []
    twins[0] = replace(twins[0], ids=(1, 0))
    assert effective([*lines, *twins])[1] == [
        "epoch 0, step 0: the processes of data-parallel rank 0 read different samples"
    ]


# The sample log.


def trainer_at(*, rank: int = 0, step: int = 0, epoch: int = 0) -> Any:
    strategy = SimpleNamespace(distributed_sampler_kwargs={"num_replicas": 2, "rank": rank})
    return SimpleNamespace(
        global_rank=rank, world_size=2, global_step=step, current_epoch=epoch, strategy=strategy, lightning_module=None
    )


def write_step(log: SampleLog, *, rank: int, step: int, ids: list[int]) -> None:
    """As Lightning does: by the end of the batch, the optimizer has taken its step."""
    batch = Batch(torch.empty(0), torch.empty(0), torch.tensor(ids), 1.0)
    module: Any = None
    log.on_train_batch_start(trainer_at(rank=rank, step=step), module, batch, 0)
    log.on_train_batch_end(trainer_at(rank=rank, step=step + 1), module, None, batch, 0)


def test_the_journal_reads_back_as_it_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = SampleLogReader(tmp_path)
    reader.refresh()
    assert (reader.lines, reader.newest, reader.first_step(FIRST)) == ([], None, None)
    for restart in (0, 2):
        monkeypatch.setenv(LAUNCH, "1")
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restart))
        for rank in (0, 1):
            log = SampleLog(str(tmp_path))
            log.setup(trainer_at(rank=rank), None, "fit")  # type: ignore[arg-type]
            for step in (5, 6):
                write_step(log, rank=rank, step=step, ids=[10 * step + rank])
        reader.refresh()
        assert reader.newest == (1, restart)
    assert (reader.first_step((1, 2)), reader.last_step((1, 2)), reader.first_step((1, 1))) == (5, 6, None)
    assert len(reader.lines) == 8
    assert reader.lines[0] == LoggedStep(start=FIRST, rank=0, dp_rank=0, epoch=0, step=5, ids=(50,))
    assert reader.num_starts == 3, "the second one did not live to announce itself"
    assert effective(reader.lines)[0] == {(0, 5): [50, 51], (0, 6): [60, 61]}


def test_a_line_that_is_being_written_waits(tmp_path: Path) -> None:
    reader = SampleLogReader(tmp_path)
    line = json.dumps({"start": [1, 0], "rank": 0, "dp_rank": 0, "epoch": 0, "step": 3, "ids": [1]}) + "\n"
    file = tmp_path / "rank0.jsonl"
    file.write_text(line + line[:9])
    reader.refresh()
    assert len(reader.lines) == 1
    file.write_text(line + line)
    reader.refresh()
    assert len(reader.lines) == 2


# The end.


def save_end(path: Path, **changes: Any) -> Path:
    """A checkpoint of a network of two parameters."""
    content: dict[str, Any] = {"epoch": 3, "global_step": 60, "lr_schedulers": [{"last_epoch": 60}]}
    content |= {"state_dict": weights(), "optimizer_states": momentum(0.3)}
    torch.save(content | changes, path)
    return path


def weights(*, weight: float | Tensor = 0.1, mean: float | Tensor = 5.0) -> dict[str, Tensor]:
    return {"fc.weight": torch.zeros(3) + weight, "bn.running_mean": torch.zeros(3) + mean}


def momentum(value: float | Tensor) -> list[dict[str, Any]]:
    return [{"state": {0: {"momentum_buffer": torch.zeros(3) + value}}, "param_groups": [{"params": [0]}]}]


def one_ulp_up(value: float) -> Tensor:
    return torch.tensor([value, torch.nextafter(torch.tensor(value), torch.tensor(9.0)), value])


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"state_dict": weights(weight=one_ulp_up(0.1))}, "fc.weight"),
        ({"state_dict": weights(mean=one_ulp_up(5.0))}, "bn.running_mean"),
        ({"optimizer_states": momentum(one_ulp_up(0.3))}, "fc.weight:momentum_buffer"),
    ],
)
def test_a_unit_in_the_last_place_is_a_difference(changes: dict[str, Any], name: str, tmp_path: Path) -> None:
    expected, same = save_end(tmp_path / "a.ckpt"), save_end(tmp_path / "b.ckpt")
    assert distance(same, expected)[0] == 0.0
    gap, where = distance(save_end(tmp_path / "c.ckpt", **changes), expected)
    assert 0.0 < gap < 1e-6
    assert where == name


def test_counters_must_be_the_same(tmp_path: Path) -> None:
    expected = save_end(tmp_path / "a.ckpt")
    assert position_problems(save_end(tmp_path / "b.ckpt"), expected) == []
    changed = save_end(tmp_path / "c.ckpt", global_step=59, lr_schedulers=[{"last_epoch": 59}])
    assert [problem.split()[0] for problem in position_problems(changed, expected)] == ["global_step", "lr_schedulers"]


METRICS = "epoch,step,train/loss,train/images_per_s\n0,19,0.5,100.0\n0,19,,90.0\n1,39,0.25,\n"
RECEIPT = "epoch,steps,samples,digest\n0,20,628,aa\n1,20,628,bb\n"


@pytest.mark.parametrize(
    ("problems_of", "expected", "content", "words"),
    [
        (metric_problems, METRICS, METRICS, []),
        (metric_problems, METRICS, METRICS.replace("100.0", "7"), []),  # but for the clock
        (metric_problems, METRICS, METRICS.replace("0.25", "0.26"), ["train/loss of step 39"]),
        (metric_problems, METRICS, METRICS.replace("0.5", ""), ["of step 19"]),
        (metric_problems, METRICS, METRICS.replace("1,39,0.25,\n", ""), ["1 lines instead of 2"]),
        (metric_problems, METRICS, METRICS + "1,39,0.25,\n", ["3 lines instead of 2"]),
        (receipt_problems, RECEIPT, RECEIPT, []),
        (receipt_problems, RECEIPT, RECEIPT.replace("bb", "bc"), ["from epoch 1 on"]),
        (receipt_problems, RECEIPT, RECEIPT.replace("1,20,628,bb\n", ""), ["from epoch 1 on"]),
        (receipt_problems, RECEIPT, RECEIPT + "1,20,628,bb\n", ["from epoch 2 on"]),
        (receipt_problems, RECEIPT, None, ["from epoch 0 on"]),
        (receipt_problems, None, None, [""]),  # two runs without receipts are not the same
    ],
)
def test_metrics_and_receipts_must_be_the_same(
    problems_of: Callable[[Path, Path], list[str]],
    expected: str | None,
    content: str | None,
    words: list[str],
    tmp_path: Path,
) -> None:
    files = tmp_path / "found.csv", tmp_path / "expected.csv"
    for file, text in zip(files, (content, expected), strict=True):
        if text is not None:
            file.write_text(text)
    problems = problems_of(*files)
    assert len(problems) == len(words)
    assert all(word in problem for word, problem in zip(words, problems, strict=True))


# The trial, with a job that is only pretended.


class PretendedJob:
    """Writes sample logs as a job would: each start begins where it is told to, and ends by the fault."""

    def __init__(self, folder: Path, *, begins: list[int], statuses: tuple[int | None, ...] = ()) -> None:
        self.folder = folder
        self.begins = begins
        self.statuses = [*statuses]
        self.status: int | None = None
        self.log_bytes = 0
        self.starts = 0
        self.newest: list[Worker] = []

    def start(self, num_processes: int) -> None:
        self.status = self.statuses.pop(0) if self.statuses else None
        self._run()

    @property
    def workers(self) -> list[Worker]:
        return [
            Worker(start=(launch, 0), rank=0, pid=0, anew=launch == 1, at_s=time.monotonic())
            for launch in range(1, self.starts + 1)
        ]

    def terminate(self, *, limit_s: float) -> bool:
        return True

    def ranks(self) -> dict[int, psutil.Process]:
        return {}

    def log_since(self, offset: int) -> list[str]:
        return ["RuntimeError: the address is in use"]

    def last_words(self) -> list[str]:
        return self.log_since(0)

    def _run(self) -> None:
        lines = []
        if self.begins:
            self.starts += 1
            first = self.begins.pop(0)
            content = {"start": (self.starts, 0), "rank": 0, "dp_rank": 0, "epoch": 0, "ids": [0]}
            lines = [json.dumps(content | {"step": step}) for step in range(first, first + 12)]
        with (self.folder / "rank0.jsonl").open("a") as file:
            file.writelines(line + "\n" for line in lines)


def trial_of(tmp_path: Path, job: PretendedJob) -> Trial:
    pretended: Any = job
    return Trial(pretended, SampleLogReader(tmp_path), tmp_path / "run", 4, 1.0, lambda line: None)


RESIZE = Fault(number=1, kind="resize", aim="step", step=10, rank=None, size=1, delay_s=0.0)


@pytest.mark.parametrize(("begin", "repeated"), [(12, 0), (9, 3), (0, 12)])
def test_who_was_asked_to_stop_may_repeat_nothing(begin: int, repeated: int, tmp_path: Path) -> None:
    trial = trial_of(tmp_path, PretendedJob(tmp_path, begins=[0, begin], statuses=(None, 0)))
    trial.run([RESIZE], size=2)
    (event,) = trial.events
    assert (event.step, event.resumed_step, event.repeated, event.anew) == (11, begin, repeated, False)
    assert len(trial.problems) == (repeated > 0)


@pytest.mark.parametrize(
    ("statuses", "words"),
    [
        ((1,) * 9, "again and again: RuntimeError: the address is in use"),
        ((0,), "has ended, and the first step is not reached"),
    ],
)
def test_a_job_is_given_up_that_fails_again_and_again_or_ends_before_its_faults(
    statuses: tuple[int, ...], words: str, tmp_path: Path
) -> None:
    trial = trial_of(tmp_path, PretendedJob(tmp_path, begins=[], statuses=statuses))
    with pytest.raises(TrialError, match=words):
        trial.run([RESIZE], size=2)


@pytest.mark.parametrize(("anew", "least_s"), [(False, 0.2), (True, 0.1)])
def test_a_second_kill_comes_at_a_share_of_what_such_a_start_has_taken(
    anew: bool, least_s: float, tmp_path: Path
) -> None:
    job, sent = PretendedJob(tmp_path, begins=[]), []
    victim = SimpleNamespace(pid=7, send_signal=sent.append)
    job.ranks = lambda: {0: victim}  # type: ignore[method-assign]
    job.newest = [Worker(start=(1, 1), rank=0, pid=7, anew=anew, at_s=time.monotonic())]
    trial = trial_of(tmp_path, job)
    trial.start_s, trial._start_s = 0.4, {True: 0.2}  # of forked ones none has been seen yet
    fault = replace(RESIZE, kind="kill", aim="start", rank=0, part=0.5)
    event = Event(fault=fault, at_s=0.0, step=9, pids=[3])
    trial._kill_once_more(event)
    assert (event.pids, sent) == ([3, 7], [signal.SIGKILL])
    assert event.again_s is not None
    assert event.again_s >= least_s


# The disk and processes.


WRITE = """
import sys
sys.stdin.read()
try:
    open(sys.argv[1], "wb").write(bytes(4 << 20))
except OSError as error:
    sys.exit(error.errno)
"""


@pytest.mark.skipif(not CAN_FILL, reason="this system sets no limits on other processes")
def test_a_limit_on_files_lets_a_write_fail(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", WRITE, str(tmp_path / "file")], stdin=subprocess.PIPE) as process:
        fill_disk([psutil.Process(process.pid)])
        process.communicate(b"")
    assert process.returncode == errno.EFBIG


@pytest.fixture
def onlooker(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """One that reads a job's log, as `tail -f` of a user does."""
    log = tmp_path / "log.txt"
    log.touch()
    with subprocess.Popen(["tail", "-f", str(log)], stdout=subprocess.DEVNULL) as process:
        yield process
        process.kill()


@pytest.mark.parametrize("anew_every", [0, 1])
def test_stopped_and_orphaned_processes_of_a_job_are_ended(
    anew_every: int, onlooker: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    flags = ["fit", *TINY, *mode_flags("ddp"), f"--run_dir={tmp_path / 'run'}"]
    with TorchrunJob(lambda size: flags, folder=tmp_path, max_restarts=0, anew_every=anew_every) as job:
        job.start(2)
        assert wait_until(lambda: 1 in job.ranks(), limit_s=60)
        rank = job.ranks()[1]
        rank.send_signal(signal.SIGSTOP)
        psutil.Process(rank.ppid()).kill()
        assert wait_until(lambda: job.status is not None, limit_s=10)
        assert rank in marked(tmp_path), "an orphan"
    assert [process.pid for process in marked(tmp_path)] == [onlooker.pid]
    assert not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE


@pytest.mark.slow
def test_workers_find_the_same_whether_they_are_forked_or_python_starts_for_them(tmp_path: Path) -> None:
    """They fail twice, and so are started three times."""
    settings = {LAUNCH: "1", WORKERS: str(tmp_path / "workers"), ANEW: "2", "PYTHONPATH": str(Path(__file__).parent)}
    torchrun = ForkedRun(
        ["--standalone", "--nproc-per-node=2", "--max-restarts=2", "-m", "worker_probe", str(tmp_path), "two words"],
        environment={**os.environ, **settings},
        stdout=tmp_path / "log",
        stderr=tmp_path / "log",
        module="lit_cifar.tools.chaos.agent",
    )
    status = torchrun.wait(100)
    torchrun.kill()
    assert status == 0, (tmp_path / "log").read_text()
    assert (tmp_path / "log").read_text().count("once more, says rank") >= 2
    assert "Traceback" not in (tmp_path / "log").read_text()
    workers = read_workers(tmp_path / "workers")
    assert {(worker.start, worker.anew) for worker in workers} == {((1, 0), True), ((1, 1), False), ((1, 2), True)}
    for rank in (0, 1):
        found = [json.loads(line) for line in (tmp_path / f"rank{rank}").read_text().splitlines()]
        assert [line.pop("restart") for line in found] == ["0", "1", "2"]
        assert [line.pop("pid") for line in found] == [worker.pid for worker in workers if worker.rank == rank]
        assert found[0] == found[1] == found[2]
        assert found[0] == {
            "words": ["two words"],
            "world_size": "2",
            "parents": 2 * torchrun.pids,
            "leads_a_session": True,
            "default_signals": [True, True, True],
            "interruptible": True,
            "sockets": 0,
        }


def test_python_starts_anew_in_the_first_start_and_then_once_in_so_many() -> None:
    starts = [(1, restart) for restart in range(7)]
    assert [is_anew(start, 3) for start in starts] == [True, False, False, True, False, False, True]
    assert all(is_anew(start, 1) for start in starts)
    assert not any(is_anew(start, 0) for start in starts)


def test_torchrun_runs_as_users_start_it(tmp_path: Path) -> None:
    """Nothing is set by which torchrun would start its processes again in another way than a user's."""
    job = TorchrunJob(lambda size: [], folder=tmp_path, max_restarts=0, anew_every=0)
    assert not [name for name in job._environment() if "TORCH" in name]


# The command.


def row(**changes: Any) -> JobResult:
    event = Event(fault=RESIZE, at_s=1.0, step=9)
    found = JobResult(
        "ddp", (2, 1), "64-true", bound=1e-5, events=[event], restarts=1, missing=0, doubled=0, difference=1e-9
    )
    return replace(found, **changes)


def test_one_failure_fails_the_whole() -> None:
    console = Console(width=120, record=True)
    console.print(result_table([row(), row(problems=["lost"], missing=3)], title="t"))
    lines = console.export_text().splitlines()
    verdicts = [word for line in lines for word in ("PASS", "FAIL") if word in line]
    assert verdicts == ["PASS", "FAIL", "FAIL"]
    assert max(map(len, lines)) <= 120


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (["--faults=0"], "--faults=0"),
        (["--seed=-1"], "--seed=-1"),
        (["--modes=single"], "single"),
        (["--modes=ddp_spawn"], "ddp_spawn"),
        (["--modes=ddp_mp"], "--devices 4"),
        (["--devices=1"], "--devices=1"),
        (["--json=/nowhere/at/all.json"], "--json"),
        (["--json=."], "--json"),
        ([f"--json={'x' * 300}"], "--json"),
        (["--dir=/proc/nowhere"], "--dir"),
        (["--dir=."], "--dir"),
        (["--model.arch=resnet43"], "resnet43"),
        (["--trainer.max_epochs=3"], "--trainer.max_epochs itself"),
        (["--trainer.limit_train_batches=3"], "--data.num_train"),
    ],
)
def test_bad_arguments_exit_2_with_a_remedy(args: list[str], word: str) -> None:
    result = run_here("chaos", *args)
    assert result.status == 2
    assert word in result.stderr
    assert 2 <= len(result.stderr.splitlines()) <= 5


def hang_up_and_terminate() -> None:
    """In a process of its own, whose parent has it ignore that the terminal is closed."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    exit_orderly_when_terminated()
    signal.raise_signal(signal.SIGHUP)
    signal.raise_signal(signal.SIGTERM)


def test_what_is_ignored_stays_ignored_as_nohup_wants_it() -> None:
    process = multiprocessing.get_context("forkserver").Process(target=hang_up_and_terminate)
    process.start()
    process.join(30)
    assert process.exitcode == 128 + signal.SIGTERM


@pytest.mark.slow
@pytest.mark.timeout(640)
def test_nothing_is_lost(tmp_path: Path) -> None:
    result = launch(
        "chaos",
        "--faults=4",
        "--seed=16",  # one that stops a process, truncates a checkpoint, fills the disk and resizes the job
        f"--json={tmp_path / 'record.json'}",
        f"--dir={tmp_path / 'kept'}",
        timeout_s=600,
    )
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["passed"]
    assert "PASS" in result.stdout
    equal, resized = record["rows"]
    assert (equal["difference"], equal["missing"], equal["doubled"]) == (0.0, 0, 0)
    assert 0.0 < resized["difference"] <= 1e-5
    kinds = [event["fault"]["kind"] for row in (equal, resized) for event in row["events"]]
    assert sorted(kinds) == ["disk", "resize", "stop", "truncate"]
    assert (tmp_path / "kept" / "ddp" / "equal-size" / "run" / "checkpoints" / "last.ckpt").exists()
    assert marked(tmp_path) == []


@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGINT, marks=pytest.mark.slow), pytest.param(signal.SIGTERM, marks=pytest.mark.exhaustive)],
)
def test_an_interrupted_run_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lit_cifar", "chaos", f"--dir={tmp_path / 'kept'}"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"}) as process:
        assert wait_until(lambda: len(marked(tmp_path)) >= 3, limit_s=60, poll_s=0.1)
        time.sleep(1.0)
        process.send_signal(number)
        process.communicate(timeout=30)
    assert process.returncode == (130 if number == signal.SIGINT else 143)
    assert marked(tmp_path) == []
