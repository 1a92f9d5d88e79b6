"""Every shipped configuration is parsed and trains for two steps."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import TINY, environment_of, launch, run_here
from documents import parser_of

from lit_cifar.checkpoint.format import read_checkpoint

CONFIGS = Path(__file__).parents[1] / "configs"
PATHS = sorted(CONFIGS.rglob("*.yaml"))
# Few drawn images in place of a data set that must be downloaded, and a small network.
DRAWN = ["--model.arch=tiny", "--data.dataset=synthetic", "--data.num_train=600", "--data.num_test=50"]
SHORT = ["--trainer.max_steps=2", "--trainer.log_every_n_steps=1", "--trainer.limit_val_batches=0"]
# These follow another file of their folder.
OVERLAYS = {"plain_momentum": "single", "four_gpus": "ddp", "without_set_epoch": "ddp"}
MANY_PROCESSES = ("ddp_spawn", "four_gpus", "without_set_epoch")


def files(config: Path) -> list[Path]:
    """The configuration, after the one that it follows."""
    return [*(config.with_stem(OVERLAYS[stem]) for stem in [config.stem] if stem in OVERLAYS), config]


def processes(config: Path) -> int:
    """Processes to start a configuration in; 0 where this one will do."""
    trainer: dict[str, Any] = {}
    for file in files(config):
        trainer |= yaml.safe_load(file.read_text()).get("trainer", {})
    if trainer.get("strategy") in (None, "auto", "dp", "mp"):
        return 0
    if trainer["strategy"] == "ddp_spawn":  # which starts its own
        return 1
    return trainer["devices"] // (2 if trainer["strategy"] == "ddp_mp" else 1)


def command(config: Path, folder: Path) -> list[str]:
    drawn = {"modes": TINY, "recipes": [*TINY, "--model.compile=false"], "reproduce": DRAWN}.get(config.parent.name, [])
    configs = [f"--config={file}" for file in files(config)]
    return ["fit", *configs, *drawn, *SHORT, f"--run_dir={folder / config.parent.name / config.stem}"]


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "config",
    [pytest.param(path, marks=pytest.mark.exhaustive if path.stem in MANY_PROCESSES else []) for path in PATHS],
    ids=lambda path: str(path.relative_to(CONFIGS)),
)
def test_config_trains(config: Path, tmp_path: Path) -> None:
    if ranks := processes(config):
        launch(*command(config, tmp_path), ranks=ranks)
    else:
        result = run_here(*command(config, tmp_path))
        assert result.status == 0, result.stderr
    run = tmp_path / config.parent.name / config.stem
    assert read_checkpoint(run / "checkpoints" / "last.ckpt")["global_step"] == 2
    environment = environment_of(run)
    expected = {0: 1, 1: 2}.get(ranks, ranks)  # of those in one process, only ddp_spawn starts others
    assert environment["world_size"] == expected
    strategy = OVERLAYS.get(config.stem, config.stem)
    alone = strategy in ("single", "quickstart") or config.parent.name == "recipes"
    assert environment["strategy"] == ("single_device" if alone else strategy)


@pytest.mark.parametrize("config", PATHS, ids=lambda path: str(path.relative_to(CONFIGS)))
def test_config_is_short_and_says_what_it_is_for(config: Path) -> None:
    lines = config.read_text().splitlines()
    assert lines[0].startswith("# ")
    assert len(lines) <= 20


@pytest.mark.parametrize("mode", ["dp", "ddp", "ddp_spawn"])
def test_the_articles_runs_differ_in_mode_and_batch_alone(mode: str) -> None:
    single = yaml.safe_load((CONFIGS / "reproduce" / "single.yaml").read_text())
    other = yaml.safe_load((CONFIGS / "reproduce" / f"{mode}.yaml").read_text())
    assert other["trainer"].pop("strategy") == mode
    assert other["trainer"].pop("devices") == 2
    per_process = other["data"].pop("batch_size") // (2 if mode.startswith("ddp") else 1)
    assert per_process == single["data"].pop("batch_size") == 128
    assert other == single


def test_plain_momentum_is_without_look_ahead_and_decay() -> None:
    """As the parser merges the two files: nothing of the default recipe, nor of the variant, is left."""
    overlay = CONFIGS / "reproduce" / "plain_momentum.yaml"
    parsed = parser_of("fit").parse_args(["fit", *(f"--config={file}" for file in files(overlay))])
    settings = parsed.fit.model.optimizer.init_args
    assert (settings.lr, settings.momentum, settings.nesterov, settings.weight_decay) == (0.1, 0.9, False, 0.0)
    assert parsed.fit.model.lr_scheduler.init_args.step_size == 5
