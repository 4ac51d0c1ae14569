"""benchmarks/startup.py wraps functions by name."""

from importlib import import_module

import pytest

from benchmarks.startup import PHASES

pytestmark = pytest.mark.slow  # starts whole runs


@pytest.mark.parametrize(("home", "name"), [(home, name) for _, home, name, _ in PHASES])
def test_every_phase_ends_at_a_function_that_exists(home: str, name: str) -> None:
    module, _, owner = home.partition(":")
    holder = import_module(module)
    assert callable(getattr(getattr(holder, owner) if owner else holder, name))
