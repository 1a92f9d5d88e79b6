"""Steps 3 and 10: the tests of the package that are for a GPU."""

import re
from functools import partial
from pathlib import Path

from gpu_visit.step import FailedError, Step

_TESTS = Path(__file__).parents[3] / "tests" / "test_gpu.py"
_PYTEST = ("pytest", str(_TESTS), "-q", "-rfEs", "-p", "no:cacheprovider", "-p", "no:benchmark", "--tb=short")


def take_fast(step: Step) -> None:
    """Those that need no process of their own, several at once."""
    step.check("pytest", partial(_run, step, "not slow"))


def take_slow(step: Step) -> None:
    """Those that start processes."""
    step.check("pytest -m slow", partial(_run, step, "slow"))


def _run(step: Step, marker: str) -> str:
    workers = step.visit.jobs if step.visit.jobs > 2 else 0  # each imports everything for itself
    words = [*_PYTEST, "-m", marker, "-n", str(workers)]
    ended = step.run(marker.replace(" ", "-"), *words, limit_s=600)
    lines = [line.strip(" =") for line in ended.output.splitlines() if line.strip()]
    bad = [line for line in lines if re.match(r"(FAILED|ERROR) ", line)]
    if ended.status != 0:
        raise FailedError("; ".join([lines[-1] if lines else "", *bad]) if bad else ended.last_words)
    return lines[-1]
