"""Judges what the processes have measured: who is wrong, who is slow, what gets lost between them."""

import os
from collections.abc import Sequence
from statistics import median

from lit_cifar.doctor.arithmetic import OPERATIONS, Accelerator
from lit_cifar.doctor.findings import ALL_MODES, PROCESS_MODES, Finding, size_of
from lit_cifar.doctor.measurement import Measurement
from lit_cifar.doctor.ranks import Ranks

_SLOW = 2.0
"""How many times as long as the others a rank may take, in its fastest turn."""
_CLOCK_S = 5.0
"""By how much clocks may differ: far more than the ranks of a busy machine need to leave a barrier."""


def judge_ranks(ranks: Ranks) -> list[Finding]:
    """What is wrong with the processes, their devices, or what they send each other; not how fast they are."""
    if ranks.failure is not None:
        return [_failed(ranks.failure, ranks.accelerator)]
    found = ranks.measurements
    problems = [finding for each in found for finding in _wrong(each, ranks.accelerator, len(found))]
    problems += _lost(found, ranks.accelerator)
    return problems + _clocks(found)


def _failed(reason: str, accelerator: Accelerator) -> Finding:
    mend = "python -m lit_cifar fit --config configs/quickstart.yaml --trainer.strategy=ddp   # prints the whole error"
    if accelerator == "cuda":
        mend = "NCCL_DEBUG=INFO NCCL_DEBUG_FILE=/tmp/nccl.%p python -m lit_cifar doctor   # then read /tmp/nccl.*"
    return Finding(
        part="transport",
        problem=f"Processes that send each other tensors failed: they {reason}.",
        mend=mend,
        modes=PROCESS_MODES,
    )


def _wrong(found: Measurement, accelerator: Accelerator, num_ranks: int) -> list[Finding]:
    return [
        Finding(
            part="ranks",
            problem=f"Rank {found.rank} ({found.device}) computes wrongly: its {name} was wrong in {len(wrong)} of "
            f"{len(found.seconds[name]) + 1} repeats ({wrong[0]}).",
            mend=without_gpu(found.rank, num_ranks) if accelerator == "cuda" else "memtest86+, or another machine",
            modes=ALL_MODES,
        )
        for name, wrong in found.wrong.items()
        if wrong
    ]


def without_gpu(rank: int, num_gpus: int) -> str:
    """The command that hides a rank's GPU."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = given.split(",") if given else [str(index) for index in range(num_gpus)]
    return f"export CUDA_VISIBLE_DEVICES={','.join(name for index, name in enumerate(names) if index != rank)}"


def _lost(found: Sequence[Measurement], accelerator: Accelerator) -> list[Finding]:
    """One finding for each thing that went wrong with sums, with the ranks that got them."""
    causes: dict[str, list[tuple[int, int, str]]] = {}
    for each in found:
        for num_bytes, problem in each.faults:
            causes.setdefault(problem.split(", in ")[0], []).append((num_bytes, each.rank, problem))
    return [
        Finding(
            part="transport",
            problem=f"{_named([rank for _, rank, _ in seen])} wrong sums from all-reduce, in {len(seen)} of "
            f"{sum(len(calls) for each in found for calls in each.sweep.values())} results, the smallest of "
            f"{size_of(min(seen)[0])}: {min(seen)[2]}.",
            mend=_mend_transport(accelerator),
            modes=PROCESS_MODES,
        )
        for seen in causes.values()
    ]


def _named(ranks: Sequence[int]) -> str:
    each = sorted(set(ranks))
    return f"Rank {each[0]} gets" if len(each) == 1 else f"Ranks {', '.join(map(str, each))} get"


def _mend_transport(accelerator: Accelerator) -> str:
    if accelerator == "cuda":
        return "turn off the IOMMU or PCIe ACS in the BIOS, or boot with iommu=pt   # NCCL_P2P_DISABLE=1 did not help"
    return "memtest86+, or another machine"


def slow_ranks(ranks: Ranks) -> dict[int, Finding]:
    """Ranks that took twice as long as the others, even in their fastest turn. Measure again before you believe it."""
    slow: dict[int, Finding] = {}
    for name in OPERATIONS if len(ranks.measurements) > 1 else ():
        for each in ranks.measurements:
            others = [median(other.seconds[name]) for other in ranks.measurements if other is not each]
            ratio = min(each.seconds[name]) / median(others)
            if ratio >= _SLOW:
                slow.setdefault(each.rank, _slow(each, name, ratio, ranks))
    return slow


def _slow(found: Measurement, operation: str, ratio: float, ranks: Ranks) -> Finding:
    mend = "top   # shows which other programs use its cores"
    if ranks.accelerator == "cuda":
        hide = without_gpu(found.rank, len(ranks.measurements))
        mend = f"nvidia-smi   # shows who else uses it, its clock and its temperature; without it: {hide}"
    return Finding(
        part="ranks",
        problem=f"Rank {found.rank} ({found.device}) takes {ratio:.1f} times as long as the others for the same "
        f"{operation}: every step waits for it.",
        mend=mend,
        modes=PROCESS_MODES,
    )


def _clocks(found: Sequence[Measurement]) -> list[Finding]:
    walls = [each.wall_s for each in found]
    spread, drift = max(walls) - min(walls), max((each.drift_s for each in found), key=abs)
    if spread < _CLOCK_S and abs(drift) < _CLOCK_S:
        return []
    problem = (
        f"The clocks of the ranks differ by {spread:.0f} s."
        if spread >= _CLOCK_S
        else f"The clock was set by {drift:+.0f} s during the check."
    )
    return [Finding(part="ranks", problem=problem, mend="timedatectl set-ntp true")]
