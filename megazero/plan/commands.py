"""The commands of this room: plan a run, compare a run with its plan, calibrate the machine."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from megazero.cli._common import callback_problems, fail, schedule_problems, started_ranks
from megazero.plan.cost import FAILURES_PER_DEVICE_HOUR, STORAGE_BANDWIDTH_PER_NODE
from megazero.training.signals import EXIT_REFUSED

if TYPE_CHECKING:
    from megazero.config import ResolvedRun
    from megazero.plan.cluster import Cluster
    from megazero.plan.report import Plan
    from megazero.plan.search import SearchResult

_FOUND_BY = "# Found by megazero plan"  # the first words of a run file that a search has written
_Options: TypeAlias = Mapping[str, object]  # the options that the user gave, by name; None for the others
_FAILURES, _STORAGE = FAILURES_PER_DEVICE_HOUR * 1e6, STORAGE_BANDWIDTH_PER_NODE / 1e9


def _number(text: str) -> float:
    """Parse a number that is finite and not negative."""
    if not 0 <= (value := float(text)) < inf:
        raise typer.BadParameter(f"{text} must be finite and not below 0")
    return value


def _positive(text: str) -> float:
    """Parse a number that is finite and above 0."""
    if not (value := _number(text)):
        raise typer.BadParameter("it must be above 0")
    return value


def _new_file(text: str) -> Path:
    """Parse the path of an output file, and check before minutes of work that it can be written; "-" is the terminal."""
    path = Path(text)
    if text != "-" and (path.is_dir() or not os.access(path.parent, os.W_OK)):
        raise typer.BadParameter(f"{text} cannot be written; name a file in an existing folder")
    return path


_NUMBER = partial(typer.Option, parser=_number, metavar="NUMBER")
_POSITIVE = partial(typer.Option, parser=_positive, metavar="NUMBER ABOVE 0")
_FILE = partial(typer.Option, parser=_new_file, metavar="FILE")


def plan(
    config: Annotated[Path, typer.Argument(help="The run's TOML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key.sub=value, over what the file says.")] = None,
    gpu: Annotated[str | None, typer.Option(help="A device, such as h200, or the file of megazero calibrate.")] = None,
    gpus: Annotated[int | None, typer.Option(help="Ranks; launch.nproc_per_node by default.")] = None,
    per_node: Annotated[int, typer.Option(help="Devices of a node.")] = 8,
    network: Annotated[
        str, typer.Option(help="Between nodes: ib100 to ib800, roce100 to roce800, 1gbit to 100gbit.")
    ] = "ib400",
    search: Annotated[bool, typer.Option("--search", help="Find the best shapes.")] = False,
    write: Annotated[Path | None, _FILE(help="With --search: write the run file of the best shape.")] = None,
    seconds: Annotated[float | None, _NUMBER(help="With --search: about how long it may take; 120 by default.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Run the engine without memory and network.")] = False,
    rank: Annotated[int | None, typer.Option(help="With --dry-run: the rank to look at.")] = None,
    tokens: Annotated[float | None, _POSITIVE(help="Tokens of the run; by default, those of training.steps.")] = None,
    dollars_per_hour: Annotated[float | None, _NUMBER(help="Price of a device.")] = None,
    failures_per_million_hours: Annotated[
        float, _NUMBER(help="Failures in a million device hours; by default, those of Llama 3.")
    ] = _FAILURES,
    restart_minutes: Annotated[float, _NUMBER(help="From a failure until the run trains again.")] = 10,
    storage_gb_per_second: Annotated[
        float, _POSITIVE(help="GB/s that a node writes while all nodes write; by default, those of Llama 3.")
    ] = _STORAGE,
    corrected_by: Annotated[
        Path | None, typer.Option(help="The plan.json of a run: scale the time by its measured / planned seconds.")
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Write plan.json to training.run_dir; train compares the run with it.")
    ] = False,
    html: Annotated[Path | None, _FILE(help="Write a page for a browser.")] = None,
    as_json: Annotated[Path | None, _FILE("--json", help="Write all numbers to a file; - prints them alone.")] = None,
) -> None:
    """Show what a run needs on any cluster: memory, time, traffic, cost.  Find its best shape.  Needs no GPU."""
    request = _Request(config, tuple(overrides or ()), gpu, gpus, per_node, network)
    show: Callable[[str], None] = (lambda _: None) if as_json == Path("-") else print
    of_plan = {"--html": html, "--json": as_json, "--corrected-by": corrected_by, "--tokens": tokens}
    of_plan |= {"--dollars-per-hour": dollars_per_hour, "--keep": keep or None}
    with _refusals():
        _check_modes(of_plan, {"--write": write, "--seconds": seconds}, {"--rank": rank}, search, dry_run)
        cluster = request.cluster("h200" if dry_run else None)
        if dry_run:
            raise SystemExit(_dry_run(request, rank, show))
        from megazero.plan.correction import PLAN_FILE, ratio_in
        from megazero.plan.report import Assumptions, plan_of

        limit = 120.0 if seconds is None else seconds
        run, found = _search(request, cluster, show, write, limit) if search else (request.run(cluster.ranks), None)
        failures, storage = failures_per_million_hours / 1e6, storage_gb_per_second * 1e9
        ratio = 1.0 if corrected_by is None else ratio_in(corrected_by, cluster.device.name)
        assumed = Assumptions(tokens, dollars_per_hour, failures, restart_minutes * 60, storage, ratio)
        made = plan_of(run, cluster, assumed)
        _show_plan(made, show, advises=not search)
        numbers = [Path(made.run.config.training.run_dir) / PLAN_FILE] if keep else []
        _write(made, found, html, [*numbers, *([as_json] if as_json else [])], show)
    if not made.fits:
        raise SystemExit(EXIT_REFUSED)


@contextmanager
def _refusals() -> Iterator[None]:
    """Within a `with` block, end the command with EXIT_REFUSED and one message if a file or an option is wrong."""
    from megazero.config import ConfigError

    try:
        yield
    except ConfigError as error:
        print(error, file=sys.stderr)
        raise SystemExit(EXIT_REFUSED) from None
    except (ValueError, OSError) as error:
        fail(str(error), EXIT_REFUSED)


def _check_modes(of_plan: _Options, of_search: _Options, of_dry_run: _Options, search: bool, dry_run: bool) -> None:
    """Refuse options that contradict each other.  Raises: ValueError."""
    _check_read(of_dry_run, "a --dry-run", applies=dry_run)
    _check_read(of_search, "a --search", applies=search)
    _check_read(of_plan, "a plan; a --dry-run prints what it found", applies=not dry_run)
    if search and dry_run:
        raise ValueError("--search and --dry-run exclude each other; give one")
    write = of_search["--write"]
    if isinstance(write, Path) and write.exists() and not write.read_bytes().startswith(_FOUND_BY.encode()):
        raise ValueError(f"--write {write} exists, and no search has written it; name another file, or remove it")


def _show_plan(made: Plan, show: Callable[[str], None], *, advises: bool) -> None:
    from megazero.plan.advice import advice_text
    from megazero.plan.text import plan_text

    show(plan_text(made))
    if not made.fits and advises:
        missing = made.fullest.peak - made.cluster.device.memory_bytes
        text = advice_text(made.run, made.cluster, made.fullest, missing, between=",\n         or ")
        show(f"advice   {text}")


def _check_read(options: _Options, what: str, *, applies: bool) -> None:
    """Refuse options that would have no effect, unless they apply.  Raises: ValueError."""
    if not applies and (given := [name for name, value in options.items() if value is not None]):
        raise ValueError(f"{' and '.join(given)} {'is' if len(given) == 1 else 'are'} for {what}")


@dataclass(frozen=True)
class _Request:
    """The run file and the cluster as the user named them."""

    config: Path
    overrides: tuple[str, ...]
    gpu: str | None
    gpus: int | None
    per_node: int
    network: str

    def run(self, ranks: int | None) -> ResolvedRun:
        """Load the run file for a number of ranks.  Raises: ConfigError."""
        from megazero.config import load_config

        rules = callback_problems, schedule_problems
        return load_config(self.config, self.overrides, ranks, rules=rules, asks="--gpus")

    def cluster(self, default: str | None) -> Cluster:
        """Return the cluster, of `default` if the user named no device.  Raises: ValueError, OSError: see `cluster_of`."""
        from megazero.plan.cluster import cluster_of
        from megazero.plan.devices import DEVICES

        gpu = self.gpu or default
        if gpu is None:
            known = ", ".join(DEVICES)
            raise ValueError(f"--gpu is missing: one of {known}, or the file of megazero calibrate")
        ranks = self.gpus
        if ranks is None or not self.config.exists():  # loading says what is there instead
            ranks = self.run(None).world_size
        return cluster_of(gpu, ranks, self.per_node, self.network)


def _search(
    request: _Request, cluster: Cluster, show: Callable[[str], None], write: Path | None, seconds: float
) -> tuple[ResolvedRun, SearchResult]:
    """Print the best shapes, write the run file of the first, and return its run.  Raises: ValueError: no shape fits."""
    from megazero.config import ConfigError, resolve
    from megazero.config.document import to_toml
    from megazero.config.load import read_run_file
    from megazero.engine.phases import changed_keys, changes_text
    from megazero.plan.choices import config_of
    from megazero.plan.search import Judge, base_of, search
    from megazero.plan.text import search_text
    from megazero.settings import write_text

    def show_progress(line: str) -> None:
        if sys.stderr.isatty():
            print(line, file=sys.stderr, flush=True)

    ends, own = time.monotonic() + seconds / 2, None  # explaining the best shapes takes as long as finding them
    try:
        own = request.run(cluster.ranks)
    except ConfigError:  # its own shape does not have so many ranks
        config = read_run_file(request.config, request.overrides)
        batch = config.training.global_batch_size
        if batch == "auto":
            rule = "must be a number for a --search, if the file's own shape does not fit the ranks"
            raise ValueError(f"training.global_batch_size {rule}: it stays, and all else follows") from None
        base = base_of(config, batch)
    else:
        base = base_of(own.config, own.global_batch_size)
    found = search(
        base,
        Judge(cluster),
        own=own,
        processes=os.cpu_count() or 1,
        report=show_progress,
        time_is_up=lambda: time.monotonic() > ends,
    )
    show(search_text(found, cluster.device.memory_bytes))
    if own is not None and found.beats_best(cluster.device.memory_bytes):
        best, words = own, "as the run file has it"
    elif found.best:
        choice = found.best[0].choice
        best, words = resolve(config_of(base.config, choice), cluster.ranks), str(choice)
    else:
        raise ValueError(f"no shape of this run fits {cluster.ranks} x {cluster.device.name}; nothing was written")
    if write is not None:
        changed = changes_text(changed_keys((own or base).written, best.written)) or "nothing"
        head = f"{_FOUND_BY} {request.config} --search for {cluster}:\n# {words}\n# changed: {changed}\n\n"
        write_text(write, head + to_toml(best))
        show(f"\nwritten  {write}: megazero check {write} --world-size {cluster.ranks}\nchanged  {changed}")
    show("\nthe best of them\n")
    return best, found


def _dry_run(request: _Request, rank: int | None, show: Callable[[str], None]) -> int:
    """Print what a dry run of the engine did.  Returns: the exit code."""
    from megazero.plan.dry_run import dry_run
    from megazero.plan.text import dry_run_text

    run = request.run(request.gpus)
    if rank is not None and not 0 <= rank < run.world_size:
        raise ValueError(f"--rank {rank} must be from 0 to {run.world_size - 1}: the run has {run.world_size} ranks")
    done = dry_run(run, per_node=request.per_node, rank=rank, on_cuda=run.config.launch.device != "cpu")
    show(dry_run_text(done, rank))
    return EXIT_REFUSED if done.problems else 0


def _write(
    made: Plan, found: SearchResult | None, html: Path | None, numbers: Sequence[Path], show: Callable[[str], None]
) -> None:
    from megazero.plan.report import as_plain
    from megazero.plan.text import plan_html
    from megazero.settings import write_text

    if html is not None:
        write_text(html, plan_html(made, found))
        show(f"\npage     {html}: open it in a browser")
    for path in numbers:
        text = json.dumps(as_plain(made, found))
        if path == Path("-"):
            print(text)
        else:
            write_text(path, text + "\n")
            show(f"numbers  {path}")


def memory_report(
    overrides: Annotated[list[str] | None, typer.Argument(help="key.sub=value, over what the model says.")] = None,
    config: Annotated[
        Path | None, typer.Option(help="A run file, for its model and shape; a small Llama by default.")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Ranks to start; launch.nproc_per_node (4) by default.")
    ] = None,
    stages: Annotated[str, typer.Option(help="ZeRO stages, by commas.")] = "0,1,2,3",
    precision: Annotated[str, typer.Option(help="Of bf16, fp16 and fp32, by commas.")] = "bf16,fp16",
    offload: Annotated[str, typer.Option(help="Of the optimizer, of none, cpu and nvme, by commas.")] = "none,cpu",
    activations: Annotated[
        str, typer.Option(help="Policies, by commas: none, selective, full, or regions with + between them.")
    ] = "none,selective,mlp,full",
    iterations: Annotated[int, typer.Option(min=1, help="Steps to time after the measured one.")] = 20,
    out: Annotated[Path, typer.Option(help="Directory for memory.json.")] = Path("runs/memory-report"),
) -> None:
    """Measure memory, traffic and time of each ZeRO stage, and activations by policy, and compare them with the plan."""
    from megazero.config import ConfigError
    from megazero.plan.memory_report import draw_text, measure, not_measured, plan
    from megazero.settings import write_text
    from megazero.training.launch import Failed, leave_at_once, run_ranks

    prints, started = os.environ.get("RANK", "0") == "0", started_ranks()
    texts = {"stages": stages, "precision": precision, "offload": offload, "activations": activations}
    varied = {option: [word.strip() for word in text.split(",") if word.strip()] for option, text in texts.items()}
    policies = list(dict.fromkeys(varied.pop("activations")))
    try:
        runs, by_policy = plan(
            varied, overrides or [], config=config, ranks=ranks, started=started, scratch=out, policies=policies
        )
        if prints and by_policy and (keys := not_measured(runs[0][1])):
            print(f"the rows of activations are measured without {', '.join(keys)}", file=sys.stderr)
        numbers = out / "memory.json"
        out.mkdir(parents=True, exist_ok=True)  # before measuring takes minutes
        if numbers.is_dir():
            raise IsADirectoryError(f"{numbers} is a directory; remove it, or name another --out")
    except (ConfigError, ValueError, OSError) as error:
        if prints:
            print(f"error: {error}", file=sys.stderr)
        raise SystemExit(EXIT_REFUSED) from None
    work = partial(measure, runs=runs, policies=by_policy, iterations=iterations)
    report = run_ranks(runs[0][1], work)
    if isinstance(report, Failed):
        leave_at_once(report.status)
    if prints:
        print(draw_text(report))
        try:
            write_text(numbers, json.dumps(report.as_json(), indent=1) + "\n")
        except OSError as error:
            fail(str(error), EXIT_REFUSED)
        print(f"every rank's figures: {numbers}")


def calibrate(
    out: Annotated[Path, _FILE(help="The file, for `megazero plan --gpu FILE`.")] = Path("calibration.json"),
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes: a minute instead of four, on a CPU.")] = False,
) -> None:
    """Measure this machine's processors, or its one GPU, for `megazero plan`; nothing else should run meanwhile."""
    from megazero.plan.calibrate import calibrate as measure
    from megazero.plan.calibration import write_calibration

    if out.suffix != ".json":
        fail(f"--out {out} must end in .json, by which --gpu knows a file from a name", EXIT_REFUSED)
    try:
        found = measure(quick=quick, report=lambda line: print(line, flush=True))
        write_calibration(found, out)
    except (OSError, RuntimeError) as error:
        fail(str(error), 1)
    fastest = max(found.device.peak_flops.values()) * (1.0 if found.processors else found.device.product_share)
    print(f"{out}: {found.device.name}, up to {fastest / 1e9:.0f} GFLOP/s; megazero plan RUN.toml --gpu {out}")
