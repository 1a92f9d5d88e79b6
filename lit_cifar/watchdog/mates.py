"""The processes of a run that are on the same machine as this one, which sees their state and can kill them."""

from collections.abc import Callable, Iterable

from lit_cifar.watchdog import process_info as process
from lit_cifar.watchdog.heartbeat import Heartbeat
from lit_cifar.watchdog.process_info import Sight


class Mates:
    """The other ranks on this machine, except those in another container, which cannot be seen from here.

    Attributes:
        exit_codes: Returns exit codes, as of `Popen`, of the processes that this one has started, by pid: only the
            parent knows them.
    """

    def __init__(self, everyone: Iterable[Heartbeat], own: Heartbeat) -> None:
        others = [beat for beat in everyone if beat.host == own.host and beat.rank != own.rank]
        # One that has sent a heartbeat and is not found is in another container.
        self._beats = {beat.rank: beat for beat in others if process.look_at(beat.pid, beat.started).state != "gone"}
        self._gone: dict[int, Sight] = {}
        self.exit_codes: Callable[[], dict[int, int]] = dict

    def look(self) -> dict[int, Sight]:
        """The state of each."""
        codes = self.exit_codes()
        sights = {}
        for rank, beat in self._beats.items():
            if rank not in self._gone:
                sight = process.look_at(beat.pid, beat.started)
                code = codes.get(beat.pid)
                sights[rank] = sight if code is None else Sight("gone", process.ending(code))
        self._gone |= {rank: sight for rank, sight in sights.items() if sight.state == "gone"}
        return sights | self._gone

    def kill(self, rank: int) -> None:
        """Kill it, if it is one of them and still there."""
        if rank in self._beats:
            process.kill(self._beats[rank].pid, self._beats[rank].started)
