"""What the release before had and this one has not: each is refused in one line, with what serves instead.

The table is for this release alone. Flags that stand in a group now are guessed by their names (`explanations`).
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

from lit_cifar.errors import ConfigError

# By command, by flag (which is a setting of a YAML file too, with all below it), or by a command's own flag or value.
INSTEAD: dict[str, str] = {
    "verify --module": "relations --module=CLASS --data=CLASS -- FLAGS",
    "--replica_audit.exclude": "nothing; what need not be equal is said once and ends no run",
    "bench": "--trainer.profiler=simple, or benchmarks/scripts/overhead.py",
    "chaos": "kill ranks under torchrun --max-restarts=3 with --resume=auto, as tests/chaos does",
    "doctor --devices": "python -m lit_cifar verify --modes=ddp --devices=N trains on N devices",
    "doctor --json": "its exit status, and `python -m torch.utils.collect_env`",
    "export": "torch.export and torch.onnx: docs/data-and-networks.md has the lines",
    "modes": "doctor, which lists them",
    "report": "tensorboard --logdir runs, or the notebooks",
    "--data.pictures": "--data.memory_gb and --data.augment.transforms: docs/data-and-networks.md",
    "--data.shuffle": "--trainer.overfit_batches=N, which repeats the first batches in the order of the files",
    "--data.balanced": "--data.balance.draw_equally",
    "--data.frozen_order": "--data.order.frozen",
    "--autotune": "leave it out, as a fit chooses so by itself; --trainer.precision=32-true chooses nothing",
    "--best_checkpoint.every_n_epochs": "--trainer.callbacks+=ModelCheckpoint, which has it",
    "--best_checkpoint.save_top_k": "--trainer.callbacks+=ModelCheckpoint, whose save_top_k is Lightning's",
    "--last_checkpoint.every_n_seconds": "--last_checkpoint.every_n_steps=N",
    "--last_checkpoint.sharded": "fsdp2 writes one file, which every mode reads",
    "--max_restarts": "torchrun --max-restarts=3 --nproc-per-node=2 -m lit_cifar fit --resume=auto --run_dir=FOLDER",
    "--model.lr_scaling": "--model.rate_scaling.rule",
    "--model.unfreeze_at": "a fit without freeze, --model.fine_tuning.weights=RUN/checkpoints/last.ckpt",
    "--trainer.strategy.data_parallel_size": "--trainer.strategy=fsdp2, over all processes",
    "--trainer.strategy.tensor_parallel_size": "--trainer.strategy=tp, over all processes",
    "--model.recompute": "--trainer.accumulate_grad_batches or --trainer.precision=bf16-mixed take less memory",
}
for _name in ("--also", *(f"--only={name}" for name in ("autocast", "compile", "effects", "groups", "recomputation"))):
    INSTEAD[f"relations {_name}"] = "--same=ARGUMENTS, for arguments of the script that should change nothing"
# Augmentations of before, by what does the same in `torchvision.transforms.v2`.
_TRANSFORMS = {"policy": "TrivialAugmentWide", "num_ops": "RandAugment", "magnitude": "RandAugment"}
_TRANSFORMS |= {"jitter": "ColorJitter", "hue": "ColorJitter", "erasing": "RandomErasing"}
for _name, _kind in _TRANSFORMS.items():
    INSTEAD[f"--data.augment.{_name}"] = f"--data.augment.transforms+=torchvision.transforms.v2.{_kind}"


def refuse_words(words: Sequence[str]) -> None:
    """Raise a `ConfigError` for what has gone and these words, or a file that they name, ask for."""
    command = words[0] if words else ""
    for flag, value in (each for each in _given(words) if each[0].startswith("-")):
        parts = flag.split(".")
        names = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
        names += [f"{command} {name}" for name in names] + [f"{command} {flag}={one}" for one in value.split(",")]
        for name in names:
            if name in INSTEAD:
                raise ConfigError(f"{name} has gone", remedy=f"instead: {INSTEAD[name]}")


def _given(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Each flag with its value, and each setting of a file as if it were a flag."""
    from lit_cifar.reporting.run_folder import read_settings  # the overview, which needs the table, imports no torch

    own = [*takewhile(lambda word: word != "--", words)]  # behind it are the flags of a user's own script
    for word, following in pairwise([*own, ""]):
        flag, has_value, value = word.partition("=")
        yield flag.rstrip("+"), value
        file = Path(value if has_value else following)
        with suppress(ConfigError, OSError):  # the parser says it; settings in line are too long for a name
            if flag in ("--config", "-c") and file.is_file():
                settings = read_settings(file)
                yield from _settings(settings.get(words[0], settings), "--")


def _settings(content: Any, prefix: str) -> Iterator[tuple[str, str]]:
    for name, value in content.items() if isinstance(content, dict) else ():
        yield f"{prefix}{name}", value if isinstance(value, str) else ""
        for inner in value if isinstance(value, list) else [value]:
            yield from _settings(inner, f"{prefix}{name}.")
