"""megazero's step beside the peers', on one host or on hosts that a slow link joins: tables, and a picture.

    python -m benchmarks.all --kinds zero3 --models small --dtype bf16          # one row, printed
    python -m benchmarks.all --kinds zero1 --with "zero.bucket_bytes=1048576"   # ours in variants
    python -m benchmarks.all --out speed_2cpu                                   # every kind on one host
    python -m benchmarks.all --hosts 2 --mbit 300,1000,4000 --models tiny --out hosts

The same model, initial weights, tokens and optimizer; the losses of the first steps must agree.  Contenders take turns.
`megazero` uses the peers' matrix products; `its own products` is what a run has.  Ranks of megazero on one host exchange
through memory, where the peers take gloo's sockets; `over gloo` is megazero on sockets too.

--out NAME writes results/NAME.jsonl, .md and, for one host, .svg after every row, so that an interrupted run loses one row;
rows that this machine has measured with these versions are kept: remove the file to measure them anew.

With --hosts, ranks lie in blocks, each host is a network namespace, and ours knows of it from LOCAL_WORLD_SIZE (see
benchmarks/hosts_net.py; it needs root and iproute2).  `3d` takes 8 ranks, and 4 hosts on a switch: tp is within a host, dp
and the pipeline are across.

over the floor     the step over a rank's compute without communication, in a pipeline with the idle time of its schedule
link MB            bytes of a step in the busiest direction of a link, by the counters of the interfaces
wire ms            what these bytes take at the link's rate
exposed            (step - floor) / wire: 0 if all of it is hidden, 1 if nothing is; above 1 the step waits for more than
                   bytes.  The floor contains the idle time of a pipeline, so a part below 0 was hidden there.
                   None where the floor is none: pipelines of more ranks than cores
possible           the larger of floor and wire, over the floor: no contender that sends these bytes can be below it
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from math import nan
from pathlib import Path
from typing import Any

from benchmarks.hosts_net import NoHostsError, network_of
from benchmarks.report import filled_markdown, machine, megabytes, number, spread, write_whole
from benchmarks.rows import (
    FLOOR,
    KINDS,
    OURS,
    OVER_GLOO,
    SHIPPED,
    WITH_OPTIONS,
    Line,
    LossesDifferError,
    measure,
    possible,
    setting_of,
)
from benchmarks.setting import DTYPES, MODELS, Setting, positive, whole_numbers
from benchmarks.worlds import ContenderFailedError

RESULTS = Path(__file__).parent / "results"
HEADS = ("contender", "step ms (least to most)", "megazero / it", "over the floor", "possible", "tokens/s", "state MB",
         "peak MB", "loopback MB", "own meter MB", "link MB", "wire ms", "exposed", "loss diff")  # fmt: skip
SUMMARY_HEADS = ("kind", "fastest peer", "megazero ms", "peer ms", "floor ms", "megazero / peer", "over the floor",
                 "peer's", "as shipped / peer", "over gloo / peer", "peak MB", "peer's", "link MB", "peer's", "exposed",
                 "peer's")  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One row: what is measured, and over which link.

    Args:
        kind: a key of `KINDS`.
        mbit: rate of each direction of the link, in 10^6 bits per second; 0 on one host.
    """

    kind: str
    model: str
    world: int
    hosts: int = 1
    mbit: int = 0
    dtype: str = "fp32"

    @property
    def setting(self) -> Setting:
        """The work."""
        return setting_of(KINDS[self.kind], self.model, self.world, self.dtype)

    @property
    def title(self) -> str:
        """For people."""
        return f"{KINDS[self.kind].title}, {self.group}"

    @property
    def group(self) -> str:
        """What the rows of one table share, for people."""
        link = f"{self.hosts} hosts at {self.mbit} Mbit/s" if self.hosts > 1 else "one host"
        return f"{self.model}, {self.world} ranks, {link}" + f", {self.dtype}" * (self.dtype != "fp32")

    @property
    def order(self) -> tuple[object, ...]:
        """Where the row stands in a document."""
        return list(MODELS).index(self.model), self.world, -self.hosts, self.mbit, list(KINDS).index(self.kind)


def wire_ms(line: Line, mbit: int) -> float | None:
    """Milliseconds that the link needs for what a step sent in the busier direction; None on one host."""
    return line.busiest_bytes * 8 / (mbit * 1e3) if mbit and line.busiest_bytes is not None else None


def exposed_share(line: Line, floor: Line, mbit: int) -> float | None:
    """The part of the wire's time by which a step exceeds its floor; None without a floor or a byte on the link."""
    wire = wire_ms(line, mbit)
    if line.ms is None or floor.ms is None or line.over_floor is None or not wire:
        return None
    return (line.ms[0] - floor.ms[0]) / wire


def least_over_floor(line: Line, floor: Line, mbit: int) -> float | None:
    """The larger of compute and wire, over compute; None without a floor or a link."""
    wire = wire_ms(line, mbit)
    return None if wire is None or floor.ms is None or line.over_floor is None else max(1.0, wire / floor.ms[0])


def lines_of(row: dict[str, Any]) -> dict[str, Line]:
    """A stored row's contenders, by name."""
    return {line["name"]: Line(**line) for line in row["lines"]}


def fastest_peer(lines: dict[str, Line]) -> Line | None:
    """The peer to beat; None where none could run."""
    peers = [
        line for name, line in lines.items() if name != FLOOR and not name.startswith(OURS) and line.ms is not None
    ]
    return max(peers, key=lambda line: line.ratio[0] if line.ratio else 0.0, default=None)


def table(lines: Sequence[Line], mbit: int = 0) -> str:
    """One row's contenders."""
    floor = next(line for line in lines if line.name == FLOOR)
    rows = []
    for line in lines:
        if line.ms is None:
            rows.append([line.name, f"cannot run: {line.error}", *[""] * (len(HEADS) - 2)])
            continue
        rows.append(
            [
                line.name,
                spread(line.ms, 1),
                spread(line.ratio, 3),
                number(line.over_floor, 3),
                number(least_over_floor(line, floor, mbit)),
                "" if line.tokens_per_second is None else f"{line.tokens_per_second:,.0f}",
                *map(megabytes, (line.state_bytes, line.peak_bytes, line.loopback_bytes, line.metered_bytes)),
                megabytes(line.busiest_bytes, 2),
                number(wire_ms(line, mbit), 1),
                "" if line is floor else number(exposed_share(line, floor, mbit)),
                "" if line.loss_difference is None else f"{line.loss_difference:.1e}",
            ]
        )
    return filled_markdown(HEADS, rows)


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """One line per row: the fastest peer beside ours."""
    cells = []
    for row in rows:
        lines, case = lines_of(row), Case(**row["case"])
        ours, floor, peer = lines[OURS], lines[FLOOR], fastest_peer(lines)
        if peer is None or peer.ms is None or peer.ratio is None or ours.ms is None or floor.ms is None:
            cells.append([KINDS[case.kind].title, "none could run", *[""] * (len(SUMMARY_HEADS) - 2)])
            continue
        variants = [lines.get(name) for name in (SHIPPED, OVER_GLOO)]
        pair = (ours, peer)
        cells.append(
            [
                KINDS[case.kind].title,
                peer.name,
                *(f"{line.ms[0]:.0f}" for line in pair if line.ms),
                "" if ours.over_floor is None else f"{floor.ms[0]:.0f}",
                spread(peer.ratio, 2),
                *(number(line.over_floor) for line in pair),
                *(number(peer.ratio[0] / own.ratio[0] if own and own.ratio else None) for own in variants),
                *(megabytes(line.peak_bytes, 0) for line in pair),
                *(megabytes(line.busiest_bytes, 2) for line in pair),
                *(number(exposed_share(line, floor, case.mbit)) for line in pair),
            ]
        )
    return filled_markdown(SUMMARY_HEADS, cells)


def document(rows: Sequence[dict[str, Any]]) -> str:
    """The whole result as Markdown: a table for each model, number of ranks and link, then every contender."""
    machines = sorted({", ".join(f"{key} {value}" for key, value in row["machine"].items()) for row in rows})
    parts = [
        f"Measured with `python -m benchmarks.all` on: {'; '.join(machines)}.",
        "Step times are medians; ratios are medians over the rounds of one interleaved run, with their least and most. "
        "Ranks have one thread each. What contenders and columns are: the head of [all.py](../all.py). The floor is made "
        "of the peers' modules, so a faster model of ours counts as less time above it: `one device` says how much that "
        "is. State counts tensors at their full length. Hosts are network namespaces of this machine, joined by veth pairs "
        "with a token bucket at both ends.",
    ]
    cases = [Case(**row["case"]) for row in rows]
    for group in dict.fromkeys(case.group for case in cases):
        parts += [f"## {group}", summary([r for r, case in zip(rows, cases, strict=True) if case.group == group])]
    parts.append("## Every contender")
    for row, case in zip(rows, cases, strict=True):
        title = f"### {case.title}, {row['rounds']} rounds of {row['steps']} steps"
        parts += [title, table([*lines_of(row).values()], case.mbit)]
    return "\n\n".join(parts) + "\n"


def draw(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """Bars of our step over the fastest peer's, one panel per model and world."""
    panels: dict[str, list[tuple[str, float, float, float]]] = {}
    for row in rows:
        lines, case = lines_of(row), Case(**row["case"])
        peer = fastest_peer(lines)
        if peer is not None and peer.ratio is not None:
            shipped = lines[SHIPPED].ratio
            of_shipped = peer.ratio[0] / shipped[0] if shipped else 0.0
            bars = (KINDS[case.kind].title, peer.ratio[0], of_shipped, 1 / peer.over_floor if peer.over_floor else nan)
            panels.setdefault(case.group, []).append(bars)
    if not panels:
        return
    from matplotlib import pyplot  # of the extra `bench`; tests of this file do not draw

    figure, axes = pyplot.subplots(1, len(panels), figsize=(4.2 * len(panels), 5.2), squeeze=False)
    for axis, (title, bars) in zip(axes[0], sorted(panels.items()), strict=True):
        places = range(len(bars))
        axis.barh([p + 0.2 for p in places], [bar[1] for bar in bars], 0.38, color="#3465a4", label="same products")
        axis.barh([p - 0.2 for p in places], [bar[2] for bar in bars], 0.38, color="#9fc5e8", label="as shipped")
        axis.plot([bar[3] for bar in bars], list(places), "|", color="black", markersize=16, label="floor")
        axis.axvline(1.0, color="grey", linewidth=0.8)
        axis.set_yticks(list(places), [bar[0] for bar in bars])
        axis.invert_yaxis()
        axis.set_title(title)
        axis.set_xlabel("step over the fastest peer's")
    axes[0][0].legend(fontsize="small", loc="lower right")
    figure.tight_layout()
    figure.savefig(file)


def run(case: Case, rounds: int, steps: int, variants: Sequence[str] = ()) -> dict[str, Any]:
    """Measure one row.

    Args:
        variants: options of the configuration, in each a contender that is ours with them; see `Setting.config`.

    Raises: NoHostsError, ContenderFailedError, LossesDifferError.
    """
    own = [SHIPPED, *([OVER_GLOO] if case.world == 2 else [])] if case.hosts == 1 else []
    others = [*own, *(WITH_OPTIONS + variant for variant in variants), *KINDS[case.kind].peers]
    with network_of(case.hosts, case.mbit) as network:
        lines = measure(case.setting, others, rounds=rounds, steps=steps, network=network)
    found = {"machine": machine(), "rounds": rounds, "steps": steps, "setting": asdict(case.setting)}
    return {"case": asdict(case), **found, "lines": [asdict(line) for line in lines]}


def _cases(given: argparse.Namespace) -> Iterator[Case]:
    """All that the models can be shared for."""
    rates = (0,) if given.hosts == 1 else given.mbit
    for model, mbit, kind in product(given.models, rates, given.kinds):
        for world in {"single": (1,), "3d": (8,)}.get(kind, given.worlds):
            if possible(KINDS[kind], model, world) and not (kind == "single" and given.hosts > 1):
                hosts = 4 if kind == "3d" and given.hosts > 1 else given.hosts
                yield Case(kind, model, world, hosts, mbit, given.dtype)


def _write(rows: Sequence[dict[str, Any]], file: Path) -> None:
    write_whole(file.with_suffix(".jsonl"), "".join(json.dumps(row) + "\n" for row in rows))
    write_whole(file.with_suffix(".md"), document(rows))
    alone = [row for row in rows if row["case"]["hosts"] == 1]
    draw(alone, file.with_suffix(".svg"))


def main() -> None:
    """Measure, print a table for each row, write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def names(text: str) -> list[str]:
        return text.split(",")

    parser.add_argument("--kinds", type=names, default=list(KINDS), help=f"comma-separated, of {', '.join(KINDS)}")
    parser.add_argument("--models", type=names, default=[name for name in MODELS if name != "smoke"])
    parser.add_argument("--worlds", type=whole_numbers, default=(2, 4), help="ranks, comma-separated; 3d takes 8")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--hosts", type=int, choices=(1, 2, 4), default=1, help="2, and 4 for 3d")
    parser.add_argument(
        "--mbit", type=whole_numbers, default=(1000,), help="of each direction of a link, comma-separated"
    )
    parser.add_argument("--with", dest="variants", action="append", default=[], metavar="OPTIONS",
                        help="also megazero with options of the configuration, separated by spaces")  # fmt: skip
    parser.add_argument("--rounds", type=positive, default=7)
    parser.add_argument("--steps", type=positive, help="of each contender in a round (4 of tiny, 1 of small)")
    parser.add_argument("--out", metavar="NAME", help="write benchmarks/results/NAME.* after every row")
    given = parser.parse_args()
    if unknown := [*(set(given.models) - set(MODELS)), *(set(given.kinds) - set(KINDS))]:
        parser.error(f"{unknown[0]!r} is none of {', '.join((*MODELS, *KINDS))}")
    if odd := [world for world in given.worlds if world % given.hosts]:
        parser.error(f"--worlds: {odd[0]} ranks cannot be cut into {given.hosts} hosts")
    file = RESULTS / f"{given.out}.jsonl"
    rows = [json.loads(line) for line in file.read_text("utf-8").splitlines()] if given.out and file.is_file() else []
    here = {key: value for key, value in machine().items() if key != "date"}
    for case in _cases(given):
        old = [row for row in rows if Case(**row["case"]) == case]
        if old and old[0]["machine"].items() >= here.items():
            continue
        print(case.title, flush=True)
        try:
            row = run(case, given.rounds, given.steps or (4 if case.model == "tiny" else 1), given.variants)
        except NoHostsError as error:
            raise SystemExit(str(error)) from error
        except (ContenderFailedError, LossesDifferError) as error:
            print(f"  no row: {error}", flush=True)
            continue
        print(table([*lines_of(row).values()], case.mbit), flush=True)
        rows = sorted([*(r for r in rows if r not in old), row], key=lambda row: Case(**row["case"]).order)
        if given.out:
            _write(rows, file)


if __name__ == "__main__":
    main()
