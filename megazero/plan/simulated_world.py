"""Simulates some ranks of a world of any size, and compares the operations of the ranks of each group.

    rank 4   all_reduce 1,024 fp32 over tp | all_gather of weights 3 | receive 2,048 bf16 from rank 0
    rank 5   all_reduce 1,024 fp32 over tp | all_reduce ...            the group's 2nd operations differ: DifferError

A rank that is not simulated is assumed to do the same as a simulated rank of its stage.  The operations of a group are
paired by their number in a channel, as the real backends pair them; messages are paired by sender, receiver and number.  A
wait ends when all simulated ranks of the group have started the operation, so a run that would hang hangs here, too.

Ranks are programs that wait for each other, and one of them runs at a time:

    rank 0   runs ---- waits for rank 1 ............ runs
    rank 1             runs ------ waits for rank 0        if no rank can go on, the run hangs; each wait is reported

Each rank has its own thread, because torch's modes belong to a thread.  Since only one runs at a time, the result does not
depend on their speed.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from megazero.parallel_state import Axis, RankGrid
from megazero.parallel_state.axis import Transfers, Wait
from megazero.settings import listed

_CHANNELS = {"all_gather": "gather", "broadcast": "broadcast"}  # all others in one; NCCL has one for all


class StoppedError(BaseException):
    """Raised in a waiting program to end it, because another program has failed."""


class Lockstep:
    """Runs programs in turns: a program that waits or ends passes the turn to another.

    Attributes:
        failed: number and error of the first program that raised; None if none did.
        waiting: what each program waits for, if none can go on; otherwise empty.
    """

    def __init__(self) -> None:
        self.failed: tuple[int, Exception] | None = None
        self.waiting: dict[int, str] = {}
        self._turns: dict[int, threading.Semaphore] = {}
        self._waits: dict[int, tuple[Callable[[], bool], str]] = {}  # until when, and what each does meanwhile
        self._stops = False

    def run(self, programs: Mapping[int, Callable[[], None]]) -> None:
        """Run all programs until they have ended, one fails, or all that remain are waiting."""
        self._turns = {number: threading.Semaphore(0) for number in programs}
        self._waits = dict.fromkeys(programs, (lambda: True, "has not begun"))
        threads = [threading.Thread(target=self._run, args=item, daemon=True) for item in programs.items()]
        for thread in threads:
            thread.start()
        self._pass_on()
        for thread in threads:
            thread.join()

    def wait_until(self, number: int, ready: Callable[[], bool], doing: str) -> None:
        """Let other programs run until `ready()` is true.

        Args:
            number: the number of the calling program.
            doing: a description of what it waits for.
        """
        if ready():
            return
        self._waits[number] = ready, doing
        self._pass_on()
        self._turns[number].acquire()
        if self._stops:
            raise StoppedError

    def _pass_on(self) -> None:
        """Give the turn to the first program that can go on.  If there is none, stop all, one after another."""
        able = next((number for number, (ready, _) in self._waits.items() if self._stops or ready()), None)
        if able is None and self._waits:
            self.waiting, self._stops = {number: doing for number, (_, doing) in self._waits.items()}, True
            able = next(iter(self._waits))
        if able is not None:
            del self._waits[able]
            self._turns[able].release()

    def _run(self, number: int, program: Callable[[], None]) -> None:
        self._turns[number].acquire()
        try:
            if not self._stops:
                program()
        except StoppedError:
            pass
        except Exception as error:
            if self.failed is None and not self._stops:
                self.failed = number, error
            self._stops = True
        finally:
            self._pass_on()


class DifferError(Exception):
    """Ranks of a group have started different operations."""


class Post(NamedTuple):
    """An operation that a rank starts.  The other ranks of the group must start an equal one."""

    name: str
    what: str  # how many of which type
    label: str = ""

    def __str__(self) -> str:
        return " ".join(filter(None, (self.name, self.what, self.label and f"({self.label})")))


def tensor_text(tensor: Tensor) -> str:
    """Describe a tensor: `1,024 fp32`."""
    name = str(tensor.dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp")
    return f"{tensor.numel():,} {name}"


class SimulatedWorld:
    """The operations that simulated ranks have started, and the lockstep in which they wait for each other.

    Args:
        grid: the grid of the whole world.
        ranks: the simulated ranks, at least one of every pipeline stage.
    """

    def __init__(self, grid: RankGrid, ranks: Collection[int]) -> None:
        self.grid, self.ranks, self.lockstep = grid, frozenset(ranks), Lockstep()
        self.left: set[int] = set()  # ranks that nobody waits for any more
        self._posts: dict[Any, dict[int, list[Post]]] = defaultdict(lambda: defaultdict(list))
        self._values: dict[tuple[int, str], list[tuple[str, Any]]] = defaultdict(list)  # by rank and name of the axis
        self._of_stage = {grid.coordinate(rank).pp: rank for rank in sorted(self.ranks, reverse=True)}  # its first rank

    def stand_ins(self, ranks: tuple[int, ...]) -> list[int]:
        """Return each rank itself if it is simulated, else a simulated rank of its stage."""
        return [rank if rank in self.ranks else self._of_stage[self.grid.coordinate(rank).pp] for rank in ranks]

    def post(self, key: Any, rank: int, ranks: Sequence[int], post: Post, where: str) -> int:
        """Start an operation, and return its number in its channel.

        Args:
            key: identity of the channel.
            rank: the rank that starts it.
            ranks: ranks of the group.
            post: the operation.
            where: a description of the group, for errors.

        Raises: DifferError: another rank of the group has started another operation under this number.
        """
        posts = self._posts[key]
        mine = posts[rank]
        number = len(mine)
        mine.append(post)
        for other, theirs in posts.items():
            if len(theirs) > number and theirs[number] != post:
                among = listed([*map(str, ranks)])
                raise DifferError(
                    f"rank {rank} starts {post} as its operation {number + 1} over {where} of ranks ({among}), where rank "
                    f"{other} starts {theirs[number]}"
                )
        return number

    def wait_for(self, key: Any, number: int, rank: int, ranks: Sequence[int], doing: str) -> None:
        """Block until all simulated ranks of a group have started operation `number` of a channel."""
        posts = self._posts[key]
        others = [other for other in ranks if other in self.ranks and other != rank]

        def is_there() -> bool:
            return all(len(posts[other]) > number or other in self.left for other in others)

        self.lockstep.wait_until(rank, is_there, doing)

    def values(self, rank: int, name: str, value: Any, axis: Axis) -> list[Any]:
        """Exchange small values over an axis; return those of all its ranks, in rank order."""
        mine = self._values[rank, axis.name]
        number = len(mine)
        mine.append((name, value))
        of_ranks = self.stand_ins(axis.ranks)
        boards = {other: self._values[other, axis.name] for other in dict.fromkeys(of_ranks)}

        def is_there() -> bool:
            return all(len(board) > number or other in self.left for other, board in boards.items())

        self.lockstep.wait_until(rank, is_there, f"{name} over {axis.name}, number {number + 1}")
        found = {other: board[number] if len(board) > number else (name, value) for other, board in boards.items()}
        for other, (theirs, _) in found.items():
            if theirs != name:
                raise DifferError(f"rank {rank} starts {name} over {axis.name}, where rank {other} starts {theirs}")
        return [found[other][1] for other in of_ranks]


class Alone:
    """The `parallel_state.Messages` of a rank that is simulated alone.

    No call waits, and all other ranks are assumed to do the same as this one.
    """

    def operation(self, name: str, tensor: Tensor, axis: Axis, label: str) -> Wait:  # noqa: ARG002
        """Start a collective operation."""
        return _nothing

    def exchange(self, sends: Transfers, receives: Transfers, axis: Axis) -> Sequence[Wait]:  # noqa: ARG002
        """Post messages, and return a wait for each, sends first."""
        return [_nothing] * (len(sends) + len(receives))

    def values(self, name: str, value: Any, axis: Axis) -> list[Any]:  # noqa: ARG002
        """Return the values of all ranks, in rank order."""
        return [value] * axis.size

    def broadcast(self, tensor: Tensor, axis: Axis, source: int) -> Wait:
        return self.operation("broadcast", tensor, axis, f"from number {source}")

    def gather(self, values: list[Any], axis: Axis) -> list[Any]:
        return [value for of_rank in self.values("gather_objects", values, axis) for value in of_rank]

    def from_first(self, value: Any, axis: Axis) -> Any:
        return self.values("from_first", value, axis)[0]

    def largest(self, numbers: Sequence[float], axis: Axis) -> list[float]:
        return [max(of_ranks) for of_ranks in zip(*self.values("largest", list(numbers), axis), strict=True)]


def _nothing() -> None:
    """Return at once: there is nothing to wait for."""


class GroupMeeting(Alone):
    """Compares the operations of a simulated rank with those of the other simulated ranks of a group, and waits for them.

    Args:
        purpose: tells apart several groups of the same ranks.
        one_channel: pair all operations by their order, as NCCL does; else gathers and broadcasts have their own order.
    """

    def __init__(
        self, world: SimulatedWorld, rank: int, ranks: tuple[int, ...], purpose: str, one_channel: bool
    ) -> None:
        self._world, self._rank, self._ranks, self._purpose = world, rank, ranks, purpose
        self._one_channel = one_channel

    def operation(self, name: str, tensor: Tensor, axis: Axis, label: str) -> Wait:
        channel = "all" if self._one_channel else _CHANNELS.get(name, "reduce")
        return self._start(channel, Post(name, tensor_text(tensor), label), axis.name)

    def made(self, number: int) -> None:
        """Take part in making the group, which is this rank's group number `number`.  All members do it together."""
        self._start("new group", Post("new_group", self._purpose, f"its group number {number}"), "all groups")()

    def _start(self, channel: Any, post: Post, where: str) -> Wait:
        key = self._ranks, self._purpose, channel
        number = self._world.post(key, self._rank, self._ranks, post, where)
        doing = f"{post} over {where}, as its operation {number + 1} there"
        return lambda: self._world.wait_for(key, number, self._rank, self._ranks, doing)

    def exchange(self, sends: Transfers, receives: Transfers, axis: Axis) -> Sequence[Wait]:
        to = [self._message(tensor, self._rank, peer, axis) for tensor, peer in sends]
        return to + [self._message(tensor, peer, self._rank, axis) for tensor, peer in receives]

    def _message(self, tensor: Tensor, sender: int, receiver: int, axis: Axis) -> Wait:
        key = self._ranks, self._purpose, (sender, receiver)
        post = Post(f"a message from rank {sender} to rank {receiver} of", tensor_text(tensor))
        number = self._world.post(key, self._rank, (sender, receiver), post, axis.name)
        doing = f"{post} over {axis.name}, the pair's number {number + 1}"
        return lambda: self._world.wait_for(key, number, self._rank, (sender, receiver), doing)

    def values(self, name: str, value: Any, axis: Axis) -> list[Any]:
        return self._world.values(self._rank, name, value, axis)
