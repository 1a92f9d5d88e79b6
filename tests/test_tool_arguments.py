"""Arguments that cannot work: each tool refuses them at once, names them, and leaves nothing behind."""

from pathlib import Path

import pytest
from commands import run_here
from verifying import TINY

REFUSED = {
    "bench speed": "invalid choice: 'speed'",
    "bench --rounds=0": "--rounds=0",
    "bench trace --output=out --mode=fsdp": "with one of single, dp",
    "bench trace --output=out --devices=-2": "--devices=-2 is not from 1",
    "bench trace --output=out --trainer.devices=4": "--trainer.devices itself",
    "chaos --faults=0": "--faults=0",
    "chaos --seed=-1": "--seed=-1",
    "chaos --modes=single": "single",
    "chaos --modes=ddp_mp": "--devices 4",
    "chaos --devices=1": "--devices=1",
    "chaos --json=/nowhere/at/all.json": "--json",
    "chaos --output=/proc/nowhere": "--output",
    "chaos --model.arch=resnet43": "resnet43",
    "chaos --trainer.max_epochs=3": "--trainer.max_epochs itself",
    "doctor --devices=0": "--devices=0",
    "doctor --devices=1025": "--devices=1025",
    "doctor --device=2": "--device=2",
    "doctor --json=/no/such/file.json": "--json=/no/such/file.json",
    "export": "CHECKPOINT",
    "export some.ckpt --format=onxx": "choose from",
    "export some.ckpt --format=torch --model.network=no_such.Net": "no_such",
    "export some.ckpt --format=torch --trainer.devices=2": "trainer.devices",
    "export some.ckpt --format=torch --config=no_such.yaml": "--config=no_such.yaml is not a run's",
    "ray": "command",
    "ray fti": "'fti'",
    "ray --nodes=2:1 fit": "2:1",
    "ray --workers_per_node=0 fit": "from 1",
    "ray fit --trainer.devices=2": "--trainer.devices itself",
    "ray --max_failures=3 fit": "--resume=auto",
    "report": "report --help",
    "report no": "does not exist",
    "verify --modes=dpp": "dpp",
    "verify --devices=1": "--devices=1",
    "verify --devices=two": "two",
    f"verify --devices={10**12}": "--devices 2",
    "verify --steps=0": "--steps=0",
    "verify --steps=1": "--steps=1",
    "verify --trainer.strategy=ddp": "--trainer.strategy",
    "verify --trainer.max_epochs=1": "--trainer.max_epochs",
    "verify --ckpt_path=last.ckpt": "--ckpt_path",
    "verify --resume=auto": "--resume",
    "verify --trainer.precision=bf16-true": "bf16-true",
    "verify --json=/nowhere/at/all.json": "--json",
    "verify --self-test --virtual_replicas=4": "in a clone of the repository: python -m tests.mutations",
    "verify --modes=tp --devices=3 --data.val_size=0": "3",
    f"verify --modes=ddp --devices=3 {' '.join(TINY)} --data.batch_size=16": "3 replicas",
}


@pytest.mark.parametrize(("line", "words"), REFUSED.items())
def test_what_cannot_work_is_refused_before_anything_runs(
    line: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run_here(*line.split())
    assert (result.status, result.stdout) == (2, "")
    assert words in result.stderr
    assert 2 <= len(result.stderr.splitlines()) <= 5
    assert not any(tmp_path.iterdir())
