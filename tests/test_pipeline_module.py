"""Pipelines of arbitrary layers: any cut is the same model, with the same names, weights and results."""

import itertools

import pytest
import torch
from harness import run_world
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from megazero.deepspeed.layer_specs import LayerSpec, TiedLayerSpec, partition_balanced
from megazero.deepspeed.pipeline_module import PipelineModule
from megazero.parallel_state import ParallelState, RankGrid

SEED = 77
VOCAB, WIDTH = 11, 6


class Draws(nn.Module):
    """Cannot be built on the meta device: it looks at its numbers."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size))
        self.scale = self.weight.detach().norm().item()

    def forward(self, x):
        return x + self.weight / self.scale


class Decoder(nn.Module):
    """Ties its `output.weight` to an embedding's `weight`, and has a bias of its own."""

    def __init__(self, vocab, width):
        super().__init__()
        self.output = nn.Linear(width, vocab)

    @property
    def shared_weight(self):
        return self.output.weight

    def forward(self, x):
        return self.output(x)


class Split(nn.Module):
    """Takes one tensor and returns two; the next layer gets the pair."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return x, self.linear(x)


def as_logits(embedding, x):
    return x @ embedding.weight.T


def run(module, x):
    return module(x)


def plain_specs():
    return [
        LayerSpec(nn.Linear, 4, WIDTH),
        torch.tanh,
        LayerSpec(Draws, WIDTH),
        LayerSpec(Split, WIDTH),
        lambda pair: pair[0] + pair[1],
        LayerSpec(nn.LayerNorm, WIDTH),
        LayerSpec(nn.Linear, WIDTH, 20),
        LayerSpec(nn.Linear, 20, 3),
    ]


def tied_specs():
    return [
        TiedLayerSpec("embed", nn.Embedding, VOCAB, WIDTH),
        LayerSpec(nn.Linear, WIDTH, WIDTH),
        LayerSpec(nn.Linear, WIDTH, WIDTH),
        TiedLayerSpec("embed", nn.Embedding, VOCAB, WIDTH, forward_fn=as_logits),
    ]


# ---- partitions


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_a_balanced_partition_has_the_lightest_heaviest_part_of_all(data):
    weights = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=8))
    parts = data.draw(st.integers(1, len(weights)))
    cuts = [
        [sum(weights[a:b]) for a, b in itertools.pairwise((0, *borders, len(weights)))]
        for borders in itertools.combinations(range(1, len(weights)), parts - 1)
    ]
    found = partition_balanced(weights, parts)
    assert list(itertools.chain(*found)) == list(range(len(weights)))
    assert len(found) == parts
    assert all(found)
    sums = [sum(weights[i] for i in part) for part in found]
    best = min(map(max, cuts))
    assert max(sums) == best


def virtual(layers, stages, **keywords):
    """A pipeline of several virtual stages on this one rank."""
    keywords = {"base_seed": SEED, "schedule": "interleaved", "virtual_stages": stages} | keywords
    return PipelineModule(layers, 1, **keywords)


def test_methods_cut_by_what_they_name():
    """Parameters of `plain_specs`: 30, 0, 6, 42, 0, 12, 140, 63."""

    def cut(method):
        return virtual(plain_specs(), 2, partition_method=method).partition

    assert cut("uniform") == [range(4), range(4, 8)]
    assert cut("parameters") == [range(6), range(6, 8)]
    assert cut("type:^linear$") == cut("type:LINEAR") == [range(1), range(1, 8)]
    assert cut("type:draws|split") == [range(3), range(3, 8)]
    assert cut(r"type:^layer\S+|tanh") == [range(2), range(2, 8)]


# ---- weights and names


def test_building_leaves_the_global_generator_alone():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    virtual([*plain_specs(), *tied_specs()], 3)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_rank_builds_no_layer_of_another_stage():
    """Under "uniform" nothing is built for its size either."""

    def body(rank):
        built = []

        class Counted(nn.Linear):
            def __init__(self, index):
                super().__init__(2, 2)
                built.append(index)

        PipelineModule([LayerSpec(Counted, i) for i in range(4)], 2, partition_method="uniform")
        return built

    assert run_world(2, body) == [[0, 1], [2, 3]]


# ---- tied layers


def test_copies_of_tied_weights_start_equal_and_are_told():
    """Of an attribute that has another name in each; what is not tied is each layer's own."""
    decoder = TiedLayerSpec("embed", Decoder, VOCAB, WIDTH, forward_fn=run, tied_weight_attr="shared_weight")

    def body(rank):
        module = PipelineModule(
            [*tied_specs()[:3], decoder], topology=RankGrid(pp=2), base_seed=SEED, partition_method="uniform"
        )
        (chunk,) = module.chunks
        held = {chunk.canonical_names[name]: p.detach().numpy() for name, p in chunk.named_parameters()}
        return module.tied_copies, module.holders("layers.0.weight"), held

    torch.manual_seed(SEED)
    drawn = nn.Embedding(VOCAB, WIDTH).weight
    for copies, holders, held in run_world(2, body):
        assert (copies, holders) == ({"layers.0.weight": (0, 1)}, (0, 1))
        assert torch.equal(torch.from_numpy(held.pop("layers.0.weight")), drawn)
        own = ({"layers.1.weight", "layers.1.bias"}, {"layers.2.weight", "layers.2.bias", "layers.3.output.bias"})
        assert set(held) in own


# ---- running


def test_activation_checkpoints_recompute_so_many_layers_at_a_time():
    runs = []

    def counted(index):
        def layer(x):
            runs.append(index)
            return x.exp()

        return layer

    module = PipelineModule([counted(i) for i in range(5)], 1, activation_checkpoint_interval=2)
    (y,) = module.chunks[0]((torch.zeros(2, requires_grad=True),))
    assert runs == [0, 1, 2, 3, 4]
    y.sum().backward()
    # a group is recomputed as far as its saved tensors need, and groups come last to first
    assert runs[5:] == [4, 2, 3, 0, 1]
    runs.clear()
    with torch.no_grad():
        module.chunks[0]((torch.zeros(2),))
    assert runs == [0, 1, 2, 3, 4]


# ---- errors


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"num_stages": 3}, "num_stages=3 must divide the world of 1 ranks; the nearest is 1"),
        ({"partition_method": "parameter"}, "'parameter' is unknown; did you mean parameters"),
        ({"partition_method": "type:transformer"}, "matches none of the layers, which are Linear, tanh, Draws"),
        ({"schedule": "interleaved", "virtual_stages": 9}, "8 layers are too few for 9 virtual stages"),
        ({"parallel_state": ParallelState(RankGrid()), "num_stages": 2}, "num_stages=2, but the parallel_state has 1"),
    ],
)
def test_numbers_and_names_that_do_not_fit_are_told(keywords, message):
    with pytest.raises(ValueError, match=message):
        PipelineModule(plain_specs(), **({"num_stages": 1} | keywords))


def test_layers_that_share_parameters_without_a_key_are_refused():
    embedding, head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
    head.weight = embedding.weight
    with pytest.raises(ValueError, match=r"layers 0 and 2 share 'weight'.* TiedLayerSpec"):
        PipelineModule([embedding, nn.ReLU(), head], 1)
    relu = nn.ReLU()
    assert PipelineModule([relu, relu], 1)(torch.tensor([-1.0])) == 0
