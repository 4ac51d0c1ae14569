"""Weights come in from transformers and go out to it unchanged; checkpoints are compared and verified."""

from __future__ import annotations

import json
import os
import tomllib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_world
from plain_model import logits
from safetensors.torch import load_file, save_file
from saved_memory import Alive
from torch import Tensor
from typer.testing import CliRunner, Result
from worlds import GPT2, LLAMA, LR, engine_on, global_batch, micro_batches, plain_config, run_of

from megazero.checkpoint.folder import Folder, LocalFolder, folder_at
from megazero.checkpoint.hugging_face.config import logical_shapes
from megazero.checkpoint.hugging_face.exporter import export_model
from megazero.checkpoint.index import (
    HF_CONFIG,
    MANIFEST,
    TRAINER_STATE,
    UNFINISHED,
    CheckpointError,
    TrainerState,
    find_damage,
    read_manifest,
    read_trainer_state,
    to_json,
)
from megazero.checkpoint.save import save_checkpoint
from megazero.checkpoint.shards import new_folder
from megazero.checkpoint.tensor_file import StoredTensors
from megazero.cli.commands import app
from megazero.config import ResolvedRun, load_config
from megazero.config.document import to_toml
from megazero.data.identity import fingerprint_of
from megazero.data.tokenizer import FileTokenizer
from megazero.formats.exporter import export_dcp
from megazero.formats.hugging_face import import_model
from megazero.formats.importer import import_checkpoint
from megazero.models.registry import FAMILIES
from megazero.training.resuming import foresee

pytestmark = pytest.mark.usefixtures("one_thread")

MODELS = {
    "untied": LLAMA | {"tie_embeddings": False, "rope_theta": 500000.0},
    "tied": LLAMA | {"tie_embeddings": True},
    "gpt2": GPT2,
}
BF16 = {"precision": {"dtype": "bf16"}}
SMALL = 10_000  # bytes; less than the weights


def saved(run: ResolvedRun, directory: Path, steps: int = 2, **trainer: Any) -> tuple[float, float]:
    """Train alone, save, and give loss and gradient norm of the step that would follow."""
    engine = engine_on(0, run)
    for step in range(steps):
        engine.train_step(micro_batches(run, engine.state, step), LR)
    model = run.config.model
    about = {"model": model.model_dump(), "config": {"data": {"tokenizer": "byte"}}, "shape": {}, "versions": {}}
    state = TrainerState(steps, steps * 8, 0, steps, **{"data_fingerprint": "data"} | about | trainer)
    files = {HF_CONFIG: to_json(FAMILIES[model.family].hugging_face_config(model, run.config.precision.dtype))}
    save_checkpoint(directory, engine.sharded_model.sharded_state, engine.state, state, files)
    return next_step(engine, run)


def next_step(engine: Any, run: ResolvedRun) -> tuple[float, float]:
    statistics = engine.compute_gradients(micro_batches(run, engine.state, 2))
    return statistics.loss, statistics.grad_norm


def resumed(rank: int, run: ResolvedRun, origin: Path) -> tuple[float, float]:
    """Loss and gradient norm of the same step, from an imported checkpoint and on data of any fingerprint."""
    engine = engine_on(rank, run, init_weights=False)
    position = engine.load(origin, "some data")
    assert (position.step, position.samples, position.tokens) == (0, 0, 0)
    return next_step(engine, run)


def stored(directory: Path, kind: str = "model") -> dict[str, Tensor]:
    tensors = StoredTensors(directory, kind)
    return {name: tensors[name].whole().clone() for name in tensors.files}


def assert_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert set(a) == set(b)
    for name, tensor in a.items():
        assert tensor.dtype == b[name].dtype
        assert torch.equal(tensor, b[name]), name


def theirs(directory: Path, tokens: Tensor) -> Tensor:
    from transformers import AutoModelForCausalLM

    model, about = AutoModelForCausalLM.from_pretrained(
        directory, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
    )
    assert not any(about[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        return model.eval()(input_ids=tokens).logits


def command(*words: object) -> Result:
    return CliRunner().invoke(app, ["checkpoint", *map(str, words)])


# ---------------------------------------------------------------------------------------------------------------------
# Out and in again


@pytest.mark.parametrize("model", MODELS)
def test_a_run_goes_on_from_what_was_exported_and_imported(model: str, tmp_path: Path) -> None:
    run = run_of(1, model=MODELS[model])
    wanted = saved(run, tmp_path / "step")
    weights, tokens = stored(tmp_path / "step"), global_batch(run, 0)[0]
    for limit, files in ((10**9, 1), (SMALL, None)):
        out, again = tmp_path / f"out{limit}", tmp_path / f"again{limit}"
        made = export_model(tmp_path / "step", out, max_shard_bytes=limit)
        assert (out / "model.safetensors").exists() == (files == 1)
        assert files in (made.files, None)
        assert made.files == len(list(out.glob("*.safetensors")))
        given = theirs(out, tokens)
        assert (given - logits(weights, plain_config(run), tokens)).norm() / given.norm() < 1e-5
        imported = import_model(out, again, max_shard_bytes=limit)
        assert imported.model == run.config.model.model_copy(update={"init_std": imported.model.init_std})
        assert_equal(stored(again), weights)
        assert find_damage(again) == []
        assert resumed(0, run, again) == pytest.approx(wanted, rel=1e-6)
    places = {"training": {"run_dir": str(tmp_path / "run")}, "checkpoint": {"resume": str(again)}}
    other = run_of(1, model=MODELS[model], optimizer={"name": "lion"}, **places)  # there is no state of another one
    assert foresee(other.config, None)[0].startswith(f"goes on from {again}, step 0,")
    halves = run_of(2, model=MODELS[model], parallel={"tp": 2, "sequence_parallel": True}, zero={"stage": 3})
    assert run_world(2, resumed, halves, again)[0] == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("old_format", [False, True])
def test_pickled_weights_come_in(model: str, old_format: bool, tmp_path: Path) -> None:
    run = run_of(1, model=MODELS[model])
    saved(run, tmp_path / "step", steps=0)
    export_model(tmp_path / "step", tmp_path / "hub")
    weights = load_file(tmp_path / "hub" / "model.safetensors")
    (tmp_path / "hub" / "model.safetensors").unlink()
    if old_format:
        torch.save(weights, tmp_path / "hub" / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    else:
        names = sorted(weights)
        parts = {"a.bin": names[::2], "b.bin": names[1::2]}
        for file, held in parts.items():
            torch.save({name: weights[name] for name in held}, tmp_path / "hub" / file)
        index = {"weight_map": {name: file for file, held in parts.items() for name in held}}
        (tmp_path / "hub" / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    import_model(tmp_path / "hub", tmp_path / "again")
    assert_equal(stored(tmp_path / "again"), stored(tmp_path / "step"))


def test_masters_make_another_dtype_exact_and_a_value_that_does_not_fit_is_named(tmp_path: Path) -> None:
    saved(run_of(1, model=MODELS["tied"], **BF16), tmp_path / "step")
    for dtype, kind in ((None, "model"), ("bf16", "model"), ("fp32", "master")):
        out = tmp_path / f"{dtype}"
        assert export_model(tmp_path / "step", out, dtype=dtype).dtype == ("fp32" if dtype == "fp32" else "bf16")
        assert_equal(load_file(out / "model.safetensors"), stored(tmp_path / "step", kind))
        assert json.loads((out / HF_CONFIG).read_text())["dtype"] == ("float32" if dtype == "fp32" else "bfloat16")
    assert export_model(tmp_path / "step", tmp_path / "fp16", dtype="fp16").dtype == "fp16"
    weights = load_file(tmp_path / "fp32" / "model.safetensors")
    weights["model.norm.weight"][3] = 70000.0
    save_file(weights, tmp_path / "fp32" / "model.safetensors")
    import_model(tmp_path / "fp32", tmp_path / "large")
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has a value of 70000, which fp16 cannot hold"):
        export_model(tmp_path / "large", tmp_path / "no", dtype="fp16")
    assert list((tmp_path / "no").iterdir()) == []
    weights["model.norm.weight"][3] = torch.nan
    save_file(weights, tmp_path / "fp32" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight holds values that are not numbers"):
        import_model(tmp_path / "fp32", tmp_path / "no")


# ---------------------------------------------------------------------------------------------------------------------
# In


def hub_model(family: str, directory: Path, **changes: Any) -> Path:
    """A small random model as transformers saves it."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    if family == "gpt2":
        sizes = {"vocab_size": 61, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 4}
        GPT2LMHeadModel(GPT2Config(**sizes | changes)).save_pretrained(directory)
        return directory
    sizes = {"vocab_size": 61, "max_position_embeddings": 16, "hidden_size": 32, "intermediate_size": 48}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    LlamaForCausalLM(LlamaConfig(**sizes | heads | changes)).save_pretrained(directory)
    return directory


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"rms_norm_eps": 3e-4, "rope_parameters": {"rope_type": "default", "rope_theta": 700.0}}),
        ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
        ("gpt2", {"n_inner": 80, "layer_norm_epsilon": 3e-4, "resid_pdrop": 0.0}),
        ("gpt2", {}),
    ],
)
def test_our_model_computes_what_theirs_does(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    hub = hub_model(family, tmp_path / "hub", **changes)
    shown = command("import", hub, tmp_path / "ours")
    assert shown.exit_code == 0, shown.output
    text = (tmp_path / "ours" / "model.toml").read_text()
    assert text in shown.output
    run = load_config(tmp_path / "ours" / "model.toml", ["precision.dtype=fp32", "training.global_batch_size=8"], 1)
    assert tomllib.loads(text)["model"] == read_trainer_state(tmp_path / "ours").model
    assert run.config.checkpoint.resume == str(tmp_path / "ours")
    assert run.config.model.dropout == (0.1 if family == "gpt2" and not changes else 0.0)
    tokens, labels = global_batch(run, 0)
    given = theirs(hub, tokens)
    ours = logits(stored(tmp_path / "ours"), plain_config(run), tokens)
    assert (ours - given).norm() / given.norm() < 1e-5
    engine = engine_on(0, run, init_weights=False)
    engine.load(tmp_path / "ours", "any")
    loss = torch.nn.functional.cross_entropy(given.flatten(0, 1), labels.flatten())
    assert engine.evaluate(micro_batches(run, engine.state, 0)).loss == pytest.approx(float(loss), rel=1e-5)
    assert (theirs(tmp_path / "ours", tokens) - given).norm() / given.norm() < 1e-6  # a checkpoint is a model directory


def test_names_of_older_releases_come_in(tmp_path: Path) -> None:
    """The hub's GPT-2 has no prefix but the mask's buffers; older Llamas keep their frequencies and a copy of the head."""
    for family, tied in (("gpt2", True), ("llama", True), ("llama", False)):
        name = f"{family}{tied}"
        hub = hub_model(family, tmp_path / name, **({} if family == "gpt2" else {"tie_word_embeddings": tied}))
        import_model(hub, tmp_path / f"{name}-new")
        weights = load_file(hub / "model.safetensors")
        prefix = {"gpt2": "transformer.", "llama": "model."}[family]
        if tied:
            head = weights[f"{prefix}{'wte' if family == 'gpt2' else 'embed_tokens'}.weight"].clone()
            weights = {name.removeprefix(prefix): tensor for name, tensor in weights.items()} | {"lm_head.weight": head}
        weights["h.0.attn.bias" if family == "gpt2" else "model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(2)
        if family == "gpt2":
            weights["h.1.attn.masked_bias"] = torch.tensor(-1e4)
        save_file(weights, hub / "model.safetensors")
        import_model(hub, tmp_path / f"{name}-old")
        assert_equal(stored(tmp_path / f"{name}-old"), stored(tmp_path / f"{name}-new"))


@pytest.mark.parametrize("family", FAMILIES)
def test_tied_weights_come_in_as_scripts_save_them(family: str, tmp_path: Path) -> None:
    """With the head alone, wrapped, or held beside other state; with their configuration, or with a run file."""
    run, form = run_of(1, model={"family": family, "tie_embeddings": True}), FAMILIES[family].hugging_face
    weights = {name: torch.randn(shape) for name, shape in logical_shapes(run.config.model).items()}
    headed = {form.head if name == form.embedding else name: one for name, one in weights.items()}
    wrapped = {"_orig_mod.module." + name.replace(".1.", ".1._fsdp_wrapped_module."): headed[name] for name in headed}
    (tmp_path / "run.toml").write_text(to_toml(run.config))
    for file in ("model.safetensors", "last.ckpt", "pytorch_model.bin"):
        (theirs := tmp_path / f"of {file}").mkdir()
        torch.save({"state_dict": wrapped, "epoch": 3, "best_loss": torch.ones(())}, theirs / file)
        run_file: Path | None = tmp_path / "run.toml"
        if file == "model.safetensors":
            save_file(wrapped, theirs / file)
            (theirs / "optimizer.bin").touch()
        elif file == "pytorch_model.bin":
            (theirs / HF_CONFIG).write_bytes(to_json(form.config(run.config.model, "fp32")))
            run_file = None
        made = import_checkpoint(theirs / file if file == "last.ckpt" else theirs, tmp_path / file, run_file=run_file)
        assert "not taken over: weights alone are read, and moments begin anew" in str(made.notes)
        assert_equal(stored(tmp_path / file), weights)


YARN = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}
REFUSED = [
    ("llama", {"model_type": "bloom"}, "model_type='bloom' is not supported; llama"),
    ("llama", {"rope_parameters": YARN | {"factor": 0.5}}, "model.rope_scaling.factor.* greater than or equal to 1"),
    ("llama", {"rope_scaling": {"type": "dynamic"}, "rope_parameters": None}, "'dynamic'.*must be 'default', 'linear'"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported; it must be 1.0"),
    ("llama", {"hidden_act": "gelu", "partial_rotary_factor": 0.5}, "hidden_act='gelu'.*; partial_"),
    ("llama", {"head_dim": 7}, r"model\.head_dim = 7: must be even"),
    ("llama", {"vocab_size": None}, "vocab_size is missing"),
    ("llama", {"quantization_config": {"bits": 4}}, "quantization_config=.* leave it out"),
    ("llama", {"intermediate_size": 64}, r"gate_proj.weight has shape \[48, 32\], the configuration makes it \[64, 32"),
    ("llama", {"num_hidden_layers": 1}, "model.layers.1.*belongs to no parameter of a llama"),
    ("gpt2", {"activation_function": "relu"}, "activation_function='relu' .*'gelu_new'"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True is not supported"),
]


@pytest.fixture(scope="module")
def hub_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: hub_model(family, tmp_path_factory.mktemp(family)) for family in ("llama", "gpt2")}


def linked(hub: Path, directory: Path, **config: Any) -> Path:
    """The same model under another configuration."""
    directory.mkdir()
    (directory / "model.safetensors").symlink_to(hub / "model.safetensors")
    changed = {**json.loads((hub / HF_CONFIG).read_text()), **config}
    (directory / HF_CONFIG).write_text(json.dumps({key: value for key, value in changed.items() if value is not None}))
    return directory


@pytest.mark.parametrize(("family", "changes", "message"), REFUSED)
def test_what_our_models_do_not_compute_is_refused(
    family: str, changes: dict[str, Any], message: str, hub_models: dict[str, Path], tmp_path: Path
) -> None:
    hub = linked(hub_models[family], tmp_path / "hub", **changes)
    with pytest.raises(CheckpointError, match=message):
        import_model(hub, tmp_path / "no")
    assert not (tmp_path / "no").exists()


def test_weights_that_do_not_fit_are_refused(hub_models: dict[str, Path], tmp_path: Path) -> None:
    weights = load_file(hub_models["llama"] / "model.safetensors")
    norm, embedding = "model.norm.weight", weights["model.embed_tokens.weight"]

    def refused(weights: dict[str, Tensor], **config: Any) -> str:
        hub = linked(hub_models["llama"], tmp_path / str(len(list(tmp_path.iterdir()))), **config)
        (hub / "model.safetensors").unlink()
        save_file(weights, hub / "model.safetensors")
        with pytest.raises(CheckpointError) as error:
            import_model(hub, tmp_path / "no")
        return str(error.value)

    assert f"{norm} is of torch.int8; float32, bfloat16 and float16 are" in refused(
        weights | {norm: weights[norm].char()}
    )
    headless = {name: tensor for name, tensor in weights.items() if name != "lm_head.weight"}
    assert "lm_head.weight is missing" in refused(headless)
    assert "lm_head.weight differs from" in refused(
        headless | {"lm_head.weight": embedding + 1}, tie_word_embeddings=True
    )
    assert "adapter.weight belongs to no parameter" in refused(weights | {"adapter.weight": embedding.clone()})
    assert "norm.weight belongs to no parameter" in refused(weights | {"norm.weight": weights[norm].clone()})
    mixed = {name: tensor.half() if "mlp" in name else tensor.bfloat16() for name, tensor in weights.items()}
    hub = linked(hub_models["llama"], tmp_path / "mixed")
    (hub / "model.safetensors").unlink()
    save_file(mixed, hub / "model.safetensors")
    assert import_model(hub, tmp_path / "widest").dtype == "fp32"
    assert_equal(stored(tmp_path / "widest"), {name: tensor.float() for name, tensor in mixed.items()})
    assert import_model(hub, tmp_path / "bf16", dtype="bf16", seq_len=8).model.seq_len == 8
    assert {tensor.dtype for tensor in stored(tmp_path / "bf16").values()} == {torch.bfloat16}


def test_files_that_are_missing_or_broken_are_named(hub_models: dict[str, Path], tmp_path: Path) -> None:
    def refused(hub: Path, message: str) -> None:
        shown = command("import", hub, tmp_path / "no")
        assert shown.exit_code == 1
        assert message in shown.stderr, shown.stderr
        assert not (tmp_path / "no").exists()

    refused(tmp_path / "nowhere", "nowhere does not exist; a model of the Hugging Face hub is fetched first")
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        pointed = linked(hub_models["llama"], tmp_path / f"pointed-{name}")
        (pointed / name).unlink(missing_ok=True)
        (pointed / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
        refused(pointed, f"{name} is a git-lfs pointer")
    hub = linked(hub_models["llama"], tmp_path / "hub")
    weights = (hub / "model.safetensors").resolve()
    (hub / "model.safetensors").unlink()
    refused(hub, "hub has no weights: neither model.safetensors nor pytorch_model.bin")
    (hub / "model.safetensors").write_bytes(weights.read_bytes()[:-7])
    refused(hub, "model.safetensors is damaged")
    (hub / "model.safetensors").unlink()
    (hub / "pytorch_model.bin").write_bytes(b"no pickle")
    refused(hub, "pytorch_model.bin cannot be read")
    index = {"weight_map": dict.fromkeys(load_file(weights), "part.safetensors")}
    (hub / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(hub, "part.safetensors is missing")
    save_file({"lm_head.weight": torch.ones(3)}, hub / "part.safetensors")
    refused(hub, "part.safetensors does not hold")
    good = linked(hub_models["llama"], tmp_path / "good")
    assert "is not empty: it holds" in command("import", good, hub).stderr
    assert "--dtype int8 must be fp32, bf16, fp16" in command("import", good, tmp_path / "no", "--dtype", "int8").stderr
    assert "'0GB' is not a size" in command("import", good, tmp_path / "no", "--max-shard-size", "0GB").stderr
    short = command("import", hub_models["gpt2"], tmp_path / "no", "--seq-len", "8")
    assert "seq_len=8, but a gpt2 has its n_positions=16 rows" in short.stderr


# ---------------------------------------------------------------------------------------------------------------------
# Out


def make_tokenizer(path: Path) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<|endoftext|>", "[UNK]", "the", "cat", "sat"]
    tokenizer = Tokenizer(models.WordLevel({word: id_ for id_, word in enumerate(words)}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path))
    return tokenizer


def test_the_tokenizer_travels_out_and_in(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = make_tokenizer(tmp_path / "data" / "tokenizer.json")
    about = {"config": {"data": {"tokenizer": str(tmp_path / "data" / "tokenizer.json")}}}
    run = run_of(1, model=MODELS["tied"])
    saved(run, tmp_path / "step", steps=0, **about)
    shown = command("export", tmp_path / "step", tmp_path / "out")
    assert shown.exit_code == 0, shown.output
    assert f"the tokenizer {tmp_path / 'data' / 'tokenizer.json'}" in shown.output
    text = "the cat sat <|endoftext|>"
    loaded = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert loaded(text)["input_ids"] == tokenizer.encode(text).ids
    assert loaded.eos_token_id == 0
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == {"eos_token_id": 0}
    assert json.loads((tmp_path / "out" / HF_CONFIG).read_text())["eos_token_id"] == 0
    imported = import_model(tmp_path / "out", tmp_path / "again")
    assert tomllib.loads(imported.toml)["data"] == {"tokenizer": str(tmp_path / "again" / "tokenizer.json")}
    assert {"tokenizer.json", "tokenizer_config.json", "model.toml"} <= set(read_manifest(tmp_path / "again"))
    export_model(tmp_path / "again", tmp_path / "once-more")
    files = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert {path.name: path.read_bytes() for path in (tmp_path / "once-more").iterdir()} == files
    data = {"config": {"data": {"tokenizer": str(tmp_path / "data" / "tokenizer.json"), "eod_token": "cat"}}}
    read = FileTokenizer(tmp_path / "data" / "tokenizer.json", "cat").fingerprint
    (tmp_path / "data" / "generation_config.json").write_text('{"eos_token_id": 4, "top_k": 2}')
    saved(run, tmp_path / "named", steps=0, data_fingerprint=fingerprint_of([], read, []), **data)
    assert "the tokenizer" in export_model(tmp_path / "named", tmp_path / "of-named").about
    for name in (HF_CONFIG, "generation_config.json"):
        assert json.loads((tmp_path / "of-named" / name).read_text())["eos_token_id"] == 3
    text = (tmp_path / "data" / "tokenizer.json").read_text()
    (tmp_path / "data" / "tokenizer.json").write_text(text.replace("sat", "mat"))  # after the run
    shown = export_model(tmp_path / "named", tmp_path / "of-another")
    assert "no longer the file that the run read" in shown.about
    assert json.loads((tmp_path / "of-another" / HF_CONFIG).read_text())["eos_token_id"] is None
    (tmp_path / "data" / "tokenizer.json").unlink()
    assert "tokenizer.json of the run does not exist" in export_model(tmp_path / "step", tmp_path / "without").about
    saved(run, tmp_path / "bytes", steps=0)
    shown = command("export", tmp_path / "bytes", tmp_path / "of-bytes")
    assert "no tokenizer: the run read bytes" in shown.output
    assert shown.output.count("\n") == 1


def test_what_cannot_be_exported_is_refused(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    run = run_of(1, model=MODELS["tied"])
    saved(run, tmp_path / "step")
    saved(run, tmp_path / "script", steps=0, model={"module": "Net"})
    saved(run_of(1, model=MODELS["tied"] | {"final_logit_softcapping": 20.0}), tmp_path / "capped", steps=0)

    def refused(step: Path, message: str) -> None:
        shown = command("export", step, tmp_path / "no")
        assert shown.exit_code == 1
        assert message in shown.stderr
        assert not (tmp_path / "no").exists()

    refused(tmp_path / "script", "holds a script's own module, Net, which transformers does not have")
    refused(tmp_path / "capped", "model.final_logit_softcapping = 20.0, which transformers does not compute in a llama")
    with pytest.raises(ValueError, match="megazero-llama"):  # nor does it load the step, as another model
        AutoModelForCausalLM.from_pretrained(tmp_path / "capped")
    refused(tmp_path / "nowhere", "is not a complete checkpoint: nothing is there; name a step")
    assert "is not empty: it holds" in command("export", tmp_path / "step", tmp_path / "script").stderr
    moments = next((tmp_path / "step").glob("exp_avg-*.safetensors"))
    moments.write_bytes(moments.read_bytes()[:-1])
    refused(tmp_path / "step", f"{moments} has")


@pytest.mark.parametrize("direction", ["out", "in"])
def test_a_stopped_conversion_leaves_nothing_that_looks_complete(
    direction: str, hub_models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file that makes a directory whole is begun when all others are finished, and an error leaves none of them."""
    import_model(hub_models["llama"], tmp_path / "step")
    convert: Callable[..., object] = export_model if direction == "out" else import_model
    source = tmp_path / "step" if direction == "out" else hub_models["llama"]
    begun: list[tuple[str, list[str]]] = []
    allowed = [1000]
    create = LocalFolder.create

    def noting(folder: LocalFolder, name: str) -> Any:
        begun.append((name, folder.files()))
        if len(begun) > allowed[0]:
            raise OSError(28, "No space left on device")
        return create(folder, name)

    monkeypatch.setattr(LocalFolder, "create", noting)
    convert(source, tmp_path / "whole", max_shard_bytes=SMALL)
    last, before = begun[-1]
    assert last == (HF_CONFIG if direction == "out" else MANIFEST)
    assert sorted({last, *before} - {UNFINISHED}) == sorted(path.name for path in (tmp_path / "whole").iterdir())
    files = len(begun)
    for allowed[0] in (0, 1, files - 1):
        begun.clear()
        with pytest.raises(CheckpointError, match=r"could not be written \(.*No space left.*nothing was left there"):
            convert(source, tmp_path / "stopped", max_shard_bytes=SMALL)
        assert list((tmp_path / "stopped").iterdir()) == []


def test_a_stopped_conversion_removes_only_what_it_has_written(tmp_path: Path) -> None:
    def fill(folder: Folder) -> None:
        folder.write("model.safetensors", b"x")
        (tmp_path / "README.md").write_text("my model card")
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match="could not be written"), new_folder(tmp_path) as folder:
        fill(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]


@pytest.mark.parametrize("protocol", ["", "memory://"])
def test_two_conversions_into_one_directory_do_not_meet(protocol: str, tmp_path: Path) -> None:
    out = f"{protocol}{tmp_path}/out"
    with new_folder(out) as folder:
        for files in (["unfinished.json"], ["model.safetensors", "unfinished.json"]):
            with pytest.raises(CheckpointError, match=r"is being written by another|is not empty"), new_folder(out):
                pass
            assert folder.files() == files
            folder.write("model.safetensors", b"x")
    assert folder_at(out).files() == ["model.safetensors"]


def test_one_tensor_is_in_memory_at_a_time(tmp_path: Path) -> None:
    """Conversion of dtypes, which copies: the largest tensor twice at most, once more in halves, not the model."""
    wide = MODELS["untied"] | {"hidden_size": 64, "num_layers": 12, "ffn_hidden_size": 256, "vocab_size": 300}
    saved(run_of(1, model=wide), tmp_path / "step", steps=0)
    weights = stored(tmp_path / "step")
    largest, everything = max(one.nbytes for one in weights.values()), sum(one.nbytes for one in weights.values())
    assert everything > 20 * largest
    for convert, source, out in (
        (export_model, tmp_path / "step", tmp_path / "out"),
        (import_model, tmp_path / "out", tmp_path / "again"),
    ):
        with Alive() as memory:
            convert(source, out, dtype="bf16" if convert is export_model else "fp32")
        assert largest / 2 <= memory.most_bytes <= 3 * largest


def test_weights_go_through_an_object_store(hub_models: dict[str, Path], tmp_path: Path) -> None:
    place = f"memory://hf-{os.getpid()}"
    import_model(hub_models["gpt2"], f"{place}/step")
    export_model(f"{place}/step", f"{place}/out", max_shard_bytes=SMALL)
    for name in folder_at(f"{place}/out").files():
        (tmp_path / name).write_bytes(folder_at(f"{place}/out").read(name))
    tokens = torch.arange(16)[None]
    assert torch.equal(theirs(tmp_path, tokens), theirs(hub_models["gpt2"], tokens))
    assert command("verify", place).output.count("intact") == 1
    assert command("diff", f"{place}/step", f"{place}/step").exit_code == 0


# ---------------------------------------------------------------------------------------------------------------------
# diff and verify


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """step-00000002 and step-00000003 of one run."""
    root = tmp_path_factory.mktemp("steps")
    for step in (2, 3):
        saved(run_of(1, model=MODELS["gpt2"]), root / f"step-{step:08d}", steps=step)
    return root


def changed(step: Path, directory: Path, file: str, change: Callable[[Path], None]) -> Path:
    """A checkpoint that says of itself that it is whole, with one file changed."""
    import shutil

    from megazero.checkpoint.folder import FileRecord
    from megazero.checkpoint.index import write_manifest

    shutil.copytree(step, directory)
    change(directory / file)
    folder = folder_at(directory)
    records = {name: FileRecord(folder.size(name) or 0, folder.hash(name)) for name in read_manifest(step)}
    write_manifest(directory, records)
    return directory


def test_diff_tells_what_two_checkpoints_do_not_share(steps: Path, tmp_path: Path) -> None:
    two, three = steps / "step-00000002", steps / "step-00000003"
    same = command("diff", two, two)
    assert (same.exit_code, "the states are equal" in same.output) == (0, True)
    apart = command("diff", two, three)
    assert (apart.exit_code, "the states differ" in apart.output) == (1, True)
    tensors = sum(len(StoredTensors(two, kind).files) for kind in ("model", "exp_avg", "exp_avg_sq"))
    assert f"{tensors} tensors compared: 0 equal, {tensors} different" in apart.output
    assert "consumed_samples: 16, 24\n" in apart.output
    assert command("diff", two, tmp_path).exit_code == 2
    assert command("diff", two, three, "--rtol", "-1").exit_code == 2


def test_diff_measures_one_element(steps: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megazero.checkpoint.compare.CHUNK_ELEMENTS", 100)  # three rows
    two, name = steps / "step-00000002", "transformer.wpe.weight"
    file = StoredTensors(two, "model").files[name]

    def nudge(path: Path) -> None:
        weights = load_file(path)
        nonlocal largest
        largest = weights[name].abs().max().item()
        weights[name][3, 5] += 0.5 * largest
        save_file(weights, path, metadata={"format": "pt"})

    largest = 0.0
    other = changed(two, tmp_path / "other", file, nudge)
    found = command("diff", other, two)
    row = next(line for line in found.output.splitlines() if line.lstrip().startswith(name)).split()
    assert row[1:] == ["model", "[16,", "32]", "float32", "1", "of", "512", f"{largest / 2:.3g}", "0.5"]
    assert found.exit_code == 1
    for option, status in (("0.4", 1), ("0.6", 0)):
        near = command("diff", other, two, "--atol", float(option) * largest)
        assert (near.exit_code, ", 1 close" in near.output) == (status, not status)


def test_verify_has_a_line_for_each_step_and_names_damage(steps: Path, tmp_path: Path) -> None:
    import shutil

    root = tmp_path / "checkpoints"
    shutil.copytree(steps, root)
    whole = command("verify", root)
    assert (whole.exit_code, whole.output.count("intact")) == (0, 2)
    note = root / "step-00000003" / "evaluation.json"
    note.write_text('{"val_loss": 1.5, "checksum": ""}')
    noted = command("verify", root)
    assert (noted.exit_code, noted.output.count("intact")) == (1, 1)
    assert f"{note} is damaged" in noted.output
    assert "unknown: evaluation.json is damaged" in command("inspect", root).output
    note.unlink()
    (root / "step-00000003" / MANIFEST).unlink()
    (root / "notes").mkdir()
    unfinished = command("verify", root)
    assert (unfinished.exit_code, unfinished.output.count("intact")) == (0, 1)
    assert f"step-00000003: incomplete (no {MANIFEST})" in unfinished.output
    assert "notes" not in unfinished.output
    assert command("verify", root / "step-00000003").exit_code == 1
    state = root / "step-00000002" / TRAINER_STATE
    state.write_bytes(state.read_bytes().replace(b'"step": 2', b'"step": 7'))
    damaged = command("verify", root)
    assert damaged.exit_code == 1
    assert f"{state} has changed since it was written" in damaged.output
    (state.parent / MANIFEST).write_text("{}")
    assert command("verify", state.parent).exit_code == 1
    nothing = command("verify", tmp_path / "nowhere")
    assert (nothing.exit_code, nothing.stderr.count("\n")) == (1, 1)


def test_one_file_comes_before_an_index_and_what_is_no_tensor_is_named(tmp_path: Path) -> None:
    hub = hub_model("llama", tmp_path / "hub")
    weights = load_file(hub / "model.safetensors")
    old = {name: torch.zeros_like(one) for name, one in weights.items()}
    save_file(old, hub / "model-00001-of-00001.safetensors")
    index = {"weight_map": dict.fromkeys(old, "model-00001-of-00001.safetensors")}
    (hub / "model.safetensors.index.json").write_text(json.dumps(index))
    import_model(hub, tmp_path / "ours")
    assert stored(tmp_path / "ours")["model.norm.weight"].any()
    with pytest.raises(CheckpointError, match=r"is a checkpoint of megazero: set checkpoint\.resume"):
        import_model(tmp_path / "ours", tmp_path / "no")

    for file in ("model.safetensors", "model.safetensors.index.json"):
        (hub / file).unlink()
    for content, message in (
        (weights | {"lora": {"a": torch.ones(3)}}, r"lora \(in pytorch_model.bin\) is not understood.*--ignore"),
        ([1, 2], "pytorch_model.bin cannot be read: it holds a list"),
    ):
        torch.save(content, hub / "pytorch_model.bin")
        with pytest.raises(CheckpointError, match=message):
            import_model(hub, tmp_path / "no")
    assert not (tmp_path / "no").exists()


def test_all_bytes_that_a_bar_waits_for_are_checked_or_written(tmp_path: Path) -> None:
    saved(run_of(1, model=LLAMA), tmp_path / "step")

    def watched(*places: str) -> tuple[Counter[str], list[Folder]]:
        counts = Counter[str]()

        def count(more: int, done: int) -> None:
            counts.update(more=more, done=done)

        return counts, [folder_at(tmp_path / place).watched(count) for place in places]

    for places, work in ((("step",), find_damage), (("step", "out"), export_model), (("step", "dcp"), export_dcp)):
        counts, folders = watched(*places)
        work(*folders)
        assert counts["more"] == counts["done"] > 0
    counts, folders = watched("again")
    import_model(tmp_path / "out", folders[0])
    assert counts["more"] == counts["done"] > 0
