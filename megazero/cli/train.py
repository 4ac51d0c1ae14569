"""The command `megazero train`: starts the ranks if no launcher has, trains, and prints a summary."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megazero.cli._common import load_run
from megazero.training.signals import EXIT_REFUSED, EXIT_STOPPED, StopRequest

if TYPE_CHECKING:
    from megazero.config import ResolvedRun
    from megazero.training.callbacks.base import RunSummary


def train(
    config: Annotated[Path, typer.Argument(help="The run's TOML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key.sub=value, over what the file says.")] = None,
) -> None:
    """Train a GPT.  Started by torchrun, joins its ranks; otherwise starts launch.nproc_per_node ranks itself.

    \b
    Example:
      megazero train examples/quickstart.toml training.steps=50 zero.stage=3

    \b
    Exit codes:
      0   the run is done
      1   it failed; the last line says whether the same command can continue it
      2   the configuration or its data are wrong, or another run owns the directories
      75  a signal stopped the run after everything was saved; the same command continues it

    The same command continues from the newest checkpoint.  Keys: `megazero config`, or docs/config.md.
    """
    from megazero.terminal import Terminal, drain, warn

    stop = StopRequest()
    stop.listen()  # from here on: torch takes seconds to load
    from megazero.training.named_files import start_problems

    run = load_run(config, overrides, start_problems)
    from megazero.training.launch import Failed, leave_at_once, run_ranks, train_rank

    summary = run_ranks(run, partial(train_rank, stop=stop), stop)
    stop.close()
    is_first = os.environ.get("RANK", "0") == "0"
    if isinstance(summary, Failed):
        if is_first and summary.status != EXIT_REFUSED:
            warn(_failure(run, summary.has_cause))
        leave_at_once(summary.status)
    if is_first:
        Terminal(tells=False)(_report(run, summary, config, overrides or []))
    drain()
    if summary.stopped:
        raise SystemExit(EXIT_STOPPED)


def _report(run: ResolvedRun, summary: RunSummary, config: Path, overrides: list[str]) -> str:
    from megazero.training.callbacks.progress import readable_seconds

    run_dir = Path(run.config.training.run_dir)
    writes_events = run.config.logging.tensorboard or "tensorboard" in run.config.logging.loggers
    losses = [] if summary.loss is None else [f"loss {summary.loss:.4f}"]
    losses += [] if summary.val_loss is None else [f"validation loss {summary.val_loss:.4f}"]
    traffic = ", ".join(f"{axis} {sent / 2**20:,.1f} MiB" for axis, sent in sorted(summary.sent_bytes.items()))
    return (
        f"\n{'stopped, and saved' if summary.stopped else 'done'}: step {summary.step} in "
        + readable_seconds(summary.seconds)
        + (f", {', '.join(losses)} nats per token" if losses else "; no step was left to train")
        + (f"\n  checkpoint   {summary.checkpoint}" if summary.checkpoint else "")
        + f"\n  metrics      {run_dir / 'metrics.jsonl'}"
        + (f"\n  tensorboard  tensorboard --logdir {run_dir}" if writes_events else "")
        + (f"\n  sent by rank 0: {traffic}" if traffic else "")
        + (f"\n  skipped {summary.skipped_steps} steps for an overflow" if summary.skipped_steps else "")
        + "\n  continue on this or any other shape (for example parallel.tp=1 zero.stage=3):"
        + f"\n    {_command_to_go_on(run, summary, config, overrides)}"
    )


def _command_to_go_on(run: ResolvedRun, summary: RunSummary, config: Path, overrides: list[str]) -> str:
    """After a stop the same command; after the last step the same number of steps again."""
    more = [] if summary.stopped else [f"training.steps={summary.step + run.config.training.steps}"]
    replaced = ("checkpoint.resume=",) if summary.stopped else ("checkpoint.resume=", "training.steps=")
    others = [override for override in overrides if not override.startswith(replaced)]
    return f"{_launcher()} {shlex.join([str(config), *others, *more])}"


def _launcher() -> str:
    """What started this run: a script that says its name in MEGAZERO_LAUNCHER, torchrun, or the command itself."""
    if launcher := os.environ.get("MEGAZERO_LAUNCHER"):
        return launcher
    if "TORCHELASTIC_RUN_ID" in os.environ:
        nodes, ranks = os.environ.get("GROUP_WORLD_SIZE", "1"), os.environ.get("LOCAL_WORLD_SIZE", "1")
        here = "--standalone" if nodes == "1" else f"--nnodes {nodes} --rdzv_backend c10d --rdzv_endpoint HOST:PORT"
        return f"torchrun {here} --nproc_per_node {ranks} -m megazero.cli train"
    if shutil.which("megazero"):
        return "megazero train"
    if sys.argv[0].endswith(".py"):
        return f"{os.path.relpath(sys.executable)} -m megazero.cli train"
    return f"{os.path.relpath(sys.argv[0])} train"


def _failure(run: ResolvedRun, has_cause: bool) -> str:
    """Say where the run stands and what to do: repeat the command after a lost rank, fix any other cause first."""
    from megazero.checkpoint.index import find_newest
    from megazero.checkpoint.lock import checkpoints_of
    from megazero.settings import hide_passwords

    begins = "once the cause is mended, the run" if has_cause else "the same command"
    resume = run.config.checkpoint.resume
    does = (
        "begins at step 0"
        if resume in ("auto", "never")
        else f"goes on from checkpoint.resume={hide_passwords(resume)}"
    )
    nothing = f"no checkpoint had been written yet; {begins} {does} again"
    try:
        newest, state = find_newest(checkpoints_of(run.config)), nothing
    except Exception as error:  # of a storage that may be why the run ended
        newest, state = None, f"its checkpoints cannot be read ({error})"
    if newest:
        state = f"the newest complete checkpoint is {newest}; with checkpoint.resume=auto {begins} continues from it"
    return f"the run ended early; {state}"
