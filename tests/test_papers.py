"""The papers' tables, number by number, and ours where the terms are shared."""

from __future__ import annotations

import os

import torch
from activation_formula import block_bytes, micro_batch_size

from megazero.config import load_config
from megazero.engine.outline import stages_of
from megazero.models.activation_config import LayerPolicy


def test_our_gpt_keeps_the_papers_layer_less_the_scores_and_more_of_what_flash_needs() -> None:
    """Korthikanti et al. 2022, table 2: 34 bytes a token and hidden unit: attention 11 (input 2, q k 4, v 2, output 2, mask
    1), MLP 19 (2, 8, 8, 1) and two norms 4.  Ours keeps the same but the scores; mean, 1 / std, log-sum-exp are few."""
    case = (
        "model.family=gpt2 model.hidden_size=256 model.num_heads=4 model.num_layers=1 model.vocab_size=256 "
        "model.seq_len=128 training.micro_batch_size=2 model.dropout=0.1 precision.dtype=bf16"
    )
    run = load_config(os.devnull, case.split(), 1)
    (stage,) = stages_of(run.config)
    size = micro_batch_size(run, on_cuda=True)
    kept = block_bytes(stage.blocks[0], LayerPolicy(), size)
    tokens, hidden = size.tokens, 256
    few = {name: kept.pop(name) for name in list(kept) if name.startswith(("1 / rms", "log-sum-exp"))}
    assert sum(kept.values()) == 34 * tokens * hidden
    assert sum(few.values()) == tokens * (2 * 2 * 4 + 4 * 4)
    assert size.itemsize == torch.bfloat16.itemsize
