"""What a forecast is computed from: the network's sizes, the speed of one device, and the machines."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from lit_cifar.bench.forecast.communication import Interconnect


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A block of the network's chain. Bytes are those of float32 values.

    Attributes:
        flop: Of one image's forward pass. Backward takes twice as many.
        parameter_bytes: Of its parameters, and so of its gradients.
        output_bytes: Of one image: what the next block takes.
        kept_bytes: Of one image: what backward needs of the forward pass.
        split_flop: The part of `flop` that `tp` divides.
        split_parameter_bytes: The part of `parameter_bytes` that `tp` divides.
        split_kept_bytes: The part of `kept_bytes` that `tp` divides.
    """

    flop: int
    parameter_bytes: int
    output_bytes: int
    kept_bytes: int
    split_flop: int = 0
    split_parameter_bytes: int = 0
    split_kept_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Network:
    """A chain of layers.

    Attributes:
        layers: In the order of the forward pass.
        image_bytes: Of one image as it enters the first.
        sums: Of one image: the bytes of each tensor that `tp` sums over the devices, in forward and backward.
        num_states: Values that the optimizer keeps for a parameter: 1 of SGD with momentum, 2 of Adam.
    """

    layers: tuple[Layer, ...]
    image_bytes: int
    sums: tuple[int, ...] = ()
    num_states: int = 1

    @property
    def flop(self) -> int:
        return sum(layer.flop for layer in self.layers)

    @property
    def parameter_bytes(self) -> int:
        return parameter_bytes(self.layers)

    @property
    def kept_bytes(self) -> int:
        return kept_bytes(self.layers)

    def share(self, layers: Sequence[Layer]) -> float:
        """Of the arithmetic."""
        return sum(layer.flop for layer in layers) / self.flop


def parameter_bytes(layers: Sequence[Layer]) -> int:
    """Of all of them."""
    return sum(layer.parameter_bytes for layer in layers)


def kept_bytes(layers: Sequence[Layer]) -> int:
    """Of all of them, for one image."""
    return sum(layer.kept_bytes for layer in layers)


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Of one device while all others work too.

    Attributes:
        step_s: Seconds of a step that do not depend on the number of images.
        image_s: Seconds of forward and backward of one more image.
        optimizer_s: Seconds of the optimizer's step over all parameters.
    """

    step_s: float
    image_s: float
    optimizer_s: float = 0.0

    def passes(self, num_images: float) -> float:
        """Seconds of forward and backward."""
        return self.step_s + self.image_s * num_images


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One of the machines, which are all alike.

    Attributes:
        num_devices: Of one machine.
        inside: The link between its devices.
        between: The link between machines, which the devices of a machine share.
        num_cores: Of a CPU, on which each device is a process with one thread; None if each device has its own.
        load: Threads of other programs that want a core of it.
        overlap: The part of the messages that may pass while the devices compute, from 0 to 1.
        memory_bytes: Of one device.
        average_s: Seconds in which a process averages a byte of gradients in memory that it shares with all others of a
            CPU; None where they send each other the gradients.
    """

    num_devices: int
    inside: Interconnect
    between: Interconnect
    num_cores: int | None = None
    load: float = 0.0
    overlap: float = 1.0
    memory_bytes: float = inf
    average_s: float | None = None

    def average(self, num_processes: int, num_bytes: float) -> float | None:
        """Seconds in which processes of one machine average gradients in shared memory; None where they send them.

        They meet before and afterwards.
        """
        if self.average_s is None or num_processes > self.num_devices:
            return None
        meetings = 2 * self.link(num_processes).all_reduce(num_processes, 0)
        return meetings + self.average_s * num_bytes * self.busy(num_processes)

    def busy(self, num_devices: int) -> float:
        """How many times as long a process computes as when there is one for each core.

        Processes share the cores evenly with each other and with other programs.
        """
        if self.num_cores is None:
            return 1.0
        most = min(num_devices, self.num_devices)
        own, usual = (max(1.0, (count + self.load) / self.num_cores) for count in (most, self.num_cores))
        return own / usual

    def link(self, count: int, *, stride: int = 1) -> Interconnect:
        """What a ring of `count` devices has, each `stride` devices after the one before.

        There are `stride` such rings at once, which share the link between machines. On a CPU the cores also move the
        messages, so that these take longer when processes share cores.
        """
        if count * stride > self.num_devices:
            rings = min(stride, self.num_devices)
            link = Interconnect(latency_s=self.between.latency_s, bytes_per_s=self.between.bytes_per_s / rings)
        else:
            link = self.inside
        busy = self.busy(count * stride)
        return Interconnect(latency_s=link.latency_s * busy, bytes_per_s=link.bytes_per_s / busy)


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is trained, how fast one device is, and what the devices are connected by."""

    network: Network
    speed: Speed
    machine: Machine
