"""From the command to the end of the first optimizer step of the quickstart, and what the time goes into.

    python -m benchmarks.startup [--runs 5] [--config examples/quickstart.toml] [--cold]

    process        the command, all that the rank forks from         the ranks, each phase until the last one has left it
    starts |------ imports ------ launcher ------ ranks started ------|-- groups -- data -- engine -- to the loop -- step --|

Each run is the real command in a process of its own, with its files in a new folder, so that nothing is resumed.  It
does one step.  The functions where a phase ends are wrapped before the command runs: a rank is forked from it and so
inherits them.  `--cold` also tokenizes the corpus, as the very first run on a machine does.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.report import markdown
from benchmarks.setting import positive

# What ends each phase, in the order of the run: (phase, module, attribute), and whether entering or leaving it counts.
ENTERED, LEFT = "entered", "left"
PHASES = (
    ("python, imports", "megazero.training.launch", "run_ranks", ENTERED),
    ("ranks started", "megazero.training.launch", "run_rank", ENTERED),
    ("process group joined", "torch.distributed", "init_process_group", LEFT),
    ("groups of the axes", "megazero.training.launch", "join_world", LEFT),
    ("data", "megazero.training.trainer", "open_same_corpus", LEFT),
    ("checkpoint folder, its groups", "megazero.training.trainer", "initialize", ENTERED),
    ("engine built", "megazero.training.trainer", "initialize", LEFT),
    ("saver, metrics", "megazero.engine.gpt:Engine", "train_step", ENTERED),
    ("first step", "megazero.engine.gpt:Engine", "train_step", LEFT),
)
OVERRIDES = ("training.steps=1", "training.eval_every_steps=0", "lr_schedule.warmup_steps=0")


def observe(marks: Path, command: list[str]) -> None:
    """Run the megazero command in this process and the ranks it forks, noting when each phase ends."""
    import megazero.training.launch  # noqa: F401  what `megazero train` imports as it goes; counted all the same

    for number, (_, home, name, side) in enumerate(PHASES):
        module, _, owner = home.partition(":")
        holder = importlib.import_module(module)
        holder = getattr(holder, owner) if owner else holder
        setattr(holder, name, _noted(getattr(holder, name), marks, number, side))
    from megazero.cli.commands import app

    app(command)


def _noted(function: Callable[..., Any], marks: Path, number: int, side: str) -> Callable[..., Any]:
    def note() -> None:
        with marks.open("a") as file:  # one short write of each rank: they do not mix
            file.write(f"{number} {time.monotonic()}\n")

    @functools.wraps(function)
    def noted(*args: Any, **keywords: Any) -> Any:
        if side == ENTERED:
            note()
        answer = function(*args, **keywords)
        if side == LEFT:
            note()
        return answer

    return noted


def one_run(config: str, *, cold: bool) -> dict[str, float]:
    """Seconds of each phase, in order, and `total`.  Raises: RuntimeError with what a failed run printed."""
    with tempfile.TemporaryDirectory(prefix="megazero-startup-") as folder:
        marks = Path(folder) / "marks"
        command = ["train", config, f"training.run_dir={folder}/run", *OVERRIDES]
        if cold:
            command.append(f"data.cache_dir={folder}/cache")
        begin = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.startup", "--observe", str(marks), *command],
            capture_output=True,
            check=False,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(f"the run ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        ends = [begin] * len(PHASES)
        for line in marks.read_text().splitlines():
            number, at = line.split()
            ends[int(number)] = max(ends[int(number)], float(at))
    found = {}
    for number, (phase, *_) in enumerate(PHASES):
        found[phase] = ends[number] - (ends[number - 1] if number else begin)
    return {**found, "total": ends[-1] - begin}


def main() -> None:
    """Measure and print a table."""
    if sys.argv[1:2] == ["--observe"]:
        observe(Path(sys.argv[2]), sys.argv[3:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=positive, default=5)
    parser.add_argument("--config", default="examples/quickstart.toml")
    parser.add_argument("--cold", action="store_true", help="tokenize the corpus in every run")
    given = parser.parse_args()
    runs = [one_run(given.config, cold=given.cold) for _ in range(given.runs)]
    by_phase = {phase: [run[phase] for run in runs] for phase in runs[0]}
    rows = [[phase, *(f"{of(values):.2f}" for of in (median, min, max))] for phase, values in by_phase.items()]
    print(markdown(("phase", "median s", "least", "most"), rows))


if __name__ == "__main__":
    main()
