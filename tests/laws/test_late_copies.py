"""Copies of offloaded state beside the computation: whenever they happen, the run keeps its bits and takes no more memory.

A stand-in for a GPU's streams of copies runs on the CPU, whose "device" is then other memory than its host.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from random import Random
from typing import Any
from unittest.mock import patch

import pytest
import torch
from harness import DEVICE, run_world
from worlds import LLAMA, engine_on, run_of, state_on, train_on

from megazero.comm.memory import Copier
from megazero.config import ResolvedRun
from megazero.config.schema import OffloadConfig
from megazero.zero.offload import give_cores
from megazero.zero.sharding import ShardingSettings


class LateStreams(Copier):
    """Work on each of two streams runs in its order, at a random later time or when it is waited for."""

    def __init__(self, seed: int) -> None:
        self._streams = [(deque[tuple[Future[Any], Callable[[], Any]]](), Random(seed)) for _ in range(2)]
        self.was_late = False

    def run(self, work: Callable[[], Any], *, to_host: bool) -> Any:
        (stream, random), mark = self._streams[to_host], Future[Any]()
        stream.append((mark, work))
        self.was_late |= len(stream) > 1
        most = random.randrange(4)
        self._advance(stream, lambda: len(stream) <= most)
        return stream, mark

    def _advance(self, stream: deque[Any], is_far_enough: Callable[[], bool]) -> None:
        while not is_far_enough():
            mark, work = stream.popleft()
            mark.set_result(work())

    def wait(self, mark: Any) -> Any:
        self._advance(mark[0], mark[1].done)
        return mark[1].result()

    def finish(self, mark: Any) -> None:
        self.wait(mark)

    def follow(self, mark: Any, work: Callable[[], object]) -> Callable[[], object]:
        """At the last moment."""
        return lambda: (self.finish(mark), work())


def _train(rank: int, runs: list[ResolvedRun], copiers: list[Copier]) -> list[Any]:
    """What runs on a device that is not the host give, and the bytes that they take."""
    plain, found, state = ShardingSettings.policy, list[Any](), state_on(rank, runs[0])
    for run, copier in zip(runs, copiers, strict=True):
        made = lambda *args, copier=copier: replace(plain(*args), on_cpu=False, copier=copier)  # noqa: E731
        with patch.object(ShardingSettings, "policy", made):
            engine = engine_on(rank, run, state=state)
        found.append((train_on(engine, run, False, True), engine.memory_bytes()))
        reducer = engine.sharded_model.reducer
        assert reducer.reductions.buffer_bytes <= reducer.reductions.most_buffer_bytes
        assert not isinstance(copier, LateStreams) or copier.was_late
        engine.sharded_model.close()
    return found


ALL, WEIGHTS = {"optimizer": "cpu", "parameters": "cpu"}, {"parameters": "cpu"}
CASES: list[tuple[int, dict[str, Any]]] = [
    (1, {"stage": 3, "offload": ALL}),
    *[(2, {"stage": stage, "offload": {"optimizer": "cpu"}}) for stage in range(3)],
    (2, {"stage": 2, "quantized_gradients": 8, "offload": {"optimizer": "cpu", "ratio": 0.5}}),
    (2, {"stage": 3, "offload": ALL}),
    (2, {"stage": 3, "reduce": "step", "prefetch_bytes": 1 << 20, "offload": ALL}),
    (2, {"stage": 3, "quantized_weights": True, "offload": WEIGHTS}),
    (4, {"stage": 3, "shard_group_size": 2, "offload": ALL}),
]


@pytest.mark.skipif(DEVICE.type != "cpu", reason="the stand-in knows no device")
@pytest.mark.parametrize(("world", "zero"), CASES, ids=str)
def test_whenever_copies_happen_a_run_has_its_bits_and_its_memory(world: int, zero: dict[str, Any]) -> None:
    precision, training = {"dtype": "fp32" if zero["stage"] in (0, 1) else "bf16"}, {"accumulation": 2}
    cases = [zero | {"offload": {}}, *[zero] * 4]
    runs = [run_of(world, model=LLAMA, zero=one, precision=precision, training=training) for one in cases]
    results = run_world(world, _train, runs, [Copier(), Copier(), *map(LateStreams, range(3))])
    (wanted, _), (_, nbytes), *late = results[0]
    for got, taken in late:
        assert taken == nbytes
        assert got["loss"] == wanted["loss"]
        for kind in ("gradients", "masters", "weights"):
            for name, tensor in wanted[kind].items():
                assert torch.equal(got[kind][name], tensor), f"{kind} of {name}"


def test_the_hosts_optimizer_has_this_ranks_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", given.append)
    monkeypatch.setattr("megazero.zero.offload.cores_of_rank", lambda ranks: 64 // ranks)
    for place, device, ranks in (("cpu", "cuda", 8), ("nvme", "cuda", 4), ("none", "cuda", 8), ("cpu", "cpu", 8)):
        give_cores(OffloadConfig(optimizer=place, nvme_path="."), torch.device(device), ranks)
    assert given == [8, 16]
