"""`--autotune=true`: the fastest of four is chosen, told to the other processes, kept by a resumed run."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from commands import TINY, launch, mode_flags, refused, run_here
from torch import nn

from lit_cifar.errors import ConfigError
from lit_cifar.models import autotune, build_network
from lit_cifar.models.autotune import CANDIDATES, Candidate, time_candidates

BF16 = Candidate("bf16-mixed", channels_last=True)


def settings_of(run: Path) -> Candidate:
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["autotune"] is False
    return Candidate(config["trainer"]["precision"], config["model"]["channels_last"])


def test_timing_changes_neither_network_nor_generators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotune, "cpu_has_bf16", lambda: True)
    network = build_network("tiny", stem="imagenet", num_classes=10, image_size=32)
    before, generator = {k: v.clone() for k, v in network.state_dict().items()}, torch.get_rng_state()
    seconds = time_candidates(network, (3, 32, 32), batch_size=8, device=torch.device("cpu"))
    assert list(seconds) == list(CANDIDATES)
    assert all(0 < each < 60 for each in seconds.values())
    assert all(value.equal(before[name]) for name, value in network.state_dict().items())
    assert torch.get_rng_state().equal(generator)
    assert all(parameter.grad is None for parameter in network.parameters())


@pytest.mark.parametrize("has_bf16", [True, False])
def test_a_cpu_never_tries_bf16_without_instructions_for_it(has_bf16: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotune, "_time_each", lambda network, candidates, images: dict.fromkeys(candidates, 1.0))
    monkeypatch.setattr(autotune, "cpu_has_bf16", lambda: has_bf16)
    plain, channels_last, *bf16 = CANDIDATES
    seconds = time_candidates(nn.Identity(), (3, 32, 32), batch_size=64, device=torch.device("cpu"))
    assert [*seconds] == [plain, channels_last, *bf16 * has_bf16]


@pytest.mark.parametrize(
    ("flags", "num_images"),
    [
        ([], 16),
        (["--trainer.accumulate_grad_batches=2"], 8),
        (mode_flags("dp", 4), 4),
        (mode_flags("ddp"), 8),
        (mode_flags("PipelineStrategy", num_microbatches=8), 2),
        ([*mode_flags("ddp"), "--virtual_replicas=4"], 4),
    ],
)
def test_the_batch_of_a_layer_is_timed(flags: list[str], num_images: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def time_none(*args: Any, batch_size: int, **kwargs: Any) -> None:
        raise ConfigError(f"{batch_size} images", remedy="")

    monkeypatch.setattr(autotune, "time_candidates", time_none)
    assert f"error: {num_images} images" in refused("fit", *TINY, *flags, "--autotune=true")


def test_a_run_says_saves_and_uses_them_and_when_it_is_resumed_keeps_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, seconds = tmp_path / "run", {each: 2.0 - (each == BF16) for each in CANDIDATES}
    monkeypatch.setattr(autotune, "time_candidates", lambda *args, **kwargs: seconds)
    words = [*TINY, "--autotune=true", f"--run_dir={run}"]
    done = run_here("fit", *words, "--trainer.max_steps=2")
    others = "32-true 2.00x, 32-true channels_last 2.00x, bf16-mixed 2.00x"
    assert f"autotune    bf16-mixed channels_last; slower: {others}\n" in done.stdout
    assert "cpu, bf16-mixed" in done.stdout
    assert settings_of(run) == BF16
    assert '"bf16-mixed channels_last": 1.0' in (run / "environment.json").read_text()
    assert autotune.VARIABLE not in os.environ
    monkeypatch.setattr(autotune, "time_candidates", lambda *args, **kwargs: dict.fromkeys(CANDIDATES, 1.0))
    with pytest.warns(UserWarning, match="schedule"):
        run_here("fit", *words, "--resume=auto")
    assert settings_of(run) == BF16


@pytest.mark.slow
def test_all_processes_have_the_same_kernels(tmp_path: Path) -> None:
    """The strategy starts the second one, which reads its precision from the first."""
    run = tmp_path / "run"
    done = launch("fit", *TINY, *mode_flags("ddp"), "--autotune=true", f"--run_dir={run}")
    assert f"autotune    {settings_of(run)}; slower" in done.stdout
