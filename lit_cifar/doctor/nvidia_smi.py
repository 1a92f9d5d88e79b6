"""What the NVIDIA driver says about the GPUs and the links between them, through `nvidia-smi`."""

import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Ask = Callable[[Sequence[str]], str]
"""Runs `nvidia-smi` with arguments; returns what it prints, "" where there is none."""

_QUERY = "index,uuid,pcie.link.gen.max,pcie.link.width.max"
_GB_PER_LANE = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
"""GB/s of a PCIe lane in one direction, by generation, without packet headers."""
_ESCAPE = re.compile(r"\x1b\[[\d;]*m")


@dataclass(frozen=True)
class DriverGpu:
    """A GPU as the driver sees it.

    Attributes:
        index: Of the driver, which may differ from torch's.
        uuid: Without the prefix "GPU-".
        pcie_gb_s: What its PCIe slot can carry in one direction; None if unknown.
    """

    index: int
    uuid: str
    pcie_gb_s: float | None


def ask_nvidia_smi(arguments: Sequence[str]) -> str:
    """What `nvidia-smi` prints."""
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout if done.returncode == 0 else ""


def driver_gpus(ask: Ask = ask_nvidia_smi) -> list[DriverGpu]:
    """The GPUs of this machine, also those that torch cannot use."""
    found = []
    for line in ask([f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]).splitlines():
        index, uuid, generation, width = (cell.strip() for cell in line.split(","))
        lane = _GB_PER_LANE.get(int(generation)) if generation.isdecimal() else None
        capacity = lane * int(width) if lane and width.isdecimal() else None
        found.append(DriverGpu(int(index), uuid.removeprefix("GPU-"), capacity))
    return found


def driver_version(ask: Ask = ask_nvidia_smi) -> tuple[str, str] | None:
    """Versions of the driver and of the newest CUDA that it runs; None without a driver."""
    page = ask([])
    driver = re.search(r"Driver Version: ([\d.]+)", page)
    cuda = re.search(r"CUDA (?:UMD )?Version: (\d+\.\d+)", page)
    return (driver[1], cuda[1]) if driver and cuda else None


def topology(ask: Ask = ask_nvidia_smi) -> dict[tuple[int, int], str]:
    """Links between GPUs as in `nvidia-smi topo -m`: by two indices of the driver, e.g. "NV12", "PIX" or "SYS"."""
    lines = [_ESCAPE.sub("", line).split() for line in ask(["topo", "-m"]).splitlines()]
    header: list[str] = next((cells for cells in lines if cells[:1] == ["GPU0"] and cells[1:2] != ["X"]), [])
    columns = [int(name[3:]) for name in header if re.fullmatch(r"GPU\d+", name)]
    found = {}
    for cells in lines:
        if cells and cells is not header and (row := re.fullmatch(r"GPU(\d+)", cells[0])):
            for column, kind in zip(columns, cells[1:], strict=False):
                if kind != "X":
                    found[int(row[1]), column] = kind
    return found


def nvlink_gb_s(index: int, ask: Ask = ask_nvidia_smi) -> float | None:
    """What one NVLink of a GPU carries in one direction, as in `nvidia-smi nvlink -s`; None without an NVLink."""
    speeds = re.findall(r"Link \d+: ([\d.]+) GB/s", ask(["nvlink", "-s", "-i", str(index)]))
    return float(speeds[0]) if speeds else None
