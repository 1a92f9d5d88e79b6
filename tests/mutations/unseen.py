"""Silent mistakes for `verify` that were written without a look at how it compares, after bugs of other projects.

Each lets a training end normally and changes its weights, its results or its files. What a comment names is the public
report of such a bug.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from lit_cifar.checkpoint import exact_resume
from lit_cifar.checkpoint.callbacks import BestCheckpoint
from lit_cifar.checkpoint.sample_audit import EMPTY, SampleAudit
from lit_cifar.data.augment import Augmentation
from lit_cifar.data.images import Batch
from lit_cifar.data.loader import BatchLoader
from lit_cifar.data.samplers import BatchIds, EvaluationSampler, TrainSampler
from lit_cifar.reporting import evaluation_tables
from lit_cifar.strategies import fsdp2, state_dicts, sync_batchnorm
from lit_cifar.strategies.dp import EmulatedReplicas
from lit_cifar.strategies.mesh import MeshStrategy, local_part
from lit_cifar.strategies.mp import StagedRunner
from lit_cifar.strategies.pipeline import Pipeline
from lit_cifar.strategies.state_dicts import only_parameters
from lit_cifar.strategies.sync_batchnorm import _Normalise, _Synchronised
from lit_cifar.strategies.tp import _all_reduce, _Sum
from lit_cifar.task.optim import WarmupDecay
from tests.mutations.planting import PIPELINE, Mutation, Site, in_last

UNCUT = ("--trainer.accumulate_grad_batches=1",)  # with it pipelines of several replicas can cut the ragged batch too
ADAM = ("--model.optimizer=AdamW", "--model.optimizer.lr=0.001")


def _clones(tensors: dict[str, Any]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def _is_last_batch(site: Site) -> bool:
    """Whether the batch is the epoch's last one."""
    return bool(site.trainer.fit_loop.epoch_loop.batch_progress.is_last_batch)


def _batch_idx(site: Site) -> int:
    return int(site.trainer.fit_loop.epoch_loop.batch_idx)


def _states(site: Site) -> Iterator[dict[str, Any]]:
    return iter(site.trainer.optimizers[0].state.values())


# Copies that are not brought up to date


def _copied_too_early(site: Site) -> None:
    def early(collect: Any) -> dict[str, Tensor]:
        found = _clones(site.module.state_dict())
        collect()
        return found

    site.replace(site.trainer.strategy, "lightning_module_state_dict", early)


def _parameters_refreshed(site: Site) -> None:
    def without_buffers(owned: Any, network: nn.Module) -> Iterator[tuple[int, Tensor]]:
        return ((owner, tensor) for owner, tensor in owned(network) if isinstance(tensor, nn.Parameter))

    site.replace(site.trainer.strategy, "_owned_tensors", without_buffers)


def _own_shard_statistics(site: Site) -> None:
    site.replace(site.trainer.strategy, "on_validation_start", lambda take_first: None)


def _shards_swapped_in_file(site: Site) -> None:
    def swapped(gather: Any, state: dict[str, Any]) -> dict[str, Any]:
        whole: dict[str, Any] = gather(state)
        for index, entry in state["state"].items():
            for name, part in entry.items():
                if isinstance(part, DTensor) and (dims := [p.dim for p in part.placements if isinstance(p, Shard)]):
                    tensor = whole["state"][index][name]
                    whole["state"][index][name] = tensor.roll(tensor.shape[dims[0]] // 2, dims[0])
        return whole

    site.replace(fsdp2, "full_optimizer_state", swapped)


def _stale_buffer_of_stage(site: Site) -> None:
    name, buffer = [*site.module.network.named_buffers()][-2]  # the running variance of the last layer that has one
    old = [buffer.clone()]
    site.at("on_train_batch_start", lambda: old.__setitem__(0, buffer.clone()))

    def with_old(save: Any, checkpoint: dict[str, Any]) -> None:
        save(checkpoint)
        checkpoint["state_dict"][name] = old[0]

    site.replace(site.module, "on_save_checkpoint", with_old)


def _old_statistics_after_fit(site: Site) -> None:
    def with_first_buffers(collect: Any, module: nn.Module) -> dict[str, Any]:
        whole = site.trainer.strategy._whole
        found: dict[str, Any] = collect(module)
        return found | (dict(whole.named_buffers()) if module is not site.module else {})

    site.replace(fsdp2, "full_state", with_first_buffers)


def _stale_momentum_in_file(site: Site) -> None:
    old: dict[int, Tensor] = {}
    weight = site.module.network.fc.weight

    def note() -> None:
        for state in [site.trainer.optimizers[0].state[weight]]:
            old.update({39: state["momentum_buffer"].clone()} if state else {})

    def with_old(save: Any, checkpoint: dict[str, Any]) -> None:
        save(checkpoint)
        for index, momentum in old.items():
            checkpoint["optimizer_states"][0]["state"][index]["momentum_buffer"] = momentum

    site.at("on_before_optimizer_step", note)
    site.replace(site.module, "on_save_checkpoint", with_old)


def _means_of_first_pipeline(site: Site) -> None:
    def means(buffers: Any) -> list[Tensor]:
        stages = site.trainer.strategy.pipeline.stages.values()
        return [buffer for stage in stages for name, buffer in stage.named_buffers() if name.endswith("running_mean")]

    site.replace(site.trainer.strategy, "local_buffers", means)


def _own_part_for_all(site: Site) -> None:
    shape = site.module.network.fc.weight.shape

    def own_columns(gather: Any, tensor: DTensor) -> Tensor:
        whole: Tensor = gather(tensor).clone()
        if whole.shape == shape:
            whole[:, shape[1] // 2 :] = whole[:, : shape[1] // 2]
        return whole

    site.replace(state_dicts, "_gather", own_columns)


def _state_of_one_stage(site: Site) -> None:
    def own(merge: Any, optimizer: Any) -> dict[str, Any]:
        return only_parameters(merge(optimizer), optimizer, site.trainer.strategy.pipeline.parameters)

    site.replace(site.trainer.strategy, "optimizer_state", own)


# Evaluation


def _pieces_as_they_end(site: Site) -> None:
    def last_first(evaluate: Any, pipeline: Pipeline, images: Tensor) -> Tensor:
        return torch.cat([*reversed(evaluate(pipeline, images).tensor_split(pipeline.num_microbatches))])

    site.replace(Pipeline, "evaluate", last_first)


def _strided_microbatches(site: Site) -> None:
    def strided(run: Any, runner: StagedRunner, images: Tensor) -> Any:
        if torch.is_grad_enabled():
            return run(runner, images)
        return torch.cat([run(runner, images[start :: runner.num_microbatches]) for start in range(2)])

    site.replace(StagedRunner, "__call__", strided)


def _labels_of_others(site: Site) -> None:
    def shifted_in_last(iterate: Any, loader: BatchLoader) -> Iterator[Batch]:
        *others, last = iterate(loader)
        yield from others
        yield last._replace(labels=last.labels.roll(1)) if isinstance(loader.sampler, EvaluationSampler) else last

    site.replace(BatchLoader, "__iter__", shifted_in_last)


def _first_batch_in_training_mode(site: Site) -> None:
    def step(evaluate: Any, batch: Batch, batch_idx: int) -> Any:
        site.module.network.train(batch_idx == 0)
        output = evaluate(batch, batch_idx)
        site.module.network.eval()
        return output

    site.replace(site.module, "validation_step", step)


def _first_batch_with_old_weights(site: Site) -> None:
    weight, old = site.module.network.fc.weight, []
    site.at("on_train_batch_start", lambda: old.append(weight.detach().clone()))

    def step(evaluate: Any, batch: Batch, batch_idx: int) -> Any:
        new = weight.detach().clone()
        weight.data.copy_(old[-1] if batch_idx == 0 else new)
        output = evaluate(batch, batch_idx)
        weight.data.copy_(new)
        return output

    site.replace(site.module, "validation_step", step)


def _flipped_by_one(site: Site) -> None:
    def with_mirror_images(evaluated: Any, images: Tensor) -> Any:
        site.set(site.module, "flip_test", True)
        return evaluated(images)

    site.replace(site.module, "_evaluated", with_mirror_images)


def _transposed_confusion(site: Site) -> None:
    def transposed(write: Any, folder: Any, split: str, classes: Any, counts: Any) -> None:
        write(folder, split, classes, [*zip(*counts, strict=True)])

    site.replace(evaluation_tables, "write_confusion", transposed)


def _confusion_of_first_rank(site: Site) -> None:
    def alone(start: Any) -> None:
        start()
        for metric in site.module.val_metrics.details.values():
            site.set(metric, "_to_sync", False)

    site.replace(site.module, "on_validation_epoch_start", alone)


def _ranks_in_reverse(site: Site) -> None:
    last = site.trainer.strategy.replicas_per_rank - 1
    site.replace(site.trainer.strategy, "replica_of", lambda replica_of, num_samples: last - replica_of(num_samples))


def _counts_of_all_epochs(site: Site) -> None:
    site.replace(site.module, "on_validation_epoch_start", lambda reset: None)


def _mean_of_batch_means(site: Site) -> None:
    site.replace(site.module.val_metrics.loss, "update", lambda update, losses: update(losses.mean()[None]))


def _normalises_evaluation_batches(site: Site) -> None:
    def train(training: bool) -> None:
        for layer in site.module.network.modules():
            layer.train(training) if isinstance(layer, _BatchNorm) else None

    site.at("on_validation_start", lambda: train(True))
    site.at("on_validation_end", lambda: train(False))


def _warm_up_after_evaluation(site: Site) -> None:
    def forward() -> None:
        network, image = site.module.network.train(), torch.zeros(2, *site.module.image_shape)
        with torch.no_grad():
            network(image.to(network.fc.weight))

    site.at("on_validation_end", forward)


def _stays_in_evaluation_mode(site: Site) -> None:
    site.replace(site.trainer.fit_loop.epoch_loop.val_loop._module_mode, "restore", lambda restore, module: None)


def _evaluates_in_float32(site: Site) -> None:
    def narrow(evaluated: Any, images: Tensor) -> Any:
        return evaluated(images).float().to(images.dtype)

    site.replace(site.module, "_evaluated", narrow)


def _replicas_with_old_buffers(site: Site) -> None:
    old: dict[str, Tensor] = {}
    site.at("on_train_batch_start", lambda: old.update(_clones(dict(site.module.network.named_buffers()))))

    def evaluate(run: Any, replicas: EmulatedReplicas, images: Tensor) -> Any:
        if torch.is_grad_enabled():
            return run(replicas, images)
        first, *others = images.chunk(replicas.num_replicas)
        return torch.cat([replicas.network(first), *(functional_call(replicas.network, old, (x,)) for x in others)])

    site.replace(EmulatedReplicas, "__call__", evaluate)


def _counts_of_whole_replica(site: Site) -> None:
    site.replace(MeshStrategy, "_count_along_data", lambda count, strategy, group: None)


def _last_sample_without_loss(site: Site) -> None:
    def without_last(update: Any, logits: Tensor, labels: Tensor, losses: Tensor) -> None:
        update(logits, labels, losses[:-1])

    site.replace(site.module.val_metrics, "update", without_last)


# Checkpoint and resume


def _after_optimizer_is_loaded(site: Site, wrong: Callable[[], None]) -> None:
    def loaded(load: Any, checkpoint: Any) -> None:
        load(checkpoint)
        wrong()

    site.replace(site.trainer.strategy, "load_optimizer_state_dict", loaded)


def _schedule_a_step_behind(site: Site) -> None:
    def behind(load: Any, schedule: WarmupDecay, state: dict[str, Any]) -> None:
        load(schedule, state | {"last_epoch": state["last_epoch"] - 1})

    site.replace(WarmupDecay, "load_state_dict", behind)


def _resumes_with_first_draws(site: Site) -> None:
    resumed: list[bool] = []

    def note(load: Any, *args: Any) -> None:
        resumed.append(True)
        load(*args)

    def draw(original: Any, augmentation: Augmentation, ids: Tensor, size: Any, *, epoch: int) -> Any:
        return original(augmentation, ids, size, epoch=0 if resumed else epoch)

    site.replace(exact_resume.ExactResume, "on_load_checkpoint", note)
    site.replace(Augmentation, "draw", draw)


def _adam_counts_again(site: Site) -> None:
    def begin() -> None:
        for state in _states(site):
            state["step"].zero_()

    _after_optimizer_is_loaded(site, begin)


def _second_moments_lost(site: Site) -> None:
    def lose() -> None:
        for state in _states(site):
            local_part(state["exp_avg_sq"]).zero_()

    _after_optimizer_is_loaded(site, lose)


def _momentum_in_float32(site: Site) -> None:
    def narrow() -> None:
        for state in _states(site):
            state["momentum_buffer"].copy_(state["momentum_buffer"].float())

    _after_optimizer_is_loaded(site, narrow)


def _momenta_of_neighbours(site: Site) -> None:
    def swapped(split: Any, state: dict[str, Any], optimizer: Any) -> Any:
        entries = dict(state["state"])
        entries[1], entries[2] = entries[2], entries[1]  # of the first BatchNorm's weight and bias
        return split(state | {"state": entries}, optimizer)

    site.replace(site.trainer.strategy, "part_of_state", swapped)


def _counts_of_all_in_each(site: Site) -> None:
    def all_counts(own: Any, found: Tensor, state: Tensor, *, dp_rank: int) -> Tensor:
        return found.clone()

    site.replace(exact_resume, "_own", all_counts)


def _best_of_step_before(site: Site) -> None:
    old: dict[str, Tensor] = {}
    network = site.module.network
    site.at("on_train_batch_start", lambda: old.update(_clones(network.state_dict())))

    def saved(save: Any, *args: Any) -> None:
        new = _clones(network.state_dict())
        network.load_state_dict(old)
        save(*args)
        network.load_state_dict(new)

    site.replace(BestCheckpoint, "_save_checkpoint", saved)


def _audit_begins_anew(site: Site) -> None:
    def anew(load: Any, callback: SampleAudit, *args: Any) -> None:
        load(callback, *args)
        site.set(callback, "_digest", EMPTY)

    site.replace(SampleAudit, "on_load_checkpoint", anew)


def _header_counted_as_row(site: Site) -> None:
    site.replace(exact_resume, "_num_rows", lambda num_rows, trainer: num_rows(trainer) + 1)


def _buffers_not_restored(site: Site) -> None:
    def parameters_alone(load: Any, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        own = {name: buffer for name, buffer in site.module.state_dict().items() if ".running_" in name}
        load({**checkpoint, "state_dict": checkpoint["state_dict"] | own}, *args, **kwargs)

    site.replace(site.trainer.strategy, "load_model_state_dict", parameters_alone)


def _rate_of_fresh_optimizer(site: Site) -> None:
    def kept(load: Any, checkpoint: Any) -> None:
        groups = site.trainer.optimizers[0].param_groups
        rates = [group["initial_lr"] for group in groups]
        load(checkpoint)
        for group, rate in zip(site.trainer.optimizers[0].param_groups, rates, strict=True):
            group["lr"] = rate

    site.replace(site.trainer.strategy, "load_optimizer_state_dict", kept)


def _epoch_ahead(site: Site) -> None:
    def ahead(save: Any, checkpoint: dict[str, Any]) -> None:
        save(checkpoint)
        checkpoint["epoch"] += 1

    site.replace(site.module, "on_save_checkpoint", ahead)


# Hard sizes and the second epoch


def _as_if_full(site: Site) -> None:
    def by_full_size(iterate: Any, sampler: TrainSampler) -> Iterator[BatchIds]:
        num_parts = sampler.accumulation * sampler.batch_split.dp_size
        for part in iterate(sampler):
            yield part._replace(weight=len(part.ids) * num_parts / sampler.batch_size)

    site.replace(TrainSampler, "__iter__", by_full_size)


def _draws_of_first_epoch(site: Site) -> None:
    site.replace(
        Augmentation, "draw", lambda draw, augmentation, ids, size, epoch: draw(augmentation, ids, size, epoch=0)
    )


def _gradient_of_last_step(site: Site) -> None:
    def at_start_alone(zero: Any, epoch: int, batch_idx: int, optimizer: Any) -> None:
        zero(epoch, batch_idx, optimizer) if batch_idx == 0 else None

    site.replace(site.module, "optimizer_zero_grad", at_start_alone)


@torch.no_grad()
def _decay(site: Site) -> None:
    for group in site.trainer.optimizers[0].param_groups:
        for parameter in group["params"]:
            local_part(parameter).mul_(1 - group["lr"] * group["weight_decay"])


def _decays_twice(site: Site) -> None:
    def step(original: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        _decay(site) if _is_last_batch(site) else None
        return output

    site.replace(site.trainer.strategy, "optimizer_step", step)


def _schedule_per_microbatch(site: Site) -> None:
    def step() -> None:
        if site.trainer.current_epoch and (_batch_idx(site) + 1) % site.trainer.accumulate_grad_batches:
            site.trainer.lr_scheduler_configs[0].scheduler.step()

    site.at("on_train_batch_end", step)


def _odd_sample_dropped(site: Site) -> None:
    def even(train: Any, batch: Batch) -> Any:
        num = len(batch.labels) // 2 * 2
        images, labels, ids = (tensor[:num] for tensor in (batch.images, batch.labels, batch.ids))
        return train(batch._replace(images=images, labels=labels, ids=ids))

    site.replace(site.module, "_train_on", even)


def _no_schedule_at_epoch_end(site: Site) -> None:
    def step(original: Any, schedule: WarmupDecay, *args: Any) -> None:
        original(schedule, *args) if not _is_last_batch(site) else None

    site.replace(WarmupDecay, "step", step)


def _momentum_of_one_epoch(site: Site) -> None:
    site.at("on_train_epoch_start", lambda: site.trainer.optimizers[0].state.clear())


def _loss_of_all_epochs(site: Site) -> None:
    site.replace(site.module.train_loss, "reset", lambda reset: None)


def _equal_microbatches(site: Site) -> None:
    def equal(train: Any, pipeline: Pipeline, images: Any, labels: Any, scales: Any) -> Any:
        share = sum(map(len, labels)) / len(labels)
        return train(pipeline, images, labels, [s * share / len(y) for s, y in zip(scales, labels, strict=True)])

    site.replace(Pipeline, "_train_unequal", equal)


# Reduction


def _before_step(site: Site, wrong: Callable[[], None]) -> None:
    site.at("on_before_optimizer_step", wrong)


def _averaged_over_all(site: Site) -> None:
    def over_world(average: Any, loss: Tensor) -> None:
        average(loss)
        for parameter in site.trainer.strategy.pipeline.parameters:
            parameter.grad.mul_(dist.get_world_size(site.trainer.strategy.data_group) / site.trainer.world_size)

    site.replace(site.trainer.strategy, "post_backward", over_world)


def _second_stage_over_devices(site: Site) -> None:
    def halve() -> None:
        stage = site.trainer.strategy.partition.stages[1].module(site.module.network)
        for parameter in stage.parameters():
            parameter.grad.div_(site.trainer.strategy.num_stages)

    _before_step(site, halve)


def _every_copy_in_norm(site: Site) -> None:
    site.replace(site.trainer.strategy, "share_of_norm", lambda share, gradient: 1.0)


def _summed_weight_of_batchnorm(site: Site) -> None:
    def summed(backward: Any, ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads = list(backward(ctx, grad))
        grads[1] = grads[1].clone()
        dist.all_reduce(grads[1])
        return tuple(grads)

    site.replace(_Normalise, "backward", summed)


def _reduced_in_float32(site: Site) -> None:
    def narrow() -> None:
        for parameter in site.module.network.parameters():
            parameter.grad.copy_(parameter.grad.float())

    _before_step(site, narrow)


def _equal_processes(site: Site) -> None:
    def mean_of_means(statistics: Any, x: Tensor, group: Any) -> tuple[int, Tensor, Tensor]:
        count, _, var = statistics(x, group)
        mean = x.mean(dim=[0, *range(2, x.dim())])
        dist.all_reduce(mean, group=group)
        return count, mean / dist.get_world_size(group), var

    site.replace(sync_batchnorm, "_global_statistics", mean_of_means)


def _unbiased_by_own_count(site: Site) -> None:
    def own_count(track: Any, layer: _Synchronised, count: int, mean: Tensor, var: Tensor) -> None:
        track(layer, count // dist.get_world_size(layer.process_group), mean, var)

    site.replace(_Synchronised, "_track", own_count)


def _backward_by_own_count(site: Site) -> None:
    def forward(original: Any, ctx: Any, x: Tensor, *args: Any) -> Tensor:
        output: Tensor = original(ctx, x, *args)
        ctx.count = x.numel() // x.shape[1] * dist.get_world_size()
        return output

    site.replace(_Normalise, "forward", forward)


def _divided_twice(site: Site) -> None:
    def again() -> None:
        local_part(site.module.network.fc.weight.grad).div_(site.trainer.world_size)

    _before_step(site, again)


def _bias_of_every_rank(site: Site) -> None:
    def with_biases(split: Any, network: Any, mesh: Any) -> None:
        split(network, mesh)
        others = mesh.size() - 1
        network.fc.register_forward_hook(lambda layer, inputs, output: output + others * local_part(layer.bias))

    site.replace(fsdp2, "split_tensors", with_biases)


def _summed_in_both_passes(site: Site) -> None:
    def again(backward: Any, ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        group: Any = dist.group.WORLD
        return _all_reduce(grad, group), None

    site.replace(_Sum, "backward", again)


def _labels_of_other_microbatch(site: Site) -> None:
    def train(original: Any, pipeline: Pipeline, images: Tensor, labels: Tensor, *, sizes: Any, scales: Any) -> Any:
        if len(set(sizes)) == 1:
            labels = torch.cat([*reversed(torch.split(labels, sizes))])
        return original(pipeline, images, labels, sizes=sizes, scales=scales)

    site.replace(Pipeline, "train", train)


def _mean_of_replicas(site: Site) -> None:
    def loss(original: Any, logits: Tensor, labels: Tensor) -> Tensor:
        losses: Tensor = original(logits, labels)
        if not logits.requires_grad:
            return losses
        chunks = losses.chunk(site.trainer.strategy.replicas_per_rank)
        return torch.cat([chunk * (len(losses) / len(chunks) / len(chunk)) for chunk in chunks])

    site.replace(site.module, "loss", loss)


def _no_sync_into_new_epoch(site: Site) -> None:
    def leak() -> None:
        synchronises = site.trainer.current_epoch == 0 or _batch_idx(site) >= site.trainer.accumulate_grad_batches
        site.set(site.trainer.strategy.model, "require_backward_grad_sync", synchronises)

    site.at("on_train_batch_start", leak)


def _tensor_parts_over_all(site: Site) -> None:
    def halve() -> None:
        for parameter in site.module.network.parameters():
            if isinstance(parameter, DTensor) and len(parameter.placements) == 2 and parameter.placements[1].is_shard():
                assert parameter.grad is not None
                local_part(parameter.grad).div_(2)

    _before_step(site, halve)


MUTATIONS = [
    # Copies
    Mutation("copied-too-early", "a pipeline's copies are taken and then refreshed", "pp", _copied_too_early),
    Mutation("parameters-refreshed", "copies of buffers are not refreshed", "pp", _parameters_refreshed),
    # huggingface/pytorch-image-models#110
    Mutation("own-shard-statistics", "each replica evaluates its own statistics", "fsdp2", _own_shard_statistics),
    Mutation("swapped-shards", "the file has each rank's momentum in another's place", "tp", _shards_swapped_in_file),
    Mutation("stale-buffer", "the file has a stage's old buffer", "ddp_mp", _stale_buffer_of_stage, devices=4),
    Mutation("old-statistics", "the network gets its first buffers back", "fsdp2", _old_statistics_after_fit),
    Mutation("stale-momentum", "the file has a tensor's momentum of the step before", "mp", _stale_momentum_in_file),
    Mutation(
        "means-alone", "only means are the first pipeline's", "ddp_pp", _means_of_first_pipeline, UNCUT, devices=4
    ),
    Mutation("own-part-for-all", "the file has own columns twice", "fsdp2-tp", _own_part_for_all, devices=4),
    # hpcaitech/ColossalAI#1259
    Mutation("state-of-one-stage", "the file has the first stage's momentum alone", "pp", _state_of_one_stage),
    # Evaluation
    Mutation("pieces-as-they-end", "evaluated microbatches are joined in another order", "pp", _pieces_as_they_end),
    Mutation("strided-microbatches", "cut by strides, joined as blocks", "mp-micro", _strided_microbatches),
    Mutation("labels-of-others", "the last batch is compared with shifted labels", "single", _labels_of_others),
    Mutation(
        "first-in-training",
        "one rank's first batch is evaluated in training mode",
        "ddp_spawn",
        in_last(_first_batch_in_training_mode),
    ),
    Mutation("first-with-old", "the first batch is evaluated with old weights", "mp", _first_batch_with_old_weights),
    Mutation("flipped-by-one", "one rank evaluates mirror images too", "ddp", in_last(_flipped_by_one)),
    Mutation("transposed", "confusion.csv is transposed", "ddp", _transposed_confusion),
    Mutation("own-confusion", "confusion.csv has the first rank's counts alone", "fsdp2", _confusion_of_first_rank),
    Mutation("ranks-in-reverse", "the counts of replicas are swapped", "dp", _ranks_in_reverse),
    # Lightning-AI/pytorch-lightning#3728
    Mutation("counts-of-all-epochs", "confusion.csv is not reset", "single", _counts_of_all_epochs),
    # catalyst-team/catalyst#799
    Mutation("mean-of-batches", "val/loss is the mean of batches", "ddp_mp", _mean_of_batch_means, devices=4),
    # facebookresearch/schedule_free#60
    Mutation("normalises", "BatchNorm normalises what is evaluated", "tp", _normalises_evaluation_batches),
    Mutation("warm-up", "a pass after an evaluation moves the statistics", "single", _warm_up_after_evaluation),
    # Lightning-AI/pytorch-lightning#20177
    Mutation("stays-in-eval", "the network stays in evaluation mode", "mp-micro", _stays_in_evaluation_mode),
    Mutation("one-stays-in-eval", "one rank stays in evaluation mode", "ddp", in_last(_stays_in_evaluation_mode)),
    Mutation("narrow-evaluation", "one rank evaluates in float32", "ddp-sync", in_last(_evaluates_in_float32)),
    Mutation("old-buffers", "other replicas evaluate with old buffers", "dp", _replicas_with_old_buffers),
    Mutation("counts-of-replica", "metrics count each process of a replica", "tp", _counts_of_whole_replica),
    Mutation("last-without-loss", "val/loss lacks a sample", "fsdp2-tp", _last_sample_without_loss, devices=4),
    # Checkpoint and resume
    # THUDM/slime#1547
    Mutation("schedule-behind", "the schedule resumes a step behind", "dp", _schedule_a_step_behind),
    # mosaicml/streaming#869
    Mutation("first-draws", "a resumed epoch is augmented as the first", "tp", _resumes_with_first_draws),
    Mutation("adam-counts-again", "Adam's step is 0 on resume", "ddp", _adam_counts_again, ADAM),
    # KempnerInstitute/KempnerForge#115
    Mutation("second-moments", "Adam's second moments are lost on resume", "fsdp2", _second_moments_lost, ADAM),
    Mutation("narrow-momentum", "momentum resumes in float32", "ddp", _momentum_in_float32),
    # pytorch/pytorch#1489
    Mutation("momenta-of-neighbours", "momentum resumes in another order", "fsdp2", _momenta_of_neighbours),
    Mutation("counts-of-all", "each rank resumes with the counts of all", "ddp", _counts_of_all_in_each),
    # Lightning-AI/pytorch-lightning#20185
    Mutation("best-of-before", "best.ckpt has the weights of the step before", "single", _best_of_step_before),
    Mutation("audit-anew", "the sample audit forgets on resume the epochs before", "ddp_spawn", _audit_begins_anew),
    Mutation("header-as-row", "the header of metrics.csv counts as a row", "ddp", _header_counted_as_row),
    Mutation("buffers-not-restored", "running statistics start again on resume", "mp", _buffers_not_restored),
    # pytorch/pytorch#140900
    Mutation("fresh-rate", "resumes with the peak rate", "ddp_mp", _rate_of_fresh_optimizer, devices=4),
    # Lightning-AI/pytorch-lightning#850
    Mutation("epoch-ahead", "the file's epoch is one too high", "dp", _epoch_ahead),
    # Hard sizes and the second epoch
    # huggingface/transformers#34191
    Mutation("as-if-full", "a ragged batch is divided by the full size", "fsdp2", _as_if_full),
    Mutation("first-augmentation", "every epoch is augmented as the first", "ddp_spawn", _draws_of_first_epoch),
    # huggingface/accelerate#2831
    Mutation("old-gradient", "gradients are zeroed once an epoch", "mp-micro", _gradient_of_last_step),
    Mutation("decays-twice", "weight decay acts twice in a ragged step", "tp", _decays_twice),
    # huggingface/accelerate#963
    Mutation("schedule-per-microbatch", "the schedule also steps between steps", "dp", _schedule_per_microbatch),
    Mutation("odd-sample", "one rank leaves out the odd sample of its part", "ddp", in_last(_odd_sample_dropped)),
    Mutation("no-step-at-end", "the schedule misses the last step of an epoch", "ddp_spawn", _no_schedule_at_epoch_end),
    Mutation("momentum-of-epoch", "every epoch begins without momentum", "mp", _momentum_of_one_epoch),
    Mutation("loss-of-epochs", "train/loss is not reset", "mp", _loss_of_all_epochs),
    Mutation("equal-microbatches", "unequal microbatches have equal weight", "pp", _equal_microbatches),
    # Reduction
    Mutation("over-all", "pipelines divide by all processes", "ddp_pp", _averaged_over_all, UNCUT, devices=4),
    Mutation("stage-over-devices", "a stage divides by devices", "ddp_mp", _second_stage_over_devices, devices=4),
    # pytorch/torchtitan#596
    Mutation("pipelines-in-norm", "the norm adds every pipeline", "ddp_pp", _every_copy_in_norm, PIPELINE, devices=4),
    # NVIDIA-NeMo/RL#3788
    Mutation("copies-in-norm", "the norm adds every copy", "tp", _every_copy_in_norm, PIPELINE),
    Mutation("summed-weight", "BatchNorm's weight has summed gradients", "ddp-sync", _summed_weight_of_batchnorm),
    Mutation("narrow-reduction", "gradients are averaged in float32", "ddp", _reduced_in_float32),
    # pytorch/pytorch#22192
    Mutation("equal-processes", "unequal processes have equal weight in a mean", "ddp-sync", _equal_processes),
    Mutation("own-count", "running variances use a process's count", "ddp-sync", _unbiased_by_own_count),
    # pytorch/pytorch#36382
    Mutation("own-count-backward", "backward uses a process's count", "ddp-sync", _backward_by_own_count),
    Mutation("divided-twice", "a tensor's gradient is divided twice", "fsdp2", _divided_twice),
    # huggingface/text-generation-inference#1036
    Mutation("bias-of-every-rank", "each rank adds the bias", "tp", _bias_of_every_rank),
    Mutation("summed-twice", "a sum's gradient is summed again", "tp", _summed_in_both_passes),
    Mutation("other-labels", "microbatches have each other's labels", "pp", _labels_of_other_microbatch),
    Mutation("mean-of-replicas", "the loss is the mean of the replicas' means", "dp", _mean_of_replicas),
    # huggingface/accelerate#1624
    Mutation("no-sync-leaks", "a new epoch begins without averages", "ddp_spawn", _no_sync_into_new_epoch),
    Mutation("parts-over-all", "tp's parts divide by all", "fsdp2-tp", _tensor_parts_over_all, devices=4),
]
