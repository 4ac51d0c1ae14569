"""What the README, the docs and the examples say is so: files exist, commands parse, examples run."""

from __future__ import annotations

import json
import pydoc
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.main
from harness import free_port, metrics_of, run_command, run_program, without_launcher
from jsonschema import Draft7Validator
from key_page import SCHEMA, to_markdown
from quickstart import ONE_STAGE, QUICKSTART, TINY
from torch import nn
from typer.testing import CliRunner
from worlds import over

from megazero.checkpoint.hugging_face.config import logical_shapes
from megazero.checkpoint.index import TrainerState
from megazero.cli.commands import app
from megazero.config import RunConfig, load_config, resolve
from megazero.config.document import json_schema, reference
from megazero.engine.phases import check_same_run, phases_after
from megazero.formats.tokenize import tokenize_files
from megazero.layers.context_attention import ContextAttention
from megazero.layers.sequence_shard import TokenLayout, sequence_shard
from megazero.models.build_context import BuildContext
from megazero.models.config import ModelConfig
from megazero.models.llama.block import llama_attention, rotary_embedding
from megazero.models.registry import FAMILIES, PARAMETERS, PRESETS
from megazero.parallel_state import Axis
from megazero.settings import toml_value

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
# Ranks, and parameters as published: Sheared-LLaMA-1.3B; Llama 2 7B and 70B; Llama 3.1 8B, Qwen2.5 7B, Qwen3 4B, OLMo 2 7B,
# Mistral 7B, Mixtral 8x7B, Qwen3 30B A3B, OLMoE 1B 7B, SmolLM3 3B, DeepSeek-V2-Lite and V3.
SIZES: dict[str, tuple[int, float | None]] = {
    "quickstart": (8, None), "long_context": (8, None), "llama3_405b_128k": (16384, None), "llama_1.3b_8gpu": (8, 1.345e9),
    "llama_7b_64gpu": (64, 6.738e9), "llama_70b_512gpu": (512, 68.98e9), "llama3_8b_64gpu": (64, 8.030e9),
    "llama3_8b_128k_64gpu": (64, 8.030e9), "qwen2_7b_64gpu": (64, 7.616e9), "qwen3_4b_8gpu": (8, 4.022e9),
    "olmo2_7b_64gpu": (64, 7.299e9), "mistral_7b_64gpu": (64, 7.242e9), "mixtral_8x7b_64gpu": (64, 46.703e9),
    "qwen3_30b_a3b_64gpu": (64, 30.532e9), "olmoe_1b_7b_8gpu": (8, 6.919e9),
    "smollm3_3b_8gpu": (8, 3.075e9), "deepseek_v2_lite_8gpu": (8, 15.706e9), "deepseek_v3_2048gpu": (2048, 671.026e9),
}  # fmt: skip
RUN_SECONDS = 60


# ---------------------------------------------------------------------------------------------------------------------
# Examples


def test_every_example_has_its_ranks_here() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.toml")} == set(SIZES)


@pytest.mark.parametrize("name", SIZES)
def test_an_example_resolves_on_its_cluster_and_has_the_size_in_its_name(name: str) -> None:
    world_size, parameters = SIZES[name]
    run = load_config(EXAMPLES / f"{name}.toml", [], world_size)
    parallel = run.config.parallel
    assert parallel.tp * parallel.cp * parallel.pp * run.dp == world_size
    assert run.micro_batch_size * run.dp * run.accumulation == run.global_batch_size
    if parameters is not None:
        shapes = logical_shapes(run.config.model).values()
        assert sum(prod(shape) for shape in shapes) == pytest.approx(parameters, rel=1e-3)


def test_a_preset_has_as_many_parameters_as_the_published_weights() -> None:
    for name, published in PARAMETERS.items():
        model = resolve(RunConfig(model=ModelConfig(preset=name)), 1).config.model
        assert sum(map(prod, logical_shapes(model).values())) == published, name
    assert {preset["family"] for preset in PRESETS.values()} == {
        name for name in FAMILIES if FAMILIES.is_built_in(name)
    }


def test_editors_take_every_example_and_refuse_what_is_wrong_by_itself() -> None:
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    assert schema == json_schema(), "examples/run.schema.json is out of date: run tests/key_page.py"
    Draft7Validator.check_schema(schema)
    editor = Draft7Validator(schema)
    for path in EXAMPLES.glob("*.toml"):
        text = path.read_text(encoding="utf-8")
        assert text.startswith("#:schema ./run.schema.json\n"), path
        editor.validate(tomllib.loads(text))
    for kept in (
        '[optimizer]\nname = "mine"\noptions = { a = 1 }',
        "[training]\nskip_steps = [12, [15, 16]]",
        reference(),
    ):
        editor.validate(tomllib.loads(kept))
    for wrong in (
        "[model]\nhidden = 1",
        "[parallel]\ntp = '2'",
        "[precision]\ndtype = 'fp23'",
        "[model]\npreset = 'gpt5'",
    ):
        assert not editor.is_valid(tomllib.loads(wrong)), wrong


def test_the_run_at_128k_goes_on_with_the_one_at_8k() -> None:
    """It says that it accepts what it changes of the model and the data, and begins a phase with longer samples."""
    short, long = (load_config(EXAMPLES / f"llama3_8b{name}_64gpu.toml", [], 64).config for name in ("", "_128k"))
    assert long.training.run_dir == short.training.run_dir
    assert (
        short.training.global_batch_size * short.model.seq_len == long.training.global_batch_size * long.model.seq_len
    )
    steps = short.training.steps
    samples, model = steps * short.training.global_batch_size, short.model.model_dump()
    written = TrainerState(steps, samples, 0, steps, "a", model, short.model_dump(mode="json"), {}, {})
    check_same_run(Path("step"), long, "b", written)
    (phase,) = phases_after(written, long, "b")
    assert phase.changed["model.seq_len"] == [8192, 131072]
    assert phase.changed["data.document_mask"] == [False, True]
    assert (phase.step, phase.first_sample, phase.schedule_step) == (steps, samples, steps)


@pytest.mark.slow
def test_the_long_example_trains_with_less_loss_on_another_cut_the_same(tmp_path: Path) -> None:
    """Made small; its ring of 4 and dp 2 beside Ulysses 2 x pp 2 on four ranks."""
    small = ["model.seq_len=1024", "training.steps=4", "training.eval_every_steps=4", "logging.tensorboard=false"]
    shapes = {"as it is": [], "other": ["parallel.cp=2", "parallel.cp_method=ulysses", "parallel.pp=2"]}
    losses = {}
    for name, shape in shapes.items():
        run_dir = tmp_path / name
        more = ["launch.nproc_per_node=4"] if shape else []
        words = [*small, *shape, *more, f"training.run_dir={run_dir}", "launch.device=cpu"]
        done = run_command("train", EXAMPLES / "long_context.toml", *words)
        assert done.returncode == 0, done.stderr
        lines = metrics_of(run_dir)
        losses[name] = [*(line["loss"] for line in lines), lines[-1]["val_loss"]]
        if not shape:
            assert "cp_method auto takes ring" in done.stdout
    assert losses["other"] == pytest.approx(losses["as it is"], rel=1e-5)
    assert losses["as it is"][3] < losses["as it is"][0] - 0.3


@pytest.mark.parametrize("name", ["launch_torchrun.sh", "pretrain.slurm"])
def test_a_launcher_parses(name: str) -> None:
    bash = shutil.which("bash")
    assert bash is not None
    parsed = subprocess.run([bash, "-n", EXAMPLES / name], capture_output=True, text=True, timeout=10, check=False)
    assert parsed.returncode == 0, parsed.stderr


@pytest.mark.slow
def test_the_library_example_gives_one_run_alone_under_torchrun_and_resumed(tmp_path: Path) -> None:
    alone = _losses(tmp_path, "alone", [sys.executable], "training.steps=4")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    torchrun += ["--master_addr", "127.0.0.1", "--master_port", str(free_port())]
    begun = _losses(tmp_path, "begun", torchrun, "training.steps=3", "parallel.tp=2")
    resumed = _losses(tmp_path, "begun", [sys.executable], "training.steps=4", "zero.stage=0")
    assert (len(begun), len(resumed)) == (3, 1)
    assert [*begun, *resumed] == pytest.approx(alone, abs=1e-4)


def _losses(folder: Path, name: str, python: list[str], *overrides: str) -> list[float]:
    """Run examples/pretrain_gpt.py and give the losses that it prints."""
    prefix = folder / "corpus"
    if not prefix.with_suffix(".idx").exists():
        tokenize_files(sorted((ROOT / "megazero").rglob("*.py")), prefix, "byte")
    small = ["model.hidden_size=32", "model.ffn_hidden_size=64", "model.num_layers=2", "model.seq_len=32"]
    small += ["training.global_batch_size=8", "lr_schedule.name=constant", "lr_schedule.warmup_steps=0"]
    small += ["launch.device=cpu"]
    small += [f"data.sources=['{prefix}']", "data.validation_fraction=0.0", "training.eval_every_steps=0"]
    command = [*python, EXAMPLES / "pretrain_gpt.py", *small, f"training.run_dir={folder / name}", *overrides]
    ran = run_program(*command, timeout=RUN_SECONDS, env=without_launcher() | {"OMP_NUM_THREADS": "1"}, cwd=folder)
    assert ran.returncode == 0, ran.stderr
    return [float(loss) for loss in re.findall(r"^step \d+ loss (\S+)", ran.stdout, re.MULTILINE)]


# ---------------------------------------------------------------------------------------------------------------------
# Pages


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocstrings", reason="pip install 'megazero[docs]'")
    build = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", tmp_path]
    built = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr


def test_the_page_of_keys_is_the_schemas() -> None:
    page = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    keys = page[page.index("\n## [") + 1 :]
    assert keys == to_markdown(), "docs/config.md is out of date: run the command at its top"


def test_the_attention_that_the_page_on_models_shows_is_llamas() -> None:
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    (code,) = [one for one in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "class MyAttention" in one]
    names: dict[str, type] = {}
    exec(code, names)  # with the imports that it shows
    model, alone = load_config(EXAMPLES / "long_context.toml", ["model.seq_len=64"]).config.model, Axis("cp")
    over_ranks = ContextAttention((alone, alone), None, torch.float32)
    documents = sequence_shard([[40, 24], [1, 63]], 64, alone, alone, torch.device("cpu"))
    for shard, attends in ((None, None), (documents, over_ranks)):
        context = BuildContext(model, Axis("tp"), False, 1, torch.device("cpu"), context=attends)
        rope = rotary_embedding(context)
        llamas = llama_attention("layer", context, rope)
        for weight in llamas.parameters():
            nn.init.normal_(weight)
        shown, x = names["MyAttention"](context, llamas.qkv, llamas.out, rope), torch.randn(64, 2, model.hidden_size)
        layout = TokenLayout(torch.arange(2), shard)
        torch.testing.assert_close(shown(x, layout), llamas(x, layout))


def _blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.DOTALL)


def _small_run(folder: Path, **sections: dict[str, Any]) -> None:
    """Write quickstart.toml: the quickstart made small, for two ranks, with these sections of a page over it."""
    given = tomllib.loads(QUICKSTART.read_text(encoding="utf-8"))
    for override in [
        *TINY,
        *ONE_STAGE,
        "parallel.sequence_parallel=false",
        "launch.nproc_per_node=2",
        "launch.device='cpu'",
    ]:
        section, key, value = re.split("[.=]", override, maxsplit=2)
        given[section][key] = tomllib.loads(f"value = {value}")["value"]
    lines = [
        f"[{section}]\n" + "".join(f"{key} = {toml_value(value)}\n" for key, value in table.items())
        for section, table in over(given, sections).items()
    ]
    (folder / "quickstart.toml").write_text("\n".join(lines))


@pytest.mark.slow
def test_the_code_of_the_page_on_the_library_runs_and_its_names_are_public(tmp_path: Path) -> None:
    code, api = "\n".join(_blocks("library.md", "python")), (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    _small_run(tmp_path)
    (tmp_path / "library.py").write_text(code)
    ran = run_program(sys.executable, tmp_path / "library.py", env=without_launcher(), cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    before, after = re.findall(r"^loss (\S+) -> (\S+)$", ran.stdout, re.MULTILINE)[0]
    assert float(after) < 0.8 * float(before)
    for text in (code, *_blocks("extending.md", "python")):
        for module, names in re.findall(r"^from (megazero\S*) import (.*)", text, re.MULTILINE):
            for name in names.split(", "):
                assert f"::: {module}.{name}\n" in api
    for name in re.findall("^::: (.*)", api, re.MULTILINE):
        assert pydoc.locate(name) is not None, name


@pytest.mark.slow
def test_the_script_of_the_page_on_extending_trains(tmp_path: Path) -> None:
    (tmp_path / "my_run.py").write_text("\n".join(_blocks("extending.md", "python")))
    _small_run(tmp_path, **tomllib.loads(_blocks("extending.md", "toml")[-1]))
    ran = run_command("train", "quickstart.toml", "training.steps=3", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    metrics = metrics_of(tmp_path / "runs" / "quickstart")
    assert all(line["weight_norm"] > 0 for line in metrics)
    losses = (tmp_path / "runs" / "quickstart" / "losses.csv").read_text().splitlines()
    assert losses == [f"{line['step']},{line['loss']}" for line in metrics]


def test_every_phase_of_the_page_can_be_loaded(tmp_path: Path) -> None:
    """Each is the run file before it with the sections of a block in their place, whole."""

    def sections(text: str) -> dict[str, str]:
        return {section.split("]")[0]: section for section in re.split(r"(?m)^(?=\[)", text) if section}

    found = sections((EXAMPLES / "quickstart.toml").read_text(encoding="utf-8"))
    blocks = re.findall(r"```toml\n(.*?)```", (ROOT / "docs" / "phases.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        found |= sections(block)
        (tmp_path / "run.toml").write_text("\n".join(found.values()))
        assert load_config(tmp_path / "run.toml").config.checkpoint.accept_changes


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_names_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = [ROOT / path for path in re.findall(r"`((?:docs|examples|megazero|tests)/[\w./-]+)`", text)]
    named += [ROOT / name for name in re.findall(r"`(Makefile|LICENSE|pyproject\.toml|constraints\.txt)`", text)]
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
    named += [page.parent / link for link in links]
    assert not [str(path) for path in named if not path.exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_pages_commands_are_commands(page: Path) -> None:
    for words in _commands(page):
        if words[0] == "make":
            assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), words
        else:
            assert "megazero" not in words[1:], f"two commands on one line: {words}"
            _check_megazero(words[1:])


def _commands(page: Path) -> list[list[str]]:
    """Lines of shell blocks that start with `make` or `megazero`, as words."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"^```(?:sh|bash)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = [line.strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.startswith(("make ", "megazero "))]


def _check_megazero(words: list[str]) -> None:
    """The subcommand exists with these options; a training command's configuration resolves."""
    command = typer.main.get_command(app)
    while words and words[0] in getattr(command, "commands", {}):
        command, words = command.commands[words[0]], words[1:]
    assert not hasattr(command, "commands"), words
    options = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= options
    if command.name == "train" and (ROOT / words[0]).exists():
        load_config(ROOT / words[0], words[1:])


def test_the_command_line_helps() -> None:
    assert CliRunner().invoke(app, ["--help"]).exit_code == 0
