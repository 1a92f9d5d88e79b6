"""Starts the processes that measure, and judges them: wrong ranks, slow ranks, messages that get lost."""

import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch

from lit_cifar.launch.forked import ForkedRun
from lit_cifar.tools.doctor import ALL_MODES, PROCESS_MODES, MachineFinding, size_of
from lit_cifar.tools.doctor.measurement import NUM_CALLS, OPERATIONS, SIZES, Measurement

_PROBE = "lit_cifar.tools.doctor.measurement"
_TIMEOUT_S = 90.0
# Beginnings of the variables of launchers.
_LAUNCHER = ("RANK", "LOCAL_", "WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "MASTER_", "TORCHELASTIC_")
_SLOW = 2.0
"""Largest duration of a rank's fastest turn, in units of the others'."""
_NUM_CONFIRMATIONS = 2  # number of times that a rank that seems slow is measured again
_ANOTHER = "memtest86+, or another machine"


@dataclass(frozen=True, kw_only=True)
class Ranks:
    accelerator: str  # "cpu" or "cuda"
    measurements: list[Measurement] = field(default_factory=list)  # measurements by rank; empty if a process failed
    failure: str | None = None

    @property
    def is_transport_faulty(self) -> bool:
        """Whether the processes could not send each other tensors, or something else arrived."""
        return bool(self.failure or any(each.faults for each in self.measurements))


def probe_ranks(num_ranks: int, accelerator: str, *, settings: dict[str, str] | None = None) -> Ranks:
    """Let `num_ranks` processes measure, with environment variables `settings` beside this process's own."""
    # A launcher's variables are left out. The ranks share the cores.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHER)}
    environment |= {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // num_ranks))} | (settings or {})
    with tempfile.TemporaryDirectory(prefix="lit_cifar-doctor-") as name:
        folder = Path(name)
        output = {"stdout": folder / "stdout", "stderr": folder / "stderr"}
        run = ForkedRun([accelerator, name], environment=environment, num_ranks=num_ranks, module=_PROBE, **output)
        try:
            status = run.wait(_TIMEOUT_S)
        finally:
            run.kill()
        if status != 0:
            ended = f"did not end within {_TIMEOUT_S:g} s" if status is None else f"ended with status {status}"
            return Ranks(accelerator=accelerator, failure="; ".join([ended, *_traces(folder, num_ranks)]))
        found = [Measurement(**torch.load(folder / f"rank{rank}.pt", weights_only=True)) for rank in range(num_ranks)]
    return Ranks(accelerator=accelerator, measurements=found)


def _traces(folder: Path, num_ranks: int) -> list[str]:
    """The last phase of each rank, and the last error that one of them has written."""
    phases = [folder / f"rank{rank}.phase" for rank in range(num_ranks)]
    were = [f"rank {rank} was at {file.read_text()}" for rank, file in enumerate(phases) if file.exists()]
    stderr = folder / "stderr"
    lines = stderr.read_text(errors="replace").splitlines() if stderr.exists() else []
    errors = [line.strip()[:200] for line in lines if "Error" in line]
    return [*were, *errors[-1:]]


def examine_ranks(num_ranks: int, accelerator: str) -> tuple[Ranks, list[MachineFinding]]:
    """Let the processes measure. Repeat it if a rank seems slow, or if NCCL loses messages."""
    ranks = probe_ranks(num_ranks, accelerator)
    slow = slow_ranks(ranks)
    for _ in range(_NUM_CONFIRMATIONS if slow else 0):
        again = slow_ranks(probe_ranks(num_ranks, accelerator))
        slow = {rank: finding for rank, finding in slow.items() if rank in again}
    mend = _ANOTHER
    if accelerator == "cuda" and ranks.is_transport_faulty:
        mend = "NCCL_DEBUG=INFO NCCL_DEBUG_FILE=/tmp/nccl.%p python -m lit_cifar doctor   # then read /tmp/nccl.*"
        if ranks.failure is None:
            mend = "turn off the IOMMU or PCIe ACS in the BIOS, or boot with iommu=pt   # NCCL_P2P_DISABLE did not help"
        if not probe_ranks(num_ranks, accelerator, settings={"NCCL_P2P_DISABLE": "1"}).is_transport_faulty:
            mend = "export NCCL_P2P_DISABLE=1   # with it everything arrived"
            if not probe_ranks(num_ranks, accelerator).is_transport_faulty:
                mend = "python -m lit_cifar doctor   # again: at the third try everything arrived as it is"
    return ranks, [*wrong_results(ranks), *lost_messages(ranks, mend=mend), *slow.values()]


def wrong_results(ranks: Ranks) -> list[MachineFinding]:
    return [
        MachineFinding(
            f"Rank {each.rank} ({each.device}) computes wrongly: its {name} was wrong in "
            f"{len(wrong)} of {len(each.seconds[name]) + 1} repeats ({wrong[0]}).",
            _without_gpu(each.rank) if ranks.accelerator == "cuda" else _ANOTHER,
            ALL_MODES,
        )
        for each in ranks.measurements
        for name, wrong in each.wrong.items()
        if wrong
    ]


def _without_gpu(rank: int) -> str:
    """The command that hides a rank's GPU."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = given.split(",") if given else [str(index) for index in range(torch.cuda.device_count())]
    return f"export CUDA_VISIBLE_DEVICES={','.join(name for index, name in enumerate(names) if index != rank)}"


def lost_messages(ranks: Ranks, *, mend: str) -> list[MachineFinding]:
    """One finding for each rank that got wrong sums, or one if the processes failed."""
    if ranks.failure is not None:
        problem = f"Processes that send each other tensors failed: they {ranks.failure}."
        if ranks.accelerator == "cpu":
            mend = "python -m lit_cifar fit --config configs/quickstart.yaml --trainer.strategy=ddp   # the whole error"
        return [MachineFinding(problem, mend, PROCESS_MODES)]
    findings = []
    for each in ranks.measurements:
        if each.faults:
            num_bytes, words = each.faults[0]  # the smallest size is the first
            share = f"in {len(each.faults)} of {NUM_CALLS * len(SIZES)} results, the smallest of {size_of(num_bytes)}"
            problem = f"Rank {each.rank} gets wrong sums from all-reduce, {share}: {words}."
            findings.append(MachineFinding(problem, mend, PROCESS_MODES))
    return findings


def slow_ranks(ranks: Ranks) -> dict[int, MachineFinding]:
    """Findings on ranks that took twice as long as the others, even in their fastest turn. Measure again to be sure."""
    slow: dict[int, MachineFinding] = {}
    for name in OPERATIONS if len(ranks.measurements) > 1 else ():
        for each in ranks.measurements:
            others = [median(other.seconds[name]) for other in ranks.measurements if other is not each]
            ratio = min(each.seconds[name]) / median(others)
            if ratio >= _SLOW:
                slow.setdefault(each.rank, _slow(each, name, ratio, ranks))
    return slow


def _slow(found: Measurement, operation: str, ratio: float, ranks: Ranks) -> MachineFinding:
    mend = "top   # shows which other programs use its cores"
    if ranks.accelerator == "cuda":
        hide = _without_gpu(found.rank)
        mend = f"nvidia-smi   # shows who else uses it, its clock and its temperature; without it: {hide}"
    took = f"Rank {found.rank} ({found.device}) takes {ratio:.1f} times as long as the others for the same {operation}"
    return MachineFinding(f"{took}: every step waits for it.", mend, PROCESS_MODES)
