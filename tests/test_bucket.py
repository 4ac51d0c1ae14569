"""Bucket layouts: each parameter once, shards even to the element, traits in contiguous runs."""

import dataclasses
import itertools
from collections.abc import Sequence
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megazero.layers.spec import NamedRows, rows_spec
from megazero.parallel_state import Axis
from megazero.zero.bucket import Bucket
from megazero.zero.bucket_plan import plan_buckets
from megazero.zero.sharding import ALONE, BucketLayout, Interval, ParamInfo, Placement, ShardingPolicy, StridedBlocks
from megazero.zero.storage import StateMemory

laws = settings(deadline=None, max_examples=75)
shapes = st.lists(st.integers(0, 9), min_size=1, max_size=2).map(tuple)
traits = st.tuples(st.integers(0, 2), st.sampled_from([0, 1, None]), st.booleans())


def parameter(
    index: int, shape: tuple[int, ...], unit: int = 0, tied: bool = False, trait=(0, 0, False), **more
) -> ParamInfo:
    """Parameter `index`; `trait` is (optimizer group, split, sum_over_tp)."""
    group, split, sum_over_tp = trait
    sections = (NamedRows(f"p{index}", shape[0]),)
    columns = shape[1] if len(shape) > 1 else None
    spec = rows_spec(sections, columns, split, sum_over_tp=sum_over_tp, tied=tied)
    return ParamInfo(f"p{index}", shape, spec, unit, group=group, **more)


def policy(zero_stage: int, axis: Axis, dtype: torch.dtype = torch.float32, replica_index: int = 0) -> ShardingPolicy:
    return ShardingPolicy(
        zero_stage, dtype, Placement(axis, Axis("replica", (0, 1), replica_index)), torch.device("cpu")
    )


@cache
def over(shards: int) -> Placement:
    return Placement(Axis("shard", tuple(range(shards))), Axis("replica"))


def planned(infos: Sequence[ParamInfo], shards: int, **plan) -> tuple[BucketLayout, ...]:
    """The buckets of parameters that all have so many shards."""
    placement = over(shards)
    return plan_buckets([dataclasses.replace(info, placement=placement) for info in infos], **{"align": 16} | plan)


def bucket_on(layout: BucketLayout, here: ShardingPolicy, *arguments) -> Bucket:
    """A rank's bucket of a layout, whose parameters have the policy's placement."""
    slots = [
        dataclasses.replace(slot, info=dataclasses.replace(slot.info, placement=here.placement))
        for slot in layout.slots
    ]
    return Bucket(dataclasses.replace(layout, slots=tuple(slots)), StateMemory(here), *arguments)


@st.composite
def models(draw) -> list[ParamInfo]:
    """Parameters in forward order: unit indices rise, some units are empty, units of later virtual stages follow those of
    earlier ones; one in eight parameters is tied, as many are frozen, persistent or alone."""
    infos, unit, stage = [], 0, 0
    for index in range(draw(st.integers(1, 25))):
        step = draw(st.sampled_from([0, 0, 0, 1, 2]))
        unit += step
        stage += step > 0 and draw(st.integers(0, 3)) == 0
        kind = draw(st.integers(0, 7))
        infos.append(
            parameter(
                index,
                draw(shapes),
                unit,
                kind == 7,
                draw(traits),
                virtual_stage=stage,
                trains=kind != 6,
                persistent=kind == 5,
                alone=kind == 4,
            )
        )
    return infos


plans = st.fixed_dictionaries(
    {"by_unit": st.booleans(), "bucket_elements": st.integers(1, 200), "shards": st.integers(1, 9)}
)


def elements(info: ParamInfo) -> int:
    return torch.Size(info.shape).numel()


def members(layout: BucketLayout) -> list[ParamInfo]:
    return [dataclasses.replace(slot.info, placement=ALONE) for slot in layout.slots]


def in_forward_order(layout: BucketLayout) -> list[ParamInfo]:
    return sorted(members(layout), key=lambda info: int(info.name[1:]))


def painted(layout: BucketLayout) -> list[ParamInfo | None]:
    """Whose each element of the flat buffer is."""
    owners: list[ParamInfo | None] = [None] * layout.padded_numel
    for slot in layout.slots:
        for element in range(slot.start, slot.start + elements(slot.info)):
            assert owners[element] is None
            owners[element] = dataclasses.replace(slot.info, placement=ALONE)
    return owners


def elements_of(blocks: Sequence[StridedBlocks]) -> list[int]:
    """The elements of strided blocks, in order."""
    return [
        each.start + at * each.stride + element
        for each in blocks
        for at in range(each.count)
        for element in range(each.length)
    ]


# ---- layouts


@laws
@given(infos=models(), plan=plans)
def test_slots_do_not_overlap_and_padding_is_only_at_the_end(infos, plan):
    for layout in planned(infos, **plan):
        count = sum(elements(info) for info in members(layout))
        owners = painted(layout)
        assert layout.numel == count
        assert None not in owners[:count]
        assert owners[count:] == [None] * (layout.padded_numel - count)
        assert all(slot.stop - slot.start == elements(slot.info) for slot in layout.slots)
        assert layout.interval == Interval(0, layout.padded_numel)


@laws
@given(infos=models(), plan=plans)
def test_padding_is_less_than_16_elements_per_shard_and_none_without_sharding(infos, plan):
    for layout in planned(infos, **plan):
        padding = layout.padded_numel - max(
            layout.numel, 1
        )  # a bucket of nothing has an element, for collectives to move
        assert 0 <= padding < plan["shards"] * 16
        assert plan["shards"] > 1 or padding == 0
        assert plan["shards"] == 1 or layout.shard_numel % 16 == 0  # 64 bytes in fp32


# ---- which bucket


@laws
@given(infos=models(), plan=plans)
def test_no_bucket_holds_two_chunks_or_both_frozen_and_trained_or_both_resident_and_gathered(infos, plan):
    for layout in planned(infos, **plan):
        keys = {(info.virtual_stage, info.trains, plan["by_unit"] and info.persistent) for info in members(layout)}
        assert keys == {(layout.first.virtual_stage, layout.trains, plan["by_unit"] and layout.first.persistent)}


@laws
@given(infos=models(), shards=st.integers(1, 9), bucket_elements=st.integers(1, 200))
def test_by_unit_gives_a_bucket_per_unit_and_one_per_tied_or_lone_parameter(infos, shards, bucket_elements):
    """What a unit gathers at once comes to one buffer, so no unit may have two buckets of a kind, whatever the order."""
    layouts = planned(infos, by_unit=True, bucket_elements=bucket_elements, shards=shards)
    single = [layout for layout in layouts if members(layout)[0].spec.tied or members(layout)[0].alone]
    assert all(len(layout.slots) == 1 for layout in single)
    gathered = [layout for layout in layouts if layout not in single and not layout.first.persistent]
    keys = [(layout.unit, layout.trains) for layout in gathered]
    assert len(keys) == len(set(keys))
    assert [unit for unit, _ in keys] == sorted(unit for unit, _ in keys)
    for layout, (unit, trains) in zip(gathered, keys, strict=True):
        assert in_forward_order(layout) == [
            info
            for info in infos
            if (info.unit, info.trains) == (unit, trains) and not (info.spec.tied or info.alone or info.persistent)
        ]


@laws
@given(infos=models(), shards=st.integers(1, 9), bucket_elements=st.integers(1, 200))
def test_other_buckets_follow_the_backward_and_close_at_their_size(infos, shards, bucket_elements):
    layouts = planned(infos, by_unit=False, bucket_elements=bucket_elements, shards=shards)
    for trains in (True, False):
        free = [layout for layout in layouts if layout.tie is None and layout.trains == trains]
        backward = [info for layout in free for info in reversed(in_forward_order(layout))]
        assert backward == [info for info in reversed(infos) if not info.spec.tied and info.trains == trains]
        for layout in free:
            others = sorted(map(elements, members(layout)))[:-1]
            assert layout.numel <= bucket_elements or sum(others) * max(shards, 16) <= bucket_elements
            assert layout.unit == min(info.unit for info in members(layout))
        for layout, following in itertools.pairwise(free):
            sizes = sorted([*map(elements, members(layout)), elements(in_forward_order(following)[-1])])
            would_fit = sum(sizes) <= bucket_elements or sum(sizes[:-1]) * max(shards, 16) <= bucket_elements
            assert not would_fit or layout.first.virtual_stage != following.first.virtual_stage


@laws
@given(infos=models(), plan=plans)
def test_a_tied_parameter_has_a_bucket_of_its_own_equal_on_both_stages(infos, plan):
    for layout in planned(infos, **plan):
        assert (layout.tie is not None) == any(info.spec.tied for info in members(layout))
        if layout.tie is not None:
            assert len(layout.slots) == 1
            # The other stage holds other parameters beside it.
            (other,) = planned([layout.slots[0].info], **plan)
            assert other == layout


def largest_chunk(layouts: Sequence[BucketLayout]) -> int:
    """Elements of all shards."""
    return max(chunk.size * layout.shards for layout in layouts for chunk in layout.chunks)


@st.composite
def large_models(draw) -> list[ParamInfo]:
    """One parameter of many rows among a few small ones, and perhaps a unit of two weights, which is not cut."""
    wide = draw(st.sampled_from([1, 3, 4, 8, 16]))
    shapes_ = [draw(shapes) for _ in range(draw(st.integers(0, 2)))]
    at = draw(st.integers(0, len(shapes_)))
    rows = draw(st.integers(50, 400))
    shapes_.insert(at, (rows, wide) if wide > 1 or draw(st.booleans()) else (rows,))
    infos = [parameter(index, shape, trait=draw(traits)) for index, shape in enumerate(shapes_)]
    if draw(st.booleans()):
        each = draw(st.integers(1, 80))
        infos += [parameter(len(infos) + at, (each, 8), unit=1) for at in range(2)]
    return infos


large_plans = st.fixed_dictionaries(
    {"by_unit": st.booleans(), "bucket_elements": st.integers(60, 300), "shards": st.integers(1, 4)}
)


@laws
@given(infos=large_models(), plan=large_plans)
def test_the_chunks_of_a_bucket_hold_each_element_of_it_once_and_of_every_shard_as_many(infos, plan):
    layouts = planned(infos, cuts=True, **plan)
    largest_uncut = max((layout.padded_numel for layout in layouts if len(layout.chunks) == 1), default=0)
    for layout in layouts:
        covered = [element for chunk in layout.chunks for element in range(chunk.start, chunk.stop)]
        assert covered == list(range(layout.shard_numel))
        found: dict[str, list[int]] = {info.name: [] for info in members(layout)}
        for chunk in layout.chunks:
            numel = chunk.size
            buffer = [
                shard + element
                for shard in range(0, layout.padded_numel, layout.shard_numel)
                for element in range(chunk.start, chunk.stop)
            ]
            for held in layout.chunk_slots(chunk):
                inside = elements_of(held.blocks)
                assert [element + held.slot.start for element in inside] == buffer[held.start : held.stop]
                found[held.slot.info.name] += inside
            is_cut = len(layout.chunks) > 1
            smallest = layout.step * layout.shards  # a row of each shard
            assert not is_cut or numel * layout.shards <= max(plan["bucket_elements"], largest_uncut, smallest)
        for info in members(layout):
            assert sorted(found[info.name]) == list(range(elements(info)))


def test_an_embedding_and_a_head_go_in_chunks_as_large_as_a_block():
    """Llama 3 8B over 64 ranks, with buckets of 16 MiB: a block is gathered whole and has 52 times as much."""
    embedding, attention, mlp = (128256, 4096), (4096 + 2 * 1024 + 4096, 4096), (3 * 14336, 4096)
    shapes_ = [(0, embedding), *((unit, shape) for unit in (1, 2) for shape in (attention, mlp)), (3, embedding)]
    infos = [parameter(index, shape, unit) for index, (unit, shape) in enumerate(shapes_)]
    layouts = planned(infos, by_unit=True, bucket_elements=2**22, shards=64, cuts=True)
    block = elements(infos[1]) + elements(infos[2])
    assert [len(layout.chunks) for layout in layouts] == [3, 1, 1, 3]  # 2.4 blocks
    assert largest_chunk(layouts) == block
    # a copy on a stage of smaller blocks has equal shards, in more chunks
    tied = [dataclasses.replace(info, spec=dataclasses.replace(info.spec, tied=True)) for info in infos[-1:]]
    here, there = (
        planned(blocks + tied, by_unit=True, bucket_elements=2**22, shards=64, cuts=True)[-1]
        for blocks in (infos[1:3], infos[1:2])
    )
    assert len(here.chunks) < len(there.chunks)
    assert dataclasses.replace(here, chunk_count=there.chunk_count) == there


@pytest.mark.parametrize("shards", [8, 64, 512, 1024, 2048, 4096])
@pytest.mark.parametrize(("hidden", "kv", "mlp"), [(4096, 8, 14336), (8192, 8, 28672), (16384, 8, 53248)])
def test_the_head_of_a_llama_goes_in_chunks_over_any_number_of_shards(hidden, kv, mlp, shards):
    """Of the 8B on tp 1, of the 70B and the 405B on tp 8: no chunk is larger than a block, or than 433 MiB, and what
    is added beside 1/32 of the head is at most half a per cent."""
    tp = 1 if hidden == 4096 else 8
    block = (
        [(hidden + 2 * 128 * kv) // tp, hidden],
        [hidden, hidden // tp],
        [2 * mlp // tp, hidden],
        [hidden, mlp // tp],
    )
    shapes_ = [(unit, tuple(shape)) for unit in range(8) for shape in block] + [(8, (128256 // tp, hidden))]
    infos = [parameter(index, shape, unit) for index, (unit, shape) in enumerate(shapes_)]
    limit = 433 * 2**18
    layouts = planned(
        infos, by_unit=True, bucket_elements=limit // shards // 16 * shards * 16, shards=shards, cuts=True
    )
    assert largest_chunk(layouts) <= max(sum(map(elements, infos[:4])), limit)
    padded = sum(layout.padded_numel for layout in layouts)
    assert padded <= 1.005 * sum(map(elements, infos)) + elements(infos[-1]) / 32


@laws
@given(infos=large_models(), plan=large_plans)
def test_only_what_is_nearly_one_parameter_is_cut_and_only_between_its_rows(infos, plan):
    for layout in planned(infos, cuts=True, **plan):
        largest = max(members(layout), key=elements)
        if len(layout.chunks) == 1:
            continue
        assert layout.numel > plan["bucket_elements"] >= layout.numel - elements(largest)
        assert layout.padded_numel - layout.numel <= layout.numel / 32
        for chunk in layout.chunks:
            for held in layout.chunk_slots(chunk):
                if held.slot.info.name != largest.name:
                    continue
                assert held.rows is not None
                rows = torch.arange(largest.shape[0])
                at, count = held.row_in_buffer(rows)
                mine = elements_of(held.rows)
                assert count == len(mine)
                assert at.tolist() == [mine.index(row) if row in mine else count for row in rows.tolist()]


# ---- storage


@pytest.mark.parametrize("zero_stage", [0, 1, 2])
def test_off_the_cpu_whole_gradients_are_given_back_whoever_gets_them(zero_stage):
    (layout,) = planned([parameter(0, (40,))], by_unit=True, bucket_elements=1, shards=2)
    here = policy(zero_stage, Axis("dp", (0, 1), 1))
    bucket = bucket_on(layout, dataclasses.replace(here, device=torch.device("meta"), on_cpu=False))
    if zero_stage < 2:
        assert bucket.allocate_gradient().shape == (64,)
        assert bucket.gradient.shape == ((64,) if zero_stage == 0 else (32,))
        assert bucket.gradient.untyped_storage().nbytes() == 64 * 4
    bucket.free_gradient()
    assert bucket.full_gradient is None
    assert bucket.gradient.numel() == (0 if zero_stage < 2 else 32)


def test_ranks_with_the_whole_state_send_gradients_to_one_another():
    (layout,) = planned([parameter(0, (40,))], by_unit=True, bucket_elements=1, shards=1)
    for replicas, stays in ((1, False), (2, True)):
        placement = Placement(Axis("shard"), Axis("replica", tuple(range(replicas))))
        here = dataclasses.replace(policy(0, Axis("shard")), placement=placement)
        bucket = bucket_on(layout, here)
        assert placement.sends == stays
        bucket.allocate_gradient()
        bucket.free_gradient()
        assert (bucket.full_gradient is not None) == stays


def test_a_norm_does_not_keep_a_large_weight_from_being_cut() -> None:
    """28,672 rows can be cut over 512 shards; with a norm's row among them they could not without much padding."""

    def largest(*shapes: tuple[int, ...]) -> int:
        infos = [
            ParamInfo(
                f"{at}", shape, rows_spec((NamedRows(f"{at}", shape[0]),), shape[1] if len(shape) > 1 else None), 0
            )
            for at, shape in enumerate(shapes)
        ]
        return largest_chunk(planned(infos, by_unit=False, bucket_elements=2**18, shards=512, cuts=True))

    for shapes in (((64,), (28672, 64)), ((28672, 64), (64,))):
        assert largest(*shapes) == largest((28672, 64)) < 28672 * 64
