"""How much of gloo's messages hides behind products, with nothing else around: what no step between hosts can be below.

    python -m benchmarks.hidden_messages [--mbit 1000] [--megabytes 14.7] [--messages 16] [--rounds 10]

Two ranks on two hosts (see benchmarks/hosts_net.py; it needs root and iproute2), one thread each.  All compute the same
products; the bytes that go each way are those of a step of data parallelism of `tiny`.

products            alone
messages            alone
both, inline        the computation hands the messages to gloo
both, by a thread   a `Worker` does
both, batch job     a `Worker` does, and the process's threads are a batch job's: as in a run
ZeRO-1's order      the same, in a step of ZeRO-1: a third of the products wait for one message each, in order, two thirds
                    send one each, a number is summed over the ranks when these have arrived, and then the messages leave
                    for which the next step's first third waits.  As many messages each way, of half the bytes, in each pass
over products       the step over that of products alone, the median of the rounds, with its least and most
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor

from benchmarks.hosts_net import Network, NoHostsError, network_of
from benchmarks.report import markdown
from benchmarks.setting import positive
from benchmarks.worlds import World
from megazero.comm.collectives import all_reduce
from megazero.comm.messages import swap, wait_for
from megazero.comm.process_groups import schedule_as_batch_job
from megazero.comm.worker import Worker, at_once, let_begin
from megazero.parallel_state import ParallelState, RankGrid
from megazero.parallel_state.groups import Wait

ALONE, IN_ORDER = "products", "ZeRO-1's order"
_SHAPE = (256, 256, 704)  # of a product, as those of `tiny`
_TAG = 7


@dataclass(frozen=True)
class Work:
    """What a step does: `products` in `messages` groups, beside as many messages of `numel` fp32 numbers each way.

    Three times as many products as messages divide without a rest.
    """

    products: int
    messages: int
    numel: int
    world: int = 2

    def batch(self, step: int, dp_index: int) -> tuple[Tensor, ...]:
        """A step needs nothing."""
        return ()


class Rank:
    """One rank.

    Args:
        computes, sends: what of the work it does.
        by_thread: a `Worker` hands messages over.
        is_batch_job: see `schedule_as_batch_job`.
    """

    def __init__(
        self, work: Work, rank: int, *, computes: bool, sends: bool, by_thread: bool = False, is_batch_job: bool = False
    ) -> None:
        if is_batch_job:
            schedule_as_batch_job()
        m, k, n = _SHAPE
        self.dp_index, self._work = rank, work
        self._a, self._b = torch.randn(m, k), torch.randn(k, n)
        self._axis = ParallelState(RankGrid(dp=2), rank, shares_memory=False).dp
        shape = (work.messages, 2, work.numel)
        self._leaving, self._arriving = torch.randn(shape), torch.empty(shape)
        self._products = work.products // work.messages if computes else 0
        self._messages = range(work.messages) if sends else ()
        self._post = Worker("messages", is_brief=True).post if by_thread else at_once

    def step(self) -> None:
        """One step."""
        waits = []
        for number in range(self._work.messages):
            if number in self._messages:
                waits.append(self._start(self._arriving[number], self._leaving[number]))
            self._compute(self._products)
        for wait in waits:
            wait()

    def _start(self, arriving: Tensor, leaving: Tensor) -> Wait:
        wait = self._post(lambda: partial(wait_for, swap(arriving, leaving, self._axis, _TAG)))
        let_begin(wait)
        return wait

    def _compute(self, products: int) -> None:
        for _ in range(products):
            torch.mm(self._a, self._b)


class RankInOrder(Rank):
    """One rank, whose messages wait for one another as those of ZeRO-1 do."""

    def __init__(self, work: Work, rank: int) -> None:
        super().__init__(work, rank, computes=True, sends=True, by_thread=True, is_batch_job=True)
        self._norm, self._gathers = torch.ones(1), list[Wait]()

    def step(self) -> None:
        """One step."""
        half, third = self._work.numel // 2, self._work.products // self._work.messages // 3
        for number in range(self._work.messages):
            if self._gathers:
                self._gathers[number]()
            self._compute(third)
        reductions = []
        for number in range(self._work.messages):
            self._compute(2 * third)
            reductions.append(self._start(self._arriving[number, :, :half], self._leaving[number, :, :half]))
        for wait in reductions:
            wait()
        all_reduce(self._norm, self._axis, "max").wait()
        both = zip(self._arriving[..., half:], self._leaving[..., half:], strict=True)
        self._gathers = [self._start(*parts) for parts in both]


KINDS = {
    ALONE: partial(Rank, computes=True, sends=False),
    "messages": partial(Rank, computes=False, sends=True),
    "both, inline": partial(Rank, computes=True, sends=True),
    "both, by a thread": partial(Rank, computes=True, sends=True, by_thread=True),
    "both, batch job": partial(Rank, computes=True, sends=True, by_thread=True, is_batch_job=True),
    IN_ORDER: RankInOrder,
}


def measure(work: Work, network: Network, rounds: int, steps: int = 3) -> list[list[str]]:
    """A row for each kind: milliseconds, and over products alone."""
    worlds = {name: World(name, partial(build, work), work, network) for name, build in KINDS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in worlds}
    try:
        for number in range(rounds + 1):
            names = list(worlds)
            first = number % len(names)
            for name in names[first:] + names[:first]:
                found = median(worlds[name].turn(range(1 + steps), run_in=1).seconds)
                seconds[name] += [found] if number else []  # the first round connects
    finally:
        for world in worlds.values():
            world.close()
    rows = []
    for name, its in seconds.items():
        over = [one / alone for one, alone in zip(its, seconds[ALONE], strict=True)]
        shown = "" if name == "messages" else f"{median(over):.2f} ({min(over):.2f} to {max(over):.2f})"
        rows.append([name, f"{median(its) * 1e3:.1f} ({min(its) * 1e3:.1f} to {max(its) * 1e3:.1f})", shown])
    return rows


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=positive, default=1000, help="rate of each direction of the link")
    parser.add_argument("--megabytes", type=float, default=14.7, help="of a step, each way")
    parser.add_argument("--messages", type=positive, default=16, help="of a step, each way")
    parser.add_argument(
        "--products", type=positive, default=144, help="of a step: a multiple of three times --messages"
    )
    parser.add_argument("--rounds", type=positive, default=10)
    given = parser.parse_args()
    if given.products % (3 * given.messages):
        parser.error(f"--products: {given.products} is not divisible by three times {given.messages} messages")
    work = Work(given.products, given.messages, int(given.megabytes * 1e6 / 4 / given.messages))
    try:
        with network_of(2, given.mbit) as network:
            print(markdown(("what", "ms (least to most)", "over products"), measure(work, network, given.rounds)))
    except NoHostsError as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()
