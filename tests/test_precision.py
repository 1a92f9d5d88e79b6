"""`--autotune=true`: a rule by the processor, which leaves alone what a user has set and what a run had before."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import TINY, run_here
from jsonargparse import Namespace

from lit_cifar.models import precision
from lit_cifar.models.precision import choose_fast

NEITHER: dict[str, Any] = {"precision": None, "channels_last": False, "deterministic": None, "virtual_replicas": None}


@pytest.mark.parametrize(
    ("has_bf16", "given", "chosen"),
    [
        (True, {}, ("bf16-mixed", True)),
        (False, {}, ("32-true", False)),
        (True, {"precision": "64-true"}, ("64-true", False)),
        (False, {"precision": "bf16-mixed"}, ("bf16-mixed", True)),
        (False, {"channels_last": True}, ("32-true", True)),
        (True, {"deterministic": True}, ("32-true", False)),
        (True, {"virtual_replicas": 4}, ("32-true", False)),
    ],
)
def test_what_is_fast_here_and_not_given_is_chosen(
    has_bf16: bool, given: dict[str, Any], chosen: tuple[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "cpu_has_bf16", lambda: has_bf16)
    asked = Namespace(NEITHER | given)
    trainer = Namespace(precision=asked.precision, deterministic=asked.deterministic, num_nodes=1, accelerator="cpu")
    model = Namespace(channels_last=asked.channels_last)
    choose_fast(Namespace(trainer=trainer, model=model, virtual_replicas=asked.virtual_replicas), before={})
    assert (trainer.precision, model.channels_last) == chosen


def test_a_run_that_goes_on_keeps_its_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["fit", *TINY, "--autotune=true", f"--run_dir={tmp_path / 'run'}", "--resume=auto"]
    for has_bf16, epochs in ((True, 1), (False, 2)):
        monkeypatch.setattr(precision, "cpu_has_bf16", lambda has_bf16=has_bf16: has_bf16)
        monkeypatch.setattr("warnings.warn", lambda *args, **kwargs: None)
        done = run_here(*flags, f"--trainer.max_epochs={epochs}", "--model.lr_scheduler=ConstantLR")
        assert "cpu, bf16-mixed" in done.stdout
        config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
        assert config["autotune"] is False
        assert (config["trainer"]["precision"], config["model"]["channels_last"]) == ("bf16-mixed", True)
