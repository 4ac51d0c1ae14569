"""Which of DeepSpeed's public names megazero has, and what it says of the others.

HOMES: module of DeepSpeed -> file of this room, or module of the package -> names ("theirs=ours" where they differ).
UNSUPPORTED: what to use instead -> modules and names of DeepSpeed, as patterns; all that is in a module is meant.

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

UNSUPPORTED: dict[str, str] = {
    "initialize reads the configuration; ask the engine, as in engine.train_batch_size()": (
        "DeepSpeedConfig comm.config constants runtime.*config* runtime.constants utils.config"
    ),
    "initialize(training_data=...) returns a torch DataLoader": (
        "DeepSpeedDataLoader runtime.dataloader.DeepSpeedDataLoader"
    ),
    "it only trains; export the checkpoint (`megazero checkpoint export`) and serve it with an inference engine": (
        "DeepSpeedHybridEngine DeepSpeedInferenceConfig InferenceEngine default_inference_config inference "
        "init_inference model_implementations runtime.hybrid_engine* runtime.rollout runtime.weight_quantizer"
    ),
    "initialize returns the torch optimizer that steps the shards": "DeepSpeedOptimizer*",
    "it is a type; write Callable[[Optimizer], LRScheduler]": "DeepSpeedSchedulerCallable",
    "it has no kernels for whole layers; use torch's, such as scaled_dot_product_attention": (
        "DeepSpeedTransformer* module_inject ops.DeepSpeedTransformer* ops.fp_quantizer ops.quantizer "
        "ops.deepspeed4science ops.transformer ops.triton_ops re*_transformer_layer"
    ),
    "schedules are values here; PipelineModule takes one, or a name such as schedule='zbv' (docs/schedules.md)": (
        "DualPipeV* pipe.DualPipeV* runtime.pipe.dualpipev runtime.pipe.schedule"
    ),
    "build the model under zero.Init()": "OnDevice utils.OnDevice",
    "choose the micro-batch by engine.memory_bytes() and the speed that steps_per_print shows": "autotuning",
    "checkpoints hold whole tensors in safetensors, which any number of ranks reads": "checkpoint",
    "compile the module with torch.compile before initialize": "compile ops.compile runtime.compiler",
    "it prunes and quantizes nothing; use torchao on the trained model": "compression",
    "engine.save_checkpoint writes checkpoints, behind the steps with asynchronous=True": "io",
    "start scripts by `torchrun ... -m megazero.deepspeed script.py`": "launcher",
    "it has no LoRA or quantized layers; apply peft to the module before initialize": "linear",
    "it has no mixture-of-experts layers; train a dense model": "moe",
    "set the tensorboard block of the configuration": "monitor",
    "set zero_optimization.offload_optimizer in the configuration": (
        "nvme ops.adam.ZenFlow* ops.adam.zenflow* ops.aio ops.gds runtime.superoffload runtime.swap_tensor runtime.zenflow"
    ),
    "use torch.optim.Adagrad": "ops.adagrad",
    "use megazero.optim.optimizers.Lion, or Lion in the configuration": "ops.lion",
    "ZeRO steps shards, so an optimizer must act element by element; use AdamW, Lion or Adagrad": "ops.lamb",
    "it compiles no extensions": "ops.op_builder",
    "it is a part within DeepSpeed that nothing here stands for": (
        "accelerator.* comm.* compat datastates env_report git_version_info* ops.*_* runtime.*_* runtime.comm "
        "runtime.pipe.p2p utils.*_* utils.bwc utils.debug utils.exceptions utils.numa utils.nvtx utils.torch.* utils.types"
    ),
    "its layers drop no tokens": "ops.random_ltd",
    "it has no block-sparse attention; use torch's flex_attention": "ops.sparse_attention",
    "count operations with torch.utils.flop_counter.FlopCounterMode, and time with torch.profiler": "profiling",
    "the engine keeps fp32 masters itself; set bf16 or fp16 in the configuration": "runtime.*f*16*",
    "it keeps no generators of its own; seed torch's through runtime.utils.set_random_seed": (
        "*checkpointing.get_cuda_rng_tracker *checkpointing.model_parallel_* *checkpointing.CudaRNGStatesTracker"
    ),
    "call deepspeed.checkpointing.checkpoint": "*checkpointing.CheckpointFunction",
    "it has no curriculum, data analyzer or layer drop; order the data set yourself": "runtime.data_pipeline",
    "it rewrites no model; build it from the tensor-parallel layers of megazero.layers": (
        "runtime.domino runtime.tensor_parallel set_autotp_mode tp_model_init"
    ),
    "set the scheduler block of the configuration": "runtime.lr_schedules.add_tuning_arguments",
    "sequences are cut over tp by the layers of megazero.layers": "runtime.sequence_parallel sequence",
    "gradients are not in .grad; set gradient_clipping in the configuration": "runtime.utils.clip_grad_norm_",
    "shards are the engine's own; read and change whole weights through zero.gathered_parameters(engine, names)": (
        "runtime.zero.* utils.*_hp_* utils.*fragment* utils.safe_* zero.*"
    ),
    "state is offloaded for the whole run, by the configuration": "runtime.zero.offload_config",
    "engine.memory_bytes() says what each kind of state takes": "runtime.zero.stage*.estimate_*",
    "a method units() of the model says what stage 3 gathers at once": "utils.*z3_leaf*",
    "runtime.pipe.topology.PipelineParallelGrid has ranks and groups; so has engine.parallel_state": "utils.groups",
    "set wall_clock_breakdown in the configuration, or use torch.profiler": "utils.timer",
    "checkpoints hold whole fp32 tensors in safetensors; there is nothing to convert": "utils.zero_to_*",
}
