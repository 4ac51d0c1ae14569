"""One training step, whoever calls it: a GPT by its configuration, or a script's own module."""

from megazero.engine.gpt import BatchShare, Engine, initialize
from megazero.engine.step import NonFiniteError, StepStatistics
from megazero.engine.trainer_state import Position

__all__ = ["BatchShare", "Engine", "NonFiniteError", "Position", "StepStatistics", "initialize"]
