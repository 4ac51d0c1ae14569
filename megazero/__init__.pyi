from argparse import Namespace
from typing import Any, overload

from torch import nn

from megazero import pipe as pipe
from megazero import zero as zero
from megazero.config import RunConfig
from megazero.deepspeed.pipeline_module import PipelineModule as PipelineModule
from megazero.deepspeed.recompute import checkpoint as checkpoint
from megazero.deepspeed.script_setup import add_config_arguments as add_config_arguments
from megazero.deepspeed.script_setup import init_distributed as init_distributed
from megazero.deepspeed.training_engine import RepeatingLoader as RepeatingLoader
from megazero.deepspeed.training_engine import TrainingEngine
from megazero.engine import Engine
from megazero.parallel_state import ParallelState
from megazero.parallel_state import RankGrid as RankGrid
from megazero.parallel_state import parallel_state_of as parallel_state_of
from megazero.schedules.action import Schedule

__version__: str

@overload
def initialize(
    config: RunConfig, state: ParallelState, *, init_weights: bool = True, schedule: Schedule | None = None
) -> Engine: ...
@overload
def initialize(
    args: Namespace | None = None, model: nn.Module | None = None, *more: Any, **others: Any
) -> tuple[TrainingEngine, Any, Any, Any]: ...
