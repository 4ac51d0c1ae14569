"""Checkpoints of other frameworks come in with their moments, and go back: training goes on as it would have there."""

from __future__ import annotations

import copy
import os
import pickle
import re
import shutil
import signal
import tarfile
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import run_world
from torch import Tensor, nn
from torch.distributed.checkpoint import _version
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from typer.testing import CliRunner, Result
from worlds import EPS, GPT2, LLAMA, LR, engine_on, global_batch, micro_batches, of_transformers, run_of

from megazero.checkpoint.index import CheckpointError, read_trainer_state
from megazero.checkpoint.tensor_file import StoredTensors
from megazero.cli.commands import app
from megazero.config.document import to_toml
from megazero.engine import Position
from megazero.engine.phases import changes
from megazero.formats import exporter
from megazero.formats.foreign import ADAM
from megazero.formats.importer import import_checkpoint
from megazero.formats.megatron import differences
from megazero.formats.pickles import load_metadata
from megazero.formats.tables import tables_of
from megazero.models.config import RopeScaling

pytestmark = pytest.mark.slow  # starts whole runs

MODEL = LLAMA | {"num_layers": 2, "hidden_size": 32, "tie_embeddings": False, "rope_theta": 500.0}
UNSCALED = "--ignore", "model.rope_scaling"  # that the model below has none, which torchtitan's own do
BEFORE, THEN = 2, 2  # steps there, and after the change
DECAY, CLIP = 0.1, 0.5


def command(*words: object) -> Result:
    return CliRunner().invoke(app, ["checkpoint", *map(str, words)])


# ---------------------------------------------------------------------------------------------------------------------
# A Llama as torchtitan names and computes it: rotary positions turn neighbours


class Attention(nn.Module):
    def __init__(self, hidden: int, heads: int, kv_heads: int, seq: int, theta: float) -> None:
        super().__init__()
        self.size, size = hidden // heads, hidden // heads
        self.wq, self.wo = nn.Linear(hidden, hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.wk, self.wv = (nn.Linear(hidden, kv_heads * size, bias=False) for _ in range(2))
        self.groups = heads // kv_heads
        angles = torch.outer(torch.arange(seq), theta ** (-torch.arange(0, size, 2) / size))
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles), persistent=False)

    def turned(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * self.turns[:, None]).flatten(-2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, self.size)) for w in (self.wq, self.wk, self.wv))
        q, k, v = (y.transpose(1, 2) for y in (self.turned(q), self.turned(k), v))
        k, v = (y.repeat_interleave(self.groups, dim=1) for y in (k, v))
        return self.wo(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(hidden, inner, bias=False) for _ in range(2))
        self.w2 = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Layer(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.attention = Attention(
            model.hidden_size, model.num_heads, model.num_kv_heads, model.seq_len, model.rope_theta
        )
        self.feed_forward = FeedForward(model.hidden_size, model.ffn_hidden_size)
        self.attention_norm, self.ffn_norm = (nn.RMSNorm(model.hidden_size, model.norm_eps) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Titan(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(model.vocab_size, model.hidden_size)
        self.layers = nn.ModuleDict({str(number): Layer(model) for number in range(model.num_layers)})
        self.norm = nn.RMSNorm(model.hidden_size, model.norm_eps)
        self.output = nn.Linear(model.hidden_size, model.vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x)
        return self.output(self.norm(x))


FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class There:
    """FSDP2 and AdamW on the ranks of this world, saved as torchtitan saves."""

    def __init__(self, run: Any) -> None:
        self.run = run
        torch.manual_seed(0)
        self.model = Titan(run.config.model)
        for layer in self.model.layers.values():
            fully_shard(layer)
        fully_shard(self.model)
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        norms = [p for p in self.model.parameters() if p.dim() == 1]
        groups = [{"params": matrices, "weight_decay": DECAY}, {"params": norms, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=EPS)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda _: 1.0)

    def train(self, first: int, steps: int) -> list[float]:
        rank, world, losses = dist.get_rank(), dist.get_world_size(), []
        for step in range(first, first + steps):
            tokens, labels = (one.chunk(world)[rank] for one in global_batch(self.run, step))
            count = (global_batch(self.run, step)[1] != -100).sum()
            loss = F.cross_entropy(self.model(tokens).flatten(0, 1), labels.flatten(), reduction="sum") / count
            (loss * world).backward()  # FSDP takes the mean over ranks
            nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            whole = loss.detach().clone()
            dist.all_reduce(whole)
            losses.append(float(whole))
        return losses

    def state(self, step: int) -> dict[str, Any]:
        return {
            **self.model.state_dict(),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer, options=FLAT),
            "lr_scheduler": {"last_epoch": step},
            "dataloader": {"dp_rank_0": b"where it stands"},
            "train_state": {"step": torch.tensor(step, dtype=torch.int32), "ntokens_seen": 99},
        }

    def load(self, path: Path) -> None:
        state = {
            **self.model.state_dict(),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer, options=FLAT),
        }
        dcp.load(state, checkpoint_id=path)
        self.model.load_state_dict(state, strict=False)
        set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"], options=FLAT)


def train_there(_: int, run: Any, path: Path) -> list[float]:
    there = There(run)
    before = there.train(0, BEFORE)
    dcp.save(there.state(BEFORE), checkpoint_id=path)
    return before + there.train(BEFORE, 2 * THEN)


def go_on_there(_: int, run: Any, path: Path) -> list[float]:
    there = There(run)
    there.train(0, 1)  # other weights, and a state to load into
    there.load(path)
    return there.train(BEFORE + THEN, THEN)


def go_on_here(rank: int, run: Any, origin: Path, out: Path | None = None) -> list[float]:
    engine = engine_on(rank, run, init_weights=False)
    position = engine.load(origin, "any data")
    assert (position.step, position.samples, position.tokens) == (BEFORE, 8 * BEFORE, 8 * BEFORE * 16)
    losses = [engine.train_step(micro_batches(run, engine.state, BEFORE + step), LR).loss for step in range(THEN)]
    if out is not None:
        engine.save(out, Position(BEFORE + THEN, 8 * (BEFORE + THEN)), "any data")
    return losses


def shape(world: int, model: dict[str, Any] = MODEL, **sections: Any) -> Any:
    return run_of(world, model=model, optimizer={"grad_clip": CLIP, "weight_decay": DECAY}, **sections)


def run_file(path: Path, run: Any) -> Path:
    path.write_text(to_toml(run.config))
    return path


@pytest.fixture(scope="module")
def titan(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """A checkpoint after BEFORE steps, and the losses of those and of the steps that follow there."""
    path = tmp_path_factory.mktemp("titan") / "step-2"
    return path, run_world(2, train_there, shape(1), path)[0]


def test_a_run_of_torchtitan_goes_on_here(titan: tuple[Path, list[float]], tmp_path: Path) -> None:
    path, losses = titan
    toml = run_file(tmp_path / "run.toml", shape(1))
    shown = command("import", path, tmp_path / "ours", "--run-file", toml, *UNSCALED)
    assert shown.exit_code == 0, shown.output
    assert "lr_scheduler is not taken over" in shown.output
    assert "weight_decay is not taken over: it differs" in shown.output
    trainer = read_trainer_state(tmp_path / "ours")
    assert changes(trainer, shape(1).config) == {}  # what the checkpoint says of AdamW is what the run file says
    assert trainer.optimizer_steps == BEFORE
    whole = shape(4, parallel={"tp": 2, "pp": 2})
    halves = shape(2, zero={"stage": 3})
    then = losses[BEFORE : BEFORE + THEN]
    assert run_world(2, go_on_here, halves, tmp_path / "ours")[0] == pytest.approx(then, rel=1e-5)
    assert run_world(4, go_on_here, whole, tmp_path / "ours", tmp_path / "later")[0] == pytest.approx(then, rel=1e-5)

    shown = command("export", tmp_path / "later", tmp_path / "back", "--to", "dcp", "--names", "torchtitan-0.2")
    assert "with AdamW's moments" in shown.output, shown.output
    back = run_world(2, go_on_there, shape(1), tmp_path / "back")[0]
    assert back == pytest.approx(losses[BEFORE + THEN :], rel=1e-5)


def test_what_torchtitan_computes_and_no_tensor_shows_is_asked_for(hubs: dict[str, Hub], tmp_path: Path) -> None:
    """Its release 0.1 stored the turns of rotary positions, which it did not scale; from 0.2 on it scales them."""
    state, scaling = titan_qwen3(hubs["llama"].weights), {"type": "llama3", "factor": 8.0, "original_seq_len": 8192}
    turns = torch.polar(torch.ones(16, 4), torch.outer(torch.arange(16.0), 500.0 ** -(torch.arange(0, 8, 2) / 8)))
    scaled, stored = {"rope_scaling": scaling}, {"freqs_cis": turns}
    refused: list[tuple[dict[str, Tensor], dict[str, Any], str]] = [
        ({}, {}, 'rope_scaling = { type = "llama3", factor = 8.0, original_seq_len = 8192 }, which no tensor shows'),
        (stored, {"rope_theta": 501.0}, "freqs_cis is of another model.rope_theta or model.rope_scaling"),
        (stored, {"rope_scaling": {"type": "linear", "factor": 2.0}}, "freqs_cis is of another"),
    ]
    taken = [
        ({}, scaled, "have rope_theta = 500000.0, which no tensor shows; the run file has 500.0"),
        (stored, {}, ""),
    ]
    for number, (more, model, message) in enumerate((*refused, *taken)):
        dcp.save(state | more, checkpoint_id=tmp_path / f"theirs{number}", no_dist=True)
        toml = run_file(tmp_path / "run.toml", shape(1, MODEL | model))
        shown = command("import", tmp_path / f"theirs{number}", tmp_path / f"ours{number}", "--run-file", toml)
        assert ("error" in shown.output, message in shown.output) == (number < len(refused), True), shown.output
    back = command("export", tmp_path / "ours4", tmp_path / "back", "--to", "dcp").output
    assert "model.rope_scaling = none (scaling=" in back


def test_folders_of_accelerate_from_an_old_torch_come_in(
    hubs: dict[str, Hub], tmp_path: Path, monkeypatch: Any
) -> None:
    """Before 2.4 groups were one value and metadata had fewer fields; before 2.3 two classes had another name."""
    hub = hubs["llama"]
    monkeypatch.setattr(_version, "_derived_version", "2_3")
    wrapped = {name.replace("layers.1.", "layers.1._orig_mod."): one for name, one in hub.weights.items()}
    parts = {"pytorch_model_fsdp_0": {"model": wrapped}, "optimizer_0": {"optimizer": hub.optimizer}}
    for name, state in parts.items():
        dcp.save(state, checkpoint_id=tmp_path / "theirs" / name, no_dist=True)
        about = pickle.loads((tmp_path / "theirs" / name / ".metadata").read_bytes())
        del about.__dict__["storage_meta"], about.__dict__["version"]
        named, before = rb"checkpoint\.metadata\n(?:_(?=MEM)|(?=TensorP))", b"_shard.sharded_tensor.metadata\n"
        about = re.sub(named, before, pickle.dumps(about, protocol=2))
        (tmp_path / "theirs" / name / ".metadata").write_bytes(about)
    toml = run_file(tmp_path / "run.toml", hub.run)
    made = import_checkpoint(tmp_path / "theirs", tmp_path / "ours", run_file=toml)
    assert (made.trainer.optimizer_steps, made.trainer.config["optimizer"]["lr"]) == (BEFORE, LR)
    for name, moments in hub.optimizer["state"].items():
        assert torch.equal(StoredTensors(tmp_path / "ours", "exp_avg_sq")[name].whole(), moments["exp_avg_sq"])
        assert torch.equal(StoredTensors(tmp_path / "ours", "model")[name].whole(), hub.weights[name])


# ---------------------------------------------------------------------------------------------------------------------
# transformers' names: a script saves model and optimizer as one dictionary


def steps_of(model: nn.Module, optimizer: torch.optim.Optimizer, run: Any, first: int, steps: int) -> list[float]:
    losses = []
    for step in range(first, first + steps):
        tokens, labels = global_batch(run, step)
        loss = F.cross_entropy(model(tokens).logits.flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def plain_adamw(model: nn.Module) -> torch.optim.AdamW:
    groups = [[p for p in model.parameters() if (p.dim() > 1) == decays] for decays in (True, False)]
    decays = ({"params": group, "weight_decay": decay} for group, decay in zip(groups, (DECAY, 0.0), strict=True))
    return torch.optim.AdamW(list(decays), lr=LR, betas=(0.9, 0.95), eps=EPS)


@dataclass
class Hub:
    """A model of transformers that has taken BEFORE steps: how it would be run here, its state, and its next losses."""

    run: Any
    weights: dict[str, Tensor]
    optimizer: dict[str, Any]
    losses: list[float]


def hub_model(family: str) -> Hub:
    from transformers import GPT2Config, GPT2LMHeadModel

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if family == "gpt2":
        run = shape(1, GPT2 | {"num_layers": 2})
        sizes = {"vocab_size": 61, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 64}
        model = GPT2LMHeadModel(GPT2Config(**sizes, embd_pdrop=0.0, resid_pdrop=0.0, attn_pdrop=0.0))
    else:
        own = {"head_dim": 16} if family == "qwen3" else {}
        run = shape(1, MODEL | {"family": family} | own)
        model = of_transformers(run.config.model, family, **own)
    optimizer = plain_adamw(model)
    steps_of(model, optimizer, run, 0, BEFORE)
    state = copy.deepcopy((model.state_dict(), get_optimizer_state_dict(model, optimizer)))
    losses = steps_of(model, optimizer, run, BEFORE, THEN)
    torch.set_num_threads(threads)
    return Hub(run, *state, losses)


@pytest.fixture(scope="module")
def hubs() -> dict[str, Hub]:
    return {family: hub_model(family) for family in ("llama", "gpt2", "qwen3")}


def test_a_script_with_a_model_of_transformers_goes_on_here(hubs: dict[str, Hub], tmp_path: Path) -> None:
    hub = hubs["gpt2"]
    state = {"model": hub.weights, "optimizer": hub.optimizer, "step": BEFORE}
    dcp.save(state, checkpoint_id=tmp_path / "theirs", no_dist=True)
    toml = run_file(tmp_path / "run.toml", hub.run)
    made = import_checkpoint(tmp_path / "theirs", tmp_path / "ours", run_file=toml)
    assert (made.trainer.step, made.trainer.optimizer_steps, made.trainer.consumed_samples) == (BEFORE, BEFORE, 16)
    for name, moments in hub.optimizer["state"].items():
        assert torch.equal(StoredTensors(tmp_path / "ours", "exp_avg_sq")[name].whole(), moments["exp_avg_sq"])
    whole = shape(2, GPT2 | {"num_layers": 2}, parallel={"pp": 2})
    assert run_world(2, go_on_here, whole, tmp_path / "ours")[0] == pytest.approx(hub.losses, rel=1e-5)


# ---------------------------------------------------------------------------------------------------------------------
# Megatron-Core: checkpoints that it wrote itself, see megatron_core/generate.py


def titan_qwen3(named: dict[str, Tensor]) -> dict[str, Tensor]:
    """Its rotary positions turn halves of a head, so only the names differ."""
    words = {
        "model.": "",
        "embed_tokens": "tok_embeddings",
        "self_attn": "attention",
        "input_layernorm": "attention_norm",
    }
    words |= {"post_attention_layernorm": "ffn_norm", "mlp": "feed_forward", "o_proj": "wo"}
    words |= {f"{one}_proj": f"qkv_linear.w{one}" for one in "qkv"}
    words |= {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    found = {}
    for name, one in named.items():
        theirs = name
        for ours, word in words.items():
            theirs = theirs.replace(ours, word)
        found[theirs] = one
    return found


@pytest.fixture(scope="module")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("megatron")
    with tarfile.open(Path(__file__).parent / "megatron_core" / "checkpoints.tar.xz") as archive:
        archive.extractall(path, filter="data")
    return path


def megatron_run(family: str, **model: Any) -> Any:
    sizes = {"hidden_size": 8, "ffn_hidden_size": 8, "vocab_size": 16, "seq_len": 8} | model
    own = {"qwen2": {"tie_embeddings": True}, "qwen3": {"head_dim": 4}, "mistral": {"sliding_window": 3}}.get(
        family, {}
    )
    return shape(1, (GPT2 if family == "gpt2" else MODEL | {"family": family}) | {"num_layers": 2} | sizes | own)


def with_common(path: Path, said: Any = (), **changes: Any) -> Path:
    """Write common.pt; `said` of None leaves out the args."""
    common = torch.load(path / "common.pt", weights_only=False)
    common["args"] = Namespace(**vars(common["args"]) | changes)
    if said is None:
        del common["args"]
    torch.save(common, path / "common.pt")
    return path


def test_qwen3_of_torchtitan_comes_in(hubs: dict[str, Hub], tmp_path: Path) -> None:
    """Every weight and moment is that of transformers under its own name; what these compute, `test_families.py` holds."""
    hub = hubs["qwen3"]
    kinds = {kind: {name: one[kind] for name, one in hub.optimizer["state"].items()} for kind in ADAM}
    state = titan_qwen3(hub.weights)
    for kind, named in kinds.items():
        state |= {f"optimizer.state.{name}.{kind}": tensor for name, tensor in titan_qwen3(named).items()}
    state |= {f"optimizer.state.{name}.step": torch.tensor(BEFORE) for name in titan_qwen3(hub.weights)}
    dcp.save(state, checkpoint_id=tmp_path / "theirs", no_dist=True)
    import_checkpoint(tmp_path / "theirs", tmp_path / "ours", run_file=run_file(tmp_path / "run.toml", hub.run))
    for kind, named in {"model": hub.weights, **kinds}.items():
        stored = StoredTensors(tmp_path / "ours", kind)
        assert set(stored.files) == set(named)
        for name, tensor in named.items():
            assert torch.equal(stored[name].whole(), tensor), (kind, name)


@pytest.mark.parametrize("nemo", [False, True], ids=["megatron", "nemo"])
@pytest.mark.parametrize(
    "case",
    [
        *("llama/dp_reshardable", "llama/fully_reshardable", "llama-0.15/fully_sharded_model_space"),
        *("qwen2/dp_reshardable", "qwen3/dp_reshardable", "gpt2/dp_reshardable", "mistral/dp_reshardable"),
    ],
)
def test_what_megatron_core_wrote_computes_its_logits_and_has_its_optimizer(
    case: str, nemo: bool, megatron: Path, tmp_path: Path
) -> None:
    """Moments and masters are moved as the weights are, which give the logits."""
    from transformers import AutoModelForCausalLM

    family, theirs, run = re.split("[-/]", case)[0], megatron / case, megatron_run(re.split("[-/]", case)[0])
    if nemo:
        theirs = tmp_path / "theirs"
        shutil.copytree(megatron / case, theirs / "weights")
        if "0.15" not in case:  # whose pickle needs its classes
            edit(theirs / "weights", puts_behind_module)
    made = import_checkpoint(theirs, tmp_path / "ours", run_file=run_file(tmp_path / "run.toml", run))
    assert (made.trainer.step, made.trainer.optimizer_steps, made.trainer.consumed_samples) == (2, 2, 16 if nemo else 4)
    truth = torch.load((megatron / case).parent / "truth.pt")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32, attn_implementation="eager")
    tokens = torch.arange(16).reshape(2, 8) * 5 % 13
    assert torch.allclose(model(tokens).logits, truth["logits"], atol=1e-5)
    words = {
        "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
        "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
    }
    table = next(one for one in tables_of(family) if one.name == "megatron")
    state = {re.sub("|".join(words), lambda found: words[found[0]], name): one for name, one in truth["state"].items()}
    for kind, theirs_kind in {"master": "param", **dict.fromkeys(ADAM, "")}.items():
        held = StoredTensors(tmp_path / "ours", kind)
        for name in held.files:
            place = table.theirs(name)
            whole = place.take(state[place.name][theirs_kind or kind], run.config.model)
            assert torch.equal(held[name].whole(), whole), (kind, name)
            assert whole.abs().sum() > 0, (kind, name)


def test_buckets_of_tensor_and_pipeline_parallel_ranks_hold_what_megatron_gathers(
    megatron: Path, tmp_path: Path
) -> None:
    toml = run_file(tmp_path / "run.toml", megatron_run("qwen3"))
    for form in ("dp_reshardable", "fully_reshardable"):
        import_checkpoint(megatron / "qwen3-tp2-pp2" / form, tmp_path / form, run_file=toml)
    for kind in ("model", "master", *ADAM):
        flat, whole = (StoredTensors(tmp_path / form, kind) for form in ("dp_reshardable", "fully_reshardable"))
        assert all(torch.equal(flat[name].whole(), whole[name].whole()) for name in whole.files)


def swaps_masters(about: Any) -> None:
    stored = {index.fqn: index for index in about.storage_data}
    one, other = (
        stored[f"optimizer.state.param.{name}.weight"] for name in ("output_layer", "embedding.word_embeddings")
    )
    about.storage_data[one], about.storage_data[other] = about.storage_data[other], about.storage_data[one]


def test_a_master_that_does_not_round_to_its_weight_is_refused(megatron: Path, tmp_path: Path) -> None:
    shutil.copytree(megatron / "llama" / "fully_reshardable", tmp_path / "theirs")
    edit(tmp_path / "theirs", swaps_masters)
    toml = run_file(tmp_path / "run.toml", megatron_run("llama"))
    with pytest.raises(CheckpointError, match=r"does not round to it; .*--ignore '\* of \*'"):
        import_checkpoint(tmp_path / "theirs", tmp_path / "no", run_file=toml)
    made = import_checkpoint(tmp_path / "theirs", tmp_path / "ours", run_file=toml, ignore=["* of *"])
    assert made.trainer.optimizer_steps == 0


def test_args_of_megatron_are_compared_with_the_run_file(megatron: Path, tmp_path: Path) -> None:
    theirs, number = tmp_path / "theirs", iter(range(99))
    toml = run_file(tmp_path / "run.toml", megatron_run("llama"))
    shutil.copytree(megatron / "llama" / "dp_reshardable", theirs)

    def shown(said: Any = (), **args: Any) -> Result:
        return command("import", with_common(theirs, said, **args), tmp_path / f"{next(number)}", "--run-file", toml)

    assert (
        "num_layers=3, model.num_layers is 2; rotary_interleaved=True, "
        in shown(num_layers=3, rotary_interleaved=True).stderr
    )
    assert not (tmp_path / "0").exists()
    same = {
        "exit_signal": signal.SIGTERM,
        "num_layers": 2,
        "rotary_interleaved": False,
        "window_size": [-1, 0],
        "decoupled_weight_decay": False,
    }
    assert shown(**same, normalization="RMSNorm", position_embedding_type="rope", swiglu=True).exit_code == 0
    assert changes(read_trainer_state(tmp_path / "1"), megatron_run("llama").config)["optimizer.name"][0] == "adam"
    assert "has no args: nothing but names and shapes was compared" in shown(None).stdout
    run = Namespace(it=Evil(tmp_path / "ran"))
    torch.save({"args": run, "iteration": 2}, theirs / "common.pt")
    evil = command("import", theirs, tmp_path / "no", "--run-file", toml)
    assert (evil.exit_code, (tmp_path / "ran").exists()) == (1, False)
    assert "common.pt cannot be read: it is damaged" in evil.stderr


@pytest.mark.parametrize(
    ("key", "value"),
    {
        "position_embedding_type": "yarn",
        "use_rope_scaling": True,
        "softmax_type": "off-by-one",
        "qk_l2_norm": True,
        "swiglu": False,
        "normalization": "LayerNorm",
        "window_size": (4, 0),
    }.items(),
)
def test_what_megatron_computes_otherwise_and_keeps_in_no_tensor_is_refused(key: str, value: Any) -> None:
    model = shape(1).config.model
    assert [line for line in differences({key: value}, model) if line.startswith(f"{key}={value!r}, ")]
    scaled = model.model_copy(update={"rope_scaling": RopeScaling(type="llama3", factor=4.0, original_seq_len=8192)})
    assert not list(differences({"use_rope_scaling": True, "rope_scaling_factor": 4.0}, scaled))
    assert list(differences({"bias_gelu_fusion": False}, megatron_run("gpt2").config.model))  # then it is that of erf
    windowed = model.model_copy(update={"family": "mistral", "sliding_window": 5})
    assert not list(differences({"window_size": (4, 0)}, windowed))
    assert list(differences({"num_layers": 2}, windowed)) == ["window_size=None, model.sliding_window is 5"]


# ---------------------------------------------------------------------------------------------------------------------
# What is damaged, foreign or meant badly


class Evil:
    """A pickle that would make a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


class Odd:
    """A class that no checkpoint of torch has."""


def edit(folder: Path, change: Callable[[Any], None]) -> None:
    about = pickle.loads((folder / ".metadata").read_bytes())
    change(about)
    (folder / ".metadata").write_bytes(pickle.dumps(about))


def puts_behind_module(about: Any) -> None:
    """Names as NeMo has them."""

    def moved(name: str) -> str:
        return re.sub(r"^(optimizer\.state\.\w+\.|(?!optimizer\.))", r"\1module.", name)

    about.state_dict_metadata = {moved(name): one for name, one in about.state_dict_metadata.items()}
    about.storage_data = {replace(index, fqn=moved(index.fqn)): one for index, one in about.storage_data.items()}


def adds_adapter(about: Any) -> None:
    about.state_dict_metadata["adapter.weight"] = about.state_dict_metadata["norm.weight"]


def drops_a_chunk(about: Any) -> None:
    about.state_dict_metadata["output.weight"].chunks.pop()


def drops_a_moment(about: Any) -> None:
    del about.state_dict_metadata["optimizer.state.norm.weight.exp_avg_sq"]


def test_what_is_damaged_or_not_understood_is_named_and_nothing_is_left(
    titan: tuple[Path, list[float]], tmp_path: Path
) -> None:
    toml, number = run_file(tmp_path / "run.toml", shape(1)), iter(range(99))

    def refused(message: str, change: Callable[[Path], None] = lambda _: None, *words: object) -> None:
        theirs, out = tmp_path / f"theirs{next(number)}", tmp_path / "no"
        shutil.copytree(titan[0], theirs)
        change(theirs)
        shown = command("import", theirs, out, *(words or ("--run-file", toml)), *UNSCALED)
        assert re.search(message, shown.stderr), shown.stderr
        assert shown.exit_code == 1
        assert not out.exists() or not list(out.iterdir())
        assert not (tmp_path / "ran").exists()

    def edited(change: Callable[[Any], None]) -> Callable[[Path], None]:
        return partial(edit, change=change)

    def plants(value: Any) -> Callable[[Any], None]:
        def change(about: Any) -> None:
            about.planner_data = value

        return change

    def plants_in_chunk(theirs: Path) -> None:
        shutil.rmtree(theirs)
        dcp.save({"train_state": {"step": Evil(tmp_path / "ran")}}, checkpoint_id=theirs, no_dist=True)

    wide = run_file(tmp_path / "wide.toml", shape(1, MODEL | {"ffn_hidden_size": 128}))
    refused("__1_0.distcp is missing|__1_0.distcp.*No such file", lambda theirs: (theirs / "__1_0.distcp").unlink())
    refused(r"__0_0.distcp.*ends before byte", lambda theirs: os.truncate(theirs / "__0_0.distcp", 5000))
    refused("adapter.weight belongs to no parameter of a llama.*--ignore NAME", edited(adds_adapter))
    refused("output.weight cannot be read: its chunks .* leave out elements", edited(drops_a_chunk))
    refused("exp_avg_sq of norm.weight is missing", edited(drops_a_moment))
    refused(
        r"w1.weight has shape \[64, 32\], the configuration makes it \[128, 32\]", lambda _: None, "--run-file", wide
    )
    refused("does not describe its model: give --run-file", lambda _: None, "--from", "dcp")
    refused(r"posix.system \(named in .metadata\) is not understood", edited(plants(Evil(tmp_path / "ran"))))
    refused("Odd .named in .metadata. is not understood", edited(plants([Odd()])))
    refused(".metadata cannot be read", lambda theirs: (theirs / ".metadata").write_bytes(b"no pickle"))
    refused("train_state.step cannot be read.*posix.system", plants_in_chunk)

    theirs = tmp_path / "adapted"
    shutil.copytree(titan[0], theirs)
    edit(theirs, adds_adapter)
    taken = command("import", theirs, tmp_path / "ours", "--run-file", toml, "--ignore", "adapter.*", *UNSCALED)
    assert taken.exit_code == 0, taken.output
    written = read_trainer_state(tmp_path / "ours").config["optimizer"]
    for name in ("adam", "lion"):
        named = run_file(tmp_path / f"{name}.toml", shape(1))
        section = re.compile(r"\[optimizer\].*?(?=\n\[)", re.DOTALL)
        named.write_text(section.sub(f'[optimizer]\nname = "{name}"\n', named.read_text()))
        shown = command("import", theirs, tmp_path / name, "--run-file", named, "--ignore", "adapter.*", *UNSCALED)
        if name == "adam":
            assert "the moments are those of adamw, the run file has adam: adam adds" in shown.stdout, shown.output
            assert read_trainer_state(tmp_path / name).config["optimizer"]["name"] == written["name"] == "adamw"
        else:
            assert re.search(f"AdamW's exp_avg and exp_avg_sq, and optimizer.name={name}", shown.stderr), shown.output
            assert not (tmp_path / name).exists()
    begun = import_checkpoint(
        theirs, tmp_path / "at", run_file=toml, step=7, samples=70, ignore=["adapter.*", UNSCALED[1]]
    )
    assert (begun.trainer.step, begun.trainer.consumed_samples, begun.trainer.optimizer_steps) == (7, 70, BEFORE)


def test_of_two_models_the_one_that_is_not_ignored_is_taken(hubs: dict[str, Hub], tmp_path: Path) -> None:
    hub = hubs["llama"]
    toml = run_file(tmp_path / "run.toml", hub.run)
    zeros = {name: torch.zeros_like(tensor) for name, tensor in hub.weights.items()}
    for number, names in enumerate((("ema", "model"), ("model", "ema"))):
        theirs = tmp_path / f"theirs{number}"
        sets = {"ema": zeros, "model": hub.weights}
        dcp.save({name: sets[name] for name in names}, checkpoint_id=theirs, no_dist=True)
        shown = command("import", theirs, tmp_path / "no", "--run-file", toml)
        assert re.search(r"two whole sets.*(ema.*model|model.*ema).*--ignore", shown.stderr), shown.output
        for ignored, kept in (names, names[::-1]):
            out = tmp_path / f"{kept}{number}"
            import_checkpoint(theirs, out, run_file=toml, ignore=[f"{ignored}.*"])
            norm = StoredTensors(out, "model")["model.norm.weight"].whole()
            assert torch.equal(norm, sets[kept]["model.norm.weight"])


def test_an_export_that_fails_removes_what_it_wrote_and_nothing_else(
    hubs: dict[str, Hub], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = hubs["llama"].run.config.model.model_dump()
    mistral = shape(1, model | {"family": "mistral", "sliding_window": 5})
    dcp.save(dict(hubs["llama"].weights), checkpoint_id=tmp_path / "theirs", no_dist=True)
    import_checkpoint(tmp_path / "theirs", tmp_path / "ours", run_file=run_file(tmp_path / "run.toml", mistral))
    shown = command("export", tmp_path / "ours", tmp_path / "whole", "--to", "dcp")
    assert "the file does not carry model.sliding_window" in shown.stdout, shown.output

    def fails(*_: Any) -> Tensor:
        (tmp_path / "out" / "precious.txt").write_text("of another")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(exporter, "_given", fails)
    shown = command("export", tmp_path / "ours", tmp_path / "out", "--to", "dcp")
    assert re.search("out could not be written .*No space left", shown.stderr), shown.output
    assert os.listdir(tmp_path / "out") == ["precious.txt"]


def test_a_member_of_an_enumeration_may_be_named_and_nothing_else_is_read_by_name() -> None:
    def pickled(kind: str, name: str) -> bytes:
        return b"\x80\x02" + f"cbuiltins\ngetattr\nc{kind}\nV{name}\n".encode() + b"\x86R."

    encoding = "torch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING"
    assert load_metadata(pickled(encoding, "TORCH_PRESERVE_FORMAT"))[0] is _MEM_FORMAT_ENCODING.TORCH_PRESERVE_FORMAT
    for kind, name in ((encoding, "__class__"), ("collections\nOrderedDict", "fromkeys")):
        with pytest.raises(ValueError, match="which was refused"):
            load_metadata(pickled(kind, name))


def test_a_pickle_does_not_change_a_class_and_a_flipped_bit_is_seen(
    titan: tuple[Path, list[float]], tmp_path: Path
) -> None:
    toml, number = run_file(tmp_path / "run.toml", shape(1)), iter(range(99))

    def refused(message: str, change: Callable[[Path], None]) -> None:
        theirs, out = tmp_path / f"theirs{next(number)}", tmp_path / "no"
        shutil.copytree(titan[0], theirs)
        change(theirs)
        with pytest.raises(CheckpointError, match=message) as found:
            import_checkpoint(theirs, out, run_file=toml, ignore=UNSCALED)
        assert "weights_only" not in str(found.value)
        assert not out.exists() or not list(out.iterdir())

    def sets_name(theirs: Path) -> None:
        """Then `Path(file).name` would be any file."""
        about, kept = (theirs / ".metadata").read_bytes(), pickle.dumps({"name": "x"}, protocol=2)
        assert about[:1] == b"\x80"
        evil = b"\x80\x02cpathlib\nPosixPath\nN" + kept[2:-1] + b"\x86b0" + about[2:]
        (theirs / ".metadata").write_bytes(evil)

    def flips(theirs: Path) -> None:
        info = next(
            info
            for index, info in pickle.loads((theirs / ".metadata").read_bytes()).storage_data.items()
            if index.fqn == "tok_embeddings.weight"
        )
        file = theirs / info.relative_path
        data = bytearray(file.read_bytes())
        data[info.offset + info.length // 2] ^= 0x40
        file.write_bytes(data)

    def sized(*size: int) -> Callable[[Path], None]:
        def change(about: Any) -> None:
            about.state_dict_metadata["norm.weight"].size = torch.Size(size)

        return partial(edit, change=change)

    def overlaps(about: Any) -> None:
        chunks = about.state_dict_metadata["output.weight"].chunks
        chunks[1].offsets = torch.Size([1, 0])
        for index, info in list(about.storage_data.items()):
            if index.fqn == "output.weight" and index.offset != torch.Size([0, 0]):
                about.storage_data[type(index)(index.fqn, [1, 0])] = info

    refused("sets attributes of a type", sets_name)
    assert isinstance(PurePosixPath.name, property)
    refused("tok_embeddings.weight cannot be read: Bad CRC-32", flips)
    refused("norm.weight has shape .4398046511104.", sized(1 << 42))
    refused("output.weight cannot be read: its chunks overlap", partial(edit, change=overlaps))
    refused("metadata is damaged", partial(edit, change=partial(setattr_in, "norm.weight", "size", None)))
    for path in ("../x", "", "a\0b", "/etc/passwd", 3):
        refused("does not name a file of that folder", partial(edit, change=partial(all_in, path)))


def setattr_in(tensor: str, name: str, value: Any, about: Any) -> None:
    setattr(about.state_dict_metadata[tensor], name, value)


def all_in(path: Any, about: Any) -> None:
    for info in about.storage_data.values():
        info.relative_path = path


def test_a_mean_of_squares_is_not_negative(hubs: dict[str, Hub], tmp_path: Path) -> None:
    hub = hubs["llama"]
    state = copy.deepcopy(hub.optimizer)
    state["state"]["model.norm.weight"]["exp_avg_sq"][3] = -1.0
    dcp.save(
        {"model": hub.weights, "optimizer": state, "step": BEFORE}, checkpoint_id=tmp_path / "theirs", no_dist=True
    )
    with pytest.raises(CheckpointError, match=r"model.norm.weight: exp_avg_sq, a mean of squares, has negative values"):
        import_checkpoint(tmp_path / "theirs", tmp_path / "ours", run_file=run_file(tmp_path / "run.toml", hub.run))
