"""The promise of this project: a mode trains the model that one device trains, whatever is trained, and on whatever.

`verify` compares them step by step: samples, loss, parameters, buffers, optimizer, evaluation, checkpoints, a resume.
`test_options` has the options of docs/gpu-options.md.
"""

from pathlib import Path
from typing import NamedTuple

import pytest
from commands import MIXED, TRANSFORMS
from data_files import draw_pictures
from verifying import TINY as HARD

from lit_cifar.tools.modes import sized_modes
from lit_cifar.tools.verify.command import verify
from lit_cifar.tools.verify.record import EXACT_BOUND, KINDS, LOGITS

TINY = ["--model.arch=tiny", "--model.stem=imagenet"]
# Two optimizer steps in an epoch, the second of a ragged batch.
CUT = ["--trainer.accumulate_grad_batches=2", "--trainer.gradient_clip_val=0.5"]
CUT += ["--data.num_train=175", "--data.val_size=15", "--model.optimizer.lr=0.02"]
CUT += ["--trainer.callbacks+=ModelCheckpoint", "--trainer.max_time=01:00:00:00"]
# 14 pictures to train on, of which no two are of the same size, and 3 to validate with.
PICTURES = ["--data.dataset=folder", "--data.image_size=24", "--data.num_train=17", "--data.val_size=3"]
PICTURES += ["--data.batch_size=8", "--model.optimizer.lr=0.01"]
# As in the fast recipes: blocks begin as the identity, and several views are evaluated.
FAST = ["--model.optimizer=lit_cifar.MuonSGD", "--model.zero_init_residual=true", "--model.test_views=2"]
# 303 images are nine full steps and one of 15, which no number of processes divides: 20 steps in two epochs.
LONG = ["--data.num_train=319", "--data.val_size=16", "--data.batch_size=32"]
FLOAT64 = "--trainer.precision=64-true"
# Of 50 images the last batch has 18, which are parts of 5, 5, 4 and 4. No bit may differ.
BITS = ["--virtual_replicas=4", "--data.num_train=66", "--data.val_size=16", "--data.batch_size=32"]
BITS += ["--data.eval_batch_size=8"]
BFLOAT16 = ["--trainer.precision=bf16-mixed", "--trainer.gradient_clip_val=0.5"]
TORCHVISION = ["--model.network=torchvision.models.resnet18", "--model.network.num_classes=10"]
TORCHVISION += ["--model.fine_tuning.freeze=['conv1.*','bn1.*']"]
TORCHVISION += ["--data.num_train=48", "--data.batch_size=16", "--data.val_size=16"]
# A stage has nothing to train, or no gradients to clip.
HEAD = ["--model.fine_tuning.head_lr=0.3"]
FROZEN = "--model.fine_tuning.freeze=['conv1.*','bn1.*','layer1.*','layer2.*','layer3.*']"
MOST = "dp ddp ddp-sync mp-micro pp fsdp2 tp ddp_spawn ddp_flat"
DRAWING = ["--model.network=own_networks.Drawing", *BITS, "--trainer.precision=32-true"]


class Case(NamedTuple):
    """Modes, by their names in `verify`, and the configuration in which they are compared with one device."""

    modes: str
    flags: list[str]
    devices: int = 2
    steps: int = 3


def own(name: str) -> list[str]:
    return [f"--model.network=own_networks.{name}", *PICTURES]


CASES = {
    "clipped and accumulated": Case("dp mp-micro pp tp", [*TINY, *CUT]),
    "two devices in each process": Case("ddp_mp", [*TINY, *CUT], devices=4),
    "a network of one's own": Case("fsdp2", own("Opaque")),
    "bits, random masks": Case("dp ddp pp", DRAWING),
}
SLOW = {
    "bits, transforms": Case("dp ddp pp", [*TINY, *BITS, *TRANSFORMS]),
    "a transformer": Case("tp", ["--model.arch=vit_micro"]),
    "bottlenecks": Case("tp", [*TINY, "--model.arch=tiny_bottleneck"]),
    "bits in bfloat16": Case("dp ddp ddp_spawn mp ddp_mp pp ddp_pp fsdp2", [*TINY, *BITS, *BFLOAT16], devices=4),
    "bits in bfloat16 on two devices": Case("ddp fsdp2", [*TINY, *BITS, *BFLOAT16]),
    "bits in float32": Case("dp ddp ddp_spawn mp", [*TINY, *BITS, "--trainer.precision=32-true"]),
    "bits in float64": Case("ddp", [*TINY, *BITS, "--model.optimizer=Adafactor"], devices=4),
    "bits, random masks in other modes": Case("ddp mp ddp_mp ddp_pp fsdp2", DRAWING, devices=4),
    "tensors in four parts": Case("tp", [*TINY, *CUT], devices=4),
    "heads in four parts": Case("tp", ["--model.arch=vit_micro"], devices=4),
    "MuonSGD": Case("dp ddp mp pp", [*TINY, *FAST]),
    "a network of torchvision": Case("ddp fsdp2", TORCHVISION, steps=2),
    "mixed": Case("dp ddp_pp fsdp2 tp", [*TINY, *CUT, *MIXED]),
    "bits, mixed": Case("ddp pp", [*TINY, *BITS, *MIXED, "--trainer.precision=32-true"], devices=4),
    "frozen": Case(MOST, [*HEAD, FROZEN, "--trainer.gradient_clip_val=0.1"]),
    "two epochs": Case("ddp-sync", [*TINY, *LONG, "--model.optimizer.lr=0.02"], devices=4, steps=20),
}
SLOW["every mode"] = Case(" ".join(sized_modes(2)), HARD)
EXHAUSTIVE = {
    "transforms in every mode": Case(" ".join(sized_modes(2)), [*TINY, *CUT, *TRANSFORMS]),
    "two epochs on two processes": SLOW["two epochs"]._replace(devices=2),
    "a chain of one's own": Case("mp pp tp fsdp2 ddp_spawn", own("Chain")),
    "a network in other modes": Case("dp ddp ddp_spawn", own("Opaque")),
    "tied weights": Case("dp ddp ddp_spawn", own("Tied")),
    "tied weights in no chain": Case("fsdp2", own("TiedWhole")),
    "hooks on gradients": Case("mp dp ddp", own("Hooked")),
    "bottlenecks in every mode": Case(" ".join(sized_modes(2)), [*TINY, *CUT, "--model.arch=tiny_bottleneck"], steps=4),
    "a transformer in every mode": Case(" ".join(sized_modes(2)), [*CUT, "--model.arch=vit_micro"], steps=4),
    "frozen filters in every mode": Case(" ".join(sized_modes(2)), ["--model.arch=fast"], steps=4),
}
ALL = [
    *(pytest.param(case, id=name) for name, case in CASES.items()),
    *(pytest.param(case, id=name, marks=pytest.mark.slow) for name, case in SLOW.items()),
    *(pytest.param(case, id=name, marks=pytest.mark.exhaustive) for name, case in EXHAUSTIVE.items()),
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", ALL)
def test_a_mode_trains_what_one_device_trains(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))  # for networks of the user's own
    draw_pictures(tmp_path / "cat", 9)
    draw_pictures(tmp_path / "dog", 8, seed=1)
    flags = [FLOAT64, f"--data.root={tmp_path}", *case.flags]
    rows = verify(case.modes.split(), devices=case.devices, steps=case.steps, args=flags)
    assert {row.mode: row.problems for row in rows} == {mode: [] for mode in case.modes.split()}
    assert max(value for row in rows for value in row.differences.values()) <= EXACT_BOUND
    for row in rows:
        assert {"parameters", "optimizer", LOGITS} <= row.differences.keys()
        if case.flags == HARD:
            assert row.differences.keys() == {*KINDS, LOGITS}
        assert row.processes == sized_modes(case.devices)[row.mode].num_processes
