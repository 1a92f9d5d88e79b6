"""All mutations by name, and the callback that plants one of them in every process of a run."""

import os
from pathlib import Path

import lightning as L

from tests.mutations import of_all_processes, of_files, of_one_process, of_virtual_replicas
from tests.mutations.planting import Mutation, Site

CLONE = Path(__file__).parents[2]

# Of every mode, those that only virtual replicas can have, and those of files.
OF_MODES = [*of_all_processes.MUTATIONS, *of_one_process.MUTATIONS]
OF_PARTS = of_virtual_replicas.MUTATIONS
OF_FILES = of_files.MUTATIONS
BY_NAME = {mutation.name: mutation for mutation in (*OF_MODES, *OF_PARTS, *OF_FILES)}


class PlantMutation(L.Callback):
    """Plants the mutation of that name; a file in `folder` says that its wrong code has run."""

    def __init__(self, name: str, folder: str) -> None:
        self.name, self.folder = name, Path(folder)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Before the strategy has touched the network."""
        BY_NAME[self.name].plant(Site(trainer, pl_module, self.folder))


def planting_flags(mutation: Mutation, folder: Path) -> tuple[str, ...]:
    """Flags of `fit` that plant it in a run whose processes find this package, see `on_python_path`.

    Replicas are not compared in it: that would end many of them before a comparison.
    """
    return (
        "--replica_audit.every_n_steps=0",
        "--trainer.callbacks+=tests.mutations.catalogue.PlantMutation",
        f"--trainer.callbacks.name={mutation.name}",
        f"--trainer.callbacks.folder={folder}",
    )


def on_python_path(*folders: Path) -> str:
    """What PYTHONPATH must be for a run to find this package, and what is in `folders`."""
    found = [str(CLONE), *map(str, folders), os.environ.get("PYTHONPATH", "")]
    return os.pathsep.join(filter(None, found))
