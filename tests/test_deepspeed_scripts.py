"""What scripts of DeepSpeed's kind do with engines, beside plain torch on one process and beside DeepSpeed itself."""

from __future__ import annotations

import gc
import os
import re
from fnmatch import fnmatchcase
from importlib import import_module
from importlib.util import find_spec
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, TypeAlias
from weakref import ref

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import run_world
from torch import Tensor, nn

import megazero.deepspeed
from megazero.deepspeed.full_params import gathered_parameters
from megazero.deepspeed.module_engine import ModuleEngine
from megazero.deepspeed.pipeline_engine import PipelineEngine
from megazero.deepspeed.training_engine import NEVER, SETTINGS
from megazero.zero import GatheredParameters, Init

pytestmark = pytest.mark.slow  # starts whole runs

WIDTH, HIDDEN, BATCH = 6, 10, 8
STAGES = (0, 1, 2, 3)
PAGE = (Path(__file__).parent.parent / "docs" / "deepspeed.md").read_text(encoding="utf-8")
Pair: TypeAlias = tuple[Any, Any]
CLOSE = {"rtol": 1e-4, "atol": 1e-6}


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def network(out: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, out))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def settings(stage: int, dtype: str = "fp32", accumulation: int = 1) -> dict[str, Any]:
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    zero: dict[str, Any] = {"stage": stage}
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = 0
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH // ranks,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.3,
        "steps_per_print": 10**9,
        "zero_optimization": zero,
    }
    if dtype != "fp32":
        config[dtype] = {"enabled": True} | ({"initial_scale_power": 8} if dtype == "fp16" else {})
    return config


def engine_of(model: nn.Module, config: dict[str, Any], package: Any = megazero.deepspeed) -> Any:
    return package.initialize(model=model, optimizer=adam(model), config=config, dist_init_required=False)[0]


def data(index: int, size: int = WIDTH) -> Tensor:
    """This rank's part of a micro-batch."""
    whole = torch.randn(BATCH, size, generator=torch.Generator().manual_seed(index))
    return whole if not dist.is_initialized() else whole.chunk(dist.get_world_size())[dist.get_rank()]


def assert_equal(engine: Any, plain: nn.Module, note: object, **tolerance: float) -> None:
    expected = dict(plain.named_parameters())
    with gathered_parameters(engine) as whole:
        for name, value in whole.items():
            torch.testing.assert_close(value, expected[name].detach(), **(tolerance or CLOSE), msg=f"{note} {name}")


def averaged(model: nn.Module) -> None:
    """Sum the gradients of a plain model over the ranks, and clip them as an engine does."""
    for parameter in model.parameters():
        assert parameter.grad is not None
        if dist.is_initialized():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)


# ---------------------------------------------------------------------------------------------------------------------
# Several engines, several backwards


def _truth(output: Tensor, real: bool) -> Tensor:
    return F.binary_cross_entropy_with_logits(output.float(), torch.full_like(output, real).float())


def _two_engines(rank: int, folder: Path) -> None:
    """A generator and a discriminator: two backwards before a step, and one of them through both models.

    After a step both go on from their checkpoints, in engines of another stage.
    """
    maker, judge = network(WIDTH, 1), network(1, 2)
    engines = [
        (engine_of(network(WIDTH, 1), settings(stage)), engine_of(network(1, 2), settings(stage))) for stage in STAGES
    ]
    optimizers = adam(maker), adam(judge)
    for step in range(3):
        if step == 1:
            engines = _resumed(engines, folder)
        for made_by, judged_by in engines:
            fake = made_by(data(10 + step))
            judged_by.backward(_truth(judged_by.module(data(step)), True))  # the module itself, as scripts do
            judged_by.backward(_truth(judged_by(fake.detach()), False))
            judged_by.step()
            made_by.backward(_truth(judged_by(fake), True))
            made_by.step()
        fake = maker(data(10 + step))
        judge.zero_grad()
        (_truth(judge(data(step)), True) + _truth(judge(fake.detach()), False)).backward()
        averaged(judge)
        optimizers[1].step()
        maker.zero_grad()
        _truth(judge(fake), True).backward()
        averaged(maker)
        optimizers[0].step()
    for stage, (made_by, judged_by) in zip(STAGES, engines, strict=True):
        assert_equal(made_by, maker, ("generator", stage))
        assert_equal(judged_by, judge, ("discriminator", stage))


def _resumed(engines: list[Pair], folder: Path) -> list[Pair]:
    for stage, (made_by, judged_by) in zip(STAGES, engines, strict=True):
        made_by.save_checkpoint(folder / f"maker{stage}")
        judged_by.save_checkpoint(folder / f"judge{stage}")
    found = []
    for stage in STAGES:
        pair = (engine_of(network(WIDTH, 5), settings(3 - stage)), engine_of(network(1, 5), settings(3 - stage)))
        pair[0].load_checkpoint(folder / f"maker{stage}")
        pair[1].load_checkpoint(folder / f"judge{stage}")
        found.append(pair)
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_a_generator_and_a_discriminator_train_as_in_plain_torch(world: int, tmp_path: Path) -> None:
    run_world(world, _two_engines, tmp_path)


def _own_backward(rank: int) -> None:
    plain = network(2, 3)
    optimizer = adam(plain)
    losses = [plain(data(index)).square().mean() / 2 for index in range(2)]
    for loss in losses:
        loss.backward()
    averaged(plain)
    optimizer.step()
    for stage in STAGES:
        engine = engine_of(network(2, 3), settings(stage, accumulation=2))
        x = data(5).requires_grad_()
        torch.autograd.grad(engine(x).sum(), x)  # a penalty's gradients are no micro-batch
        engine(data(0)).square().mean().backward()
        engine.step()
        engine.backward(engine(data(1)).square().mean())
        engine.step()
        assert engine.global_steps == 1
        assert_equal(engine, plain, stage)
    half = engine_of(network(2, 3), settings(1, "fp16", accumulation=2))
    with pytest.raises(RuntimeError, match=r"engine\.scale"):
        half(data(0)).square().mean().backward()
    half.zero_grad()
    for index in range(2):
        half.scale(half(data(index)).square().mean()).backward()
        half.step()
    assert half.global_steps == 1
    assert half.skipped_steps == 0
    assert_equal(half, plain, "fp16", rtol=0.0, atol=0.02)


def test_a_script_may_call_the_backward_of_its_loss() -> None:
    run_world(2, _own_backward)


# ---------------------------------------------------------------------------------------------------------------------
# Whole parameters


def _gathered(rank: int) -> None:
    for stage in STAGES:
        for dtype in ("fp32", "bf16"):
            model, plain = network(2, 4), network(2, 4)
            first = model[0].weight
            with GatheredParameters(first, modifier_rank=0):  # before initialize it is whole
                first.data.mul_(1.0)
            engine = engine_of(model, settings(stage, dtype))
            weight, bias = model[0].weight, model[0].bias
            masters = {name: value.detach().clone() for name, value in plain.named_parameters()}
            with GatheredParameters([weight, bias]):
                torch.testing.assert_close(weight.float(), plain[0].weight.to(weight.dtype).float(), rtol=0, atol=0)
                assert weight.sum() == plain[0].weight.detach().to(weight.dtype).sum()
            with GatheredParameters(model.parameters(), modifier_rank=1), torch.no_grad():
                if rank == 1:
                    weight[0].fill_(3.0)
                    model[2].bias.data = torch.full_like(model[2].bias.data, -1.0)
            masters["0.weight"][0], masters["2.bias"][:] = 3.0, -1.0
            with gathered_parameters(engine) as whole:
                for name, value in masters.items():  # what did not change keeps every bit of its master
                    torch.testing.assert_close(whole[name], value, rtol=0, atol=0, msg=f"{stage} {dtype} {name}")
            with GatheredParameters(weight, modifier_rank=0, enabled=False):
                pass
            if stage == 3:
                with pytest.raises(RuntimeError, match="modifier_rank"), GatheredParameters(bias), torch.no_grad():
                    bias.zero_()
                with pytest.raises(RuntimeError, match="GatheredParameters"), torch.no_grad():
                    bias.zero_()
    with Init(config_dict_or_path=settings(3), dtype=torch.bfloat16, enabled=False):
        assert not nn.Linear(2, 2).weight.is_meta
    with Init(config_dict_or_path=settings(3)):
        model = nn.Linear(WIDTH, 2)
    with GatheredParameters(model.parameters(), modifier_rank=0):
        if rank == 0:
            nn.init.constant_(model.weight, 0.5)
    with pytest.raises(ValueError, match="rank 0"):
        GatheredParameters(model.weight, modifier_rank=1).__enter__()
    with gathered_parameters(engine_of(model, settings(3))) as whole:
        assert whole["weight"].eq(0.5).all()


def test_whole_parameters_are_read_and_changed_by_deepspeeds_call() -> None:
    run_world(2, _gathered)


def _saves_16bit(rank: int, folder: Path) -> None:
    plain = network(2, 6).bfloat16()
    engine = engine_of(network(2, 6), settings(3, "bf16"))
    engine.module[2].bias.requires_grad_(True)
    sent, before = engine.parallel_state.traffic.sent_bytes, engine.parallel_state.traffic.sent_bytes.copy()
    assert engine.save_16bit_model(folder, "weights.bin")
    (gathered,) = ((sent - before)[key] for key in sent - before if key[0] == "dp" and "gather" in key[1])
    assert gathered <= sum(one.nbytes for one in plain.parameters()), "a bucket is gathered once"
    found = torch.load(folder / "weights.bin", weights_only=True)
    assert found.keys() == plain.state_dict().keys()
    assert all(torch.equal(found[name], value) for name, value in plain.state_dict().items())


def test_weights_are_saved_whole_in_16_bit(tmp_path: Path) -> None:
    run_world(2, _saves_16bit, tmp_path)


# ---------------------------------------------------------------------------------------------------------------------
# One engine after another


class _Two(nn.Module):
    def __init__(self, encoder: nn.Module, out: int) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(2, out)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.encoder(x)))


def _plain_step(model: nn.Module, x: Tensor) -> None:
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1)
    model(x).square().mean().backward()
    for one in model.parameters():
        if one.requires_grad and dist.is_initialized():
            dist.all_reduce(one.grad)
            one.grad /= dist.get_world_size()
    optimizer.step()
    optimizer.zero_grad()


def _phases(rank: int) -> None:
    """An engine, the plain module, then an engine that trains the head alone."""
    for stage in STAGES:
        model, plain = network(2, 3), network(2, 3)
        config = settings(stage) | {"gradient_clipping": 0.0}
        for phase in range(3):
            if phase == 2:
                for one in (*model[0].parameters(), *plain[0].parameters()):
                    one.requires_grad_(False)
            if phase == 1:
                _plain_step(model, data(phase))
            else:
                trained = [one for one in model.parameters() if one.requires_grad]
                optimizer = torch.optim.SGD(trained, lr=0.1)
                engine = megazero.deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
                engine.backward(engine(data(phase)).square().mean())
                engine.step()
                engine.destroy()
                with pytest.raises(RuntimeError, match="closed"):
                    engine._finish_step(torch.zeros(()), 1)
                held = ref(engine)
                del engine
                gc.collect()
                assert held() is None
            _plain_step(plain, data(phase))
            assert [type(one) for one in model.parameters()] == [nn.Parameter] * 4
            for (name, one), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(one, expected, **CLOSE, msg=f"{stage} {phase} {name}")


def _shared(rank: int) -> None:
    """Two live engines may not hold one parameter; one that was dropped, or closed while an error was handled, may."""
    for stage in (1, 3):
        encoder = nn.Linear(WIDTH, 2)
        first = engine_of(_Two(encoder, 1), settings(stage))
        first.backward(first(data(1)).square().mean())
        first.step()
        with pytest.raises(ValueError, match=r"encoder\.\w+: another engine holds it; close that engine first"):
            engine_of(_Two(encoder, 3), settings(stage))
        before = first.module_state_dict()["encoder.weight"].clone()
        if stage == 1:
            del first
        else:
            with pytest.raises(OSError, match="lost"):
                _fails(first)
        second = megazero.deepspeed.initialize(
            model=_Two(encoder, 3), optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1), config=settings(stage)
        )[0]
        assert torch.equal(second.module_state_dict()["encoder.weight"], before)
        second.backward(second(data(1)).square().mean())
        second.step()
        assert not torch.equal(second.module_state_dict()["encoder.weight"], before)
        second.close()


def _fails(engine: Any) -> None:
    try:
        raise OSError("lost")
    finally:
        engine.close()  # makes no collective call


def _one_after_another(rank: int) -> None:
    _phases(rank)
    _shared(rank)


@pytest.mark.parametrize("world", [1, 2])
def test_a_closed_engine_leaves_a_plain_module_and_a_live_one_keeps_its_parameters(world: int) -> None:
    run_world(world, _one_after_another)


@pytest.mark.parametrize("stage", [0, 3])
def test_an_engine_without_an_optimizer_evaluates_frozen_and_trained_models_alike(stage: int) -> None:
    for trains in (True, False):
        model, plain = network(2, 1).requires_grad_(trains), network(2, 1)
        engine, optimizer, *_ = megazero.deepspeed.initialize(model=model, config=settings(stage))
        with torch.no_grad():
            torch.testing.assert_close(engine(data(0)), plain(data(0)))
        with pytest.raises(RuntimeError, match="no optimizer"):
            engine.backward(engine(data(0)).sum())
        engine.close()
        assert optimizer is None
        assert {one.requires_grad for one in model.parameters()} == {trains}


# ---------------------------------------------------------------------------------------------------------------------
# Names


class _Model(nn.Linear):
    label = zero_padding = "of the module"  # no name of DeepSpeed's


def test_an_engine_answers_for_deepspeeds_names_and_for_its_module() -> None:
    engine = engine_of(_Model(WIDTH, 2), settings(2, "bf16"))
    assert engine.label == engine.zero_padding == "of the module"
    assert engine.zero_offload_optimizer() is engine.zero_offload_param() is None
    assert engine.optimizer_name() == "AdamW"
    assert engine.get_data_types() == (torch.bfloat16, torch.float32)
    assert not hasattr(engine, "offload_states")
    with pytest.raises(AttributeError, match="has 'offload_states': see docs"):
        engine.offload_states()
    with pytest.raises(ValueError, match=f"multiple of {BATCH}"):
        engine.set_train_batch_size(BATCH + 1)
    engine.set_train_batch_size(3 * BATCH)
    assert engine.get_batch_info() == (3 * BATCH, BATCH, 3)
    for index in range(3):
        assert engine.global_steps == 0
        engine.backward(engine(data(index)).square().mean())
        for change in (engine.set_train_batch_size, engine.set_train_micro_batch_size):
            with pytest.raises(RuntimeError, match=f"{index + 1} of 3 micro-batches .* sizes of a step cannot change"):
                change(BATCH)
        engine.step()
    assert engine.global_steps == 1
    engine.destroy()
    config = settings(2)
    config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    engine = engine_of(_Model(WIDTH, 2), config)
    assert engine.zero_offload_optimizer().device == "cpu"
    assert engine.zero_offload_param() is None


def _check_names() -> None:
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.pipe.engine import PipelineEngine as TheirPipelineEngine

    known = {*SETTINGS, *NEVER}
    rows = (line for line in PAGE.splitlines() if "| refused: " in line)
    refused = [pattern for line in rows for pattern in re.findall("`(.+?)`", line.split("|")[1])]
    for ours, theirs in ((ModuleEngine, DeepSpeedEngine), (PipelineEngine, TheirPipelineEngine)):
        names = {name for name in dir(theirs) if not name.startswith("_")}
        own = {name for name in dir(ours) if not name.startswith("_")}
        others = names - own - known
        assert not [name for name in others if not any(fnmatchcase(name, pattern) for pattern in refused)]
        assert not own & known
        for call in ("save_checkpoint", "load_checkpoint", "save_16bit_model"):
            mine = signature(getattr(ModuleEngine, call)).parameters.values()
            by_position = [one.name for one in mine if one.kind is not Parameter.KEYWORD_ONLY]
            assert by_position == list(signature(getattr(theirs, call)).parameters), call


def test_the_page_has_every_name_that_an_engine_answers() -> None:
    assert not [name for name in (*SETTINGS, *NEVER) if f"`{name}`" not in PAGE]


# ---------------------------------------------------------------------------------------------------------------------
# Beside DeepSpeed


def _script(package: Any, stage: int, dtype: str) -> list[float]:
    """Three steps of two micro-batches and an evaluation, written as a script is; the losses that it would print."""
    engine = engine_of(network(2, 8), settings(stage, dtype, accumulation=2), package)
    losses = []
    for index in range(6):
        x, y = data(index), data(20 + index, 2)
        output = engine(x.to(next(engine.module.parameters()).dtype))
        loss = F.mse_loss(output.float(), y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.eval()
    with torch.no_grad():
        x = data(30).to(next(engine.module.parameters()).dtype)
        losses.append(engine(x).float().mean().item())
    return losses


def _beside(rank: int) -> None:
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2")
    import deepspeed

    if rank == 0:
        _check_names()
    import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # which would compile an extension
    for dtype, tolerance in (("fp32", 1e-5), ("bf16", 2e-2)):
        for stage in STAGES:
            theirs = _script(deepspeed, stage, dtype)
            assert _script(megazero.deepspeed, stage, dtype) == pytest.approx(theirs, rel=tolerance, abs=tolerance), (
                stage
            )


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
def test_a_script_gives_deepspeeds_losses_at_every_stage_and_finds_every_name_of_its_engines() -> None:
    run_world(2, _beside, timeout=120)  # imported in the ranks alone: other tests have no DeepSpeed in their process
