"""Speakers of made-up voices in half precision; rank 0 has more recordings than rank 1, and join() waits for it."""

import torch
import torch.distributed as dist
from case import BUG, SEED, report_loss, spawn, watch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from lit_cifar import relations


def voices(count, seed):
    made = torch.Generator().manual_seed(seed)
    speakers = torch.randint(0, 6, (count,), generator=made)
    pitches = 0.2 + 0.15 * torch.arange(6.0)
    phases = 6.3 * torch.rand(count, 1, generator=made)
    waves = torch.sin(phases + pitches[speakers].unsqueeze(1) * torch.arange(40.0))
    return TensorDataset((waves + 0.4 * torch.randn(count, 40, generator=made)).unsqueeze(1), speakers)


def agree(scaler):
    """All ranks go on with the smallest scale and the shortest run of good steps."""
    state = scaler.state_dict()
    both = torch.tensor([state["scale"], state["_growth_tracker"]], dtype=torch.float64)
    dist.all_reduce(both, dist.ReduceOp.MIN)
    scaler.load_state_dict(state | {"scale": both[0].item(), "_growth_tracker": int(both[1])})


def main(rank):
    torch.manual_seed(SEED)
    order = torch.Generator().manual_seed(SEED + rank)
    net = nn.Sequential(
        nn.Conv1d(1, 12, 9), nn.ReLU(), nn.Conv1d(12, 12, 5, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(168, 6)
    )
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=relations.knob("lr", 0.1))
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=8)
    loader = DataLoader(voices(120 if rank == 0 else 80, rank), batch_size=8, shuffle=True, generator=order)
    with watch(model, optimizer):
        for _ in range(4):
            with model.join():
                for waves, speakers in loader:
                    with torch.autocast("cpu", dtype=torch.float16):
                        loss = nn.functional.cross_entropy(model(waves), speakers)
                    optimizer.zero_grad()
                    scaler.scale(loss).backward()
                    scaler.step(optimizer)
                    scaler.update()
                    report_loss(loss.item())
            if not BUG:
                agree(scaler)
    if rank == 0:
        print("weights", sum(weight.abs().sum().item() for weight in model.parameters()), "scale", scaler.get_scale())


if __name__ == "__main__":
    spawn(main, 2)
