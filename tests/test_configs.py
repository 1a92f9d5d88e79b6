"""Every shipped configuration passes all checks, those of one process train; what the scripts of configs/cluster do."""

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from commands import TINY, environment_of, last_checkpoint, run_here

from lit_cifar.cli.main import CLI

CONFIGS = Path(__file__).parents[1] / "configs"
PATHS = sorted(CONFIGS.rglob("*.yaml"))
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
def test_config_works_is_short_and_says_its_use(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        run_here(*command)
    strategy = OVERLAYS.get(config.stem, config.stem) if config.parent.name in ("modes", "reproduce") else "single"
    assert asked["strategy"] == ("auto" if strategy in ("single", "plain_momentum") else strategy)
    if strategy in ("single", "dp", "mp"):
        run_here(*command)
        assert last_checkpoint(tmp_path / "run")["global_step"] == 2
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


CLUSTER = Path(__file__).parents[1] / "configs" / "cluster"


def with_commands(folder: Path, commands: dict[str, str], **variables: str) -> dict[str, str]:
    """An environment in which these commands are scripts of bash in `folder`."""
    for name, body in commands.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    return {**os.environ, **variables, "PATH": f"{folder}:{os.environ['PATH']}"}


@pytest.fixture
def network(tmp_path: Path) -> dict[str, str]:
    """An environment in which this machine has two interfaces, and names are known; torchrun says how it is called."""
    commands = {
        "ip": 'test "$4" != show || { test "$6" = ib0 && echo "2: ib0 inet 10.1.0.3/24 scope global"; exit; }\n'
        'printf "%s\\n" "1: lo inet 127.0.0.1/8 scope host" "2: eth0 inet 10.0.0.3/24 x" "3: ib0 inet 10.1.0.3/24 x"',
        "getent": 'case $2 in node3) echo "10.0.0.3 STREAM";; node3-ib) echo "10.1.0.3 STREAM";; '
        'myself) echo "127.0.1.1 STREAM";; node4) echo "10.0.0.4 STREAM";; *) exit 2;; esac',
        "torchrun": 'echo "$@" "$TORCH_ELASTIC_SHUTDOWN_TIMEOUT"',
    }
    return with_commands(tmp_path, commands, INTERFACE="ib0")


@pytest.mark.parametrize(
    ("host", "is_host"), [("node3", "true"), ("node3-ib", "true"), ("myself", "true"), ("node4", "false")]
)
def test_one_machine_alone_keeps_the_rendezvous(host: str, is_host: str, network: dict[str, str]) -> None:
    script = [str(CLUSTER / "torchrun.sh")]
    done = subprocess.run(script, env={**network, "RDZV_HOST": host}, capture_output=True, text=True, check=True)
    assert f"is_host={is_host}," in done.stdout
    assert "--local-addr=10.1.0.3 " in done.stdout
    assert done.stdout.split()[-1] == "100"  # seconds to save in


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"RDZV_HOST": "nowhere"}, "has no IPv4 address"),
        ({"RDZV_HOST": "node3", "INTERFACE": "eth7"}, "has no IPv4 address"),
        ({"RDZV_HOST": "node3", "INTERFACE": ""}, "INTERFACE: network interface over which the machines talk"),
    ],
)
def test_torchrun_sh_refuses_what_has_no_address(given: dict[str, str], problem: str, network: dict[str, str]) -> None:
    done = subprocess.run([str(CLUSTER / "torchrun.sh")], env={**network, **given}, capture_output=True, text=True)
    assert done.returncode != 0
    assert problem in done.stderr


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """An environment with SLURM's commands, which write down what they are called with; srun also its variables."""
    commands = {
        "srun": 'env | grep -E "^(RDZV|NNODES|INTERFACE)" | sort > variables; eval "$SRUN"',
        "scontrol": 'test "$1" = requeue || printf "%s\\n" node3 node4',
        "scancel": "kill -TERM $(cat srun.pid)",
    }
    noted = {name: f'echo $$ > {name}.pid\necho "{name} $*" >> calls\n{body}' for name, body in commands.items()}
    job = {"SLURM_JOB_NODELIST": "node[3-4]", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "54321"}
    return with_commands(tmp_path, noted, INTERFACE="ib0", **job)


def submit(slurm: dict[str, str], folder: Path, *, srun: str) -> subprocess.Popen[bytes]:
    """Start the script as SLURM would, with `srun` in place of the training, and return when that has begun."""
    script = [str(CLUSTER / "slurm.sh"), "--trainer.strategy=ddp", "--run_dir=/shared/a run"]
    job = subprocess.Popen(script, env={**slurm, "SRUN": srun}, cwd=folder)
    while not (folder / "variables").exists():
        assert job.poll() is None
        time.sleep(0.05)
    return job


@pytest.mark.parametrize("status", [0, 3])
def test_slurm_runs_torchrun_everywhere_and_has_its_status(status: int, slurm: dict[str, str], tmp_path: Path) -> None:
    assert submit(slurm, tmp_path, srun=f"sleep 0.2; exit {status}").wait(20) == status
    assert (tmp_path / "calls").read_text().splitlines() == [
        "scontrol show hostnames node[3-4]",
        "srun --no-kill --kill-on-bad-exit=0 bash configs/cluster/torchrun.sh --resume=auto --trainer.strategy=ddp "
        "--run_dir=/shared/a run",
    ]
    variables = " ".join((tmp_path / "variables").read_text().split())
    assert variables == "INTERFACE=ib0 NNODES=1:2 RDZV_HOST=node3 RDZV_ID=54321 RDZV_PORT=24321"


@pytest.mark.parametrize(
    ("sent", "status", "then"),
    [(signal.SIGUSR1, 143, ["scancel --signal=TERM 54321", "scontrol requeue 54321"]), (signal.SIGTERM, -15, [])],
)
def test_slurm_queues_a_job_again_when_its_time_is_up_and_not_when_it_is_cancelled(
    sent: signal.Signals, status: int, then: list[str], slurm: dict[str, str], tmp_path: Path
) -> None:
    job = submit(slurm, tmp_path, srun="exec sleep 60")
    job.send_signal(sent)
    assert job.wait(20) == status
    assert (tmp_path / "calls").read_text().splitlines()[2:] == then
    with suppress(ProcessLookupError):
        os.kill(int((tmp_path / "srun.pid").read_text()), signal.SIGTERM)
