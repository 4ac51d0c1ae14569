"""Activations in an arena, on the host or in one piece: the bits of the run, whenever copies end; nothing left behind."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import DEVICE, run_world
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

sys.path.insert(0, str(Path(__file__).parent / "laws"))
from worlds import LLAMA, engine_on, micro_batches, run_of, state_on

from megazero.comm.backend import storage_of
from megazero.comm.memory import ALIGNMENT, Copier, StreamCopier
from megazero.config import ResolvedRun
from megazero.layers.activation_offload import ActivationStore
from megazero.models.activation_config import PRESETS

NUMEL = 256
BYTES = 4 * NUMEL


class _LateCopy:
    def __init__(self, target: Tensor, source: Tensor) -> None:
        self.target, self.source = weakref.ref(target), weakref.ref(source)


class LateCopier(Copier):
    """Each copy ends at a random later time, or when it is waited for, in any order; until then its target holds NaN.

    A copy whose tensors are let go before it has ended is wrong.  What is on the device is measured with every copy.
    """

    def __init__(self, seed: int) -> None:
        self._random, self._under_way = Random(seed), list[_LateCopy]()
        self._on_host, self._on_device = set[int](), dict[int, tuple[StorageWeakRef, int]]()
        self.started = self.most_on_device = 0
        self.wrong: list[str] = []

    def start(self, target: Tensor, source: Tensor) -> _LateCopy:
        while self._under_way and self._random.random() < 0.4:
            self._end(self._random.choice(self._under_way))
        target.fill_(0xFF)  # NaN in every format
        self._under_way.append(_LateCopy(target, source))
        self.started += 1
        comes_back = source.data_ptr() in self._on_host  # buffers on the host are not freed
        if not comes_back:
            self._on_host.add(target.data_ptr())
        self._measure(target if comes_back else source)
        return self._under_way[-1]

    def wait(self, mark: _LateCopy) -> None:
        if mark in self._under_way:
            self._end(mark)

    def _end(self, copy: _LateCopy) -> None:
        self._under_way.remove(copy)
        target, source = copy.target(), copy.source()
        if target is None or source is None:
            self.wrong.append("memory of a copy was given back before it had ended")
        else:
            target.copy_(source)

    def _measure(self, on_device: Tensor) -> None:
        storage = StorageWeakRef(on_device.untyped_storage())
        self._on_device[storage.cdata] = storage, on_device.nbytes
        self._on_device = {at: one for at, one in self._on_device.items() if not one[0].expired()}
        self.most_on_device = max(self.most_on_device, sum(nbytes for _, nbytes in self._on_device.values()))


def _offload(copier: Copier) -> ActivationStore:
    offload = ActivationStore(torch.device("cpu"))
    offload.copier, offload.smallest_bytes = copier, 1
    return offload


def _layer(x: Tensor) -> Tensor:
    return x.exp().neg().sigmoid()  # saves the results of exp and of sigmoid


def _forward(
    offload: ActivationStore, x: Tensor, layers: int, run: Callable[[Tensor], Tensor] = _layer, name: str = "pass"
) -> Tensor:
    offload.begin_pass(name)
    for number in range(layers):
        with offload.layer(is_last=number == layers - 1):
            x = run(x)
    return x.sum()


def _leaf() -> Tensor:
    return torch.linspace(-1, 1, NUMEL).requires_grad_()


@pytest.mark.parametrize("seed", range(3))
def test_two_layers_are_on_the_device(seed: int) -> None:
    copier, layers = LateCopier(seed), 8
    offload, x = _offload(copier), _leaf()
    loss = _forward(offload, x, layers)
    assert offload.pool.nbytes == offload.pool.nbytes_in_use == 2 * BYTES * layers
    assert copier.most_on_device == 2 * 2 * BYTES
    assert copier.started == 2 * layers
    loss.backward()
    assert copier.most_on_device == 2 * 2 * BYTES
    assert copier.started == 2 * layers + 2 * (layers - 2)  # the last two had not left
    assert offload.pool.nbytes_in_use == 0
    wanted = _leaf()
    y = wanted
    for _ in range(layers):
        y = _layer(y)
    y.sum().backward()
    assert x.grad is not None
    assert wanted.grad is not None
    assert torch.equal(x.grad, wanted.grad)
    assert not copier.wrong


def test_a_layer_comes_back_while_the_one_after_it_runs() -> None:
    copier = LateCopier(0)
    offload, began = _offload(copier), []
    first, second = _leaf(), _leaf()
    waiting = _forward(offload, first, 4, name="first")

    def run(x: Tensor) -> Tensor:
        y = _layer(x)
        y.register_hook(lambda _: began.append(copier.started))
        return y

    loss = _forward(offload, second, 4, run, name="second")
    forward = copier.started
    assert forward == 2 * 8
    offload.expect("first")
    loss.backward()
    # Layers 3 and 2 have not left; the copies of 1 and 0 start before their backward, those of the next pass with layer 0.
    assert began == [forward, forward, forward + 2, forward + 4]
    assert copier.started == forward + 2 + 2 + 2
    waiting.backward()
    assert torch.equal(first.grad, second.grad)  # type: ignore[arg-type]
    assert copier.started == forward + 2 * 2 + 2 * 4
    assert offload.pool.nbytes_in_use == 0


def test_a_storage_that_is_kept_twice_is_copied_once() -> None:
    def run(x: Tensor) -> Tensor:
        a, b = x.view(2, -1).sin().unbind()  # the sine saves x, the products two views of its result
        return torch.cat([a * b, b * a])

    def shared(x: Tensor) -> Tensor:
        return x.square() + held.square()  # held by all layers

    # x of layer 0 stays.  Of the first function layer 0 has left and comes back; what all layers share has not left.
    for function, storages, come_back in ((run, 2 * 3 - 1, 1), (shared, 3 + 1 - 1, 0)):
        copier = LateCopier(1)
        offload, held = _offload(copier), _leaf()
        x = _leaf()
        offload.stay([x])
        _forward(offload, x, 3, function).backward()
        plain, plain_held = _leaf(), held.detach().clone().requires_grad_()
        had, held = held, plain_held
        y = plain
        for _ in range(3):
            y = function(y)
        y.sum().backward()
        assert torch.equal(x.grad, plain.grad)  # type: ignore[arg-type]
        assert had.grad is None or torch.equal(had.grad, plain_held.grad)  # type: ignore[arg-type]
        assert copier.started == storages + come_back
        assert offload.pool.nbytes == storages * BYTES
        assert offload.pool.nbytes_in_use == 0


def test_the_graph_may_be_used_twice_and_given_up() -> None:
    copier = LateCopier(2)
    offload, x = _offload(copier), _leaf()
    loss = _forward(offload, x, 5)
    once, twice = (torch.autograd.grad(loss, x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(once, twice)
    assert copier.most_on_device == 2 * 2 * BYTES
    assert offload.pool.nbytes_in_use == 2 * 5 * BYTES
    del loss
    assert offload.pool.nbytes_in_use == 0

    def fail(x: Tensor) -> Tensor:
        _layer(x)
        raise ValueError("a forward that fails")

    with pytest.raises(ValueError, match="fails"):
        _forward(offload, x, 5, fail)
    assert offload.pool.nbytes_in_use == 0
    (again,) = torch.autograd.grad(_forward(offload, x, 5), x)
    assert torch.equal(again, once)
    assert offload.pool.nbytes == 2 * 5 * BYTES
    assert not copier.wrong


def test_a_change_in_place_is_refused_as_autograd_refuses_it() -> None:
    for layers in (1, 4):  # while it is on the device, and after
        offload = _offload(LateCopier(3))

        def run(x: Tensor) -> Tensor:
            y = x.exp()
            return y.mul_(2)

        y = _forward(offload, _leaf(), layers, run)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()
        del y
        assert offload.pool.nbytes_in_use == 0


def test_a_storage_that_has_changed_is_kept_anew() -> None:
    x, plain, unused = _leaf(), _leaf(), []

    def run(x: Tensor) -> Tensor:
        y = x.sin()
        unused.append(y.square())  # saves y; no backward comes
        return y.mul_(2).square()

    _forward(_offload(LateCopier(4)), x, 1, run).backward()
    run(plain).sum().backward()
    assert torch.equal(x.grad, plain.grad)  # type: ignore[arg-type]


def test_small_tensors_and_those_that_stay_are_not_copied() -> None:
    copier = LateCopier(0)
    offload, table = _offload(copier), torch.randn(NUMEL)
    offload.smallest_bytes = BYTES
    offload.stay([table])
    _forward(offload, _leaf(), 3, lambda x: (x * table).view(2, -1)[:1].clone().repeat(1, 2).view(-1)).backward()
    _forward(offload, _leaf()[: NUMEL // 2].clone(), 3).backward()
    assert copier.started == 0


SCHEDULES: dict[str, dict[str, Any]] = {
    "gpipe": {"schedule": "gpipe"},
    "1f1b": {},
    "interleaved": {"schedule": "interleaved", "virtual_stages": 2},
    "zb-h1": {"schedule": "zb-h1"},
    "zbv": {"schedule": "zbv"},
}


def _run(parallel: dict[str, Any], activations: dict[str, Any], **sections: dict[str, Any]) -> ResolvedRun:
    model, training = (
        LLAMA | {"num_layers": 6 if "pp" in parallel else 4},
        {"accumulation": 2 if "pp" not in parallel else 4},
    )
    return run_of(2, model=model, parallel=parallel, training=training, activations=activations, **sections)


def _steps(rank: int, runs: Sequence[ResolvedRun]) -> list[tuple[list[Tensor], dict[str, Any]]]:
    """For each run the gradients of two steps on this rank, and what its offload says."""
    state, found = state_on(rank, runs[0]), []
    for number, run in enumerate(runs):
        engine = engine_on(rank, run, state=state)
        offload, said = engine.offload, dict[str, Any]()
        copier = LateCopier(number)
        if offload is not None:
            offload.smallest_bytes = 64  # more than the ids of samples
            if DEVICE.type == "cpu":
                offload.copier = copier
        gradients = []
        for step in range(2):
            engine.compute_gradients(micro_batches(run, state, step))
            gradients += [bucket.gradient.detach().cpu().clone() for bucket in engine.sharded_model.parameters.buckets]
            if offload is not None:
                said[f"bytes {step}"] = offload.pool.nbytes
                said["left"] = offload.pool.nbytes_in_use
        said |= {"copies": copier.started, "wrong": copier.wrong, "memory": engine.memory_bytes()}
        found.append((gradients, said))
        engine.sharded_model.close()
    return found


def _assert_same_bits(base: Callable[[str], ResolvedRun], cases: Sequence[tuple[str, ResolvedRun]]) -> list[int]:
    """On two ranks, each case beside `base` of its name without a policy; the bytes in the arena of each case."""
    names = list(dict.fromkeys(name for name, _ in cases))
    runs = [base(name) for name in names] + [run for _, run in cases]
    for results in run_world(2, _steps, runs):
        plain = dict(zip(names, (gradients for gradients, _ in results), strict=False))
        for (name, run), (gradients, said) in zip(cases, results[len(names) :], strict=True):
            case = f"{name}: {run.config.parallel.schedule}, {run.config.activations}"
            assert not {"activations on host", "activation_arena"} & set(results[0][1]["memory"])
            assert not said["wrong"], case
            on_host = run.config.activations.offload == "host"
            buffers = 0 if on_host else said["memory"]["gradient_buffers"]
            assert buffers <= said["left"] < buffers + 4 * ALIGNMENT, case  # up to 4 buffers, each rounded up
            kept = said["memory"]["activations on host" if on_host else "activation_arena"]
            assert said["bytes 1"] == said["bytes 0"] == kept + buffers > buffers, case
            assert DEVICE.type != "cpu" or said["copies"] > 0, case
            assert all(map(torch.equal, gradients, plain[name])), case
            assert any(bool(one.any()) for one in gradients), case
    return [said["bytes 0"] - said["left"] for _, said in results[len(names) :]]


POLICIES: dict[str, dict[str, Any]] = {name: {"recompute": name, "offload": "host"} for name in PRESETS}
POLICIES["in one piece"] = {"recompute": "none", "contiguous": True}
POLICIES["full, in one piece"] = {"recompute": "full", "contiguous": True}
POLICIES["some"] = {"recompute": "full", "offload": "host", "offload_layers": 1, "keep_attention": True}


def test_every_schedule_gives_the_same_bits() -> None:
    """Each schedule with two policies, each policy with one or two schedules."""
    dtype = {name: "bf16" if name in ("interleaved", "zbv") else "fp32" for name in SCHEDULES}
    policies = list(POLICIES.values())

    def run(name: str, **activations: Any) -> ResolvedRun:
        return _run({"pp": 2} | SCHEDULES[name], activations, precision={"dtype": dtype[name]})

    chosen = [(name, policies[(2 * number + more) % 6]) for number, name in enumerate(SCHEDULES) for more in (0, 3)]
    beside = {name: name if dtype[name] == "bf16" else "1f1b" for name in SCHEDULES}  # the others place layers alike
    _assert_same_bits(run, [(beside[name], run(name, **policy)) for name, policy in chosen])


def test_every_cut_gives_the_same_bits() -> None:
    shapes: dict[str, dict[str, Any]] = {
        "stage 3": {"parallel": {}, "zero": {"stage": 3}},
        "tp": {"parallel": {"tp": 2, "sequence_parallel": False}},
        "sp, stage 3": {"parallel": {"tp": 2, "sequence_parallel": True}, "zero": {"stage": 3}},
    }

    def run(name: str, **activations: Any) -> ResolvedRun:
        return _run(activations=activations, **shapes[name])

    for cases in (
        [("stage 3", "none"), ("stage 3", "full"), ("stage 3", "some"), ("stage 3", "full, in one piece")],
        [("tp", "selective"), ("tp", "full"), ("sp, stage 3", "full"), ("sp, stage 3", "in one piece")],
    ):
        runs = [
            (name, run(name, **POLICIES[policy], partition=name == "tp" and policy != "none")) for name, policy in cases
        ]
        on_host = dict(zip(cases, _assert_same_bits(run, runs), strict=True))
        for (name, policy), nbytes in on_host.items():
            if policy.startswith("full"):  # nothing but the input of each layer, half of it on a rank of tp
                assert nbytes == 4 * 4 * 16 * 2 * 32, name


def test_pages_are_locked_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    locked: list[int] = []
    runtime = SimpleNamespace(cudaHostRegister=lambda _, nbytes, __: locked.append(nbytes) or 0)
    runtime.cudaHostUnregister = lambda _: None
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    offload = _offload(Copier())
    layers = 5
    losses = [_forward(offload, _leaf(), layers), _forward(offload, _leaf(), 1)]
    losses.pop().backward()
    assert locked == []
    offload.begin_step()  # while something is kept
    assert locked == []
    losses.pop().backward()
    for _ in range(2):  # once
        offload.begin_step()
        assert locked == [2 * BYTES * (layers + 1)] == [offload.pool.nbytes]
        _forward(offload, _leaf(), layers).backward()
    del offload
    gc.collect()  # before the runtime is the real one again


@pytest.mark.parametrize("first", [0, -1], ids=["oldest first", "newest first"])
def test_a_thousand_steps_of_varying_size_take_no_more_than_the_largest(first: int) -> None:
    """Micro-batches of random sizes, up to three under way at once, in the order of their backwards."""
    random, offload, layers, longest = Random(0), _offload(Copier()), 4, 40
    for step in range(1000):
        offload.begin_step()
        waiting: list[Tensor] = []
        for number in range(3 if step == 0 else random.randint(1, 6)):
            if len(waiting) == 3:
                waiting.pop(first).backward()
            x = torch.ones(128 * (longest if step == 0 else random.randint(1, longest))).requires_grad_()
            waiting.append(_forward(offload, x, layers, name=f"micro-batch {number}"))
        while waiting:
            waiting.pop(first).backward()
        assert offload.pool.nbytes_in_use == 0
        assert offload.pool.nbytes == 3 * 2 * layers * 4 * 128 * longest


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_streams_wait_for_each_other() -> None:
    device, size = torch.device("cuda"), 1 << 22
    offload = ActivationStore(device)
    assert isinstance(offload.copier, StreamCopier)
    x, plain = (torch.linspace(-1, 1, size, device=device).requires_grad_() for _ in range(2))
    y = plain
    for _ in range(6):
        y = _layer(y)
    y.sum().backward()
    for _ in range(4):
        x.grad = None
        offload.begin_step()
        _forward(offload, x, 6).backward()
        assert torch.equal(x.grad, plain.grad)  # type: ignore[arg-type]
    assert offload.pool.nbytes_in_use == 0


def _vary(rank: int, run: ResolvedRun) -> list[tuple[int, int, int]]:
    """Of steps with micro-batches of 1 to 4 samples: pieces and bytes of the arena, and of CUDA's allocator."""
    engine = engine_on(rank, run)
    store = engine.offload
    assert store is not None
    store.smallest_bytes = 64
    random, found = Random(1), []
    for step in range(24):
        size = 4 if step == 0 else random.choice([1, 2, 4])
        engine.train_step(micro_batches(replace(run, micro_batch_size=size), engine.state, step), 1e-3)
        reserved = torch.cuda.memory_reserved() if DEVICE.type == "cuda" else 0
        found.append((len(store.pool._buffers), store.pool.nbytes, reserved))
    pool = engine.sharded_model.reducer.reductions.pool
    assert {storage_of(one) for one in pool._free} <= {storage_of(store.pool._buffers[0])}
    assert engine.memory_bytes()["activation_arena"] == store.pool.nbytes - pool.nbytes > 0
    engine.sharded_model.close()
    return found


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_one_arena_serves_steps_of_varying_size(stage: int) -> None:
    """Activations and the buffers of gradients, from the first step's end on; the largest step came first."""
    precision = {"dtype": "bf16", "reduce_dtype": "bf16"}  # at stage 0 gradients travel in buffers too
    activations = {"recompute": "selective", "contiguous": True}
    run = _run({}, activations, zero={"stage": stage}, precision=precision)
    for found in run_world(2, _vary, run):
        assert len(set(found[1:])) == 1, found
        assert found[1][0] == 1
