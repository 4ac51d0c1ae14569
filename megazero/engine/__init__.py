"""Binds model, schedule, ZeRO and precision into one step."""

from megazero.engine.gpt import BatchShare, Engine, NonFiniteError, Position, StepStatistics, initialize

__all__ = ["BatchShare", "Engine", "NonFiniteError", "Position", "StepStatistics", "initialize"]
