"""`megazero calibrate`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from megazero.cli._common import fail
from megazero.training.signals import EXIT_REFUSED


def calibrate(
    out: Annotated[Path, typer.Option(help="The file, for `megazero plan --gpu FILE`.")] = Path("calibration.json"),
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes: a minute instead of four, on a CPU.")] = False,
) -> None:
    """Measure this machine's processors, or its one GPU, for `megazero plan`; nothing else should run meanwhile."""
    from megazero.plan.calibrate import calibrate as measure
    from megazero.plan.calibration import write_calibration

    if out.suffix != ".json":
        fail(f"--out {out} must end in .json, by which --gpu knows a file from a name", EXIT_REFUSED)
    if out.is_dir() or not os.access(out.parent, os.W_OK):  # before minutes of measuring
        fail(f"--out {out} cannot be written; name a file in a folder that there is", EXIT_REFUSED)
    try:
        found = measure(quick=quick, say=lambda text: print(text, flush=True))
        write_calibration(found, out)
    except (OSError, RuntimeError) as error:
        fail(str(error), 1)
    fastest = max(found.device.peak_flops.values()) * (1.0 if found.processors else found.device.product_share)
    print(f"{out}: {found.device.name}, up to {fastest / 1e9:.0f} GFLOP/s; megazero plan RUN.toml --gpu {out}")
