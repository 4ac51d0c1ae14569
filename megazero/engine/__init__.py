"""One training step: of a configured GPT, or of a script's own module."""

from megazero.engine.gpt import Engine, initialize
from megazero.engine.micro_batches import BatchSlice
from megazero.engine.phases import Position
from megazero.engine.step import NonFiniteError, StepStatistics

__all__ = ["BatchSlice", "Engine", "NonFiniteError", "Position", "StepStatistics", "initialize"]
