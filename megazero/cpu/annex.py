"""What clusters of CPUs add to the trunk; see `megazero.annexes`."""

ADDS = {
    "backend": {"cpu": "megazero.cpu.transport:cpu_backend"},
    "messages": {"cpu": "megazero.cpu.sockets:CpuMessages"},
    "weight gathers": {"cpu": "megazero.cpu.deferred_steps:DeferredSteps"},
    "rank": {"cpu": "megazero.cpu.processor:prepare_cpu_rank"},
    "kernel": {
        "fp32 product": "megazero.cpu.processor:fp32_product",
        "attention tiles": "megazero.cpu.attention:CpuTiles",
    },
}
