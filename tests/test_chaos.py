"""`chaos`: its plan and its judgement as plain functions, its tools on real processes, and a short run of it.

`test_failures` has one that is stopped.
"""

import json
import multiprocessing
import signal
import subprocess
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from commands import TINY, launch, mode_flags
from processes import marked

from lit_cifar.data import Batch
from lit_cifar.errors import ConfigError
from lit_cifar.tools.chaos import trial as trial_module
from lit_cifar.tools.chaos.audit import (
    LAUNCH,
    LoggedStep,
    ProcessStart,
    SampleLog,
    SampleLogReader,
    audit,
    distance,
    effective,
    metric_problems,
)
from lit_cifar.tools.chaos.command import _train_baseline
from lit_cifar.tools.chaos.faults import EQUAL_SIZE, Fault, schedule_faults, shares
from lit_cifar.tools.chaos.job import Job, wait_until
from lit_cifar.tools.chaos.training import Training, chosen_modes
from lit_cifar.tools.chaos.trial import Trial, TrialError
from lit_cifar.tools.terminal import exit_orderly_when_terminated

FIRST, SECOND, THIRD = (1, 0), (1, 1), (2, 0)

# The plan.


@pytest.mark.parametrize("resized", [False, True])
@pytest.mark.parametrize(("num_faults", "every"), [(1, 4), (4, 4), (100, 4), (3, 1), (14, 15), (20, 100)])
def test_a_seed_means_one_plan_for_which_the_training_is_long_enough(
    num_faults: int, every: int, resized: bool
) -> None:
    training = Training((), "32-true", chosen_modes(["ddp"], devices=2)[0], num_faults, every, resized)
    plans = [training.faults(seed=seed) for seed in (3, 3, 4)]
    assert plans[0] == plans[1] != plans[2]
    assert all(2 * every + 2 <= fault.step < training.num_steps - 2 * every for fault in plans[0])


@pytest.mark.parametrize("num_parts", [None, 4])
def test_a_mode_of_one_process_is_not_replaced_by_one_device(num_parts: int | None) -> None:
    with pytest.raises(ConfigError, match="--modes=ddp_mp has one process on 2 devices"):
        chosen_modes(["ddp_mp"], devices=2, num_parts=num_parts)


def test_a_plan_hits_with_every_kind_at_every_part_of_the_training() -> None:
    """And most often a job that keeps its size."""
    assert list(map(shares, (1, 2, 4, 20))) == [(1, 0), (1, 1), (3, 1), (14, 6)]
    faults = schedule_faults(16, seed=1, sizes=[2], first_step=10, last_step=170)
    assert [fault.number for fault in faults] == [*range(1, 17)]
    assert all(10 * part <= fault.step < 10 * (part + 1) for part, fault in enumerate(faults, 1))
    assert sorted((fault.kind, fault.aim) for fault in faults) == sorted(2 * EQUAL_SIZE)
    assert {fault.rank for fault in faults if fault.kind in ("kill", "term", "stop")} == {0, 1}
    assert all((fault.rank is None) == (fault.kind in ("truncate", "disk")) for fault in faults)
    assert {fault.size for fault in faults} == {2}
    others = schedule_faults(16, seed=1, sizes=[2], first_step=10, last_step=170, full_disk=False)
    assert "disk" not in {fault.kind for fault in others}
    kills = schedule_faults(16, seed=1, sizes=[2], first_step=10, last_step=170, kills_alone=True)
    assert {(fault.kind, fault.aim) for fault in kills} == {("kill", "step"), ("kill", "save"), ("kill", "start")}


def test_a_launcher_decides_how_many_processes_there_are_and_ray_loses_nodes_too() -> None:
    (mode,) = chosen_modes(["ddp"], devices=2)
    kinds = {}
    for launcher in ((), ("torchrun", "-m", "lit_cifar"), ("python", "-m", "lit_cifar", "ray")):
        training = Training((), "32-true", mode, 9, launcher=launcher)
        assert ("--trainer.devices=2" in training.arguments(2, folder=Path("folder"))) == (not launcher)
        kinds[launcher[:1]] = [fault for fault in training.faults(seed=0) if fault.kind == "node"]
    assert list(map(len, kinds.values())) == [0, 0, 0, 1]
    assert kinds["python",][0].rank in (0, 1)


def test_a_resized_job_goes_through_all_sizes_and_only_its_own_ranks_are_hit() -> None:
    faults = schedule_faults(8, seed=0, sizes=[2, 1], first_step=0, last_step=80)
    assert [fault.kind for fault in faults] == ["resize", "kill", "resize", "term"] * 2
    assert [fault.size for fault in faults] == [1, 1, 2, 2] * 2
    assert [fault.rank for fault in faults[1::4]] == [0, 0]
    assert {fault.rank for fault in faults[3::4]} == {0, 1}


def test_what_one_process_does_alone_is_what_the_mode_does() -> None:
    """Flags alone: the same number of images normalised together."""
    alone = {mode.name: mode.flags[1] for mode in chosen_modes(["ddp", "pp", "fsdp2", "tp"], devices=2)}
    separate = "--model.ghost_batchnorm."
    assert [name for name, flags in alone.items() if f"{separate}data_parallel_size=2" in flags] == ["fsdp2"]
    assert f"{separate}num_microbatches=2" in alone["pp"]
    assert not any(flag.startswith(separate) for flag in (*alone["ddp"], *alone["tp"]))


def test_with_virtual_replicas_a_job_goes_to_other_sizes_and_modes_and_keeps_its_bits() -> None:
    ddp, pipelines = chosen_modes(["ddp", "ddp_pp"], devices=4, num_parts=4)
    assert [*ddp.flags] == [4, 1]  # 8 do not divide the 4 parts
    assert not any("microbatches" in flag for flag in pipelines.flags[4])
    (ddp,) = chosen_modes(["ddp"], devices=2, num_parts=4)
    strategies = {size: flags[1].rpartition("=")[2] for size, flags in ddp.flags.items()}
    assert strategies == {2: "ddp", 1: "auto", 4: "fsdp2"}
    assert all(flags[0] == "--virtual_replicas=4" for flags in ddp.flags.values())
    (ddp_of_two,) = chosen_modes(["ddp"], devices=2, num_parts=1)
    assert ddp_of_two.num_processes == 2  # not one instead: `fit` refuses it
    training = Training((), "32-true", ddp, 6, resized=True)
    assert (training.precision, training.has_same_bits) == ("32-true", True)
    assert [fault.size for fault in training.faults(seed=0)[::2]] == [1, 4, 2]


# The samples.


def steps(starts: dict[ProcessStart, range], *, num_ranks: int = 2) -> list[LoggedStep]:
    """Two epochs of three steps over ids 0 to 4, of which each start runs some of the six steps."""
    batches = [[0, 1], [2, 3], [4]]
    return [
        LoggedStep(start, rank, rank, step // 3, step, batches[step % 3][rank::num_ranks])
        for start, numbers in starts.items()
        for step in numbers
        for rank in range(num_ranks)
    ]


def without(lines: list[LoggedStep], *, step: int, rank: int) -> list[LoggedStep]:
    return [line for line in lines if (line.step, line.rank) != (step, rank)]


WHOLE = steps({FIRST: range(6)})
# After a restart at step 1 the first batch comes again, and the epoch goes on from there.
AGAIN = [line._replace(step=line.step + 1) for line in steps({SECOND: range(2)})]
SWAPPED = [line._replace(step={0: 1, 1: 0}.get(line.step, line.step)) for line in WHOLE]
FOREIGN = [line._replace(ids=[7]) if line.ids == [4] and line.epoch else line for line in WHOLE]
TOO_MANY = LoggedStep(FIRST, 0, 0, 2, 6, [0, 1])
ALONE = steps({FIRST: range(6)}, num_ranks=1)
TWINS = [line._replace(rank=1) for line in ALONE]
RERUN = steps({FIRST: range(4), SECOND: range(2, 5), THIRD: range(4, 6)})
HALF_DONE = without(steps({FIRST: range(4)}), step=3, rank=1) + steps({SECOND: range(3, 6)})
RESTARTED = steps({FIRST: range(1)}) + AGAIN + steps({SECOND: range(3, 6)})
UNLIKE = [*ALONE, TWINS[0]._replace(ids=[1, 0]), *TWINS[1:]]
FOUND: dict[str, tuple[list[LoggedStep], tuple[int, int, int], str]] = {  # missing, doubled, repeated, and in words
    "the last run of a step counts": (RERUN, (0, 0, 3), ""),
    "a step that only some processes finished": (HALF_DONE, (0, 0, 1), ""),
    "another number of processes": (ALONE[:3] + steps({SECOND: range(3, 6)}), (0, 0, 0), ""),
    "several loader steps of a step": ([line._replace(ids=[i]) for line in WHOLE for i in line.ids], (0, 0, 0), ""),
    "processes that read the same": ([*ALONE, *TWINS], (0, 0, 0), ""),
    "processes that should": (UNLIKE, (0, 0, 0), "epoch 0, step 0: the processes of data-parallel rank 0 read diff"),
    "a lost step": (steps({FIRST: range(2), SECOND: range(3, 6)}), (1, 0, 0), "epoch 0, step 2: was never run"),
    "a part that was lost": (without(WHOLE, step=4, rank=1), (1, 0, 0), "epoch 1, step 4: other samples"),
    "a loader that goes on too early": (RESTARTED, (1, 2, 0), "epoch 0, step 1: other samples"),
    "a batch twice in one start": (WHOLE + steps({FIRST: range(5, 6)}), (0, 1, 0), "epoch 1, step 5: other samples"),
    "steps that changed places in a whole epoch": (SWAPPED, (0, 0, 0), "epoch 0, step 0: other samples"),
    "a foreign sample": (FOREIGN, (1, 1, 0), "epoch 1, step 5: other samples"),
    "a step too many": ([*WHOLE, TOO_MANY], (0, 2, 0), "epoch 2, step 6: not in the uninterrupted run"),
}


@pytest.mark.parametrize(("lines", "counts", "words"), FOUND.values(), ids=FOUND)
def test_samples_are_compared_step_by_step(lines: list[LoggedStep], counts: tuple[int, ...], words: str) -> None:
    found = audit(lines, baseline=effective(WHOLE)[0])
    assert (found.missing, found.doubled, found.repeated) == counts
    assert "".join(found.problems[:1]).startswith(words)
    assert bool(found.problems) == bool(words)


def write_step(log: SampleLog, *, rank: int, step: int) -> None:
    """As Lightning does: by the end of the batch, the optimizer has taken its step."""
    strategy = SimpleNamespace(distributed_sampler_kwargs={"num_replicas": 2, "rank": rank})
    batch = Batch(torch.empty(0), torch.empty(0), torch.tensor([10 * step + rank]), 1.0)
    trainer: Any = SimpleNamespace(global_rank=rank, global_step=step, current_epoch=0, strategy=strategy)
    module: Any = None
    log.on_train_batch_start(trainer, module, batch, 0)
    trainer.global_step += 1
    log.on_train_batch_end(trainer, module, None, batch, 0)


def test_the_sample_log_reads_back_as_it_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = SampleLogReader(tmp_path)
    reader.refresh()
    assert (reader.lines, reader.newest, reader.first_step(FIRST)) == ([], None, None)
    monkeypatch.setenv(LAUNCH, "1")
    for restart in (0, 2):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restart))
        for rank in (0, 1):
            for step in (5, 6):
                write_step(SampleLog(str(tmp_path)), rank=rank, step=step)
        reader.refresh()
        assert reader.newest == (1, restart)
    assert (reader.first_step((1, 2)), reader.last_step((1, 2)), reader.first_step((1, 1))) == (5, 6, None)
    assert reader.lines[0] == LoggedStep(FIRST, 0, 0, 0, 5, [50])
    assert reader.num_starts == 3, "the second one did not live to its first step"
    assert effective(reader.lines)[0] == {(0, 5): [50, 51], (0, 6): [60, 61]}
    line = json.dumps(TOO_MANY) + "\n"
    for written, number in ((line[:9], 8), (line[9:] + line, 10)):  # one that is being written waits
        with (tmp_path / "rank0.jsonl").open("a") as file:
            file.write(written)
        reader.refresh()
        assert len(reader.lines) == number


# The end.


def end(**values: Any) -> dict[str, Any]:
    """A checkpoint of a network of two parameters."""
    weight, mean, momentum = (torch.zeros(3) + values.pop(name, 0.1) for name in ("weight", "mean", "momentum"))
    return {
        "epoch": 3,
        "global_step": 60,
        "lr_schedulers": [{"last_epoch": 60}],
        "state_dict": {"fc.weight": weight, "bn.running_mean": mean},
        "optimizer_states": [{"state": {0: {"momentum": momentum}}, "param_groups": [{"lr": 0.1}]}],
    } | values


ONE_ULP_UP = torch.tensor([0.1, torch.nextafter(torch.tensor(0.1), torch.tensor(9.0)), 0.1])


@pytest.mark.parametrize(
    ("found", "name"),
    [
        (end(weight=ONE_ULP_UP), "['state_dict']['fc.weight']"),
        (end(mean=ONE_ULP_UP), "['state_dict']['bn.running_mean']"),
        (end(momentum=ONE_ULP_UP), "['optimizer_states'][0]['state'][0]['momentum']"),
        (end(global_step=59), "['global_step']"),
        (end(lr_schedulers=[{"last_epoch": 59}]), "['lr_schedulers'][0]['last_epoch']"),
        (end(lr_schedulers=[]), "['lr_schedulers'][0]['last_epoch']"),
    ],
)
def test_a_unit_in_the_last_place_is_a_difference(found: dict[str, Any], name: str) -> None:
    assert distance(end(), end())[0] == 0.0
    gap, where = distance(found, end())
    assert (gap > 0.0, where) == (True, name)


METRICS = "epoch,step,train/loss,train/images_per_s\n0,19,0.5,100.0\n0,19,,90.0\n1,39,0.25,\n"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (METRICS.replace("100.0", "7"), ""),  # but for the clock
        (METRICS.replace("0.25", "0.26"), "train/loss of step 39"),
        (METRICS.replace("0.5", ""), "of step 19"),
        (METRICS.replace("1,39,0.25,\n", ""), "epoch of step 39"),
        (METRICS + "1,39,0.25,\n", "epoch of step 39"),
    ],
)
def test_metrics_must_be_the_same(content: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "found.csv").write_text(content)
    (tmp_path / "expected.csv").write_text(METRICS)
    problems = metric_problems(tmp_path / "found.csv", tmp_path / "expected.csv")
    assert bool(problems) == bool(words)
    assert words in "".join(problems)


# The trial, with a job that is only pretended.


class PretendedJob:
    """Writes sample logs as a job would: each start begins where it is told to, and ends by the fault."""

    log_bytes = 0

    def __init__(self, folder: Path, *, begins: Sequence[int], statuses: Sequence[int | None]) -> None:
        self.file = folder / "rank0.jsonl"
        self.begins, self.statuses = [*begins], [*statuses]  # of its starts
        self.status: int | None = None

    def start(self, num_processes: int) -> None:
        self.status = self.statuses.pop(0)
        first = self.begins.pop(0)
        self._log(range(first, first + 12) if self.status != 1 else ())

    def _log(self, steps: Iterable[int]) -> None:
        start = (-len(self.begins), 0)
        with self.file.open("a") as file:
            file.writelines(json.dumps(LoggedStep(start, 0, 0, 0, step, [0])) + "\n" for step in steps)

    def terminate(self, *, limit_s: float) -> bool:
        self._log([12])  # a step that ends after the signal
        return True

    def last_words(self) -> list[str]:
        return ["RuntimeError: the address is in use"]


def test_a_training_that_ends_early_by_itself_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sample_log").mkdir()
    job = PretendedJob(tmp_path / "sample_log", begins=[0], statuses=(0,))
    monkeypatch.setattr("lit_cifar.tools.chaos.command._job", lambda *_, **__: nullcontext(job))
    training = Training((), "32-true", chosen_modes(["ddp"], devices=2)[0], 1)
    with pytest.raises(ConfigError, match="ends a run after 12 of 24 steps"):
        _train_baseline(training, tmp_path)


def trial_of(job: Any) -> Trial:
    return Trial(job, SampleLogReader(job.file.parent), job.file.parent / "run", every_n_steps=4)


RESIZE = Fault(number=1, kind="resize", aim="step", step=10, rank=None, size=1, moment=0.0)


@pytest.mark.parametrize(("begin", "repeated"), [(13, 0), (12, 1), (0, 13)])
def test_who_was_asked_to_stop_may_repeat_nothing(begin: int, repeated: int, tmp_path: Path) -> None:
    trial = trial_of(PretendedJob(tmp_path, begins=[0, begin], statuses=(None, 0)))
    trial.run([RESIZE], size=2)
    (event,) = trial.events
    assert (event.step, event.resumed_step, event.repeated) == (11, begin, repeated)
    assert len(trial.problems) == (repeated > 0)


GIVEN_UP = {
    "first step is not reached within .* the address is in use": (1,) * 99,  # fails again and again
    "the training has ended, and step 13 is not reached": (None, 0),  # ends before its faults
}


@pytest.mark.parametrize(("words", "statuses"), GIVEN_UP.items())
def test_a_job_is_given_up(
    words: str, statuses: Sequence[int | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial_module, "_LIMIT_S", 0.1)
    trial = trial_of(PretendedJob(tmp_path, begins=[0] * 99, statuses=statuses))
    with pytest.raises(TrialError, match=words):
        trial.run([RESIZE, replace(RESIZE, step=13)], size=2)


# Processes.


def test_stopped_and_orphaned_processes_of_a_job_are_ended(tmp_path: Path) -> None:
    """One that reads the job's log, as `tail -f` of a user does, is left alone."""
    flags = ["fit", *TINY, *mode_flags("ddp"), f"--run_dir={tmp_path / 'run'}"]
    (tmp_path / "log.txt").touch()
    with subprocess.Popen(["tail", "-f", str(tmp_path / "log.txt")], stdout=subprocess.DEVNULL) as onlooker:
        with Job(lambda size: flags, folder=tmp_path, max_restarts=0) as job:
            job.start(2)
            assert wait_until(lambda: 1 in job.ranks(), limit_s=60)
            rank = job.ranks()[1]
            rank.send_signal(signal.SIGSTOP)
            psutil.Process(rank.ppid()).kill()
            assert wait_until(lambda: job.status is not None, limit_s=10)
            assert rank in marked(tmp_path), "an orphan"
        assert [process.pid for process in marked(tmp_path)] == [onlooker.pid]
        assert not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE
        onlooker.kill()


# The command.


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
    # This seed stops a process, kills one twice, truncates a checkpoint and fills the disk.
    files = [f"--json={tmp_path / 'record.json'}", f"--output={tmp_path / 'kept'}"]
    result = launch("chaos", "--faults=6", "--seed=154", *files, timeout_s=600)
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["passed"]
    assert "PASS" in result.stdout
    equal, resized = record["rows"]
    assert (equal["difference"], equal["missing"], equal["doubled"]) == (0.0, 0, 0)
    assert 0.0 < resized["difference"] <= 1e-5
    kinds = [event["fault"]["kind"] for row in (equal, resized) for event in row["events"]]
    assert sorted(kinds) == ["disk", "kill", "kill", "resize", "stop", "truncate"]
    assert (tmp_path / "kept" / "ddp" / "equal-size" / "run" / "checkpoints" / "last.ckpt").exists()
    assert marked(tmp_path) == []
