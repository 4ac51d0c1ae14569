"""The benchmark of two hosts: its arithmetic, and that no byte escapes its clock."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks.all import Case, document, exposed_share, fastest_peer, least_over_floor, lines_of, main, run, wire_ms
from benchmarks.attention_work import AttentionWork
from benchmarks.hosts_net import NoHostsError, _is_of_the_dead, hosts_of
from benchmarks.rows import FLOOR, OURS, Line
from benchmarks.worlds import World


def _line(name: str, ms: float, megabytes: float, over_floor: float | None, ratio: float | None = None) -> Line:
    ratios = None if ratio is None else (ratio, ratio, ratio)
    return Line(name, (ms, ms, ms), ratios, over_floor, link_bytes=2e6 * megabytes, busiest_bytes=1e6 * megabytes)


def test_exposed_is_the_time_above_the_floor_in_parts_of_the_wires() -> None:
    floor, line = _line(FLOOR, 100.0, 0.0, 1.0), _line(OURS, 140.0, 10.0, 1.4)
    assert wire_ms(line, 1000) == pytest.approx(80.0)  # 10 MB at 1 Gbit/s
    assert exposed_share(line, floor, 1000) == pytest.approx(0.5)
    assert least_over_floor(line, floor, 1000) == 1.0
    assert least_over_floor(line, floor, 300) == pytest.approx(80.0 / 0.3 / 100.0)
    assert exposed_share(_line(OURS, 140.0, 10.0, None), floor, 1000) is None  # a pipeline of more ranks than cores


def test_a_document_has_a_line_for_each_row_and_each_contender() -> None:
    lines = [
        _line(OURS, 140.0, 10.0, 1.4),
        _line("megazero with zero.stage=1", 90.0, 10.0, 0.9, 1.5),
        _line("ddp", 280.0, 20.0, 2.8, 0.5),
        Line("deepspeed-1", error="not here"),
        _line(FLOOR, 100.0, 0.0, 1.0, 1.4),
    ]
    row = {"case": asdict(Case("dp", "tiny", 2, 2, 1000)), "machine": {"cores": "2"}, "rounds": 5, "steps": 2}
    row["lines"] = [asdict(line) for line in lines]
    text = document([row])
    assert "## tiny, 2 ranks, 2 hosts at 1000 Mbit/s" in text
    peer = fastest_peer(lines_of(row))
    assert peer is not None
    assert peer.name == "ddp"  # ours with options is no peer
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    expected = "data parallel; ddp; 140; 280; 100; 0.50 (0.50 to 0.50); 1.40; 2.80; 10.00; 20.00; 0.50; 1.12"
    assert expected.split("; ") in cells
    assert any(cell[:2] == ["deepspeed-1", "cannot run: not here"] for cell in cells)


class _SendsBehind:
    """Rank 0 sends a tensor to rank 1 behind the next step."""

    dp_index = 0

    def __init__(self, rank: int, *, size: int) -> None:
        self._rank, self._tensor = rank, torch.zeros(size, dtype=torch.uint8)
        self._under_way: dist.Work | None = None

    def step(self, *batch: torch.Tensor) -> None:
        if self._under_way is not None:
            self._under_way.wait()
        self._under_way = (dist.irecv if self._rank else dist.isend)(self._tensor, 1 - self._rank)


@pytest.mark.slow
def test_what_a_step_leaves_to_be_sent_is_in_the_next_ones_time_and_in_no_other_turn() -> None:
    size, mbit = 2_000_000, 100
    try:
        with hosts_of(2, mbit) as network:
            world = World("sends", partial(_SendsBehind, size=size), AttentionWork(64, 2), network)
            try:
                world.turn(range(1))
                turn = world.turn(range(3), run_in=1)
            finally:
                world.close()
    except NoHostsError as error:
        pytest.skip(str(error))
    least = 0.9 * (size - 200_000) * 8 / (mbit * 1e6)  # the bucket holds 128 KB that go at once
    assert len(turn.seconds) == 2
    assert min(turn.seconds) > least
    assert size <= turn.busiest_bytes < 1.2 * size  # of three steps three messages: the last one was waited for
    assert turn.busiest_bytes <= turn.link_bytes < 1.1 * turn.busiest_bytes  # nothing but acknowledgements comes back


@pytest.mark.slow
def test_hosts_of_a_process_that_was_killed_are_removed_by_the_next() -> None:
    made = "from benchmarks.hosts_net import hosts_of; import os\nwith hosts_of(2, 100): os.kill(os.getpid(), 9)"
    killed = subprocess.Popen([sys.executable, "-c", made], stderr=subprocess.PIPE, text=True)
    _, message = killed.communicate(timeout=60)
    if "NoHostsError" in message:
        pytest.skip(message.splitlines()[-1])
    left = {path.name for path in Path("/run/netns").glob(f"megazero-{killed.pid}-*")}
    assert len(left) == 3
    with hosts_of(2, 100) as network:
        found = {path.name for path in Path("/run/netns").iterdir()}
    assert not left & found
    assert set(network.namespaces) < found


def test_namespaces_that_no_process_of_the_benchmark_has_made_stay() -> None:
    nobody = int(Path("/proc/sys/kernel/pid_max").read_text()) + 1
    names = [f"megazero-{nobody}-{end}" for end in ("0", "12", "switch")]
    others = ["megazero-mine-0", f"megazero-{nobody}-mine", f"megazero-{os.getpid()}-0", f"megazero--{nobody}-0"]
    assert [name for name in (*names, *others) if _is_of_the_dead(name)] == names


@pytest.mark.parametrize("wrong", [("--mbit", "0"), ("--mbit", "100x"), ("--worlds", "two")])
def test_a_wrong_number_is_refused_with_its_option(
    wrong: tuple[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["all", *wrong])
    with pytest.raises(SystemExit):
        main()
    message = capsys.readouterr().err.splitlines()[-1]
    assert f"argument {wrong[0]}: " in message
    assert repr(wrong[1]) in message


@pytest.mark.slow
def test_contenders_of_two_hosts_are_measured_side_by_side() -> None:
    case = Case("dp", "smoke", 2, 2, 1000)
    try:
        row = run(case, rounds=1, steps=1, variants=["zero.stage=1"])
    except NoHostsError as error:
        pytest.skip(str(error))
    lines = lines_of(row)
    assert list(lines) == [OURS, "megazero with zero.stage=1", "ddp", FLOOR]
    gradients = lines[OURS].metered_bytes  # of two ranks, each sends half the gradients twice
    assert gradients is not None
    for name in (OURS, "megazero with zero.stage=1", "ddp"):
        assert lines[name].busiest_bytes > 0.95 * gradients  # type: ignore[operator]
        assert lines[name].loss_difference is None or lines[name].loss_difference < 1e-5  # type: ignore[operator]
        assert exposed_share(lines[name], lines[FLOOR], 1000) is not None
    assert lines[FLOOR].busiest_bytes < 0.05 * gradients  # type: ignore[operator]
