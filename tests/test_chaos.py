"""Law 5 under fire, in short; `make chaos` is the long version."""

from __future__ import annotations

from pathlib import Path

import pytest
from chaos import MOMENTS, Chaos

pytestmark = pytest.mark.slow  # starts whole runs

SEED = 3


def test_a_run_whose_ranks_are_killed_at_any_moment_is_the_undisturbed_run(tmp_path: Path) -> None:
    chaos = Chaos(tmp_path, SEED, rounds=len(MOMENTS))
    chaos.run()
    assert set(chaos.killed) == set(MOMENTS)
    assert set(chaos.worlds) == {1, 2, 4}
