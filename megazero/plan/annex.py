"""What the plan adds to the trunk; see `megazero.annexes`."""

ADDS = {
    "command": {
        "plan": "megazero.plan.commands:plan",
        "memory-report": "megazero.plan.commands:memory_report",
        "calibrate": "megazero.plan.commands:calibrate",
        "schedule": "megazero.plan.schedule_command:app",
    },
    "callback": {
        "pipeline trace": "megazero.plan.pipeline_trace:PipelineTrace",
        "plan check": "megazero.plan.correction:PlanCheck",
        "step profile": "megazero.plan.step_profile:StepProfile",
        "memory snapshot": "megazero.plan.step_profile:MemorySnapshot",
    },
    "check": {"memory": "megazero.plan.check_lines:memory_lines"},
    "context": {"attention": "megazero.plan.context_lines:describe_context"},
    "start line": {"activations": "megazero.plan.check_lines:start_line"},
    "out of memory": {"explain": "megazero.plan.advice:explain", "snapshot": "megazero.plan.step_profile:add_snapshot"},
    "peak FLOP/s": {"devices": "megazero.plan.cluster:known_peak_flops"},
}
