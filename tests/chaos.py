"""Law 5 under fire: ranks are killed at any moment, the run goes on in another shape, and it is still the same run.

    round 1    tp 2, stage 1     . . save . X                                   in a step
    round 2    pp 2, stage 3            | . sa X                                while a file is written
    round 3    dp 4, stage 2            | . . save prun X                       while an older checkpoint is removed
    at last    tp 2 pp 2, stage 0                   | . . . . save . . . save   as the run that nobody disturbed

Every rank is a forked process in the real loop; a kill happens at a counted event, see `fault_injection`.  Between the
kills come rounds with a trouble of another kind, see `TROUBLES`: the run is started twice, its disk is full for a while, a
bit flips in a checkpoint or in the data, one rank has other data.  All choices come from one seed, so that a round that
fails can be repeated.

    python tests/chaos.py --rounds 50 --seed 7          (or CHAOS_ROUNDS, CHAOS_SEED)
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing as mp
import os
import random
import re
import signal
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import islice
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # imported by every optimizer; once here instead of once per rank
import torch.distributed as dist
from fault_injection import MOMENTS, Fault, FaultInjector, FullDisk

from megazero.checkpoint import retention
from megazero.checkpoint.folder import LocalFolder, partial_of
from megazero.checkpoint.index import (
    LATEST,
    MANIFEST,
    UNFINISHED,
    CheckpointError,
    OwnerError,
    find_damage,
    is_complete,
    read_manifest,
    step_folders,
    step_of,
)
from megazero.checkpoint.tensor_file import StoredTensors
from megazero.comm.messages import LostPeerError
from megazero.config import ConfigError, ResolvedRun, RunConfig, resolve
from megazero.data.writer import IndexedWriter
from megazero.parallel_state import Links, ParallelState, RankGrid
from megazero.training.batches import DataError
from megazero.training.callbacks.metrics import METRICS_FILE
from megazero.training.trainer import train

TOLERANCE = 1e-4
VOCAB, SAMPLES, STEPS_PER_ROUND, MOST_STEPS, TROUBLED_STEPS = 257, 8, 2, 12, 3
HOLD = "hold"  # while this file exists, a run that was started twice makes no step
MOST_SECONDS = 60.0  # that the surviving ranks may take to end by themselves
LONGEST_ROUND_SECONDS = 600.0
DONE, LOST, FAILED, REFUSED = 0, 3, 4, 5  # how a rank ends that is not killed
ENDS = {DONE: "done", LOST: "lost", REFUSED: "refused", None: "killed", -signal.SIGKILL: "killed"}
TWICE, FULL, FLIPPED_CHECKPOINT, FLIPPED_DATA, OTHER_DATA = TROUBLES = (
    "started twice",
    "full disk",
    "flipped bit in a checkpoint",
    "flipped bit in the data",
    "other data on one rank",
)


@dataclass(frozen=True)
class Round:
    """A part of the run: its shape and how it ends.  With neither fault nor trouble it continues until the run is done."""

    number: int
    run: ResolvedRun
    fault: Fault | None = None
    trouble: str | None = None

    @property
    def random(self) -> random.Random:
        """What decides the details of the trouble."""
        return random.Random(f"{self.number} {self.trouble}")

    def __str__(self) -> str:
        parallel, checkpoint, run = self.run.config.parallel, self.run.config.checkpoint, self.run
        text = f"round {self.number}: tp {parallel.tp} pp {parallel.pp} dp {run.dp} stage {run.config.zero.stage} "
        text += f"{parallel.schedule} {run.micro_batch_size} x {run.accumulation}"
        text += f" | save every {checkpoint.save_every_steps}, keep {checkpoint.keep_last}"
        text += ", behind" if checkpoint.asynchronous else ", waiting"
        if self.fault is None:
            return text if self.trouble is None else f"{text} | {self.trouble}"
        who = "all" if self.fault.kills_all else f"rank {self.fault.rank}"
        return f"{text} | {who} in {self.fault.moment} {self.fault.occurrence}, event {self.fault.event}"


def _resolved(folder: Path, name: str, steps: int, world: int, **sections: dict[str, Any]) -> ResolvedRun:
    config = {
        "model": {"family": "llama", "hidden_size": 32, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2}
        | {"ffn_hidden_size": 64, "vocab_size": VOCAB, "seq_len": 16, "dropout": 0.1},
        "precision": {"dtype": "fp32"},
        "optimizer": {"lr": 1e-3, "eps": 1e-5},
        "data": {"sources": ["corpus"], "tokenizer": "byte"},  # below the rank's working directory
        "logging": {"tensorboard": False, "loss_spike_sigmas": 0.0, "straggler_every_steps": 0},
        "parallel": {"timeout_seconds": 60} | sections.get("parallel", {}),
        "zero": sections.get("zero", {}),
        "checkpoint": sections.get("checkpoint", {}),
        "training": {"run_dir": str(folder / name), "steps": steps, "seed": 7, "global_batch_size": SAMPLES}
        | sections.get("training", {}),
    }
    return resolve(RunConfig.model_validate(config), world)


def _random_run(folder: Path, steps: int, random_: random.Random) -> ResolvedRun:
    """Any shape of 1, 2 or 4 ranks, and any way to keep checkpoints."""
    while True:
        schedule = random_.choice(("gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "dualpipev"))
        sections: dict[str, dict[str, Any]] = {
            "parallel": {
                "tp": random_.choice((1, 2)),
                "pp": random_.choice((1, 2, 4)),
                "sequence_parallel": random_.random() < 0.5,
                "schedule": schedule,
                "virtual_stages": 2 if schedule == "interleaved" else 1,
            },
            "zero": {"stage": random_.randrange(4), "bucket_bytes": random_.choice((8192, 65536))},
            "training": {"micro_batch_size": random_.choice((1, 2, 4))},
            "checkpoint": {
                "asynchronous": random_.random() < 0.6,
                "keep_last": random_.randint(1, 3),
                "save_every_steps": random_.randint(1, 3),
                "on_damage": "fallback",
            },
        }
        try:
            return _resolved(folder, "run", steps, random_.choice((1, 2, 4)), **sections)
        except ConfigError:
            continue  # a shape that the model or the batch does not allow


def rounds_of(seed: int, folder: Path, steps: int) -> Iterator[Round]:
    """Rounds without end; each is a function of the seed and its number.  Every kind comes once before any comes again."""
    number = 0
    while True:
        kinds = [*MOMENTS, *TROUBLES]
        random.Random(f"{seed} turns {number}").shuffle(kinds)
        for kind in kinds:
            number += 1
            random_ = random.Random(f"{seed} round {number}")
            run = _random_run(folder, steps, random_)
            if kind in TROUBLES:
                while kind == OTHER_DATA and run.world_size == 1:
                    run = _random_run(folder, steps, random_)
                yield Round(number, run, trouble=kind)
                continue
            moment, limits = kind, MOMENTS[kind]
            fault = Fault(
                moment,
                random_.randint(1, limits.occurrences),
                random_.randrange(limits.events),
                random_.randrange(run.world_size) if limits.anywhere else 0,
                random_.random() < 0.4,
                random_.choice((0.0, 0.0, 0.0, 0.5, 0.5, 0.5, None)),
            )
            yield Round(number, run, fault)


def _run_rank(rank: int, round_: Round, scratch: Path, log: Callable[[str], None]) -> int:
    """Run one rank; how it ends."""
    run, world = round_.run, round_.run.world_size
    limit = MOST_STEPS if round_.fault else TROUBLED_STEPS if round_.trouble else None
    asked = 0

    def wants_stop() -> bool:
        nonlocal asked
        asked += 1
        while round_.trouble == TWICE and (scratch / HOLD).exists():  # a second start is under way
            time.sleep(0.01)
        return asked == limit

    try:
        torch.set_num_threads(1)
        if world > 1:
            given = {"rank": rank, "world_size": world, "timeout": timedelta(seconds=MOST_SECONDS)}
            dist.init_process_group("gloo", init_method=f"file://{scratch / 'store'}", **given)
        if round_.fault is not None and rank == round_.fault.rank:
            FaultInjector(round_.fault, log).arm()
        if round_.trouble == FULL:
            FullDisk(round_.random).arm()
        parallel = run.config.parallel
        grid = RankGrid(tp=parallel.tp, cp=parallel.cp, dp=run.dp, pp=parallel.pp, order=parallel.order)
        state = ParallelState(
            replace(grid, cp_ulysses=parallel.cp_ulysses or 1), rank, Links(timeout_seconds=MOST_SECONDS)
        )
        train(run, state, log, wants_stop)
    except LostPeerError as error:
        log(f"LOST rank {rank}: {error}")
        return LOST
    except (OwnerError, CheckpointError, DataError) as error:
        log(f"REFUSED rank {rank}: {error}")
        return REFUSED
    except BaseException:
        log(f"FAILED rank {rank}: {traceback.format_exc()}")
        return FAILED
    return DONE


def _main(rank: int, leader: int, round_: Round, scratch: Path) -> None:
    os.setpgid(0, leader)  # so that one signal reaches all of them, and no other process
    gc.freeze()  # what was forked stays shared: collecting it would copy its pages
    folder = Path(round_.run.config.training.run_dir).parent
    has_other = round_.trouble == OTHER_DATA and rank == round_.random.randrange(round_.run.world_size)
    os.chdir(folder / "other" if has_other else folder)
    file = os.open(scratch / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    ended = _run_rank(rank, round_, scratch, lambda line: os.write(file, (line + "\n").encode()) and None)
    os._exit(ended)  # no interpreter shutdown: gloo's threads may still be waiting for lost peers


@dataclass(frozen=True)
class Outcome:
    """How a round has ended.

    Args:
        log: the lines of rank 0 and of the ranks that failed.
        exits: how each rank ended; None for one that had to be killed after the grace time.
    """

    log: str
    exits: list[int | None]

    @property
    def killed(self) -> bool:
        """Whether the fault was injected."""
        return "KILLED" in self.log

    def steps(self, pattern: str) -> list[int]:
        """Numbers of the steps that lines of the log name."""
        return [int(step) for step in re.findall(pattern, self.log, re.MULTILINE)]


class _Ranks:
    """The processes of a round.

    Args:
        scratch: an empty directory for what they share.
    """

    def __init__(self, round_: Round, scratch: Path) -> None:
        self._round, self._log = round_, scratch / "log"
        self.processes: list[Any] = []
        context = mp.get_context("fork")
        for rank in range(round_.run.world_size):
            leader = self.processes[0].pid if self.processes else 0
            process = context.Process(target=_main, args=(rank, leader, round_, scratch), daemon=True)
            process.start()
            with suppress(OSError):  # it has done so itself, and may have ended already
                os.setpgid(process.pid, leader)
            self.processes.append(process)

    def wait_for(self, text: str) -> None:
        """Until the log has this, or all ranks have ended."""
        while text not in self.log and any(process.exitcode is None for process in self.processes):
            time.sleep(0.02)

    def attend(self) -> Outcome:
        """Until all have ended, or until a fault was injected and its grace time is over."""
        _attend(self.processes, self._round)
        return Outcome(self.log, [process.exitcode for process in self.processes])

    def kill(self) -> None:
        """End all ranks."""
        for process in self.processes:
            process.kill()
            process.join()

    @property
    def log(self) -> str:
        """What they have said so far."""
        return self._log.read_text() if self._log.exists() else ""


def play(round_: Round, second: Round | None = None) -> tuple[Outcome, Outcome | None]:
    """Run one round; once it trains, start a second one, during which it stands still."""
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as ending:

        def start(one: Round, name: str) -> _Ranks:
            folder = Path(scratch) / name
            folder.mkdir()
            if second is not None and one is round_:
                (folder / HOLD).touch()
            ranks = _Ranks(one, folder)
            ending.callback(ranks.kill)
            return ranks

        first, refused = start(round_, "first"), None
        if second is not None:
            first.wait_for("| global batch")
            refused = start(second, "second").attend()
            (Path(scratch) / "first" / HOLD).unlink()
        return first.attend(), refused


def _attend(processes: list[Any], round_: Round) -> None:
    """Wait for the ranks; after a fault no longer than its grace time."""
    end, dead = time.monotonic() + LONGEST_ROUND_SECONDS, False
    while living := [process for process in processes if process.exitcode is None]:
        if not wait([process.sentinel for process in living], timeout=max(0.0, end - time.monotonic())):
            return
        for process in processes:
            process.join(timeout=0)
        if not dead and round_.fault is not None and any(process.exitcode == -signal.SIGKILL for process in processes):
            dead = True
            grace = round_.fault.grace_seconds
            end = time.monotonic() + (MOST_SECONDS if grace is None else grace)


@dataclass
class Chaos:
    """A disturbed run and what it must come to.

    Args:
        folder: an empty directory.
        seed: of all choices.
        rounds: how many faults.
        say: takes a line for each round.

    Attributes:
        planned, killed: rounds by moment.
        troubled: rounds by trouble.
        worlds: ranks of the rounds in which a fault was injected.
        worst_loss: largest relative difference of a reported loss from the undisturbed one.
        worst_weight: largest relative difference of a tensor of the last checkpoint.
        losses_compared: reported by all rounds together.
    """

    folder: Path
    seed: int
    rounds: int
    say: Callable[[str], None] = print
    planned: Counter[str] = field(default_factory=Counter)
    killed: Counter[str] = field(default_factory=Counter)
    troubled: Counter[str] = field(default_factory=Counter)
    worlds: Counter[int] = field(default_factory=Counter)
    worst_loss: float = 0.0
    worst_weight: float = 0.0
    losses_compared: int = 0

    def __post_init__(self) -> None:
        self.steps = STEPS_PER_ROUND * self.rounds
        self.root = LocalFolder(self.folder / "run" / "checkpoints")
        self._promised = 0  # the newest step that a round has called saved
        self._unrecorded: set[int] = set()  # done while the disk was full

    def run(self) -> None:
        """All rounds, a last one that is left alone, and every comparison.  Raises: AssertionError."""
        _write_data(self.folder)
        undisturbed = _resolved(self.folder, "undisturbed", self.steps, 1)
        self._check_ends(Round(0, undisturbed), play(Round(0, undisturbed))[0])
        self.expected = _metrics(self.folder / "undisturbed")
        assert list(self.expected) == list(range(1, self.steps + 1))
        for round_ in islice(rounds_of(self.seed, self.folder, self.steps), self.rounds):
            if self._newest() == self.steps:
                self.say(f"the run was done before round {round_.number}")
                break
            self._play(round_)
        last = _random_run(self.folder, self.steps, random.Random(f"{self.seed} last"))
        self._play(Round(self.rounds + 1, last))
        self._check_last(last.config.checkpoint.keep_last)

    def _newest(self) -> int:
        return max(map(step_of, filter(is_complete, step_folders(self.root))), default=0)

    def _play(self, round_: Round) -> None:
        before, started, second = self._newest(), time.monotonic(), None
        with self._damage(round_) as refusal:
            if round_.trouble == TWICE:
                run = _random_run(self.folder, self.steps, round_.random)
                second = Round(round_.number, run, trouble="the second start")
            elif round_.trouble == FLIPPED_CHECKPOINT and refusal is None:
                before = self._promised = max([0, *(step for step in self._complete() if step < before)])
            outcome, refused = play(round_, second)
        if round_.trouble == FULL:
            self._unrecorded |= set(outcome.steps(r"^step +(\d+)/\d+ \|"))
        try:
            if refused is not None:
                _check_refusal(refused, "still running")
            if refusal is not None:
                _check_refusal(outcome, refusal)
            else:
                self._check_ends(round_, outcome)
            self._check_progress(round_, outcome, before)
            self._check_files()
            self._check_metrics()
        except Exception as error:
            error.add_note(f"seed {self.seed}, {round_}\n{outcome.log}\n{'' if refused is None else refused.log}")
            raise
        if round_.trouble is not None:
            self.troubled[round_.trouble] += 1
        if round_.fault is not None:
            self.planned[round_.fault.moment] += 1
            if outcome.killed:
                self.killed[round_.fault.moment] += 1
                self.worlds[round_.run.world_size] += 1
        found = re.findall(r"^KILLED .*?: (.*)", outcome.log, re.MULTILINE)
        ended = ", ".join(ENDS[code] for code in outcome.exits)
        self.say(
            f"{round_}\n    step {before} -> {self._newest()}, {time.monotonic() - started:.1f} s, ranks {ended}"
            + "".join(f" | {line}" for line in found)
        )

    def _complete(self) -> list[int]:
        return [step_of(folder) for folder in step_folders(self.root) if is_complete(folder)]

    @contextmanager
    def _damage(self, round_: Round) -> Iterator[str | None]:
        """Flip a bit for the round, and back after it if the run could not go on.

        Yields: what a run says that must refuse to go on; None for one that must go on.
        """
        random_ = round_.random
        if round_.trouble == OTHER_DATA:
            yield "the ranks do not read the same data"
        elif round_.trouble == FLIPPED_DATA:
            with _flipped(self.folder / f"corpus{random_.choice(('.bin', '.idx'))}", random_):
                yield "corpus"
        elif round_.trouble == FLIPPED_CHECKPOINT and (steps := self._complete()):
            folder = self.folder / "run" / "checkpoints" / f"step-{max(steps):08d}"
            names = [MANIFEST, *read_manifest(folder)]  # a killed round may have left other files there
            with _flipped(folder / random_.choice(names), random_) as restore:
                if len(steps) > 1:
                    yield None
                    restore.clear()  # it was set aside, or removed
                else:
                    yield folder.name
        else:
            yield None

    def _check_ends(self, round_: Round, outcome: Outcome) -> None:
        assert FAILED not in outcome.exits, outcome.log
        if not outcome.killed:
            # A run whose disk is full at its very last save says so and ends with an error.
            allowed = {DONE, REFUSED} if round_.trouble == FULL else {DONE}
            assert set(outcome.exits) <= allowed, f"ranks ended with {outcome.exits}\n{outcome.log}"
        elif round_.fault is not None and round_.fault.grace_seconds is None:
            assert None not in outcome.exits, f"survivors did not end by themselves: {outcome.exits}"

    def _check_progress(self, round_: Round, outcome: Outcome, before: int) -> None:
        """Nothing that was durable is lost, and what is not durable are the few steps since."""
        resumed, begins = outcome.steps(r"^resumed .* at step (\d+)$"), "| global batch" in outcome.log
        assert resumed in ([before], []), f"step {before} was complete, the run went on from {resumed}"
        assert resumed or not before or not begins, f"step {before} was complete, the run began anew"
        after = self._newest()
        self._promised = max([self._promised, before, *outcome.steps(r"^saved step-(\d+):")])
        assert after >= self._promised, f"step {self._promised} was complete, the newest is {after}"
        done, keys = outcome.steps(r"^step +(\d+)/\d+ \|"), round_.run.config.checkpoint
        limit = keys.save_every_steps * (2 if keys.asynchronous else 1)  # one save may be under way
        assert round_.trouble == FULL or not done or done[-1] - after <= limit, (
            f"step {done[-1]} was done, the newest checkpoint is {after}"
        )

    def _check_files(self) -> None:
        """A directory with a manifest holds what that lists, and `latest` names such a one."""
        for folder in filter(is_complete, step_folders(self.root)):
            assert find_damage(folder) == []
            names = {partial_of(name) for name in folder.files()} - {UNFINISHED}  # left where a rank was killed
            assert names == {*read_manifest(folder), MANIFEST}
        if self.root.has(LATEST):
            assert is_complete(self.root.child(self.root.read(LATEST).decode().strip()))

    def _check_metrics(self) -> dict[int, dict[str, Any]]:
        """Every step that is reported is the undisturbed one."""
        reported = _metrics(self.folder / "run")
        last = max(reported, default=0)
        assert list(reported) == sorted(reported)
        assert set(range(1, max(last, self._newest()) + 1)) - set(reported) <= self._unrecorded
        for step, line in reported.items():
            expected = self.expected[step]
            assert (line["lr"], line["tokens"]) == (expected["lr"], expected["tokens"])
            difference = abs(line["loss"] / expected["loss"] - 1)
            assert difference <= TOLERANCE, f"step {step}: loss {line['loss']}, undisturbed {expected['loss']}"
            self.worst_loss = max(self.worst_loss, difference)
        self.losses_compared += len(reported)
        return reported

    def _check_last(self, keep_last: int) -> None:
        """The run is done, its weights are those of the undisturbed one, and old checkpoints are removed."""
        assert max(self._check_metrics()) == self._newest() == self.steps
        last, expected = (
            StoredTensors(self.folder / name / "checkpoints" / f"step-{self.steps:08d}", "model")
            for name in ("run", "undisturbed")
        )
        assert set(last.files) == set(expected.files)
        for name in expected.files:
            wanted = expected[name].whole().double()
            difference = float((last[name].whole().double() - wanted).norm() / wanted.norm())
            assert difference <= TOLERANCE, f"{name} differs by {difference}"
            self.worst_weight = max(self.worst_weight, difference)
        assert self.root.read(LATEST).decode().strip() == f"step-{self.steps:08d}"
        folders = step_folders(self.root)
        unfinished = {str(folder): folder.files() + folder.folders() for folder in folders if not is_complete(folder)}
        assert not unfinished, unfinished
        read = {marker.split(".")[0] for marker in self.root.child(retention.READING).files()}  # by those killed
        assert len([folder for folder in folders if folder.name not in read]) <= keep_last

    def table(self) -> str:
        """Rounds by moment, and the worst differences."""
        lines = ["moment     rounds  killed"]
        lines += [f"{moment:<10} {self.planned[moment]:>6} {self.killed[moment]:>7}" for moment in MOMENTS]
        lines += [f"{trouble}: {self.troubled[trouble]} rounds" for trouble in TROUBLES]
        lines += [
            f"worlds of those killed: {dict(sorted(self.worlds.items()))}",
            f"{self.losses_compared:,} losses compared, the worst {self.worst_loss:.1e} off; "
            f"last weights, the worst {self.worst_weight:.1e} off",
        ]
        return "\n".join(lines)


def _check_refusal(outcome: Outcome, text: str) -> None:
    assert set(outcome.exits) == {REFUSED}, f"ranks ended with {outcome.exits}\n{outcome.log}"
    assert text in outcome.log, outcome.log


@contextmanager
def _flipped(path: Path, random_: random.Random) -> Iterator[list[bytes]]:
    """A bit of a file is another one meanwhile.  Yields: what is written back at the end; nothing if the list is cleared."""
    data = path.read_bytes()
    changed, position = bytearray(data), random_.randrange(len(data) * 8)
    changed[position // 8] ^= 1 << position % 8
    path.write_bytes(changed)
    restore = [data]
    try:
        yield restore
    finally:
        for content in restore:
            path.write_bytes(content)


def _write_data(folder: Path) -> None:
    """A corpus, and another one of the same name and length that one rank may find in its stead."""
    for seed, where in ((5, folder), (6, folder / "other")):
        tokens = np.random.default_rng(seed).integers(0, VOCAB, 4000)
        tokens[1::2] = (tokens[::2] * 7 + 3) % VOCAB  # something to learn
        where.mkdir(exist_ok=True)
        with IndexedWriter(where / "corpus", np.uint16) as writer:
            writer.add_documents(tokens.astype(np.uint16), [len(tokens)])


def _metrics(run_dir: Path) -> dict[int, dict[str, Any]]:
    """Lines of metrics.jsonl by step."""
    path = run_dir / METRICS_FILE
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    assert len({line["step"] for line in lines}) == len(lines)
    return {line["step"]: line for line in lines}


def main() -> None:
    """The long version: every moment must have killed at least twice, and every trouble come twice."""
    parser = argparse.ArgumentParser(
        description="Disturb a training run in every way and compare it with an undisturbed one."
    )
    parser.add_argument("--rounds", type=int, default=int(os.environ.get("CHAOS_ROUNDS") or 50))
    parser.add_argument("--seed", type=int, default=int(os.environ.get("CHAOS_SEED") or time.time()))
    given = parser.parse_args()
    print(f"CHAOS_SEED={given.seed} CHAOS_ROUNDS={given.rounds}", flush=True)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        chaos = Chaos(Path(folder), given.seed, given.rounds, lambda line: print(line, flush=True))
        chaos.run()
    print(f"{chaos.table()}\n{time.monotonic() - started:.0f} s", flush=True)
    came, least = chaos.killed + chaos.troubled, min(2, given.rounds // (len(MOMENTS) + len(TROUBLES)))
    if few := [kind for kind in (*MOMENTS, *TROUBLES) if came[kind] < least]:
        raise SystemExit(f"too few rounds with: {', '.join(few)}; take more rounds")


if __name__ == "__main__":
    main()
