"""Cut over TP and fused layout leave no trace: every logical element is held once and drawn the same."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megazero.layers import spec as spec_module
from megazero.layers.counter_rng import derive_key, normal
from megazero.layers.spec import (
    Initializer,
    NamedRows,
    ParamSpec,
    StoredNames,
    bias_spec,
    expert_spec,
    rows_spec,
    vector_spec,
)

FUSED = rows_spec((NamedRows("q", 12), NamedRows("k", 4), NamedRows("v", 4)), columns=6, split=0)
SECTIONS = (NamedRows("c_attn", 8, 0, 24), NamedRows("c_attn", 8, 8, 24), NamedRows("c_attn", 8, 16, 24))
EXPERTS = StoredNames((NamedRows("experts", 4),))
SPECS = {
    "fused q|k|v": FUSED,
    "three sections of one transposed tensor": rows_spec(SECTIONS, columns=5, split=0, transposed=True),
    "columns cut": rows_spec((NamedRows("o_proj", 7),), columns=24, split=1),
    "columns cut, transposed": rows_spec((NamedRows("c_proj", 7),), columns=24, split=1, transposed=True),
    "columns cut, two sections": rows_spec((NamedRows("a", 3), NamedRows("b", 2)), columns=12, split=1),
    "every rank holds it": rows_spec((NamedRows("wpe", 9),), columns=4, init=Initializer(std=0.5)),
    "rows that do not divide": rows_spec((NamedRows("wte", 13),), columns=3, split=0, tied=True),
    "fused rows that do not divide": rows_spec(
        (NamedRows("a", 7), NamedRows("b", 5), NamedRows("c", 1)), columns=2, split=0
    ),
    "fused bias": bias_spec(FUSED, (NamedRows("q.b", 12), NamedRows("k.b", 4), NamedRows("v.b", 4))),
    "bias of a transposed weight": replace(
        bias_spec(rows_spec(SECTIONS, columns=5, split=0, transposed=True), SECTIONS), init=Initializer("normal")
    ),
    "norm": vector_spec("norm", 11, Initializer("ones")),
    "vector that does not divide": rows_spec((NamedRows("bias", 10),), None, 0, Initializer("ones")),
    "matrices of experts, cut by rows": ParamSpec(EXPERTS, (4, 24, 5), (None, "tp", None)),
    "matrices of experts, cut by columns": ParamSpec(EXPERTS, (4, 5, 24), (None, None, "tp")),
    "experts that are dealt": expert_spec(
        [(NamedRows(f"{expert}.gate", 3), NamedRows(f"{expert}.up", 2)) for expert in range(12)], columns=4
    ),
    "experts that are cut": ParamSpec(EXPERTS, (4, 3, 5), ("tp", None, None)),
}
SIZES = (1, 2, 3, 4, 6)

every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
every_size = pytest.mark.parametrize("tp_size", SIZES)


def stored(spec: ParamSpec, seed: int) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors: element i of a tensor is a function of (seed, name, i) alone."""
    shapes = {}
    for section in spec.names.rows:
        shape = (section.logical_rows or section.rows, *spec.shape[1:])
        shapes[section.name] = shape[::-1] if spec.names.transposed else shape
    tensors = {}
    for name, shape in shapes.items():
        count = torch.Size(shape).numel()
        if spec.init.method == "normal":
            tensors[name] = (normal(derive_key(seed, name), torch.arange(count)) * spec.init.std).view(shape)
        else:
            tensors[name] = torch.full(shape, float(spec.init.method == "ones"))
    return tensors


def held(spec: ParamSpec, tensors: dict[str, torch.Tensor], tp_rank: int, tp_size: int) -> torch.Tensor:
    """What a rank must hold: each section's rows, cut and padded with zeros, one under the other."""
    parts = []
    each = len(spec.names.rows) // tp_size
    dealt = spec.names.rows[tp_rank * each : (tp_rank + 1) * each]
    for section in dealt if spec.of_experts else spec.names.rows:
        tensor = tensors[section.name]
        rows = (tensor.t() if spec.names.transposed else tensor)[section.offset : section.offset + section.rows]
        if spec.split:
            rows = rows.chunk(tp_size, dim=spec.split)[tp_rank]
        elif spec.split == 0 and not spec.of_experts:
            height = (section.rows + tp_size - 1) // tp_size
            padded = torch.cat([rows, rows.new_zeros(height * tp_size - section.rows, *rows.shape[1:])])
            rows = padded[height * tp_rank : height * (tp_rank + 1)]
        parts.append(rows)
    return torch.cat(parts)


def drawn(spec: ParamSpec, tp_rank: int, tp_size: int, seed: int = 7) -> torch.Tensor:
    shape = spec.local_shape(tp_size)
    out = torch.full((torch.Size(shape).numel(),), torch.nan)
    spec.init_weights(out, 0, tp_rank, tp_size, seed)
    return out.view(shape)


@every_spec
@every_size
def test_the_blocks_of_all_ranks_cover_every_logical_element_once(spec, tp_size):
    counts = {name: torch.zeros_like(tensor) for name, tensor in stored(spec, 0).items()}
    for tp_rank in range(tp_size):
        for block in spec.regions(tp_rank, tp_size):
            count = counts[block.name].t() if block.transposed else counts[block.name]
            assert tuple(count.shape) == block.whole
            assert count[block.box].shape == block.shape
            count[block.box] += 1
    copies = tp_size if spec.split is None else 1
    assert all((count == copies).all() for count in counts.values())


@every_spec
@every_size
def test_what_a_rank_draws_is_its_part_of_the_logical_tensors(spec, tp_size):
    """For any tp, hence also what tp = 1 draws; padding is zero."""
    tensors = stored(spec, 7)
    for tp_rank in range(tp_size):
        assert torch.equal(drawn(spec, tp_rank, tp_size), held(spec, tensors, tp_rank, tp_size))


@settings(deadline=None, max_examples=200)
@given(name=st.sampled_from(list(SPECS)), tp_size=st.sampled_from(SIZES), data=st.data())
def test_any_flat_range_draws_what_the_whole_draws_there(name, tp_size, data):
    spec = SPECS[name]
    tp_rank = data.draw(st.integers(0, tp_size - 1))
    whole = held(spec, stored(spec, 7), tp_rank, tp_size).flatten()
    start = data.draw(st.integers(0, whole.numel()))
    stop = data.draw(st.integers(start, whole.numel()))
    out = torch.full((stop - start,), torch.nan)
    spec.init_weights(out, start, tp_rank, tp_size, 7)
    assert torch.equal(out, whole[start:stop])


@every_spec
def test_the_number_of_elements_drawn_at_a_time_leaves_no_trace(spec, monkeypatch):
    whole = [drawn(spec, tp_rank, 3) for tp_rank in range(3)]
    monkeypatch.setattr(spec_module, "_DRAW_ELEMENTS", 5)
    assert all(torch.equal(drawn(spec, tp_rank, 3), whole[tp_rank]) for tp_rank in range(3))


@every_spec
def test_a_checkpoint_shape_is_the_logical_one_without_padding(spec):
    shapes = {name: tuple(tensor.shape) for name, tensor in stored(spec, 0).items()}
    assert spec.logical_shapes() == shapes


def test_biases_and_norms_never_decay_and_follow_the_cut_of_their_weight():
    for spec in (vector_spec("n", 4, Initializer("ones")), bias_spec(FUSED, (NamedRows("b", 20),))):
        assert (spec.decay, len(spec.shape), spec.names.transposed) == (False, 1, False)
    row_parallel = rows_spec((NamedRows("o", 6),), columns=8, split=1)
    assert bias_spec(FUSED, (NamedRows("b", 20),)).split == 0
    assert bias_spec(row_parallel, (NamedRows("b", 6),), sum_over_tp=True).split is None
    assert bias_spec(row_parallel, (NamedRows("b", 6),), sum_over_tp=True).sum_over_tp
    assert (drawn(bias_spec(FUSED, (NamedRows("b", 20),)), 1, 2) == 0).all()
