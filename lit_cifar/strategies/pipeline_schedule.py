"""In which order the processes of a pipeline work, and which of them holds which stage: plain arithmetic."""

from dataclasses import dataclass
from typing import Literal

from lit_cifar.errors import ConfigError
from lit_cifar.strategies.same_bits.parts import Parts

ScheduleName = Literal["GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble"]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """In which order the processes of a pipeline work on stages and microbatches: torch's own, with their rules."""

    name: ScheduleName  # torch's name (torch.distributed.pipelining.schedules.get_schedule_class)
    num_processes: int  # processes of one pipeline

    @property
    def num_stages(self) -> int:
        return self.num_processes * stages_per_process(self.name)

    def owner(self, stage: int) -> int:
        """The process of the pipeline that holds `stage`: in turn, or there and back where the schedule is a V."""
        turn, place = divmod(stage, self.num_processes)
        return self.num_processes - 1 - place if self.name == "ZBVZeroBubble" and turn % 2 else place

    @property
    def fewest_microbatches(self) -> int:
        processes = self.num_processes
        return {"1F1B": processes, "Interleaved1F1B": processes, "ZBVZeroBubble": 2 * processes - 1}.get(self.name, 1)

    @property
    def usual_microbatches(self) -> int:
        return max(4, self.fewest_microbatches)

    def check(self, num_microbatches: int) -> None:
        """Raise a `ConfigError` unless the schedule works with so many microbatches."""
        processes, fewest = self.num_processes, self.fewest_microbatches
        if num_microbatches < fewest:
            raise ConfigError(
                f"the schedule {self.name} over {processes} processes needs at least {fewest} microbatches, "
                f"not {num_microbatches}",
                remedy=f"pass --trainer.strategy.num_microbatches={fewest} or more",
            )
        rounds = max(1, num_microbatches // processes)
        if self.name == "Interleaved1F1B" and num_microbatches % rounds:
            raise ConfigError(
                f"the schedule {self.name} over {processes} processes runs {num_microbatches} microbatches in {rounds} "
                "rounds, which does not come out even",
                remedy=f"pass --trainer.strategy.num_microbatches={rounds * processes}",
            )

    def check_parts(self, parts: Parts, *, asked: int | None) -> None:
        """Raise a `ConfigError` unless `parts` can be the microbatches, of which so many may have been asked for."""
        name = f"--virtual_replicas={parts.num_parts}"
        if self.name == "ZBVZeroBubble":
            raise ConfigError(
                f"{name} with the schedule ZBVZeroBubble, which computes the gradients of a microbatch in two pieces",
                remedy="pass --trainer.strategy.schedule=1F1B",
            )
        if asked not in (None, parts.count):
            raise ConfigError(
                f"{name} cuts the batch of a pipeline into {parts.count} microbatches, not {asked}",
                remedy=f"pass --trainer.strategy.num_microbatches={parts.count}, or leave it out",
            )
        if parts.count < (fewest := self.fewest_microbatches):
            num_pipelines = parts.num_parts // parts.count
            raise ConfigError(
                f"{name} cuts the batch of a pipeline into {parts.count} microbatches, and the schedule {self.name} "
                f"over {self.num_processes} processes needs {fewest}",
                remedy=f"pass --virtual_replicas={num_pipelines << (fewest - 1).bit_length()}",
            )
        self.check(parts.count)


def stages_per_process(name: ScheduleName) -> int:
    """How many stages a process holds under the schedule `name`."""
    return 2 if name in ("Interleaved1F1B", "ZBVZeroBubble") else 1
