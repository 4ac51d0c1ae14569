from megazero import pipe as pipe
from megazero import zero as zero
from megazero.deepspeed.pipeline_module import PipelineModule as PipelineModule
from megazero.deepspeed.recompute import checkpoint as checkpoint
from megazero.deepspeed.script_setup import add_config_arguments as add_config_arguments
from megazero.deepspeed.script_setup import init_distributed as init_distributed
from megazero.deepspeed.script_setup import initialize as initialize
from megazero.deepspeed.training_engine import RepeatingLoader as RepeatingLoader
from megazero.parallel_state import RankGrid as RankGrid
from megazero.parallel_state import parallel_state_of as parallel_state_of

__version__: str
