"""The command `megazero`: parse, call, print."""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
import sys
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn
from rich.table import Table

if TYPE_CHECKING:
    from megazero.config import ResolvedRun
    from megazero.schedules.action import Schedule
    from megazero.schedules.simulate import Costs
    from megazero.training.loop import RunSummary

EXIT_CONFIG = 2

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
data_app = typer.Typer(no_args_is_help=True, help="Prepare data.")
checkpoint_app = typer.Typer(no_args_is_help=True, help="Look at checkpoints.")
app.add_typer(data_app, name="data")
schedule_app = typer.Typer(no_args_is_help=True, help="Look at pipeline schedules.")
app.add_typer(checkpoint_app, name="checkpoint")
app.add_typer(schedule_app, name="schedule")


def main() -> None:
    """Entry point."""
    app()


def _fail(message: str, status: int) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(status)


@app.command()
def train(
    config: Annotated[Path, typer.Argument(help="The run's TOML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key.sub=value, over what the file says.")] = None,
) -> None:
    """Train a GPT.  Joins torchrun where it started this process; otherwise starts launch.nproc_per_node ranks itself."""
    from megazero.config import ConfigError, load_config

    world = os.environ.get("WORLD_SIZE")
    try:
        run = load_config(config, overrides or [], int(world) if world else None)
    except ConfigError as error:
        if os.environ.get("RANK", "0") == "0":
            print(error, file=sys.stderr)
        raise SystemExit(EXIT_CONFIG) from None
    from megazero.training.launch import leave_at_once, run_ranks, train_rank

    summary = run_ranks(run, train_rank)
    speaks = os.environ.get("RANK", "0") == "0"
    if summary is None:
        if speaks:
            _report_failure(run)
        leave_at_once()
    if speaks:
        _report(run, summary, config, overrides or [])


def _report(run: ResolvedRun, summary: RunSummary, config: Path, overrides: list[str]) -> None:
    from megazero.training.metrics import readable_seconds

    run_dir = Path(run.config.training.run_dir)
    losses = [] if summary.loss is None else [f"loss {summary.loss:.4f}"]
    losses += [] if summary.val_loss is None else [f"validation loss {summary.val_loss:.4f}"]
    traffic = ", ".join(f"{axis} {sent / 2**20:,.1f} MiB" for axis, sent in sorted(summary.sent_bytes.items()))
    command = "megazero" if shutil.which("megazero") else os.path.relpath(sys.argv[0])
    more = [f"training.steps={summary.step + run.config.training.steps}"]
    kept = [override for override in overrides if not override.startswith(("training.steps=", "checkpoint.resume="))]
    print(
        f"\ndone: step {summary.step} in {readable_seconds(summary.seconds)}"
        + (f", {', '.join(losses)} nats per token" if losses else "; there was nothing left to do")
        + (f"\n  checkpoint   {summary.checkpoint}" if summary.checkpoint else "")
        + f"\n  metrics      {run_dir / 'metrics.jsonl'}"
        + (f"\n  tensorboard  tensorboard --logdir {run_dir}" if run.config.logging.tensorboard else "")
        + (f"\n  sent by rank 0: {traffic}" if traffic else "")
        + (f"\n  skipped {summary.skipped_steps} steps for an overflow" if summary.skipped_steps else "")
        + "\n  go on, on this or any other shape (for example parallel.tp=1 zero.stage=3):"
        + f"\n    {command} train {shlex.join([str(config), *kept, *more])}"
    )


def _report_failure(run: ResolvedRun) -> None:
    from megazero.checkpoint.index import find_newest

    newest = find_newest(Path(run.config.training.run_dir) / "checkpoints")
    state = "no checkpoint had been written yet"
    if newest:
        state = (
            f"the newest complete checkpoint is {newest}; with checkpoint.resume=auto the same command goes on from it"
        )
    print(f"the run ended early; {state}", file=sys.stderr)


@data_app.command()
def tokenize(
    inputs: Annotated[list[str], typer.Argument(help="Text files, .jsonl files, or directories of them.")],
    out: Annotated[str, typer.Option(help="Prefix of the .bin and .idx files to write.")],
    tokenizer: Annotated[str, typer.Option(help="'byte', or a Hugging Face tokenizers file.")] = "byte",
    workers: Annotated[int, typer.Option(help="Processes; 0 uses every core.")] = 0,
    jsonl_key: Annotated[str, typer.Option(help="Field of a .jsonl line that holds the text.")] = "text",
    eod_token: Annotated[str | None, typer.Option(help="Token that ends a document, if it cannot be guessed.")] = None,
) -> None:
    """Turn text into the indexed format that training reads."""
    from megazero.data import tokenize_files

    columns = ("{task.description}", BarColumn(), DownloadColumn(), TimeRemainingColumn())
    try:
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task("tokenizing", total=None)
            summary = tokenize_files(
                inputs,
                out,
                tokenizer,
                workers=workers or os.cpu_count() or 1,
                jsonl_key=jsonl_key,
                eod_token=eod_token,
                on_progress=lambda done, total: progress.update(task, completed=done, total=total),
            )
    except (ValueError, OSError, RuntimeError) as error:
        _fail(str(error), 1)
    print(
        f"{out}.bin and {out}.idx: {summary.documents:,} documents, {summary.tokens:,} tokens "
        f"from {summary.bytes:,} bytes in {summary.seconds:.1f} s"
    )


@checkpoint_app.command()
def inspect(directory: Annotated[Path, typer.Argument(help="A step directory.")]) -> None:
    """List a checkpoint's tensors, their shapes and dtypes, its step, and the shape of the cluster that wrote it."""
    from megazero.checkpoint.index import CheckpointError, StoredTensors, kinds_of, read_manifest, read_trainer_state

    try:
        files, trainer = read_manifest(directory), read_trainer_state(directory)
        kinds = {kind: StoredTensors(directory, kind) for kind in kinds_of(files)}
        table = Table("tensor", "shape", "dtype", *kinds, box=None)
        for name in sorted(kinds["model"].files):
            tensor = kinds["model"].slice(name)
            shape = " x ".join(map(str, tensor.get_shape()))
            marks = ["yes" if name in stored.files else "-" for stored in kinds.values()]
            table.add_row(name, shape, str(tensor.get_dtype()), *marks)
    except CheckpointError as error:
        _fail(str(error), 1)
    shape = ", ".join(f"{key} {value}" for key, value in trainer.shape.items())
    size = sum(record.bytes for record in files.values())
    print(f"{directory}: step {trainer.step}, {trainer.consumed_samples:,} samples, {trainer.consumed_tokens:,} tokens")
    print(f"written by {shape} (any shape reads it); {len(files)} files, {size / 2**20:,.1f} MiB")
    Console(width=None if sys.stdout.isatty() else 200).print(table)


@app.command()
def memory_report(
    overrides: Annotated[list[str] | None, typer.Argument(help="key.sub=value, over what the model says.")] = None,
    config: Annotated[
        Path | None, typer.Option(help="A run file, for its model and shape; a small Llama else.")
    ] = None,
    ranks: Annotated[int | None, typer.Option(help="Ranks to start; launch.nproc_per_node (4) by default.")] = None,
    stages: Annotated[str, typer.Option(help="ZeRO stages, by commas.")] = "0,1,2,3",
    precision: Annotated[str, typer.Option(help="Of bf16, fp16 and fp32, by commas.")] = "bf16,fp16",
    offload: Annotated[str, typer.Option(help="Of the optimizer, of none, cpu and nvme, by commas.")] = "none,cpu",
    steps: Annotated[int, typer.Option(help="Steps up to and with the measured one.")] = 2,
    iterations: Annotated[int, typer.Option(help="Steps to time after it.")] = 20,
    out: Annotated[Path, typer.Option(help="Directory for memory.json and memory.svg.")] = Path("runs/memory-report"),
) -> None:
    """Measure what each ZeRO stage keeps, sends and takes, beside the formulas of the papers."""
    from megazero.config import ConfigError
    from megazero.training.memory_report import Wish, measure, plan

    speaks, world = os.environ.get("RANK", "0") == "0", os.environ.get("WORLD_SIZE")
    try:
        varied = (_words(stages), _words(precision), _words(offload))
        wish = Wish(*varied, steps, iterations, ranks, config, overrides or [], out)
        planned = plan(wish, int(world) if world else None)
        out.mkdir(parents=True, exist_ok=True)
    except (ConfigError, ValueError, OSError) as error:
        if speaks:
            print(f"error: {error}", file=sys.stderr)
        raise SystemExit(EXIT_CONFIG) from None
    report = measure(planned)
    if report is None:
        from megazero.training.launch import leave_at_once

        leave_at_once()
    if speaks:
        from megazero.schedules.table import write_text
        from megazero.training.memory_chart import draw_svg, draw_text

        print(draw_text(report))
        write_text(out / "memory.json", json.dumps(report.as_json(), indent=1) + "\n")
        write_text(out / "memory.svg", draw_svg(report))
        print(f"every rank's figures: {out / 'memory.json'}   picture: {out / 'memory.svg'}")


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


@schedule_app.command()
def show(
    schedule: Annotated[
        str | None, typer.Option(help="gpipe, 1f1b, interleaved, zb-h1 or zbv; 1f1b by default.")
    ] = None,
    pp: Annotated[int | None, typer.Option(help="Pipeline ranks.")] = None,
    microbatches: Annotated[int | None, typer.Option(help="Micro-batches of one step.")] = None,
    virtual_stages: Annotated[int | None, typer.Option(help="Model chunks on each rank, for interleaved.")] = None,
    costs: Annotated[
        str, typer.Option(help="Times F,B,W,hop: forward, input's and weights' gradient, message.")
    ] = "1,1,1,0",
    file: Annotated[
        Path | None, typer.Option(help="A schedule of your own: CSV, a line per rank, cells as F0.")
    ] = None,
    placement: Annotated[str | None, typer.Option(help="Of the file's stages: loop (the default) or v.")] = None,
    svg: Annotated[Path | None, typer.Option(help="Write a picture.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a trace for ui.perfetto.dev; one unit is 1 ms.")] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Table of all schedules for these numbers.")] = False,
) -> None:
    """Prove a pipeline schedule, draw it, and tell its idle time and memory."""
    from megazero.schedules.draw import MIN_WIDTH, chrome_trace, draw_refused, draw_text
    from megazero.schedules.draw_svg import draw_svg
    from megazero.schedules.simulate import ScheduleError, program, simulate
    from megazero.schedules.table import write_text

    try:
        times = _parse_costs(costs)
        is_drawn = bool(schedule or file or svg or trace or not compare)
        shown = _read_own(file, placement, schedule, virtual_stages) if file else None
        pp, microbatches = _agreed_numbers(shown, pp, microbatches)
        if placement is not None and file is None:
            raise ValueError(f"placement={placement} is for the schedule of a --file; a named one has its own")
        if is_drawn:
            shown = shown or _named_schedule(schedule or "1f1b", pp, microbatches, virtual_stages, compare)
            try:
                program(shown)
            except ScheduleError as error:
                raise ValueError(f"{error}\n{draw_refused(shown, error)}".rstrip()) from None
            timeline = simulate(shown, times)
            colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
            width = max(shutil.get_terminal_size(fallback=(100, 24)).columns, MIN_WIDTH)
            print(draw_text(timeline, width, colour))
    except (ValueError, OSError) as error:
        _fail(str(error), EXIT_CONFIG)
    if compare:
        _print_comparison(pp, microbatches, virtual_stages, times, shown if file else None)
    try:
        if svg:
            write_text(svg, draw_svg(timeline))
        if trace:
            write_text(trace, json.dumps(chrome_trace(timeline)))
    except OSError as error:
        _fail(str(error), 1)


def _parse_costs(text: str) -> Costs:
    from megazero.schedules.simulate import Costs

    try:
        forward, backward, weight, hop = map(float, text.split(","))
    except ValueError:
        raise ValueError(f"costs={text} must be four numbers F,B,W,hop, such as 1,1,1,0") from None
    times = (forward, backward, weight, hop)
    if not all(math.isfinite(time) and time >= 0 for time in times) or not forward:
        raise ValueError(f"costs={text} must be finite, F above 0 and B, W and hop not below 0, such as 1,1,1,0")
    return Costs(*times)


def _read_own(file: Path, placement: str | None, schedule: str | None, virtual_stages: int | None) -> Schedule:
    from megazero.schedules.table import read_schedule

    if schedule is not None:
        raise ValueError(f"--schedule {schedule} and --file {file} are two schedules; give one")
    own = read_schedule(file, placement or "loop")
    if virtual_stages not in (None, own.chunks):
        raise ValueError(f"virtual_stages={virtual_stages}, but the schedule in {file} has {own.chunks}; leave it out")
    return own


def _agreed_numbers(own: Schedule | None, pp: int | None, microbatches: int | None) -> tuple[int, int]:
    if own is None:
        if pp is None or microbatches is None:
            raise ValueError("a named schedule needs --pp and --microbatches, such as --pp 4 --microbatches 8")
        return pp, microbatches
    for name, given, found in (("pp", pp, own.pp), ("microbatches", microbatches, own.microbatches)):
        if given not in (None, found):
            raise ValueError(f"{name}={given}, but the schedule {own.name} has {found}; leave it out")
    return own.pp, own.microbatches


def _named_schedule(name: str, pp: int, microbatches: int, virtual_stages: int | None, compares: bool) -> Schedule:
    from megazero.schedules.generators import FAMILIES

    if name not in FAMILIES:
        close = get_close_matches(name.lower().replace("_", "-"), FAMILIES, n=1)
        hint = f"did you mean {close[0]}?" if close else f"the schedules are {', '.join(FAMILIES)}"
        raise ValueError(f"unknown schedule {name}; {hint}")
    chunks = FAMILIES[name].chunks
    if chunks is None:
        chunks = 1 if virtual_stages is None else virtual_stages
    elif virtual_stages not in (None, chunks) and not compares:  # where it compares, the number is for another row
        raise ValueError(f"{name} has virtual_stages={chunks}, got {virtual_stages}; interleaved takes any from 2 on")
    return FAMILIES[name].generate(pp, microbatches, chunks)


def _print_comparison(
    pp: int, microbatches: int, virtual_stages: int | None, costs: Costs, own: Schedule | None
) -> None:
    from megazero.schedules.draw import compare_table, number

    chunks = 2 if virtual_stages is None else virtual_stages
    table = Table("schedule", *("chunks", "makespan", "idle", "bubble", "peak activations"), "", box=None)
    for column in table.columns[1:6]:
        column.justify = "right"
    for row in compare_table(pp, microbatches, chunks, costs, [own] if own else []):
        if row.figures is None:
            table.add_row(row.name, str(row.chunks), *"----", row.impossible)
        else:
            it = row.figures
            cells = (number(it.makespan), number(it.idle), f"{it.bubble_fraction:.1%}", number(it.peak_activations))
            table.add_row(row.name, str(row.chunks), *cells)
    print(f"\npp {pp}, {microbatches} micro-batches; idle and peak activations of the rank that has most")
    Console(width=None if sys.stdout.isatty() else 200).print(table)


if __name__ == "__main__":
    main()
