"""What a model directory from outside says and our models do not read: told in one line or refused."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from test_hugging_face import MODELS, command, hub_model, linked, run_of, saved

from megazero.checkpoint.hugging_face.config import format_of
from megazero.checkpoint.hugging_face.exporter import export_model
from megazero.checkpoint.index import HF_CONFIG, CheckpointError
from megazero.formats.hugging_face import MODEL_TOML, import_model

pytestmark = pytest.mark.slow  # starts whole runs


@pytest.fixture(scope="module")
def hubs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: hub_model(family, tmp_path_factory.mktemp(family)) for family in ("llama", "gpt2")}


TOLD: list[tuple[str, dict[str, Any], list[str]]] = [
    ("llama", {}, []),
    ("llama", {"attention_dropout": 0.1}, ["attention_dropout = 0.1: attention here drops nothing"]),
    ("llama", {"pretraining_tp": 4}, ["pretraining_tp = 4: here each product is computed at once"]),
    ("llama", {"sliding_window": 64, "auto_map": {"AutoModel": "m.py"}}, ["sliding_window = 64, auto_map = {'AutoMod"]),
    ("llama", {"sliding_window": "null", "use_cache": True, "torch_dtype": "float32", "bos_token_id": 7}, []),
    ("gpt2", {"attn_pdrop": 0.0}, []),
    ("gpt2", {}, ["attn_pdrop = 0.1: attention here drops nothing"]),
    ("gpt2", {"attn_pdrop": 0.0, "embd_pdrop": 0.0}, ["embd_pdrop = 0.0 and resid_pdrop = 0.1: model.dropout is one"]),
    ("gpt2", {"attn_pdrop": 0.0, "new_key": "x" * 1000}, ["new_key = 'xxx"]),
    ("gpt2", {"attn_pdrop": 0.0, "a\n[launch]\nextensions = ['x.py']": "\n[launch]\n"}, ["a?[launch]?extensions"]),
]


@pytest.mark.parametrize(("family", "changes", "lines"), TOLD)
def test_every_key_that_no_table_names_is_told(
    family: str, changes: dict[str, Any], lines: list[str], hubs: dict[str, Path], tmp_path: Path
) -> None:
    hub = linked(hubs[family], tmp_path / "hub", **changes)
    if changes.get("sliding_window") == "null":
        config = json.loads((hub / HF_CONFIG).read_text()) | {"sliding_window": None}
        (hub / HF_CONFIG).write_text(json.dumps(config))
    imported = import_model(hub, tmp_path / "ours")
    assert len(imported.notes) == len(lines)
    for said, wanted in zip(imported.notes, lines, strict=True):
        assert len(said) < 200
        assert wanted in said
    text = (tmp_path / "ours" / MODEL_TOML).read_text()
    assert all(f"# {said}" in text for said in imported.notes)
    assert set(tomllib.loads(text)) == {"model", "checkpoint"}


# As its authors have published it, without token ids.
GPT2 = {
    "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1, "embd_pdrop": 0.1,
    "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12,
    "n_layer": 12, "n_positions": 1024, "resid_pdrop": 0.1, "summary_activation": None, "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True, "summary_type": "cls_index", "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}, "vocab_size": 50257,
}  # fmt: skip


def test_a_published_configuration_says_nothing_that_is_unknown() -> None:
    assert [line.split(" =")[0] for line in format_of("gpt2").dropped_settings(GPT2)] == ["attn_pdrop"]


def test_positions_beyond_the_models_are_told(hubs: dict[str, Path], tmp_path: Path) -> None:
    shown = command("import", hubs["llama"], tmp_path / "long", "--seq-len", "32")
    assert "# seq_len = 32 exceeds max_position_embeddings = 16" in shown.stdout
    assert import_model(hubs["llama"], tmp_path / "short", seq_len=8).notes == ()


@pytest.mark.parametrize("file", ["/etc/passwd", "../part.safetensors", "sub/../../part.safetensors", "", 3, None])
def test_an_index_does_not_lead_out_of_its_folder(file: object, hubs: dict[str, Path], tmp_path: Path) -> None:
    hub = linked(hubs["llama"], tmp_path / "hub")
    weights = load_file(hub / "model.safetensors")
    (hub / "model.safetensors").unlink()
    save_file(weights, tmp_path / "part.safetensors")
    index = {"weight_map": dict.fromkeys(weights, "part.safetensors") | {"lm_head.weight": file}}
    (hub / "model.safetensors.index.json").write_text(json.dumps(index))
    (hub / "part.safetensors").symlink_to(tmp_path / "part.safetensors")  # a cache of downloads has links
    with pytest.raises(CheckpointError, match=r"index\.json names .* for lm_head\.weight; it must be a file in"):
        import_model(hub, tmp_path / "no")
    index["weight_map"]["lm_head.weight"] = "part.safetensors"
    (hub / "model.safetensors.index.json").write_text(json.dumps(index))
    import_model(hub, tmp_path / "yes")


def test_a_checkpoint_cannot_name_any_file_as_its_tokenizer(tmp_path: Path) -> None:
    secret = tmp_path / "credentials.json"
    secret.write_text('{"password": "x"}')
    saved(run_of(1, model=MODELS["tied"]), tmp_path / "step", steps=0, config={"data": {"tokenizer": str(secret)}})
    made = export_model(tmp_path / "step", tmp_path / "out")
    assert f"no tokenizer: {secret} is no file of the tokenizers library" in made.about
    assert all(b"password" not in file.read_bytes() for file in (tmp_path / "out").iterdir())


def test_settings_of_generation_that_are_no_object_are_refused(hubs: dict[str, Path], tmp_path: Path) -> None:
    hub = linked(hubs["llama"], tmp_path / "hub")
    for content in ("[1]", "{"):
        (hub / "generation_config.json").write_text(content)
        with pytest.raises(CheckpointError, match=r"generation_config\.json must hold a JSON object"):
            import_model(hub, tmp_path / "no")
