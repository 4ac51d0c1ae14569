from megazero.deepspeed.layer_specs import LayerSpec as LayerSpec
from megazero.deepspeed.layer_specs import TiedLayerSpec as TiedLayerSpec
from megazero.deepspeed.pipeline_module import PipelineModule as PipelineModule
