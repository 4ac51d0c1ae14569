"""`megazero memory-report`."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from megazero.cli._common import fail, started_ranks
from megazero.training.signals import EXIT_REFUSED


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
    out: Annotated[Path, typer.Option(help="Directory for memory.json and activations.svg.")] = Path(
        "runs/memory-report"
    ),
) -> None:
    """Measure memory, traffic and time of each ZeRO stage, and activations by policy, beside the plan."""
    from megazero.config import ConfigError
    from megazero.plan.memory_chart import draw_course, draw_text
    from megazero.plan.memory_report import measure, not_measured, plan
    from megazero.schedules.action import write_text
    from megazero.training.launch import Failed, leave_at_once, run_ranks

    prints, started = os.environ.get("RANK", "0") == "0", started_ranks()
    texts = {"stages": stages, "precision": precision, "offload": offload}
    varied = {option: [word.strip() for word in text.split(",") if word.strip()] for option, text in texts.items()}
    try:
        words = list(dict.fromkeys(word.strip() for word in activations.split(",") if word.strip()))
        runs, policies = plan(
            varied, overrides or [], config=config, ranks=ranks, started=started, scratch=out, policies=words
        )
        if prints and policies and (keys := not_measured(next(iter(runs.values())))):
            print(f"the rows of activations are measured without {', '.join(keys)}", file=sys.stderr)
        written = [out / name for name in ("memory.json", "activations.svg")[: 1 + bool(policies)]]
        _try_to_write(out, written)
    except (ConfigError, ValueError, OSError) as error:
        if prints:
            print(f"error: {error}", file=sys.stderr)
        raise SystemExit(EXIT_REFUSED) from None
    work = partial(measure, runs=runs, policies=policies, iterations=iterations)
    report = run_ranks(next(iter(runs.values())), work)
    if isinstance(report, Failed):
        leave_at_once(report.status)
    if prints:
        print(draw_text(report))
        try:
            write_text(written[0], json.dumps(report.as_json(), indent=1) + "\n")
            for path in written[1:]:
                write_text(path, draw_course(report))
        except OSError as error:
            fail(str(error), EXIT_REFUSED)
        print(f"every rank's figures: {'   a picture of activations: '.join(map(str, written))}")


def _try_to_write(folder: Path, files: list[Path]) -> None:
    """Make the folder and try to write into it before measuring takes minutes.  Raises: OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in files:
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a directory; remove it, or name another --out")
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(2**16))
