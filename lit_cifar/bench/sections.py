"""The sections of `bench`, by name, in the order in which `bench all` measures them."""

from collections.abc import Callable

from lit_cifar.bench import data_path, mode_speed, overhead, recovery
from lit_cifar.bench.rows import Row
from lit_cifar.bench.settings import Report, Settings

SECTIONS: dict[str, Callable[[Settings, Report], list[Row]]] = {
    "data": data_path.measure,
    "overhead": overhead.measure,
    "modes": mode_speed.measure,
    "recovery": recovery.measure,
}
