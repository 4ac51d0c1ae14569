"""The command line as a user meets it: processes, real text, exit codes."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from harness import children_of, metrics_of, run_program, start_program, wait_until
from harness import run_command as megazero
from quickstart import QUICKSTART, TINY
from typer.testing import CliRunner

import megazero as megazero_package
from megazero.checkpoint.folder import folder_at
from megazero.checkpoint.index import find_damage, find_newest
from megazero.checkpoint.lock import DirectoryLock
from megazero.cli.commands import app
from megazero.data.writer import IndexedWriter

COMMAND = [sys.executable, "-m", "megazero.cli"]


def whole_process(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the command from the interpreter's start-up on, and wait for it."""
    return subprocess.run([*COMMAND, *map(str, words)], capture_output=True, text=True, timeout=120, check=False)


def losses(run_dir: Path) -> list[float]:
    """Losses by step, from metrics.jsonl."""
    lines = metrics_of(run_dir)
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [line["loss"] for line in lines]


def shape(tp: int, pp: int, world: int, zero_stage: int) -> list[str]:
    return [f"parallel.tp={tp}", f"parallel.pp={pp}", f"launch.nproc_per_node={world}", f"zero.stage={zero_stage}"]


@pytest.mark.slow
def test_the_quickstart_gives_the_same_losses_on_1_4_and_8_ranks(tmp_path: Path) -> None:
    """Its own shape evaluates too; two steps of four samples each, because most of a step is arithmetic."""
    found = {}
    unseen = "training.eval_every_steps=0"
    for name, words in {
        "its own": ["training.eval_samples=8"],
        "one rank": [*shape(1, 1, 1, 0), unseen],
        "pp 2 dp 2, stage 3": [*shape(1, 2, 4, 3), unseen],
    }.items():
        run_dir = tmp_path / name.replace(" ", "_")
        short = ["training.steps=2", "training.global_batch_size=4", f"training.run_dir={run_dir}"]
        command = whole_process if name == "its own" else megazero
        done = command("train", QUICKSTART, *short, *words)
        assert done.returncode == 0, done.stderr
        found[name] = losses(run_dir)
        assert len(found[name]) == 2
        for step, loss in enumerate(found[name], 1):
            assert f"step {step}/2 | loss {loss:.4f} |" in done.stdout
    for name, series in found.items():
        assert series == pytest.approx(found["one rank"], rel=1e-4), name


@pytest.mark.slow
def test_a_run_stopped_and_resumed_on_other_shapes_is_the_uninterrupted_run(tmp_path: Path) -> None:
    steps = ["checkpoint.save_every_steps=2", "training.steps=6"]
    whole = tmp_path / "whole"
    assert megazero("train", QUICKSTART, *TINY, *shape(1, 1, 1, 1), *steps, f"training.run_dir={whole}").returncode == 0
    parts = tmp_path / "parts"
    first = megazero("train", QUICKSTART, *TINY, *shape(2, 1, 4, 3), *steps, f"training.run_dir={parts}")
    assert first.returncode == 0, first.stderr
    assert losses(parts) == pytest.approx(losses(whole), rel=1e-4)
    # from step 4 again, in a run of its own, on two other shapes
    for name, words in {"pp2": shape(1, 2, 2, 0), "dp4": shape(1, 1, 4, 2)}.items():
        origin = parts / "checkpoints" / "step-00000004"
        again = tmp_path / name
        done = megazero(
            "train", QUICKSTART, *TINY, *words, *steps, f"training.run_dir={again}", f"checkpoint.resume={origin}"
        )
        assert done.returncode == 0, done.stderr
        assert "at step 4" in done.stdout
        lines = metrics_of(again)
        assert [line["step"] for line in lines] == [5, 6]
        assert [line["loss"] for line in lines] == pytest.approx(losses(whole)[4:], rel=1e-4)


@pytest.mark.slow
def test_a_finished_run_says_where_things_lie_and_how_to_go_on(tmp_path: Path) -> None:
    words = [*TINY, *shape(1, 1, 2, 1), f"training.run_dir={tmp_path}"]
    done = megazero(
        "train", QUICKSTART, *words, "training.steps=3", "training.eval_every_steps=2", "logging.tensorboard=true"
    )
    assert done.returncode == 0, done.stderr
    assert find_newest(tmp_path / "checkpoints") == folder_at(tmp_path / "checkpoints" / "step-00000003")
    assert (tmp_path / "checkpoints" / "latest").read_text().strip() == "step-00000003"
    assert list((tmp_path / "tensorboard").glob("events.*"))
    lines = metrics_of(tmp_path)
    keys = {"step", "loss", "grad_norm", "lr", "tokens", "tokens_per_second", "step_seconds", "memory_bytes"}
    keys |= {"sent_bytes", "source_samples", "source_tokens"}
    assert set(lines[0]) == keys
    assert set(lines[1]) == set(lines[2]) == keys | {"val_loss"}
    assert lines[-1]["tokens"] == 3 * 8 * 32
    assert [line["source_samples"] for line in lines] == [{"python-stdlib": 8 * step} for step in (1, 2, 3)]
    assert lines[-1]["source_tokens"] == {"python-stdlib": 3 * 8 * 32}
    # the same in every step, and without what the evaluation of the second one sends
    assert set(lines[0]["sent_bytes"]) == {"dp", "world"}
    assert [line["sent_bytes"] for line in lines] == [lines[0]["sent_bytes"]] * 3
    command = next(
        line.strip()
        for line in done.stdout.splitlines()
        if " train examples/" in line or f" train {QUICKSTART}" in line
    )
    told = shlex.split(command)
    more = megazero(*told[told.index("train") :], "training.steps=4", "parallel.pp=2", "zero.stage=3")
    assert more.returncode == 0, more.stderr
    assert "at step 3" in more.stdout
    assert len(losses(tmp_path)) == 4
    listed = megazero("checkpoint", "inspect", tmp_path / "checkpoints" / "step-00000004")
    assert "step 4" in listed.stdout
    assert "zero_stage 3" in listed.stdout
    assert "model.layers.1.self_attn.q_proj.weight" in listed.stdout
    assert "F32" in listed.stdout
    # embedding and head of 257 rows; two layers of q, k, v, o, gate, up, down and two norms; the last norm
    layer = 32 * (32 + 16 + 16 + 32) + 3 * 32 * 64 + 2 * 32
    assert f"{2 * 257 * 32 + 2 * layer + 32:,} parameters" in listed.stdout
    (tmp_path / "checkpoints" / "step-00000009").mkdir()
    steps = megazero("checkpoint", "inspect", tmp_path / "checkpoints")
    assert steps.returncode == 0, steps.stderr
    rows = {line.split()[0]: line.split()[1:] for line in steps.stdout.splitlines() if line.strip().startswith("step-")}
    assert list(rows) == ["step-00000003", "step-00000004", "step-00000009"]
    assert rows["step-00000003"][:2] == ["24", "768"]
    assert rows["step-00000003"][2] == f"{lines[-1]['val_loss']:.4f}"
    assert rows["step-00000009"][-1] == "incomplete"
    refused = megazero("train", QUICKSTART, *words, "training.steps=5", "checkpoint.resume=never")
    assert refused.returncode == 1
    assert "holds the run" in refused.stderr


@pytest.mark.slow
def test_an_overflow_skips_the_step_but_not_its_samples_and_the_rate_stands_still(tmp_path: Path) -> None:
    words = [*TINY, *shape(1, 1, 1, 1), f"training.run_dir={tmp_path}", "lr_schedule.name=linear"]
    words += ["lr_schedule.warmup_steps=4", "precision.dtype=fp16", "precision.hysteresis=1"]
    words += ["precision.initial_scale_power=24", "precision.loss_scale_window=1000", "logging.every_steps=1000"]
    done = megazero("train", QUICKSTART, *words, "training.steps=20")
    assert done.returncode == 0, done.stderr

    def read() -> list[dict[str, float]]:
        text = (tmp_path / "metrics.jsonl").read_text()
        assert "NaN" not in text
        assert "Infinity" not in text
        return [json.loads(line) for line in text.splitlines()]

    lines = read()
    assert [line["tokens"] for line in lines] == [8 * 32 * step for step in range(1, 21)]
    skipped, scale, peak = 0, 2.0**24, 3e-3
    for step, line in enumerate(lines):
        updates = step - skipped
        assert line["lr"] == pytest.approx(peak * min(1.0, (updates + 1) / 4, 1 - 0.9 * (updates - 4) / 15))
        assert line["loss_scale"] == scale
        if line["skipped_steps"] > skipped:
            skipped, scale = skipped + 1, scale / 2
            assert line["grad_norm"] is None
        assert line["skipped_steps"] == skipped
    assert 3 < skipped < 15
    assert done.stdout.count("skipped (overflow, loss scale") == skipped
    assert "skipped (overflow, loss scale 1.67772e+07)" in done.stdout
    assert f"skipped {skipped} steps for an overflow" in done.stdout
    # resumed, the rate goes on from the updates that were done
    done = megazero("train", QUICKSTART, *words, "training.steps=21")
    assert done.returncode == 0, done.stderr
    last = read()[-1]
    assert last["lr"] == pytest.approx(peak * (1 - 0.9 * (20 - skipped - 4) / 16))
    assert last["skipped_steps"] == skipped


@pytest.mark.parametrize("closed", ["<&- >&- 2>&-", "2>&-", "<&- 2>&-"])
def test_no_file_takes_the_number_of_a_closed_standard_stream(tmp_path: Path, closed: str) -> None:
    """A daemon may start a run without them; what a library prints would go into a checkpoint."""
    code = """if True:
        import os, sys
        from megazero.cli import commands, main
        def app():
            with open(sys.argv[1], "wb") as file:
                os.system("echo a line of a library; echo another >&2")
                file.write(b"%d" % file.fileno())
        commands.app = app
        main()
    """
    words = [sys.executable, "-c", code, str(tmp_path / "file")]
    subprocess.run(["bash", "-c", f"{shlex.join(words)} {closed}"], check=True, capture_output=True)
    assert int((tmp_path / "file").read_text()) > 2


def test_a_missing_config_and_a_directory_that_is_no_checkpoint_are_told(tmp_path: Path) -> None:
    missing = whole_process("train", tmp_path / "none.toml")
    assert missing.returncode == 2
    assert "none.toml" in missing.stderr
    empty = megazero("checkpoint", "inspect", tmp_path)
    assert empty.returncode == 1
    assert "not a complete checkpoint" in empty.stderr


@pytest.mark.slow
@pytest.mark.parametrize("words", ["train", "memory-report --out", "data tokenize x.txt --out", "schedule show --svg"])
def test_a_url_makes_no_directory_where_a_command_takes_files_of_this_machine(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shown = CliRunner().invoke(app, [*words.split(), "s3://b/x"])
    assert (shown.exit_code, os.listdir(tmp_path)) == (2, [])
    assert f"s3://b/x is a URL, and megazero {words.partition(' ')[0]} takes files" in shown.stderr


def test_a_killed_rank_ends_the_run_with_a_message_and_the_same_command_goes_on(tmp_path: Path) -> None:
    words = [*TINY, *shape(1, 2, 4, 2), f"training.run_dir={tmp_path}", "checkpoint.save_every_steps=5"]
    killed = start_program("megazero", "train", QUICKSTART, *words, "training.steps=100000")
    try:
        wait_until(lambda: find_newest(tmp_path / "checkpoints") is not None, killed)
        os.kill(children_of(killed.pid)[2], signal.SIGKILL)
        errors, _ = killed.communicate(timeout=300)
    finally:
        killed.kill()
    assert killed.returncode == 1
    assert "SIGKILL" in errors
    assert "was killed" in errors
    newest = find_newest(tmp_path / "checkpoints")
    assert newest is not None
    assert str(newest) in errors
    assert find_damage(newest) == []
    step = int(newest.name.removeprefix("step-"))
    more = megazero("train", QUICKSTART, *words, f"training.steps={step + 2}", *shape(1, 1, 2, 3))
    assert more.returncode == 0, more.stderr
    assert len(losses(tmp_path)) == step + 2


def test_tokenize_leaves_out_and_replaces_nothing_unasked(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("good")
    (tmp_path / "b.txt").write_bytes(b"\xff")
    words = ["data", "tokenize", str(tmp_path), "--out", str(tmp_path / "out"), "--workers", "1"]
    refused, done, again = (CliRunner().invoke(app, [*words, *more]) for more in ([], ["--skip-bad"], ["--skip-bad"]))
    assert refused.exit_code == 1
    assert f"{tmp_path / 'b.txt'}: not a UTF-8 text file" in refused.stderr
    assert "leave them out with --skip-bad" in refused.stderr
    assert done.exit_code == 0, done.output
    assert "1 documents, 5 tokens" in done.stdout
    assert "left out 1 documents or parts of files that cannot be read:" in done.stdout
    assert "exists; name another output, or replace it with --overwrite" in again.stderr
    assert CliRunner().invoke(app, [*words, "--skip-bad", "--overwrite"]).exit_code == 0


@pytest.mark.slow
def test_tokenized_text_trains_under_torchrun(tmp_path: Path) -> None:
    text = tmp_path / "text.jsonl"
    lines = [json.dumps({"text": f"The law of line {index} is that it holds. " * 5}) for index in range(200)]
    text.write_text("\n".join(lines))
    done = whole_process(
        "data", "tokenize", text, "--out", tmp_path / "corpus", "--tokenizer", "byte", "--workers", "2"
    )
    assert done.returncode == 0, done.stderr
    assert "200 documents" in done.stdout
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    sources = f'data.sources=[{{path="{tmp_path / "corpus"}", weight=2.0}}, "python-stdlib"]'
    words = ["parallel.tp=2", "parallel.pp=1", sources, f"training.run_dir={tmp_path / 'run'}", "training.steps=3"]
    done = run_program(*launcher, "-m", "megazero.cli", "train", QUICKSTART, *TINY, *words)
    assert done.returncode == 0, done.stderr
    assert len(losses(tmp_path / "run")) == 3


@pytest.mark.slow
def test_a_schedule_file_runs_and_its_measured_pipeline_is_drawn(tmp_path: Path) -> None:
    table = tmp_path / "mine.csv"
    table.write_text("F0,F1,B0,B1,W0,W1\nF0,F1,B0,B1,W0,W1\n")
    words = [*TINY, *shape(1, 2, 2, 1), f"training.run_dir={tmp_path / 'run'}", "training.steps=3"]
    words += ["training.accumulation=2", "training.eval_every_steps=3", "training.eval_samples=20"]
    usual = megazero("train", QUICKSTART, *words, f"training.run_dir={tmp_path / 'usual'}")
    words += [f"parallel.schedule_file={table}", "logging.pipeline_trace_step=2"]
    done = megazero("train", QUICKSTART, *words)
    assert done.returncode == usual.returncode == 0, done.stderr
    wanted, found = [re.findall(r"validation loss ([\d.]+)", out.stdout)[-1] for out in (usual, done)]
    assert found == wanted  # of 20 samples: 5 micro-batches through a schedule for 2
    assert "pipeline of step 2: ranks idle" in done.stdout
    assert "predicted " in done.stdout
    assert "if every pass took the mean time of its kind" in done.stdout
    events = json.loads((tmp_path / "run" / "pipeline-step-00000002.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == 12
    picture = (tmp_path / "run" / "pipeline-step-00000002.svg").read_text()
    assert picture.startswith("<svg")
    assert re.search(r"<title>step 2, measured: mine: pp 2, 2 micro-batches; makespan [0-9.]+ ms, bubble", picture)
    table.write_text("F0,F1,W0,B0,B1,W1\nF0,F1,B0,B1,W0,W1\n")
    refused = megazero("train", QUICKSTART, *words, "training.steps=6")
    assert refused.returncode == 2  # before any rank is started
    assert "rank 0 runs W0 before B0" in refused.stderr
    assert ">W0<" in refused.stderr


@pytest.mark.slow
def test_a_script_registers_a_callback_that_the_run_file_names(tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    script.write_text(
        "from megazero.training.callbacks.base import Callback\n"
        "from megazero.training.callbacks.registry import CALLBACKS\n"
        "from megazero.training.callbacks.base import StepDecision\n"
        "class Mine(Callback):\n"
        "    def __init__(self, context):\n"
        "        self.context = context\n"
        "    def after_step(self, record):\n"
        "        record.metrics['twice'] = 2.0 * record.step\n"
        "        return StepDecision.STOP if record.step == 2 else None\n"
        "CALLBACKS.register('mine', Mine)\n"
    )
    words = [*TINY, *shape(1, 1, 2, 1), "training.steps=4", f"training.run_dir={tmp_path / 'run'}"]
    words += ['training.callbacks=["mine"]']
    done = megazero("train", QUICKSTART, *words, f'launch.extensions=["{script}"]')
    assert done.returncode == 75, done.stderr
    lines = metrics_of(tmp_path / "run")
    assert [line["twice"] for line in lines] == [2.0, 4.0]
    assert find_newest(tmp_path / "run" / "checkpoints") == folder_at(
        tmp_path / "run" / "checkpoints" / "step-00000002"
    )


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ("--version", 0, f"megazero {megazero_package.__version__}\n"),
        ("--show-completion bash", 0, "complete"),
        ("models", 0, r"llama-3\.1-8b +llama +8,030,261,248 +32 +4,096 +32 +128,256 +131,072"),
        ("config zero.stage", 0, r"^# .*\n\[zero\]\n\n# .*\n# 0 or 1 or 2 or 3\nstage = 1\n$"),
        ("config lr", 2, r"no section or key is named lr: did you mean optimizer\.lr\?"),
        ("train run.toml --training.steps 10", 2, r"write training\.steps=10$"),
        ("check run.toml --zero.stage=3", 2, r"write zero\.stage=3$"),
    ],
)
def test_what_a_run_file_may_say_is_printed_and_a_key_with_dashes_is_told_without(
    words: str, status: int, said: str
) -> None:
    told = megazero(*words.split())
    assert told.returncode == status
    assert re.search(said, told.stdout or told.stderr.strip()), told


def test_what_is_wrong_with_the_files_of_a_run_is_told_before_torch_is_loaded(tmp_path: Path) -> None:
    """With what mends it, by one process before it starts ranks; one that runs owns its directory."""
    with IndexedWriter(tmp_path / "other", np.dtype("<u2"), "its fingerprint") as writer:
        writer.add_documents(np.arange(300, dtype=np.uint16), [300])
    (run_dir := tmp_path / "run").mkdir()
    lock = DirectoryLock(folder_at(run_dir))
    assert lock.try_to_take() is None
    code = "import sys\nfrom megazero.cli import main\ntry:\n    main()\nfinally:\n    print('torch' in sys.modules)"
    for key, value, said, needs_torch in (
        ("data.sources", '["none"]', "`megazero data tokenize TEXT --out none --tokenizer FILE` writes", False),
        ("data.sources", f'["{tmp_path}/other"]', f"data tokenize TEXT --out {tmp_path}/other --tokenizer byte", False),
        ("data.tokenizer", "none.json", "there is no file none.json", False),
        ("model.vocab_size", "100", "must be >= 257, the ids of data.tokenizer=byte; write 257", False),
        ("training.run_dir", str(run_dir), "belongs to a run that is still running: process", True),
    ):
        words = ["train", QUICKSTART, *TINY, f"training.run_dir={tmp_path / 'free'}", f"{key}={value}"]
        told = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
        assert told.returncode == 2, told.stderr
        assert f"1. {key} = " in told.stderr
        assert said in told.stderr
        assert told.stdout in ("False\n", f"{needs_torch}\n")
    assert not (tmp_path / "free").exists()


def test_commands_without_a_run_file_load_extensions_by_option(tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    script.write_text(
        "from megazero.schedules.one_f_one_b import OneFOneB\nfrom megazero.schedules.registry import SCHEDULES\n"
        "class Mine(OneFOneB):\n    name = 'mine'\nSCHEDULES.register('mine', Mine())\n"
    )
    words = ("schedule", "show", "--schedule", "mine", "--pp", "2", "--microbatches", "2")
    assert megazero(*words, "--extension", script).returncode == 0
    assert "unknown schedule mine" in megazero(*words).stderr
    for command in (words, ("checkpoint", "export", tmp_path, tmp_path / "out")):
        missing = megazero(*command, "--extension", tmp_path / "none.py")
        assert missing.returncode != 0
        assert "--extension = " in missing.stderr
        assert "cannot be imported" in missing.stderr


def test_a_callback_or_an_extension_that_does_not_exist_ends_the_command_before_anything_starts(tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    script.write_text("from megazero.training.callbacks.registry import CALLBACKS\nCALLBACKS.register('mine', print)\n")
    words = [*TINY, f"training.run_dir={tmp_path / 'run'}", 'training.callbacks=["mien"]']
    unknown = megazero("train", QUICKSTART, *words, f'launch.extensions=["{script}"]')
    assert unknown.returncode == 2
    assert (
        'training.callbacks = "mien": must be the name of a registered callback; registered are mine' in unknown.stderr
    )
    both = megazero("train", QUICKSTART, *words, "training.step=3", "zero.gather_policy=step")
    assert both.returncode == 2
    assert all(key in both.stderr for key in ("training.callbacks", "training.step =", "zero.gather_policy"))
    script.write_text("\n1 / 0\n")
    broken = megazero("train", QUICKSTART, *words, f'launch.extensions=["{script}", "no_such_module"]')
    assert broken.returncode == 2
    assert f"cannot be imported: ZeroDivisionError: division by zero ({script}:2)" in broken.stderr
    assert "cannot be imported: ModuleNotFoundError: No module named 'no_such_module'" in broken.stderr
    script.write_text("import os, sys\nif 'APART' in os.environ:\n    sys.exit('not here')\n")
    words += [f'launch.extensions=["{script}"]', "training.callbacks=[]"]
    on_one_rank = megazero("train", QUICKSTART, *words, env={"RANK": "0", "WORLD_SIZE": "1", "APART": ""})
    assert on_one_rank.returncode == 2
    assert on_one_rank.stderr.startswith(f"rank 0 on {socket.gethostname()}: ")
    assert "launch.extensions" in on_one_rank.stderr
    assert f"cannot be imported: SystemExit: not here ({script}:3)" in on_one_rank.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "text", "command"),
    [("WORLD_SIZE", "abc", "train"), ("RANK", "", "train"), ("LOCAL_WORLD_SIZE", "0", "memory-report")],
)
def test_what_a_launcher_says_wrongly_is_told_like_a_wrong_key(name: str, text: str, command: str) -> None:
    words = [QUICKSTART] if command == "train" else []
    done = megazero(command, *words, env={"RANK": "0", "WORLD_SIZE": "2", name: text})
    assert done.returncode == 2
    assert re.fullmatch(
        rf"error: {name}='{text}' in the environment must be a number of [01] or more, .*\n", done.stderr
    )
