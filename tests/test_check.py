"""`megazero check`: everything about a run file, without a start."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from harness import run_command as megazero
from quickstart import QUICKSTART, ROOT, TINY
from test_data_corpus import write_pair
from typer.testing import CliRunner, Result

from megazero.checkpoint.hugging_face.exporter import export_model
from megazero.checkpoint.index import CheckpointError
from megazero.cli.commands import app
from megazero.config import ConfigError, ResolvedRun, load_config
from megazero.formats.tokenize import tokenize_files
from megazero.models.registry import FAMILIES
from megazero.plan.check_lines import lines_on
from megazero.plan.cluster import Cluster, cluster_of, with_memory
from megazero.plan.report import Assumptions, plan_of
from megazero.training.check import FILE_RULES, Lines, describe

_TWO_CHUNKS = "F0,F1,F0.1,F1.1,B0.1,B1.1,B0,B1\n" * 2
SMALL = [*TINY, "parallel.tp=1", "parallel.pp=1", "launch.nproc_per_node=1", "training.steps=10"]


def _problems(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        load_config(QUICKSTART, [*SMALL, *overrides], rules=FILE_RULES)
    return [str(problem) for problem in raised.value.problems]


def told_of(run: ResolvedRun, cluster: Cluster | None = None) -> Lines:
    """What `megazero check` says of a run, memory included."""
    return describe(run, 8, lambda schedule: lines_on(run, cluster, schedule).lines)


def _lines(*overrides: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for subject, text in told_of(load_config(QUICKSTART, [*SMALL, *overrides], rules=FILE_RULES)):
        found.setdefault(subject, []).append(text)
    return found


def _tokenized(folder: Path, documents: int, length: int) -> Path:
    (folder / "text.jsonl").write_text("\n".join([json.dumps({"text": "a" * length})] * documents))
    tokenize_files([folder / "text.jsonl"], folder / "pair", "byte")
    return folder / "pair"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """34 documents of 100 bytes and their end: 3,434 tokens, 107 windows of 32."""
    return _tokenized(tmp_path_factory.mktemp("corpus"), 34, 100)


def _check(*words: object) -> Result:
    return CliRunner().invoke(app, ["check", *map(str, words)])


def test_the_command_says_what_64_gpus_would_do() -> None:
    done = megazero("check", ROOT / "examples" / "llama_7b_64gpu.toml", "--world-size", "64")
    assert done.returncode == 0, done.stderr
    told = done.stdout
    embedding, layer = 32000 * 4096, 4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096  # Llama 2 7B
    assert f": {2 * embedding + 32 * layer + 4096:,} parameters" in told
    assert "64 ranks on 8 nodes of 8: tp 2 (within a node) x dp 32 (across nodes)" in told
    assert "1,024 samples = micro_batch_size 2 x accumulation 16 x dp 32; 4,194,304 tokens a step" in told
    # (6 + 12/32) N bytes, with N of Llama 2 7B over tp 2 (and the norms, which tp does not cut)
    gib = float(re.search(r"([0-9.]+) GiB of model state on a rank", told)[1])  # type: ignore[index]
    assert gib == pytest.approx((6 + 12 / 32) * 6.738e9 / 2 / 2**30, rel=1e-3)
    assert "not on this machine, not checked: data/tokenizer.json, data/corpus" in told
    assert told.endswith("can run on 64 ranks, if what was not checked is there\n")
    wide = _check(QUICKSTART, "--world-size", "64").stdout
    assert wide.endswith("can run on 64 ranks\n")
    refused = _check(QUICKSTART, "--world-size", "8", "--device-gib", "0.001", "launch.device=cpu")
    small = refused.stdout
    assert refused.exit_code == 2
    assert small.endswith("quickstart.toml is right for 8 ranks, but does not fit the device\n"), small
    assert "no one setting frees the " in small
    alone = _check(ROOT / "examples" / "llama_70b_512gpu.toml")
    assert alone.exit_code == 2
    assert "write --world-size 32, or the number that you have" in alone.stderr


def test_it_is_told_whether_a_sample_fits_and_what_is_named_then_does() -> None:
    """2 layers of Llama 3 8B at 16K on 64 GPUs: (6 + 12/32) N bytes of state over tp 2, and what 2K tokens keep."""

    def told(gib: float, *words: str) -> str:
        run = load_config(
            ROOT / "examples" / "llama3_8b_128k_64gpu.toml",
            ["model.num_layers=2", f"model.seq_len={2**14}", f"zero.bucket_bytes={2**27}", *words],
            64,
        )
        cluster = with_memory(cluster_of("h100", 64, 8), gib)
        (line,) = [text for subject, text in told_of(run, cluster) if subject == "plan"]
        return line

    h, k, f, a, layers, tokens = 4096, 1024, 14336, 32, 2, 2**14 // 8
    kept = tokens * (layers * (12 * h + 4 * k + 6 * f + 4 * a + 8) + 2 * 128256) / 2  # and logits, all over tp 2
    parameters = layers * (2 * h * h + 2 * h * k + 3 * h * f) + 2 * 128256 * h
    gib = ((6 + 12 / 32) * parameters / 2 + kept) / 2**30
    needed = float(told(80).split()[1])
    assert gib < needed < gib * 1.6, (gib, needed)  # buffers and working memory come on top
    assert told(needed * 1.01).startswith("fits: ")
    short = told(needed * 0.8)
    assert short.startswith("does not fit: ")
    remedy = short.partition("by the plan: ")[2].partition(" (frees ")[0]
    assert told(needed * 0.8, *shlex.split(remedy)).startswith("fits: "), remedy
    assert "; no one setting frees the " in told(1)


def test_what_context_parallelism_sends_is_told_and_how_even_its_work_is(tmp_path: Path) -> None:
    """2 micro-batches of samples of 32 tokens, 4 heads of 8, 2 of keys, 4 bytes: the ring passes K, V, and again with
    their gradients; Ulysses exchanges q, k, v, out and their gradients."""
    words = ["parallel.cp=4", "launch.nproc_per_node=4", "training.micro_batch_size=2"]
    packed = _tokenized(tmp_path, 137, 7)  # documents of 7 bytes and their end: four in each of 34 windows of 32
    words += [f"data.sources=['{packed}']", "data.validation_fraction=0"]
    ring, both, one = [*words, "parallel.cp_method=ring"], [*words, "parallel.cp_method=hybrid"], "data.document_mask"
    (line,) = _lines(*ring)["context"]
    passed, tokens = (2 + 2 + 2) * (2 * 8) * 4 * 3 // 4, 2 * 32
    assert line.startswith("cp 4, ring: Ulysses 1 x ring 4; for each layer and micro-batch a rank sends ")
    assert f" sends {passed * tokens:,} bytes (ring_shift {passed * tokens:,}), forward and backward" in line
    assert line.endswith("; pairs on the busiest ring rank over their mean: 1.000")
    (line,) = _lines(*both, "parallel.cp_ulysses=2")["context"]
    exchanged, passed = 4 * (4 + 2) * 8 * tokens // 4 * 4 // 2, 6 * 8 * tokens * 4 // 2
    assert f"Ulysses 2 x ring 2; for each layer and micro-batch a rank sends {exchanged + passed:,} bytes" in line
    assert f"(all_to_all {exchanged:,} + ring_shift {passed:,})" in line
    sent, documents = _lines(*ring, f"{one}=true")["context"]
    # documents of 8 tokens over 4 ranks: chunks of one, of which a rank has numbers i and 7 - i
    assert sent.endswith("over their mean: 1.000, 1.000 at most")
    assert documents == (
        "documents: 4.0 in a sample, of 8 tokens on average and 8 at most; "
        f"attention sees {4 * 8 * 9 / (32 * 33):.1%} of the pairs of whole samples (the first 34 samples)"
    )
    (away,) = _lines("data.sources=['none']", f"{one}=true")["context"]
    assert away == "documents: not known, the data is not on this machine"


def test_every_problem_is_told_with_exit_code_2(tmp_path: Path, corpus: Path) -> None:
    words = ["training.step=3", "optimizer.lr=-1", "optimizer.name=sgd", "optimizer.betas=[0.8, 0.9]", "zero.stage=7"]
    words += ["training.callbacks=['nobody']", f"data.sources=['{corpus}']", "model.vocab_size=90"]
    words += ["launch.extensions=['nowhere.py']", f"training.run_dir={tmp_path / 'run'}"]
    done = _check(QUICKSTART, *SMALL, *words)
    assert done.exit_code == 2
    for place in (
        "launch.extensions",
        "training.step =",
        "optimizer.lr",
        "optimizer.betas",
        "zero.stage",
        "model.vocab_size",
    ):
        assert f" {place}" in done.stderr, place
    assert not (tmp_path / "run").exists()
    named = _check(QUICKSTART, *SMALL, "training.callbacks=['nobody']", "zero.gather_policy=step")
    assert named.exit_code == 2
    assert 'training.callbacks = "nobody": must be the name of a registered callback' in named.stderr
    assert "zero.gather_policy" in named.stderr


def test_data_that_is_there_must_fit_the_model(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # so that paths are short enough to be told whole
    sources = f"data.sources=['{corpus}']"
    (told,) = _problems(sources, "model.vocab_size=200")
    assert told.startswith("model.vocab_size = 200: must be >= 257, the ids of data.tokenizer=byte; write 257")
    (told,) = _problems(sources, "model.seq_len=4096")
    assert told.startswith(f'data.sources = "{corpus}": cannot be used; {corpus} holds 3,434 tokens, fewer than one')
    (tmp_path / "bad.json").write_text("no tokenizer")
    (told,) = _problems("data.tokenizer=bad.json")
    assert told.startswith('data.tokenizer = "bad.json": must be a tokenizer; ')
    cut, index = tmp_path / "cut.bin", tmp_path / "cut.idx"
    cut.write_bytes(corpus.with_suffix(".bin").read_bytes()[:-2])
    index.write_bytes(corpus.with_suffix(".idx").read_bytes())
    (told,) = _problems(f"data.sources=['{tmp_path / 'cut'}', '{corpus}', '{tmp_path / 'none'}']")
    assert "is truncated" in told
    index.unlink()  # half of a pair is here: the other file is named
    (told,) = _problems(f"data.sources=['{tmp_path / 'cut'}']")
    assert f"no {index}: a token source is a pair" in told


def test_the_data_line_counts_samples_and_epochs(corpus: Path) -> None:
    # 107 windows, of which floor(0.01 x 107) = 1 is held out; 10 steps of 8 samples, then 100 steps
    few = _lines(f"data.sources=['{corpus}']")["data"]
    assert few[0] == f"{corpus}: 106 samples to train on, 1 for evaluation"
    assert few[1] == "tokenizer byte: 257 ids, of 257 rows"
    assert len(few) == 2
    phases = "checkpoint.accept_changes=['data']"
    assert len(_lines(f"data.sources=['{corpus}']", "training.steps=100", phases)["data"]) == 2
    many = _lines(f"data.sources=['{corpus}']", "training.steps=100")["data"]
    assert many[2].startswith(f"data.sources: {corpus} is read {800 / 106:.1f} times by the run's 800 samples")


def test_ids_above_the_vocabulary_end_train_as_they_end_check(tmp_path: Path) -> None:
    pair = write_pair(tmp_path / "pair", np.arange(2_000) % 300)
    for command in ("check", "train"):
        done = megazero(command, QUICKSTART, *SMALL, f"data.sources=['{pair}']", f"training.run_dir={tmp_path}/run")
        assert done.returncode == 2, done.stderr
        assert "has ids from 0 to 299" in done.stderr


def test_validation_sources_are_looked_at_too(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # so that paths are short enough to be told whole
    copy = Path("copy")
    for suffix in (".bin", ".idx"):
        copy.with_suffix(suffix).write_bytes(corpus.with_suffix(suffix).read_bytes())
    sources, named = f"data.sources=['{corpus}']", "data.validation_sources=[{{path='{}',name='v',every_steps=1}}]"
    assert _lines(sources, named.format(copy))["data"][2] == "v: 1 samples for evaluation"
    (told,) = _problems(sources, named.format(copy), "data.validation_fraction=0")
    assert told.startswith(
        f'data.validation_sources = "{copy}": cannot be used; {copy} holds the same tokens as one of'
    )
    (tmp_path / "cut.idx").write_bytes(corpus.with_suffix(".idx").read_bytes())
    (tmp_path / "cut.bin").write_bytes(corpus.with_suffix(".bin").read_bytes()[:-2])
    (told,) = _problems(sources, named.format("cut"))
    assert told.startswith('data.validation_sources = "cut": cannot be used')
    (line,) = _lines(sources, named.format("none"))["data"]
    assert line == "not on this machine, not checked: none"


@pytest.mark.slow
def test_the_checkpoint_that_a_run_goes_on_from_is_compared_as_the_run_would(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, data = tmp_path / "run", f"data.sources=['{corpus}']"
    words = [str(QUICKSTART), *SMALL, data, f"training.run_dir={run_dir}", "training.steps=2"]
    assert "resume " not in megazero("check", *words).stdout
    assert megazero("train", *words).returncode == 0
    step = run_dir / "checkpoints" / "step-00000002"
    listed = megazero("checkpoint", "export", step.parent, tmp_path / "out")
    assert (listed.returncode, f"name a complete step, such as {step}" in listed.stderr) == (1, True)
    for names in ("_built_in", "_registered"):
        monkeypatch.setattr(FAMILIES, names, {})
    with pytest.raises(
        CheckpointError, match=r"of the family 'llama' of a script: name it with --extension SCRIPT\.py"
    ):
        export_model(step, tmp_path / "out")
    monkeypatch.undo()
    before = sorted(run_dir.rglob("*"))

    def check(words_of: str, status: int, told: str) -> str:
        done = megazero("check", *words, *words_of.split())
        text = done.stdout + done.stderr
        assert (done.returncode, told in text) == (status, True), text
        return text

    more = "training.steps=4"
    changed = check(f"{more} optimizer.weight_decay=0.3", 0, f"resume    goes on from {step}, step 2")
    assert "resume    changed since the checkpoint was written: optimizer.weight_decay" in changed
    for words_of, status, told in (
        (f"{more} model.seq_len=16", 2, 'checkpoint.accept_changes = ["seq_len"] begins a new phase'),
        (f"{more} model.seq_len=16 checkpoint.accept_changes=['seq_len']", 0, "resume    phase 2 of the run begins"),
        (f"{more} optimizer.name=adam", 0, "can run"),  # it keeps the same state
        (f"{more} optimizer.name=lion", 2, "it holds exp_avg, exp_avg_sq, and this one needs exp_avg. Resume"),
        (f"{more} optimizer.name=sgd", 2, "this one needs nothing. Resume"),
        ("data.sources=['python-stdlib']", 2, "was trained on other data"),
        (f"{more} data.sources=['none']", 0, "not on this machine"),
        ("checkpoint.resume=never", 2, "holds the run that wrote step-00000002"),
        ("checkpoint.resume=none", 2, "not a complete checkpoint"),
        ("checkpoint.directory=s3://bucket/run", 0, "were not looked at"),
        ("model.hidden_size=48 model.seq_len=16", 2, "a training.run_dir of its own"),
    ):
        check(words_of, status, told)
    for text in ('{"step": "x", "model": null}', "{"):
        (step / "trainer_state.json").write_text(text)
        assert "Traceback" not in check("", 2, "step-00000002")
    check("checkpoint.on_damage=fallback", 0, "goes back to an older one")
    assert sorted(run_dir.rglob("*")) == before


def test_a_run_directory_must_be_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # so that paths are short enough to be told whole
    Path("file").touch()
    for key in ("training.run_dir", "checkpoint.directory"):
        for name in ("file", "file/runs/a"):
            (told,) = _problems(f"{key}={name}")
            assert told == f'{key} = "{name}": must be a directory, or not exist; {tmp_path / "file"} is none'
    Path("link").symlink_to("nowhere")
    assert _problems("training.run_dir=link/a")


@pytest.mark.parametrize(
    "words",
    [
        ['parallel.layout=[["embed"],[4,"head"]]'],
        ['parallel.layout=[["embed",2],[0],[1],[1,"head"]]', "parallel.schedule=zbv"],
        ['parallel.layout=[["embed"],[0],[4],["head"]]', "parallel.schedule=zbv"],
        ['parallel.layout=[["embed"],[0],[1],["head"]]', "parallel.schedule=zbv", "model.num_layers=1"],
        ["FILE", 'parallel.layout=[["embed",1],[1],[1],[1,"head"]]'],
        ["FILE", "activations.recompute=full", "activations.layers=1"],
    ],
)
def test_a_stage_without_a_layer_and_a_schedule_file_with_chunks_are_described_and_planned(
    words: list[str], tmp_path: Path
) -> None:
    (table := tmp_path / "two.csv").write_text(_TWO_CHUNKS)
    words = [word.replace("FILE", f"parallel.schedule_file={table}") for word in words]
    words = ["model.num_layers=4", *words]
    words += ["parallel.pp=2", "training.accumulation=2", "training.global_batch_size=auto"]
    described = _lines(*words, "launch.nproc_per_node=2")
    assert len([line for line in described["memory"] if "saves for its backward passes" in line]) == 2
    for offload in ("none", "auto"):
        run = load_config(QUICKSTART, [*SMALL, *words, f"zero.offload.optimizer={offload}"], 2)
        assert plan_of(run, cluster_of("h100", 2, 2), Assumptions()).fits


@pytest.mark.parametrize("stage", [1, 3])
def test_a_schedule_file_is_planned_whole_since_it_has_one_number_of_micro_batches(stage: int, tmp_path: Path) -> None:
    (table := tmp_path / "six.csv").write_text(
        ",".join([f"F{n}" for n in range(6)] + [f"B{n}" for n in range(6)]) + "\n"
    )
    table.write_text(table.read_text() * 2)
    words = [f"parallel.schedule_file={table}", "parallel.schedule=gpipe"]
    numbers = ["parallel.pp=2", "training.accumulation=6", "training.global_batch_size=auto", "zero.bucket_bytes=4096"]
    numbers += [f"zero.stage={stage}"]
    own, built_in = (
        plan_of(load_config(QUICKSTART, [*SMALL, *numbers, word], 4), cluster_of("h100", 4, 4), Assumptions())
        for word in words
    )
    assert own.memory == built_in.memory
    assert own.time.seconds == built_in.time.seconds


def test_the_layout_is_for_the_chunks_of_the_schedule_file_and_leaves_no_rank_without_a_part(tmp_path: Path) -> None:
    (table := tmp_path / "two.csv").write_text(_TWO_CHUNKS)
    words = ["model.num_layers=4", "training.accumulation=2", "training.global_batch_size=auto", "parallel.pp=2"]
    own = [*words, "launch.nproc_per_node=2", f"parallel.schedule_file={table}"]
    (told,) = _problems(*own, 'parallel.layout=[["embed",2],[2,"head"]]')
    assert "must have 4 stages with model.num_layers=4 layers in all; it has 2 with 4" in told
    (told,) = _problems(*own, "model.num_layers=2")
    assert "must be >= parallel.pp*chunks=2*2=4, a layer for each stage" in told
    three = [*words, "parallel.pp=3", "launch.nproc_per_node=3"]
    (told,) = _problems(*three, 'parallel.layout=[["embed",2],[0],[2,"head"]]')
    assert "must leave pipeline rank 1 a layer, or the embedding or head" in told


def test_a_schedule_file_is_proved_and_must_be_for_this_run(tmp_path: Path) -> None:
    table = tmp_path / "mine.csv"
    words = ["parallel.pp=2", "launch.nproc_per_node=2", f"parallel.schedule_file={table}", "training.accumulation=2"]
    table.write_text("F0,F1,B0,B1,W0,W1\nF0,F1,B0,B1,W0,W1\n")
    (line,) = _lines(*words)["schedule"]
    assert line.startswith("mine: ranks idle ")
    assert _problems(*words, "training.accumulation=4") == [
        "training.accumulation = 4: must be 2, as parallel.schedule_file has it; write 2"
    ]
    table.write_text("F0,F1,W0,B0,B1,W1\nF0,F1,B0,B1,W0,W1\n")
    (told,) = _problems(*words)
    assert "rank 0 runs W0 before B0" in told


def test_an_axis_is_within_a_node_only_if_each_of_its_groups_is() -> None:
    words = ["model.num_heads=12", "model.hidden_size=96", "model.ffn_hidden_size=192", "model.num_kv_heads=6"]
    run = load_config(QUICKSTART, [*SMALL, *words, "parallel.tp=3", "model.seq_len=33"], 12)
    (shape,) = [text for subject, text in told_of(run) if subject == "shape"]
    assert shape == "12 ranks on 2 nodes of up to 8: tp 3 (across nodes) x dp 4 (across nodes)"


def test_layers_with_a_forward_of_their_own_are_recomputed_as_a_whole_or_not_at_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("megazero.models.wrappers.has_regions", lambda _: False)
    for word, told in (("none", 0), ("selective", 1), ("full", 0), ('["mlp"]', 1)):
        done = _check(QUICKSTART, f"activations.recompute={word}")
        assert (done.exit_code, done.stderr.count('only as a whole; write "full" or "none"')) == (2 * told, told), word
