"""Every shipped configuration is parsed and trains for two steps."""

from pathlib import Path

import pytest
import yaml
from commands import TINY, launch, run_here

CONFIGS = Path(__file__).parents[1] / "configs"
PATHS = sorted(CONFIGS.rglob("*.yaml"))
# Few drawn images in place of a data set that must be downloaded; they are the only thing that is changed.
DRAWN = ["--data.dataset=synthetic", "--data.num_train=600", "--data.num_test=50"]
SHORT = ["--trainer.max_steps=2", "--trainer.log_every_n_steps=1", "--trainer.limit_val_batches=0"]


def processes(config: Path) -> int:
    """Processes that a configuration starts."""
    trainer = yaml.safe_load(config.read_text()).get("trainer", {})
    return 1 if trainer.get("strategy") in (None, "dp", "mp") else trainer["devices"]


@pytest.mark.parametrize("config", PATHS, ids=lambda path: str(path.relative_to(CONFIGS)))
def test_config_trains(config: Path, tmp_path: Path) -> None:
    flags = [f"--run_dir={tmp_path / 'run'}", *SHORT]
    if config.parent.name == "modes":
        flags = ["--config", str(config), *TINY, *flags]
    elif config.stem == "quickstart":
        flags = ["--config", str(config), *flags]
    else:
        flags = ["--config", str(config), *DRAWN, *flags]
    run = launch if processes(config) > 1 else run_here
    result = run("fit", *flags)
    assert result.status == 0, result.stderr
    assert (tmp_path / "run" / "checkpoints" / "last.ckpt").exists()


@pytest.mark.parametrize("config", PATHS, ids=lambda path: str(path.relative_to(CONFIGS)))
def test_config_is_short_and_says_what_it_is_for(config: Path) -> None:
    lines = config.read_text().splitlines()
    assert lines[0].startswith("# ")
    assert len(lines) <= 20


@pytest.mark.parametrize("mode", ["dp", "ddp", "ddp_spawn"])
def test_the_articles_runs_differ_in_mode_and_batch_alone(mode: str) -> None:
    single = yaml.safe_load((CONFIGS / "seed" / "single.yaml").read_text())
    other = yaml.safe_load((CONFIGS / "seed" / f"{mode}.yaml").read_text())
    assert other["trainer"].pop("strategy") == mode
    assert other["trainer"].pop("devices") == 2
    per_process = other["data"].pop("batch_size") // (2 if mode.startswith("ddp") else 1)
    assert per_process == single["data"].pop("batch_size") == 128
    assert other == single
