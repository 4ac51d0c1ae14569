"""The core path that docs/architecture.md lists is the list of the trunk's files that a training step enters."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from harness import run_world
from worlds import LLAMA, run_of, state_on

from megazero import registry
from megazero.config import ResolvedRun
from megazero.training.trainer import Trainer, train

PACKAGE = Path(__file__).parent.parent / "megazero"
PAGE = PACKAGE.parent / "docs" / "architecture.md"
ANNEXES = {table.parent.name for table in PACKAGE.glob("*/annex.toml")}


def _entered(rank: int, run: ResolvedRun) -> list[str]:
    """The package's files with a function that the second step, or the thread that reads for it, calls."""
    found, intact, intact_read = set[str](), Trainer._step, Trainer._read

    def note(frame: Any, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_name != "<module>":  # one that is imported now was called by nobody yet
            found.add(frame.f_code.co_filename)

    def step(self: Trainer) -> bool:
        if self.position.step == 1:
            self.callbacks.clear()
            sys.setprofile(note)
        try:
            return intact(self)
        finally:
            sys.setprofile(None)

    def read(self: Trainer, *step: int) -> Any:
        before = sys.getprofile()
        sys.setprofile(note)
        try:
            return intact_read(self, *step)
        finally:
            sys.setprofile(before)  # on a CPU the step itself reads

    Trainer._step, Trainer._read = step, read  # type: ignore[method-assign]
    registry._tables = list  # type: ignore[assignment]
    train(run, state_on(rank, run), lambda _: None)
    return [str(Path(file).relative_to(PACKAGE)) for file in found if Path(file).is_relative_to(PACKAGE)]


def test_the_core_path_is_what_a_step_enters_at_zero_0_1_and_3(tmp_path: Path) -> None:
    """Of Llama on two ranks over gloo, without annexes, in `Trainer._step` without callbacks."""
    entered = set[str]()
    for stage in (0, 1, 3):
        training = {"run_dir": str(tmp_path / str(stage)), "steps": 2, "micro_batch_size": 2, "accumulation": 2}
        model, logging = LLAMA | {"vocab_size": 257}, {"tensorboard": False}
        run = run_of(2, model=model, zero={"stage": stage}, training=training | {"compile": False}, logging=logging)
        entered.update(*run_world(2, _entered, run))
    entered -= {file for file in entered if Path(file).parts[0] in ANNEXES}  # those that an earlier test has loaded
    listed = re.findall(r"^\| `([a-z0-9_/]+\.py)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    told = [
        f"add to the core path in docs/architecture.md, for a step enters it: | `{file}` | what it is |"
        for file in sorted(entered - {*listed})
    ]
    told += [
        f"take out of the core path in docs/architecture.md, for no step enters it: | `{file}` |"
        for file in listed
        if file not in entered
    ]
    assert not told, "\n".join(told)
