"""Random numbers are a function of (key, index): equal however they are sliced, and as good as independent draws."""

import itertools
from math import sqrt
from statistics import NormalDist

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megazero.layers.counter_rng import derive_key, keep_mask, normal, random_bits

WORD = (1 << 64) - 1
GOLDEN, MIX_1, MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB

keys = st.integers(-(2**63), 2**63 - 1)


def splitmix64(state: int) -> int:
    """The finaliser of Steele, Lea, Flood 2014 in Python's unbounded integers."""
    z = state & WORD
    z = (z ^ z >> 30) * MIX_1 & WORD
    z = (z ^ z >> 27) * MIX_2 & WORD
    return z ^ z >> 31


def index_of_word(word: int, key: int) -> int:
    """The index at which `key` draws `word`: splitmix64 run backwards."""

    def unshift(z: int, bits: int) -> int:
        return z ^ z >> bits ^ z >> 2 * bits  # enough terms, as 3 * bits > 64

    z = unshift(word, 31) * pow(MIX_2, -1, 1 << 64) & WORD
    z = unshift(z, 27) * pow(MIX_1, -1, 1 << 64) & WORD
    return signed((unshift(z, 30) - key) * pow(GOLDEN, -1, 1 << 64))


def signed(word: int) -> int:
    word &= WORD
    return word - (1 << 64) if word >> 63 else word


def exact_normal(word: int) -> float:
    """Inversion in double precision: 53 bits of tail probability, one of sign."""
    quantile = NormalDist().inv_cdf((word >> 11 | 1) * 2.0**-54)
    return -quantile if word & 1 else quantile


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a.double(), b.double()]))[0, 1])


# ---- one number per (key, index)


@given(key=keys, index=st.integers(0, 2**63 - 1))
def test_words_of_any_key_and_index_follow_the_paper(key, index):
    assert int(random_bits(key, torch.tensor(index))) & WORD == splitmix64(key + index * GOLDEN)


@settings(deadline=None)
@given(key=keys, first=st.integers(0, 2**48), size=st.integers(1, 600), data=st.data())
def test_a_slice_draws_what_the_whole_draws_there(key, first, size, data):
    low = data.draw(st.integers(0, size))
    high = data.draw(st.integers(low, size))
    index = torch.arange(first, first + size)
    for draw in (random_bits, normal, lambda key, index: keep_mask(key, index, 0.3)):
        assert torch.equal(draw(key, index)[low:high], draw(key, index[low:high].clone()))


def test_shape_order_and_strides_of_the_indices_leave_no_trace():
    whole = normal(5, torch.arange(1200))
    grid = torch.arange(1200).view(30, 40)
    assert torch.equal(normal(5, grid), whole.view(30, 40))
    assert torch.equal(normal(5, grid.t()), whole.view(30, 40).t())
    assert torch.equal(normal(5, grid[::3, 1::7]), whole.view(30, 40)[::3, 1::7])
    shuffle = torch.randperm(1200, generator=torch.Generator().manual_seed(0))
    assert torch.equal(normal(5, shuffle), whole[shuffle])
    assert torch.equal(normal(5, torch.tensor(7)), whole[7])


def test_keys_differ_for_every_seed_and_name():
    drawn = {derive_key(seed, name) for seed in range(-20, 200) for name in ("", "0", "a", "b", "a.b", "layers.0.w")}
    assert len(drawn) == 220 * 6
    assert all(-(2**63) <= key < 2**63 for key in drawn)
    assert derive_key(1, "2.w") != derive_key(12, ".w")


# ---- the normal law


def test_numbers_are_the_inverse_of_the_normal_law():
    """Within the stated 4e-6 (and fp32 rounding), over random words."""
    key = derive_key(3, "inverse")
    drawn = normal(key, torch.arange(4000)).tolist()
    for index, value in enumerate(drawn):
        exact = exact_normal(splitmix64(key + index * GOLDEN))
        assert abs(value - exact) < 4e-6 + 1e-7 * abs(exact)


def test_the_inverse_holds_at_every_octave_and_at_both_ends_of_the_law():
    """Words are chosen: the smallest and the largest tail, and both sides of every octave of the table."""
    tails = {1, 2**53 - 1} | {2**power + step for power in range(2, 53) for step in (-1, 1)}
    words = [tail << 11 | sign for tail in sorted(tails) for sign in (0, 1)] + [0, WORD]
    key = derive_key(0, "ends")
    index = [index_of_word(word, key) for word in words]
    assert [word & WORD for word in random_bits(key, torch.tensor(index)).tolist()] == words
    for word, value in zip(words, normal(key, torch.tensor(index)).tolist(), strict=True):
        exact = exact_normal(word)
        assert abs(value - exact) < 4e-6 + 1e-6 * abs(exact)


@pytest.mark.parametrize("first", [0, 2**40])
def test_the_kolmogorov_smirnov_distance_is_that_of_a_normal_sample(first):
    count = 1 << 19
    ordered = normal(derive_key(2, "ks"), torch.arange(first, first + count)).double().sort().values
    law = torch.special.ndtr(ordered)
    steps = torch.arange(count + 1, dtype=torch.float64) / count
    distance = max(float((steps[1:] - law).max()), float((law - steps[:-1]).max()))
    assert distance * sqrt(count) < 1.63  # exceeded by 1 % of samples


# ---- independence


def test_seeds_and_names_are_uncorrelated():
    index = torch.arange(1 << 16)
    keys = [derive_key(seed, name) for seed in range(3) for name in ("a", "b", "layers.0", "layers.1")]
    drawn = torch.stack([normal(key, index) for key in keys])
    for power in (1, 2):
        between = torch.corrcoef(drawn**power).fill_diagonal_(0)
        assert float(between.abs().max()) < 4 / sqrt(len(index))


@pytest.mark.parametrize("lag", [1, 2, 3, 16, 1024, 4097, 2**32])
def test_neighbours_at_any_distance_are_uncorrelated(lag):
    index, key = torch.arange(1 << 18), derive_key(0, "lags")
    a, b = normal(key, index), normal(key, index + lag)
    assert abs(correlation(a, b)) < 4 / sqrt(len(index))
    assert abs(correlation(a**2, b**2)) < 4 / sqrt(len(index))


def test_a_flipped_index_bit_flips_each_output_bit_half_of_the_time():
    count = 4096
    index = torch.randint(-(2**63), 2**63 - 1, (count,), generator=torch.Generator().manual_seed(0))
    words = random_bits(derive_key(0, "avalanche"), index)
    for bit in range(64):
        changed = words ^ random_bits(derive_key(0, "avalanche"), index ^ signed(1 << bit))
        share = torch.stack([(changed >> out & 1).double().mean() for out in range(64)])
        assert abs(float(share.mean()) - 0.5) < 0.01
        assert float((share - 0.5).abs().max()) < 5.5 * 0.5 / sqrt(count)


# ---- dropout masks


@pytest.mark.parametrize("drop", [0.01, 0.1, 0.5, 0.9])
def test_a_mask_keeps_its_share(drop):
    count = 1 << 20
    kept = float(keep_mask(derive_key(0, "drop"), torch.arange(count), drop).double().mean())
    assert abs(kept - (1 - drop)) < 4 * sqrt(drop * (1 - drop) / count)


def test_no_dropout_keeps_everything():
    assert keep_mask(derive_key(0, "drop"), torch.arange(1 << 16), 0.0).all()


def test_a_higher_drop_probability_only_drops_more():
    index, key = torch.arange(1 << 16), derive_key(0, "drop")
    masks = [keep_mask(key, index, drop) for drop in (0.1, 0.3, 0.7)]
    assert all((smaller <= larger).all() for larger, smaller in itertools.pairwise(masks))


def test_masks_of_two_steps_are_uncorrelated():
    index = torch.arange(1 << 18)
    one, other = (keep_mask(derive_key(0, f"drop/{step}"), index, 0.5) for step in (1, 2))
    assert abs(correlation(one, other)) < 4 / sqrt(len(index))
