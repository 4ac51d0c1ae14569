"""Importing this takes a step of a small model: what is forked afterwards finds its modules and its kernels there.

The server from which programs are forked imports it too.
"""

import torch
import torch._dynamo  # imported by every optimizer
from harness import DEVICE
from worlds import LLAMA, LR, engine_on, micro_batches, run_of, whole

if DEVICE.type == "cpu" and not torch.cuda.device_count():  # nothing can be forked from what has touched a GPU
    torch.set_num_threads(1)  # threads of OpenMP do not survive a fork
    for _accumulation in (1, 4):
        _run = run_of(1, model=LLAMA, zero={"stage": 3}, training={"accumulation": _accumulation})
        _engine = engine_on(0, _run)
        _engine.train_step(micro_batches(_run, _engine.state, 0), LR)
        whole(_engine, "model")
        _engine.sharded_model.close()
