"""Modes whose devices each have the whole network and a part of the batch: `single`, `dp`, `ddp`, `ddp_spawn`."""

from functools import partial

from lit_cifar.bench.forecast.inputs import Job
from lit_cifar.bench.forecast.overlap import BACKWARD, all_reduce_behind_backward
from lit_cifar.bench.forecast.prediction import Memory, Prediction


def single(job: Job, num_devices: int, batch_size: int) -> Prediction:
    """One device."""
    network = job.network
    return Prediction(
        mode="single",
        num_devices=num_devices,
        batch_size=batch_size,
        compute_s=job.speed.passes(batch_size) + job.speed.optimizer_s,
        memory=Memory.of(network, network.parameter_bytes, network.kept_bytes * batch_size),
    )


def dp(job: Job, num_devices: int, batch_size: int) -> Prediction:
    """Parameters go to all devices and gradients come back to the first, in every step.

    One process queues the work of all devices, so that the constant part of a step is paid for each. Virtual devices of
    a CPU compute one after the other and share their memory.
    """
    network, speed = job.network, job.speed
    part = batch_size / num_devices
    on_cpu = job.machine.num_cores is not None
    link = job.machine.link(num_devices)
    models = 2 * link.broadcast(num_devices, network.parameter_bytes)
    images = (num_devices - 1) * link.send(network.image_bytes * part)
    messages = 0.0 if on_cpu else models + images
    return Prediction(
        mode="dp",
        num_devices=num_devices,
        batch_size=batch_size,
        compute_s=num_devices * speed.step_s + speed.image_s * (batch_size if on_cpu else part) + speed.optimizer_s,
        communication_s=messages,
        exposed_s=messages,
        memory=Memory.of(network, network.parameter_bytes, network.kept_bytes * (batch_size if on_cpu else part)),
    )


def ddp(job: Job, num_devices: int, batch_size: int, *, mode: str = "ddp") -> Prediction:
    """Gradients are averaged, bucket by bucket, while backward computes further ones (Li et al. 2020).

    The buckets hold a copy of the gradients: Lightning leaves `gradient_as_bucket_view` off. On one machine's CPU there
    is one bucket, which is averaged in shared memory after backward.
    """
    network, speed, machine = job.network, job.speed, job.machine
    part = batch_size / num_devices
    passes = speed.passes(part) * machine.busy(num_devices)
    messages, exposed = average_gradients(job, num_devices, BACKWARD * passes)
    return Prediction(
        mode=mode,
        num_devices=num_devices,
        batch_size=batch_size,
        compute_s=passes + speed.optimizer_s * machine.busy(num_devices),
        communication_s=messages,
        exposed_s=exposed,
        memory=Memory.of(
            network, network.parameter_bytes, network.kept_bytes * part, buckets=float(network.parameter_bytes)
        ),
    )


def average_gradients(job: Job, num_processes: int, backward_s: float, *, stride: int = 1) -> tuple[float, float]:
    """Seconds in which processes average the network's gradients, and those that remain when backward has ended.

    Args:
        job: What is trained on what.
        num_processes: With a replica each.
        backward_s: Seconds of a backward pass.
        stride: As of `Machine.link`.
    """
    network, machine = job.network, job.machine
    shared_s = machine.average(num_processes, network.parameter_bytes)
    if shared_s is not None:
        return shared_s, shared_s
    reduce = partial(machine.link(num_processes, stride=stride).all_reduce, num_processes)
    return all_reduce_behind_backward(network.layers, backward_s, reduce, overlap=machine.overlap)
