"""Starts the processes that measure, and reads what they have found."""

import json
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from lit_cifar.doctor.arithmetic import Accelerator
from lit_cifar.doctor.measurement import Measurement
from lit_cifar.launch.forked import ForkedRun

PROBE = "lit_cifar.doctor.rank_probe"
_TIMEOUT_S = 90.0
_LAUNCHER = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK"}
_LAUNCHER |= {"MASTER_ADDR", "MASTER_PORT"}


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """What the processes have found.

    Attributes:
        accelerator: On which they ran.
        measurements: By rank; empty if a process failed.
        failure: Why there are none.
    """

    accelerator: Accelerator
    measurements: list[Measurement] = field(default_factory=list)
    failure: str | None = None

    @property
    def is_transport_faulty(self) -> bool:
        """Whether the processes could not send each other tensors, or something else arrived."""
        return bool(self.failure or any(each.faults for each in self.measurements))

    def all_reduce_s(self, num_bytes: int) -> float:
        """The median time of an all-reduce of that size. The rank that comes last has not waited for others."""
        return float(
            median(min(call) for call in zip(*(each.sweep[num_bytes] for each in self.measurements), strict=True))
        )

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
    with tempfile.TemporaryDirectory(prefix="lit_cifar-doctor-") as name:
        folder = Path(name)
        out, err = folder / "stdout", folder / "stderr"
        run = ForkedRun(
            [accelerator, name],
            environment=_environment(num_ranks) | (settings or {}),
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
            return Ranks(accelerator=accelerator, failure=reason)
        found = [_read(folder / f"rank{rank}.json") for rank in range(num_ranks)]
    return Ranks(accelerator=accelerator, measurements=found)


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
