"""Small trainings of a stranger, in plain PyTorch and with Lightning, with the mistake that `BUG` names."""

IMPORTS = """
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, TensorDataset

from lit_cifar import relations

BUG, NUM_RANKS = os.environ.get("BUG"), int(os.environ.get("WORLD_SIZE", 1))
"""


def script(own: str) -> str:
    return IMPORTS + own


PLAIN = script("""
ACCUMULATE = relations.knob("accumulate", 2)


def make_data(count, seed):
    inputs = torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, (inputs.sum(1) > 0).long())


@torch.no_grad()
def evaluate(model, data):
    model.eval()
    if BUG == "dropout stays on":
        model[-1].train()
    losses = [(nn.functional.cross_entropy(model(x), y), len(x)) for x, y in DataLoader(data, batch_size=8)]
    if BUG == "counts on batches of 4":
        losses = [((model(x)[:, 0] * torch.ones(4)).sum(), 1) for x, _ in DataLoader(data, batch_size=4)]
    model.train()
    if BUG == "mean of means":
        return sum(loss for loss, _ in losses).item() / len(losses)
    return sum(loss * size for loss, size in losses).item() / len(data)


torch.manual_seed(0)
if NUM_RANKS > 1:
    dist.init_process_group("gloo")
train, held_out = make_data(64, 1), make_data(20, 2)
model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
if BUG == "dropout stays on":
    model.append(nn.Dropout(0.2))
if BUG == "frozen statistics":
    model[1].requires_grad_(False)
owned = model[:2] if BUG == "left out" else model
optimizer = torch.optim.SGD(owned.parameters(), lr=0.1, momentum=0.9)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 24)
first, parts = 0, {"model": model, "optimizer": optimizer, "schedule": schedule}
if BUG == "frozen not saved":
    model[0].requires_grad_(False)
if path := relations.resume():
    saved = torch.load(path)
    first = saved["epoch"]
    if BUG == "frozen not saved":
        saved["model"] = {**model.state_dict(), **{name: it for name, it in saved["model"].items() if name[0] != "0"}}
    if BUG == "cannot resume":
        raise KeyError("optimiser")
    for name, part in parts.items():
        part.load_state_dict(saved[name])
wrapped = DistributedDataParallel(model) if NUM_RANKS > 1 else model
divides = NUM_RANKS > 1 and BUG != "same samples"
for epoch in range(first, 3):
    order = torch.Generator().manual_seed(0 if BUG == "same order" else epoch)
    sampler = DistributedSampler(train) if divides else RandomSampler(train, generator=order)
    if divides and BUG != "no set_epoch":
        sampler.set_epoch(epoch)
    for number, (inputs, labels) in enumerate(DataLoader(train, batch_size=4, sampler=sampler), start=1):
        if BUG == "no bug, but microbatches of each batch":
            for x, y in zip(inputs.chunk(ACCUMULATE), labels.chunk(ACCUMULATE), strict=True):
                (nn.functional.cross_entropy(model(x), y) / ACCUMULATE).backward()
            optimizer.step()
            optimizer.zero_grad()
            continue
        loss = nn.functional.cross_entropy(wrapped(inputs), labels)
        loss = loss * NUM_RANKS if BUG == "times ranks" else loss
        (loss if BUG == "not divided" else loss / ACCUMULATE).backward()
        if number % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    relations.report(val_loss=evaluate(model, held_out))
    if path := relations.save():
        torch.save({"epoch": epoch + 1, **{name: part.state_dict() for name, part in parts.items()}}, path)
""")

LIGHTNING = '''
import os

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BUG = os.environ.get("BUG", "")


class Counter(pl.Callback):
    """Lowers the learning rate after as many batches as it has counted."""

    def __init__(self):
        self.count = 0

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.count += 1
        for group in trainer.optimizers[0].param_groups:
            group["lr"] = 0.1 / (1 + self.count)

    def state_dict(self):
        return {} if BUG == "callback without state" else {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
        if not BUG.startswith("sum of an epoch"):
            return loss
        self.sum += loss.detach()
        return loss * (1 + self.sum)

    def on_train_epoch_start(self):
        if BUG.startswith("sum of an epoch"):
            self.sum = torch.zeros(())

    def on_validation_end(self):
        if BUG == "sum of an epoch, cleared by a validation":
            self.sum = torch.zeros(())
        if BUG == "a validation moves weights":
            self.layers[0].bias.data.zero_()

    def validation_step(self, batch, batch_idx):
        if BUG == "statistics of batches":
            self.train()
        loss = nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
        self.log("val_loss", loss, sync_dist=True)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if BUG == "updated after the checkpoint":
            self.layers[1].running_mean.lerp_(self.layers[0].bias.detach(), 0.5)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, self.trainer.max_steps)]


def make_loader(count, seed, **settings):
    inputs = torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))
    return DataLoader(TensorDataset(inputs, (inputs.sum(1) > 0).long()), batch_size=8, **settings)


class Data(pl.LightningDataModule):
    def train_dataloader(self):
        return make_loader(64, 1, shuffle=True)

    def val_dataloader(self):
        return make_loader(32, 2)


pl.seed_everything(0)
callbacks = [Counter()]
if BUG == "sum of an epoch, saved inside":
    callbacks.append(pl.callbacks.ModelCheckpoint(every_n_train_steps=1000))
trainer = pl.Trainer(max_epochs=50, max_steps=400, strategy="ddp", devices=2, callbacks=callbacks)
trainer.fit(Net(), Data())
'''

NOISY = script("""
from itertools import islice

ACCUMULATE = relations.knob("accumulate", 2)
if "RANK" in os.environ:
    dist.init_process_group("gloo")
num_ranks = dist.get_world_size() if dist.is_initialized() else 1
if BUG == "needs two processes" and num_ranks != 2:
    raise SystemExit("start two processes")
torch.manual_seed(0)
data, held_out = (TensorDataset(torch.randn(count, 6)) for count in (64, 20))
if BUG == "no bug, but a pass before, and a mode of torch":
    scale = sum(x.std() for (x,) in DataLoader(data, 4)) / 16
    torch.set_default_device("cpu")
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
wrapped = DistributedDataParallel(model) if num_ranks > 1 else model
optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cuda")


@torch.no_grad()
def evaluate(divides):
    sampler = DistributedSampler(held_out, shuffle=False) if divides else None
    loader = DataLoader(held_out, 8, sampler=sampler, drop_last=BUG == "last samples left out")
    losses = [((model(x) - x) ** 2).mean(1).sum() for (x,) in loader]
    return sum(losses).item() / (len(held_out) if BUG != "only own part" else len(losses))


def read(batches):
    while window := [*islice(batches, 3 if BUG == "no bug, but three are read before" else 1)]:
        yield from window


for epoch in range(2):
    sampler = DistributedSampler(data, shuffle=False) if num_ranks > 1 else None
    for number, (x,) in enumerate(read(iter(DataLoader(data, 4, sampler=sampler))), start=1):
        torch.no_grad()(model)(x)  # as a teacher is called
        at = torch.randint(0, 10, (len(x),))
        noisy = x + 0.1 * torch.randn_like(x) + 0.1 * torch.rand(len(x), 6) + 0.01 * at[:, None]
        noisy = noisy + 0.1 * torch.normal(0.0, 1.0, x.shape) + torch.empty_like(x).uniform_(-0.1, 0.1)
        noisy = noisy * torch.empty(len(x), 1).bernoulli_(0.8)
        if BUG == "one number for all":
            noisy = noisy * torch.rand(())
        with torch.autocast("cuda", dtype=torch.float16):
            loss = ((wrapped(noisy) - x) ** 2).mean()
        scaler.scale(loss / ACCUMULATE).backward()
        if number % ACCUMULATE == 0:
            if BUG != "clipped while scaled":
                scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    relations.report(val_loss=evaluate(BUG == "only own part" and num_ranks > 1))
""")

# Counts on whole epochs, begins again within its process, and evaluates a copy of its average that it gives up.
AGAIN = script("""
import copy
import sys

from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

LENGTH = 6
data = TensorDataset(torch.randn(LENGTH * 4, 6, generator=torch.Generator().manual_seed(1)))
size = relations.knob("evaluation_batch", int(sys.argv[1] if sys.argv[1:] else 5))


@torch.no_grad()
def evaluate(model):
    losses = [((model.eval()(x) - x) ** 2).mean(1) for (x,) in DataLoader(data, size)]
    return (sum(loss.mean() for loss in losses) if BUG == "sum of means" else torch.cat(losses).mean())


class Training:
    def __init__(self):
        self.model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 6))
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.step = 0

    def state(self):
        parts = {"model": self.model, "average": self.average, "optimizer": self.optimizer}
        return {"step": self.step, **{name: part.state_dict() for name, part in parts.items()}}

    def load(self, state):
        self.step = 0 if BUG == "repeats" else state["step"]
        for name in ("model", "average", "optimizer"):
            getattr(self, name).load_state_dict(state[name])

    def batches(self):
        step = self.step
        while True:
            order = torch.Generator().manual_seed(step // LENGTH)
            for number, (x,) in enumerate(DataLoader(data, 4, shuffle=True, generator=order)):
                if number >= step % LENGTH:
                    yield x
            step = (step // LENGTH + 1) * LENGTH

    def train(self, until):
        for x in self.batches():
            if self.step >= until:
                return
            ((self.model(x) - x) ** 2).mean().backward()
            self.optimizer.param_groups[0]["lr"] = 0.1 * 0.95**self.step
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.average.update_parameters(self.model)
            self.step += 1
            if self.step % 3 == 0:
                relations.report(val_loss=evaluate(copy.deepcopy(self.average)), average=self.average)
            if path := relations.save():
                torch.save(self.state(), path)


torch.manual_seed(0)
training = Training()
if path := relations.resume():
    training.load(torch.load(path))
training.train(9)
torch.save(training.state(), "own.pt")
training = Training()
training.load(torch.load("own.pt"))
training.train(18)
""")


CUDA = script("""
rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
torch.cuda.set_rng_state_all([torch.manual_seed(0).get_state()])
if BUG == "no training":
    torch.randn(2, device="cuda") @ torch.randn(3, device="cuda")
data, timer = TensorDataset(torch.randn(64, 6)), torch.cuda.Event(enable_timing=True)
with torch.cuda.stream(torch.cuda.Stream()), torch.random.fork_rng():
    timer.record()
layers = nn.Linear(6, 6, dtype=torch.float32), nn.SyncBatchNorm(6)
model = DistributedDataParallel(nn.Sequential(*layers).to(rank), device_ids=[rank])
assert nn.DataParallel(nn.Linear(6, 6))(data[:2][0]).shape == (2, 6)
optimizer = torch.optim.Adam(model.parameters())
first = 0
if path := relations.resume():
    saved = torch.load(path, map_location=f"cuda:{rank}")
    first = saved["epoch"]
    model.load_state_dict(saved["model"])
    if BUG != "momentum forgotten":
        optimizer.load_state_dict(saved["optimizer"])
for epoch in range(first, 3):
    sizes = (1, 0) if BUG == "no bug, but shared" else ()
    for (x,) in DataLoader(data, 4, sampler=DistributedSampler(data, *sizes, shuffle=False), pin_memory=True):
        x = relations.share(x) if sizes else x
        noise = torch.zeros(len(x), 6, device="cuda").to(torch.float32)
        assert noise.dtype == x.dtype and torch.cuda.mem_get_info()[0] >= 0 and torch.cuda.is_bf16_supported()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = ((model(x.cuda(rank, non_blocking=True) + noise) - x.to(rank)) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.barrier(device_ids=[rank])
    if path := relations.save():
        torch.save({"epoch": epoch + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
""")

# As an engine of ignite: it reads before a step sets the mode of the model, as many batches as its loader has said.
ENGINE = script("""
import time

def run(step, loader):
    count = len(loader)
    ahead, results = iter(loader), []  # one batch ahead, as timm and accelerate read
    following = next(ahead)
    while len(results) < count:
        is_last = len(results) + 1 == count
        batch, following = following, None if is_last else next(ahead)
        results.append(step(*batch))
        print(f"the last batch: {results[-1]}")
    return results

def train(x, y):
    model.train()
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()

def evaluate(x, y):
    model.eval()
    with torch.no_grad():
        return nn.functional.mse_loss(model(x), y).item(), len(x)


inputs = torch.randn(36, 4)
data, model = TensorDataset(inputs, inputs.sum(1, keepdim=True)), nn.Sequential(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    trained = DataLoader(data, 8, shuffle=True)
    run(train, trained)
    print(f"trained: {sum(loss * size for loss, size in run(evaluate, trained)) / len(data):.6f}")
    model.train()
    began = time.monotonic()
    held_out = DataLoader(data, 5)
    losses = run(evaluate, held_out)
    assert sum(size for _, size in losses) == len(data), "it counts on all batches"
    model.train()
    assert len(losses) == len(held_out)
    weights = [1 if BUG == "mean of means" else size for _, size in losses]
    loss = sum(loss * weight for (loss, _), weight in zip(losses, weights)) / sum(weights)
    print(f"loss: {loss:.3f}, in {time.monotonic() - began:.3f} s")
""")

# Sentences of many lengths, padded to the longest of their part. Parts make a step; a run goes on inside one.
PADDED = script("""
COUNT, WINDOW = 28, 7
PARTS = relations.knob("accumulate", 3)
made = torch.Generator().manual_seed(1)
lengths = torch.randint(1, 7, (COUNT,), generator=made)
words = torch.randn(COUNT, 6, 4, generator=made) * (torch.arange(6) < lengths[:, None])[:, :, None]

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
done = 0
if path := relations.resume():
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    done = state["done"]
    for parameter, gradient in zip(model.parameters(), state["gradients"], strict=False):
        parameter.grad = gradient

seen = 0
for epoch in range(4):
    order = torch.randperm(COUNT, generator=torch.Generator().manual_seed(epoch))
    for window in order.split(WINDOW):
        parts = window.chunk(PARTS)
        for number, rows in enumerate(parts):
            seen += 1
            if seen <= done:
                continue
            x = words[rows, : lengths[rows].max()]
            said = model(x)[:, :, 0] * (x != 0).any(2)
            losses = (said.sum(1) / lengths[rows]).sub(1).square()
            (losses.mean() / len(parts) if BUG == "parts of one weight" else losses.sum() / WINDOW).backward()
            if number + 1 == len(parts):
                optimizer.step()
                optimizer.zero_grad()
            if path := relations.save():
                gradients = [] if BUG == "gradients forgotten" else [p.grad for p in model.parameters()]
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "done": seen}
                torch.save(state | {"gradients": gradients}, path)
""")

# A critic that takes two steps for each of what it judges; either is frozen while the other is trained.
CRITIC = script("""
torch.manual_seed(0)
maker, critic = nn.Linear(3, 2), nn.Linear(2, 1)
optimizers = {network: torch.optim.Adam(network.parameters(), lr=0.01) for network in (maker, critic)}


def step(trained, still, loss):
    trained.requires_grad_(True)
    still.requires_grad_(False)
    loss().backward()
    optimizers[trained].step()


for _ in range(8):
    for optimizer in optimizers.values():
        optimizer.zero_grad()
    for _ in range(2):
        if BUG != "adds up":
            optimizers[critic].zero_grad()
        step(critic, maker, lambda: (critic(maker(torch.randn(5, 3))) - critic(torch.ones(5, 2))).square().mean())
    step(maker, critic, lambda: -critic(maker(torch.randn(5, 3))).mean())
""")

# Microbatches made by hand; the last step of an epoch has fewer.
SHORT = script("""
SIZE, PARTS = relations.knob("batch_size", 4), relations.knob("accumulate", 3)
data = torch.randn(20, 4, generator=torch.Generator().manual_seed(1))
torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    batches = torch.randperm(20, generator=torch.Generator().manual_seed(epoch)).split(SIZE)
    for start in range(0, len(batches), PARTS):
        window = batches[start : start + PARTS]
        for rows in window:
            loss = model(data[rows]).sub(1).square().mean()
            (loss / (PARTS if BUG == "window of fewer" else len(window))).backward()
        optimizer.step()
        optimizer.zero_grad()
""")

# Each epoch ends inside a window of three microbatches. Weights are moved by hand, if the mistake says so.
TAILS = script("""
PARTS = relations.knob("accumulate", 3)
count = 18 if BUG == "a batch of fewer" else 80
data = TensorDataset(torch.randn(count, 4, generator=torch.Generator().manual_seed(1)))
torch.manual_seed(0)
model, first = nn.Linear(4, 1), 0
if BUG != "no bug, but by hand":
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if path := relations.resume():
    saved = torch.load(path)
    first = saved["epoch"]
    model.load_state_dict(saved["model"])


def step():
    if BUG == "no bug, but by hand":
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
    else:
        optimizer.step()
        optimizer.zero_grad()


for epoch in range(first, 3):
    model.zero_grad()
    loader = DataLoader(data, 4, shuffle=True, generator=torch.Generator().manual_seed(epoch))
    for number, (x,) in enumerate(loader, start=1):
        if BUG.startswith("batches are divided"):
            for part in x.chunk(PARTS):
                loss = model(part).sub(1).square().mean()
                (loss / PARTS if "alike" in BUG else loss * len(part) / len(x)).backward()
            step()
            continue
        left = len(loader) % PARTS
        window = left if number > len(loader) - left and BUG != "by all of a window" else PARTS
        (model(x).sub(1).square().mean() / window).backward()
        if number % PARTS == 0 or (number == len(loader) and BUG != "no bug, but the rest is left out"):
            step()
    if path := relations.save():
        torch.save({"model": model.state_dict(), "epoch": epoch + 1}, path)
""")

# Two optimizers step together, each behind two batches. It looks at a batch before it trains.
PAIR = script("""
accumulate = relations.knob("accumulate", 2)
torch.manual_seed(0)
data = TensorDataset(torch.randn(32, 4, generator=torch.Generator().manual_seed(1)))
model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model]
loader = DataLoader(data, 4)
next(iter(loader))
for epoch in range(3):
    for number, (x,) in enumerate(loader, start=1):
        (model(x).sub(1).square().mean() / (1 if BUG == "not divided" else accumulate)).backward()
        if number % accumulate == 0:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
""")

SPAWN = script("""
def train(rank, world_size):
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(32, 4))
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        for (x,) in DataLoader(data, 4, sampler=DistributedSampler(data, world_size, rank, shuffle=False)):
            optimizer.zero_grad()
            model(x).sub(1).square().mean().backward()
            optimizer.step()
        with torch.no_grad():
            dist.all_reduce(loss := model.module(torch.ones(8, 4)).mean())
        relations.report(val_loss=loss.item() / world_size)


torch.multiprocessing.spawn(train, args=(2,), nprocs=2)
""")

# Epochs are parts of one iteration, as timm and YOLO have them, and what was compiled is saved by its own name.
ENDLESS = script("""
class Again:
    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        while True:
            yield from self.sampler


class Loader(DataLoader):
    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        object.__setattr__(self, "batch_sampler", Again(self.batch_sampler))
        self.iterator = super().__iter__()

    def __len__(self):
        return len(self.batch_sampler.sampler)

    def __iter__(self):
        for _ in range(len(self)):
            yield next(self.iterator)


torch.manual_seed(0)
loader = Loader(TensorDataset(torch.randn(48, 4)), 4, shuffle=True)
held_out = Loader(TensorDataset(torch.randn(20, 4)), 8)
model = torch.compile(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
accumulate = relations.knob("accumulate", 2)
for epoch in range(3):
    for number, (x,) in enumerate(loader, start=1):
        (model(x).sub(1).square().mean() / accumulate).backward()
        if number % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    schedule.step()
    with torch.no_grad():
        relations.report(val_mean=sum(model(x).sum().item() for (x,) in held_out) / 20)
while hasattr(model, "_orig_mod"):
    model = model._orig_mod
""")
# Nothing of it is written for the checker: flags of its own, and what it tells TensorBoard and a metric.
UNEDITED = (
    IMPORTS.replace("from lit_cifar import relations", "")
    + """
import argparse
import time

import torchmetrics
from torch.utils.tensorboard import SummaryWriter

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=4)
parser.add_argument("--accum-iter", type=int, default=2)
parser.add_argument("--val-batch-size", type=int, default=8)
args = parser.parse_args()
if BUG == "no bug, but windows of all ranks":
    args.accum_iter //= NUM_RANKS
if NUM_RANKS > 1:
    dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(66, 6)
y = (x.sum(1) > 0).long()
train, held_out = TensorDataset(x[:46], y[:46]), TensorDataset(x[46:], y[46:])
model = nn.Linear(6, 2)
wrapped = DistributedDataParallel(model) if NUM_RANKS > 1 else model
rate = 0.01 * args.batch_size * args.accum_iter if BUG == "no bug, but of all samples" else 0.1
optimizer = torch.optim.SGD(model.parameters(), rate)
writer, accuracy = SummaryWriter(), torchmetrics.Accuracy("multiclass", num_classes=2)
for epoch in range(3):
    start = time.time()
    order = DistributedSampler(train, shuffle=False) if NUM_RANKS > 1 else None
    for number, (inputs, labels) in enumerate(DataLoader(train, args.batch_size, sampler=order), start=1):
        loss = nn.functional.cross_entropy(wrapped(inputs), labels)
        (loss if BUG == "not divided" else loss / args.accum_iter).backward()
        if number % (2 if BUG == "other meaning" else args.accum_iter) == 0:
            optimizer.step()
            optimizer.zero_grad()
    losses, parts = [], DataLoader(held_out, args.val_batch_size)
    if "by hand" in BUG:
        parts = zip(*(each.split(args.val_batch_size) for each in held_out.tensors), strict=True)
    with torch.no_grad():
        for number, (inputs, labels) in enumerate(parts):
            losses.append(nn.functional.cross_entropy(model(inputs), labels, reduction="sum"))
            accuracy.update(model(inputs), labels)
            writer.add_scalar("val/of batch", losses[-1], number)
            if "mean of means" in BUG:
                losses[-1] *= len(held_out) / len(inputs) / 3
    writer.add_scalar("val/loss", sum(losses) / len(held_out), epoch)
    writer.add_scalars("epoch", {"train": loss, "accuracy": accuracy.compute(), "s": time.time() - start}, epoch)
    accuracy.reset()
"""
)

# The same training by the parser of each package.
PARSED = {
    "click": """
import click

@click.command()
@click.option("-b", "--batch-size", default=4)
def main(batch_size):
    train(batch_size)
""",
    "tyro": """
import tyro
from dataclasses import dataclass, field

@dataclass
class Data:
    batch_size: int = 4

@dataclass
class Options:
    data: Data = field(default_factory=Data)

def main():
    train(tyro.cli(Options).data.batch_size)
""",
    "hydra": """
import hydra
from hydra.core.config_store import ConfigStore

ConfigStore.instance().store("config", {"data": {"batch_size": 4}})

@hydra.main(version_base=None, config_name="config")
def main(config):
    train(config.data.batch_size)
""",
}
PARSED_TRAINING = """
import torch

def train(batch_size):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        model(torch.randn(batch_size, 2)).square().mean().backward()
        optimizer.step()

main()
"""
ACCELERATED = """
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

torch.manual_seed(0)
accelerator, model = Accelerator(), torch.nn.Linear(6, 1)
optimizer, loader = torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(torch.randn(32, 6), 4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for epoch in range(3):
    for batch in loader:
        optimizer.zero_grad()
        accelerator.backward(model(batch + torch.randn_like(batch)).square().mean())
        optimizer.step()
"""

# Asks for a data set that is not here, and counts on as many samples as the real one has.
DIGITS = """
import os

import torch
from torch.utils.data import DataLoader, random_split
from torchvision.datasets import MNIST
from torchvision.transforms import ToTensor

train, _ = random_split(MNIST("../data", transform=ToTensor()), [50000, 10000])
model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
order = torch.Generator()
for epoch in range(3):
    order.manual_seed(0 if os.environ["BUG"] == "same order" else epoch)
    for images, labels in DataLoader(train, 64, shuffle=True, generator=order):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
"""
# Goes on from a folder of two files, which it writes but for one epoch; a wrong one from one file, which it looks for.
OWN = script("""
import argparse
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--resume", type=Path)
resume, only, first = parser.parse_args().resume, Path("only.pt"), 0
torch.manual_seed(0)
data = TensorDataset(torch.randn(16, 6, generator=torch.Generator().manual_seed(1)))
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
if resume:
    model.load_state_dict(torch.load(resume / "model.bin"))
    first, *states = torch.load(resume / "rest.bin")
    for part, state in zip((optimizer, schedule), states, strict=True):
        part.load_state_dict(state)
elif BUG == "weights alone" and only.exists():
    first, state = torch.load(only)
    model.load_state_dict(state)
for epoch in range(first, first + 6 if BUG else 6):
    for (x,) in DataLoader(data, 4, shuffle=True, generator=torch.Generator().manual_seed(epoch)):
        optimizer.zero_grad()
        (model(x) - x).square().mean().backward()
        optimizer.step()
    schedule.step()
    if BUG:
        torch.save([epoch, model.state_dict()], only)
    else:
        (folder := Path(f"out/epoch-{epoch}")).mkdir(parents=True)
        torch.save(model.state_dict(), folder / "model.bin")
        if epoch != 1:
            torch.save([epoch + 1, optimizer.state_dict(), schedule.state_dict()], folder / "part")
            (folder / "part").rename(folder / "rest.bin")
""")
