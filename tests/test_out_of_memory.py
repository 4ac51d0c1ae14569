"""Where memory runs out, the error says what was wanted, what is free, what holds most, and which settings would fit."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_world
from worlds import LLAMA, LR, engine_on, micro_batches, run_of, state_on

from megazero.config import ResolvedRun, load_config
from megazero.engine import Engine
from megazero.engine.outline import schedule_of
from megazero.models.registry import FAMILIES
from megazero.plan import out_of_memory
from megazero.plan.activations import RankActivations, activations_of_ranks
from megazero.plan.out_of_memory import cutting_samples, recomputing, remedies, wanted_bytes
from megazero.training.trainer import OutOfMemoryError, explained, train

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
QUICKSTART = Path(__file__).parents[1] / "examples" / "quickstart.toml"
OF_CUDA = (
    "CUDA out of memory. Tried to allocate 20.50 GiB. GPU 0 has a total capacity of 79.15 GiB of which 3.12 GiB is free. "
    "Process 1 has 76.00 GiB memory in use."
)
OF_THE_CPU = (
    "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "4398046511104 bytes. Error code 12 (Cannot allocate memory)"
)


def test_what_was_wanted_is_read_from_the_allocators_text() -> None:
    assert wanted_bytes(OF_CUDA) == int(20.5 * 2**30)
    assert wanted_bytes(OF_THE_CPU) == 2**42
    assert wanted_bytes("HIP out of memory. Tried to allocate 512.00 MiB") == 2**29
    assert wanted_bytes("out of memory") == 0


def _device_bytes(rank: int, run: ResolvedRun) -> tuple[int, int]:
    """Model state on the device after a step with ZeRO's buffers at most, and this rank's parameters."""
    engine = engine_on(rank, run)
    engine.train_step(micro_batches(run, engine.state, 0), LR)
    kinds = ("parameters", "gradients", "optimizer", "gather_buffers")
    elements = sum(bucket.layout.numel for bucket in engine.sharded_model.parameters.buckets)
    most = engine.sharded_model.reducer.most_buffer_bytes if run.config.zero.stage >= 2 else 0
    return sum(engine.memory_bytes().get(kind, 0) for kind in kinds) + most, elements


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_setting_frees_what_it_is_said_to_free(dtype: str) -> None:
    sections: dict[str, Any] = {"model": LLAMA, "precision": {"dtype": dtype}}
    zero = {"bucket_bytes": 16384}
    run = run_of(2, zero=zero | {"stage": 0}, **sections)
    ((before, elements), _) = run_world(2, _device_bytes, run)
    said = {remedy.settings: remedy.frees for remedy in remedies(run, elements, 0, CUDA)}
    for settings, changed in (
        ("zero.stage=1", {"stage": 1}),
        ("zero.stage=3", {"stage": 3}),
        ("zero.offload.optimizer=cpu zero.stage=2", {"stage": 2, "offload": {"optimizer": "cpu"}}),
    ):
        after, _ = run_world(2, _device_bytes, run_of(2, zero=zero | changed, **sections))[0]
        assert said[settings] == pytest.approx(before - after, rel=0.03)  # but for padding


def test_on_a_cpu_nothing_is_offloaded_to_the_host() -> None:
    """Its memory is the host's: what is offloaded takes as much, and the copies on their way come on top."""
    run = run_of(2, model=LLAMA, training={"micro_batch_size": 2})
    for device, offers in ((CUDA, True), (CPU, False)):
        said = " ".join(map(str, [*remedies(run, 1000, 600, device), *recomputing(run, 0, device)]))
        assert ("offload=host" in said, "offload.optimizer=cpu" in said) == (offers, offers), said


def test_smaller_micro_batches_are_more_of_them_and_free_half_of_the_activations() -> None:
    run = run_of(2, model=LLAMA, training={"micro_batch_size": 4})
    said = {remedy.settings: remedy.frees for remedy in remedies(run, 1000, 600, CUDA)}
    assert said["training.micro_batch_size=2 training.accumulation=2"] == 300
    one = run_of(2, model=LLAMA, training={"micro_batch_size": 1})
    assert not any("micro_batch" in remedy.settings for remedy in remedies(one, 1000, 600, CUDA))


def test_policies_for_activations_are_told_with_what_they_free_and_cost() -> None:
    """By the table of docs/activations.md, for 8 samples of 16 tokens in two layers; and by 2 FLOPs a multiplication."""
    h, k, f, a, tokens = 32, 16, 64, 4, 8 * 16
    run = run_of(1, model=LLAMA | {"num_layers": 2}, precision={"dtype": "bf16"}, training={"micro_batch_size": 8})
    said = {remedy.settings: remedy for remedy in recomputing(run, 0, CPU)}
    none = 12 * h + 4 * k + 6 * f + 4 * a + 8
    left = {
        "selective": 8 * h + 4 * k + 4 * f + 4 * a,
        '["norms","activation","residual"]': 6 * h + 4 * k + 4 * f + 4 * a,
        '["mlp"]': 10 * h + 4 * k + 4 * a + 4,
        '["norms","mlp"]': 8 * h + 4 * k + 4 * a,
        '["norms","residual","mlp"]': 6 * h + 4 * k + 4 * a,
        "full": 2 * h,
    }
    for word, kept in left.items():
        assert said[shlex.quote(f"activations.recompute={word}")].frees == 2 * tokens * (none - kept), word
    model = run.config.model
    flops = FAMILIES["llama"].flops_per_token(model)
    block = h * (h + 2 * k) + h * h + 2 * h * f + 2 * model.mean_reach * h
    assert said["activations.recompute=selective"].again == 0
    residual = said["""'activations.recompute=["norms","activation","residual"]'"""]
    assert residual.again == pytest.approx(2 * 2 * h * h / flops)
    assert said["""'activations.recompute=["mlp"]'"""].again == pytest.approx(2 * 2 * 2 * h * f / flops)
    assert said["activations.recompute=full"].again == pytest.approx(2 * 2 * block / flops)
    parts = run_of(2, model=LLAMA | {"num_layers": 2}, parallel={"pp": 2}, activations={"recompute": "full"})
    first, last = activations_of_ranks(parts, schedule_of(parts), on_cuda=False)
    head = 6 * model.vocab_size * h
    assert last.again == pytest.approx(2 * block / ((flops - head) / 2 + head))  # of the rank's own step
    assert first.again == pytest.approx(2 * block / ((flops - head) / 2))
    sections: dict[str, Any] = {"parallel": {"tp": 2}, "training": {"micro_batch_size": 8}}
    full = run_of(2, model=LLAMA | {"num_layers": 6}, activations={"recompute": "full"}, **sections)
    assert [remedy.settings for remedy in recomputing(full, 0, CPU)] == ["activations.partition=true"]
    left = {remedy.settings: remedy for remedy in recomputing(full, 0, CUDA)}
    assert set(left) == {"activations.offload=host", "activations.partition=true"}
    assert left["activations.partition=true"].frees == 6 * tokens * 4 * h / 2
    assert all(one.again == 0 and one.frees > 0 for one in left.values())


@pytest.mark.parametrize("own", ["", "parallel.cp=2", "parallel.cp=4 parallel.cp_method=hybrid parallel.cp_ulysses=2"])
def test_a_sample_over_twice_the_ranks_frees_what_it_is_said_to(own: str) -> None:
    words = [*own.split(), "parallel.tp=1", "parallel.pp=1", "parallel.sequence_parallel=false"]
    words += ["training.micro_batch_size=1", "training.accumulation=auto"]

    def kept(*more: str) -> tuple[ResolvedRun, int]:
        run = load_config(QUICKSTART, [*words, *more], 8)
        return run, activations_of_ranks(run, schedule_of(run), on_cuda=False)[0].device

    run, now = kept()
    (remedy,) = cutting_samples(run, 0, CPU)
    assert remedy.frees == now - kept(*shlex.split(remedy.settings))[1]
    assert remedy.frees == pytest.approx(now / 2, rel=0.1)
    run, _ = kept("training.micro_batch_size=2")
    assert not list(cutting_samples(run, 0, CPU))


@pytest.mark.parametrize(
    "own",
    [
        "activations.recompute=selective activations.layers=1",
        "activations.recompute=full activations.layers=[1] activations.keep_attention=true",
        "activations.keep_attention=true activations.offload=host",
        "activations.stages=[{stage=0,recompute='selective'},{stage=1,layers=1}]",
        "activations.recompute=full activations.stages=[{stage=0,layers=1,keep_attention=true}]",
        "activations.recompute=full activations.stages=[{stage=1,layers=1}] activations.layers=1",
    ],
)
def test_a_policy_frees_what_it_is_said_to_free_where_it_is_typed_behind_the_runs_own(own: str) -> None:
    words = [*own.split(), "model.num_layers=4", "parallel.pp=2", "parallel.tp=1", "parallel.sequence_parallel=false"]

    def kept(*more: str) -> tuple[ResolvedRun, RankActivations]:
        run = load_config(QUICKSTART, [*words, *more], 2)
        return run, activations_of_ranks(run, schedule_of(run), on_cuda=True)[0]

    run, now = kept()
    assert not any("host" in str(remedy) for remedy in recomputing(run, 0, CPU) if "host" not in own)
    found = list(recomputing(run, 0, CUDA))
    assert found
    for remedy in found:
        then = kept(*shlex.split(remedy.settings))[1]
        assert (now.device - then.device, then.again - now.again) == (remedy.frees, remedy.again), remedy


def _run_out(rank: int, run: ResolvedRun, free: int) -> str:
    """Rank 1 runs out of memory in its second step."""
    out_of_memory.free_memory_bytes = lambda *_: free  # type: ignore[assignment]
    intact, steps = Engine._run, []

    def fail(self: Engine, *given: Any, **named: Any) -> Any:
        steps.append(1)
        if rank == 1 and len(steps) == 2:
            raise torch.OutOfMemoryError(OF_CUDA.replace("20.50 GiB", "0.25 MiB"))
        return intact(self, *given, **named)

    Engine._run = fail  # type: ignore[method-assign]
    try:
        train(run, state_on(rank, run), lambda _: None)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "went on"


def test_the_rank_without_memory_says_which_settings_would_fit_and_the_others_name_it(tmp_path: Any) -> None:
    training = {"run_dir": str(tmp_path), "steps": 4, "global_batch_size": 8, "micro_batch_size": 2}
    run = run_of(2, model=LLAMA | {"vocab_size": 257}, zero={"stage": 0}, training=training)
    other, said = run_world(2, _run_out, run, 2**18 - 1)
    assert re.match(
        r"OutOfMemoryError: out of memory on cpu of rank 1 \(.*\): wanted 0\.2 MiB, free 0\.2 MiB\n", said
    ), said
    assert re.search(r"it holds: (parameters|optimizer|gradients) \d", said)
    assert "would fit, by the formulas: zero.stage=1 (frees about 0." in said
    assert "rank 1 ended in step 2: OutOfMemoryError: out of memory on cpu of rank 1" in other


def test_where_no_setting_helps_that_is_said_and_other_errors_stay_what_they_are(monkeypatch: Any) -> None:
    run = run_of(1, model=LLAMA)
    engine = engine_on(0, run)
    monkeypatch.setattr(out_of_memory, "free_memory_bytes", lambda *_: 2**30)
    whole = r"wanted 4,194,304\.00 GiB, free 1\.00 GiB(.|\n)*no one setting frees"
    with pytest.raises(OutOfMemoryError, match=whole), explained(run, engine.state, engine):
        torch.empty(2**50)
    monkeypatch.setattr(out_of_memory, "free_memory_bytes", lambda *_: 0)
    with pytest.raises(OutOfMemoryError, match=r"more ranks for parallel\.tp"), explained(run, engine.state):
        raise MemoryError
    with pytest.raises(RuntimeError, match=r"^size mismatch$"), explained(run, engine.state, engine):
        raise RuntimeError("size mismatch")
