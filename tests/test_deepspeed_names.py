"""DeepSpeed's names: a script that imports them runs unchanged, and each is had, or refused in one clear sentence."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness import run_program, run_world
from torch import nn

from megazero.deepspeed import comm, script_optimizers
from megazero.deepspeed.__main__ import main
from megazero.deepspeed.accelerator import _OF_TORCH, Accelerator
from megazero.deepspeed.mirror import _names_of, lookup, stand_for_deepspeed
from megazero.deepspeed.names import HOMES, NAMES
from megazero.deepspeed.topology import PipelineParallelGrid, PipeModelDataParallelTopology, ProcessTopology
from megazero.parallel_state import RankGrid

pytestmark = pytest.mark.slow  # starts whole runs

PAGE = (Path(__file__).parent.parent / "docs" / "deepspeed.md").read_text(encoding="utf-8")

LAYERS = """
import deepspeed  # in a module that the script imports
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = x + deepspeed.checkpointing.checkpoint(block, x)
        return x
"""
SCRIPT = """
import argparse, json
import torch
import deepspeed
import deepspeed.comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer  # for an option that is off
from deepspeed.ops.adam import FusedAdam
from deepspeed.runtime.utils import see_memory_usage, set_random_seed
from deepspeed.utils import RepeatingLoader, log_dist
from layers import Net

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int)
parser.add_argument("--out")
args = deepspeed.add_config_arguments(parser).parse_args()
deepspeed.init_distributed()
get_accelerator().set_device(args.local_rank)
set_random_seed(7)
net = Net()
rows = torch.arange(64.0).view(8, 8).cos().split(8 // dist.get_world_size())[dist.get_rank()]
optimizer = FusedAdam(net.parameters(), lr=0.01, weight_decay=0.1)
engine, *_ = deepspeed.initialize(args=args, model=net, optimizer=optimizer)
assert isinstance(engine, deepspeed.DeepSpeedEngine) and not isinstance(engine, deepspeed.PipelineEngine)
losses = []
for _, batch in zip(range(3), RepeatingLoader([rows])):
    loss = (engine(batch.to(get_accelerator().device_name(args.local_rank))) - 1).square().mean()
    engine.backward(loss)
    engine.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean, op=dist.ReduceOp.SUM, log_name="loss")
    losses.append(mean.item() / dist.get_world_size())
log_dist(f"losses {losses}", ranks=[0])
see_memory_usage("done", force=True)
if dist.get_rank() == 0:
    json.dump(losses, open(args.out, "w"))
"""
PIPELINE = """
import argparse, json
import torch
import deepspeed
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

parser = argparse.ArgumentParser()
parser.add_argument("--out")
args = deepspeed.add_config_arguments(parser).parse_args()
deepspeed.init_distributed()
topology = PipeModelDataParallelTopology(num_pp=deepspeed.comm.get_world_size(), num_mp=1, num_dp=1)
net = PipelineModule(
    [LayerSpec(torch.nn.Linear, 8, 8), torch.tanh, LayerSpec(torch.nn.Linear, 8, 8)],
    topology=topology,
    loss_fn=torch.nn.functional.mse_loss,
    activation_checkpoint_interval=1,
    activation_checkpoint_func=deepspeed.checkpointing.checkpoint,
)
assert net.topology().get_dim("pipe") == net.num_pipeline_stages() == deepspeed.comm.get_world_size()
assert net.mpu().get_stage_id() == deepspeed.comm.get_rank()
engine, *_ = deepspeed.initialize(args=args, model=net, model_parameters=list(net.parameters()), mpu=net.mpu())
batch = torch.arange(64.0).view(8, 8).cos()
losses = [engine.train_batch(iter([(batch, batch)])).item() for _ in range(3)]
if deepspeed.comm.get_rank() == 0:
    json.dump(losses, open(args.out, "w"))
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scripts")
    for name, text in {"train.py": SCRIPT, "layers.py": LAYERS, "pipeline.py": PIPELINE}.items():
        (folder / name).write_text(text)
    (folder / "own").mkdir()
    for name, text in {"train.py": SCRIPT, "layers.py": LAYERS}.items():
        changed = re.sub(r"import deepspeed\b(?!\.)", "import megazero.deepspeed as deepspeed", text)
        (folder / "own" / name).write_text(re.sub(r"(import|from) deepspeed\.", r"\1 megazero.deepspeed.", changed))
    config = {"train_batch_size": 8, "gradient_clipping": 0.0, "zero_optimization": {"stage": 3}}
    (folder / "zero.json").write_text(json.dumps(config))
    config |= {"zero_optimization": {"stage": 1}, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
    (folder / "pipeline.json").write_text(json.dumps(config))
    return folder


def _run(rank: int, ranks: int, *command: str) -> list[float]:
    """`python -m megazero.deepspeed ...` on one of the forked ranks; the losses that the script wrote."""
    torch.cuda.is_available = lambda: False
    if ranks > 1:  # otherwise the runner makes one process a world of its own
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "1",  # where they have met
        }
    main(list(command))
    dist.all_reduce(torch.zeros(1))  # the first rank has written
    losses: list[float] = json.loads(Path(command[-1]).read_text())
    return losses


def _plain(folder: Path) -> list[float]:
    """The losses of the script's model in torch alone, without recomputation."""
    torch.manual_seed(7)
    blocks = [nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(2)]
    x = torch.arange(64.0).view(8, 8).cos()
    optimizer = torch.optim.AdamW([p for block in blocks for p in block.parameters()], lr=0.01, weight_decay=0.1)
    losses = []
    for _ in range(3):
        y = x
        for block in blocks:
            y = y + block(y)
        loss = (y - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_script_runs_unchanged_on_one_and_two_ranks_and_computes_what_torch_does(scripts: Path) -> None:
    expected = _plain(scripts)
    for ranks, script in ((1, "train.py"), (2, "train.py"), (2, "own/train.py")):
        out = scripts / f"{ranks}.json"
        command = (str(scripts / script), "--deepspeed_config", str(scripts / "zero.json"), "--out", str(out))
        for losses in run_world(ranks, _run, ranks, *command):
            assert losses == pytest.approx(expected, rel=1e-5), (ranks, script)
        out.unlink()


def test_a_topology_of_deepspeed_s_cuts_a_pipeline(scripts: Path) -> None:
    """The script knows no --local_rank, so the runner does not pass it."""
    script = (str(scripts / "pipeline.py"), "--deepspeed_config", str(scripts / "pipeline.json"), "--out")
    (one,) = run_world(1, _run, 1, *script, str(scripts / "one.json"))
    assert one[-1] < one[0]
    for losses in run_world(2, _run, 2, *script, str(scripts / "two.json")):
        assert losses == pytest.approx(one, rel=1e-5)


def test_the_command_runs_a_script_as_python_would(tmp_path: Path) -> None:
    """Its arguments, its folder first on the path, its exit code; and where DeepSpeed is asked for, megazero answers."""
    (tmp_path / "beside.py").write_text("from deepspeed.utils import logger\n")
    (tmp_path / "script.py").write_text(
        "import importlib.util, os, sys\n"
        "assert importlib.util.find_spec('deepspeed') is not None\n"
        "import beside, deepspeed, megazero.deepspeed.runtime.utils\n"
        "assert deepspeed is megazero.deepspeed and deepspeed.runtime.utils is megazero.deepspeed.runtime.utils\n"
        "assert deepspeed.initialize.__module__.startswith('megazero.') and os.environ['WORLD_SIZE'] == '1'\n"
        "print(__name__, sys.argv[1:], sys.path[0] == os.path.dirname(os.path.abspath(__file__)))\n"
        "sys.exit(3)\n"
    )
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    environment = {key: value for key, value in os.environ.items() if key not in launcher}
    command = [sys.executable, "-m", "megazero.deepspeed", "script.py", "--x", "1"]
    ran = run_program(*command, env=environment, cwd=tmp_path)
    assert (ran.returncode, ran.stdout) == (3, "__main__ ['--x', '1'] True\n"), ran.stderr


@pytest.mark.parametrize(
    ("command", "environment", "said"),
    [
        (["--no_local_rank"], {}, "usage: python -m megazero.deepspeed"),
        (["missing.py"], {}, "usage: python -m megazero.deepspeed"),
        ([__file__], {"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE=2(.|\n)*torchrun"),
        ([__file__], {"RANK": "0", "WORLD_SIZE": "1"}, "LOCAL_RANK is not"),
    ],
)
def test_the_command_refuses_to_start_without_a_script_or_with_tasks_that_would_each_train_alone(
    command: list[str],
    environment: dict[str, str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as end:
        main(command)
    assert end.value.code == 2
    assert re.search(said, capsys.readouterr().err)


def test_importing_the_names_costs_no_torch() -> None:
    code = "import sys, megazero.deepspeed, megazero.deepspeed.utils; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def _under_its_name(rank: int) -> None:
    stand_for_deepspeed()
    for module in filter(None, HOMES):
        theirs, ours = import_module(f"deepspeed.{module}"), import_module(f"megazero.deepspeed.{module}")
        assert theirs is ours, module
        assert (
            getattr(import_module("deepspeed"), module.partition(".")[0])
            is sys.modules[f"deepspeed.{module.partition('.')[0]}"]
        )
        for name in _names_of(module):
            assert getattr(theirs, name) == lookup(module, name)
            assert name in dir(theirs)
    for unsupported in ("moe", "moe.layer", "ops.sparse_attention", "runtime.data_pipeline.data_routing.helper"):
        import_module(f"deepspeed.{unsupported}")


def test_every_module_is_one_under_both_names() -> None:
    run_world(1, _under_its_name)
    for name in _names_of(""):
        assert lookup("", name) is not None
    for name in ("ReduceOp", "all_reduce", "get_rank", "new_group"):
        assert getattr(comm, name) is not None
    for accelerator in (Accelerator("cpu"), Accelerator("cuda")):
        for name in _OF_TORCH:
            assert getattr(accelerator, name) is not None, name


def _source(module: str) -> ast.Module:
    """The installed DeepSpeed's source of a module, which is not run."""
    spec = importlib.util.find_spec("deepspeed")
    if spec is None or spec.origin is None:
        pytest.skip("needs DeepSpeed's source: pip install deepspeed")
    path = Path(spec.origin).parent.joinpath(*module.split("."))
    return ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())


@pytest.mark.parametrize(
    ("module", "home"),
    [
        ("runtime.lr_schedules", "runtime.lr_schedules"),
        ("runtime.activation_checkpointing.checkpointing", "checkpointing"),
        ("runtime.zero.partition_parameters", "zero"),
        ("runtime.pipe.topology", "runtime.pipe.topology"),
        ("runtime.utils", "runtime.utils"),
        ("utils.logging", "utils.logging"),
    ],
)
def test_what_is_called_the_same_takes_the_same_arguments_by_position(module: str, home: str) -> None:
    for node in _source(module).body:
        if (
            not isinstance(node, ast.ClassDef | ast.FunctionDef)
            or node.name not in _names_of(home)
            or node.name == "Init"
        ):
            continue
        made = [one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"]
        theirs = [one.arg for one in (made[0] if isinstance(node, ast.ClassDef) else node).args.args]
        signature = inspect.signature(lookup(home, node.name)).parameters.values()
        ours = [one.name for one in signature if one.kind is one.POSITIONAL_OR_KEYWORD]
        theirs = theirs[1:] if made else theirs
        assert ours[: len(theirs)] == theirs, node.name


def _public_names(module: str) -> set[str]:
    """What a module of the installed DeepSpeed defines, and takes from its own modules, by its source."""
    names: set[str] = set()
    for node in _source(module).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom) and node.level:
            names |= {alias.asname or alias.name for alias in node.names}
    if not module:
        spec = importlib.util.find_spec("deepspeed")
        assert spec is not None
        assert spec.origin is not None
        names |= {one.name for one in Path(spec.origin).parent.iterdir() if (one / "__init__.py").exists()}
    return {name for name in names if name[0] not in "_*"}


# Which version it is, and what its own modules hand to one another.
INTERNAL = {
    "": {
        "MUON_OPTIMIZER", "TORCH_DISTRIBUTED_DEFAULT_PORT", "datastates", "git_branch", "git_hash", "load_ds_config",
        "merge_tp_model_init_into_config", "record_tp_model_init_args", "resolve_per_head_muon_after_sharding",
        "set_optimizer_flags", "version",
    },
    "utils": {
        "get_caller_func", "get_numactl_cmd", "instrument_w_nvtx", "log_dist_once", "map_to_flat_opt_states",
        "recursive_getattr", "recursive_setattr", "set_log_level_from_string",
    },
}  # fmt: skip


@pytest.mark.parametrize(
    "module", ["", "ops.adam", "pipe", "runtime.pipe", "runtime.pipe.topology", "runtime.zero", "utils"]
)
def test_every_public_name_of_deepspeed_is_had_or_refused(module: str) -> None:
    names = _public_names(module) - INTERNAL.get(module, set())
    assert len(names) > 1
    for name in sorted(names):
        assert lookup(module, name) is not None, name


def test_every_module_of_deepspeed_can_be_imported() -> None:
    _source("")
    folder = Path(str(importlib.util.find_spec("deepspeed").origin)).parent  # type: ignore[union-attr]
    for file in folder.rglob("*.py"):
        module = ".".join(file.relative_to(folder).with_suffix("").parts).removesuffix("__init__").rstrip(".")
        import_module(f"megazero.deepspeed.{module}".rstrip("."))


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("", "init_inference"),
        ("moe.layer", "MoE"),
        ("ops.lamb", "FusedLamb"),
        ("runtime.zero.stage3", "estimate_zero3_model_states_mem_needs_all_live"),
        ("utils", "safe_get_full_fp32_param"),
    ],
)
def test_what_is_not_supported_can_be_imported_and_says_so_when_it_is_called(module: str, name: str) -> None:
    found = lookup(module, name)
    path = f"{module}.{name}".lstrip(".")
    with pytest.raises(NotImplementedError, match=f"megazero does not support deepspeed.{path}; "):
        found(1, two=2)
    for use in (int, float, list, lambda it: it["x"], lambda it: type(it)("Sub", (it,), {})()):
        with pytest.raises(NotImplementedError):
            use(found)
    assert not isinstance(nn.Linear(1, 1), found)


def test_what_does_not_exist_is_an_error_that_names_it() -> None:
    with pytest.raises(ImportError, match=r"megazero has no deepspeed\.foo; "):
        exec("import megazero.deepspeed.foo.bar")
    with pytest.raises(ImportError, match=r"no deepspeed\.utils\.foo; "):
        exec("from megazero.deepspeed.utils import foo")


def test_the_page_has_every_module_and_every_name() -> None:
    for module in HOMES:
        assert not module or f"`{module}`" in PAGE, module
        for name in _names_of(module):
            assert f"`{name}`" in PAGE, name
    for pattern in NAMES["unsupported"].split():
        assert f"`{pattern}`" in PAGE, pattern


@pytest.mark.parametrize("axes", [["pipe", "data"], ["pipe", "data", "model"], ["data", "model", "pipe"]])
def test_a_topology_numbers_its_ranks_row_by_row(axes: list[str]) -> None:
    """As arrays of C order do; the groups along an axis are its lines."""
    dims = [2, 3, 2][: len(axes)]
    topology = ProcessTopology(axes, dims)
    ranks = np.arange(np.prod(dims)).reshape(dims)
    assert topology.world_size() == ranks.size
    for rank in range(ranks.size):
        coordinates = dict(zip(axes, (int(i) for i in np.unravel_index(rank, dims)), strict=True))
        assert topology.get_coord(rank)._asdict() == coordinates
        assert topology.get_rank(**coordinates) == rank
    for number, axis in enumerate(axes):
        lines = np.moveaxis(ranks, number, -1).reshape(-1, dims[number]).tolist()
        assert topology.get_axis_comm_lists(axis) == sorted(lines)
        assert topology.get_dim(axis) == dims[number]
        assert topology.get_axis_list(axis, 1) == sorted(ranks.take(1, number).flatten().tolist())
    with pytest.raises(ValueError, match="expert"):
        ProcessTopology(["pipe", "expert"], [2, 2])
    with pytest.raises(ValueError, match="filter_match"):
        topology.get_rank(pipe=0)


def _grid(rank: int) -> None:
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=1)
    grid = PipelineParallelGrid(topology)
    assert grid.parallel_state.grid == RankGrid(pp=2, tp=2)
    assert (grid.get_stage_id(), grid.get_slice_parallel_rank(), grid.get_data_parallel_id()) == (
        rank // 2,
        rank % 2,
        0,
    )
    assert grid.get_model_parallel_world_size() == 4
    assert grid.get_model_parallel_rank() == rank
    assert grid.get_data_parallel_group_ranks() == [rank]
    assert grid.stage_to_global(1) == 2 + rank % 2
    assert (
        dist.get_process_group_ranks(grid.get_pipe_parallel_group()) == topology.get_axis_comm_lists("pipe")[rank % 2]
    )
    with pytest.raises(RuntimeError, match="no process group over dp of 1 ranks"):
        grid.get_data_parallel_group()
    with pytest.raises(AttributeError, match="get_expert_parallel_rank"):
        grid.get_expert_parallel_rank()


def test_a_grid_knows_its_groups() -> None:
    run_world(4, _grid)


def test_optimizers_have_deepspeed_s_defaults_and_refuse_another_update() -> None:
    w = [nn.Parameter(torch.zeros(2))]
    assert type(script_optimizers.adam(w)) is torch.optim.AdamW
    assert script_optimizers.adam(w).defaults["weight_decay"] == 0
    assert type(script_optimizers.adam(w, adam_w_mode=False)) is torch.optim.Adam
    assert type(script_optimizers.adam(w, adamw_mode=False, amsgrad=True)) is torch.optim.Adam
    for option in ("bias_correction", "fp32_optimizer_states"):
        with pytest.raises(ValueError, match=f"{option}=false is not offered"):
            script_optimizers.adam(w, **{option: False})


def test_the_cpu_answers_as_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    device: Any = Accelerator("cpu")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert device.device_count() == 3
    assert (device.device_name(1), device.communication_backend_name(), device.is_available()) == ("cpu", "gloo", True)
    assert 0 < device.memory_allocated() <= device.total_memory()
    assert 0 < device.available_memory() < device.total_memory()
    device.manual_seed_all(3)
    drawn = torch.rand(1)
    assert torch.equal(drawn, torch.rand(1, generator=torch.Generator().manual_seed(3)))
    assert device.on_accelerator(drawn)
    assert device.LongTensor is torch.LongTensor
    with device.device(0), device.stream(None):
        device.synchronize()
        device.empty_cache()
    state = device.get_rng_state(0)
    drawn = torch.rand(1)
    device.set_rng_state(state, 0)
    assert torch.equal(torch.rand(1), drawn)


def test_every_call_of_deepspeed_s_accelerator_is_had_or_named() -> None:
    (theirs,) = (node for node in _source("accelerator.abstract_accelerator").body if isinstance(node, ast.ClassDef))
    names = {node.name for node in theirs.body if isinstance(node, ast.FunctionDef) and node.name[0] != "_"}
    row = next(line for line in PAGE.splitlines() if line.startswith("| `accelerator` |"))
    for name in sorted(names):
        if hasattr(Accelerator("cpu"), name):
            assert f"`{name}`" in row, name
        else:
            with pytest.raises(AttributeError, match=f"no '{name}'"):
                getattr(Accelerator("cpu"), name)
