"""The parts of the loop: learning rate, micro-batches, metrics."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import re
import resource
import sys
import threading
from dataclasses import replace
from functools import partial
from itertools import count
from math import cos, inf, nan, pi
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import rich
import torch
from harness import run_world
from numpy.typing import NDArray
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from worlds import LLAMA, MIXTRAL, engine_on, run_of

from megazero.config import ResolvedRun, RunConfig, resolve
from megazero.config.document import save_config
from megazero.engine import BatchSlice, Position, StepStatistics, micro_batches
from megazero.engine.micro_batches import ReadAhead, placed
from megazero.layers import fp8
from megazero.layers.vocabulary import IGNORED_LABEL
from megazero.optim.config import LrScheduleConfig
from megazero.optim.lr_schedule import learning_rate_factor
from megazero.parallel_state import Axis
from megazero.training.batches import read_batches
from megazero.training.callbacks.base import SampleRange, StepRecord
from megazero.training.callbacks.metrics import MetricsFile, TensorBoard, as_json
from megazero.training.callbacks.progress import (
    ProgressDisplay,
    ProgressLine,
    describe_kernels,
    on_terminal,
    recompile_limit_in_a_line,
)


def _factors(steps: int, **keys: float | str) -> list[float]:
    schedule = LrScheduleConfig.model_validate(keys)
    return [learning_rate_factor(schedule, step, steps) for step in range(steps)]


def test_warm_up_is_linear_and_reaches_the_peak() -> None:
    for name in ("constant", "linear", "cosine", "wsd"):
        factors = _factors(100, name=name, warmup_steps=4)
        assert factors[:4] == [0.25, 0.5, 0.75, 1.0]


def test_schedules_end_at_their_floor() -> None:
    for name in ("linear", "cosine", "wsd"):
        assert _factors(50, name=name, warmup_steps=5, min_lr_ratio=0.1)[-1] == pytest.approx(0.1)
    assert _factors(50, name="constant", warmup_steps=5)[-1] == 1.0


def test_cosine_and_linear_follow_their_formulas() -> None:
    assert _factors(11, name="cosine", min_lr_ratio=0.0) == pytest.approx(
        [(1 + cos(pi * k / 10)) / 2 for k in range(11)]
    )
    assert _factors(11, name="linear", min_lr_ratio=0.5) == pytest.approx([1 - 0.05 * k for k in range(11)])


def test_wsd_is_flat_until_the_last_share_of_the_steps() -> None:
    factors = _factors(101, name="wsd", decay_fraction=0.2, min_lr_ratio=0.0)
    assert factors[:81] == [1.0] * 81
    assert factors[81:] == pytest.approx([1 - k / 20 for k in range(1, 21)])
    for shape, left in {"cosine": lambda x: (1 + cos(pi * x)) / 2, "exponential": lambda x: 2 * 0.5**x - 1}.items():
        decayed = _factors(101, name="wsd", decay_fraction=0.2, min_lr_ratio=0.1, decay_shape=shape)[80:]
        assert decayed == pytest.approx([0.1 + 0.9 * left(k / 20) for k in range(21)])
    decayed = _factors(101, name="wsd", decay_fraction=0.2, min_lr_ratio=0.1, decay_shape="1-sqrt")[80:]
    assert decayed == pytest.approx([0.1 + 0.9 * (1 - (k / 20) ** 0.5) for k in range(21)])


@pytest.mark.parametrize("name", ["linear", "cosine", "wsd"])
def test_a_decay_that_ends_before_the_run_is_that_of_a_shorter_run_and_stays(name: str) -> None:
    shorter, keys = _factors(40, name=name), {"name": name, "end_step": 40}
    assert _factors(60, **keys) == [*shorter, *[shorter[-1]] * 20]


@pytest.mark.parametrize("name", ["constant", "linear", "cosine", "wsd"])
@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (1, 5), (2, 2), (3, 10)])
def test_short_runs_have_a_rate_at_every_step(name: str, steps: int, warmup: int) -> None:
    assert all(0 < factor <= 1 for factor in _factors(steps, name=name, warmup_steps=warmup, min_lr_ratio=0.1))


@pytest.mark.parametrize(
    ("sections", "line"),
    [
        ({}, "not compiled | attention flash | adamw fused"),
        ({"data": {"document_mask": True}, "optimizer": {"name": "lion"}}, "flash in tiles | lion a tensor at a time"),
        (
            {"training": {"compile": True}, "optimizer": {"name": "adagrad"}},
            "blocks and loss compiled | attention flash | a",
        ),
    ],
)
def test_a_line_says_what_computes_a_run(sections: dict[str, Any], line: str) -> None:
    assert line in describe_kernels(engine_on(0, run_of(1, model=LLAMA, **sections)))


@pytest.mark.parametrize(
    ("capability", "scaling", "model", "line"),
    [
        ((9, 0), "blockwise", MIXTRAL, "blockwise fp8: linear layers by kernels, experts emulated, no faster"),
        ((12, 0), "rowwise", MIXTRAL, "rowwise fp8: linear layers by kernels, experts emulated, no faster"),
        ((9, 0), "rowwise", MIXTRAL, "rowwise fp8: linear layers by kernels, experts by kernels"),
        ((9, 0), "blockwise", LLAMA, "blockwise fp8: linear layers by kernels"),
    ],
)
def test_a_line_says_what_multiplies_in_fp8(
    capability: tuple[int, int], scaling: str, model: dict[str, Any], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"hidden_size": 128, "ffn_hidden_size": 128, "num_heads": 2, "num_kv_heads": 2}
    engine = engine_on(0, run_of(1, model=model | sizes, precision={"fp8": scaling, "fp8_layers": "all"}))
    on_gpu = partial(fp8.kernels_on, torch.device("cuda:0"), torch.bfloat16)
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(fp8, "kernels_on", lambda _, __, scaling: on_gpu(scaling))
    assert line in describe_kernels(engine).split(" | ")


def test_a_line_says_that_torch_compiles_a_function_no_more(caplog: pytest.LogCaptureFixture) -> None:
    lines: list[str] = []
    with recompile_limit_in_a_line(lines.append):
        compiled = torch.compile(lambda x: x + 1, dynamic=False, backend="eager")
        for size in range(1, 12):
            compiled(torch.ones(size))
    torch.compiler.reset()
    (line,) = lines
    assert "test_training.py" in line
    assert "size mismatch" in line
    assert "recompile_limit" not in caplog.text


class _Counting:
    """Sample i is the numbers from 100 i on, in two documents."""

    seq_len = 4

    def documents(self, indices: NDArray[np.int64]) -> list[tuple[list[int], bool]]:
        return [([1 + int(index) % 3, 3 - int(index) % 3], bool(index % 2)) for index in indices]

    def batch(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        return indices[:, None] * 100 + np.arange(5)


def test_the_ranks_share_a_global_batch_without_gap_or_overlap() -> None:
    seen = []
    for dp_rank in range(2):
        batch_slice = BatchSlice(Axis("dp", (0, 1), dp_rank), torch.device("cpu"), tokens=True, labels=True)
        batches = read_batches(_Counting(), 16, 8, 2, batch_slice)
        assert len(batches) == 2
        for batch in batches:
            assert batch.tokens.shape == (4, 2)
            assert (batch.tokens[0] == batch.sample_ids * 100).all()
            assert (batch.labels == batch.tokens + 1).all()
            seen += batch.sample_ids.tolist()
    assert seen == list(range(16, 24))


def test_samples_that_do_not_exist_are_masked() -> None:
    batch_slice = BatchSlice(Axis("dp"), torch.device("cpu"), tokens=True, labels=True)
    (batch,) = read_batches(_Counting(), 0, 3, 4, batch_slice)
    assert (batch.labels[:, 3] == IGNORED_LABEL).all()
    assert (batch.labels[:, :3] != IGNORED_LABEL).all()


def test_a_step_gets_its_own_samples_whatever_was_read_ahead() -> None:
    """Steps in order, again, and by leaps; one read is ahead, and its error is that of its step."""
    reads: list[tuple[int, bool]] = []

    def read(step: int) -> int:
        reads.append((step, threading.current_thread() is threading.main_thread()))
        return 100 // (step - 4)

    before, ahead = threading.active_count(), ReadAhead(read)
    for step in (0, 1, 2, 3, 5, 6, 7, 1, 2, 8):
        assert ahead.take((step,), (step + 1,)) == 100 // (step - 4)
    assert ahead.take((3,), (4,)) == -100
    with pytest.raises(ZeroDivisionError):
        ahead.take((4,), (5,))
    ahead.close()
    assert threading.active_count() == before
    assert [step for step, here in reads if here] == [0, 5, 1, 8, 3]
    assert [step for step, here in reads if not here] == [1, 2, 3, 4, 6, 7, 8, 2, 3, 9, 4]


@pytest.mark.parametrize(("cp", "documents"), [(1, False), (1, True), (2, False), (2, True)])
@pytest.mark.parametrize("count", [8, 7])
def test_what_is_copied_to_a_device_is_what_was_read(
    monkeypatch: pytest.MonkeyPatch, cp: int, documents: bool, count: int
) -> None:
    """On a stand-in for a device, with labels masked beyond the end, documents, and samples cut over two ranks."""
    ring = Axis("cp", tuple(range(cp)), cp - 1)
    batch_slice = BatchSlice(Axis("dp"), torch.device("cpu"), tokens=True, labels=True, ring=ring, documents=documents)
    elsewhere = SimpleNamespace(type="elsewhere")
    device = SimpleNamespace(sequence_shard=batch_slice.sequence_shard, documents=documents, device=elsewhere)
    batches, copied_ = read_batches(_Counting(), 16, count, 2, batch_slice), micro_batches._copied
    monkeypatch.setattr(micro_batches, "_copied", lambda tensors, _: copied_(tensors, torch.device("cpu")))
    for read, copied in zip(batches, placed(batches, device, 4), strict=True):
        for name in ("sample_ids", "tokens", "labels"):
            assert torch.equal(getattr(copied, name), getattr(read, name))
        assert (copied.shard is None) == (read.shard is None)
        if read.shard is not None:
            assert torch.equal(copied.shard.rows, read.shard.rows)
            assert torch.equal(copied.shard.positions, read.shard.positions)
            assert copied.shard.plan.documents == read.shard.plan.documents


def _record(step: int, val_loss: float | None = None) -> StepRecord:
    return StepRecord(
        Position(step, 8 * step, 10 * step),
        SampleRange(8 * step - 8, 8 * step - 1),
        StepStatistics(1.5, 0.5, 10),
        lr=1e-3,
        seconds=0.1,
        memory_bytes=1 << 20,
        val_loss=val_loss,
    )


def test_a_resumed_run_drops_the_steps_it_will_do_again_and_a_half_written_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = MetricsFile(path, 0, print)
    for step in range(1, 6):
        first.after_step(_record(step))
    first.close()
    path.write_text(path.read_text() + '{"step": 6, "lo')
    again = MetricsFile(path, 3, print)
    again.after_step(_record(4, val_loss=2.0))
    again.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert "val_loss" not in lines[0]
    assert lines[-1]["val_loss"] == 2.0
    assert "loss_scale" not in lines[0]
    assert "skipped" not in lines[0]


ODD_STEPS = ['{"step": Infinity}\n', '{"step": 1e400}\n', f'{{"step": {"[" * 100_000}\n']


@pytest.mark.parametrize(
    ("text", "after_step"),
    [('{"epoch": 1}\n', 0), ('{"step": 1}\n', 0), ('{"epoch": 1}\n', 3), *((text, 3) for text in ODD_STEPS)],
    ids=range(6),
)
def test_what_another_program_or_run_has_left_under_the_name_stays_beside_it(
    tmp_path: Path, text: str, after_step: int
) -> None:
    path, said = tmp_path / "metrics.jsonl", list[str]()
    for number in (1, 2):
        path.write_text(text)
        file = MetricsFile(path, after_step, said.append)
        file.after_step(_record(after_step + 1))
        file.on_rollback(Position(0))
        file.after_step(_record(1))
        file.close()
        assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1]
        assert (tmp_path / f"metrics.jsonl.before-{number}").read_text() == text
        assert said[number - 1].endswith(f"see {path}.before-{number}")
    assert len(said) == len(list(tmp_path.iterdir())) - 1 == 2


def _write_beside_pipes(folder: Path) -> None:
    said: list[str] = []
    file = MetricsFile(folder / "metrics.jsonl", 0, said.append)
    for step in (1, 2):
        file.after_step(_record(step))
    assert [line.count("no regular file") for line in said] == [1]
    with pytest.raises(FileExistsError, match="no regular file"):
        save_config(RunConfig(), folder / "config.toml")


def test_a_pipe_under_the_name_of_a_file_of_the_run_is_told_once_and_not_opened(tmp_path: Path) -> None:
    for name in ("metrics.jsonl", "config.toml"):
        os.mkfifo(tmp_path / name)
    process = multiprocessing.get_context("fork").Process(target=_write_beside_pipes, args=(tmp_path,), daemon=True)
    process.start()
    process.join(timeout=30)
    assert process.exitcode == 0


class _Disk:
    """A disk with so many bytes left: files cannot grow beyond them."""

    def __init__(self, left: int) -> None:
        self._before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (left, self._before[1]))

    def empty(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self._before)


def _write_steps(_: int, folder: Path) -> tuple[list[str], list[int], list[int]]:
    """Ten steps: the disk takes three of them, then none, and all from step 7 on."""
    said: list[str] = []
    metrics, board = (
        MetricsFile(folder / "metrics.jsonl", 0, said.append),
        TensorBoard(folder / "board", Position(), "", said.append),
    )
    line = len(as_json(_record(1))) + 1
    disk = _Disk(3 * line + line // 2)
    for step in range(1, 11):
        if step == 7:
            disk.empty()
        metrics.after_step(_record(step))
    metrics.after_step(_record(10, val_loss=2.0))
    metrics.close()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["val_loss"] == 2.0

    disk = _Disk(0)
    board.after_step(_record(1))
    disk.empty()
    board.after_step(_record(2))
    board.close()
    events = EventAccumulator(str(folder / "board"))
    events.Reload()
    left = {path.name for path in folder.iterdir()}
    assert left == {"metrics.jsonl", "board"}
    return said, [line["step"] for line in lines], [event.step for event in events.Scalars("loss")]


def test_what_a_full_disk_does_not_take_is_dropped_told_once_and_picked_up_again(tmp_path: Path) -> None:
    ((said, lines, points),) = run_world(1, lambda rank: _write_steps(rank, tmp_path))
    assert lines == [1, 2, 3, 7, 8, 9, 10]
    assert points == [2]
    assert [line.split(" cannot be written (")[0] for line in said[::2]] == [
        str(tmp_path / "metrics.jsonl"),
        str(tmp_path / "board"),
    ]
    assert said[1::2] == [
        f"{tmp_path / 'metrics.jsonl'} is written again from step 7",
        f"{tmp_path / 'board'} is written again from step 2",
    ]


def test_tensorboard_has_the_numbers_and_a_curve_for_each_axis(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path, Position(), "[model]\nfamily = 1\n", print)
    scaled = StepStatistics(1.5, 0.5, 10, loss_scale=8.0, skipped=True)
    board.after_step(replace(_record(1, val_loss=2.0), sent_bytes={"dp": 48, "tp": 96}))
    board.after_step(replace(_record(2), sent_bytes={"dp": 24}, skipped_steps=1, statistics=scaled))
    board.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    wanted = {"loss", "grad_norm", "lr", "tokens", "tokens_per_second", "step_seconds", "memory_bytes", "val_loss"}
    wanted |= {"sent_bytes/dp", "sent_bytes/tp", "loss_scale", "skipped_steps"}
    assert set(events.Tags()["scalars"]) == wanted
    assert [event.value for event in events.Scalars("sent_bytes/dp")] == [48, 24]
    (text,) = events.Tensors("config/text_summary")
    assert text.tensor_proto.string_val == [b"    [model]\n    family = 1"]


def test_tensorboard_has_losses_by_tokens_and_forgets_those_after_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    # Files are read in the order of their names, which begin with the second in which they are opened.
    seconds = count(1_000_000_000)
    clock = SimpleNamespace(time=lambda: next(seconds))
    monkeypatch.setattr("tensorboard.summary.writer.event_file_writer.time", clock)

    first = TensorBoard(tmp_path, Position(), "", print)
    records = [replace(_record(step), position=Position(step, 8 * step, 80 * step)) for step in range(1, 4)]
    for record in records:
        first.after_step(record)
    first.close()
    again = TensorBoard(tmp_path, records[1].position, "", print)
    again.after_step(replace(records[2], val_loss=2.0))

    def tokens() -> list[int]:
        again.close()
        events = EventAccumulator(str(tmp_path / "by_tokens"))
        events.Reload()
        assert set(events.Tags()["scalars"]) == {"loss_by_tokens", "val_loss_by_tokens"}
        return [event.step for event in events.Scalars("loss_by_tokens")]

    assert tokens() == [80, 160, 240]
    for step, consumed in ((4, 320), (5, 400)):
        again.after_step(replace(_record(step), position=Position(step, 8 * step, consumed)))
    # steps 4 and 5 are undone, their tokens stay consumed
    again.on_rollback(Position(3, 40, 400))
    again.after_step(replace(_record(4), val_loss=2.0, position=Position(4, 48, 480)))
    again.on_rollback(Position(3, 48, 480))
    again.after_step(replace(_record(4), val_loss=2.0, position=Position(4, 56, 560)))
    assert tokens() == [80, 160, 240, 560]


def _run_of(steps: int, **training: Any) -> ResolvedRun:
    return resolve(RunConfig.model_validate({"training": {"steps": steps, **training}}), 1)


def test_the_time_that_is_left_counts_the_samples_of_a_batch_that_grows() -> None:
    shown: list[str] = []
    ramp = {"start": 2, "increment": 2, "samples": 12}  # steps of 2, 2, 2, 4, 4, then of 6 samples: 56 in 12 steps
    run = _run_of(12, global_batch_size=6, batch_ramp=ramp)
    sizes = [run.samples_after(0, step) for step in range(13)]
    line, first = ProgressLine(run, shown.append, torch.device("cpu")), replace(_record(1), seconds=2.0)
    line.after_step(replace(first, samples=SampleRange(0, sizes[1] - 1)))
    assert shown[0].endswith(f"ETA {sizes[12] - sizes[1]}s"), (shown, sizes)


def test_a_skipped_step_is_reported_and_leaves_no_number_that_json_does_not_know() -> None:
    shown: list[str] = []
    statistics = StepStatistics(nan, inf, 10, loss_scale=32768.0, skipped=True)
    overflow = replace(_record(3), statistics=statistics, skipped_steps=1)
    ProgressLine(_run_of(20), shown.append, torch.device("cpu")).after_step(overflow)
    assert shown[0].endswith("| skipped (overflow, loss scale 32768)")
    values = json.loads(as_json(overflow), parse_constant=pytest.fail)
    assert (values["grad_norm"], values["loss"]) == (None, None)
    assert (values["loss_scale"], values["skipped_steps"]) == (32768.0, 1)


class _Screen(io.StringIO):
    """A terminal that keeps its rows: rich moves up and clears rows, and all else is written where the cursor is."""

    def isatty(self) -> bool:
        return True

    def rows(self) -> list[str]:
        rows, row = [""], 0
        for piece in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\n|\r|[^\x1b\n\r]+", self.getvalue()):
            if piece == "\x1b[1A":
                row -= 1
            elif piece == "\x1b[2K":
                rows[row] = ""
            elif piece == "\n":
                row += 1
                rows += [""] * (row == len(rows))
            elif piece[0] not in "\x1b\r":
                rows[row] += piece
        return rows


def test_a_terminal_of_60_columns_shows_the_newest_step_below_what_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = _Screen()
    for name, value in {"COLUMNS": "60", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(rich, "_console", None)
    assert on_terminal()
    display = ProgressDisplay(_run_of(500), print, torch.device("cpu"))
    display.on_start()
    for step in range(1, 301):
        display.after_step(replace(_record(step, val_loss=2.5 if step == 100 else None), mfu=0.4))
    display.close()
    rows = [row for row in screen.rows() if row]
    assert max(map(len, rows)) <= 60
    assert "".join(rows[:2]).startswith("step 100/500 | loss 1.5000 |")
    assert "".join(rows[:2]).endswith("| validation loss 2.5000")
    assert set(rows[2]) <= set("━╸╺")
    assert "".join(rows[3:]).startswith("step 300/500 | loss 1.5000 |")
    assert len(rows) == 5


def test_what_a_device_holds_beside_torch_is_told_once_after_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (70 * 2**30, 80 * 2**30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 9 * 2**30)
    line = ProgressLine(_run_of(20), shown.append, torch.device("cuda", 0))
    for step in (1, 2):
        line.after_step(_record(step))
    assert [text for text in shown if "communicators" in text] == [
        "beside torch's memory the device holds 1,024 MiB: communicators, and CUDA's own"
    ]
