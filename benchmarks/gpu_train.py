"""`megazero train` as a user starts it: what passes between its steps, and what hides exchanges over tp.

python -m benchmarks.gpu_train                          one rank
python -m benchmarks.gpu_train --ranks 2                tp 2 with sequence parallelism: each `parallel.tp_overlap`
python -m benchmarks.gpu_train --device cpu             in small: does it run at all?

step | callbacks, logs | step | ...      a step's time is that of metrics.jsonl, the rest lies between two steps
"""

from __future__ import annotations

import argparse
import json
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from benchmarks.report import markdown, write_whole
from megazero.config import load_config
from megazero.training.callbacks.base import Callback, RunContext, StepRecord
from megazero.training.callbacks.registry import CALLBACKS
from megazero.training.launch import Failed, run_ranks, train_rank
from megazero.training.signals import StopRequest

QUICKSTART = Path(__file__).parents[1] / "examples" / "quickstart.toml"
COMMON = (
    f"launch.extensions=['{__file__}'] training.callbacks=['clock'] parallel.pp=1 training.eval_every_steps=0 "
    "checkpoint.save_every_steps=0 logging.tensorboard=false"
)
SIZES = {
    "cuda": "model.hidden_size=4096 model.num_layers=4 model.num_heads=32 model.num_kv_heads=8 model.ffn_hidden_size=14336 "
    "model.seq_len=8192 precision.dtype=bf16 training.global_batch_size=4 training.micro_batch_size=1 training.steps=10",
    "cpu": "model.hidden_size=32 model.num_layers=1 model.ffn_hidden_size=64 model.seq_len=32 training.global_batch_size=4 "
    "training.compile=false training.steps=4",
}
FIRST_STEPS = 2  # that are not counted
TOLERANCE = 2e-2  # of losses, in bf16


class Clock(Callback):
    """Writes when each step was done."""

    def __init__(self, _: RunContext) -> None:
        pass

    def after_step(self, record: StepRecord) -> None:
        record.metrics["clock"] = time.perf_counter()


CALLBACKS.register("clock", Clock)


def trained(words: list[str], ranks: int) -> dict[str, float]:
    """Train, and give milliseconds of a step and between two, tokens per second and the last loss."""
    with TemporaryDirectory() as folder:
        run = load_config(QUICKSTART, [*words, f"training.run_dir={folder}/run"], ranks)
        summary = run_ranks(run, partial(train_rank, stop=StopRequest()))
        if isinstance(summary, Failed):
            raise SystemExit(summary.status)
        lines = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    counted = lines[FIRST_STEPS:]
    between = [after["clock"] - before["clock"] - after["step_seconds"] for before, after in pairwise(counted)]
    return {
        "step": 1e3 * median(line["step_seconds"] for line in counted),
        "between": 1e3 * median(between),
        "tokens_per_second": median(line["tokens_per_second"] for line in counted),
        "loss": lines[-1]["loss"],
    }


def main() -> None:
    """Train each variant, print a table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--device", choices=SIZES, default="cuda")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    words = [*COMMON.split(), *SIZES[given.device].split(), f"launch.device={given.device}"]
    words += [f"parallel.tp={given.ranks}", f"launch.nproc_per_node={given.ranks}"]
    words += [f"parallel.sequence_parallel={str(given.ranks > 1).lower()}"]
    overlaps = ("none", "pieces", "symmetric") if given.ranks > 1 else ("none",)
    found = {name: trained([*words, f"parallel.tp_overlap={name}"], given.ranks) for name in overlaps}
    losses = [one["loss"] for one in found.values()]
    if max(losses) - min(losses) > TOLERANCE:
        raise SystemExit(f"the losses differ: {found}")
    heads = ("tp_overlap", "step ms", "between steps ms", "tokens/s", "loss")
    rows = [(name, *(f"{value:,.4g}" for value in one.values())) for name, one in found.items()]
    print(markdown(heads, rows))
    if given.out is not None:
        write_whole(given.out, json.dumps({"ranks": given.ranks, "variants": found}) + "\n")


if __name__ == "__main__":
    main()
