"""`bench forecast`: each formula against values worked out by hand, and the command."""

import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from commands import run_here
from torch import nn

from lit_cifar.bench.forecast.choice import DEVICES, fastest, predict, predictions
from lit_cifar.bench.forecast.communication import Interconnect, link_from_sweep, two_terms
from lit_cifar.bench.forecast.counted import count
from lit_cifar.bench.forecast.inputs import Job, Layer, Machine, Network, Speed
from lit_cifar.bench.forecast.measured import Steps
from lit_cifar.bench.forecast.one_f_one_b import order_of_passes, seconds_of_flow
from lit_cifar.bench.forecast.overlap import all_reduce_behind_backward, gathered_ahead, gradient_buckets
from lit_cifar.bench.forecast.prediction import Prediction
from lit_cifar.bench.timing import Spread
from lit_cifar.models import build_network
from lit_cifar.models.partition import measure
from lit_cifar.modes import MODES

MIB = 2**20
LINK = Interconnect(latency_s=1e-6, bytes_per_s=1e9)
FREE = Interconnect(latency_s=0.0, bytes_per_s=math.inf)
# Eight equal layers; of each `tp` divides three quarters of the arithmetic and half of what is held.
LAYER = Layer(
    flop=4,
    parameter_bytes=MIB,
    output_bytes=1000,
    kept_bytes=8000,
    split_flop=3,
    split_parameter_bytes=MIB // 2,
    split_kept_bytes=4000,
)
NETWORK = Network(layers=(LAYER,) * 8, image_bytes=3000, sums=(1000,) * 16)
SPEED = Speed(step_s=0.0, image_s=1e-3, optimizer_s=8e-3)
MACHINE = Machine(num_devices=8, inside=LINK, between=Interconnect(latency_s=1e-5, bytes_per_s=1e8))
JOB = Job(network=NETWORK, speed=SPEED, machine=MACHINE)
WITHOUT_MESSAGES = replace(JOB, machine=replace(MACHINE, inside=FREE, between=FREE))


def of(job: Job, mode: str, num_devices: int, batch_size: int) -> Prediction:
    found = predict(job, mode, num_devices, batch_size)
    assert found is not None
    return found


# Links ---------------------------------------------------------------------------------------------------------------


def test_messages_take_what_the_formulas_say() -> None:
    assert LINK.send(1e6) == pytest.approx(1.001e-3)
    assert LINK.all_reduce(4, 1e6) == pytest.approx(6e-6 + 1.5e-3)  # a ring: 6 messages of a quarter
    assert LINK.all_reduce(1024, 1000) == pytest.approx(20e-6 + 2e-6)  # trees: 10 levels, up and down
    assert LINK.all_gather(4, 1e6) == pytest.approx(3e-6 + 0.75e-3)
    assert LINK.broadcast(8, 100) == pytest.approx(3 * 1.1e-6)  # a tree
    assert LINK.broadcast(8, 1e6) == pytest.approx(7e-6 + 1e-3)  # a chain


def test_one_device_sends_nothing() -> None:
    assert LINK.all_reduce(1, 1e6) == LINK.all_gather(1, 1e6) == LINK.broadcast(1, 1e6) == 0


def test_an_all_reduce_over_ever_more_devices_sends_the_bytes_twice() -> None:
    fast = Interconnect(latency_s=0.0, bytes_per_s=1e9)
    seconds = [fast.all_reduce(count, 1e6) for count in (2, 4, 8, 64, 1024, 10**6)]
    assert all(a < b for a, b in pairwise(seconds))
    assert seconds[0] == pytest.approx(1e-3)
    assert seconds[-1] == pytest.approx(2e-3, rel=1e-5)


@pytest.mark.parametrize("num_devices", [2, 4])
def test_a_link_is_found_again_in_its_all_reduces(num_devices: int) -> None:
    link = Interconnect(latency_s=2e-4, bytes_per_s=4e8)
    ring = {size: 2 * link.all_gather(num_devices, size) for size in (1024, 65536, 2**25)}
    found = link_from_sweep(ring, count=num_devices)
    assert (found.latency_s, found.bytes_per_s) == (pytest.approx(2e-4), pytest.approx(4e8))


def test_neither_term_of_a_line_is_negative() -> None:
    assert two_terms([1.0, 1.0], [1.0, 2.0], [1.0, 3.0]) == (0.0, pytest.approx(15 / 13))
    assert two_terms([1.0, 1.0], [1.0, 2.0], [3.0, 1.0]) == (pytest.approx(1.2), 0.0)


def test_the_speed_is_the_line_through_the_measured_steps_without_the_optimizer() -> None:
    steps = Steps(single={8: Spread((0.10,)), 32: Spread((0.34,))}, modes={}, threads=None)
    speed = steps.speed(0.005)
    assert (speed.step_s, speed.image_s) == (pytest.approx(0.015), pytest.approx(0.01))
    assert speed.passes(32) + speed.optimizer_s == pytest.approx(0.34)


# Overlap -------------------------------------------------------------------------------------------------------------


def test_the_first_bucket_has_1_mib_and_the_others_25() -> None:
    layers = [replace(LAYER, parameter_bytes=size * MIB) for size in (20, 0, 10)]
    sizes, shares = zip(*gradient_buckets(layers), strict=True)
    assert sizes == (MIB, 25 * MIB, 4 * MIB)
    # A third of backward for each layer: a tenth of the last; all of two and 16/20 of the first; all.
    assert shares == (pytest.approx(1 / 30), pytest.approx(2 / 3 + 0.8 / 3), pytest.approx(1))


@pytest.mark.parametrize(
    ("backward_s", "overlap", "exposed"),
    [
        (1000.0, 1.0, 4.0),  # only the last bucket is left
        (1000.0, 0.0, 30.0),  # nothing passes during backward
        (1000.0, 0.5, 17.0),
        (150.0, 1.0, 19.0),  # the second is full at 140 s, + 25 = 165, + 4 = 169
        (0.0, 1.0, 30.0),  # there is nothing to hide behind
        (30.0, 1.0, 27.0),  # 1 s + 1, then at 28 s + 25 = 53, + 4 = 57: 27 after 30
    ],
)
def test_messages_pass_behind_backward(backward_s: float, overlap: float, exposed: float) -> None:
    layers = [replace(LAYER, parameter_bytes=size * MIB) for size in (20, 0, 10)]
    total, left = all_reduce_behind_backward(layers, backward_s, lambda size: size / MIB, overlap=overlap)
    assert (total, left) == (30, pytest.approx(exposed))


def test_parameters_are_gathered_ahead() -> None:
    """Two layers of 3 s each: 1 s forward and 2 s backward. A message takes 1.5 s."""
    total, left = gathered_ahead([LAYER, LAYER], 6.0, lambda size: 1.5, overlap=1.0)
    # Forward waits 1.5 s for the first and 0.5 s for the second; backward 1.5 s for the second, not for the first,
    # whose gather and the reduce-scatter of the second pass beside 2 s each; 1.5 s for the last reduce-scatter.
    assert (total, left) == (9, pytest.approx(1.5 + 0.5 + 1.5 + 0 + 0 + 1.5))
    assert gathered_ahead([LAYER, LAYER], 6.0, lambda size: 1.5, overlap=0.0) == (9, 9)


# Modes ---------------------------------------------------------------------------------------------------------------


def test_without_messages_the_batch_divides_evenly() -> None:
    for mode in ("ddp", "ddp_spawn"):
        assert of(WITHOUT_MESSAGES, mode, 4, 64).step_s == pytest.approx(0.016 + 0.008)
    assert of(WITHOUT_MESSAGES, "fsdp2", 4, 64).step_s == pytest.approx(0.016 + 0.002)  # its part of the optimizer
    assert of(WITHOUT_MESSAGES, "mp", 4, 64).step_s == pytest.approx(0.064 + 0.008)
    # A quarter of three quarters, and the quarter that all compute; the optimizer has 5/8 of the parameters.
    assert of(WITHOUT_MESSAGES, "tp", 4, 64).step_s == pytest.approx(0.064 * 7 / 16 + 0.008 * 5 / 8)


@pytest.mark.parametrize(("num_devices", "microbatches"), [(2, 4), (4, 4), (8, 8)])
def test_a_pipeline_idles_at_its_start_and_end(num_devices: int, microbatches: int) -> None:
    """Huang et al. 2019: (S - 1) / (M + S - 1) of the time."""
    found = of(WITHOUT_MESSAGES, "pp", num_devices, 64)
    bubble = (num_devices - 1) / (microbatches + num_devices - 1)
    passes = found.step_s - SPEED.optimizer_s / num_devices
    assert found.idle_s / passes == pytest.approx(bubble)
    assert passes == pytest.approx(0.064 / num_devices / (1 - bubble))


def test_a_stage_alternates_once_the_others_have_microbatches() -> None:
    """Narayanan et al. 2021, figure 4: the last stage alternates from the start, the first has three ahead of it."""
    orders = [order_of_passes(stage, num_stages=4, num_microbatches=4) for stage in range(4)]
    words = [" ".join(f"{'B' if each.is_backward else 'F'}{each.microbatch}" for each in order) for order in orders]
    assert words == [
        "F0 F1 F2 F3 B0 B1 B2 B3",
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]


@pytest.mark.parametrize("num_cores", [1, 2, 3])
def test_stages_that_share_cores_need_at_least_the_time_of_their_work(num_cores: int) -> None:
    work = 4 * 8 / num_cores
    found = seconds_of_flow([1.0] * 4, num_microbatches=8, slowdown=lambda computing: max(1, computing / num_cores))
    assert found == pytest.approx(work) if num_cores == 1 else work < found <= work + 3  # one core is never idle


def test_the_slowest_stage_sets_the_pace() -> None:
    """It waits for the first forward pass before it, and is waited for in the last backward pass."""
    found = seconds_of_flow([1.0, 3.0, 1.0], num_microbatches=9, slowdown=lambda computing: 1.0)
    assert found == pytest.approx(1 + 9 * 3)


def test_messages_of_each_mode() -> None:
    no_overlap = replace(JOB, machine=replace(MACHINE, overlap=0.0))
    reduce = sum(LINK.all_reduce(4, size) for size in (MIB, 7 * MIB))
    assert of(no_overlap, "ddp", 4, 64).exposed_s == pytest.approx(reduce)
    assert of(no_overlap, "fsdp2", 4, 64).exposed_s == pytest.approx(3 * 8 * LINK.all_gather(4, MIB))
    assert of(JOB, "tp", 4, 64).exposed_s == pytest.approx(16 * LINK.all_reduce(4, 64_000))
    assert of(JOB, "mp", 4, 64).exposed_s == pytest.approx(3 * 2 * LINK.send(64_000))
    dp = 2 * LINK.broadcast(4, 8 * MIB) + 3 * LINK.send(16 * 3000)
    assert of(JOB, "dp", 4, 64).exposed_s == pytest.approx(dp)
    # Both ways over three cuts at the start and the end, at the others over one; the logits.
    ends, logits = 3 * 2 * LINK.send(16_000), LINK.broadcast(4, 64_000)
    assert of(JOB, "pp", 4, 64).exposed_s == pytest.approx(ends + logits)
    assert of(no_overlap, "pp", 4, 64).exposed_s == pytest.approx(ends + 3 * 2 * LINK.send(16_000) + logits)
    halves = 2 * LINK.send(8_000) + LINK.broadcast(2, 32_000) + LINK.all_reduce(2, 4 * MIB)
    assert of(JOB, "ddp_pp", 4, 64).exposed_s == pytest.approx(halves)
    copies = 2 * LINK.send(32_000) + LINK.all_reduce(2, MIB) + LINK.all_reduce(2, 7 * MIB)
    assert of(no_overlap, "ddp_mp", 4, 64).exposed_s == pytest.approx(copies)


def test_zero_sent_three_times_what_is_reduced_in_one_and_a_half_times_the_time() -> None:
    """Rajbhandari et al. 2020: stage 3 sends 1.5 times as much as data parallelism."""
    fast = replace(JOB, machine=replace(MACHINE, inside=Interconnect(latency_s=0.0, bytes_per_s=1e9)))
    found = [of(fast, mode, 4, 64).communication_s for mode in ("ddp", "fsdp2")]
    assert found[1] / found[0] == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("mode", "parameters", "activations", "buckets"),
    [
        ("dp", 8, 2, 0),
        ("ddp", 8, 2, 8),
        ("fsdp2", 2, 2, 3),
        ("mp", 2, 2, 0),
        ("pp", 2, 2, 0),  # the first stage has all four microbatches in flight
        ("ddp_mp", 4, 2, 4),
        ("ddp_pp", 4, 1, 4),  # and that of two stages two of four
        ("tp", 5, 5, 0),
    ],
)
def test_memory_on_four_devices(mode: str, parameters: float, activations: float, buckets: float) -> None:
    memory = of(JOB, mode, 4, 64).memory
    assert memory.parameters == memory.gradients == memory.optimizer == parameters * MIB
    assert memory.activations == activations * 64 * 64_000 / 8
    assert memory.buckets == buckets * MIB
    assert memory.total == 3 * memory.parameters + memory.activations + memory.buckets


def test_rings_over_machines_share_their_link() -> None:
    assert MACHINE.link(8) == MACHINE.inside
    assert MACHINE.link(16) == MACHINE.between
    assert MACHINE.link(8, stride=2).bytes_per_s == MACHINE.between.bytes_per_s / 2


def test_processes_that_share_cores_are_slower() -> None:
    cpu = replace(MACHINE, num_cores=2, num_devices=4)
    assert [cpu.busy(count) for count in (1, 2, 4, 64)] == [1, 1, 2, 2]
    # Beside four other threads two processes have a third of the cores, four have half of them.
    assert [replace(cpu, load=4).busy(count) for count in (1, 2, 4)] == [pytest.approx(x) for x in (5 / 6, 1, 8 / 6)]
    assert cpu.link(4).send(1000) == pytest.approx(2 * LINK.send(1000))
    job = replace(JOB, machine=replace(cpu, inside=FREE))
    two, four = (of(job, "ddp", count, 64) for count in (2, 4))
    assert two.step_s == pytest.approx(0.032 + 0.008)
    assert four.step_s == pytest.approx(0.032 + 0.016)
    # Four stages on two cores: one core is idle only in the first and the last eighth of a stage's four microbatches.
    assert of(job, "pp", 4, 64).step_s == pytest.approx(0.032 * 9 / 8 + 0.004)
    assert of(job, "pp", 2, 64).step_s == pytest.approx(0.032 * 5 / 4 + 0.004)
    # Virtual devices of one process compute one after the other.
    assert of(job, "dp", 4, 64).step_s == of(job, "mp", 4, 64).step_s == pytest.approx(0.064 + 0.008)


def test_processes_of_one_cpu_average_in_shared_memory() -> None:
    """Two barriers, and the time for all bytes, which is longer where processes share cores."""
    cpu = replace(MACHINE, num_cores=2, num_devices=4, overlap=0.0, average_s=1e-9)
    job, bytes_s = replace(JOB, machine=cpu), 8 * MIB * 1e-9
    assert of(job, "ddp", 2, 64).exposed_s == pytest.approx(2 * LINK.all_reduce(2, 0) + bytes_s)
    assert of(job, "ddp", 4, 64).exposed_s == pytest.approx(2 * (2 * LINK.all_reduce(4, 0) + bytes_s))
    assert of(job, "ddp_mp", 4, 64).exposed_s == pytest.approx(2 * LINK.all_reduce(2, 0) + bytes_s)
    several = replace(job, machine=replace(cpu, num_devices=2))
    assert of(several, "ddp", 4, 64).exposed_s > 10 * bytes_s  # sent from one machine to the other


def test_a_faster_link_never_makes_a_step_longer() -> None:
    fast = replace(JOB, machine=replace(MACHINE, inside=FREE, between=FREE))
    for num_devices in DEVICES:
        pairs = zip(predictions(JOB, num_devices, 2048), predictions(fast, num_devices, 2048), strict=True)
        assert all(quick.step_s <= slow.step_s for slow, quick in pairs)


def test_a_mode_is_forecast_where_it_can_run() -> None:
    found = {mode.name: [n for n in DEVICES if predict(JOB, mode.name, n, 2048)] for mode in MODES}
    powers = list(DEVICES)
    assert found["single"] == [1]
    assert found["ddp"] == found["ddp_spawn"] == found["fsdp2"] == powers[1:]
    assert found["dp"] == found["mp"] == found["pp"] == [2, 4, 8]  # one machine; one layer for each stage
    assert found["ddp_mp"] == powers[2:]
    assert found["ddp_pp"] == powers[2:]
    assert found["tp"] == [2, 4, 8, 16, 32, 64]
    assert predict(JOB, "ddp", 8, 4) is None  # less than an image each
    assert predict(JOB, "pp", 8, 4) is None
    assert predict(JOB, "ddp_pp", 8, 15) is None


def test_efficiency_compares_with_one_device() -> None:
    single = of(WITHOUT_MESSAGES, "single", 1, 64)
    assert single.efficiency(single) == 1
    assert of(WITHOUT_MESSAGES, "ddp", 4, 256).efficiency(single) == pytest.approx(1)
    assert of(WITHOUT_MESSAGES, "ddp", 4, 64).efficiency(single) == pytest.approx(72 / 24 / 4)


def test_the_fastest_that_fits_is_chosen() -> None:
    found = predictions(WITHOUT_MESSAGES, 4, 64)
    names = {each.mode: each for each in found}
    assert fastest(found, math.inf) == names["fsdp2"]
    alike = replace(names["fsdp2"], compute_s=names["ddp"].compute_s / 1.01)
    assert fastest([names["ddp"], names["ddp_spawn"], alike], math.inf) == names["ddp"]
    assert fastest(found, names["ddp_pp"].memory.total - 1) is not names["ddp"]
    assert fastest(found, 1) is None


# Counting ------------------------------------------------------------------------------------------------------------


def test_what_backward_needs_is_counted_once() -> None:
    network = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 64, 10))
    found = count(network, (3, 8, 8))
    # The image, for the convolution; the output of ReLU, for itself and the linear layer.
    assert [layer.kept_bytes for layer in found.layers] == [4 * 3 * 64, 4 * 8 * 64, 0, 0]
    assert [layer.output_bytes for layer in found.layers] == [4 * 8 * 64, 4 * 8 * 64, 4 * 8 * 64, 40]
    assert [layer.parameter_bytes for layer in found.layers] == [4 * 216, 0, 0, 4 * 5130]
    assert found.image_bytes == 4 * 3 * 64
    assert found.sums == ()


@pytest.mark.parametrize("arch", ["tiny", "vit_tiny"])
def test_a_network_is_counted_as_the_modes_divide_it(arch: str) -> None:
    network = build_network(arch, stem=None, num_classes=10, image_size=32)  # type: ignore[arg-type]
    found = count(network, (3, 32, 32))
    assert [layer.flop for layer in found.layers] == [block.flop for block in measure(network, (3, 32, 32))]
    assert found.parameter_bytes == 4 * sum(parameter.numel() for parameter in network.parameters())
    for layer in found.layers:
        assert 0 <= layer.split_flop <= layer.flop
        assert 0 <= layer.split_parameter_bytes <= layer.parameter_bytes
        assert 0 <= layer.split_kept_bytes <= layer.kept_bytes
    assert sum(layer.split_flop for layer in found.layers) > 0.7 * found.flop
    assert all(parameter.device.type == "cpu" and parameter.grad is None for parameter in network.parameters())


def test_the_sums_of_a_residual_block() -> None:
    """One of its output in forward, one of the gradient of its input in backward."""
    network = build_network("tiny", stem="cifar", num_classes=10, image_size=32)
    blocks = [block for block in measure(network, (3, 32, 32)) if block.name.startswith("layer")]
    assert len(count(network, (3, 32, 32)).sums) == 2 * len(blocks)


# The command ---------------------------------------------------------------------------------------------------------

GPUS = ["--image-us=60", "--step-ms=5", "--optimizer-ms=0.4", "--devices-per-machine=8", "--link-gb-s=200"]
GPUS += [
    "--link-latency-us=10",
    "--between-gb-s=50",
    "--between-latency-us=20",
    "--batch_size=512",
    "--model.arch=tiny",
]


def test_the_command_with_everything_given_measures_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lit_cifar.bench.forecast.found.measure_link", None)
    monkeypatch.setattr("lit_cifar.bench.forecast.found.measure_steps", None)
    files = [f"--json={tmp_path / 'f.json'}", f"--figure={tmp_path / 'f.png'}"]
    done = run_here("bench", "forecast", *GPUS, *files)
    assert (done.status, done.stderr) == (0, "")
    assert "The mode to choose: ddp on 8 devices" in done.stdout
    assert "forecast beside measurement" not in done.stdout
    assert (tmp_path / "f.png").stat().st_size > 10_000
    record = json.loads((tmp_path / "f.json").read_text())
    rows = record["forecast"]["fixed batch"]
    single = next(row for row in rows if row["mode"] == "single")
    assert single["step_s"] == pytest.approx(5e-3 + 512 * 60e-6 + 0.4e-3)
    assert record["measured"] == []


def test_memory_decides(tmp_path: Path) -> None:
    done = run_here("bench", "forecast", *GPUS, "--memory-gib=0.001")
    assert "No mode fits into 0.001 GiB" in done.stdout
    record = tmp_path / "f.json"
    run_here("bench", "forecast", *GPUS, f"--json={record}")
    rows = [row for row in json.loads(record.read_text())["forecast"]["fixed batch"] if row["num_devices"] == 8]
    held = {row["mode"]: sum(row["memory"].values()) for row in rows}
    done = run_here("bench", "forecast", *GPUS, f"--memory-gib={(held['ddp'] - 1) / 2**30}")
    assert "ddp would take " in done.stdout


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--link-gb-s=-3", "--link-latency-us=1"], "argument --link-gb-s: -3 is not a number of more than 0"),
        (["--link-gb-s=fast", "--link-latency-us=1"], "fast is not a number of more than 0"),
        (["--link-gb-s=inf", "--link-latency-us=1"], "inf is not a number of more than 0"),
        (["--link-gb-s=3"], "--link-gb-s without --link-latency-us\npass both or neither"),
        (["--between-latency-us=3"], "--between-latency-us without --between-gb-s"),
        (["--overlap=1.5"], "1.5 is not a number of 0 or more, at most 1"),
        (["--devices-per-machine=0"], "0 is not a number of at least 1"),
        (["--step-ms=3"], "are parts of a given speed\npass --image-us too"),
        (["--batch_size=40"], "pass a multiple of 16, e.g. --batch_size=32"),
        (
            ["--image-us=60", "--figure=x.gif"],
            "--figure=x.gif must end in .png, .svg or .pdf\npass --figure forecast.png",
        ),
    ],
)
def test_values_that_cannot_be_are_refused(flags: list[str], words: str) -> None:
    done = run_here("bench", "forecast", *flags)
    assert (done.status, done.stdout) == (2, "")
    assert words in done.stderr.replace("lit_cifar: error: ", "").replace("\n  ", "\n")
    assert len(done.stderr.splitlines()) <= 5


def test_one_device_has_no_link_to_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lit_cifar.bench.forecast.found.num_devices_here", lambda: 1)
    done = run_here("bench", "forecast")
    assert done.status == 2
    assert "--link-gb-s 25 --link-latency-us 10" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(torch.cuda.is_available(), reason="of processes that share cores")
def test_forecasts_stand_beside_measurements(tmp_path: Path) -> None:
    record = tmp_path / "f.json"
    done = run_here("bench", "forecast", "--small", "--rounds=1", "--batch_size=16", f"--json={record}")
    assert (done.status, done.stderr) == (0, "")
    found = json.loads(record.read_text())
    assert [(row["mode"], row["processes"]) for row in found["measured"]] == [
        ("ddp", 2),
        ("ddp", 4),
        ("pp", 2),
        ("pp", 4),
    ]
    assert min(min(row["step_s"][0], row["forecast_s"]) for row in found["measured"]) > 0
    assert found["speed"]["image_s"] + found["speed"]["step_s"] > 0
    assert found["machine"]["inside"]["bytes_per_s"] > 0
    assert 0 < found["machine"]["average_s"] < 1e-6
    assert "all on this machine, batch 16; goal: within 15%" in done.stdout
    assert "The mode to choose: " in done.stdout
