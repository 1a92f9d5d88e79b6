"""Modes that divide tensors: `fsdp2` the state of the training, `tp` the arithmetic of each block."""

from functools import partial

from lit_cifar.bench.forecast.inputs import Job
from lit_cifar.bench.forecast.overlap import gathered_ahead
from lit_cifar.bench.forecast.prediction import Memory, Prediction


def fsdp2(job: Job, num_devices: int, batch_size: int) -> Prediction:
    """Parameters are gathered twice, gradients reduced and scattered once (ZeRO stage 3, Rajbhandari et al. 2020)."""
    network, speed, machine = job.network, job.speed, job.machine
    part = batch_size / num_devices
    busy = machine.busy(num_devices)
    passes = speed.passes(part) * busy
    gather = partial(machine.link(num_devices).all_gather, num_devices)
    messages, exposed = gathered_ahead(network.layers, passes, gather, overlap=machine.overlap)
    largest = max(layer.parameter_bytes for layer in network.layers)
    return Prediction(
        mode="fsdp2",
        num_devices=num_devices,
        batch_size=batch_size,
        compute_s=passes + speed.optimizer_s * busy / num_devices,
        communication_s=messages,
        exposed_s=exposed,
        # The layer that computes and the one that is gathered next are whole, and so are the gradients of one.
        memory=Memory.of(
            network, network.parameter_bytes / num_devices, network.kept_bytes * part, buckets=3.0 * largest
        ),
    )


def tp(job: Job, num_devices: int, batch_size: int) -> Prediction:
    """Each device sees the whole batch, and computes its part of every split layer (Shoeybi et al. 2019).

    Sums over the devices stand between layers, so that nothing is computed meanwhile.
    """
    network, speed, machine = job.network, job.speed, job.machine
    busy = machine.busy(num_devices)
    own = 1 - sum(layer.split_flop for layer in network.layers) / network.flop * (1 - 1 / num_devices)
    link = machine.link(num_devices)
    messages = sum(link.all_reduce(num_devices, num_bytes * batch_size) for num_bytes in network.sums)
    parameters = _held(
        network.parameter_bytes, sum(layer.split_parameter_bytes for layer in network.layers), num_devices
    )
    activations = _held(network.kept_bytes, sum(layer.split_kept_bytes for layer in network.layers), num_devices)
    return Prediction(
        mode="tp",
        num_devices=num_devices,
        batch_size=batch_size,
        compute_s=busy
        * (speed.step_s + speed.image_s * batch_size * own + speed.optimizer_s * parameters / network.parameter_bytes),
        communication_s=messages,
        exposed_s=messages,
        memory=Memory.of(network, parameters, activations * batch_size),
    )


def _held(whole: float, split: float, num_devices: int) -> float:
    return whole - split + split / num_devices
