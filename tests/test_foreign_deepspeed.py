"""Checkpoints that DeepSpeed itself has written come in with their moments: training goes on as it would have there."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_world
from test_hugging_face import stored
from torch import Tensor
from torch.nn import functional as F
from typer.testing import CliRunner
from worlds import EPS, LLAMA, LR, global_batch, micro_batches, of_transformers, on_one_state, run_of

from megazero.checkpoint.index import CheckpointError, find_damage, read_trainer_state
from megazero.cli.commands import app
from megazero.config import ResolvedRun
from megazero.config.document import to_toml
from megazero.formats.importer import import_checkpoint

pytestmark = pytest.mark.slow  # starts whole runs

os.environ.setdefault("DS_ACCELERATOR", "cpu")
if find_spec("deepspeed") is None:  # it is imported in ranks only: other tests put their own module under its name
    pytest.skip("needs DeepSpeed", allow_module_level=True)

BEFORE, THEN = 2, 2  # steps there before the checkpoint, and then there and here
WORLD, DECAY, CLIP = 2, 0.1, 0.5
FROZEN = "model.layers.1.mlp.up_proj.weight"  # where a case says so
KINDS = ("exp_avg", "exp_avg_sq")
MODEL_FILE, STATE = "mp_rank_00_model_states.pt", "optimizer_state_dict"
OPTIMIZER_FILES = [f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(WORLD)]
ROUND_ROBIN = (
    "stage-2"  # there what DeepSpeed gathers in the process is of other parameters; that of stage 1 is the same
)


@dataclass(frozen=True)
class Case:
    """A configuration of DeepSpeed; `more` is merged into its section zero_optimization."""

    stage: int
    dtype: str = "fp32"
    tied: bool = False
    frozen: bool = False
    more: dict[str, Any] = field(default_factory=dict)
    fp32_gradients: bool = False  # with which bf16 at stage 1 has an optimizer of its own

    @property
    def run(self) -> ResolvedRun:
        """The same model and optimizer here, on one rank."""
        return self.on({})

    def on(self, parallel: dict[str, int]) -> ResolvedRun:
        model = LLAMA | {"num_layers": 2, "tie_embeddings": self.tied, "rope_theta": 500.0}
        optimizer = {"grad_clip": CLIP, "weight_decay": DECAY}
        world = 2 if parallel else 1
        return run_of(world, model=model, optimizer=optimizer, parallel=parallel, precision={"dtype": self.dtype})


CASES = {
    "stage-0": Case(0),
    "stage-0-bf16": Case(0, "bf16", tied=True),
    "stage-1": Case(1),
    "stage-1-bf16": Case(1, "bf16", fp32_gradients=True),
    ROUND_ROBIN: Case(2, more={"round_robin_gradients": True}),
    "stage-2-bf16": Case(2, "bf16", tied=True),
    "stage-2-frozen": Case(2, frozen=True),
    "stage-3": Case(3, more={"sub_group_size": 3000, "stage3_param_persistence_threshold": 100}),
    "stage-3-frozen": Case(3, "bf16", frozen=True),
}


def model_of(case: Case) -> Any:
    torch.manual_seed(0)
    made = of_transformers(case.run.config.model)
    if case.frozen:
        made.get_parameter(FROZEN).requires_grad_(False)
    return made


def engine_there(case: Case) -> Any:
    import deepspeed

    model = model_of(case)
    trained = [one for one in model.parameters() if one.requires_grad]
    groups = [
        {"params": [one for one in trained if one.dim() > 1], "weight_decay": DECAY},
        {"params": [one for one in trained if one.dim() == 1], "weight_decay": 0.0},
    ]
    config: dict[str, Any] = {
        "train_batch_size": 8,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": case.stage} | case.more,
        "zero_allow_untested_optimizer": True,
    }
    if case.dtype == "bf16":
        config["bf16"] = {"enabled": True}
    if case.fp32_gradients:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=EPS)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)[0]


def train(engine: Any, run: ResolvedRun, first: int, steps: int) -> list[float]:
    losses = []
    for step in range(first, first + steps):
        tokens, labels = global_batch(run, step)
        count = (labels != -100).sum()
        tokens, labels = (one.chunk(WORLD)[engine.global_rank] for one in (tokens, labels))
        logits = engine(input_ids=tokens).logits.float()
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / count
        engine.backward(loss * WORLD)  # it takes the mean over ranks
        engine.step()
        whole = loss.detach().clone()
        torch.distributed.all_reduce(whole)
        losses.append(float(whole))
    return losses


def state_of(engine: Any, case: Case) -> dict[str, dict[str, Tensor]]:
    """Masters and moments by name, gathered in the process that trains."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    weights = {name: weight for name, weight in engine.module.named_parameters() if weight.requires_grad}
    optimizer = engine.optimizer
    if hasattr(optimizer, "_hp_optimizer_states_linked"):  # they were linked before the second group had any
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()
    if case.stage:
        found = {
            kind: {n: safe_get_full_optimizer_state(w, kind).clone() for n, w in weights.items()} for kind in KINDS
        }
        return found | {"fp32": {name: safe_get_full_fp32_param(weight).clone() for name, weight in weights.items()}}
    masters = {weight: weight for weight in weights.values()}
    if case.dtype == "bf16":
        groups = zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
        masters = {weight: master for pair in groups for weight, master in zip(*pair, strict=True)}
    state = getattr(optimizer, "optimizer", optimizer).state
    found = {kind: {name: state[masters[weight]][kind].clone() for name, weight in weights.items()} for kind in KINDS}
    return found | {"fp32": {name: masters[weight].detach().clone() for name, weight in weights.items()}}


def there(rank: int, folder: Path) -> dict[str, Any]:
    """Train, save and go on in every case: the losses after the checkpoint, and the state in it."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD)}
    backend: Any = import_module("deepspeed.comm.torch")
    backend.build_shm_op = lambda: None  # else C++ is compiled first
    made = {}
    for name, case in CASES.items():
        engine = engine_there(case)
        train(engine, case.run, 0, BEFORE)
        engine.save_checkpoint(folder / name, client_state={"mine": {"epoch": 3}})
        made[name] = state_of(engine, case), train(engine, case.run, BEFORE, THEN)
        engine.destroy()
    return made


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder of the checkpoints by case, and what `there` gave."""
    folder = tmp_path_factory.mktemp("deepspeed")
    return folder, run_world(WORLD, there, folder)[0]


def imported(case: Case, source: Path, out: Path, **options: Any) -> Any:
    toml = out.with_suffix(".toml")
    toml.write_text(to_toml(case.run.config))
    return import_checkpoint(source, out, run_file=toml, **options)


def universal(folder: Path, out: Path) -> Path:
    """The newest checkpoint of a folder as a universal one, made by DeepSpeed."""
    run_world(1, _make_universal, folder / f"global_step{BEFORE}", out)
    return out


def _make_universal(_: int, step: Path, out: Path) -> None:
    from deepspeed.checkpoint.ds_to_universal import main

    workers = {"num_extract_workers": 1, "num_merge_workers": 1}
    options = {"keep_temp_folder": False, "strict": True, "inject_missing_state": True}
    with contextlib.redirect_stdout(io.StringIO()):
        main(Namespace(input_folder=str(step), output_folder=str(out), **workers, **options))


def check_state(case: Case, ours: Path, there: dict[str, dict[str, Tensor]]) -> None:
    """Every element that DeepSpeed has is here, bit for bit."""
    assert find_damage(ours) == []
    masters = "model" if case.dtype == "fp32" else "master"
    for theirs, kind in {"fp32": masters, "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}.items():
        found, wanted = stored(ours, kind), dict(there[theirs])
        if case.frozen:
            untrained = model_of(case).get_parameter(FROZEN).detach()
            untrained = untrained.bfloat16().float() if case.dtype == "bf16" else untrained
            wanted[FROZEN] = untrained if kind == masters else torch.zeros_like(untrained)
        assert found.keys() == wanted.keys()
        for name, tensor in found.items():
            assert torch.equal(tensor, wanted[name]), (kind, name)
    if case.dtype == "bf16":
        weights, found = stored(ours), stored(ours, masters)
        assert weights.keys() == found.keys()
        assert all(torch.equal(one, found[name].bfloat16()) for name, one in weights.items())


def test_every_stage_comes_in_bit_for_bit(made: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, known = made
    for name, case in CASES.items():
        got = imported(case, folder / name, tmp_path / name)
        check_state(case, tmp_path / name, known["stage-1" if name == ROUND_ROBIN else name][0])
        told = "\n".join(got.notes)
        assert "client_state is not taken over: mine" in told
        assert "weight_decay is not taken over: it differs" in told
        assert ("frozen there" in told) == case.frozen
        assert ("named in the order" in told) == (case.stage == 0)
        trainer = read_trainer_state(tmp_path / name)
        assert (trainer.step, trainer.consumed_samples, trainer.consumed_tokens) == (
            BEFORE,
            8 * BEFORE,
            8 * 16 * BEFORE,
        )
        # without ZeRO its optimizer for bf16 takes a step, on gradients of zero, when it is made
        assert trainer.optimizer_steps == BEFORE + (name == "stage-0-bf16")
        assert trainer.config["optimizer"]["lr"] == LR


def test_universal_checkpoints_come_in_bit_for_bit(made: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, known = made
    refused(CASES[ROUND_ROBIN], universal(folder / ROUND_ROBIN, tmp_path / "wrong"), tmp_path / "none", "round_robin")
    for name in ("stage-2-bf16", "stage-2-frozen", "stage-3"):
        origin = universal(folder / name, tmp_path / name)
        ours = tmp_path / f"{name}-ours"
        imported(CASES[name], origin, ours)
        check_state(CASES[name], ours, known[name][0])
        assert read_trainer_state(ours).optimizer_steps == BEFORE


def go_on_here(engine: Any, run: ResolvedRun, origin: Path) -> list[float]:
    engine.load(origin, "any data")
    return [engine.train_step(micro_batches(run, engine.state, BEFORE + step), LR).loss for step in range(THEN)]


def test_training_goes_on_as_there(made: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, known = made
    names = [name for name, case in CASES.items() if not case.frozen]  # what is frozen there is trained here
    runs = []
    for name in names:
        imported(CASES[name], folder / name, tmp_path / name)
        runs.append(CASES[name].on({"tp": 2}))
    found = run_world(2, on_state_of, runs, [tmp_path / name for name in names])[0]
    for name, losses in zip(names, found, strict=True):
        assert losses == pytest.approx(known[name][1], rel=1e-5 if CASES[name].dtype == "fp32" else 2e-3), name


def on_state_of(rank: int, runs: list[ResolvedRun], origins: list[Path]) -> list[list[float]]:
    left = iter(origins)
    return on_one_state(rank, runs, lambda engine, run: go_on_here(engine, run, next(left)))


def broken(source: Path, file: str, change: Callable[[dict[str, Any]], None], out: Path) -> Path:
    """A copy of a checkpoint in which one file says something else."""
    shutil.copytree(source, out)
    path = out / f"global_step{BEFORE}" / file
    state = torch.load(path, weights_only=False)
    change(state)
    torch.save(state, path)
    return out


def refused(case: Case, source: Path, out: Path, match: str) -> None:
    with pytest.raises(CheckpointError, match=match):
        imported(case, source, out)
    assert not list(out.glob("*"))


def test_what_is_wrong_is_named_and_nothing_is_left(made: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, _ = made
    model, optimizer = MODEL_FILE, OPTIMIZER_FILES[1]
    case, origin, out = CASES["stage-1"], folder / "stage-1", tmp_path / "ours"

    lost = shutil.copytree(origin, tmp_path / "lost")
    (lost / "global_step2" / optimizer).unlink()
    refused(case, lost, out, f"{optimizer} is missing")

    cut = shutil.copytree(origin, tmp_path / "cut")
    os.truncate(cut / "global_step2" / optimizer, 5000)
    refused(case, cut, out, f"{optimizer} cannot be read")

    for stale, kept in ((f"bf16_{optimizer}", optimizer), ("zero_pp_rank_0_" + model, model)):  # of an older save
        mixed = shutil.copytree(origin, tmp_path / stale)
        shutil.copy(mixed / "global_step2" / kept, mixed / "global_step2" / stale)
        refused(case, mixed, out, f"{min(stale, kept)} and {max(stale, kept)}: move")

    def count_on(state: dict[str, Any]) -> None:
        state["global_steps"] += 3

    ahead = broken(origin, model, count_on, tmp_path / "ahead")
    refused(case, ahead, out, "AdamW's count of 2 updates .the run counts 5")
    imported(case, ahead, tmp_path / "taken", ignore=["AdamW's count*"])

    def shorten(state: dict[str, Any]) -> None:
        groups = state["optimizer_state_dict"]["single_partition_of_fp32_groups"]
        groups[0] = groups[0][:-1].clone()

    refused(
        case,
        broken(origin, optimizer, shorten, tmp_path / "short"),
        out,
        "hold 1951 elements of master of lm_head.weight",
    )

    def add_state(state: dict[str, Any]) -> None:
        states = state["optimizer_state_dict"]["base_optimizer_state"]["state"]
        states[0]["max_exp_avg_sq"] = states[0]["exp_avg_sq"]

    odd = broken(origin, optimizer, add_state, tmp_path / "odd")
    refused(case, odd, out, "optimizer state 'max_exp_avg_sq' of group 0 is not understood.*--ignore")
    imported(case, odd, out, ignore=["optimizer state *"])

    def move(state: dict[str, Any]) -> None:
        groups = state["optimizer"]["param_groups"]
        groups[1]["params"].append(groups[0]["params"].pop())

    mixed = broken(folder / "stage-0", model, move, tmp_path / "mixed")
    refused(CASES["stage-0"], mixed, tmp_path / "none", r"exp_avg of lm_head.weight is missing.*save at ZeRO stage 1")

    other = shutil.copytree(origin, tmp_path / "other")
    (other / "global_step2" / "layer_0_expert_0_mp_rank_00_model_states.pt").touch()
    refused(case, other, tmp_path / "none", "file layer_0_expert_0_mp_rank_00_model_states.pt is not understood")
    (other / "global_step2" / "mp_rank_01_model_states.pt").touch()
    refused(case, other, tmp_path / "none", "tensor parallelism.*ds_to_universal")


ODD: dict[str, tuple[str, str, Callable[[dict[str, Any]], None]]] = {  # by what is odd: the file, the error, the change
    "samples": (MODEL_FILE, f"counts {2**53} samples, which no run has", lambda it: it.update(global_samples=2**53)),
    "rate": (
        OPTIMIZER_FILES[0],
        r"param_groups\.0\.initial_lr=nan is not understood",
        lambda it: it[STATE]["base_optimizer_state"]["param_groups"][0].update(initial_lr=float("nan")),
    ),
}


def test_counts_and_settings_that_no_run_has_are_refused(made: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    for name, (file, match, change) in ODD.items():
        odd = broken(made[0] / "stage-1", file, change, tmp_path / name)
        refused(CASES["stage-1"], odd, tmp_path / "none", match)


class Runs:
    """A pickle that calls something when it is read."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call[0], self.call[1:]


def test_no_pickle_is_executed(made: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, _ = made
    case, origin, trace = CASES["stage-1"], folder / "stage-1", tmp_path / "it-ran"

    def plant(*call: Any) -> Callable[[dict[str, Any]], None]:
        return lambda state: state.update(mine=Runs(*call))

    file = "mp_rank_00_model_states.pt"
    by_exec = broken(origin, file, plant(exec, f"open({str(trace)!r}, 'w')"), tmp_path / "exec")
    assert any("builtins.exec, which was not run" in line for line in imported(case, by_exec, tmp_path / "ours").notes)
    by_shell = broken(origin, file, plant(os.system, f"touch {trace}"), tmp_path / "shell")
    refused(case, by_shell, tmp_path / "none", "posix.system")
    assert not trace.exists()
    torch.load(by_exec / "global_step2" / file, weights_only=False)
    assert trace.exists()  # the test can fail


def test_the_command_and_an_engine_say_what_they_meet(made: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, _ = made
    (tmp_path / "run.toml").write_text(to_toml(CASES["stage-1"].run.config))
    words = ["import", folder / "stage-1", tmp_path / "ours", "--run-file", tmp_path / "run.toml"]
    shown = CliRunner().invoke(app, ["checkpoint", *map(str, words)])
    assert shown.exit_code == 0, shown.output
    assert "goes on after step 2 and sample 16" in shown.output
    import megazero

    engine = megazero.initialize(
        model=torch.nn.Linear(2, 2), config={"train_batch_size": 1, "optimizer": {"type": "AdamW"}}
    )[0]
    with pytest.raises(CheckpointError, match=r"a checkpoint of DeepSpeed.*docs/deepspeed.md"):
        engine.load_checkpoint(folder / "stage-1")
