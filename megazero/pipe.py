"""Pipelines of layers under the names that DeepSpeed's scripts import: `from megazero.pipe import PipelineModule`."""

from megazero.deepspeed.pipeline_module import LayerSpec, PipelineModule, TiedLayerSpec

__all__ = ["LayerSpec", "PipelineModule", "TiedLayerSpec"]
