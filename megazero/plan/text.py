"""Formats a plan and the result of a search: as text for a terminal, and as a page for a browser.

    memory     GiB by kind and pipeline rank; the fullest rank is marked
    step       seconds of computation, of waits and of the optimizer
    run        days, dollars, checkpoints, failures

The page loads no other files.  It has this text and two pictures with a row for each pipeline rank:

    memory     a bar for each kind, and a line at the device's memory
    timeline   computation, waits by axis, idle time
"""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import cycle
from string import Template

from megazero.plan.cost import HOUR, MINUTE
from megazero.plan.devices import size_text
from megazero.plan.dry_run import DryRank, DryRun
from megazero.plan.memory import RankMemory
from megazero.plan.report import Plan
from megazero.plan.schedule_drawing import LOOKS, Bar, picture
from megazero.plan.search import Need, SearchResult
from megazero.plan.step_time import Span
from megazero.settings import counted

_SHOWN_RANKS = 9  # rows of a table; of more pipeline ranks, it shows the first, the last and the fullest
NAMES: Mapping[str, str] = LOOKS["meanings"]  # in words, what a rank does in a span


def plan_text(plan: Plan) -> str:
    """Format a plan as text for a terminal."""
    return "\n".join([*_head(plan), "", *_memory(plan), "", *_step(plan), "", *_traffic(plan), "", *_run(plan)])


def shape_text(plan: Plan) -> str:
    """Return the shape in words: `tp 8 x pp 4 x dp 16, ZeRO 1, 1f1b, 64 micro-batches of 1`."""
    run, parallel = plan.run, plan.run.config.parallel
    degrees = [("tp", parallel.tp), ("cp", parallel.cp), ("pp", parallel.pp), ("dp", run.dp)]
    shape = " x ".join(f"{name} {size}" for name, size in degrees if size > 1) or "one rank"
    shape += f", of these ranks ep {parallel.ep}" if parallel.ep > 1 else ""
    virtual = f" x {parallel.virtual_stages}" if parallel.virtual_stages > 1 else ""
    pipeline = f", {parallel.schedule}{virtual}" if parallel.pp > 1 else ""
    batches = f"{run.accumulation} micro-batch{'es' if run.accumulation > 1 else ''} of {run.micro_batch_size}"
    return f"{shape}, ZeRO {run.config.zero.stage}{pipeline}, {batches}"


def _head(plan: Plan) -> Iterator[str]:
    model, run = plan.run.config.model, plan.run
    yield f"model    {model.family}, {plan.parameters:,} parameters, {model.seq_len:,} tokens a sample"
    if model.num_experts:
        balance = "memory, time and traffic assume that every expert gets equally many"
        yield f"experts  a token goes to {model.experts_per_token} of {model.num_experts}; {balance}"
    yield f"cluster  {plan.cluster}"
    yield f"shape    {shape_text(plan)}; {run.global_batch_size:,} samples a step"
    yield from (f"note     {text}" for text in run.notices)
    if run.config.data.document_mask:
        yield "note     attention is planned for samples that are one document each: shorter documents take less time"


def _memory(plan: Plan) -> Iterator[str]:
    """Yield the memory table: a column for each kind that is large enough, and one for the rest."""
    fullest = plan.fullest
    unit, size = ("GiB", 2**30) if fullest.peak >= 2**30 else ("MiB", 2**20)
    kinds = shown_kinds(plan)
    rows = [[unit, *map(plain, kinds), "rest", "in all", "off the device", "fullest in"]]
    shown = plan.memory
    if len(shown) > _SHOWN_RANKS:
        shown = tuple(rank for rank in shown if rank.stage in (0, len(shown) - 1) or rank is fullest)
    for rank in shown:
        numbers = [rank.kinds.get(kind, 0) for kind in kinds]
        away = sum(rank.off_device.values()) / size
        mark = "  <- the fullest" if rank is fullest and len(plan.memory) > 1 else ""
        columns = [f"{count / size:.2f}" for count in (*numbers, rank.peak - sum(numbers), rank.peak)]
        rows.append([rank.name, *columns, f"{away:.2f}" if away else "-", rank.moment + mark])
    yield from table_lines("memory", rows, left=(0, len(kinds) + 4))
    yield f"         {fullest.fit_text(plan.cluster.device.memory_bytes)}"


def plain(kind: str) -> str:
    """Return the name of a kind of memory without underscores: `gradient buffers`."""
    return kind.replace("_", " ")


def shown_kinds(plan: Plan) -> list[str]:
    """Return the kinds of memory that make up at least 0.5% of a rank's memory."""
    every = dict.fromkeys(kind for rank in plan.memory for kind in rank.kinds)
    return [kind for kind in every if any(200 * rank.kinds.get(kind, 0) >= rank.peak for rank in plan.memory)]


def _step(plan: Plan) -> Iterator[str]:
    use, time, dtype = plan.throughput, plan.time, plan.run.config.precision.dtype
    mfu = "" if use.mfu is None else f", MFU {use.mfu:.1%} of the {dtype} peak"
    rates = f"{use.tokens_per_second:,.0f} tokens/s, {use.flops_per_device / 1e12:.1f} TFLOP/s a rank{mfu}"
    yield f"step     {_short(time.seconds, time.seconds)}: {rates}"
    seconds_of = plan.breakdown
    known = [activity for activity in NAMES if seconds_of.get(activity, 0) > 0]
    known += [activity for activity in seconds_of if activity not in NAMES]
    rank = "the busiest pipeline rank" if len(time.timelines) > 1 else "a rank"
    split = ", ".join(
        f"{NAMES.get(activity, activity)} {_short(seconds, time.seconds)} ({seconds / time.seconds:.1%})"
        for activity, seconds in ((activity, seconds_of[activity]) for activity in known)
    )
    yield f"         {rank} {split}"
    hidden = {axis: seconds for axis, seconds in time.hidden.items() if seconds > 0}
    if hidden:
        text = ", ".join(f"{axis} {_short(seconds, time.seconds)}" for axis, seconds in hidden.items())
        yield f"         behind the computation: {text}"


def _short(seconds: float, step: float) -> str:
    """Format seconds in the unit that suits the length of their step."""
    return f"{seconds:.3f} s" if step >= 1 else f"{seconds * 1e3:.2f} ms"


def _traffic(plan: Plan) -> Iterator[str]:
    rows = [["sent a step by a rank", "calls", "MiB", "to other nodes, of the busiest rank"]]
    total: dict[tuple[str, str], tuple[int, int, int]] = {}
    for of_rank in plan.traffic:  # the pipeline rank that sends the most, by axis and operation
        for key, sent in of_rank.items():
            total[key] = max(total.get(key, (0, 0, 0)), (sent.sent_bytes, sent.link_bytes, sent.calls))
    for (axis, operation), (sent_bytes, link_bytes, calls) in sorted(total.items()):
        away = f"{link_bytes / 2**20:,.1f}" if link_bytes else "-"
        rows.append([f"{axis} {operation}", f"{calls:,}", f"{sent_bytes / 2**20:,.1f}", away])
    if len(rows) == 1:
        yield "traffic  none: one rank"
        return
    yield from table_lines("traffic", rows, left=(0,))


def _run(plan: Plan) -> Iterator[str]:
    cost, saved, lost = plan.cost, plan.checkpoint, plan.failures
    dollars = "" if cost.dollars is None else f", {cost.dollars:,.0f} dollars"
    yield f"run      {cost.tokens:.4g} tokens: {cost.days:,.1f} days, {cost.device_hours:,.0f} GPU hours{dollars}"
    yield (
        f"saving   {saved.nbytes / 1e9:,.1f} GB a checkpoint, complete after {duration(saved.write_seconds)}; "
        f"training waits {duration(saved.wait_seconds)}"
    )
    if lost is not None:
        often, every = duration(lost.mean_seconds), duration(lost.interval_seconds)
        more = f"{lost.lost_share:.2%} of the time ({cost.days - cost.days_without:,.1f} days)"
        yield f"failures one every {often}: a checkpoint every {every} loses least, {more}"


def duration(seconds: float) -> str:
    """Format seconds in the largest unit that gives at least 2."""
    for unit, size in (("days", 24 * HOUR), ("hours", HOUR), ("minutes", MINUTE)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:,.1f} s" if seconds >= 0.1 else f"{seconds * 1e3:,.1f} ms"


def search_text(found: SearchResult, capacity: int, *, is_whole: bool = False) -> str:
    """Format the result of a search: the best shapes, why they are not better, and the front.

    Args:
        capacity: bytes of a device.
        is_whole: list everything, instead of the first few.
    """
    lines = [f"search   {found.counted['shapes']:,} shapes: {_counts(found)}"]
    if not found.best:
        left_out = found.counted["left_out"]
        unsearched = f"; {left_out:,} were left out for want of time: raise --seconds" if left_out else ""
        lines.append(f"         nothing fits {size_text(capacity)} of what was computed{unsearched}")
        if (least := found.least) is not None:
            lines.append(f"         the least memory that a shape needs: {size_text(least.peak)}, with {least.choice}")
        return "\n".join(lines)
    rows = [["", "s a step", "GiB", ""]]
    rows += [[f"{index}", *_cells(best, str(best.choice))] for index, best in enumerate(found.best, 1)]
    if found.own is not None:
        fits = "" if found.own.peak <= capacity else ", which does not fit"
        words = f"the run file's own shape{', better than these' if found.beats_best(capacity) else fits}"
        rows.append(["own", *_cells(found.own, words)])
    lines += ["", *table_lines("best", rows, left=(3,)), ""]
    for index, limits in enumerate(found.limits if is_whole else found.limits[:3], 1):
        lines += [f"{'' if number else f'why {index}':<9}{line}" for number, line in enumerate(limits)]
    shown = found.front if is_whole else found.front[:: -(-len(found.front) // 12) or 1]
    more = f"{len(shown)} of {len(found.front)}, all in --json" if len(shown) < len(found.front) else ""
    rows = [["s a step", "GiB", more]]
    rows += (_cells(candidate, str(candidate.choice)) for candidate in shown)
    lines += ["", *table_lines("front", rows, left=(2,))]
    return "\n".join(lines)


def _cells(need: Need, words: str) -> list[str]:
    return [f"{need.seconds:.3f}", f"{need.peak / 2**30:.2f}", words]


def _counts(found: SearchResult) -> str:
    keys = ", ".join(f"{key} {count:,}" for key, count in found.refused.items())
    words = {"too_large": "too large", "slower": "cannot be among the best", "computed": "computed"}
    words["left_out"] = "less promising left out"
    counts = [(sum(found.refused.values()), f"refused ({keys})")]
    counts += [(found.counted[name], text) for name, text in words.items()]
    return ", ".join(f"{count:,} {text}" for count, text in counts if count)


def table_lines(title: str, rows: Sequence[Sequence[str]], left: Sequence[int]) -> Iterator[str]:
    """Yield the lines of a table.

    Args:
        title: printed to the left of the first row; "" for none.
        rows: the cells, row by row.
        left: indices of the columns that are aligned to the left.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for number, row in enumerate(rows):
        cells = [
            cell.ljust(width) if index in left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        head = f"{'' if number else title:<9}" if title else ""
        yield f"{head}{'  '.join(cells)}".rstrip()


def dry_run_text(done: DryRun, rank: int | None) -> str:
    """Format the result of a dry run: what the ranks did, and what would fail or hang.

    Args:
        rank: the rank that was asked for; None if all were.
    """
    total, simulated = done.grid.world_size, len(done.simulated)
    if rank is None:
        what = f"{len(done.ranks)} of {total:,} ranks ran a step"
    else:
        ran = "ran a step" if rank in done.ranks else "did not end its step"
        were = "was" if simulated == 1 else "were"
        what = f"rank {rank} of {total:,} {ran}, {counted(simulated, 'rank')} {were} built"
    lines = [f"dry run  {what}, in {done.seconds:.1f} s"]
    agree = "the ranks of every group start the same operations" if rank is None else "its engine is built and runs"
    lines += [f"{'problem':<9}{text}" for text in done.problems] or [f"         {agree}: no problem was found"]
    lines += [f"{'note':<9}{text}" for text in done.notes]
    shown = [rank] if rank is not None else list(done.ranks)[:1]
    for dry_rank in (done.ranks[number] for number in shown if number in done.ranks):
        lines += ["", *_dry_rank(dry_rank)]
    return "\n".join(lines)


def _dry_rank(dry_rank: DryRank) -> Iterator[str]:
    place = ", ".join(f"{axis} {getattr(dry_rank.at, axis)}" for axis in ("tp", "cp", "dp", "pp"))
    yield f"rank {dry_rank.rank} ({place}): at most {size_text(dry_rank.peak)}"
    for group in dry_rank.groups:
        ranks = ", ".join(map(str, group.ranks[:8])) + (f", ... {group.ranks[-1]}" if len(group.ranks) > 8 else "")
        purpose = f", {group.purpose}" if group.purpose not in ("", group.name) else ""
        yield f"{'group':<9}{group.name}{purpose}: {len(group.ranks)} ranks, {ranks}"
    rows = [["in a step", "calls", "MiB", "to other nodes"]]
    for key in dict.fromkeys((message.axis, message.operation) for message in dry_rank.step):
        own = [message for message in dry_rank.step if (message.axis, message.operation) == key]
        sent, linked = sum(message.sent_bytes for message in own), sum(message.link_bytes for message in own)
        rows.append([" ".join(key), f"{len(own):,}", f"{sent / 2**20:,.1f}", f"{linked / 2**20:,.1f}"])
    yield from table_lines("sent", rows, left=(0,))


# ---- the page


_WIDE = 840.0  # pixels of an axis


def plan_html(plan: Plan, found: SearchResult | None = None) -> str:
    """Format a plan, and the result of a search if given, as an HTML page."""
    title = escape(f"Plan: {plan.parameters / 1e9:.3g}B parameters on {plan.cluster.ranks} {plan.cluster.device.name}")
    texts = {"The plan": plan_text(plan)}
    if found is not None:
        texts["Search"] = search_text(found, plan.cluster.device.memory_bytes, is_whole=True)
    fits = f"<p>{escape(plan.fullest.fit_text(plan.cluster.device.memory_bytes))}</p>"
    sections = [f"<h2>{heading}</h2>\n<pre>{escape(text)}</pre>" for heading, text in texts.items()]
    body = "\n".join([fits, _memory_picture(plan), _timeline(plan), *sections])
    return Template(LOOKS["page"].lstrip()).substitute(title=title, body=body)


def _memory_picture(plan: Plan) -> str:
    kinds = shown_kinds(plan)
    colours = dict(zip(kinds, cycle(LOOKS["memory"]))) | {"rest": LOOKS["rest"]}
    capacity, size = plan.cluster.device.memory_bytes, 2**30

    def row(rank: RankMemory) -> Iterator[Bar]:
        at, rest = 0.0, rank.peak - sum(rank.kinds.get(kind, 0) for kind in kinds)
        for kind, count in (*((kind, rank.kinds.get(kind, 0)) for kind in kinds), ("rest", max(rest, 0))):
            yield Bar(at, at + count / size, colours[kind], f"{plain(kind)}: {size_text(count)}")
            at += count / size

    rows = [
        (f"{rank.name}: {size_text(rank.peak)}{', fullest' * (rank is plan.fullest)}", row(rank))
        for rank in plan.memory
    ]
    meanings = [([colour], plain(kind)) for kind, colour in colours.items()]
    end = max(plan.fullest.peak, capacity) * 1.02 / size
    heading = f"Memory at each rank's fullest moment; the line is the device's {size_text(capacity)}"
    return picture(heading, rows, end, "GiB", meanings, wide=_WIDE, mark=capacity / size)


def _timeline(plan: Plan) -> str:
    time = plan.time
    rows = [(rank.name, map(_bar, spans)) for rank, spans in zip(plan.memory, time.timelines, strict=True)]
    looks = dict.fromkeys(_look(span) for spans in time.timelines for span in spans)
    meanings = [([colour], meaning) for meaning, colour in looks]
    return picture(f"One step: {time.seconds:.3f} s", rows, time.seconds, "seconds", meanings, wide=_WIDE)


def _bar(span: Span) -> Bar:
    meaning, colour = _look(span)
    title = f"{span.name or meaning}: {meaning} {span.start * 1e3:.1f} to {span.end * 1e3:.1f} ms"
    return Bar(span.start, span.end, colour, title)


def _look(span: Span) -> tuple[str, str]:
    """Return the meaning of a span in words, and its colour."""
    if span.activity == "compute":
        return NAMES[span.name[0]], LOOKS["passes"][span.name[0]][0]
    return NAMES.get(span.activity, span.activity), LOOKS["waits"].get(span.activity, LOOKS["rest"])
