"""What a rank's chunks keep of the messages between stages."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from megazero.engine.stage_runner import ChunkRunner, StageRunner


def _runner(forward: Any, *, trains: bool = True) -> StageRunner:
    model: Any = SimpleNamespace(
        policy=SimpleNamespace(device=torch.device("cpu")),
        reducer=SimpleNamespace(close_pass=lambda chunk: None),
        parameters=SimpleNamespace(gatherer=None),
    )
    chunks = [ChunkRunner(lambda _, x: forward(*x), is_last=False)]
    return StageRunner(chunks, model, (lambda: torch.ones(())) if trains else None)


def test_a_received_tensor_is_freed_unless_an_operation_has_saved_it() -> None:
    for forward, is_saved in ((lambda x: (2 * x,), False), (lambda x: (x.square(),), True)):
        runner, x = _runner(forward), torch.randn(3, 4)
        storage = StorageWeakRef(x.untyped_storage())
        runner.forward(0, 0, (x,))
        del x
        assert storage.expired() is not is_saved


def test_what_goes_back_is_autograds_gradient() -> None:
    def forward(x: Tensor, ids: Tensor, unused: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return (x * y).t().exp() + x.t(), ids, y.sigmoid() + 0 * unused.detach()

    x, unused, y = (torch.randn(3, 3, dtype=torch.bfloat16) for _ in range(3))
    message = x, torch.arange(3), unused, y
    grads = torch.randn(3, 3, dtype=torch.bfloat16), torch.randn(3, 3, dtype=torch.bfloat16)
    runner = _runner(forward)
    sent = runner.forward(0, 7, message)
    assert not any(one.requires_grad for one in message)
    leaves = [one.clone().requires_grad_(one.is_floating_point()) for one in message]
    wanted = [one for one in forward(*leaves) if one.is_floating_point()]
    assert sent is not None
    torch.autograd.backward(wanted, list(grads))
    found = runner.backward(0, 7, grads)
    assert found is not None
    for got, leaf in zip(found, [leaves[0], leaves[2], leaves[3]], strict=True):
        assert torch.equal(got, torch.zeros_like(leaf) if leaf.grad is None else leaf.grad)
        assert got.dtype == leaf.dtype
        assert got.is_contiguous()


def test_an_evaluation_passes_messages_as_they_are() -> None:
    x = torch.randn(3)
    with torch.no_grad():
        sent = _runner(lambda x: (x,), trains=False).forward(0, 0, (x,))
    assert sent is not None
    assert sent[0] is x
    with pytest.raises(KeyError):
        _runner(lambda x: (x,)).backward(0, 0, (x,))
