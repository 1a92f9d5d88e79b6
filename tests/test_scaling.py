"""Speed, memory and time to an accuracy: from run folders written by hand, and from runs."""

import json
import math
import mmap
from pathlib import Path

import pytest
from commands import TINY, launch, mode_flags, run_here

from analysis.scaling import (
    MIB,
    accuracy_over_time,
    read_memory,
    read_speed,
    scaling_frame,
    time_to,
)
from lit_cifar.errors import ConfigError
from lit_cifar.tools.bench import memory

MEMORY = "--trainer.callbacks+=lit_cifar.tools.bench.memory.TrainingMemory"
NUM_PARAMETERS = 91_866  # of the tiny network
# A window of 2 steps is logged at its end. Epochs end with step 2, in a window, and with step 6, after the last one.
METRICS = """epoch,step,train/images_per_s,train/loss,val/acc
0,1,100,,
0,2,,,0.3
0,2,,2.0,
1,3,50,,
1,5,100,,
1,6,,,0.5
1,6,,1.5,
"""


def write_run(folder: Path, *, speeds: tuple[int, ...] = (), state_mib: tuple[int, ...] = (3,)) -> Path:
    folder.mkdir(parents=True)
    rows = [f"0,{step},{speed}," for step, speed in enumerate(speeds)]
    (folder / "metrics.csv").write_text(
        "\n".join(["epoch,step,train/images_per_s,val/acc", *rows, ""]) if speeds else METRICS
    )
    (folder / "config.yaml").write_text("data: {batch_size: 10}\n")
    for rank, size in enumerate(state_mib):
        content = {"rank": rank, "state_bytes": size * MIB, "gpu_peak_bytes": None}
        (folder / f"memory-rank{rank}.json").write_text(json.dumps(content))
    return folder


def test_modes_are_compared_with_one_device(tmp_path: Path) -> None:
    single = [
        write_run(tmp_path / f"single{n}", speeds=(speed,), state_mib=(6,)) for n, speed in enumerate((90, 100, 400))
    ]
    double = [
        write_run(tmp_path / f"fsdp{n}", speeds=(speed, speed), state_mib=(2, 4))
        for n, speed in enumerate((135, 160, 640))
    ]
    frame = scaling_frame({("single", 1): single, ("fsdp2", 2): double})
    assert frame["mode"].tolist() == ["single", "fsdp2"]
    assert frame["repeats"].tolist() == [3, 3]
    assert frame["images_per_s"].tolist() == [100, 160]
    assert frame["slowest"].tolist() == [90, 135]
    assert frame["fastest"].tolist() == [400, 640]
    # Round by round 1.5, 1.6 and 1.6: the last round is fast for both.
    assert frame["speedup"].tolist() == [1, 1.6]
    assert frame["lowest"].tolist() == [1, 1.5]
    assert frame["highest"].tolist() == [1, 1.6]
    assert frame["efficiency"].tolist() == [1, 0.8]
    assert frame["state_mib"].tolist() == [6, 4]


def test_a_kind_that_missed_a_round_is_named(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"{n}", speeds=(90,)) for n in range(3)]
    with pytest.raises(ConfigError, match=r"\('ddp', 2\): 1.*\n.*every round"):
        scaling_frame({("single", 1): runs[:2], ("ddp", 2): runs[2:]})


def test_seconds_follow_from_the_speed_of_each_window(tmp_path: Path) -> None:
    """Steps 0 and 1 took 0.1 s each, 2 and 3 took 0.2 s each, 4 and 5 again 0.1 s; step 6 is taken to be like them."""
    frame = accuracy_over_time(write_run(tmp_path / "run"))
    assert frame["accuracy"].tolist() == [0.3, 0.5]
    assert frame["seconds"].tolist() == pytest.approx([0.4, 0.9])
    assert time_to(frame, 0.3) == pytest.approx({"steps": 3, "seconds": 0.4})
    assert time_to(frame, 0.31) == time_to(frame, 0.3, in_a_row=2) == pytest.approx({"steps": 7, "seconds": 0.9})
    assert all(map(math.isnan, [*time_to(frame, 0.6).values(), *time_to(frame, 0.31, in_a_row=2).values()]))


def test_what_a_run_lacks_is_named_with_the_flag_that_adds_it(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", state_mib=())
    with pytest.raises(ConfigError, match=r"no memory-rank.*\n.*TrainingMemory"):
        read_memory(run)
    (run / "metrics.csv").write_text("epoch,step,train/loss\n0,3,1.5\n")
    with pytest.raises(ConfigError, match=r"has logged no train/images_per_s.*\n.*log_every_n_steps"):
        read_speed(run)


def test_one_device_holds_weights_gradients_and_momentum(tmp_path: Path) -> None:
    run = run_here("fit", *TINY, MEMORY, "--trainer.log_every_n_steps=2", f"--run_dir={tmp_path / 'run'}")
    assert run.status == 0
    assert read_memory(tmp_path / "run")["state_mib"].tolist() == [3 * 4 * NUM_PARAMETERS / MIB]
    assert read_speed(tmp_path / "run") > 0
    assert accuracy_over_time(tmp_path / "run")["step"].tolist() == [4]


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux says what is resident")
def test_the_peak_is_that_since_it_was_forgotten() -> None:
    before = memory.forget_resident_peak()
    assert before is not None
    with mmap.mmap(-1, 64 * MIB) as pages:  # new ones: what is allocated may be memory that has been freed before
        for place in range(0, 64 * MIB, mmap.PAGESIZE):
            pages[place] = 1
    highest = memory.resident_peak()
    assert highest - before > 60 * MIB
    assert highest - (memory.forget_resident_peak() or highest) > 30 * MIB


def test_a_system_that_does_not_say_what_is_resident(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_PROCESS", tmp_path / "none")
    assert run_here("fit", *TINY, MEMORY, f"--run_dir={tmp_path / 'run'}").status == 0
    assert math.isnan(read_memory(tmp_path / "run")["resident_peak_mib"][0])


@pytest.mark.parametrize("mode", ["ddp", "fsdp2", "pp"])
def test_what_a_process_holds_of_it(mode: str, tmp_path: Path) -> None:
    launch("fit", *TINY, MEMORY, *mode_flags(mode), f"--run_dir={tmp_path / 'run'}", ranks=2)
    first, second = read_memory(tmp_path / "run")["state_mib"] * MIB / (3 * 4 * NUM_PARAMETERS)
    if mode == "ddp":
        assert first == second == 1
        peaks = read_memory(tmp_path / "run")["resident_peak_mib"]
        assert (peaks > 2 * 4 * NUM_PARAMETERS / MIB).all(), "gradients and momentum come after the start"
    elif mode == "fsdp2":
        assert (first, second) == pytest.approx((0.5, 0.5), abs=0.01)
    else:  # the later layers have most of the weights
        assert first + second == pytest.approx(1)
        assert 0 < first < second
