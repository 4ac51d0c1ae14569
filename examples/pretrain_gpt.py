"""megazero as a library, on one process or on as many as torchrun starts.  Started again, it goes on where it was.

python examples/pretrain_gpt.py training.steps=20
torchrun --nproc_per_node 2 examples/pretrain_gpt.py training.steps=40 parallel.tp=2
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from megazero.checkpoint.index import TrainerState, find_newest, step_directory
from megazero.checkpoint.load import load_checkpoint
from megazero.checkpoint.save import save_checkpoint
from megazero.config import ResolvedRun, load_config
from megazero.config.derive import cache_directory
from megazero.data import open_corpus
from megazero.engine import initialize
from megazero.models.hf_names import hugging_face_config
from megazero.parallel_state import ParallelState, RankGrid
from megazero.training.batches import read_batches
from megazero.training.launch import device_type
from megazero.training.lr_schedule import learning_rate_factor

CONFIG = Path(__file__).with_name("quickstart.toml")
ALONE = [
    "parallel.tp=1",
    "parallel.pp=1",
    "training.run_dir=runs/pretrain_gpt",
]  # over the file, under the command line


def join(run: ResolvedRun) -> ParallelState:
    """This process's place among the ranks."""
    device = torch.device("cpu")
    if device_type(run.config) == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if run.world_size > 1:
        dist.init_process_group("gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl")
    parallel = run.config.parallel
    grid = RankGrid(tp=parallel.tp, dp=run.dp, pp=parallel.pp, order=parallel.order)
    return ParallelState(grid, int(os.environ.get("RANK", "0")), device)


def main(overrides: list[str]) -> None:
    run = load_config(CONFIG, [*ALONE, *overrides], int(os.environ.get("WORLD_SIZE", "1")))
    config, model, data, steps = run.config, run.config.model, run.config.data, run.config.training.steps
    state = join(run)
    sources, seed, cache = [(s.path, s.weight) for s in data.sources], config.training.seed, cache_directory(data)
    fixed = {"tokenizer": data.tokenizer, "seq_len": model.seq_len, "vocab_size": model.vocab_size}
    corpus = open_corpus(sources, seed=seed, validation_fraction=data.validation_fraction, cache_dir=cache, **fixed)
    checkpoints = Path(config.training.run_dir) / "checkpoints"
    newest = find_newest(checkpoints)
    engine = initialize(config, state, draw=newest is None)
    step = samples = 0
    if newest is not None:
        trainer = load_checkpoint(newest, engine.sharded_state, state)
        step, samples = trainer.step, trainer.consumed_samples
        engine.parameters.publish()

    while step < steps:
        batches = read_batches(corpus.train, samples, run.global_batch_size, run.micro_batch_size, state)
        lr = config.optimizer.lr * learning_rate_factor(config.lr_schedule, step, steps)
        statistics = engine.train_step(batches, lr)
        step, samples = step + 1, samples + run.global_batch_size
        if state.rank == 0:
            print(f"step {step} loss {statistics.loss:.6f} grad norm {statistics.grad_norm:.4f}", flush=True)

    directory = step_directory(checkpoints, step)
    if directory != newest:
        shape = {"tp": state.grid.tp, "cp": 1, "pp": state.grid.pp, "dp": run.dp, "zero_stage": config.zero.stage}
        counted = {"step": step, "consumed_samples": samples, "consumed_tokens": samples * model.seq_len}
        written = {"model": model.model_dump(), "config": config.model_dump(mode="json"), "shape": shape}
        known = {"data_fingerprint": corpus.fingerprint, "versions": {"torch": str(torch.__version__)}}
        trainer = TrainerState(optimizer_steps=step, **counted, **written, **known)
        about = hugging_face_config(model, config.precision.dtype)
        save_checkpoint(directory, engine.sharded_state, state, trainer, about)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
