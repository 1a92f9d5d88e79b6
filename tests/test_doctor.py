"""`python -m lit_cifar doctor`: each planted fault is found and named, and a machine without one passes."""

import hashlib
import json
import re
import socket
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import Result, launch, run_here
from documents import ROOT
from faulty_devices import CPU, Flipping, Sending, Slow, World, garble, keep, lose, tear
from rich.console import Console

from lit_cifar.errors import ConfigError
from lit_cifar.strategies.device_copies import CopyFault, copy_faults
from lit_cifar.tools.commands import doctor
from lit_cifar.tools.doctor import (
    ALL_MODES,
    COPY_MODES,
    PROCESS_MODES,
    Check,
    Finding,
    environment,
    examination,
    machine,
)
from lit_cifar.tools.doctor.arithmetic import OPERATIONS, RIGHT, operations
from lit_cifar.tools.doctor.examination import Examination, placed
from lit_cifar.tools.doctor.links import (
    Link,
    ask_nvidia_smi,
    check_copies,
    driver_gpus,
    driver_version,
    links_between,
    topology,
)
from lit_cifar.tools.doctor.machine import Gpu
from lit_cifar.tools.doctor.measurement import SIZES, Device, Measurement
from lit_cifar.tools.doctor.mode_table import LocalMachine, judge_modes, missing_from_torch, mode_table
from lit_cifar.tools.doctor.page import draw, print_page
from lit_cifar.tools.doctor.ranks import Ranks, examine_ranks, judge_ranks, probe_ranks, slow_ranks

# In the form in which `nvidia-smi` prints: four GPUs, pairs of which have NVLinks.
TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV4\tPHB\tSYS\tPIX\t0-23\t0\t\tN/A
GPU1\tNV4\t X \tNODE\tSYS\tSYS\t0-23\t0\t\tN/A
GPU2\tPHB\tNODE\t X \tPIX\tSYS\t24-47\t1\t\tN/A
GPU3\tSYS\tSYS\tPIX\t X \tSYS\t24-47\t1\t\tN/A
NIC0\tPIX\tSYS\tSYS\tSYS\t X

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NV#  = Connection traversing a bonded set of # NVLinks
"""
QUERY = "0, GPU-aa, 4, 16\n1, GPU-bb, 4, 16\n2, GPU-cc, 3, 16\n3, GPU-dd, [N/A], [N/A]\n"
NVLINK = "GPU 0: NVIDIA X (UUID: GPU-aa)\n\t Link 0: 25.781 GB/s\n\t Link 1: 25.781 GB/s\n\t Link 2: <inactive>\n"
HEAD = "| NVIDIA-SMI 550.54.15   Driver Version: 550.54.15    CUDA Version: 12.4     |"


def recorded(arguments: object) -> str:
    """The driver of that machine."""
    match list(arguments):  # type: ignore[call-overload]
        case ["topo", "-m"]:
            return TOPOLOGY
        case ["nvlink", *_]:
            return NVLINK
        case []:
            return HEAD
        case _:
            return QUERY


def gpu(name: str = "NVIDIA X", *, capability: tuple[int, int] = (8, 0), free: float = 0.9) -> Gpu:
    return Gpu(name=name, capability=capability, free=int(free * 2**36), total=2**36)


# Arithmetic and ranks.


@pytest.mark.parametrize("accelerator", ["cpu", "cuda"])
def test_the_right_results_are_those_of_whole_numbers(accelerator: str) -> None:
    """Calculated again without torch; float64 holds all of these integers."""
    matmul, convolution = operations(accelerator)
    product = matmul.left.numpy().astype(np.float64) @ matmul.right.numpy().astype(np.float64)
    images = np.pad(convolution.left.numpy().astype(np.float64), ((0, 0), (0, 0), (1, 1), (1, 1)))
    filters = convolution.right.numpy().astype(np.float64)
    taps = [
        np.einsum(
            "nchw,oc->nohw",
            images[:, :, row : row + 32 : 2, column : column + 32 : 2],
            filters[:, :, row, column],
            optimize=True,
        )
        for row in range(3)
        for column in range(3)
    ]
    for name, result in (("matmul", product), ("convolution", sum(taps))):
        assert np.array_equal(result, np.round(result))
        assert abs(result).max() < 2**24
        found = hashlib.sha256((result + 0.0).astype("<f4").tobytes()).hexdigest()
        assert found == RIGHT[accelerator][name]


def world(size: int, make: Callable[[int, Device], Device] = lambda rank, device: device) -> Callable[..., Ranks]:
    """What probes in place of processes: threads."""
    return lambda *_, **__: Ranks(accelerator="cpu", measurements=World(size).measure(make))


def test_a_clean_machine_passes_100_times() -> None:
    for repeat in range(100):
        ranks, findings = examine_ranks(2, "cpu", probe=world(2))
        assert findings == [], f"repeat {repeat}"
        assert [each.rank for each in ranks.measurements] == [0, 1]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_flipped_bit_names_the_rank(size: int) -> None:
    """With two ranks as well: there is one right answer, so no majority is needed."""
    last = size - 1
    _, findings = examine_ranks(
        size, "cpu", probe=world(size, lambda rank, device: spoilt(rank == last, Flipping, device))
    )
    (finding,) = findings
    assert re.match(
        rf"Rank {last} \(CPU\) computes wrongly: its convolution was wrong in 8 of 8 repeats "
        r"\(1 of 65536 values, the first is -?[\d.]+ in place of -?\d+\)\.",
        finding.problem,
    )
    assert finding.modes == ALL_MODES


def spoilt(condition: bool, kind: type[Device], device: Device) -> Device:
    """With the fault, and otherwise connected as before."""
    if not condition:
        return device
    faulty = kind(CPU)
    faulty.all_reduce = device.all_reduce  # type: ignore[method-assign]
    return faulty


def test_a_slow_rank_is_named_and_measured_again() -> None:
    probe = world(2, lambda rank, device: spoilt(rank == 1, Slow, device))
    _, (finding,) = examine_ranks(2, "cpu", probe=probe)
    assert re.match(r"Rank 1 \(CPU\) takes [\d.]+ times as long as the others for the same matmul", finding.problem)
    assert finding.modes == PROCESS_MODES


def measured(*seconds: list[float]) -> Ranks:
    """Ranks that took so long in their turns."""
    found = [
        Measurement(rank=rank, device="CPU", seconds=dict.fromkeys(OPERATIONS, times))
        for rank, times in enumerate(seconds)
    ]
    return Ranks(accelerator="cpu", measurements=found)


def test_noise_names_nobody() -> None:
    assert slow_ranks(measured([1, 9, 9, 9], [1, 1, 1, 1])) == {}, "one fast turn shows that it can"
    assert slow_ranks(measured([1.9, 1.9], [1, 1])) == {}
    assert slow_ranks(measured([5])) == {}, "no other rank"
    assert [*slow_ranks(measured([2, 2, 9], [1, 1, 5], [1, 1, 1]))] == [0]
    once = iter([measured([2, 2], [1, 1]), measured([2, 2], [1, 1]), measured([1, 1], [1, 1])])
    assert examine_ranks(2, "cpu", probe=lambda *_, **__: next(once))[1] == []
    always = measured([2, 2], [1, 1])
    assert len(examine_ranks(2, "cpu", probe=lambda *_, **__: always)[1]) == 1


def forget_rank_2(values: torch.Tensor, own: torch.Tensor, before: torch.Tensor) -> None:
    sums = values / 6  # 1 + 2 + 3 times the pattern
    values.copy_(sums * 3)


@pytest.mark.parametrize(
    ("faulty", "spoil", "who", "cause"),
    [
        ([1], lose, "Rank 1 gets", "the values of all other ranks are missing."),
        ([1], keep, "Rank 1 gets", "it is the result of the call before."),
        ([1], tear, "Rank 1 gets", "it is the result of the call before, in 128 of 256 places from 128 on."),
        ([1], garble, "Rank 1 gets", "it holds numbers that no rank has sent, in 1 of 256 places from 3 on."),
        ([0, 1], forget_rank_2, "Ranks 0, 1 get", "the values of rank 2 are missing."),
    ],
)
def test_a_wrong_sum_is_named_once(faulty: list[int], spoil: Callable[..., None], who: str, cause: str) -> None:
    probe = world(3, lambda rank, device: Sending(device, spoil) if rank in faulty else device)
    _, (finding,) = examine_ranks(3, "cpu", probe=probe)
    share = f"in {8 * len(faulty)} of 30 results, the smallest of 1 KiB"
    assert finding.problem == f"{who} wrong sums from all-reduce, {share}: {cause}"
    assert finding.modes == PROCESS_MODES


def test_clocks_that_differ_are_noted() -> None:
    apart = [Measurement(rank=rank, device="CPU", wall_s=60.0 * rank) for rank in range(2)]
    (finding,) = judge_ranks(Ranks(accelerator="cpu", measurements=apart))
    assert (finding.problem, finding.is_fault) == ("The clocks of the ranks differ by 60 s.", False)


def test_what_nccl_loses_is_tried_without_copies_from_gpu_to_gpu() -> None:
    whole = Ranks(accelerator="cuda", measurements=[Measurement(rank=0, device="X")])
    lost = replace(whole, measurements=[Measurement(rank=0, device="X", faults=[(1024, "its own values, in all")])])
    for without, mend in ((whole, "export NCCL_P2P_DISABLE=1"), (lost, "turn off the IOMMU")):
        settings: list[object] = []

        def probe(*_: object, settings_: list[object] = settings, other: Ranks = without, **given: object) -> Ranks:
            settings_.append(given.get("settings"))
            return other if given else lost

        _, (finding,) = examine_ranks(2, "cuda", probe=probe)
        assert finding.mend.startswith(mend)
        assert settings == [None, {"NCCL_P2P_DISABLE": "1"}]
        assert "dp" not in finding.modes
        assert "ddp" in finding.modes


@pytest.fixture
def in_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes find the modules of this folder."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


@pytest.mark.usefixtures("in_tests")
def test_real_processes_with_three_faults() -> None:
    ranks = probe_ranks(3, "cpu", module="faulty_devices")
    assert ranks.failure is None
    problems = [finding.problem for finding in judge_ranks(ranks)]
    assert [problem.split(":")[0] for problem in problems] == [
        "Rank 1 (CPU) computes wrongly",
        "Rank 2 gets wrong sums from all-reduce, in 24 of 90 results, the smallest of 1 KiB",
    ]
    assert [*slow_ranks(ranks)] == [1]


@pytest.mark.usefixtures("in_tests")
def test_a_process_that_dies_is_named_with_its_place() -> None:
    (finding,) = judge_ranks(probe_ranks(2, "cpu", module="dying_device"))
    assert finding.problem.startswith("Processes that send each other tensors failed: they ended with status ")
    assert "rank 1 was at an all-reduce of 1,024 bytes" in finding.problem
    assert finding.modes == PROCESS_MODES


def test_processes_that_take_too_long_are_ended() -> None:
    """That none is left is checked after each test."""
    (finding,) = judge_ranks(probe_ranks(2, "cpu", timeout_s=0))
    assert "they did not end within 0 s" in finding.problem


# Copies.


FAULT = CopyFault(source="cuda:1", destination="cuda:0", num_bytes=4096, wrong_bytes=4096, was_lost=True)
NOT_TRIED = "not tried: that needs two GPUs, and torch sees"


def fails(devices: object) -> list[CopyFault]:
    raise RuntimeError("CUDA error: unknown\nmore")


@pytest.mark.parametrize(
    ("num_devices", "find", "seen", "problem"),
    [
        (2, copy_faults, "all of 2 ordered pairs copied every byte", None),
        (0, copy_faults, f"{NOT_TRIED} none", None),
        (1, copy_faults, f"{NOT_TRIED} 1", None),
        (2, fails, "not tried", "Copies between devices could not be tried: CUDA error: unknown."),
        (
            2,
            lambda devices: [FAULT],
            "faults in 1 of 2 ordered pairs",
            "Copies between devices do not arrive (cuda:1 to cuda:0): of a copy of 4,096",
        ),
        (3, lambda devices: [FAULT] * 8, "faults in 8 of 6 ordered pairs", "Copies between devices do not arrive ("),
    ],
)
def test_copies(num_devices: int, find: Callable[..., list[CopyFault]], seen: str, problem: str | None) -> None:
    said: list[str] = []
    check = check_copies([CPU] * num_devices, report=said.append, find=find)
    assert check.seen == seen
    assert said == ([f"copies between {num_devices} devices"] if num_devices > 1 else [])
    assert len(check.findings) == (problem is not None)
    for finding in check.findings:
        assert finding.problem.startswith(str(problem))
        assert finding.modes == COPY_MODES
        assert num_devices < 3 or " and 2 more): " in finding.problem


# Links.


def test_the_driver_says_how_gpus_are_linked() -> None:
    assert [gpu.uuid for gpu in driver_gpus(recorded)] == ["aa", "bb", "cc", "dd"]
    assert driver_version(recorded) == ("550.54.15", "12.4")
    kinds = topology(recorded)
    assert len(kinds) == 12
    assert (kinds[0, 1], kinds[2, 1], kinds[3, 2], kinds[3, 0]) == ("NV4", "NODE", "PIX", "SYS")
    assert all(kinds[one, other] == kinds[other, one] for one, other in kinds)


def test_torch_may_see_gpus_in_another_order() -> None:
    links = {(link.source, link.destination): link for link in links_between(["bb", "aa", "cc"], {(0, 1)}, recorded)}
    assert len(links) == 6
    nvlink, pcie, host = links[0, 1], links[1, 2], links[0, 2]
    assert (nvlink.in_words, nvlink.peer, nvlink.gb_s) == ("NVLink x 4", True, pytest.approx(103.1, abs=0.1))
    assert (pcie.in_words, pcie.peer, pcie.gb_s) == ("PCIe, CPU", False, pytest.approx(15.76))
    assert (host.in_words, host.kind) == ("host", "NODE")


def test_without_a_driver_nothing_is_known() -> None:
    (link, _) = links_between(["aa", "bb"], set(), lambda _: "")
    assert (link.in_words, link.gb_s) == ("not known", None)
    assert driver_version(lambda _: "") is None
    assert ask_nvidia_smi(["--no-such-option-of-nvidia-smi"]) == ""


def test_the_picture_has_a_line_for_each_pair(tmp_path: Path) -> None:
    draw([], tmp_path / "none.svg")
    assert "<!-- torch sees fewer than two GPUs -->" in (tmp_path / "none.svg").read_text()
    draw(links_between(["aa", "bb", "cc", "dd"], {(0, 1), (1, 0)}, recorded), tmp_path / "links.svg")
    drawn = (tmp_path / "links.svg").read_text()
    assert drawn.count("<!-- GPU ") == 4
    assert {"<!-- NVLink x 4 -->", "<!-- PCIe switch, no direct copies -->"} <= set(re.findall("<!-- .* -->", drawn))


# The machine.


def test_versions_that_do_not_match_are_named() -> None:
    installed = {"torch": "2.15.0+cu132", "torchvision": "0.26.0", "lightning": "2.6.6"}
    needs = {"torchvision": ["numpy", "torch==2.11.0"], "lightning": ["torch<4.0,>=2.1.0", "torch>9; extra == 'x'"]}
    (finding,) = machine.check_versions(installed, lambda package: needs.get(package))
    assert finding.problem == "torchvision 0.26.0 was made for torch==2.11.0, and torch 2.15.0+cu132 is installed."
    assert finding.mend == "pip install --upgrade torch torchvision"
    assert finding.modes == ALL_MODES
    assert machine.check_versions(installed | {"torch": "2.11.0+cu130"}, lambda package: needs.get(package)) == []


@pytest.mark.parametrize(
    ("cuda", "words"),
    [
        ("13.0", "torch is built with CUDA 13.0, and driver 550.54.15 runs CUDA 12.4 at most."),
        ("none", "This torch is built without CUDA"),
        ("12.8", "The driver sees GPUs, and torch sees none."),
    ],
)
def test_a_driver_that_torch_cannot_use(cuda: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (finding,) = machine.check_driver(("550.54.15", "12.4"), cuda, [], num_driver_gpus=2).findings
    assert finding.problem.startswith(words)
    assert finding.is_fault
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (note,) = machine.check_driver(("550.54.15", "12.4"), cuda, [], num_driver_gpus=2).findings
    assert (note.mend, note.is_fault) == ("unset CUDA_VISIBLE_DEVICES", False)
    assert not machine.check_driver(("550.54.15", "12.4"), cuda, [gpu()], num_driver_gpus=1).findings
    assert not machine.check_driver(None, cuda, [], num_driver_gpus=0).findings


def test_gpus_are_compared_with_torch_and_each_other() -> None:
    architectures = ["sm_75", "sm_80", "sm_90a", "compute_90"]

    def found(*gpus: Gpu) -> list[Finding]:
        return [finding for check in machine.check_gpus(gpus, architectures) for finding in check.findings]

    assert found(gpu(), gpu()) == []
    assert machine.runs_on((8, 6), architectures)
    assert machine.runs_on((12, 0), architectures)
    assert not machine.runs_on((12, 0), architectures[:3])
    assert not machine.runs_on((7, 0), architectures)
    old, busy = found(gpu(capability=(6, 1)), gpu(free=0.2))
    assert old.problem == "This torch has no code for GPU 0, NVIDIA X (sm_61)."
    assert old.is_fault
    assert busy.problem.startswith("Of GPU 1 12.8 GiB of 64 GiB are free")
    (broken,) = found(Gpu(name="not usable", error="CUDA error: unknown"))
    assert (broken.problem, broken.modes) == ("GPU 0 cannot be used: CUDA error: unknown.", ALL_MODES)
    (mixed,) = found(gpu(), gpu("NVIDIA Y"))
    assert "different models" in mixed.problem


def test_little_shared_memory_and_disk_are_named(tmp_path: Path) -> None:
    assert not machine.check_shared_memory(2**30).findings
    assert machine.check_shared_memory(2**26).findings[0].modes == ("ddp_spawn",)
    assert not machine.check_disk(tmp_path, 2**30, is_writable=True).findings
    assert "has 100 MiB free" in machine.check_disk(tmp_path, 100 * 2**20, is_writable=True).findings[0].problem
    assert "cannot be written" in machine.check_disk(tmp_path, 2**40, is_writable=False).findings[0].problem
    assert machine.existing(tmp_path / "no" / "such") == tmp_path


def test_this_machine_is_described(tmp_path: Path) -> None:
    found = {
        check.name: check.seen for check in machine.look_at_machine([gpu()], folder=tmp_path / "runs", ask=recorded)
    }
    assert "torch 2" in found["versions"]
    assert found["GPU 0"] == "NVIDIA X, 57.6 GiB of 64 GiB free"
    assert "driver 550.54.15 runs up to 12.4" in found["CUDA"]
    assert str(tmp_path) in found["disk"]


# The environment.


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment without what this machine may have set."""
    for name in ("MASTER_PORT", "MASTER_ADDR", "RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_a_bare_environment_is_right(bare: pytest.MonkeyPatch) -> None:
    checks = environment.look_at_environment()
    assert [finding for check in checks for finding in check.findings] == []
    assert [check.name for check in checks] == ["interfaces", "variables"]


@pytest.mark.parametrize(
    ("variables", "problem", "mend", "modes"),
    [
        ("RANK=1 WORLD_SIZE=2", "RANK=1 WORLD_SIZE=2 in the environment", "unset RANK WORLD_SIZE", ALL_MODES),
        ("RANK=0 WORLD_SIZE=2", "RANK=0 WORLD_SIZE=2 in the environment", "unset RANK WORLD_SIZE", PROCESS_MODES),
        ("SLURM_NTASKS=4 SLURM_JOB_NAME=train", "a cluster has 4 tasks", "configs/cluster/slurm.sh", ALL_MODES),
        ("MASTER_PORT=http", "MASTER_PORT=http in the environment is not a port.", "29500", PROCESS_MODES),
        ("GLOO_SOCKET_IFNAME=ib99", "GLOO_SOCKET_IFNAME=ib99 is not an interface of this machine", "set it", ()),
    ],
)
def test_variables_are_named(
    variables: str, problem: str, mend: str, modes: tuple[str, ...], bare: pytest.MonkeyPatch
) -> None:
    for variable in variables.split():
        bare.setenv(*variable.split("="))
    (finding,) = [finding for check in environment.look_at_environment() for finding in check.findings]
    assert finding.problem.startswith(problem)
    assert mend in finding.mend
    assert finding.modes == modes


def test_the_number_of_processes_alone_is_no_fault(bare: pytest.MonkeyPatch) -> None:
    bare.setenv("WORLD_SIZE", "2")
    assert environment.check_launcher() == []


def test_ports(bare: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        bare.setenv("MASTER_PORT", str(busy.getsockname()[1]))
        (finding,) = environment.check_port()
        assert (finding.mend, finding.is_fault) == ("unset MASTER_PORT", False)

    def refuse(address: tuple[str, int]) -> socket.socket:
        raise OSError("no such device")

    assert environment.check_loopback(refuse)[0].modes == PROCESS_MODES


@pytest.mark.parametrize(("set_by_s", "words"), [(60.0, "set by +60 s"), (-3600.0, "set by -3600 s"), (0.0, "")])
def test_a_clock_that_is_set_meanwhile_is_noted(set_by_s: float, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "time", iter([1000.0, 1030.0 + set_by_s]).__next__)
    monkeypatch.setattr(environment, "monotonic", iter([0.0, 30.0]).__next__)
    findings = environment.Clock().check()
    assert len(findings) == (set_by_s != 0.0)
    assert all(words in finding.problem and not finding.is_fault for finding in findings)


# Verdicts, page and command.


def machine_with(num_gpus: int, backends: frozenset[str] = frozenset({"gloo", "nccl"})) -> LocalMachine:
    here = LocalMachine.here()
    return replace(here, num_gpus=num_gpus, backends=backends)


def test_copies_stop_dp_and_mp_and_not_ddp() -> None:
    finding = Finding("copies", "Lost.", "iommu", COPY_MODES)
    found = {verdict.mode.name: verdict for verdict in judge_modes(mode_table(machine_with(4)), [finding])}
    assert [mode for mode, verdict in found.items() if verdict.accelerator is None] == ["dp", "mp", "ddp_mp"]
    assert found["dp"].to_json() == {"mode": "dp", "fit": False, "reason": "Lost.", "command": "iommu"}
    assert found["ddp"].to_json()["fit"] is True
    assert found["ddp"].verdict == "yes, on 2 to 4 GPUs"
    assert str(found["ddp"].command).endswith("--trainer.strategy=ddp --trainer.devices=2")


def test_a_torch_that_lacks_gloo_is_a_fault() -> None:
    rows = mode_table(machine_with(0, frozenset()))
    (finding,) = missing_from_torch(rows)
    assert finding.problem.endswith("cannot run here: this torch has no gloo.")
    assert finding.modes == PROCESS_MODES
    assert [row.accelerator for row in judge_modes(rows, [finding])].count(None) == len(PROCESS_MODES)


def test_one_process_for_each_gpu() -> None:
    assert placed(None, num_gpus=0, has_nccl=True) == (2, "cpu")
    assert placed(None, num_gpus=4, has_nccl=True) == (4, "cuda")
    assert placed(None, num_gpus=4, has_nccl=False) == (2, "cpu")
    assert placed(3, num_gpus=0, has_nccl=False) == (3, "cpu")
    assert placed(3, num_gpus=4, has_nccl=True) == (3, "cuda")
    with pytest.raises(ConfigError, match=r"torch sees 2 GPUs.*\n.*CUDA_VISIBLE_DEVICES= python"):
        placed(3, num_gpus=2, has_nccl=True)
    with pytest.raises(ConfigError, match="--devices=0"):
        placed(0, num_gpus=2, has_nccl=True)


def examined(*findings: Finding, ranks: Ranks | None = None, links: list[Link] | None = None) -> Examination:
    """Of a made-up machine."""
    rows = mode_table(machine_with(2))
    return Examination(
        machine=[Check("memory", "8 GiB")],
        environment=[Check("variables", "none")],
        links=links or [],
        copies=Check("GPU to GPU", "not probed"),
        ranks=ranks or Ranks(accelerator="cpu", failure="did not start"),
        findings=[*findings],
        verdicts=judge_modes(rows, findings),
    )


def page(found: Examination) -> list[str]:
    out = StringIO()
    print_page(found, Console(file=out, width=100))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_the_page_begins_with_what_is_wrong_and_what_mends_it() -> None:
    note = Finding("machine", "GPUs differ.", "nvidia-smi")
    mend = "python -m lit_cifar fit " + "--a_long_flag=1 " * 10
    fault = Finding("copies", "Copies [cuda:0] are lost.", mend.strip(), ("dp", "mp"))
    lines = page(examined(note, fault))
    assert lines[:6] == [
        "",
        "Not fit: 1 fault",
        "   1. Copies [cuda:0] are lost.",
        f"      {mend.strip()}",
        " note GPUs differ.",
        "      nvidia-smi",
    ]
    assert "  dp           no, see 1" in lines
    assert "  ddp          yes, on 2 GPUs" in lines
    assert "  failed    did not start" in lines


def test_the_page_of_a_machine_with_gpus() -> None:
    links = links_between(["aa", "bb"], {(0, 1), (1, 0)}, recorded)
    found = World(2).measure()
    for each in found:
        each.sweep = {num_bytes: [num_bytes / 1e9] for num_bytes in SIZES}
    lines = page(examined(links=links, ranks=Ranks(accelerator="cuda", measurements=found)))
    assert lines[1] == "Fit: no fault was found, and 10 modes run here"
    assert any("NVLink x 4" in line for line in lines)
    assert "all-reduce over 2 ranks, NCCL; the slowest link can carry 103 GB/s" in lines
    (speeds,) = [line.split() for line in lines if line.strip().startswith("GB/s")]
    assert speeds == ["GB/s", *["1"] * 6]
    assert sum(line.endswith("results right") for line in lines) == 2


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    """The command on this machine, as a user starts it."""
    folder = tmp_path_factory.mktemp("doctor")
    flags = ["--json", folder / "found.json", "--figure", folder / "links.png", "--run_dir", folder]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        return launch("doctor", *flags, check=False), folder


def test_this_machine_is_fit(healthy: tuple[Result, Path]) -> None:
    result, folder = healthy
    assert (result.status, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[0] == "checking machine and environment"
    assert "checking ranks: 2 on the CPU calculate and send each other tensors" in lines
    assert "Fit: no fault was found, and 10 modes run here" in lines
    assert max(map(len, lines)) <= 120
    found = json.loads((folder / "found.json").read_text())
    assert found["fit"] is True
    parts = {"machine", "environment", "links", "copies", "ranks", "findings", "verdicts"}
    assert parts <= set(found)
    assert [name for name, _ in found["environment"]] == ["interfaces", "variables"]
    assert {verdict["mode"] for verdict in found["verdicts"]} == set(ALL_MODES)
    assert (folder / "links.png").stat().st_size > 0


def sections(lines: list[str]) -> list[str]:
    """Titles and the names of the rows, without what differs from machine to machine."""
    names = [re.match(r"  ([A-Za-z][A-Za-z0-9_ ]*?)  ", line) for line in lines]
    titles = [line for line in lines if re.fullmatch("modes|machine|environment|copies|ranks", line)]
    return [*titles, *(name[1].strip() for name in names if name)]


def test_the_page_of_docs_is_what_it_prints(healthy: tuple[Result, Path]) -> None:
    text = (ROOT / "docs" / "doctor.md").read_text()
    (shown,) = re.findall(r"```text\n(checking .*?)```", text, flags=re.DOTALL)
    assert sections(shown.splitlines()) == sections([line.rstrip() for line in healthy[0].stdout.splitlines()])


def test_a_fault_is_exit_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    fault = Finding("ranks", "Rank 1 computes wrongly.", "another machine", ALL_MODES)
    monkeypatch.setattr(examination, "examine_ranks", lambda *_: (measured(), [fault]))
    result = run_here("doctor")
    assert result.status == 1
    assert "Not fit: 1 fault\n   1. Rank 1 computes wrongly.\n      another machine\n" in result.stdout


def test_ctrl_c_is_exit_status_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(examination, "examine_ranks", interrupt)
    result = run_here("doctor")
    assert (result.status, result.stderr) == (130, "interrupted; every process was ended\n")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--devices=0"], "--devices=0 leaves nothing to measure"),
        (["--devices=1025"], "--devices=1025 processes do not fit one machine"),
        (["--device=2"], "unrecognized arguments: --device=2"),
        (["--json=/no/such/file.json"], "--json=/no/such/file.json cannot be written"),
        (["--figure=/no/such/file.png"], "--figure=/no/such/file.png cannot be written"),
        (["--figure=links.txt"], "--figure=links.txt must end in .png, .svg or .pdf"),
    ],
)
def test_wrong_arguments_are_exit_status_2(args: list[str], words: str) -> None:
    result = run_here("doctor", *args)
    assert result.status == 2
    assert words in result.stderr
    assert len(result.stderr.splitlines()) <= 5


def test_torchrun_starts_no_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "is_torchelastic_launched", lambda: True)
    result = run_here("doctor")
    assert result.status == 2
    assert "run python -m lit_cifar doctor without torchrun" in result.stderr
