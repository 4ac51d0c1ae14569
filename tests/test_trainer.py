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
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from harness import free_port, run_world
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
LR = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
JSONS = {"scheduler": {"type": "WarmupDecayLR", "params": dict.fromkeys(LR, "auto")}}
JSONS |= {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}}}
COMMAND = (
    "--max_steps 4 --learning_rate 0.02 --warmup_steps 2 --logging_steps 1 --use_cpu --report_to none --disable_tqdm 1"
)
COMMAND += " --per_device_eval_batch_size 4 --gradient_accumulation_steps 2 --save_strategy no"
KEEPS_BEST = "--eval_strategy steps --eval_steps 2 --save_strategy steps --save_steps 2 --load_best_model_at_end "
KEEPS_BEST += "--metric_for_best_model loss --greater_is_better 1"  # the worst, which is the first


def _world(ranks: int, *args: Any) -> None:
    with patch.dict(os.environ, MASTER_PORT=str(free_port())):  # the ranks inherit it
        run_world(ranks, _run, ranks, *args)


def _run(rank: int, ranks: int, out: Path, config: dict[str, Any] | None, more: str = "", theirs: bool = False) -> None:
    torch.cuda.is_available = lambda: False
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"}
    command = f"{out.parent}/script.py --output_dir {out} --per_device_train_batch_size {4 // ranks} {COMMAND} {more}"
    if config is not None:
        path = out.with_suffix(f".{rank}.json")
        auto = dict.fromkeys(
            ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto"
        )
        path.write_text(json.dumps(auto | {"bf16": {"enabled": "auto"}} | config))
        command += f" --deepspeed {path}"
    if theirs:
        import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # which would compile an extension
        sys.argv = command.split()
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        main(command.split())
        assert type(metadata.distribution("deepspeed")).__module__ == "megazero.deepspeed.mirror"
    dist.barrier()  # the first rank has written


def _log(out: Path) -> dict[str, list[float]]:
    lines = json.loads((out / "log.json").read_text())
    return {key: [line[key] for line in lines if key in line] for key in ("loss", "eval_loss", "learning_rate")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the script on one process: without DeepSpeed, and with DeepSpeed and its own optimizer and schedule."""
    import transformers.trainer  # noqa: F401  once, for what is forked

    folder = tmp_path_factory.mktemp("trainer")
    (folder / "script.py").write_text(SCRIPT)
    _world(1, folder / "plain", None)
    _world(1, folder / "theirs", {"zero_optimization": {"stage": 2}} | JSONS, "", True)
    return folder


@pytest.mark.parametrize(("ranks", "stage", "jsons"), [(1, 1, {}), (2, 3, {}), (2, 2, JSONS), (1, 3, JSONS)])
def test_trainer_gives_the_losses_and_weights_of_torch_and_of_deepspeed(
    folder: Path, ranks: int, stage: int, jsons: dict[str, Any]
) -> None:
    out, truth = folder / f"ours{ranks}{stage}", folder / ("theirs" if jsons else "plain")
    zero = {"stage": stage, "param_persistence_threshold": 0, "offload_optimizer": {"device": "cpu"}}
    _world(ranks, out, {"zero_optimization": zero} | jsons)
    for key, values in _log(truth).items():
        assert _log(out)[key] == pytest.approx(values, rel=1e-6), key
    weights = load_file(out / "model.safetensors")
    for path, value in load_file(truth / "model.safetensors").items():
        torch.testing.assert_close(weights[path], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("stage", "resumed"), [(1, 3), (3, 2)])
def test_trainer_loads_its_best_checkpoint_and_resumes_on_other_ranks(folder: Path, stage: int, resumed: int) -> None:
    out, again = folder / f"best{stage}", folder / f"resumed{stage}"
    _world(2, out, {"zero_optimization": {"stage": stage}}, KEEPS_BEST)
    best, saved = load_file(out / "checkpoint-2" / "model.safetensors"), load_file(out / "model.safetensors")
    assert all(torch.equal(best[path], value) for path, value in saved.items())
    more = f"--resume_from_checkpoint {out / 'checkpoint-2'}"
    _world(1, again, {"zero_optimization": {"stage": resumed}}, more)
    assert _log(again)["loss"] == pytest.approx(_log(folder / "plain")["loss"], rel=1e-6)
