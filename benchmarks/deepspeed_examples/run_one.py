"""Runs one script as one rank, under DeepSpeed or under `-m megazero.deepspeed`, and records its losses.

    torchrun ... -m benchmarks.deepspeed_examples.run_one {deepspeed|megazero} FOLDER SCRIPT ARGS

The script is not changed.  Around it, alike on both sides: packages that are not needed for training are stand-ins; the
calls that only CUDA has do nothing; torch's generators are seeded before the script, and once more when `initialize` has
returned, since the two libraries draw there differently.  Recorded are the losses that backward and train_batch see, and the
mean of every output of an engine that evaluates: FOLDER/RANK.json.
"""

from __future__ import annotations

import functools
import json
import os
import random
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

STAND_INS = Path(__file__).parent / "stand_ins"


class _OnTheCpu(TorchFunctionMode):
    """Takes the CPU where a script names a CUDA device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(_on_cpu, (args, kwargs or {}))
        return func(*args, **kwargs)


def _on_cpu(value: Any) -> Any:
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == "cuda" else value


def _leave_out_cuda() -> None:
    for name in ("set_device", "synchronize", "reset_peak_memory_stats", "empty_cache"):
        setattr(torch.cuda, name, lambda *_, **__: None)
    Tensor.cuda = lambda self, *_, **__: self
    nn.Module.cuda = lambda self, *_, **__: self
    torch.cuda.is_available = lambda: False


def _seed() -> None:
    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(7)


class _Record:
    """The losses of this rank, in the order in which they came."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self._within = 0  # calls that are recorded already

    def wrap(self, owner: Any, name: str, *, of_result: bool) -> None:
        """Record the first argument of a method, or its result."""
        method = getattr(owner, name)

        @functools.wraps(method)
        def recorded(this: Any, *args: Any, **kwargs: Any) -> Any:
            value = this if owner is Tensor else (args or [kwargs.get("loss")])[0]
            if not of_result and not self._within:
                self.losses.append(float(value.detach()))
            self._within += 1
            try:
                result = method(this, *args, **kwargs)
            finally:
                self._within -= 1
            if of_result and (name != "forward" or (not this.module.training and isinstance(result, Tensor))):
                self.losses.append(float(result.detach().float().mean()))
            return result

        setattr(owner, name, recorded)


def _engines(side: str) -> tuple[Any, Any, Any]:
    """The package with `initialize`, the class of its engines and of those of pipelines."""
    if side == "deepspeed":
        import deepspeed
        from deepspeed.runtime.engine import DeepSpeedEngine
        from deepspeed.runtime.pipe.engine import PipelineEngine

        return deepspeed, DeepSpeedEngine, PipelineEngine
    import megazero.deepspeed
    from megazero.deepspeed.module_engine import ModuleEngine
    from megazero.deepspeed.pipeline_engine import PipelineEngine as OurPipelineEngine

    return megazero.deepspeed, ModuleEngine, OurPipelineEngine


def main(side: str, folder: str, script: str, *arguments: str) -> None:
    """See the text of the module."""
    sys.path.insert(1, str(STAND_INS))
    record = _Record()
    package, engine, pipeline = _engines(side)
    record.wrap(Tensor, "backward", of_result=False)
    record.wrap(engine, "backward", of_result=False)
    record.wrap(engine, "forward", of_result=True)
    record.wrap(pipeline, "train_batch", of_result=True)
    initialize = package.initialize

    def seeded(*args: Any, **kwargs: Any) -> Any:
        made = initialize(*args, **kwargs)
        _seed()
        return made

    package.initialize = seeded
    _leave_out_cuda()
    _seed()
    local_rank = os.environ["LOCAL_RANK"]
    with _OnTheCpu():
        try:
            if side == "deepspeed":
                sys.argv[:] = [script, f"--local_rank={local_rank}", *arguments]
                sys.path[0] = str(Path(script).resolve().parent)
                runpy.run_path(script, run_name="__main__")
            else:
                sys.argv[:] = ["megazero.deepspeed", script, *arguments]
                runpy.run_module("megazero.deepspeed", run_name="__main__")
        finally:
            (Path(folder) / f"{os.environ['RANK']}.json").write_text(json.dumps(record.losses))


if __name__ == "__main__":
    main(*sys.argv[1:])
