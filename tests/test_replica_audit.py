"""Replicas compare what they hold: the digest as a table, then runs of several processes with a flipped bit."""

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from commands import TINY, callback, graded, last_checkpoint, launch, mode_flags, own_network
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lit_cifar.checks.replica_audit.callback import ReplicaAudit
from lit_cifar.checks.replica_audit.gradients import NeighborAudit, who_stands_alone
from lit_cifar.checks.replica_audit.replicas import Difference, device_digest, unlike
from lit_cifar.errors import ReplicaAuditError
from lit_cifar.mode import Mode
from lit_cifar.tools.modes import SILENT

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_flipped_bit_changes_a_digest(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lit_cifar.checks.replica_audit.replicas._CHUNK", 2)
    tensor = (torch.randn(3, 4, generator=torch.Generator().manual_seed(0)) * 50).abs().to(dtype)
    whole = device_digest(tensor)
    assert whole == device_digest(tensor.clone())
    assert device_digest(tensor.view(-1)[1:]) == device_digest(tensor.view(-1)[1:].clone())
    assert device_digest(tensor.t()) != whole
    octets = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).view(torch.uint8).view(-1)
    for place in range(len(octets)):
        for bit in range(8):
            octets[place] ^= 1 << bit
            assert device_digest(tensor) != whole
            octets[place] ^= 1 << bit
    assert device_digest(tensor) == whole


def test_a_majority_names_the_rank_that_is_wrong() -> None:
    right = {"weight": 1, "bias": 2}
    assert unlike([0, 1, 2], [right] * 3) == []
    five = [right, right, {"weight": 5}, right, {"weight": 6}]
    for ranks, of_ranks, text in (
        ([0, 1, 2], [right, right | {"bias": 3}, right], "  bias: rank 1 differs from the 2 others"),
        ([1, 3], [right, {"weight": 1}], "  bias: ranks 1, 3 differ, and there is no majority"),
        ([*range(5)], five, "  weight: ranks 2, 4 differ from the 3 others"),
    ):
        assert str(unlike(ranks, of_ranks)[0]) == text


@pytest.mark.parametrize(
    ("values", "alone"),
    [
        ([1, 1, 1], []),
        ([1, 2, 1], [1]),
        ([1, 1, 2, 1, 3], [2, 4]),
        ([1, 2], None),
        ([1, 1, 2, 2], None),
        ([1, 1, 1, 2, 2], None),  # two that agree are no fault of one processor
    ],
)
def test_who_stands_alone_may_be_blamed(values: list[int], alone: list[int] | None) -> None:
    assert who_stands_alone([{"weight": value, "bias": 0} for value in values]) == alone


def test_ranks_that_differ_from_a_majority_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    left_out: set[int] = set()
    monkeypatch.setattr("lit_cifar.checks.replica_audit.callback.exclude", left_out.add)
    audit = ReplicaAudit(exclude=True)
    with pytest.raises(ReplicaAuditError):
        audit._tell("", [Difference("rank 7 differs", (2, 4), 3), Difference("bias", (0, 1), 0)], equal=0)
    assert left_out == {2, 4}


def flip(flags: list[str] = TINY, **where: int | str) -> list[str]:
    """Five steps, audits after two and four; a bit flips after the third."""
    return [*flags, *callback("stopping.FlipBit", step=3, **where), "--replica_audit.every_n_steps=2"]


@pytest.mark.parametrize(
    ("of", "name"),
    graded(("momentum", "network.fc.bias (momentum_buffer of "), slow=[("parameter", "network.fc.bias")]),
)
def test_a_flipped_bit_is_found_in_the_next_audit(of: str, name: str, tmp_path: Path) -> None:
    """And every checkpoint is of equal replicas: the last one before the flip was audited."""
    flags = [*mode_flags("ddp", 3), "--data.batch_size=15", "--data.num_train=91", "--last_checkpoint.every_n_steps=1"]
    result = launch("fit", *flip(rank=1, of=of), *flags, f"--run_dir={tmp_path}", check=False)
    assert result.status == 1
    assert "replicas differ after optimizer step 4; after step 3 they were equal" in result.stderr, result.stderr
    assert f"  {name}" in result.stderr
    assert "rank 1 differs from the 2 others" in result.stderr
    assert last_checkpoint(tmp_path)["position"]["global_step"] == 3


@pytest.mark.parametrize("ranks", graded(3, slow=[2]))
def test_a_gradient_that_no_other_rank_computes_is_found(ranks: int, tmp_path: Path) -> None:
    """Of two ranks the one is named that cannot repeat its own: it has been wrong once, and its repeat is the third."""
    flags = [*TINY, *callback("stopping.WrongGradient", step=2, rank=1), "--replica_audit.every_n_steps=2"]
    flags += [*mode_flags("ddp", ranks), f"--data.batch_size={5 * ranks}", "--data.num_train=91"]
    result = launch("fit", *flags, f"--run_dir={tmp_path}", check=False)
    assert result.status == 1
    assert "unlike gradients of one batch in step 3; after step 0 they were equal" in result.stderr, result.stderr
    assert "network.fc.bias: rank 1 differs from the 2 others" in result.stderr
    assert not (tmp_path / "checkpoints" / "last.ckpt").exists()


@pytest.mark.parametrize(("ranks", "left"), graded((4, 4), slow=[(3, 2)]))
def test_a_run_goes_on_without_the_rank_that_is_wrong(ranks: int, left: int, tmp_path: Path) -> None:
    """If the others can share the batch."""
    flags = [*TINY, *callback("stopping.WrongGradient", step=2, rank=1), "--replica_audit.every_n_steps=2"]
    flags += [*mode_flags("ddp", ranks), f"--data.batch_size={4 * ranks}", "--data.val_size=0"]
    flags += [f"--data.num_train={32 * ranks}", "--replica_audit.exclude=true", "--max_restarts=1", "--resume=auto"]
    flags += ["--last_checkpoint.every_n_steps=1"]
    result = launch("fit", *flags, f"--run_dir={tmp_path}")
    assert f"network.fc.bias: rank 1 differs from the {ranks - 1} others" in result.stderr, result.stderr
    position = last_checkpoint(tmp_path)["position"]
    assert f"{left} replicas" in result.stdout.rpartition("batch  ")[2]
    assert position["global_step"] == 8


class Own(L.Callback):
    """After each backward pass but one a rank repeats its own, in a state that is another rank's."""

    def __init__(self, *, repeats: bool) -> None:
        self.repeats, self.steps = repeats, 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.audit = NeighborAudit(trainer, pl_module)

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if self.repeats and trainer.global_step != 1:
            self.audit.observe()

    def on_after_backward(self, *_: Any) -> None:
        if self.audit.own is not None:
            self.steps += 1
            own = self.audit.observed()
            kept, own.rank = (torch.get_rng_state(), random.getstate()), 1
            random.seed(own.rank)
            others = torch.manual_seed(own.rank).get_state(), random.getstate()
            assert own.gradients
            assert self.audit._twin.repeat(own) == {name: its.item() for name, its in own.gradients.items()}
            assert torch.equal(torch.get_rng_state(), others[0])
            assert random.getstate() == others[1]
            torch.set_rng_state(kept[0])
            random.setstate(kept[1])


class Task(L.LightningModule):
    """Dropout, BatchNorm, a weight in two places, a frozen layer, a counter, and numbers drawn from two generators."""

    def __init__(self, *, manual: bool) -> None:
        super().__init__()
        self.automatic_optimization, self.calls = not manual, 0
        one, other = nn.Linear(4, 4), nn.Linear(4, 4)
        other.weight = one.weight
        self.network = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), one, nn.Dropout(), other, nn.Linear(4, 2))
        self.network[0].requires_grad_(requires_grad=False)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        self.calls += 1
        loss = self.network(batch[0]).square().mean() * (self.calls + random.random())
        self.log("loss", loss)
        if self.automatic_optimization:
            return {"loss": loss}
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


class Uncopied:
    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("planted")


@pytest.mark.parametrize("where", ["module", "batch"])
def test_what_cannot_be_copied_is_told_and_does_not_end_the_training(where: str) -> None:
    task = Task(manual=False)
    if where == "module":
        task.handle = Uncopied()
    task.training_step = lambda batch, batch_idx: task.network(batch[0]).mean()
    empty: dict[str, Any] = {"optimizers": [], "callbacks": [], "loggers": [], "precision_plugin": SimpleNamespace()}
    trainer = SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device("cpu")), global_rank=0, **empty)
    audit = NeighborAudit(trainer, task)
    audit.observe()
    assert task.training_step([torch.randn(4, 3), Uncopied()], 0).isfinite()
    assert audit.failure == f"{'Task' if where == 'module' else 'a batch'} cannot be copied: planted"
    assert audit.own is None


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "64-true"])
@pytest.mark.parametrize(("manual", "accumulate"), [(False, 1), (False, 2), (True, 1)])
def test_a_rank_repeats_its_own_gradients_and_changes_nothing(precision: Any, manual: bool, accumulate: int) -> None:
    ends = []
    for repeats in (False, True):
        L.seed_everything(1, verbose=False)
        task, own = Task(manual=manual), Own(repeats=repeats)
        options = {"accelerator": "cpu", "max_epochs": 1, "precision": precision, **SILENT}
        trainer = L.Trainer(accumulate_grad_batches=accumulate, callbacks=[own], **options)
        trainer.fit(task, DataLoader(TensorDataset(torch.randn(20, 3)), 4))
        assert own.steps == (5 - accumulate) * repeats
        ends.append(
            [*task.state_dict().values(), torch.tensor(task.calls), torch.rand(1), torch.tensor(random.random())]
        )
    assert all(map(torch.equal, *ends))


def test_replicas_of_several_processes_are_compared_part_by_part(tmp_path: Path) -> None:
    """And the run may go on."""
    flags = [*flip(own_network("Scaled"), rank=3, of="buffer"), "--replica_audit.stop=false"]
    result = launch("fit", *flags, *mode_flags("ddp_pp", 4), f"--run_dir={tmp_path}")
    assert "replicas differ after optimizer step 4; after step 2 they were equal" in result.stderr, result.stderr
    assert "scale (buffer): ranks 1, 3 differ, and there is no majority" in result.stderr


class Elsewhere:
    """A strategy of others, with several processes."""

    model, root_device = torch.nn.Linear(2, 2), torch.device("cpu")


class OwnElsewhere(Mode):
    """One of this package, whose page says what it holds."""

    model, root_device, is_known = torch.nn.Linear(2, 2), torch.device("cpu"), False


def test_where_nothing_is_held_twice_a_foreign_strategy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("lit_cifar.checks.replica_audit.callback.rank_zero_info", said.append)
    trainer = SimpleNamespace(global_step=0, world_size=2, strategy=Elsewhere(), lightning_module=Elsewhere.model)
    audit = ReplicaAudit()
    audit.on_train_start(trainer, Elsewhere.model)
    assert said == ["replicas are not compared: what Elsewhere holds in each process is not known here"]
    trainer.strategy = OwnElsewhere()
    audit.on_train_start(trainer, Elsewhere.model)
    assert len(said) == 1
    audit.on_save_checkpoint(trainer, Elsewhere.model, {})
