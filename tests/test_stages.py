"""Cutting a model into pipeline stages: every layer once, and no stage more than a layer larger than another."""

import itertools

import pytest

from megazero.models.stages import cut_evenly

CUTS = [(layers, stages) for layers in range(1, 41) for stages in range(1, layers + 1)]


def test_stages_cover_every_layer_once_in_order():
    for layers, stages in CUTS:
        cut = cut_evenly(layers, stages)
        assert len(cut) == stages
        assert list(itertools.chain(*(stage.layers for stage in cut))) == list(range(layers))


def test_sizes_differ_by_at_most_one_and_the_surplus_comes_first():
    for layers, stages in CUTS:
        sizes = [len(stage.layers) for stage in cut_evenly(layers, stages)]
        assert max(sizes) - min(sizes) <= 1
        assert sizes == sorted(sizes, reverse=True)


def test_the_embedding_is_on_the_first_stage_and_the_head_on_the_last():
    for layers, stages in CUTS:
        cut = cut_evenly(layers, stages)
        assert [stage.has_embedding for stage in cut] == [True] + [False] * (stages - 1)
        assert [stage.has_head for stage in cut] == [False] * (stages - 1) + [True]


def test_ten_layers_in_four_stages_by_hand():
    assert [stage.layers for stage in cut_evenly(10, 4)] == [range(3), range(3, 6), range(6, 8), range(8, 10)]


@pytest.mark.parametrize(("layers", "stages"), [(0, 1), (3, 4), (12, 16)])
def test_more_stages_than_layers_is_an_error_with_both_numbers(layers, stages):
    with pytest.raises(ValueError, match=f"{stages} pipeline stages .* num_layers={layers}"):
        cut_evenly(layers, stages)
