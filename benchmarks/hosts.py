"""A step between hosts that a slow link joins, beside the peers' and beside the larger of compute and wire.

    python -m benchmarks.hosts --mbit 1000 --kind zero1 --world 4
    python -m benchmarks.hosts --mbit 300,1000 --kind dp,zero1 --world 2,4 --out some
    python -m benchmarks.hosts --kind zero1 --with "zero.bucket_bytes=1048576"      # ours in variants
    python -m benchmarks.hosts --all                                                               # results/hosts.md

The contenders and kinds of `benchmarks.step`, in turns, on ranks in blocks: each host is a network namespace, and ours
knows of it from LOCAL_WORLD_SIZE (see benchmarks/hosts_net.py; it needs root and iproute2).  --hosts 1 leaves all ranks on
one host.  `3d` takes 8 ranks and 4 hosts on a switch: tp is within a host, dp and the pipeline are across.

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
from pathlib import Path
from typing import Any

from benchmarks.hosts_net import NoHostsError, network_of
from benchmarks.report import fastest_peer, lines_of, machine, markdown, write_whole
from benchmarks.rows import FLOOR, KINDS, OURS, WITH_OPTIONS, Line, LossesDifferError, measure, possible, setting_of
from benchmarks.setting import MODELS, Setting, positive
from benchmarks.worlds import ContenderFailedError

RESULTS = Path(__file__).parent / "results"
RATES, WORLDS = (300, 1000, 4000), (2, 4)
HEADS = ("contender", "step ms (least to most)", "megazero / it", "over the floor", "possible", "link MB", "wire ms",
         "exposed", "loss diff")  # fmt: skip
SUMMARY_HEADS = ("kind", "fastest peer", "megazero ms", "peer ms", "floor ms", "megazero / peer", "over the floor",
                 "peer's", "link MB", "peer's", "exposed", "peer's")  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One row: what is measured, and over which link.

    Args:
        kind: a key of `KINDS`.
        mbit: rate of each direction of the link, in 10^6 bits per second; unused on one host.
    """

    kind: str
    model: str
    world: int
    hosts: int
    mbit: int

    @property
    def setting(self) -> Setting:
        """The work."""
        return setting_of(KINDS[self.kind], self.model, self.world, "fp32", None, None)

    @property
    def title(self) -> str:
        """For people."""
        return f"{KINDS[self.kind].title}, {self.model}, {self.world} ranks, {self.link}"

    @property
    def link(self) -> str:
        """For people."""
        return f"{self.hosts} hosts at {self.mbit} Mbit/s" if self.hosts > 1 else "one host"


def wire_ms(line: Line, mbit: int) -> float | None:
    """Milliseconds that the link needs for what a step sent in the busier direction."""
    return None if line.busiest_bytes is None else line.busiest_bytes * 8 / (mbit * 1e3)


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


def _shown(number: float | None) -> str:
    return "" if number is None else f"{number:.2f}"


def table(case: Case, lines: Sequence[Line]) -> str:
    """One row's contenders."""
    floor = next(line for line in lines if line.name == FLOOR)
    rows = []
    for line in lines:
        if line.ms is None:
            rows.append([line.name, f"cannot run: {line.error}", *[""] * (len(HEADS) - 2)])
            continue
        wire = wire_ms(line, case.mbit)
        ratio = "" if line.ratio is None else f"{line.ratio[0]:.3f} ({line.ratio[1]:.3f} to {line.ratio[2]:.3f})"
        rows.append(
            [
                line.name,
                f"{line.ms[0]:.1f} ({line.ms[1]:.1f} to {line.ms[2]:.1f})",
                ratio,
                _shown(line.over_floor),
                _shown(least_over_floor(line, floor, case.mbit)),
                "" if line.busiest_bytes is None else f"{line.busiest_bytes / 1e6:.2f}",
                "" if wire is None else f"{wire:.1f}",
                "" if line is floor else _shown(exposed_share(line, floor, case.mbit)),
                "" if line.loss_difference is None else f"{line.loss_difference:.1e}",
            ]
        )
    return markdown(HEADS, rows)


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each row: the fastest peer beside ours."""
    cells = []
    for row in rows:
        lines, case = lines_of(row), Case(**row["case"])
        ours, floor, peer = lines[OURS], lines[FLOOR], fastest_peer(lines)
        if peer is None or peer.ms is None or peer.ratio is None or ours.ms is None or floor.ms is None:
            cells.append([KINDS[case.kind].title, "none could run", *[""] * (len(SUMMARY_HEADS) - 2)])
            continue
        has_floor = ours.over_floor is not None
        pair = (ours, peer)
        cells.append(
            [
                KINDS[case.kind].title,
                peer.name,
                f"{ours.ms[0]:.0f}",
                f"{peer.ms[0]:.0f}",
                f"{floor.ms[0]:.0f}" if has_floor else "",
                f"{peer.ratio[0]:.2f} ({peer.ratio[1]:.2f} to {peer.ratio[2]:.2f})",
                *(_shown(one.over_floor) for one in pair),
                *("" if one.busiest_bytes is None else f"{one.busiest_bytes / 1e6:.2f}" for one in pair),
                *(_shown(exposed_share(one, floor, case.mbit)) for one in pair),
            ]
        )
    return markdown(SUMMARY_HEADS, cells)


def document(rows: Sequence[dict[str, Any]]) -> str:
    """All rows as Markdown: a table for each model, number of ranks and link, then every contender."""
    machines = sorted({", ".join(f"{key} {value}" for key, value in row["machine"].items()) for row in rows})
    parts = [
        f"Measured with `python -m benchmarks.hosts` on: {'; '.join(machines)}.",
        "Network namespaces of this machine, joined by veth pairs with a token bucket at both ends; ranks in blocks, "
        "one thread each, gloo, fp32. Step times are medians; ratios are medians over the rounds of one interleaved run, "
        "with their least and most. Link MB are of the busiest direction. Exposed is (step - floor) / (link bytes / rate).",
    ]
    cases = [Case(**row["case"]) for row in rows]
    tables = dict.fromkeys((case.model, case.world, case.link) for case in cases)
    for model, world, link in tables:
        inside = [
            row
            for row, case in zip(rows, cases, strict=True)
            if (case.model, case.world, case.link) == (model, world, link)
        ]
        parts += [f"## {model}, {world} ranks, {link}", summary(inside)]
    parts.append("## Every contender")
    for row, case in zip(rows, cases, strict=True):
        parts += [f"### {case.title}, {row['rounds']} rounds of {row['steps']} steps", table(case, _lines(row))]
    return "\n\n".join(parts) + "\n"


def run(case: Case, rounds: int, steps: int, variants: Sequence[str] = ()) -> dict[str, Any]:
    """Measure one row.

    Args:
        variants: options of the configuration, in each a contender that is ours with them; see `Setting.config`.

    Raises: NoHostsError, ContenderFailedError, LossesDifferError.
    """
    others = [*(WITH_OPTIONS + variant for variant in variants), *KINDS[case.kind].peers]
    with network_of(case.hosts, case.mbit) as network:
        lines = measure(case.setting, others, rounds=rounds, steps=steps, network=network)
    return {
        "case": asdict(case),
        "machine": machine(),
        "rounds": rounds,
        "steps": steps,
        "setting": asdict(case.setting),
        "lines": [asdict(line) for line in lines],
    }


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(map(positive, text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be whole numbers from 1 on, comma-separated") from None


def main() -> None:
    """Measure, print a table for each row, write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, choices=(1, 2, 4), help="2, and 4 for 3d")
    parser.add_argument("--mbit", type=_numbers, default="1000", help="of each direction of a link, comma-separated")
    parser.add_argument("--kind", default="zero1", help=f"comma-separated, of {', '.join(KINDS)}; or all")
    parser.add_argument("--world", type=_numbers, default="2", help="ranks, comma-separated; 3d takes 8")
    parser.add_argument("--model", choices=MODELS, default="tiny")
    parser.add_argument("--with", dest="variants", action="append", default=[], metavar="OPTIONS",
                        help="also megazero with options of the configuration, separated by spaces")  # fmt: skip
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--steps", type=positive, default=2, help="of each contender in a round")
    parser.add_argument("--all", action="store_true", help="every kind, rate and number of ranks; --out hosts")
    parser.add_argument("--again", action="store_true", help="measure rows anew that --out has already")
    parser.add_argument("--out", metavar="NAME", help="write benchmarks/results/NAME.md and NAME.jsonl after every row")
    given = parser.parse_args()
    kinds = [name for name in KINDS if name != "single"] if given.all or given.kind == "all" else given.kind.split(",")
    if unknown := [name for name in kinds if name not in KINDS]:
        parser.error(f"--kind: {unknown[0]!r} is none of {', '.join(KINDS)}")
    rates, worlds = (RATES, WORLDS) if given.all else (given.mbit, given.world)
    rates = (0,) if given.hosts == 1 else rates
    if odd := [world for world in worlds if world % (given.hosts or 2)]:
        parser.error(f"--world: {odd[0]} ranks cannot be cut into {given.hosts or 2} hosts")
    out = given.out or ("hosts" if given.all else None)
    rows = _stored(out)
    for case in _cases(kinds, given.model, worlds, given.hosts, rates):
        if any(row["case"] == asdict(case) for row in rows) and not given.again:
            continue
        print(case.title, flush=True)
        try:
            row = run(case, given.rounds, given.steps, given.variants)
        except NoHostsError as error:
            raise SystemExit(str(error)) from error
        except (ContenderFailedError, LossesDifferError) as error:
            print(f"  no row: {error}", flush=True)
            continue
        print(table(case, _lines(row)), flush=True)
        rows = [old for old in rows if old["case"] != row["case"]] + [row]
        if out:
            write_whole(RESULTS / f"{out}.jsonl", "".join(json.dumps(one) + "\n" for one in rows))
            write_whole(RESULTS / f"{out}.md", document(sorted(rows, key=_order)))


def _cases(
    kinds: Sequence[str], model: str, worlds: Sequence[int], hosts: int | None, rates: Sequence[int]
) -> Iterator[Case]:
    """All that the model can be shared for."""
    for mbit, kind in product(rates, kinds):
        for world in (8,) if kind == "3d" else worlds:
            if possible(KINDS[kind], model, world):
                yield Case(kind, model, world, hosts or (4 if kind == "3d" else 2), mbit)


def _stored(out: str | None) -> list[dict[str, Any]]:
    """Rows of an earlier run."""
    file = RESULTS / f"{out}.jsonl"
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()] if out and file.is_file() else []


def _order(row: dict[str, Any]) -> tuple[object, ...]:
    case = Case(**row["case"])
    return list(MODELS).index(case.model), case.world, -case.hosts, case.mbit, list(KINDS).index(case.kind)


def _lines(row: dict[str, Any]) -> list[Line]:
    return [*lines_of(row).values()]


if __name__ == "__main__":
    main()
