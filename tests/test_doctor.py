"""`doctor` and `modes`: each planted fault is found and named, a machine without one passes, every mode has its row."""

import contextlib
import json
import re
import shlex
import shutil
import socket
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from commands import TINY, launch, run_here
from documents import ROOT
from lightning.pytorch.strategies import StrategyRegistry
from rich.console import Console
from test_srun import TASK

from lit_cifar import LitResNet
from lit_cifar.errors import ConfigError
from lit_cifar.mode.table import MODES, Row
from lit_cifar.tools.doctor import ALL_MODES, COPY_MODES, PROCESS_MODES, Check, MachineFinding, command, machine
from lit_cifar.tools.doctor.command import Examination, placed, print_page
from lit_cifar.tools.doctor.measurement import OPERATIONS, Measurement, fault, inputs, pattern
from lit_cifar.tools.doctor.modes import ModeRow, cores_and_gpus, judge_modes, mode_table
from lit_cifar.tools.doctor.ranks import (
    Ranks,
    _without_gpu,
    examine_ranks,
    lost_messages,
    probe_ranks,
    slow_ranks,
    wrong_results,
)

CPU = torch.device("cpu")

# Arithmetic and ranks.


@pytest.mark.parametrize("accelerator", ["cpu", "cuda"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_every_right_result_is_a_whole_number_that_float32_holds(name: str, accelerator: str) -> None:
    left, right = inputs(name, accelerator)
    exact = OPERATIONS[name](left.double(), right.double())
    assert exact.equal(exact.round())
    assert exact.abs().max() < 2**24
    assert fault(OPERATIONS[name](left, right), exact.float()) == ""


def test_a_fault_is_counted_and_shown() -> None:
    right = pattern(256, call=1, device=CPU)
    assert not (right == pattern(256, call=0, device=CPU)).any(), "an old result is wrong in every place"
    shown = fault(right.clone().index_fill_(0, torch.tensor([3, 9]), 0.5), right)
    assert shown == "2 of 256 values, the first is 0.5 in place of 11"
    assert fault(torch.full((2,), torch.nan), torch.zeros(2)).startswith("2 of 2 values, the first is nan")


def probe(monkeypatch: pytest.MonkeyPatch, *kinds: str) -> Ranks:
    """By real processes on these devices of `faulty_devices`."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.setenv("FAULTY_DEVICES", " ".join(kinds))
    monkeypatch.setattr("lit_cifar.tools.doctor.ranks._PROBE", "faulty_devices")
    return probe_ranks(len(kinds), "cpu")


def test_real_processes_with_three_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = probe(monkeypatch, "Device", "SlowAndFlipping", "Stale")
    assert ranks.failure is None
    (wrong,) = wrong_results(ranks)
    said = (
        r"Rank 1 \(CPU\) computes wrongly: its convolution was wrong in 8 of 8 repeats \(1 of 65536 values, the first"
    )
    assert re.match(said + r" is -?[\d.]+ in place of -?\d+\)\.", wrong.problem)
    assert wrong.modes == ALL_MODES
    (lost,) = lost_messages(ranks, mend="another machine")
    assert lost.problem == (
        "Rank 2 gets wrong sums from all-reduce, in 24 of 30 results, the smallest of 1 KiB: 256 of 256 values, "
        "the first is 6 in place of 48."
    )
    assert (lost.mend, lost.modes) == ("another machine", PROCESS_MODES)
    (slow,) = slow_ranks(ranks).values()
    assert re.match(r"Rank 1 \(CPU\) takes [\d.]+ times as long as the others for the same matmul", slow.problem)
    assert slow.modes == PROCESS_MODES


def test_a_process_that_dies_is_named_with_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    (finding,) = lost_messages(probe(monkeypatch, "Device", "Dying"), mend="")
    assert finding.problem.startswith("Processes that send each other tensors failed: they ended with status ")
    assert "rank 1 was at an all-reduce of 1,024 bytes" in finding.problem
    assert finding.modes == PROCESS_MODES
    # Those that take too long are ended; that none is left is checked after each test.
    monkeypatch.setattr("lit_cifar.tools.doctor.ranks._TIMEOUT_S", 0)
    assert "did not end within 0 s" in str(probe_ranks(2, "cpu").failure)


def measured(*seconds: list[float]) -> Ranks:
    """Ranks that took so long in their turns."""
    found = [Measurement(rank=r, device="CPU", seconds=dict.fromkeys(OPERATIONS, t)) for r, t in enumerate(seconds)]
    return Ranks(accelerator="cpu", measurements=found)


def test_noise_names_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    assert slow_ranks(measured([1, 9, 9, 9], [1, 1, 1, 1])) == {}, "one fast turn shows that it can"
    assert slow_ranks(measured([1.9, 1.9], [1, 1])) == {}
    assert slow_ranks(measured([5])) == {}, "no other rank"
    assert [*slow_ranks(measured([2, 2, 9], [1, 1, 5], [1, 1, 1]))] == [0]
    once = iter([measured([2, 2], [1, 1]), measured([2, 2], [1, 1]), measured([1, 1], [1, 1])])
    monkeypatch.setattr("lit_cifar.tools.doctor.ranks.probe_ranks", lambda *_: next(once, measured([2, 2], [1, 1])))
    assert examine_ranks(2, "cpu")[1] == []
    assert len(examine_ranks(2, "cpu")[1]) == 1, "always"


WHOLE = Ranks(accelerator="cuda", measurements=[Measurement(rank=0, device="X")])
LOST = replace(WHOLE, measurements=[Measurement(rank=0, device="X", faults=[(1024, "1 of 256 values")])])


def test_of_the_gpus_of_a_machine_only_the_wrong_one_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert _without_gpu(1) == "export CUDA_VISIBLE_DEVICES=0,2,3"


@pytest.mark.parametrize(
    ("tries", "mend"),
    [
        ([LOST, WHOLE, LOST], "export NCCL_P2P_DISABLE=1"),
        ([LOST, LOST], "turn off the IOMMU"),
        ([LOST, WHOLE, WHOLE], "python -m lit_cifar doctor"),
    ],
)
def test_what_nccl_loses_is_tried_without_copies_from_gpu_to_gpu(
    tries: list[Ranks], mend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: list[object] = []

    def pretend(*_: object, **given: object) -> Ranks:
        settings.append(given.get("settings"))
        return tries[len(settings) - 1]

    monkeypatch.setattr("lit_cifar.tools.doctor.ranks.probe_ranks", pretend)
    _, (finding,) = examine_ranks(2, "cuda")
    assert finding.mend.startswith(mend)
    assert settings == [None, {"NCCL_P2P_DISABLE": "1"}, None][: len(tries)]
    assert finding.modes == PROCESS_MODES


# The machine.


def fails(*_: object, **__: object) -> Any:
    raise RuntimeError("CUDA error: unknown\nmore")


def test_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.check_copies([CPU, CPU]) == Check("GPU to GPU", "all of 2 ordered pairs copied every byte")
    assert machine.check_copies([CPU]).seen == "not tried: that needs two GPUs, and torch sees 1"
    monkeypatch.setattr(machine, "copy_faults", lambda devices: {("cuda:1", "cuda:0"): "of a copy of 4,096"})
    (finding,) = machine.check_copies([CPU, CPU]).findings
    assert finding.problem.startswith("Copies between devices do not arrive (cuda:1 to cuda:0): of a copy of 4,096")
    assert finding.modes == COPY_MODES
    monkeypatch.setattr(machine, "copy_faults", fails)
    (finding,) = machine.check_copies([CPU, CPU]).findings
    assert finding.problem == "Copies between devices could not be tried: CUDA error: unknown."


def test_a_gpu_that_torch_cannot_use_or_others_use(monkeypatch: pytest.MonkeyPatch) -> None:
    free, kernels = [60 * 2**30], []
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA X")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (free[0], 64 * 2**30))
    monkeypatch.setattr(torch, "ones", lambda *_, device: kernels.append(device) or torch.tensor([1.0]))
    assert machine.check_gpu(0) == Check("GPU 0", "NVIDIA X, 60 GiB of 64 GiB free", [])
    free[0] = 2**30
    (busy,) = machine.check_gpu(1).findings
    assert (busy.problem[:34], busy.modes) == ("Of GPU 1 1 GiB of 64 GiB are free:", ())
    assert kernels == ["cuda:0", "cuda:1"]
    monkeypatch.setattr(torch, "ones", fails)  # as where torch has no kernel for the GPU
    (broken,) = machine.check_gpu(0).findings
    assert (broken.problem, broken.modes) == ("GPU 0 cannot be used: CUDA error: unknown.", ALL_MODES)


def test_gpus_that_the_driver_knows_and_torch_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "init", fails)
    assert machine.ask_nvidia_smi("--no-such-option-of-nvidia-smi") == ""
    monkeypatch.setattr(machine, "ask_nvidia_smi", lambda *_: "")
    assert machine.check_no_gpus() == Check("GPUs", "none")
    monkeypatch.setattr(machine, "ask_nvidia_smi", lambda *_: "NVIDIA X, 550.54.15")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (note,) = machine.check_no_gpus().findings
    assert (note.mend, note.modes) == ("unset CUDA_VISIBLE_DEVICES", ())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    (finding,) = machine.check_no_gpus().findings
    assert finding.problem.endswith("torch sees none: CUDA error: unknown.")
    assert finding.modes == ALL_MODES


def test_that_a_process_sees_one_mig_instance_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-5d5ba0d6)",
        "  MIG 3g.40gb     Device  0: (UUID: MIG-c7384736)",
        "  MIG 1c.4g.40gb  Device  1: (UUID: MIG-a28ad590)",
    ]
    monkeypatch.setattr(machine, "ask_nvidia_smi", lambda *_: "\n".join(lines[:1]))
    assert machine.check_mig() == []
    monkeypatch.setattr(machine, "ask_nvidia_smi", lambda *_: "\n".join(lines))
    (check,) = [check for check in machine.look_at_machine(folder=Path()) if check.name == "MIG"]
    assert check.seen == "3g.40gb, 1c.4g.40gb"
    (note,) = check.findings
    assert note.problem.startswith("A process sees one of 2 MIG instances:")
    assert (note.mend[:34], note.modes) == ("CUDA_VISIBLE_DEVICES=MIG-c7384736 ", ())


def test_little_shared_memory_and_disk_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not machine.check_shared_memory(2**30).findings
    assert machine.check_shared_memory(2**26).findings[0].modes == ("ddp_spawn",)
    for free, words in ((100 * 2**20, f"{tmp_path} has 100 MiB free"), (2**30, "")):
        monkeypatch.setattr(shutil, "disk_usage", lambda folder, free=free: SimpleNamespace(free=free))
        check = machine.check_disk(tmp_path / "no" / "such")
        assert check.seen.endswith(str(tmp_path))
        assert [finding.problem.startswith(words) for finding in check.findings] == [True] * bool(words)
    monkeypatch.setattr(machine.os, "access", lambda folder, mode: False)
    assert machine.check_disk(tmp_path).findings[0].problem == f"{tmp_path} cannot be written."


# The environment.


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment without what this machine may have set."""
    for name in ("MASTER_PORT", "MASTER_ADDR", "RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def around() -> list[MachineFinding]:
    return [finding for check in machine.look_at_environment() for finding in check.findings]


@pytest.mark.parametrize(
    ("variables", "problem", "mend", "modes"),
    [
        ("RANK=1 WORLD_SIZE=2", "RANK=1 WORLD_SIZE=2 in the environment", "unset RANK WORLD_SIZE", ALL_MODES),
        ("RANK=0 WORLD_SIZE=2", "RANK=0 WORLD_SIZE=2 in the environment", "unset RANK WORLD_SIZE", PROCESS_MODES),
        ("SLURM_NTASKS=4 SLURM_JOB_NAME=train", "a cluster has 4 tasks", "configs/cluster/slurm.sh", ALL_MODES),
        ("MASTER_PORT=http", "MASTER_PORT=http in the environment is not a port.", "29500", PROCESS_MODES),
    ],
)
def test_variables_are_named(
    variables: str, problem: str, mend: str, modes: tuple[str, ...], bare: pytest.MonkeyPatch
) -> None:
    bare.setenv("WORLD_SIZE", "2")  # which alone is no fault
    assert around() == []
    bare.delenv("WORLD_SIZE")
    for variable in variables.split():
        bare.setenv(*variable.split("="))
    (finding,) = around()
    assert finding.problem.startswith(problem)
    assert mend in finding.mend
    assert finding.modes == modes


def test_a_task_of_srun_is_no_fault(bare: pytest.MonkeyPatch) -> None:
    for name, value in TASK.items():
        bare.setenv(name, value)
    assert around() == []


def test_ports(bare: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        bare.setenv("MASTER_PORT", str(busy.getsockname()[1]))
        (finding,) = around()
        assert (finding.mend, finding.modes) == ("unset MASTER_PORT", ())
    bare.delenv("MASTER_PORT")

    def refuse(address: tuple[str, int]) -> socket.socket:
        raise OSError("no such device")

    bare.setattr(socket, "create_server", refuse)
    assert [finding.modes for finding in around() if "loopback" in finding.problem] == [PROCESS_MODES]


# Verdicts, page and command.


NAMES = ["single", "dp", "ddp", "ddp_spawn", "mp", "ddp_mp", "pp", "ddp_pp", "fsdp2", "tp"]
GLOO, VIRTUAL = "yes, gloo processes on 8 cores", "yes, on virtual devices of the CPU"
TWO, FOUR = "on the CPU alone: needs 2 GPUs", "on the CPU alone: needs 4 GPUs"
ONE_GPU = {"single": "yes, on 1 GPU", "mp": "yes, all stages on the one GPU", "ddp_mp": FOUR, "ddp_pp": FOUR}
VERDICTS = {  # by the number of GPUs
    0: dict.fromkeys(NAMES, GLOO) | {"single": "yes, on the CPU", "dp": VIRTUAL, "mp": VIRTUAL},
    1: dict.fromkeys(NAMES, TWO) | ONE_GPU,
    2: {"single": "yes, on 1 GPU", "ddp": "yes, on 2 GPUs", "ddp_mp": FOUR},
    3: {"mp": "yes, on 2 to 3 GPUs", "tp": "yes, on 2 GPUs", "ddp_pp": FOUR},
    8: {"ddp_mp": "yes, on 4, 6 or 8 GPUs", "tp": "yes, on 2, 4 or 8 GPUs", "fsdp2": "yes, on 2 to 8 GPUs"},
}


def table(num_gpus: int) -> dict[str, ModeRow]:
    """The rows of a made-up machine of 8 cores, by mode."""
    return {row.mode.name: row for row in mode_table(8, num_gpus)}


def flags(row: ModeRow) -> list[str]:
    """What a row's command passes to fit."""
    words = shlex.split(row.command)
    assert words[:4] == ["python", "-m", "lit_cifar", "fit"]
    return words[4:]


@pytest.mark.parametrize(("num_gpus", "verdicts"), VERDICTS.items())
def test_every_mode_runs_on_the_gpus_or_else_on_the_cpu(num_gpus: int, verdicts: dict[str, str]) -> None:
    rows = table(num_gpus)
    assert list(rows) == NAMES
    assert {name: rows[name].verdict for name in verdicts} == verdicts
    for name, row in rows.items():
        enough = num_gpus >= row.mode.min_devices or (name, num_gpus) == ("mp", 1)
        assert ("--trainer.accelerator=cpu" in flags(row)) != enough
    assert flags(rows["ddp_pp"])[:2] == ["--trainer.strategy=ddp_pp", "--trainer.devices=4"]


@pytest.mark.parametrize("mode", MODES[1:], ids=lambda mode: mode.name)
def test_the_counts_are_those_that_the_strategy_accepts(mode: Row) -> None:
    accepted, module = [], LitResNet("resnet10")
    for num_devices in range(mode.min_devices, 9):
        with contextlib.suppress(ConfigError):
            quiet = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
            strategy = L.Trainer(strategy=mode.name, devices=num_devices, **quiet).strategy
            if mode.name == "tp":  # asks the network
                strategy.connect(module)
            accepted.append(num_devices)
    assert mode.counts(8) == accepted


def test_names_are_those_of_strategies_and_configs() -> None:
    assert {mode.name for mode in MODES} - {"single"} <= set(StrategyRegistry.available_strategies())
    assert {path.stem for path in (ROOT / "configs" / "modes").glob("*.yaml")} == set(NAMES)


def test_the_form_with_a_class_trains(tmp_path: Path) -> None:
    """What one GPU is told to run as `mp`, on the CPU."""
    words = flags(table(1)["mp"])
    assert words[1:] == ["--trainer.strategy.num_stages=2", "--trainer.devices=1"]
    done = run_here("fit", *TINY, f"--run_dir={tmp_path / 'run'}", *words)
    assert "split       0  cpu 0" in done.stdout


def test_modes_prints_a_table_and_commands_to_paste() -> None:
    lines = run_here("modes").stdout.splitlines()
    assert max(map(len, lines)) <= 120
    rows = mode_table(*cores_and_gpus())
    for row in rows:
        (line,) = [line for line in lines if line.split()[:1] == [row.mode.name]]
        assert row.mode.splits in line
        assert line.rstrip().endswith(row.verdict)
    assert [line.strip() for line in lines if "lit_cifar fit" in line] == [row.command for row in rows]


def test_one_process_for_each_gpu() -> None:
    assert placed(None, num_gpus=0) == (2, "cpu")
    assert placed(None, num_gpus=4) == (4, "cuda")
    assert placed(3, num_gpus=4) == (3, "cuda")
    with pytest.raises(ConfigError, match=r"torch sees 2 GPUs.*\n.*CUDA_VISIBLE_DEVICES= python"):
        placed(3, num_gpus=2)


def test_the_page_begins_with_what_is_wrong_and_what_mends_it() -> None:
    note, mend = MachineFinding("GPUs differ.", "nvidia-smi"), " ".join(["fit", *["--a_long_flag=1"] * 10])
    wrong = MachineFinding("Copies [cuda:0] are lost.", mend, COPY_MODES)
    found = Examination(
        machine=[Check("memory", "8 GiB")],
        environment=[Check("variables", "none")],
        links="",
        copies=Check("GPU to GPU", "not probed"),
        ranks=Ranks(accelerator="cpu", failure="did not start"),
        findings=[note, wrong],
        verdicts=judge_modes([*table(2).values()], [note, wrong]),
    )
    print_page(found, Console(file=(out := StringIO()), width=100))
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    begin = ["", "Not fit: 1 fault", "   1. Copies [cuda:0] are lost.", f"      {mend}", " note GPUs differ."]
    assert lines[:6] == [*begin, "      nvidia-smi"]
    assert {"  dp           no, see 1", "  ddp          yes, on 2 GPUs", "  failed    did not start"} <= {*lines}
    verdicts = {verdict["mode"]: verdict for verdict in found.to_json()["verdicts"]}
    assert [mode for mode, verdict in verdicts.items() if not verdict["fit"]] == ["dp", "mp", "ddp_mp"]
    assert verdicts["dp"] == {"mode": "dp", "fit": False, "reason": wrong.problem, "command": mend}


def test_this_machine_is_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    result = launch("doctor", "--json", tmp_path / "found.json", "--run_dir", tmp_path)
    lines = [line.rstrip() for line in result.stdout.splitlines()]
    assert "Fit: no fault was found, and 10 modes run here" in lines
    assert max(map(len, lines)) <= 120
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["fit"] is True
    assert {"machine", "environment", "links", "copies", "ranks", "findings"} <= set(found)
    assert {verdict["mode"] for verdict in found["verdicts"]} == set(ALL_MODES)


def test_a_fault_is_exit_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = MachineFinding("Rank 1 computes wrongly.", "another machine", ALL_MODES)
    monkeypatch.setattr(command, "examine_ranks", lambda *_: (measured(), [wrong]))
    result = run_here("doctor", check=False)
    assert result.status == 1
    assert "Not fit: 1 fault\n   1. Rank 1 computes wrongly.\n      another machine\n" in result.stdout
