"""Write the checkpoints of `checkpoints.tar.xz` with megatron-core on a CPU: two updates of a small model, in several forms.

    pip install torch numpy && pip install --no-deps megatron-core==0.16.1
    python generate.py OUT FAMILY FORM,FORM           on 4 ranks: torchrun --nproc-per-node 4 ... FORM,FORM TP PP

Each form goes to OUT/FORM.  From one process OUT/truth.pt has the logits of Megatron's forward, and its optimizer's state.
Calls of CUDA are led to the CPU.  Made with torch 2.13: llama dp_reshardable,fully_reshardable; with megatron-core 0.15.3
llama fully_sharded_model_space; qwen2, qwen3, gpt2, mistral dp_reshardable; on 4 ranks qwen3
dp_reshardable,fully_reshardable 2 2.  `metadata.json` is left out, since nothing reads it.
"""

import contextlib
import os
import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

VOCAB, SEQ = 16, 8


class OnCpu(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = {key: "cpu" if "cuda" in str(value) else value for key, value in (kwargs or {}).items()}
        args = ["cpu" if isinstance(one, str | torch.device) and "cuda" in str(one) else one for one in args]
        found = func(*args, **kwargs)
        return found.replace("torch.", "torch.cuda.") if func is torch.Tensor.type and len(args) == 1 else found


def main(out, family, forms, tp=1, pp=1):  # noqa: PLR0915
    from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, distrib_optimizer, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer import TransformerConfig

    dist.init_process_group("gloo")
    torch.cuda.current_device, torch.cuda.synchronize, np.product = lambda: "cpu", lambda: None, np.prod
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *_, **__: self
    tensor_parallel.random.CudaRNGStatesTracker.fork = lambda self, *_: contextlib.nullcontext()
    sharded, tensors = distrib_optimizer.DistributedOptimizer, "_get_main_param_and_optimizer_states"
    state_of = getattr(sharded, tensors)
    if "fully_sharded_model_space" in forms:  # torch's AdamW counts steps by tensor, which 0.15 does not expect
        setattr(sharded, tensors, lambda self, one: {k: v for k, v in state_of(self, one).items() if k != "step"})
    parallel_state.initialize_model_parallel(tp, pp)
    torch.manual_seed(0)
    sizes = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 4, "ffn_hidden_size": 8, "init_method_std": 0.2}
    sizes |= {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, "pipeline_dtype": torch.float32}
    sizes |= {"gradient_accumulation_fusion": False, "use_cpu_initialization": True}
    sizes |= {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    own = {"qwen2": {"add_qkv_bias": True}, "qwen3": {"kv_channels": 4, "qk_layernorm": True}}
    llama = {"num_query_groups": 2, "normalization": "RMSNorm", "gated_linear_unit": True, "add_bias_linear": False}
    if is_gpt2 := family == "gpt2":
        sizes |= {"activation_func": lambda x: F.gelu(x, approximate="tanh"), "bias_activation_fusion": False}
    else:
        sizes |= llama | {"activation_func": F.silu, **own.get(family, {})}
    config, norm = TransformerConfig(**sizes), None if is_gpt2 else "RMSNorm"
    ends = {"share_embeddings_and_output_weights": family in ("gpt2", "qwen2"), "rotary_base": 500}
    ends |= {"pre_process": parallel_state.is_pipeline_first_stage()}
    ends |= {"post_process": parallel_state.is_pipeline_last_stage()}
    ends |= {"position_embedding_type": "learned_absolute" if is_gpt2 else "rope"}
    spec = get_gpt_layer_local_spec(qk_layernorm=family == "qwen3", normalization=norm)
    model, shards = GPTModel(config, spec, VOCAB, SEQ, **ends), {"use_distributed_optimizer": True}
    wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(**shards), model)
    adam = OptimizerConfig(optimizer="adam", lr=0.01, weight_decay=0.1, adam_beta2=0.95, **shards)
    optimizer = get_megatron_optimizer(adam, [wrapped])
    past = torch.arange(SEQ)[:, None] - torch.arange(SEQ)
    mask = ((past < 0) | (past >= (3 if family == "mistral" else SEQ)))[None, None]
    tokens, places = torch.arange(2 * SEQ).reshape(2, SEQ) * 5 % 13, torch.arange(SEQ).expand(2, SEQ)

    def forward(_, model):
        return model(tokens, places, mask, labels=tokens.roll(-1, 1)), lambda loss: (loss.mean(), {})

    for _ in range(2):
        wrapped.zero_grad_buffer()
        batch = {"num_microbatches": 1, "seq_length": SEQ, "micro_batch_size": 2, "forward_only": False}
        get_forward_backward_func()(forward_step_func=forward, data_iterator=None, model=[wrapped], **batch)
        wrapped.finish_grad_sync()
        optimizer.step()
    for form in forms:
        about = {"distrib_optim_sharding_type": form, "dp_cp_group": parallel_state.get_data_parallel_group(True)}
        args = {"num_layers": 2, "hidden_size": 8, "ffn_hidden_size": 8, "rotary_interleaved": False, "adam_beta1": 0.9}
        args |= {"adam_beta2": 0.95, "adam_eps": 1e-8, "consumed_train_samples": 4, "lr": 0.01}
        args |= {"window_size": (2, 0)} if family == "mistral" else {}
        state = {"args": Namespace(**args), "iteration": 2, "checkpoint_version": 3.0}
        state["model"] = model.sharded_state_dict(metadata=about)
        state["optimizer"] = optimizer.sharded_state_dict(state, metadata=about)
        (out / form).mkdir(parents=True, exist_ok=True)
        dist_checkpointing.save(state, str(out / form))
    if dist.get_world_size() == 1:
        by_name, kinds = {}, ("param", "exp_avg", "exp_avg_sq")
        for name, one in model.named_parameters():
            found = state_of(optimizer.chained_optimizers[0], one)
            by_name[name] = {kind: found[kind].detach().reshape(one.shape) for kind in kinds}
        with torch.no_grad():
            torch.save({"logits": model(tokens, places, mask), "state": by_name}, out / "truth.pt")
    dist.barrier()


if __name__ == "__main__":
    for key, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}.items():
        os.environ.setdefault(key, value)
    with OnCpu():
        main(Path(sys.argv[1]), sys.argv[2], sys.argv[3].split(","), *map(int, sys.argv[4:6]))
