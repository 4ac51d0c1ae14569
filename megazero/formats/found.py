"""What a reader has gathered from a checkpoint of another framework, before it is handed on."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from torch import Tensor

from megazero.checkpoint.foreign.source import ForeignCheckpoint, ForeignTensor
from megazero.checkpoint.index import CheckpointError
from megazero.zero.state import MODEL

ADAM = ("exp_avg", "exp_avg_sq")
# The keys of AdamW's groups: its settings; how it is computed; and what ours computes in one way only.
_SETTINGS = ("name", "betas", "eps", "weight_decay", "lr", "initial_lr")
_COMPUTED = ("params", "param_names", "foreach", "fused", "capturable", "differentiable", "step")
_COUNTS = 2**53  # none is as large: a float does not count that far
_CONSTANT = {"amsgrad": False, "maximize": False, "bias_correction": True}


@dataclass
class Found:
    """Tensors by kind and by their name, settings of the optimizer, and what is told to the user.

    Args:
        tensors: by kind.
        updates: the counts of updates that the tensors' state has; they must agree.
        step, samples: steps of the run and samples consumed; None where the checkpoint does not say.
        notes: lines about what was understood and is not taken over; in order, each once.
        unknown: names of what was not understood.
        settings: by key, each value of a group once.
        entries: by kind and name, the entry of the checkpoint that says it.
    """

    tensors: dict[str, dict[str, ForeignTensor]] = field(default_factory=lambda: {MODEL: {}})
    updates: set[int] = field(default_factory=set)
    step: int | None = None
    samples: int | None = None
    notes: dict[str, None] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    settings: dict[str, list[Any]] = field(default_factory=dict)
    entries: dict[tuple[str, str], str] = field(default_factory=dict)

    def add_tensor(self, kind: str, name: str, tensor: ForeignTensor, *, entry: str) -> None:
        """Take the tensor of an entry; a second one for the same name is not understood."""
        if self._is_first(kind, name, entry):
            self.tensors.setdefault(kind, {})[name] = tensor

    def add_step(self, step: int, *, entry: str) -> None:
        """Take the step of the run; another one is not understood."""
        if self.step == step or self._is_first("step", "", entry):
            self.step = step

    def _is_first(self, kind: str, name: str, entry: str) -> bool:
        first = self.entries.setdefault((kind, name), entry)
        if first != entry:
            self.unknown.append(f"{entry} (beside {first}, which says the same)")
        return first == entry

    def add_setting(self, name: str, key: str, value: Any) -> None:
        """Take a setting of one of the optimizer's groups; `name` is that of the entry, for messages.

        One that is not finite is not understood.
        """
        if key in _COMPUTED:
            return
        if key == "decoupled_weight_decay":
            key, value = "name", "adamw" if value else "adam"
        value = value.item() if isinstance(value, Tensor) else list(value) if isinstance(value, tuple) else value
        parts = value if isinstance(value, list) else [value]
        if not all(isfinite(one) for one in parts if isinstance(one, float)):
            self.unknown.append(f"{name}={value}")
        elif key in _SETTINGS:
            seen = self.settings.setdefault(key, [])
            seen += [] if value in seen else [value]
        elif key not in _CONSTANT or value != _CONSTANT[key]:
            self.unknown.append(f"{name}={value}")

    def is_not_taken(self, name: str, reasons: Mapping[str, str]) -> bool:
        """Whether an entry is understood and of no use here: one of the patterns is its name.

        Args:
            reasons: by pattern, what is told once of all that its first group names; "" where nothing is to be told.
        """
        for pattern, reason in reasons.items():
            if found := re.fullmatch(pattern, name):
                if reason:
                    self.notes[f"{found[found.lastindex or 0]} is not taken over: {reason}"] = None
                return True
        return False

    def checkpoint(self, path: str) -> ForeignCheckpoint:
        """All of it.  Raises: CheckpointError if some tensors were updated more often than others, or a count is none."""
        counts = {"steps": self.step or 0, "samples": self.samples or 0, "updates": max(self.updates, default=0)}
        for what, count in counts.items():
            if not 0 <= count < _COUNTS:
                raise CheckpointError(f"{path} counts {count} {what}, which no run has: it is damaged")
        if len(self.updates) > 1:
            raise CheckpointError(
                f"{path}: AdamW has updated some tensors {min(self.updates)} times and others {max(self.updates)}"
            )
        updates = max(self.updates, default=0)
        return ForeignCheckpoint(
            path,
            self.tensors,
            optimizer_steps=updates,
            step=updates if self.step is None else self.step,
            samples=self.samples,
            optimizer=self._optimizer(),
            notes=list(self.notes),
            unknown=self.unknown,
        )

    def _optimizer(self) -> dict[str, Any]:
        """Keys of our [optimizer]; a value that differs between tensors is told and left to the run file."""
        found = dict(self.settings)
        found["lr"] = found.pop("initial_lr", found.get("lr", []))  # `lr` is that of the last step
        for key, values in found.items():
            if len(values) > 1:
                self.notes[f"{key} is not taken over: it differs between tensors, {values[0]} and {values[1]}"] = None
        decay = found.get("weight_decay", [])
        if len(decay) == 1 and decay[0]:
            self.notes[f"weight_decay {decay[0]} fell on all tensors there, here on matrices only"] = None
        return {key: values[0] for key, values in found.items() if len(values) == 1}
