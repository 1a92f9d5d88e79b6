"""The sections of `bench`, by name, in the order in which `bench all` measures them."""

from collections.abc import Callable

from lit_cifar.bench import overhead, recovery, step
from lit_cifar.bench.rows import Row
from lit_cifar.bench.settings import Report, Settings

SECTIONS: dict[str, Callable[[Settings, Report], list[Row]]] = {
    "step": step.measure,
    "overhead": overhead.measure,
    "recovery": recovery.measure,
}
