"""Cutting a model into pipeline stages: every layer once, and no stage more than a layer larger than another."""

import itertools

import pytest

from megazero.models.config import ModelConfig
from megazero.models.registry import FAMILIES
from megazero.models.stages import cut, cut_by_cost, cut_evenly, head_cost_in_layers


def test_stages_cover_every_layer_once_in_order_and_their_sizes_differ_by_at_most_one():
    for layers in range(1, 41):
        for stages in range(1, layers + 1):
            cut = cut_evenly(layers, stages)
            sizes = [len(stage.layers) for stage in cut]
            assert list(itertools.chain(*(stage.layers for stage in cut))) == list(range(layers))
            assert max(sizes) - min(sizes) <= 1
            assert sizes == sorted(sizes, reverse=True)
            assert [stage.has_embedding for stage in cut] == [True] + [False] * (stages - 1)
            assert [stage.has_head for stage in cut] == [False] * (stages - 1) + [True]


@pytest.mark.parametrize(("layers", "stages"), [(0, 1), (3, 4), (12, 16)])
def test_more_stages_than_layers_is_an_error_with_both_numbers(layers, stages):
    with pytest.raises(ValueError, match=f"{stages} pipeline stages .* num_layers={layers}"):
        cut_evenly(layers, stages)


def test_a_cut_by_cost_has_the_cheapest_costliest_stage_of_all_cuts():
    """Against every way to cut, by brute force."""
    for layers in range(2, 9):
        for stages in range(1, min(layers, 4) + 1):
            for head in (0.0, 0.5, 2.0, 3.7):
                every = (
                    [b - a for a, b in itertools.pairwise((0, *borders, layers))]
                    for borders in itertools.combinations(range(1, layers), stages - 1)
                )
                best = min(max([*counts[:-1], counts[-1] + head]) for counts in every)
                found = [len(layout.layers) for layout in cut_by_cost(layers, stages, head)]
                assert sum(found) == layers
                assert max([*found[:-1], found[-1] + head]) == pytest.approx(best)


def test_the_heads_cost_is_its_multiplications_over_a_layers():
    """GPT-2 small by hand: 50304 * 768 over 12 * 768^2 and half of 1024 positions, twice."""
    model = FAMILIES["gpt2"].complete(
        ModelConfig(family="gpt2", hidden_size=768, num_layers=12, num_heads=12, vocab_size=50304, seq_len=1024)
    )
    assert head_cost_in_layers(model) == pytest.approx(50304 * 768 / (12 * 768**2 + 768 * 1024))


def test_a_written_layout_is_taken_as_it_is():
    model = FAMILIES["llama"].complete(ModelConfig(num_layers=9))
    layouts = cut(model, (("embed",), (5,), (4, "head")), 3)
    assert [list(layout.layers) for layout in layouts] == [[], [0, 1, 2, 3, 4], [5, 6, 7, 8]]
    assert [(layout.has_embedding, layout.has_head) for layout in layouts] == [
        (True, False),
        (False, False),
        (False, True),
    ]
    with pytest.raises(ValueError, match="has 9 layers in 2 stages"):
        cut(model, ((5,), (4,)), 3)
