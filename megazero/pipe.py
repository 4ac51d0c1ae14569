"""Pipelines of layers under the names that DeepSpeed's scripts import: `from megazero.pipe import PipelineModule`."""

from megazero.deepspeed.layer_specs import LayerSpec, TiedLayerSpec
from megazero.deepspeed.pipeline_module import PipelineModule

__all__ = ["LayerSpec", "PipelineModule", "TiedLayerSpec"]
