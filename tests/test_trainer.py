"""Hugging Face's Trainer and accelerate with a DeepSpeed configuration, beside the same without one and beside DeepSpeed.

The script reads its arguments with transformers' own parser, which knows no --local_rank, as `run_clm.py` does.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_world
from safetensors.torch import load_file

from megazero.deepspeed.__main__ import main

pytestmark = pytest.mark.slow  # starts whole runs

SCRIPT = """
import json, sys
import torch
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
set_seed(1)
sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 32, (32, 8))]
trainer = Trainer(LlamaForCausalLM(LlamaConfig(**sizes)), args, train_dataset=rows, eval_dataset=rows[:8])
trainer.train(args.resume_from_checkpoint)
trainer.evaluate()
trainer.save_model()
if trainer.is_world_process_zero():
    json.dump(trainer.state.log_history, open(f"{args.output_dir}/log.json", "w"))
"""
OPTIMIZER: dict[str, Any] = {"type": "AdamW", "params": {key: "auto" for key in ("lr", "betas", "eps", "weight_decay")}}
OPTIMIZER["params"]["torch_adam"] = True  # DeepSpeed's own would compile an extension
WARMUP = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
SCHEDULER = {"type": "WarmupDecayLR", "params": dict.fromkeys(WARMUP, "auto") | {"warmup_type": "linear"}}
KEEPS_BEST = "--eval_strategy steps --eval_steps 2 --save_strategy steps --save_steps 2 --load_best_model_at_end "
KEEPS_BEST += "--metric_for_best_model loss --greater_is_better 1"  # the worst, which is the first


def _run(rank: int, ranks: int, folder: Path, name: str, zero: dict[str, Any] | None, how: str, more: str) -> None:
    torch.cuda.is_available = lambda: False
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"}
    batch = f"--per_device_train_batch_size {4 // ranks} --gradient_accumulation_steps 2 --per_device_eval_batch_size 4"
    command = f"{folder}/script.py --output_dir {folder}/{name} {batch} --max_steps 4 --learning_rate 0.02 --warmup_steps 2"
    command += f" --logging_steps 1 --use_cpu --report_to none --disable_tqdm 1 --save_strategy no {more}"
    if zero is not None:
        given: dict[str, Any] = {"zero_optimization": zero, "bf16": {"enabled": "auto"}, "gradient_clipping": "auto"}
        given |= dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto")
        given |= {} if how == "its own" else {"optimizer": OPTIMIZER, "scheduler": SCHEDULER}
        path = folder / f"{name}.{rank}.json"
        path.write_text(json.dumps(given))
        command += f" --deepspeed {path}"
    if how == "DeepSpeed":
        import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # which would compile an extension
        sys.argv = command.split()
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        main(command.split())
        assert type(metadata.distribution("deepspeed")).__module__ == "megazero.deepspeed.mirror"
    dist.barrier()  # the first rank has written


def _log(folder: Path, name: str) -> dict[str, dict[int, float]]:
    lines = json.loads((folder / name / "log.json").read_text())
    return {key: {line["step"]: line[key] for line in lines if key in line} for key in ("loss", "eval_loss", "learning_rate")}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the script without DeepSpeed, on one process."""
    import transformers.trainer  # noqa: F401  once, for what is forked

    folder = tmp_path_factory.mktemp("trainer")
    (folder / "script.py").write_text(SCRIPT)
    run_world(1, _run, 1, folder, "plain", None, "plain", "")
    return folder


@pytest.mark.parametrize(
    ("ranks", "stage", "how", "offload"),
    [(1, 2, "DeepSpeed", "none"), (1, 1, "its own", "none"), (2, 2, "JSON's", "none"), (2, 3, "its own", "cpu")],
)
def test_trainer_gives_the_losses_and_weights_of_torch(plain: Path, ranks: int, stage: int, how: str, offload: str) -> None:
    name, zero = f"{how[:4]}{ranks}{stage}".replace(" ", ""), {"stage": stage, "offload_optimizer": {"device": offload}}
    run_world(ranks, _run, ranks, plain, name, zero | {"param_persistence_threshold": 0}, how, "", timeout=100)
    expected, found = _log(plain, "plain"), _log(plain, name)
    for key, values in expected.items():
        assert found[key] == pytest.approx(values, rel=1e-6), key
    weights = load_file(plain / name / "model.safetensors")
    for path, value in load_file(plain / "plain" / "model.safetensors").items():
        torch.testing.assert_close(weights[path], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("stage", "resumed"), [(1, 3), (3, 2)])
def test_trainer_loads_its_best_checkpoint_and_resumes_on_other_ranks(plain: Path, stage: int, resumed: int) -> None:
    name, again = f"best{stage}", f"resumed{stage}"
    run_world(2, _run, 2, plain, name, {"stage": stage}, "its own", KEEPS_BEST)
    best = load_file(plain / name / "checkpoint-2" / "model.safetensors")
    assert all(torch.equal(best[path], value) for path, value in load_file(plain / name / "model.safetensors").items())
    more = f"--resume_from_checkpoint {plain / name / 'checkpoint-2'}"
    run_world(1, _run, 1, plain, again, {"stage": resumed}, "its own", more)
    assert _log(plain, again)["loss"] == pytest.approx(_log(plain, "plain")["loss"], rel=1e-6)


def test_trainer_trains_in_bf16_with_offload(plain: Path) -> None:
    run_world(2, _run, 2, plain, "bf16", {"stage": 3, "offload_optimizer": {"device": "cpu"}}, "JSON's", "--bf16 1")
    assert _log(plain, "bf16")["loss"] == pytest.approx(_log(plain, "plain")["loss"], rel=5e-3)
    assert load_file(plain / "bf16" / "model.safetensors")["lm_head.weight"].dtype is torch.bfloat16
