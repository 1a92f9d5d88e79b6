"""Modes that divide the layers: `mp`, `ddp_mp`, `pp`, `ddp_pp`."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from lit_cifar.bench.forecast.inputs import Job, Layer, Network, kept_bytes, parameter_bytes
from lit_cifar.bench.forecast.one_f_one_b import seconds_of_flow
from lit_cifar.bench.forecast.overlap import BACKWARD
from lit_cifar.bench.forecast.prediction import Memory, Prediction
from lit_cifar.bench.forecast.replicated import average_gradients
from lit_cifar.models.partition import balanced

Stages = Sequence[Sequence[Layer]]
_FEWEST_MICROBATCHES = 4  # as `PipelineStrategy` has by default


def mp(job: Job, num_devices: int, batch_size: int) -> Prediction:
    """The stages work one after the other on the whole batch."""
    stages = divide(job.network, num_devices)
    messages = _copies(job, stages, batch_size)
    memories = [Memory.of(job.network, parameter_bytes(stage), kept_bytes(stage) * batch_size) for stage in stages]
    return Prediction(
        mode="mp",
        num_devices=num_devices,
        batch_size=batch_size,
        compute_s=job.speed.passes(batch_size) + job.speed.optimizer_s,
        communication_s=messages,
        exposed_s=messages,
        memory=_largest(memories),
    )


def ddp_mp(job: Job, num_devices: int, batch_size: int) -> Prediction:
    """`ddp` over processes, each of which has two stages; a virtual device of a CPU needs no core of its own."""
    network, speed, machine = job.network, job.speed, job.machine
    replicas = num_devices // 2
    part = batch_size / replicas
    stages = divide(network, 2)
    busy = machine.busy(replicas)
    passes = speed.passes(part) * busy
    copies = _copies(job, stages, part)
    messages, exposed = average_gradients(job, replicas, BACKWARD * passes, stride=1 if machine.num_cores else 2)
    memories = [
        Memory.of(network, parameter_bytes(stage), kept_bytes(stage) * part, buckets=float(parameter_bytes(stage)))
        for stage in stages
    ]
    return Prediction(
        mode="ddp_mp",
        num_devices=num_devices,
        batch_size=batch_size,
        compute_s=passes + speed.optimizer_s * busy,
        communication_s=copies + messages,
        exposed_s=copies + exposed,
        memory=_largest(memories),
    )


def pp(job: Job, num_devices: int, batch_size: int) -> Prediction:
    """One pipeline of all devices."""
    return _pipelines(job, num_devices, batch_size, num_stages=num_devices, mode="pp")


def ddp_pp(job: Job, num_devices: int, batch_size: int) -> Prediction:
    """Pipelines of two stages, whose gradients are averaged in one message after backward."""
    return _pipelines(job, num_devices, batch_size, num_stages=2, mode="ddp_pp")


def num_microbatches(num_stages: int) -> int:
    """As `PipelineStrategy` takes by default: 1F1B needs as many as it has stages."""
    return max(_FEWEST_MICROBATCHES, num_stages)


def divide(network: Network, num_stages: int) -> Stages:
    """Consecutive layers, so that the stage with the most FLOP has as few as possible: the cuts of `fit`."""
    bounds = balanced([layer.flop for layer in network.layers], num_stages)
    return [network.layers[a:b] for a, b in pairwise((0, *bounds, len(network.layers)))]


@dataclass(frozen=True, kw_only=True)
class _Flow:
    """Microbatches through the stages of a pipeline."""

    work_s: float  # of the stage with the most, over all microbatches
    idle_s: float
    messages_s: float
    exposed_s: float

    @classmethod
    def of(cls, job: Job, stages: Stages, *, part: float, num_pipelines: int) -> "_Flow":
        """`part` is the images of one pipeline."""
        count = num_microbatches(len(stages))
        seconds = [job.speed.passes(part / count) * job.network.share(stage) for stage in stages]
        flow = seconds_of_flow(
            seconds,
            num_microbatches=count,
            slowdown=lambda computing: job.machine.busy(num_pipelines * computing),
        )
        link = job.machine.link(len(stages))
        sends = [2 * link.send(stage[-1].output_bytes * part / count) for stage in stages[:-1]]
        logits = link.broadcast(len(stages), stages[-1][-1].output_bytes * part)
        steady = (count - 1) * max(sends, default=0.0)
        return cls(
            work_s=count * max(seconds),
            idle_s=flow - count * max(seconds),
            messages_s=sum(sends) + steady + logits,
            exposed_s=sum(sends) + (1 - job.machine.overlap) * steady + logits,
        )


def _pipelines(job: Job, num_devices: int, batch_size: int, *, num_stages: int, mode: str) -> Prediction:
    network, machine = job.network, job.machine
    stages = divide(network, num_stages)
    replicas = num_devices // num_stages
    part = batch_size / replicas
    flow = _Flow.of(job, stages, part=part, num_pipelines=replicas)
    largest = max(parameter_bytes(stage) for stage in stages)
    average = machine.link(replicas, stride=num_stages).all_reduce(replicas, largest)
    optimizer = job.speed.optimizer_s * machine.busy(num_devices) * largest / network.parameter_bytes
    return Prediction(
        mode=mode,
        num_devices=num_devices,
        batch_size=batch_size,
        compute_s=flow.work_s + optimizer,
        idle_s=flow.idle_s,
        communication_s=flow.messages_s + average,
        exposed_s=flow.exposed_s + average,
        memory=_largest(_pipeline_memory(network, stages, part=part, num_pipelines=replicas)),
    )


def _pipeline_memory(network: Network, stages: Stages, *, part: float, num_pipelines: int) -> list[Memory]:
    """Under 1F1B stage s of S has S - s microbatches in flight (Narayanan et al. 2019)."""
    count = num_microbatches(len(stages))
    return [
        Memory.of(
            network,
            parameter_bytes(stage),
            kept_bytes(stage) * part / count * min(count, len(stages) - index),
            buckets=float(parameter_bytes(stage)) if num_pipelines > 1 else 0.0,
        )
        for index, stage in enumerate(stages)
    ]


def _copies(job: Job, stages: Stages, num_images: float) -> float:
    """Seconds of activations and their gradients at the cuts inside one process; a CPU's devices share their memory."""
    if job.machine.num_cores is not None:
        return 0.0
    return sum(2 * job.machine.inside.send(stage[-1].output_bytes * num_images) for stage in stages[:-1])


def _largest(memories: Sequence[Memory]) -> Memory:
    return max(memories, key=lambda memory: memory.total)
