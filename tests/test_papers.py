"""The papers' tables, number by number, and ours where the terms are shared."""

from __future__ import annotations

import os

import pytest
import torch
from activation_formula import block_bytes, micro_batch_size
from state_formula import StateFormula

from megazero.config import load_config
from megazero.engine.outline import stages_of
from megazero.models.activation_config import LayerPolicy


def _formula(stage: int, shards: int) -> StateFormula:
    return StateFormula(
        stage, shards, weight_bytes=2, accumulate_bytes=4, reduce_bytes=4, moments=2, micro_batches=1,
        reduces_each=True, gathers_each=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("parameters", "dp", "by_stage"),
    [
        (7.5e9, 1, (120, 120, 120)),
        (7.5e9, 4, (52.5, 41.3, 30)),
        (7.5e9, 16, (35.6, 21.6, 7.5)),
        (7.5e9, 64, (31.4, 16.6, 1.88)),
        (7.5e9, 256, (30.4, 15.4, 0.47)),
        (7.5e9, 1024, (30.1, 15.1, 0.12)),
        (128e9, 64, (536, 284, 32)),
        (128e9, 1024, (514, 257, 2)),
        (1e12, 1024, (4011, 2013, 15.6)),
    ],
)
def test_model_state_is_that_of_table_1_of_zero_with_fp32_gradients(
    parameters: float, dp: int, by_stage: tuple[float, ...]
) -> None:
    """Rajbhandari et al. 2020, table 1, to the last digit that it prints: it rounds some numbers and cuts others off.

    2 + 2 + 12 bytes of the paper; a run adds gradients up in fp32: 2 bytes more of a whole gradient or of a shard.
    """
    for stage, printed in enumerate(by_stage, 1):
        digits = len(str(printed).partition(".")[2]) if printed != int(printed) else 0
        more = 2 * parameters / (dp if stage >= 2 else 1) / 1e9
        ours = _formula(stage, dp).state_bytes(int(parameters), offloads=False) / 1e9
        assert ours - more == pytest.approx(printed, abs=10**-digits)


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


def test_offloading_leaves_two_bytes_a_parameter_on_the_device() -> None:
    """Ren et al. 2021, section 3: 2M of 16M bytes stay."""
    assert _formula(2, 8).device_bytes(10**9, offloads=True) == 2e9
