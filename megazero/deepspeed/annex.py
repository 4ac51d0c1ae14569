"""What scripts with DeepSpeed's calls add to the trunk: names; see `megazero.annexes`."""

ADDS = {
    "name": {
        "megazero.PipelineModule": "megazero.deepspeed.pipeline_module:PipelineModule",
        "megazero.RankGrid": "megazero.parallel_state:RankGrid",
        "megazero.RepeatingLoader": "megazero.deepspeed.training_engine:RepeatingLoader",
        "megazero.add_config_arguments": "megazero.deepspeed.script_setup:add_config_arguments",
        "megazero.init_distributed": "megazero.deepspeed.script_setup:init_distributed",
        "megazero.checkpoint.checkpoint": "megazero.deepspeed.recompute:checkpoint",
        "megazero.initialize": "megazero.deepspeed.script_setup:initialize",
        "megazero.parallel_state_of": "megazero.parallel_state:parallel_state_of",
        "megazero.pipe.LayerSpec": "megazero.deepspeed.layer_specs:LayerSpec",
        "megazero.pipe.PipelineModule": "megazero.deepspeed.pipeline_module:PipelineModule",
        "megazero.pipe.TiedLayerSpec": "megazero.deepspeed.layer_specs:TiedLayerSpec",
        "megazero.zero.GatheredParameters": "megazero.deepspeed.full_params:GatheredParameters",
        "megazero.zero.Init": "megazero.deepspeed.meta_init:Init",
        "megazero.zero.gathered_parameters": "megazero.deepspeed.full_params:gathered_parameters",
    }
}
