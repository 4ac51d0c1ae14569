"""megazero as a library, on one process or under torchrun.  Started again, it resumes.

python examples/pretrain_gpt.py training.steps=20
torchrun --nproc_per_node 2 examples/pretrain_gpt.py training.steps=40 parallel.tp=2
"""

import os
import sys
from pathlib import Path

import megazero
from megazero.checkpoint.index import find_newest, step_folder
from megazero.config import load_config
from megazero.engine import Position
from megazero.optim.lr_schedule import learning_rate_factor
from megazero.training.batches import open_same_corpus, read_batches
from megazero.training.launch import join_world, leave_world

CONFIG = Path(__file__).with_name("quickstart.toml")
ALONE = [
    "parallel.tp=1",
    "parallel.pp=1",
    "training.run_dir=runs/pretrain_gpt",
]  # override the file, and the command line overrides them


def main(overrides: list[str]) -> None:
    """Train until `training.steps`, then save."""
    run = load_config(CONFIG, [*ALONE, *overrides], int(os.environ.get("WORLD_SIZE", "1")))
    config, steps = run.config, run.config.training.steps
    state = join_world(run)
    corpus = open_same_corpus(config, state.world)
    checkpoints = Path(config.training.run_dir) / "checkpoints"
    newest = find_newest(checkpoints)
    engine = megazero.initialize(config, state, init_weights=newest is None)
    position = engine.load(newest, corpus.fingerprint) if newest else Position()

    while position.step < steps:
        first, end = position.samples, run.samples_after(position.samples)
        batches = read_batches(corpus.train, first, end - first, run.micro_batch_size, engine.batch_slice)
        lr = config.optimizer.lr * learning_rate_factor(config.lr_schedule, position.step, steps)
        statistics = engine.train_step(batches, lr)
        position = Position(position.step + 1, end, position.tokens + statistics.tokens)
        if state.rank == 0:
            print(f"step {position.step} loss {statistics.loss:.6f} grad norm {statistics.grad_norm:.4f}", flush=True)

    directory = step_folder(checkpoints, position.step)
    if directory != newest:
        engine.save(directory, position, corpus.fingerprint)


if __name__ == "__main__":
    main(sys.argv[1:])
    leave_world()
