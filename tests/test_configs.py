"""Every shipped configuration passes all checks before a process is started; those of one process train two steps."""

import math
from pathlib import Path

import pytest
import yaml
from commands import TINY, environment_of, run_here
from documents import parser_of

from analysis.articles import PRINTED_RUNS
from lit_cifar.checkpoint.format import read_checkpoint
from lit_cifar.cli.main import CLI

CONFIGS = Path(__file__).parents[1] / "configs"
PATHS = sorted(path for path in CONFIGS.rglob("*.yaml") if path.parent.name != "cluster")  # those are no configurations
# Few drawn images in place of a data set that must be downloaded, and a small network.
DRAWN = ["--model.arch=tiny", "--data.dataset=synthetic", "--data.num_train=600", "--data.num_test=50"]
SHORT = ["--trainer.max_steps=2", "--trainer.log_every_n_steps=1", "--trainer.limit_val_batches=0"]
# These follow another file of their folder.
OVERLAYS = {"plain_momentum": "single", "four_gpus": "ddp", "without_set_epoch": "ddp"}


def files(config: Path) -> list[str]:
    """The flags of the configuration, after the one that it follows."""
    first = [config.with_stem(OVERLAYS[config.stem])] if config.stem in OVERLAYS else []
    return [f"--config={path}" for path in (*first, config)]


@pytest.mark.parametrize("config", PATHS, ids=lambda path: str(path.relative_to(CONFIGS)))
def test_config_works_is_short_and_says_what_it_is_for(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = config.read_text().splitlines()
    assert lines[0].startswith("# ")
    assert len(lines) <= 20
    drawn = {"modes": TINY, "recipes": [*TINY, "--model.compile=false"], "reproduce": DRAWN}.get(config.parent.name, [])
    command = ["fit", *files(config), *drawn, *SHORT, f"--run_dir={tmp_path / 'run'}"]
    asked: dict[str, str] = {}

    def check(cli: CLI, subcommand: str) -> None:
        asked["strategy"] = cli.config[subcommand].trainer.strategy
        cli._check(subcommand)

    with monkeypatch.context() as patch:
        patch.setattr(CLI, "_run_subcommand", check)
        checked = run_here(*command)
    assert checked.status == 0, checked.stderr
    strategy = OVERLAYS.get(config.stem, config.stem) if config.parent.name in ("modes", "reproduce") else "single"
    assert asked["strategy"] == ("auto" if strategy in ("single", "plain_momentum") else strategy)
    if strategy in ("single", "dp", "mp"):
        trained = run_here(*command)
        assert trained.status == 0, trained.stderr
        assert read_checkpoint(tmp_path / "run" / "checkpoints" / "last.ckpt")["global_step"] == 2
        environment = environment_of(tmp_path / "run")
        assert environment["strategy"] == ("single_device" if strategy == "single" else strategy)


@pytest.mark.parametrize("mode", ["dp", "ddp", "ddp_spawn"])
def test_the_articles_runs_differ_in_mode_and_batch_alone(mode: str) -> None:
    single = yaml.safe_load((CONFIGS / "reproduce" / "single.yaml").read_text())
    other = yaml.safe_load((CONFIGS / "reproduce" / f"{mode}.yaml").read_text())
    assert other["trainer"].pop("strategy") == mode
    assert other["trainer"].pop("devices") == 2
    per_process = other["data"].pop("batch_size") // (2 if mode.startswith("ddp") else 1)
    assert per_process == single["data"].pop("batch_size") == 128
    assert other == single


@pytest.mark.parametrize("run", PRINTED_RUNS.to_dict("records"), ids=lambda run: run["config"])
def test_every_run_that_the_articles_print_has_a_configuration_with_its_batch(run: dict[str, object]) -> None:
    config = yaml.safe_load((CONFIGS / "reproduce" / f"{run['config']}.yaml").read_text())
    assert config["data"]["batch_size"] == run["batch"]
    if run["steps per epoch"] != "not printed":
        assert math.ceil(50_000 / config["data"]["batch_size"]) == run["steps per epoch"]


def test_plain_momentum_is_without_look_ahead_and_decay() -> None:
    """As the parser merges the two files: nothing of the default recipe, nor of the variant, is left."""
    parsed = parser_of("fit").parse_args(["fit", *files(CONFIGS / "reproduce" / "plain_momentum.yaml")])
    settings = parsed.fit.model.optimizer.init_args
    assert (settings.lr, settings.momentum, settings.nesterov, settings.weight_decay) == (0.1, 0.9, False, 0.0)
    assert parsed.fit.model.lr_scheduler.init_args.step_size == 5
