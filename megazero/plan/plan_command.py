"""`megazero plan`: what a run will need on a cluster, before a machine is rented."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from megazero.cli._common import callback_problems, fail, schedule_problems
from megazero.plan.cost import FAILURES_PER_DEVICE_HOUR, STORAGE_BANDWIDTH_PER_NODE
from megazero.training.signals import EXIT_REFUSED

if TYPE_CHECKING:
    from megazero.config import ResolvedRun
    from megazero.plan.cluster import Cluster
    from megazero.plan.report import Plan
    from megazero.plan.search import Found

_FOUND_BY = "# Found by megazero plan"  # how a run file begins that a search has written
_Numbers: TypeAlias = Sequence[tuple[str, float | None]]
"""Options and what was given."""


def plan(
    config: Annotated[Path, typer.Argument(help="The run's TOML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key.sub=value, over what the file says.")] = None,
    gpu: Annotated[
        str | None, typer.Option(help="A device by name, such as h100 or h200, or the file of megazero calibrate.")
    ] = None,
    gpus: Annotated[int | None, typer.Option(help="Ranks; launch.nproc_per_node by default.")] = None,
    per_node: Annotated[int, typer.Option(help="Devices of a node.")] = 8,
    network: Annotated[
        str, typer.Option(help="Between nodes: ib100 to ib800, roce100 to roce800, 1gbit to 100gbit.")
    ] = "ib400",
    search: Annotated[bool, typer.Option("--search", help="Find the best shapes.")] = False,
    write: Annotated[Path | None, typer.Option(help="With --search: write the run file of the best.")] = None,
    seconds: Annotated[
        float | None, typer.Option(help="With --search: about how long it may take; 120 by default.")
    ] = None,
    processes: Annotated[int | None, typer.Option(min=1, help="With --search: processes; one for each core.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Run the engine without memory and network.")] = False,
    rank: Annotated[int | None, typer.Option(help="With --dry-run: the rank to look at.")] = None,
    tokens: Annotated[float | None, typer.Option(help="Tokens of the run; those of training.steps by default.")] = None,
    dollars_per_hour: Annotated[float | None, typer.Option(help="Price of a device.")] = None,
    failures_per_million_hours: Annotated[
        float, typer.Option(help="Failures in a million device hours; as Llama 3 had by default.")
    ] = FAILURES_PER_DEVICE_HOUR * 1e6,
    restart_minutes: Annotated[float, typer.Option(help="From a failure until the run trains again.")] = 10,
    storage_gb_per_second: Annotated[
        float, typer.Option(help="What a node writes while all write; as Llama 3 had by default.")
    ] = STORAGE_BANDWIDTH_PER_NODE / 1e9,
    corrected_by: Annotated[
        Path | None, typer.Option(help="The plan.json of a run that measured its steps: they take so much longer.")
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Write all numbers to plan.json in training.run_dir, where train compares.")
    ] = False,
    html: Annotated[Path | None, typer.Option(help="Write a page for a browser.")] = None,
    as_json: Annotated[
        Path | None, typer.Option("--json", help="Write all numbers; - for the terminal, alone.")
    ] = None,
) -> None:
    """Say what a run needs on any cluster: memory, time, traffic, cost; the best shape; whether it starts.  Needs no GPU."""
    from megazero.config import ConfigError

    asked = _Asked(config, tuple(overrides or ()), gpu, gpus, per_node, network)
    say = (lambda _: None) if as_json == Path("-") else print
    try:
        of_search = {"--write": write, "--seconds": seconds, "--processes": processes}
        of_plan = {"--html": html, "--json": as_json, "--corrected-by": corrected_by, "--tokens": tokens}
        of_plan |= {"--dollars-per-hour": dollars_per_hour, "--keep": keep or None}
        _check_together(of_search, of_plan, search=search, dry_run=dry_run, rank=rank)
        _check_numbers(
            (("--tokens", tokens), ("--storage-gb-per-second", storage_gb_per_second)),
            (
                ("--dollars-per-hour", dollars_per_hour),
                ("--failures-per-million-hours", failures_per_million_hours),
                ("--restart-minutes", restart_minutes),
                ("--seconds", seconds),
            ),
        )
        _check_files(html, as_json, write)
        if dry_run:
            asked.check()
            raise SystemExit(_dry_run(asked, rank, say))
        cluster = asked.cluster()
        run, found = asked.run(cluster.ranks) if not search else None, None
        if search:
            late = 120.0 if seconds is None else seconds
            run, found = _search(asked, cluster, say, write, late, processes or os.cpu_count() or 1)
        if run is None:
            raise ValueError(f"no shape of this run fits {cluster.ranks} x {cluster.device.name}; nothing was written")
        from megazero.plan.advice import advice_text
        from megazero.plan.correction import PLAN_FILE, ratio_in
        from megazero.plan.report import Assumptions, plan_of
        from megazero.plan.text import plan_text

        failures, storage = failures_per_million_hours / 1e6, storage_gb_per_second * 1e9
        ratio = 1.0 if corrected_by is None else ratio_in(corrected_by, cluster.device.name)
        assumed = Assumptions(tokens, dollars_per_hour, failures, restart_minutes * 60, storage, ratio)
        made = plan_of(run, cluster, assumed)
        say(plan_text(made))
        if not made.fits and not search:
            missing = made.fullest.peak - cluster.device.memory_bytes
            text = advice_text(made.run, cluster, made.fullest, missing, between=",\n         or ")
            say(f"advice   {text}")
        kept = [Path(run.config.training.run_dir) / PLAN_FILE] if keep else []
        _write_files(made, found, html, [*kept, *([as_json] if as_json else [])], say)
    except ConfigError as error:
        print(error, file=sys.stderr)
        raise SystemExit(EXIT_REFUSED) from None
    except (ValueError, OSError) as error:
        fail(str(error), EXIT_REFUSED)
    if not made.fits:
        raise SystemExit(EXIT_REFUSED)


@dataclass(frozen=True)
class _Asked:
    """The run file and the cluster as the user named them."""

    config: Path
    overrides: tuple[str, ...]
    gpu: str | None
    gpus: int | None
    per_node: int
    network: str

    def run(self, ranks: int | None) -> ResolvedRun:
        """Load the run file for so many ranks.  Raises: ConfigError."""
        from megazero.config import load_config

        return load_config(
            self.config, self.overrides, ranks, rules=(callback_problems, schedule_problems), asks="--gpus"
        )

    def on_one_rank(self) -> ResolvedRun:
        """Read the file for its model and global batch only.  Raises: ConfigError, ValueError."""
        from megazero.config.load import read_run_file
        from megazero.plan.search import base_of

        config = read_run_file(self.config, self.overrides)
        if config.training.global_batch_size == "auto":
            rule = (
                "training.global_batch_size must be a number for a --search whose ranks do not fit the file's own shape"
            )
            raise ValueError(f"{rule}: it stays, and all else follows")
        return base_of(config, config.training.global_batch_size)

    def cluster(self) -> Cluster:
        """Return the cluster.  Raises: ValueError, OSError: `cluster_of`."""
        from megazero.plan.cluster import cluster_of
        from megazero.plan.devices import DEVICES

        if self.gpu is None:
            known = ", ".join(DEVICES)
            raise ValueError(f"--gpu is missing: one of {known}, or the file of megazero calibrate")
        if not self.config.exists():
            self.run(None)  # says what is there instead
        return cluster_of(self.gpu, self.ranks(), self.per_node, self.network)

    def check(self) -> None:
        """Check the options that a dry run does not use.  Raises: ValueError, OSError: `cluster_of`."""
        from megazero.plan.cluster import cluster_of

        cluster_of(self.gpu or "h200", self.ranks(), self.per_node, self.network)

    def ranks(self) -> int:
        """Return --gpus, or the ranks that the run file starts."""
        return self.gpus if self.gpus is not None else self.run(None).world_size


def _check_together(
    of_search: Mapping[str, object], of_plan: Mapping[str, object], *, search: bool, dry_run: bool, rank: int | None
) -> None:
    """Check that every given option is read.  Raises: ValueError."""
    if rank is not None and not dry_run:
        raise ValueError("--rank is for a --dry-run")
    if search and dry_run:
        raise ValueError("--search and --dry-run are two questions; ask one")
    for options, applies, what in (
        (of_search, search, "a --search"),
        (of_plan, not dry_run, "a plan; a --dry-run prints what it found"),
    ):
        if not applies and (given := [name for name, value in options.items() if value is not None]):
            raise ValueError(f"{' and '.join(given)} {'is' if len(given) == 1 else 'are'} for {what}")


def _check_numbers(positive: _Numbers, others: _Numbers) -> None:
    """Check that numbers are finite and positive, or not negative.  Raises: ValueError."""
    for name, value in positive:
        if value is not None and not 0 < value < inf:
            raise ValueError(f"{name} {value:g} must be above 0{' and finite' if value == inf else ''}")
    for name, value in others:
        if value is not None and not 0 <= value < inf:
            raise ValueError(f"{name} {value:g} must be 0 or more{' and finite' if value == inf else ''}")


def _check_files(html: Path | None, as_json: Path | None, write: Path | None) -> None:
    """Check that output files can be written, before minutes of work.  Raises: ValueError."""
    for name, path in (("--html", html), ("--json", as_json), ("--write", write)):
        if path is None or path == Path("-"):
            continue
        if path.is_dir():
            raise ValueError(f"{name} {path} is a folder; name a file in it")
        if not path.parent.is_dir():
            raise ValueError(f"{name} {path}: there is no folder {path.parent}")
        if not os.access(path.parent, os.W_OK):
            raise ValueError(f"{name} {path}: the folder {path.parent} cannot be written to")
    if write is not None and write.exists() and not write.read_bytes().startswith(_FOUND_BY.encode()):
        raise ValueError(f"--write {write} is a file that no search has written; name another, or remove it")


def _search(
    asked: _Asked, cluster: Cluster, say: Callable[[str], None], write: Path | None, seconds: float, processes: int
) -> tuple[ResolvedRun | None, Found]:
    """Print the best shapes, and write the run file of the first."""
    from megazero.config import ConfigError
    from megazero.plan.report import PlanJudge
    from megazero.plan.search import base_of, search
    from megazero.plan.text import search_text

    ends, own = time.monotonic() + seconds / 2, None  # what is said of the best takes as long as finding them
    try:
        run = own = asked.run(cluster.ranks)
        base = base_of(own.config, own.global_batch_size)
    except ConfigError:  # its own shape does not have so many ranks
        run = base = asked.on_one_rank()
    found = search(
        base,
        cluster,
        PlanJudge(cluster),
        own=own,
        processes=processes,
        say=_progress,
        is_late=lambda: time.monotonic() > ends,
    )
    say(search_text(found, cluster.device.memory_bytes))
    is_own = found.beats_best(cluster.device.memory_bytes)
    best, words = (own, "as the run file has it") if is_own else (None, "")
    if found.best and not is_own:
        best, words = found.best[0].run, str(found.best[0].candidate.choice)
    if best is None:
        return None, found
    if write is not None:
        from megazero.config import to_toml
        from megazero.engine.phases import changed_keys, changes_text
        from megazero.schedules.action import write_text

        changed = changes_text(changed_keys(run.written, best.written)) or "nothing"
        head = f"{_FOUND_BY} {asked.config} --search for {cluster}:\n# {words}\n# changed: {changed}\n\n"
        write_text(write, head + to_toml(best))
        say(f"\nwritten  {write}: megazero check {write} --world-size {cluster.ranks}\nchanged  {changed}")
    say("\nthe best of them\n")
    return best, found


def _progress(line: str) -> None:
    if sys.stderr.isatty():
        print(line, file=sys.stderr, flush=True)


def _dry_run(asked: _Asked, rank: int | None, say: Callable[[str], None]) -> int:
    """Print what a dry run of the engine did.  Returns: the exit code."""
    from megazero.plan.dry_run import dry_run
    from megazero.plan.text import dry_run_text

    run = asked.run(asked.gpus)
    if rank is not None and not 0 <= rank < run.world_size:
        raise ValueError(f"--rank {rank} must be from 0 to {run.world_size - 1}: the run has {run.world_size} ranks")
    done = dry_run(run, per_node=asked.per_node, rank=rank, on_cuda=run.config.launch.device != "cpu")
    say(dry_run_text(done, rank))
    return EXIT_REFUSED if done.problems else 0


def _write_files(
    made: Plan, found: Found | None, html: Path | None, numbers: Sequence[Path], say: Callable[[str], None]
) -> None:
    from megazero.plan.html import plan_html
    from megazero.plan.report import as_json
    from megazero.schedules.action import write_text

    if html is not None:
        write_text(html, plan_html(made, found))
        say(f"\npage     {html}: open it in a browser")
    for path in numbers:
        text = json.dumps(as_json(made, found))
        if path == Path("-"):
            print(text)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, text + "\n")
            say(f"numbers  {path}")
