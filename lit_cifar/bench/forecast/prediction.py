"""What a forecast says of a mode on a number of devices."""

from dataclasses import asdict, dataclass
from typing import Any

from lit_cifar.bench.forecast.inputs import Network


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on the device that holds the most."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    buckets: float = 0.0  # copies that messages need

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.buckets

    @classmethod
    def of(cls, network: Network, parameters: float, activations: float, *, buckets: float = 0.0) -> "Memory":
        """Gradients are as large as parameters, and so is each state of the optimizer."""
        states = network.num_states * parameters
        return cls(
            parameters=parameters, gradients=parameters, optimizer=states, activations=activations, buckets=buckets
        )


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Of one optimizer step.

    Attributes:
        num_devices: Over all machines.
        batch_size: Images of the step, over all devices.
        compute_s: Seconds that the device with the most work computes.
        idle_s: Seconds that it waits for others to compute.
        communication_s: Seconds of messages.
        exposed_s: Those of them in which nothing is computed.
        memory: Of one device.
    """

    mode: str
    num_devices: int
    batch_size: int
    compute_s: float
    memory: Memory
    idle_s: float = 0.0
    communication_s: float = 0.0
    exposed_s: float = 0.0

    @property
    def step_s(self) -> float:
        return self.compute_s + self.idle_s + self.exposed_s

    @property
    def images_per_s(self) -> float:
        return self.batch_size / self.step_s

    def efficiency(self, single: "Prediction") -> float:
        """The speed of each device over that of one device alone."""
        return self.images_per_s / self.num_devices / single.images_per_s

    def to_json(self) -> dict[str, Any]:
        """The fields, and the seconds of a step."""
        return asdict(self) | {"step_s": self.step_s}
