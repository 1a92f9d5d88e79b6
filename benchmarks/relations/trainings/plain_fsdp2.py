"""FSDP2 (`fully_shard`) on gloo, with a checkpoint of whole tensors by torch.distributed.checkpoint's state dicts."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lit_cifar import relations

EPOCHS = 3
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29512")
os.environ.setdefault("RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")
dist.init_process_group("gloo")
torch.manual_seed(0)
inputs = torch.randn(160, 8)
targets = inputs.prod(1, keepdim=True)
train = TensorDataset(inputs[:128], targets[:128])
ranks = slice(128 + dist.get_rank(), None, dist.get_world_size())
held_out = TensorDataset(inputs[ranks], targets[ranks])
model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)), nn.Linear(8, 1))
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
for block in model:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
sampler = DistributedSampler(train)
loader = DataLoader(train, 16 // dist.get_world_size(), sampler=sampler)
whole = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
first = 0
if path := relations.resume():
    saved = torch.load(path, weights_only=True)
    set_state_dict(
        model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"], options=whole
    )
    first = saved["epoch"]
for epoch in range(first, EPOCHS):
    sampler.set_epoch(epoch)
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()
    sums = torch.zeros(2)
    with torch.no_grad():
        for x, y in DataLoader(held_out, 8):
            sums += torch.stack([(model(x) - y).square().sum(), torch.tensor(float(len(x)))])
    dist.all_reduce(sums)
    relations.report(val_loss=(sums[0] / sums[1]).item())
    if path := relations.save():
        weights, state = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
        if dist.get_rank() == 0:
            torch.save({"model": weights, "optimizer": state, "epoch": epoch + 1}, path)
dist.destroy_process_group()
