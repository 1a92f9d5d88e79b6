"""The sections of `bench`, by name, in the order in which `bench all` measures them."""

from collections.abc import Callable

from lit_cifar.bench import data_path, mode_memory, mode_speed, overhead, recovery, step
from lit_cifar.bench.rows import Row
from lit_cifar.bench.settings import Report, Settings

SECTIONS: dict[str, Callable[[Settings, Report], list[Row]]] = {
    "data": data_path.measure,
    "step": step.measure,
    "overhead": overhead.measure,
    "modes": mode_speed.measure,
    "memory": mode_memory.measure,
    "recovery": recovery.measure,
}
