"""Silent mistakes in what a run writes, each in a file that no other mistake changes.

They were written without a look at how `verify` compares. What a comment names is the public report of such a bug.
"""

from copy import deepcopy
from functools import partial
from typing import Any

from lit_cifar.checkpoint.callbacks import BestCheckpoint
from lit_cifar.checkpoint.sample_audit import EMPTY, SampleAudit
from tests.mutations.planting import MODULE, Mutation, Site, planted

MUTATIONS: list[Mutation] = []
mutation = partial(planted, MUTATIONS)


@mutation("confusion.csv has the first rank's counts alone", "fsdp2", at="on_validation_epoch_start")
def _own_confusion(site: Site) -> None:
    site.set(site.module.val_metrics.confusion, "_to_sync", False)


# Lightning-AI/pytorch-lightning#20185
@mutation("best.ckpt has the weights of the step before", "single")
def _best_of_before(site: Site) -> None:
    old: dict[str, Any] = {}
    network = site.module.network
    site.at("on_train_batch_start", lambda: old.update(deepcopy(network.state_dict())))

    def saved(save: Any, *args: Any) -> None:
        new = deepcopy(network.state_dict())
        network.load_state_dict(old)
        save(*args)
        network.load_state_dict(new)

    site.replace(BestCheckpoint, "_save_checkpoint", saved)


@mutation("the sample audit forgets on resume the epochs before", "ddp_spawn", SampleAudit, "on_load_checkpoint")
def _audit_anew(site: Site, load: Any, callback: SampleAudit, *args: Any) -> None:
    load(callback, *args)
    site.set(callback, "_digest", EMPTY)


# Lightning-AI/pytorch-lightning#850
@mutation("the file's epoch is one too high", "dp", MODULE, "on_save_checkpoint")
def _epoch_ahead(site: Site, save: Any, checkpoint: dict[str, Any]) -> None:
    save(checkpoint)
    checkpoint["epoch"] += 1
