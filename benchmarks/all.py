"""The whole comparison: every kind, model and world, one table, one picture.

    python -m benchmarks.all [--worlds 2,4] [--models tiny,small] [--kinds zero1,tp,...] [--rounds 7]

Writes `speed_<cores>cpu.json` after every row, so that an interrupted run loses one row; rows that this machine has
measured already with these versions are kept unless --again is given.  Then a table, `.md`, and a picture, `.svg`.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from math import nan
from pathlib import Path
from typing import Any

from matplotlib import pyplot

from benchmarks.report import fastest_peer, lines_of, machine, markdown, table, write_whole
from benchmarks.rows import (
    FLOOR,
    KINDS,
    OURS,
    OVER_GLOO,
    SHIPPED,
    Line,
    LossesDifferError,
    measure,
    possible,
    setting_of,
)
from benchmarks.setting import MODELS, positive
from benchmarks.worlds import ContenderFailedError

RESULTS = Path(__file__).parent / "results"
HEADS = (
    "kind",
    "fastest peer",
    "megazero ms",
    "peer ms",
    "floor ms",
    "megazero / peer",
    "overhead / peer's",
    "as shipped / peer",
    "over gloo / peer",
    "peak MB",
    "peer's peak MB",
)


def worlds_of(kind: str, worlds: Sequence[int]) -> list[int]:
    """In which worlds a kind is measured."""
    return {"single": [1], "3d": [8]}.get(kind, list(worlds))


def overhead_share(lines: dict[str, Line], peer: Line) -> float | None:
    """Our time above the floor over the peer's; None where the peer is not above it."""
    ours, its = lines[OURS].over_floor, peer.over_floor
    return None if ours is None or its is None or its <= 1 else (ours - 1) / (its - 1)


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """One line per row: the fastest peer beside ours."""
    cells = []
    for row in rows:
        lines = lines_of(row)
        peer = fastest_peer(lines)
        ours, floor, shipped = lines[OURS], lines[FLOOR], lines[SHIPPED]
        if peer is None or ours.ms is None or floor.ms is None or peer.ms is None or peer.ratio is None:
            cells.append([row["title"], "none could run", *[""] * (len(HEADS) - 2)])
            continue
        share, gloo = overhead_share(lines, peer), lines.get(OVER_GLOO)
        shipped_ratio = peer.ratio[0] / shipped.ratio[0] if shipped.ratio else None
        cells.append(
            [
                row["title"],
                peer.name,
                f"{ours.ms[0]:.0f}",
                f"{peer.ms[0]:.0f}",
                f"{floor.ms[0]:.0f}",
                f"{peer.ratio[0]:.2f} ({peer.ratio[1]:.2f} to {peer.ratio[2]:.2f})",
                "" if share is None else f"{share:.2f}",
                "" if shipped_ratio is None else f"{shipped_ratio:.2f}",
                "" if gloo is None or gloo.ratio is None else f"{peer.ratio[0] / gloo.ratio[0]:.2f}",
                f"{(ours.peak_bytes or 0) / 1e6:.0f}",
                f"{(peer.peak_bytes or 0) / 1e6:.0f}",
            ]
        )
    return markdown(HEADS, cells)


def document(found: dict[str, Any]) -> str:
    """The whole result as Markdown."""
    machines = {", ".join(f"{key} {value}" for key, value in row["machine"].items()) for row in found["rows"]}
    parts = [
        f"Measured with `python -m benchmarks.all` on: {'; '.join(sorted(machines))}.",
        "Step times are medians; ratios are medians over the rounds of one interleaved run, with their least and most. "
        "`megazero` uses the peers' matrix products; `as shipped` is what a run has, on this processor oneDNN's. Ranks of "
        "megazero on one machine reduce and gather through shared memory, where the peers take gloo's sockets; `over "
        "gloo` is megazero on gloo too. Overhead is the time above the floor: a rank's own compute, and in a pipeline the "
        "idle time of its schedule. The floor is made of the peers' modules, so a faster model of ours counts against the "
        "overhead as well: `one device` says how much that is. State counts tensors at their full length.",
    ]
    for model in MODELS:
        for world in sorted({row["setting"]["world"] for row in found["rows"]}):
            rows = [r for r in found["rows"] if r["setting"]["world"] == world and r["setting"]["model"] == model]
            if rows:
                parts += [f"## {model}, {world} ranks", summary(rows)]
    parts.append("## Every contender")
    for row in found["rows"]:
        setting = row["setting"]
        title = f"### {row['title']}, {setting['model']}, {setting['world']} ranks"
        parts += [title, table(list(lines_of(row).values()))]
    return "\n\n".join(parts) + "\n"


def draw(found: dict[str, Any], file: Path) -> None:
    """Bars of our step over the fastest peer's, one panel per model and world."""
    panels: dict[str, list[tuple[str, float, float, float]]] = {}
    for row in found["rows"]:
        lines = lines_of(row)
        peer = fastest_peer(lines)
        if peer is None or peer.ratio is None:
            continue
        shipped = lines[SHIPPED].ratio
        setting = row["setting"]
        bars = (
            row["title"],
            peer.ratio[0],
            peer.ratio[0] / shipped[0] if shipped else 0.0,
            1 / peer.over_floor if peer.over_floor else nan,
        )
        panels.setdefault(f"{setting['model']}, {setting['world']} ranks", []).append(bars)
    if not panels:
        return
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


def main() -> None:
    """Measure every row and write all results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", default="2,4")
    parser.add_argument("--models", default=",".join(model for model in MODELS if model != "smoke"))
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--rounds", type=positive, default=7)
    parser.add_argument("--again", action="store_true", help="measure rows anew that are there already")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    given = parser.parse_args()
    models, kinds = given.models.split(","), given.kinds.split(",")
    unknown = [*(name for name in models if name not in MODELS), *(name for name in kinds if name not in KINDS)]
    if unknown:
        parser.error(f"{unknown[0]} is none of {', '.join((*MODELS, *KINDS))}")
    given.out.mkdir(parents=True, exist_ok=True)
    file = given.out / f"speed_{os.cpu_count()}cpu.json"
    found = json.loads(file.read_text("utf-8")) if file.is_file() else {"rows": []}
    here = {key: value for key, value in machine().items() if key != "date"}
    for model in models:
        for name in kinds:
            for world in worlds_of(name, [int(world) for world in given.worlds.split(",")]):
                kind = KINDS[name]
                if possible(kind, model, world):
                    setting = asdict(setting_of(kind, model, world, "fp32", None, None))
                    old = [row for row in found["rows"] if row["title"] == kind.title and row["setting"] == setting]
                    if old and old[0]["machine"].items() >= here.items() and not given.again:
                        continue
                    row = _row(name, model, world, given.rounds)
                    if row is not None:
                        found["rows"] = [one for one in found["rows"] if one not in old] + [row]
                        write_whole(file, json.dumps(found, indent=1))
    order = [kind.title for kind in KINDS.values()]
    found["rows"].sort(key=lambda row: (row["setting"]["model"], row["setting"]["world"], order.index(row["title"])))
    write_whole(file, json.dumps(found, indent=1))
    text = document(found)
    write_whole(file.with_suffix(".md"), text)
    draw(found, file.with_suffix(".svg"))
    print(text.split("## Every contender")[0])


def _row(name: str, model: str, world: int, rounds: int) -> dict[str, Any] | None:
    kind = KINDS[name]
    setting = setting_of(kind, model, world, "fp32", None, None)
    print(f"{kind.title}, {model}, {world} ranks", flush=True)
    try:
        contenders = [SHIPPED, *([OVER_GLOO] if world == 2 else []), *kind.peers]
        lines = measure(setting, contenders, rounds=rounds, steps=4 if model == "tiny" else 1)
    except (ContenderFailedError, LossesDifferError) as error:
        print(f"  no row: {error}", flush=True)
        return None
    print(table(lines), flush=True)
    return {
        "title": kind.title,
        "machine": machine(),
        "rounds": rounds,
        "setting": asdict(setting),
        "lines": [asdict(line) for line in lines],
    }


if __name__ == "__main__":
    main()
