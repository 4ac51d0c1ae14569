"""What context parallelism sends by formula, what a run file may say of it, and what "auto" picks."""

from __future__ import annotations

from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from megazero.config import ConfigError, ResolvedRun, RunConfig, load_config, resolve
from megazero.config.document import to_toml
from megazero.config.rules import check_rules
from megazero.models.stages import context_bytes, ulysses_degrees
from megazero.training.callbacks.progress import context_parallelism
from megazero.training.world import join_world


def sent(
    length: int, heads: int, kv_heads: int, size: int, u: int, r: int, *bytes_each: int, batch: int = 1
) -> Fraction:
    """Message by message: what one rank of u x r gives away in a layer's forward and backward pass."""
    itemsize, gradient = bytes_each
    own = Fraction(batch * length, u * r)  # tokens of the rank
    k = size * max(kv_heads, u)
    leaves = Fraction(u - 1, u)  # of every tensor, the part for the other ranks
    forward = backward = itemsize * own * leaves * (2 * size * heads + 2 * k)  # q, k, v and the output, then gradients
    chunk = Fraction(batch * length, r) * Fraction(k, u)  # elements of K or of V on its way around the ring
    for _ in range(r - 1):
        forward += 2 * chunk * itemsize
        backward += 2 * chunk * itemsize + 2 * chunk * gradient
    return forward + backward


@pytest.mark.parametrize(("u", "r"), [(1, 1), (1, 4), (4, 1), (2, 2), (8, 1), (2, 4), (4, 2), (1, 8)])
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_bytes_are_those_of_every_message(u: int, r: int, kv_heads: int) -> None:
    for itemsize, gradient in ((2, 2), (2, 4), (4, 4)):
        counted = context_bytes(
            96,
            3,
            heads=8,
            kv_heads=kv_heads,
            head_size=6,
            ulysses=u,
            ring=r,
            itemsize=itemsize,
            gradient_itemsize=gradient,
        )
        assert sum(counted.values()) == sent(96, 8, kv_heads, 6, u, r, itemsize, gradient, batch=3)
        assert [counted["all_to_all"] > 0, counted["ring_shift"] > 0] == [u > 1, r > 1]


def test_a_ulysses_degree_gives_every_rank_the_key_value_heads_of_its_queries() -> None:
    """By the heads that each rank has: as many queries, and no two ranks with a different number of copies."""
    for heads, kv_heads in ((8, 8), (8, 2), (12, 4), (12, 2), (6, 3), (4, 1), (30, 6)):
        fits = []
        for u in range(1, heads + 1):
            each = [
                {q * kv_heads // heads for q in range(rank * heads // u, (rank + 1) * heads // u)} for rank in range(u)
            ]
            copies = [sum(kv in one for one in each) for kv in range(kv_heads)]
            is_even = all(len(one) == len(each[0]) for one in each) and len(set(copies)) == 1
            if heads % u == 0 and is_even and len(each[0]) * u == max(kv_heads, u):  # as many as the formula counts
                fits.append(u)
        assert ulysses_degrees(heads, kv_heads) == fits, (heads, kv_heads)


# What a run file says


def run_of(world: int, parallel: dict[str, Any], **sections: dict[str, Any]) -> ResolvedRun:
    return resolve(RunConfig.model_validate({"parallel": parallel, **sections}), world)


def told(world: int, parallel: dict[str, Any], **sections: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        run_of(world, parallel, **sections)
    return [str(problem) for problem in raised.value.problems]


@pytest.mark.parametrize(
    ("parallel", "method", "ulysses", "line"),
    [
        ({"cp_method": "ulysses"}, "ulysses", 4, "cp 4 (ulysses), "),
        ({"cp_method": "ring"}, "ring", 1, "cp 4 (ring), "),
        ({"cp_method": "hybrid", "cp_ulysses": 2}, "hybrid", 2, "cp 4 (hybrid, Ulysses 2 x ring 2), "),
        ({"cp_method": "ulysses", "cp_ulysses": 4}, "ulysses", 4, "cp 4 (ulysses), "),
        ({"cp_method": "ring", "cp_ulysses": 1}, "ring", 1, "cp 4 (ring), "),
    ],
)
def test_a_method_has_its_degree_and_the_run_resolves_to_itself(
    tmp_path: Path, parallel: dict[str, Any], method: str, ulysses: int, line: str
) -> None:
    for tp, pp, dp in product((1, 2), (1, 3), (1, 2)):
        run = run_of(4 * tp * pp * dp, {"cp": 4, "tp": tp, "pp": pp, "sequence_parallel": tp > 1, **parallel})
        chosen = run.config.parallel
        assert (run.dp, chosen.cp, chosen.cp_method, chosen.cp_ulysses) == (dp, 4, method, ulysses)
        assert run.notices == ()
        assert context_parallelism(chosen) == line
        assert resolve(run.config, run.world_size) == run
        (tmp_path / "run.toml").write_text(to_toml(run))
        assert load_config(tmp_path / "run.toml", (), run.world_size) == run


def test_the_written_file_of_a_run_takes_another_cp(tmp_path: Path) -> None:
    """The Ulysses degree follows cp, so it is not written but for a hybrid."""
    for parallel in ({"cp_method": "ulysses"}, {"cp_method": "ring"}, {}):
        (tmp_path / "run.toml").write_text(to_toml(run_of(4, {"cp": 4, **parallel})))
        assert load_config(tmp_path / "run.toml", ["parallel.cp=2"], 2).config.parallel.cp == 2


@pytest.mark.parametrize("sections", [{"parallel": {"cp": 2}}, {"data": {"document_mask": True}}])
def test_heads_must_be_those_that_flash_attention_takes(sections: dict[str, Any]) -> None:
    """By the name of its operators, as attention to sequence shards and documents calls it."""
    for size, dtype, device in ((12, "bf16", "cuda"), (16, "bf16", "cuda"), (12, "fp32", "cuda"), (12, "bf16", "cpu")):
        model = {"num_heads": 4, "num_kv_heads": 4, "head_dim": size}
        whole = {"model": model, "precision": {"dtype": dtype}, "launch": {"device": device}, **sections}
        lines = [str(one) for one in check_rules(RunConfig.model_validate(whole), 2)[1]]
        wrong = (size, dtype, device) == (12, "bf16", "cuda")
        assert [line for line in lines if "multiple of 8 on CUDA" in line] == lines[: int(wrong)]


@pytest.mark.parametrize("method", ["hybrid", "ulysses"])
def test_the_ulysses_degree_of_other_shapes_does_not_keep_a_run_from_cp_1(method: str) -> None:
    """As an elastic run that has lost machines, or with parallel.cp=1 on the command line."""
    parallel = {"cp": 4, "cp_method": method, "cp_ulysses": 2 if method == "hybrid" else 4}
    elastic = {"enabled": True, "shapes": [{"world_size": 1, "cp": 1}]}
    shrunk = run_of(1, parallel, elastic=elastic, training={"global_batch_size": 8})
    for run in (shrunk, run_of(1, parallel | {"cp": 1})):
        assert resolve(run.config, 1) == run
        assert run.config.parallel.cp_ulysses == parallel["cp_ulysses"]
        assert join_world(run).cp_ulysses.size == 1


@pytest.mark.parametrize("precision", [{}, {"reduce_dtype": "bf16"}, {"dtype": "fp32"}])
def test_auto_sends_the_fewest_bytes_of_what_fits_the_heads_and_says_them(precision: dict[str, Any]) -> None:
    itemsize = 4 if precision.get("dtype") == "fp32" else 2
    gradient = 2 if precision.get("reduce_dtype") == "bf16" else 4
    methods = set()
    for (heads, kv_heads), cp, tp in product(((16, 16), (16, 2), (12, 4), (32, 8), (6, 1)), (2, 3, 4, 8, 16), (1, 2)):
        own, own_kv = heads // tp, max(1, kv_heads // tp)
        of_each = {}
        for u in range(1, cp + 1):
            if cp % u == own % u == 0 and (own_kv % u == 0 or u % own_kv == 0):
                of_each[u] = sent(480, own, own_kv, 10, u, cp // u, itemsize, gradient)
        least = max(u for u in of_each if of_each[u] == min(of_each.values()))
        model = {"family": "mistral", "num_heads": heads, "num_kv_heads": kv_heads, "head_dim": 10, "seq_len": 480}
        run = run_of(tp * cp, {"tp": tp, "cp": cp}, model=model, precision=precision)
        method = {cp: "ulysses", 1: "ring"}.get(least, "hybrid")
        assert (run.config.parallel.cp_method, run.config.parallel.cp_ulysses) == (method, least)
        (line,) = run.notices
        assert line.startswith(f"cp_method auto takes {method}: ")
        assert all(f"{u} x {cp // u}: {int(count):,}" in line for u, count in of_each.items())
        heads_text, kv_text = (f"{n} {what}{'s' * (n > 1)}" for n, what in ((own, "head"), (own_kv, "key/value head")))
        assert f"{heads_text} and {kv_text} of a rank" in line
        again = resolve(run.config, tp * cp)
        assert (again, again.notices) == (run, ())
        methods.add(method)
    assert methods == {"ulysses", "ring", "hybrid"}


SMALL = {"family": "mistral", "num_heads": 12, "num_kv_heads": 4, "head_dim": 8, "seq_len": 960}


@pytest.mark.parametrize(
    ("world", "tables", "key", "hint"),
    [
        (6, {"cp": 4}, "world_size = 6", "the nearest are 4 and 8"),
        (8, {"cp": 2, "tp": 2, "dp": 3}, "parallel.dp = 3", 'write 2 or "auto"'),
        (7, {"cp": 7}, "model.seq_len = 960", "the nearest seq_len are 959 and 966"),
        (
            128,
            {"cp": 64, "tp": 2, "sequence_parallel": True},
            "model.seq_len = 960",
            "the nearest seq_len are 896 and 1024",
        ),
        (
            8,
            {"cp": 8, "cp_method": "ulysses"},
            "parallel.cp = 8",
            '4 and 12, or parallel.cp_method = "ring" or "hybrid"',
        ),
        (
            15,
            {"cp": 15, "cp_method": "ulysses"},
            "parallel.cp = 15",
            'the nearest is 12, or parallel.cp_method = "ring"',
        ),
        (12, {"cp": 12, "cp_method": "hybrid", "cp_ulysses": 6}, "parallel.cp_ulysses = 6", "the nearest is 4"),
        (15, {"cp": 15, "cp_method": "hybrid", "cp_ulysses": 5}, "parallel.cp_ulysses = 5", "no degree does"),
        (8, {"cp": 8, "cp_method": "hybrid"}, "parallel.cp_ulysses", "write 2 or 4"),
        (8, {"cp": 8, "cp_method": "hybrid", "cp_ulysses": 3}, "parallel.cp_ulysses = 3", "write 2 or 4"),
        (3, {"cp": 3, "cp_method": "hybrid", "cp_ulysses": 3}, "parallel.cp_method", "two degrees above 1"),
        (
            4,
            {"cp": 4, "cp_method": "ring", "cp_ulysses": 2},
            "parallel.cp_ulysses = 2",
            'parallel.cp_method = "hybrid"',
        ),
        (4, {"cp": 4, "cp_ulysses": 2}, "parallel.cp_ulysses = 2", "parallel.cp_ulysses=unset on the command line"),
    ],
)
def test_what_context_parallelism_cannot_be_is_told_with_what_it_can(
    world: int, tables: dict[str, Any], key: str, hint: str
) -> None:
    (problem,) = told(world, tables, model=SMALL)
    assert problem.startswith(key)
    assert hint in problem


def _groups(size: int) -> dict[str, Any]:
    return {"shard_group_size": size}


def test_a_shard_group_is_of_the_ranks_of_dp_and_cp() -> None:
    assert run_of(6, {"cp": 2}, zero=_groups(3)).shards == 3
    assert run_of(6, {"cp": 2}).shards == 6
    assert told(6, {"cp": 2}, zero=_groups(4)) == [
        "zero.shard_group_size = 4: must divide dp*cp=3*2=6; the nearest are 3 and 6"
    ]


# Elastic runs


def elastic(world: int, shapes: list[dict[str, int]], **parallel: Any) -> ResolvedRun:
    sections = {"elastic": {"enabled": True, "shapes": shapes}, "training": {"global_batch_size": 16}, "model": SMALL}
    return run_of(world, parallel, **sections)


def test_a_shape_has_its_cp_and_auto_picks_for_each() -> None:
    shapes = [{"world_size": 8, "cp": 8}, {"world_size": 4, "tp": 2}]
    for world, expected in {3: (1, 2, 1, 1), 4: (2, 1, 2, 0), 8: (1, 8, 1, 0)}.items():
        run = elastic(world, shapes, cp=2)
        parallel = run.config.parallel
        assert (parallel.tp, parallel.cp, run.dp, run.spare_ranks) == expected
        assert (parallel.cp_method != "auto") == (parallel.cp > 1)
        assert run.written.parallel == RunConfig.model_validate({"parallel": {"cp": 2}}).parallel
        assert resolve(run.written, world) == run
        assert resolve(run.config, world) == run
    assert "1 of 3 ranks do not train: tp 1 x cp 2 x pp 1 x dp 1 = 2" in elastic(3, shapes, cp=2).notices
    ulysses = [elastic(world, [{"world_size": 4, "cp": 4}], cp=2, cp_method="ulysses") for world in (2, 4)]
    assert [run.config.parallel.cp_ulysses for run in ulysses] == [2, 4]


def test_every_shape_is_checked_before_its_day() -> None:
    sections: dict[str, Any] = {"training": {"global_batch_size": 16}, "model": SMALL}
    shapes = [{"world_size": 7, "cp": 7}, {"world_size": 8, "cp": 8}, {"world_size": 2, "cp": 3}]
    lines = told(1, {"cp_method": "ulysses"}, elastic={"enabled": True, "shapes": shapes}, **sections)
    assert [line.partition(" = ")[0] for line in lines[:3]] == [
        "elastic.shapes[0]",
        "elastic.shapes[0]",
        "elastic.shapes[1]",
    ]
    assert ["parallel.cp = " in line for line in lines[:3]] == [False, True, True]
    assert lines[-1] == "elastic.shapes[2].world_size = 2: must be at least tp*cp*pp=1*3*1=3"
