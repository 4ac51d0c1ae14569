"""Whether the best learning rate of a narrow model is that of a wide one (muP), on the quickstart's text.

python tests/mup.py        # the table of docs/recipes.md: widths 64 to 512, in about an hour on two cores
"""

from collections.abc import Sequence
from tempfile import TemporaryDirectory

from quickstart import ONE_STAGE, QUICKSTART, TINY

from megazero.config import load_config
from megazero.parallel_state import ParallelState, RankGrid
from megazero.training.trainer import train

INIT_STD = 0.1  # at the base width


def best_of(width: int, base: int, exponents: Sequence[int], steps: int, seq_len: int, *, mup: bool) -> int:
    """The exponent of 2 of the best peak rate, by validation loss; without muP every initial variance is 1 / width."""
    words = [*TINY, *ONE_STAGE, f"model.hidden_size={width}", f"model.ffn_hidden_size={width * 11 // 4}"]
    words += [
        "model.num_kv_heads=4",
        f"model.seq_len={seq_len}",
        "lr_schedule.name=linear",
        "lr_schedule.warmup_steps=8",
    ]
    words += [f"training.steps={steps}", f"training.eval_every_steps={steps}", f"checkpoint.save_every_steps={steps}"]
    own = [f"model.mup_base_width={base}", f"model.mup_base_head_dim={base // 4}", f"model.init_std={INIT_STD}"]
    words += own if mup else [f"model.init_std={INIT_STD * (base / width) ** 0.5}"]
    losses: dict[int, float] = {}
    for exponent in exponents:
        with TemporaryDirectory() as folder:
            run = load_config(QUICKSTART, [*words, f"optimizer.lr={2.0**exponent}", f"training.run_dir={folder}"], 1)
            losses[exponent] = train(run, ParallelState(RankGrid()), lambda _: None).val_loss or 0.0
    print(width, "muP" if mup else "none", losses, flush=True)
    return min(losses, key=losses.__getitem__)


if __name__ == "__main__":
    for mup in (True, False):
        print([best_of(width, 64, range(-11, -4), 80, 128, mup=mup) for width in (64, 128, 256, 512)])
