"""The quickstart made small: what tests of the command share."""

from pathlib import Path

ROOT = Path(__file__).parent.parent
QUICKSTART = ROOT / "examples" / "quickstart.toml"
TINY = [
    "model.hidden_size=32",
    "model.num_layers=2",
    "model.ffn_hidden_size=64",
    "model.seq_len=32",
    "training.global_batch_size=8",
    "training.eval_every_steps=0",
    "training.compile=false",  # it takes a GPU half a minute
    "logging.tensorboard=false",
]
ONE_STAGE = ["parallel.tp=1", "parallel.pp=1"]
