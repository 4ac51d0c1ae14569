"""The output of a run: its shape at the start, then lines for its steps.  A terminal's newest step is redrawn in place."""

import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cached_property, partial

import torch
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from torch.nn.attention import SDPBackend, current_flash_attention_impl

from megazero.config import ResolvedRun
from megazero.config.schema import ParallelConfig
from megazero.data.corpus import repeats, without_borders
from megazero.engine import Engine
from megazero.engine.outline import may_compile, schedule_of
from megazero.launchers import ALLOCATOR
from megazero.layers.attention import torchs_choice
from megazero.registry import added
from megazero.settings import Log
from megazero.training.callbacks.base import Callback, RunContext, StepRecord, bytes_beside_torch

_REDRAW_SECONDS = 0.1
_COLUMNS = 60  # of a bar, at most
_OLD_CUDNN = 91500  # Source: torch's check_prefer_cudnn_attention, sdp_utils.cpp


class ProgressLine(Callback):
    """Prints a line for the first step, for every `every_steps`-th step, and for steps that need attention.

    On CUDA, it also prints the memory outside of torch's allocator, after the first step, when NCCL has connected.
    """

    def __init__(self, run: ResolvedRun, log: Log, device: torch.device) -> None:
        self._run, self._log, self._device = run, log, device
        self._steps, self._every = run.config.training.steps, run.config.logging.every_steps
        self._seconds_per_sample = 0.0

    def after_step(self, record: StepRecord) -> None:
        """Print a step if it is due, was evaluated, or changed no weights.  Steps that were not computed are not printed."""
        statistics, seconds = record.statistics, record.seconds
        if statistics is None or seconds is None:
            return
        is_first = not self._seconds_per_sample
        if self._device.type == "cuda" and is_first:
            beside = bytes_beside_torch(self._device) / 2**20
            self._log(f"beside torch's memory the device holds {beside:,.0f} MiB: communicators, and CUDA's own")
        done, each = record.samples.last + 1, seconds / len(record.samples)
        self._seconds_per_sample = 0.9 * (self._seconds_per_sample or each) + 0.1 * each
        left = (self._run.samples_after(done, self._steps - record.step) - done) * self._seconds_per_sample
        columns = [
            f"step {record.step:>{len(str(self._steps))}}/{self._steps}",
            f"loss {statistics.loss:.4f}",
            f"grad norm {statistics.grad_norm:.3f}",
            f"lr {record.lr or 0:.2e}",
            f"{record.tokens_per_second or 0:,.0f} tokens/s",
            *([] if record.mfu is None else [f"MFU {record.mfu:.1%}"]),
            f"ETA {readable_seconds(left)}",
        ]
        is_due = self._shows(record, columns, is_first=is_first)
        losses = {} if record.val_loss is None else {"validation loss": record.val_loss}
        losses |= {f"{name} loss": loss for name, loss in record.val_losses.items()}
        if not (is_due or record.skipped or losses):
            return
        if record.skipped:
            scale = "" if record.skipped_steps is None else f", loss scale {statistics.loss_scale:g}"
            columns.append(f"skipped ({record.skipped}{scale})")
        self._log(" | ".join([*columns, *(f"{name} {loss:.4f}" for name, loss in losses.items())]))

    def _shows(self, record: StepRecord, columns: list[str], *, is_first: bool) -> bool:  # noqa: ARG002
        """Whether a step gets a line although nothing about it needs attention."""
        return is_first or record.step % self._every == 0 or record.step == self._steps


class ProgressDisplay(ProgressLine):
    """Redraws the newest step at the bottom of a terminal.  Only steps that need attention get lines; they scroll above."""

    _drawn = 0.0

    @cached_property
    def _live(self) -> Live:
        return Live(auto_refresh=False)

    def on_start(self) -> None:
        with suppress(OSError, ValueError):  # nobody may be looking any more
            self._live.start()
            self._live.console.show_cursor(True)  # a run that is killed cannot bring it back

    def _shows(self, record: StepRecord, columns: list[str], *, is_first: bool) -> bool:
        shown = Table.grid()
        shown.add_row(ProgressBar(self._steps, record.step, width=min(_COLUMNS, self._live.console.width)))
        shown.add_row(" | ".join(columns))
        is_due = is_first or time.monotonic() - self._drawn > _REDRAW_SECONDS
        self._drawn = time.monotonic() if is_due else self._drawn
        with suppress(OSError, ValueError):
            self._live.update(shown, refresh=is_due)
        return False

    def close(self) -> None:
        with suppress(OSError, ValueError):
            self._live.stop()


def on_terminal() -> bool:
    """Whether the output is a terminal whose lines can be redrawn."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")


def readable_seconds(seconds: float) -> str:
    """Format a duration: 45s, 3m05s, 2h07m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def context_parallelism(parallel: ParallelConfig) -> str:
    """Format the degree and the method of context parallelism: "cp 8 (hybrid, Ulysses 4 x ring 2), "; empty at cp 1."""
    if parallel.cp == 1:
        return ""
    ulysses = parallel.ulysses
    degrees = f", Ulysses {ulysses} x ring {parallel.cp // ulysses}" if parallel.cp_method == "hybrid" else ""
    return f"cp {parallel.cp} ({parallel.cp_method}{degrees}), "


def describe(run: ResolvedRun, engine: Engine) -> str:
    """Return one line with the shape of a run, its batch and its model state."""
    grid, memory, parallel = engine.state.grid, engine.memory_bytes(), run.config.parallel
    capacity = run.micro_batch_size * run.accumulation * run.dp
    relation = "=" if capacity == run.global_batch_size else "in"
    experts = f"ep {grid.ep}, " if grid.ep > 1 else ""
    return (
        f"tp {grid.tp}, {context_parallelism(parallel)}{experts}pp {grid.pp}, dp {grid.dp}, ZeRO {run.config.zero.stage}, "
        f"schedule {parallel.schedule}"
        f" | global batch {run.global_batch_size} {relation} {run.micro_batch_size} x {run.accumulation} x dp {run.dp}"
        f" | model state {sum(memory.values()) / 2**20:,.1f} MiB on rank 0"
    )


def announce(context: RunContext) -> None:
    """Print a description of the run, and warnings about its data.  Called on every rank, before the first step."""
    run, engine, start, log = context.run, context.engine, context.start, context.log
    log(describe(run, engine))
    if engine.state.rank:
        return
    more = [partial(line, run, schedule_of(run), engine.state.device) for line in added("start line").values()]
    for line_of in (partial(describe_kernels, engine), *more):
        try:
            log(line_of())
        except Exception as error:  # a line that describes a run does not end it
            log(f"a line about the start is missing: {error!r}")
    stream, data = context.corpus.train, run.config.data
    samples = run.samples_after(start.samples, run.config.training.steps - start.step) - start.phase.first_sample
    borders = without_borders(stream.first_documents()) if data.document_mask else []
    for line in (*repeats([source.path for source in data.sources], stream, samples), *borders):
        log(line)


def describe_kernels(engine: Engine) -> str:
    """Return one line on the implementation: what is compiled, the kernels of attention and optimizer, the allocator."""
    config, device = engine.config, engine.state.device
    compiled = "blocks and loss compiled" if engine.compiles else "not compiled"
    if may_compile(config.training.compile, device) and not engine.compiles:
        compiled += " (some weights do not begin at a multiple of 16 bytes)"
    model, tp = config.model, engine.state.tp.size
    kv_heads = model.num_heads if engine.dtype == torch.float32 else model.num_kv_heads or model.num_heads
    q, k = (
        torch.empty(1, max(heads // tp, 1), 128, model.head_size, dtype=engine.dtype, device=device)
        for heads in (model.num_heads, kv_heads)
    )
    attention = _attention_text(torchs_choice(q, k, k, None, causal=True), device)
    if (
        device.type == "cuda"
        and (model.sliding_window or model.seq_len) < model.seq_len
        and engine.dtype != torch.float32
    ):
        attention = f"{current_flash_attention_impl() or 'FA2'}, which takes the window"
    in_tiles = config.has_shards
    if model.attn_logit_softcapping is not None:
        attention, in_tiles = "FlexAttention" if device.type == "cuda" else "by the plain formula", False
    group = engine.sharded_model.optimizer.torch_optimizer.param_groups[0]
    kernel = next((name for name in ("fused", "foreach") if group.get(name)), "a tensor at a time")
    choices = [compiled, f"attention {attention}{' in tiles' * in_tiles}", f"{config.optimizer.name} {kernel}"]
    if (overlap := config.parallel.tp_overlap) != "none":
        from megazero.layers.tp_overlap import overlap_of

        found = type(overlap_of(overlap, engine.state.tp, device)).__name__.lower()
        choices.append(f"exchanges over tp {found}{f' (no GPUs of one host: not {overlap})' * (found != overlap)}")
    if (scaling := config.precision.fp8) != "none":
        from megazero.layers.fp8 import EMULATED, kernels_on

        products = zip(("linear layers", "experts"), kernels_on(device, engine.dtype, scaling), strict=True)
        texts = [f"{of} {'emulated, no faster' if how in EMULATED else 'by kernels'}" for of, how in products]
        choices.append(f"{scaling} fp8: {', '.join(texts[: None if model.num_experts else 1])}")
    if device.type == "cuda":
        settings = next((os.environ[name] for name in ALLOCATOR if name in os.environ), "fixed segments")
        choices.append(f"allocator {settings.replace('expandable_segments:True', 'expandable segments')}")
    return " | ".join(choices)


def _attention_text(kernel: SDPBackend, device: torch.device) -> str:
    """Return the name of an attention kernel; if torch prefers cuDNN's on this GPU but does not use it, add why."""
    name = kernel.name.removesuffix("_ATTENTION").lower()
    if device.type != "cuda" or kernel == SDPBackend.CUDNN_ATTENTION:
        return name
    version = torch.backends.cudnn.version() or 0
    if torch.cuda.get_device_capability(device)[0] in (9, 10) and version <= _OLD_CUDNN:
        name += f" (cuDNN {version} is too old for its own, which is faster: torch takes {_OLD_CUDNN + 1} or newer)"
    return name


@contextmanager
def recompile_limit_in_a_line(log: Log) -> Iterator[None]:
    """Within a `with` block, print one line when torch stops compiling a function, instead of a warning on every rank."""

    def is_shown(record: logging.LogRecord) -> bool:
        if "recompile_limit" not in record.getMessage() or not isinstance(record.args, tuple):
            return True
        limit, count, function, reason, *_ = record.args
        hint = f"the last: {reason}"
        log(f"slower from now on: {function} is not compiled any more, after {count} times ({limit}); {hint}")
        return False

    logger = logging.getLogger("torch._dynamo.convert_frame")
    logger.addFilter(is_shown)
    try:
        yield
    finally:
        logger.removeFilter(is_shown)
