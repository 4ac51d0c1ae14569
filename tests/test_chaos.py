"""Law 5 under fire, in short; `make chaos` is the long version."""

from __future__ import annotations

from pathlib import Path

import pytest
from chaos import MOMENTS, TROUBLES, Chaos

pytestmark = pytest.mark.slow  # starts whole runs

SEED = 3


def test_a_run_that_is_disturbed_in_every_way_is_the_undisturbed_run(tmp_path: Path) -> None:
    chaos = Chaos(tmp_path, SEED, rounds=len(MOMENTS) + len(TROUBLES))
    chaos.run()
    assert set(chaos.killed) == set(MOMENTS)
    assert set(chaos.troubled) == set(TROUBLES)
    assert set(chaos.worlds) == {1, 2, 4}
