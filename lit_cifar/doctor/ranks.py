"""Starts the processes that measure, and judges what they have found: who is wrong, who is slow, what gets lost."""

import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from lit_cifar.doctor.arithmetic import OPERATIONS, Accelerator
from lit_cifar.doctor.findings import ALL_MODES, PROCESS_MODES, Finding
from lit_cifar.doctor.measurement import Measurement
from lit_cifar.launch.forked import ForkedRun

PROBE = "lit_cifar.doctor.rank_probe"
_TIMEOUT_S = 90.0
_SLOW = 2.0
"""How many times as long as the others a rank may take, in its fastest turn."""
_CLOCK_S = 5.0
"""By how much clocks may differ: far more than the ranks of a busy machine need to leave a barrier."""
_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "MASTER_ADDR")
_LAUNCHER += ("MASTER_PORT",)


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """What the processes have found.

    Attributes:
        accelerator: On which they ran.
        measurements: By rank; empty if a process failed.
        failure: Why there are none.
        settings: Environment variables that were set for them.
    """

    accelerator: Accelerator
    measurements: list[Measurement] = field(default_factory=list)
    failure: str | None = None
    settings: dict[str, str] = field(default_factory=dict)

    @property
    def is_transport_faulty(self) -> bool:
        """Whether the processes could not send each other tensors, or something else arrived."""
        return self.failure is not None or any(each.faults for each in self.measurements)

    def all_reduce_s(self, num_bytes: int) -> float:
        """The median time of an all-reduce of that size. The rank that comes last has not waited for others."""
        return median(min(call) for call in zip(*(each.sweep[num_bytes] for each in self.measurements), strict=True))

    def all_reduce_gb_s(self, num_bytes: int) -> float:
        """GB/s that each rank has sent, and received, in a ring."""
        count = len(self.measurements)
        return 2 * (count - 1) / count * num_bytes / self.all_reduce_s(num_bytes) / 1e9


def probe_ranks(
    num_ranks: int,
    accelerator: Accelerator,
    *,
    settings: dict[str, str] | None = None,
    module: str = PROBE,
    timeout_s: float = _TIMEOUT_S,
) -> Ranks:
    """Let `num_ranks` processes measure.

    Args:
        num_ranks: One for each GPU, or any number on the CPU.
        accelerator: Where.
        settings: Environment variables for them, beside this process's own.
        module: What they run. A test's module has a device with a fault.
        timeout_s: After which they are ended.
    """
    settings = settings or {}
    with tempfile.TemporaryDirectory(prefix="lit_cifar-doctor-") as name:
        folder = Path(name)
        out, err = folder / "stdout", folder / "stderr"
        run = ForkedRun(
            [accelerator, name],
            environment=_environment(num_ranks) | settings,
            stdout=out,
            stderr=err,
            num_ranks=num_ranks,
            module=module,
        )
        try:
            status = run.wait(timeout_s)
        finally:
            run.kill()
        if status != 0:
            reason = _reason(status, folder, err, num_ranks=num_ranks, timeout_s=timeout_s)
            return Ranks(accelerator=accelerator, failure=reason, settings=settings)
        found = [_read(folder / f"rank{rank}.json") for rank in range(num_ranks)]
    return Ranks(accelerator=accelerator, measurements=found, settings=settings)


def _environment(num_ranks: int) -> dict[str, str]:
    """This process's own, without what a launcher may have left in it; the ranks share the cores."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in _LAUNCHER and not name.startswith("TORCHELASTIC_")
    }
    return kept | {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // num_ranks))}


def _read(file: Path) -> Measurement:
    content: dict[str, Any] = json.loads(file.read_text())
    content["sweep"] = {int(num_bytes): seconds for num_bytes, seconds in content["sweep"].items()}
    content["faults"] = [(num_bytes, problem) for num_bytes, problem in content["faults"]]
    return Measurement(**content)


def _reason(status: int | None, folder: Path, stderr: Path, *, num_ranks: int, timeout_s: float) -> str:
    """Where each rank was, and the last line that one of them has written."""
    phases = [folder / f"rank{rank}.phase" for rank in range(num_ranks)]
    were = [f"rank {rank} was at {file.read_text()}" for rank, file in enumerate(phases) if file.exists()]
    ended = f"did not end within {timeout_s:g} s" if status is None else f"ended with status {status}"
    lines = [line.strip() for line in stderr.read_text(errors="replace").splitlines()] if stderr.exists() else []
    errors = [line for line in lines if "Error" in line]
    return "; ".join([ended, *were, *(line[:200] for line in errors[-1:])])


def judge_ranks(ranks: Ranks) -> list[Finding]:
    """What is wrong with the processes, their devices, or what they send each other."""
    if ranks.failure is not None:
        return [_failed(ranks.failure, ranks.accelerator)]
    found = ranks.measurements
    problems = [finding for each in found for finding in _wrong(each, ranks.accelerator, len(found))]
    problems += _lost(found, ranks.accelerator)
    problems += [finding for name in OPERATIONS for finding in _slow(found, name, ranks.accelerator)][:1]
    return problems + _clocks(found)


def _failed(reason: str, accelerator: Accelerator) -> Finding:
    variable = "NCCL_DEBUG=INFO" if accelerator == "cuda" else "TORCH_DISTRIBUTED_DEBUG=DETAIL"
    return Finding(
        part="ranks",
        problem=f"Processes that send each other tensors failed: they {reason}.",
        mend=f"{variable} python -m lit_cifar doctor   # shows what they wait for",
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
    """One finding for each rank whose all-reduces went wrong, and each cause."""
    problems = []
    for each in found:
        causes: dict[str, list[int]] = {}
        for num_bytes, cause in each.faults:
            causes.setdefault(cause.split(", in ")[0], []).append(num_bytes)
        for cause, sizes in causes.items():
            example = next(problem for _, problem in each.faults if problem.startswith(cause))
            problems.append(
                Finding(
                    part="ranks",
                    problem=f"Rank {each.rank} ({each.device}) gets wrong sums from all-reduce, in {len(sizes)} of "
                    f"{sum(map(len, each.sweep.values()))} calls, the smallest of {in_bytes(min(sizes))}: {example}.",
                    mend="NCCL_P2P_DISABLE=1 python -m lit_cifar doctor"
                    if accelerator == "cuda"
                    else "memtest86+, or another machine",
                    modes=PROCESS_MODES,
                )
            )
    return problems


def _slow(found: Sequence[Measurement], name: str, accelerator: Accelerator) -> list[Finding]:
    """Ranks that took twice as long as the others even in their fastest turn."""
    problems = []
    for each in found if len(found) > 1 else ():
        others = median(median(other.seconds[name]) for other in found if other is not each)
        ratio = min(each.seconds[name]) / others
        if ratio >= _SLOW:
            problems.append(
                Finding(
                    part="ranks",
                    problem=f"Rank {each.rank} ({each.device}) takes {ratio:.1f} times as long as the others for the "
                    f"same {name}: every step waits for it.",
                    mend="nvidia-smi   # who else uses it, its clock and temperature; to leave it out: "
                    f"{without_gpu(each.rank, len(found))}"
                    if accelerator == "cuda"
                    else "top   # which other programs use its cores",
                    modes=PROCESS_MODES,
                )
            )
    return problems


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


def in_bytes(number: int) -> str:
    """E.g. "64 KiB"."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number} bytes"
