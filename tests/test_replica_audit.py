"""Replicas compare what they hold: the digest as a table, then runs of several processes with a flipped bit."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from commands import TINY, callback, graded, last_checkpoint, launch, mode_flags

from lit_cifar.checks.compare import disagreement
from lit_cifar.checks.replica_audit.callback import ReplicaAudit
from lit_cifar.checks.replica_audit.replicas import HeldTensors, device_digest
from lit_cifar.mode import Mode

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
    assert disagreement("bias", {0: 1, 1: 1, 2: 1}) is None
    for of_ranks, text in (
        ({0: 1, 1: 3, 2: 1}, "bias: rank 1 differs from the 2 others"),
        ({1: 1, 3: None}, "bias: ranks 1, 3 differ, and there is no majority"),
        ({0: 1, 1: 1, 2: 5, 3: 1, 4: 6}, "bias: ranks 2, 4 differ from the 3 others"),
    ):
        assert str(disagreement("bias", of_ranks)) == text


def flip(flags: list[str] = TINY, **where: int | str) -> list[str]:
    """Five steps, audits after two and four; a bit flips after the third."""
    return [*flags, *callback("stopping.FlipBit", step=3, **where), "--replica_audit.every_n_steps=2"]


@pytest.mark.parametrize(
    ("of", "name", "stop"),
    graded(
        ("momentum", "network.fc.bias (momentum_buffer of ", True),
        slow=[("parameter", "network.fc.bias", True), ("parameter", "network.fc.bias", False)],
    ),
)
def test_a_flipped_bit_is_found_in_the_next_audit(of: str, name: str, stop: bool, tmp_path: Path) -> None:
    """And the last checkpoint before the flip was audited."""
    flags = [*flip(rank=1, of=of), *mode_flags("ddp", 3), "--data.batch_size=15", "--data.num_train=91"]
    flags += ["--last_checkpoint.every_n_steps=1", f"--replica_audit.stop={str(stop).lower()}"]
    result = launch("fit", *flags, f"--run_dir={tmp_path}", check=False, ranks=3)
    assert "replicas differ after optimizer step 4; after step 3 they were equal" in result.stderr, result.stderr
    assert f"  {name}" in result.stderr
    assert "rank 1 differs from the 2 others" in result.stderr
    assert result.status == stop
    assert last_checkpoint(tmp_path)["position"]["global_step"] == (3 if stop else 5)
    assert result.stderr.count("replicas differ after") == 1 or stop  # each rank raises its own


def test_replicas_of_several_processes_are_compared_part_by_part(tmp_path: Path) -> None:
    """And a frozen weight, which nothing keeps equal, is named once and ends no run."""
    flags = [*flip(rank=3, of="parameter"), "--model.fine_tuning.freeze=fc.bias", "--replica_audit.stop=true"]
    result = launch("fit", *flags, *mode_flags("ddp_pp", 4), f"--run_dir={tmp_path}", ranks=4)
    assert "different on replicas after optimizer step 4" in result.stderr, result.stderr
    assert result.stderr.count("fc.bias: ranks 1, 3 differ, and there is no majority") == 1
    assert last_checkpoint(tmp_path)["position"]["global_step"] == 5


def test_only_what_is_trained_is_kept_equal() -> None:
    network = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1, bias=False), torch.nn.BatchNorm1d(1))
    network[1].requires_grad_(False)
    network.register_buffer("seen", torch.zeros(1))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    for parameter in network.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    strategy = SimpleNamespace(root_device=torch.device("cpu"), model=network)
    held = HeldTensors(SimpleNamespace(strategy=strategy, optimizers=[optimizer]), network)  # type: ignore[arg-type]
    trained = ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert {name for name, _, is_kept in held._tensors() if is_kept} == {
        *trained, *(f"{name} (momentum_buffer of SGD)" for name in trained)
    }  # fmt: skip
    assert [name for name, _, is_kept in held._tensors() if not is_kept] == ["1.weight", "seen (buffer)"]


def test_an_error_of_one_rank_audits_nothing() -> None:
    audit = ReplicaAudit()
    audit._held = SimpleNamespace(disagreements=pytest.fail)  # type: ignore[assignment]
    audit.on_save_checkpoint(SimpleNamespace(interrupted=True, global_step=9), torch.nn.Identity(), {})  # type: ignore[arg-type]


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
