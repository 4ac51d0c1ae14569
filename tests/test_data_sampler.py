"""The order of samples: shuffles are bijections, blends keep their shares, and everything is f(seed, index)."""

from fractions import Fraction
from math import ceil, log2

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megazero.data.corpus import ValidationStream, split
from megazero.data.sampler import Blend, Permutation, SampleStream, Windows

# ---- Permutation


@given(size=st.integers(1, 300), key=st.lists(st.integers(0, 2**80), max_size=3))
def test_any_size_and_key_is_a_bijection(size, key):
    assert sorted(Permutation(size, key)(np.arange(size)).tolist()) == list(range(size))


@pytest.mark.parametrize("bits", [10, 17, 40])
def test_every_output_bit_depends_on_every_input_bit(bits):
    """Strict avalanche: a flipped input bit flips each output bit half of the time, downwards as well as upwards."""
    inputs = np.random.default_rng(0).integers(0, 2**bits, 400)
    flips = np.zeros((bits, bits))
    keys = range(8)
    for key in keys:
        shuffle = Permutation(2**bits, (key,))
        for bit in range(bits):
            changed = shuffle(inputs) ^ shuffle(inputs ^ (1 << bit))
            flips[bit] += [np.mean(changed >> out & 1) for out in range(bits)]
    flips /= len(keys)
    assert flips.min() > 0.4
    assert flips.max() < 0.6


def test_keys_give_different_orders_which_meet_only_by_chance():
    orders = [Permutation(5000, key)(np.arange(5000)) for key in ((0,), (1,), (0, 1), (0, 0, 1), (1, 0))]
    for i, one in enumerate(orders):
        for other in orders[:i]:
            assert np.sum(one == other) < 12  # Poisson with mean 1


def test_sizes_beyond_memory_are_evaluated_in_range_and_shapes_are_kept():
    size = 3 * 10**15
    values = Permutation(size, (1,))(np.array([[0, 1, size - 1]]))
    assert values.shape == (1, 3)
    assert ((values >= 0) & (values < size)).all()
    assert len(set(values.ravel().tolist())) == 3


# ---- Blend


def tolerance(weights):
    """Half a sample for each level of the tree of sources."""
    return ceil(log2(len(weights))) / 2


WEIGHTS = st.lists(st.one_of(st.integers(1, 1000), st.floats(1e-6, 1e6)), min_size=1, max_size=9)


@pytest.mark.slow
@given(weights=WEIGHTS)
def test_shares_stay_within_the_bound_and_indices_have_no_gap(weights):
    source, within = Blend(weights).locate(np.arange(500))
    total, bound = sum(Fraction(weight) for weight in weights), tolerance(weights) + 1e-3
    seen = [0] * len(weights)
    for n, (number, index) in enumerate(zip(source.tolist(), within.tolist(), strict=True), start=1):
        assert index == seen[number]
        seen[number] += 1
        assert Blend(weights).counts(n) == seen
        for count, weight in zip(seen, weights, strict=True):
            assert abs(count - n * Fraction(weight) / total) <= bound


def test_decimals_are_what_they_are_written_as():
    assert Blend([0.1, 0.2, 0.7]).weights == (1, 2, 7)
    assert Blend([2.5e-3, 1]).weights == (1, 400)
    assert Blend([10]).weights == (1,)


@given(weights=WEIGHTS, start=st.integers(0, 10**15))
def test_far_along_a_run_the_shares_still_hold(weights, start):
    blend = Blend(weights)
    source, within = blend.locate(np.arange(start, start + 50))
    whole = sum(blend.weights)
    for i, (number, index) in enumerate(zip(source.tolist(), within.tolist(), strict=True)):
        assert abs(index - Fraction((start + i) * blend.weights[number], whole)) <= tolerance(weights) + 1


@pytest.mark.parametrize("weights", [[0], [1, -1], [float("nan")], [float("inf"), 1]])
def test_weights_that_are_no_shares_are_refused(weights):
    with pytest.raises(ValueError, match="must be positive and finite"):
        Blend(weights)


# ---- Windows and split


def test_samples_share_one_token_and_predict_every_target_once():
    windows = Windows.over(np.arange(14, dtype=np.uint16), seq_len=4)
    assert windows.count == 3
    expected = [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8], [8, 9, 10, 11, 12]]
    assert [windows.read(position).tolist() for position in range(3)] == expected
    assert ValidationStream([windows]).batch([0]).dtype == np.int64
    assert Windows.over(np.arange(13), 4).count == 3
    assert Windows.over(np.arange(12), 4).count == 2


def test_a_source_shorter_than_a_sample_is_refused_with_the_numbers():
    assert Windows.over(np.arange(5), 4).count == 1
    with pytest.raises(ValueError, match=r"wiki holds 4 tokens, fewer than one sample of seq_len \+ 1 = 5"):
        Windows.over(np.arange(4), 4, "wiki")


@given(count=st.integers(2, 60), percent=st.integers(1, 99))
def test_the_split_is_the_last_part_and_no_target_is_on_both_sides(count, percent):
    windows = Windows.over(np.arange(3 * count + 1), 3)
    held_out = count * percent // 100
    if held_out == 0:
        with pytest.raises(ValueError, match=f"leaves none of .*s {count} windows for validation.*1/{count}"):
            split(windows, percent / 100)
        return
    training, validation = split(windows, percent / 100)
    assert (training.count, validation.count) == (count - held_out, held_out)
    targets = [
        [target for position in range(side.count) for target in side.read(position)[1:].tolist()]
        for side in (training, validation)
    ]
    assert targets[0] + targets[1] == list(range(1, 3 * count + 1))


def test_no_fraction_means_no_validation_and_others_are_refused():
    windows = Windows.over(np.arange(9), 4)
    assert split(windows, 0) == (windows, None)
    with pytest.raises(ValueError, match="two windows at least"):
        split(Windows.over(np.arange(5), 4), 0.5)


# ---- Streams


def sources() -> list[Windows]:
    return [
        Windows.over(np.arange(41, dtype=np.uint16), 4),  # 10 windows
        Windows.over(np.arange(1000, 1029, dtype=np.int32), 4),  # 7 windows
        Windows(np.arange(5000, 5100), 4, first=3, count=5),
    ]


def stream(seed: int = 1, weights=(0.5, 0.3, 0.2)) -> SampleStream:
    return SampleStream(sources(), weights, seed)


def test_a_batch_is_a_function_of_seed_and_index():
    indices = np.random.default_rng(0).integers(0, 10_000, 64)
    together = stream().batch(indices)
    assert together.shape == (64, 5)
    assert together.dtype == np.int64
    again = stream()
    one_by_one = np.concatenate([again.batch([i]) for i in indices[::-1]])[::-1]
    assert (together == one_by_one).all()
    assert not (together == stream(seed=2).batch(indices)).all()


def test_every_epoch_of_every_source_has_each_window_once_in_another_order():
    source, window = stream().locate(np.arange(400))
    for number, count in enumerate([10, 7, 5]):
        mine = window[source == number]
        epochs = mine[: len(mine) // count * count].reshape(-1, count)
        assert len(epochs) > 10
        assert (np.sort(epochs, axis=1) == np.arange(count)).all()
        assert len({tuple(epoch) for epoch in epochs.tolist()}) > len(epochs) * 0.8


def test_two_sources_of_one_size_are_shuffled_differently():
    same = [Windows.over(np.arange(401), 4)] * 2
    source, window = SampleStream(same, [1, 1], 0).locate(np.arange(200))
    assert window[source == 0].tolist() != window[source == 1].tolist()


def test_samples_hold_the_tokens_of_the_window_that_was_located():
    source, window = stream().locate(range(50))
    bases = np.array([0, 1000, 5000 + 3 * 4])
    expected = (bases[source] + 4 * window)[:, None] + np.arange(5)
    assert (stream().batch(range(50)) == expected).all()
    assert (stream().num_windows, stream().seq_len) == (22, 4)
    assert stream().batch([]).shape == (0, 5)


def test_validation_reads_each_window_once_in_order_and_every_prefix_is_a_fair_cut():
    validation = ValidationStream(sources())
    assert len(validation) == 22
    source, window = validation.locate(range(22))
    for number, count in enumerate([10, 7, 5]):
        assert window[source == number].tolist() == list(range(count))
        assert abs(np.sum(source[:11] == number) - count / 2) <= 1
    assert len(np.unique(validation.batch(range(22))[:, 0])) == 22


def test_indices_and_sources_that_make_no_sense_are_refused():
    with pytest.raises(IndexError, match="-1 is negative"):
        stream().batch([0, -1])
