"""A plan and the measurements of its run, in the file `plan.json` of the run directory.

    megazero plan RUN.toml --gpu h200 --keep                              writes the file
    megazero train RUN.toml                                               at step 10, compares itself with the plan, and adds
                                                                          its measurements to the file
    megazero plan OTHER.toml --gpu h200 --corrected-by runs/a/plan.json   scales planned steps by measured / planned seconds

Bytes sent must be equal.  Memory is compared on CUDA alone, where tensors are counted; the memory of a CPU process includes
its libraries.  Time is compared if the run is on the device of the plan.
"""

import json
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

import torch

from megazero.config import ResolvedRun
from megazero.plan.devices import DEVICES, device_of
from megazero.plan.step_callbacks import Measuring
from megazero.settings import write_text
from megazero.training.callbacks.base import RunContext, StepRecord

PLAN_FILE = "plan.json"
_FIRST, _LAST = 6, 10  # earlier steps compile and choose kernels
_NO_TENSORS = ("communicators", "allocator slack")  # kinds of memory that torch.cuda.max_memory_allocated leaves out


@dataclass(frozen=True)
class SavedPlan:
    """A plan read from `plan.json`.

    Args:
        shape: degrees, ZeRO stage, schedule and batch sizes, as `shape_of` returns them.
        device: name of the device that the plan is for.
        seconds: planned seconds of a step.
        peak: planned bytes of rank 0.
        sent: bytes that rank 0 sends in a step, by axis.
        ratio: measured / planned seconds; None before a run has measured its steps.
    """

    shape: Mapping[str, object]
    device: str
    seconds: float
    peak: int
    sent: Mapping[str, int]
    ratio: float | None = None

    def compared(
        self, run: ResolvedRun, device: str, seconds: float, peak: int | None, sent: Mapping[str, int]
    ) -> tuple[str, dict[str, object]]:
        """Compare a run with the plan; return a line for the terminal and the figures to store.

        Both are empty if the run has another shape than the plan.

        Args:
            run: the run that was measured.
            device: the device of the run, by the name that a plan gives it.
            seconds: measured seconds of a step.
            peak: measured bytes of rank 0; None if they cannot be compared.
            sent: bytes that rank 0 sent in a step, by axis.
        """
        if shape_of(run) != dict(self.shape):
            return "", {}
        texts, figures = [], dict[str, object]()
        if device == self.device:
            ratio = seconds / self.seconds
            texts.append(f"step {self.seconds:.3f} s planned, {seconds:.3f} s measured ({ratio - 1:+.1%})")
            figures |= {"seconds": seconds, "seconds_ratio": ratio}
        if peak is not None:
            ratio = peak / self.peak
            numbers = f"{self.peak / 2**30:.2f} GiB planned, {peak / 2**30:.2f} GiB measured ({ratio - 1:+.1%})"
            texts.append(f"memory {numbers}")
            figures |= {"peak": peak, "peak_ratio": ratio}
        differ = {axis for axis in {*self.sent, *sent} if self.sent.get(axis, 0) != sent.get(axis, 0)}
        unequal = [f"{axis} {self.sent.get(axis, 0):,} planned, {sent.get(axis, 0):,} sent" for axis in sorted(differ)]
        texts.append(f"bytes sent: {', '.join(unequal) or 'as planned'}")
        return "plan: " + " | ".join(texts), figures | {"sent": dict(sent)}


def shape_of(run: ResolvedRun) -> dict[str, object]:
    """Return the values of a run that its plan depends on."""
    parallel, zero = run.config.parallel, run.config.zero
    shape = {key: getattr(parallel, key) for key in ("tp", "cp", "pp", "ep", "schedule", "virtual_stages")}
    sizes = {key: getattr(run, key) for key in ("dp", "micro_batch_size", "accumulation", "global_batch_size")}
    return {**shape, **sizes, "zero_stage": zero.stage}


def read_plan(path: Path) -> SavedPlan:
    """Read a plan that `--keep` or `--json` wrote.  Raises: ValueError: the file is damaged or no plan; OSError."""
    try:
        written: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        sent = Counter[str]()
        for name, numbers in written["traffic"][0].items():
            sent[name.split()[0]] += int(numbers["sent_bytes"])
        shape = {key: written["run"][key] for key in written["run"] if key != "parameters"}
        first = written["memory"][0]["peak"] - sum(written["memory"][0]["kinds"].get(kind, 0) for kind in _NO_TENSORS)
        seconds, ratio = float(written["step"]["seconds"]), written.get("measured", {}).get("seconds_ratio")
        if not all(0 < number < inf for number in (seconds, first, 1.0 if ratio is None else ratio)):
            raise ValueError
        return SavedPlan(shape, str(written["cluster"]["device"]), seconds, first, dict(+sent), ratio)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        wrong = "is no plan: megazero plan --keep writes one, and train adds what it measured"
        raise ValueError(f"{path} {wrong}") from None


def add_measured(path: Path, found: Mapping[str, object]) -> None:
    """Add measurements to a plan's file.  Raises: OSError; ValueError, TypeError: the file no longer holds a plan."""
    written = json.loads(path.read_text(encoding="utf-8"))
    write_text(path, json.dumps(written | {"measured": dict(found)}) + "\n")


def ratio_in(path: Path, device: str) -> float:
    """Return measured / planned seconds of the run whose plan is in a file.

    Raises:
        ValueError: no step was measured, or `device` is not the device of the plan.
        OSError: the file cannot be read.
    """
    if not path.exists():
        raise ValueError(f"{path} is not there: megazero plan --keep writes a plan, and train adds what it measured")
    plan = read_plan(path)
    if plan.ratio is None:
        raise ValueError(f"{path} has no measured step: train prints plan against measured at step 10 and adds it")
    if plan.device != device:
        raise ValueError(f"{path} was measured on {plan.device}, and the plan is for {device}")
    return plan.ratio


class PlanCheck(Measuring):
    """Compares steps 6 to 10 of rank 0 with the plan in `plan.json`, prints a line, and adds the measurements to the file.

    Does nothing if there is no plan, the run has another shape, or the run begins after step 6.
    """

    def __init__(self, context: RunContext) -> None:
        super().__init__(context)
        self._path = Path(self._run.config.training.run_dir) / PLAN_FILE
        self._plan: SavedPlan | None = None
        self._seconds: list[float] = []

    def on_start(self) -> None:
        with suppress(OSError, ValueError):
            grows = self._run.config.training.batch_ramp is not None  # a plan assumes the full batch
            self._plan = read_plan(self._path) if self._state.rank == 0 and not grows else None

    def after_step(self, record: StepRecord) -> None:
        if self._plan is None or not _FIRST <= record.step <= _LAST or record.seconds is None:
            return
        self._seconds.append(record.seconds)
        if record.step == _LAST and len(self._seconds) == _LAST - _FIRST + 1:
            self._compare(self._plan, record)

    def _compare(self, plan: SavedPlan, record: StepRecord) -> None:
        on_cuda = self._state.device.type == "cuda"
        sent = {axis: count for axis, count in record.sent_bytes.items() if count}
        peak = record.memory_bytes if on_cuda else None
        if on_cuda:
            device = device_of(torch.cuda.get_device_name(self._state.device))
            name = device.name if device else ""
        else:  # a calibrated CPU: assume that it is this one
            name = "" if plan.device in DEVICES else plan.device
        line, figures = plan.compared(self._run, name, median(self._seconds), peak, sent)
        if line:
            self._log(line)
            self._tried(lambda: add_measured(self._path, figures))
