"""Clusters by name: every device of the table can be had, numbers are the makers', and what is unknown is told."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from megazero.cli.commands import app
from megazero.plan.calibration import Calibration, MeasuredProduct, OperatorTable, read_calibration, write_calibration
from megazero.plan.cluster import Cluster, cluster_of
from megazero.plan.collective_times import GroupLink
from megazero.plan.devices import DEVICES, NETWORKS, Device, Link
from megazero.plan.fake_tensors import Message, Operator, Value
from megazero.plan.operator_times import pass_time
from megazero.plan.unit_trace import PassTrace


@pytest.mark.parametrize("name", DEVICES)
def test_every_device_of_the_table_is_found_by_its_name(name: str) -> None:
    device = cluster_of(name, 16).device
    assert device.name == name
    assert 0 < device.product_share < 1
    assert device.peak_flops["bf16"] > device.peak_flops["fp32"]


def test_links_are_one_direction_and_of_one_rank() -> None:
    """The makers give both directions of NVLink (H100: 900 GB/s) and bits of InfiniBand (400 Gbit/s)."""
    cluster = cluster_of("h100", 512, 8, "ib400")
    assert (cluster.within.bytes_per_second, cluster.between.bytes_per_second) == (450e9, 50e9)
    assert cluster.nodes == 64

    link = cluster_of("a100", 16, 8, "10gbit").between  # the ranks of a node share an Ethernet card
    assert link.rate(4) == link.rate() / 4
    infiniband = NETWORKS["ib200"]
    assert infiniband.rate(4) == infiniband.rate()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"gpu": "h20"}, "h200"),
        ({"network": "ib40"}, "ib400"),
        ({"gpus": 0}, "--gpus is 0"),
        ({"per_node": -1}, "--per-node is -1"),
    ],
)
def test_what_is_unknown_is_told_with_what_was_meant(given: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        cluster_of(**given)  # type: ignore[arg-type]


def _calibration() -> Calibration:
    link = Link("memory", 1e10, 1e-5)
    device = Device("cpu", 10, {"bf16": 1e11, "fp32": 1e11}, 1e10, 1e10, link)
    table = OperatorTable(
        (MeasuredProduct("fp32", 64, 64, 64, 1e-5),), {"aten.add.Tensor": ((100.0, 1e-6), (400.0, 4e-6))}, 1e-5
    )
    collectives = {"all_reduce 2": ((10.0, 1e-3),)}
    return Calibration(device, 2, link, table, collectives, (0.04, 0.05))


def test_a_calibration_comes_back_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    write_calibration(_calibration(), path)
    cluster = cluster_of(str(path), 4, 2, "1gbit")
    assert cluster.calibration == _calibration()
    assert cluster.processors == 2
    assert cluster.between == NETWORKS["1gbit"]


def test_a_file_that_is_no_calibration_is_told(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(json.dumps({"version": 99}))
    with pytest.raises(ValueError, match=r"version 99.*megazero calibrate --out"):
        read_calibration(path)


def test_damage_and_impossible_numbers_in_a_calibration_are_told(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    write_calibration(_calibration(), path)
    good = path.read_bytes()
    for at in range(0, good.index(b'"sha256"'), 31):
        path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        with pytest.raises(ValueError, match="megazero calibrate --out"):
            read_calibration(path)
    for value in (0.0, -1.0, float("nan"), float("inf")):
        found = json.loads(good)
        for place, key in ((found["device"], "memory_share"), (found["table"]["products"][0], 4)):
            before, place[key] = place[key], value
            path.write_text(json.dumps({key: found[key] for key in found if key != "sha256"}))
            with pytest.raises(ValueError, match="megazero calibrate --out"):
                read_calibration(path)
            place[key] = before


@pytest.mark.parametrize("out", ["machine", "none/machine.json"])
def test_calibrate_refuses_a_file_that_it_could_not_write_or_plan_not_read(tmp_path: Path, out: str) -> None:
    done = CliRunner().invoke(app, ["calibrate", "--out", str(tmp_path / out)])
    assert (done.exit_code, "--out" in done.stderr) == (2, True)


def test_times_between_two_measured_sizes_lie_on_a_line_in_logarithms() -> None:
    table = _calibration().table
    assert table.operator("aten.add.Tensor", 200) == pytest.approx(2e-6)
    assert table.operator("aten.add.Tensor", 4000) == pytest.approx(4e-5)  # beyond: in proportion
    assert table.operator("aten.add.Tensor", 1) == pytest.approx(1e-6)  # below: what starting costs
    assert table.product("fp32", 64, 64, 64) == 1e-5
    assert table.product("fp32", 128, 64, 64) == pytest.approx(2e-5)  # at the rate of the nearest


def test_a_pass_on_a_calibrated_host_is_its_operators_and_then_its_collectives() -> None:
    here = _calibration()
    cluster = Cluster(here.device, 2, 2, here.within, here.within, 2, here)
    value = Value(1, (25,), torch.float32)
    add = Operator("aten.add.Tensor", (value,), (value,))  # 200 bytes: 2 us, and 10 us of the host
    message, link = Message("all_reduce", "tp", 10), GroupLink(cluster, 2, 2, 1)
    found = pass_time(PassTrace((add, message, add, add, message)), cluster, {"tp": link}, is_compiled=False)
    assert found.compute == pytest.approx(3 * 12e-6)
    assert found.exposed == {"tp": pytest.approx(2 * 1e-3)}


def test_a_calibration_of_version_4_is_read_as_what_it_measured_in_one_process(tmp_path: Path) -> None:
    write_calibration(_calibration(), path := tmp_path / "machine.json")
    found = json.loads(path.read_text())
    found |= {"version": 4, "alone": found["table"], "crowded": found.pop("table")}
    del found["sha256"]
    path.write_text(json.dumps(found))
    assert read_calibration(path) == _calibration()


def test_groups_that_cross_a_shared_link_side_by_side_wait_for_each_others_bytes() -> None:
    """An all-reduce that sends 24 bytes in a ring of 4 is of 16: either host sends half of it, and sums of the other half.

    The 16 bytes of another group take 4 s more at 4 bytes a second.
    """
    here, link = _calibration(), Link("slow", 4.0, 0.0, is_shared=True)
    alone, beside = (
        GroupLink(Cluster(here.device, 4, 2, here.within, link, 2, here), 4, 2, groups) for groups in (1, 2)
    )
    assert beside.seconds("all_reduce", 24) == alone.seconds("all_reduce", 24) + 16 / 4.0
