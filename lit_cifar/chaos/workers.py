"""How the workers of a job are started: what is asked of `agent`, and what it writes down."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from lit_cifar.chaos.sample_history import Start

# Environment variable: how often the job was launched; torchrun counts its own restarts.
LAUNCH = "LIT_CIFAR_CHAOS_LAUNCH"
# Environment variable: the file to which a line is appended for every worker that is started.
WORKERS = "LIT_CIFAR_CHAOS_WORKERS"
# Environment variable: the first start and every n-th one after it use a new Python; with 0 none does.
ANEW = "LIT_CIFAR_CHAOS_ANEW"


@dataclass(frozen=True, kw_only=True)
class Worker:
    """A process that torchrun has started."""

    start: Start  # which start of the processes it belongs to
    rank: int
    pid: int
    anew: bool  # whether Python was started for it, as torchrun does; else it was forked
    at_s: float  # when, on the machine's monotonic clock

    def write(self, path: Path) -> None:
        with path.open("a") as file:
            file.write(json.dumps(asdict(self)) + "\n")


def start_of(environment: Mapping[str, str]) -> Start:
    """Which start of the processes one with this environment belongs to."""
    return int(environment.get(LAUNCH, "0")), int(environment.get("TORCHELASTIC_RESTART_COUNT", "0"))


def is_anew(start: Start, every: int) -> bool:
    """Whether the workers of `start` are new Pythons: those of the first start and of every n-th one after it are."""
    return every > 0 and sum(start) % every == 1 % every


def read_workers(path: Path) -> list[Worker]:
    """All that were started so far, the first one first; a line that is being written is left out."""
    if not path.exists():
        return []
    lines, _, _ = path.read_text().rpartition("\n")
    return [Worker(**{**content, "start": tuple(content["start"])}) for content in map(json.loads, lines.splitlines())]
