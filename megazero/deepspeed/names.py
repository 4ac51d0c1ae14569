"""Which of DeepSpeed's public names megazero has, and what it says of the others.

HOMES: module of DeepSpeed -> file of this room, or module of the package -> names ("theirs=ours" where they differ).
UNSUPPORTED: modules and names of DeepSpeed, as patterns, that can be imported and not called; all that is in a module is
meant.  docs/deepspeed.md says what to use instead of each.

A name that is in neither is unknown.
"""

_PIPE = {"layer_specs": "LayerSpec TiedLayerSpec", "pipeline_module": "PipelineModule"}
_ZERO = {
    "meta_init": "Init",
    "full_params": "GatheredParameters gathered_parameters",
    "script_utils": "register_external_parameter",
}
_LOGGING = {"script_utils": "logger log_dist"}
_CHECKPOINTING = {
    "recompute": (
        "configure is_configured reset checkpoint=checkpoint_as_deepspeed "
        "non_reentrant_checkpoint=checkpoint_as_deepspeed partition_activations_in_checkpoint set_num_layers"
    )
}

HOMES: dict[str, dict[str, str]] = {
    "": {
        "script_setup": "initialize init_distributed add_config_arguments",
        "training_engine": "DeepSpeedEngine=TrainingEngine RepeatingLoader",
        "pipeline_engine": "PipelineEngine",
        "pipeline_module": "PipelineModule",
        "accelerator": "get_accelerator",
        "megazero.settings": "DeepSpeedConfigError=ConfigError",
        "megazero.parallel_state": "RankGrid parallel_state_of",
        **_LOGGING,
    },
    "accelerator": {},  # files of these names hold what is in them
    "checkpoint.utils": {"script_utils": "clone_tensors_for_torch_save"},
    "checkpointing": _CHECKPOINTING,
    "comm": {},
    "git_version_info": {"script_utils": "torch_info"},
    "moe.utils": {"script_optimizers": "split_params_into_different_moe_groups_for_optimizer"},
    "ops": {"script_optimizers": "__compatible_ops__=compatible_ops"},
    "ops.adam": {"script_optimizers": "FusedAdam=adam DeepSpeedCPUAdam=adam"},
    "pipe": _PIPE,
    "runtime": {},
    "runtime.activation_checkpointing": {},
    "runtime.activation_checkpointing.checkpointing": _CHECKPOINTING,
    "runtime.config": {"megazero.settings": "DeepSpeedConfigError=ConfigError"},
    "runtime.dataloader": {"training_engine": "RepeatingLoader"},
    "runtime.engine": {"training_engine": "DeepSpeedEngine=TrainingEngine"},
    "runtime.lr_schedules": {
        "lr_schedulers": (
            "LRRangeTest OneCycle VALID_LR_SCHEDULES WarmupCosineLR WarmupDecayLR WarmupLR LR_RANGE_TEST "
            "ONE_CYCLE WARMUP_LR WARMUP_DECAY_LR WARMUP_COSINE_LR LR_RANGE_TEST_MIN_LR LR_RANGE_TEST_STEP_RATE "
            "LR_RANGE_TEST_STEP_SIZE LR_RANGE_TEST_STAIRCASE CYCLE_FIRST_STEP_SIZE CYCLE_FIRST_STAIR_COUNT "
            "CYCLE_SECOND_STEP_SIZE CYCLE_SECOND_STAIR_COUNT DECAY_STEP_SIZE CYCLE_MIN_LR CYCLE_MAX_LR "
            "DECAY_LR_RATE CYCLE_MIN_MOM CYCLE_MAX_MOM DECAY_MOM_RATE WARMUP_MIN_LR WARMUP_MAX_LR "
            "WARMUP_NUM_STEPS WARMUP_TYPE WARMUP_LOG_RATE WARMUP_LINEAR_RATE WARMUP_MIN_RATIO COS_MIN_RATIO "
            "TOTAL_NUM_STEPS"
        )
    },
    "runtime.pipe": {**_PIPE, "topology": "ProcessTopology"},
    "runtime.pipe.engine": {"pipeline_engine": "PipelineEngine"},
    "runtime.pipe.module": _PIPE,
    "runtime.pipe.topology": {
        "topology": "ProcessTopology PipeDataParallelTopology PipeModelDataParallelTopology PipelineParallelGrid"
    },
    "runtime.utils": {"script_utils": "set_random_seed see_memory_usage"},
    "runtime.zero": _ZERO,
    "runtime.zero.partition_parameters": _ZERO,
    "utils": {"training_engine": "RepeatingLoader", **_LOGGING},
    "utils.logging": _LOGGING,
    "utils.torch": {"script_utils": "required_torch_version"},
    "zero": _ZERO,
}

_UNSUPPORTED = """*checkpointing.CheckpointFunction *checkpointing.CudaRNGStatesTracker
    *checkpointing.get_cuda_rng_tracker *checkpointing.model_parallel_* DeepSpeedConfig DeepSpeedDataLoader
    DeepSpeedHybridEngine DeepSpeedInferenceConfig DeepSpeedOptimizer* DeepSpeedSchedulerCallable DeepSpeedTransformer*
    DualPipeV* InferenceEngine OnDevice accelerator.* autotuning checkpoint comm.* compat compile compression constants
    datastates default_inference_config env_report git_version_info* inference init_inference io launcher linear
    model_implementations module_inject moe monitor nvme ops.*_* ops.DeepSpeedTransformer* ops.adagrad ops.adam.ZenFlow*
    ops.adam.zenflow* ops.aio ops.compile ops.deepspeed4science ops.gds ops.lamb ops.lion ops.quantizer ops.transformer
    pipe.DualPipeV* profiling re*_transformer_layer runtime.*_* runtime.*config* runtime.*f*16* runtime.comm
    runtime.compiler runtime.constants runtime.dataloader.DeepSpeedDataLoader runtime.domino runtime.pipe.dualpipev
    runtime.pipe.p2p runtime.pipe.schedule runtime.rollout runtime.superoffload runtime.zenflow runtime.zero.* sequence
    set_autotp_mode tp_model_init utils.*_* utils.*fragment* utils.OnDevice utils.bwc utils.config utils.debug
    utils.exceptions utils.groups utils.numa utils.nvtx utils.timer utils.torch.* utils.types zero.*"""
UNSUPPORTED = _UNSUPPORTED.split()
