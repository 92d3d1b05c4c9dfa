from __future__ import annotations

from dataclasses import replace

import pytest
from machines import A100, ENGINE, H100, NONE, PAIRS, a_box, a_fabric, a_gpu, a_host

from llmgw.core.hosts import Host, spare_gb
from llmgw.core.node import ForeignUse, MigInstance
from llmgw.core.replica import ReplicaId

R1 = ReplicaId("rep-m-1")


def test_a_node_without_marks_and_bookings_has_all_of_itself_free() -> None:
    host = a_host(memory_gb=16.0)
    assert (host.id, host.free_gb, host.free, host.engines) == ("n1", 16.0, (), {"e": ENGINE})


def test_memory_that_is_booked_or_held_by_other_programs_is_not_free() -> None:
    assert a_host(memory_gb=16.0, memory_foreign_gb=3.0, booked_gb=6.5).free_gb == 6.5


def test_gpus_that_are_booked_broken_or_cut_are_not_free() -> None:
    booked, broken, cut, whole = a_box(4)
    instances = (MigInstance(uuid="MIG-1", shape="1g.10gb", memory_gb=10.0),)
    host = a_host(
        gpus=(booked, replace(broken, broken="fell off the bus"), replace(cut, mig=instances), whole),
        booked={booked.uuid: R1},
    )
    assert host.free == (whole,)
    assert host.totals == {H100: 4}
    assert not host.whole


def test_free_gpus_are_in_the_order_of_their_indices() -> None:
    assert [gpu.index for gpu in a_host(gpus=tuple(reversed(a_box(4)))).free] == [0, 1, 2, 3]


@pytest.mark.parametrize("gpus", [None, ()])
def test_a_node_without_gpus_is_no_whole_box(gpus: tuple[()] | None) -> None:
    host = a_host(gpus=gpus)
    assert (host.whole, host.totals, host.classes, host.links) == (False, {}, {}, ())


def test_free_gpus_are_known_by_class() -> None:
    mixed = (a_gpu("GPU-0", 0, H100), a_gpu("GPU-1", 1, A100), a_gpu("GPU-2", 2, H100))
    host = a_host(gpus=mixed, booked={"GPU-0": R1})
    assert host.classes == {A100: 0b01, H100: 0b10}
    assert host.totals == {H100: 2, A100: 1}


def test_links_are_between_gpus_that_are_free() -> None:
    host = a_host(gpus=a_box(8, joined=PAIRS), booked={"GPU-0": R1})
    # GPU-1 has lost its peer; the pairs behind it are one place nearer
    assert host.links == (0, 0b100, 0b10, 0b10000, 0b1000, 0b1000000, 0b100000)
    assert a_host(gpus=a_box(2, joined=NONE)).links == (0, 0)


def test_a_link_that_only_one_end_tells_of_is_one() -> None:
    one, other = a_box(2)
    assert a_host(gpus=(one, replace(other, nvlink_peers=()))).links == (0b10, 0b01)


def test_links_of_which_one_gpu_says_nothing_are_not_known() -> None:
    one, other = a_box(2)
    assert a_host(gpus=(one, replace(other, nvlink_peers=None))).links is None


def test_what_other_programs_hold_of_a_gpu_is_not_spare() -> None:
    taken = a_gpu(foreign=(ForeignUse(memory_gb=5.0), ForeignUse(memory_gb=4.0, pid=7)))
    assert spare_gb(taken) == 71.0
    assert a_host(gpus=(taken,)).spare_gb == (71.0,)
    # nine tenths of it is what an engine takes that nobody has told otherwise
    assert a_host(gpus=(taken,)).roomy == 0
    assert a_host(gpus=(replace(taken, foreign=(ForeignUse(memory_gb=8.0),)),)).roomy == 1


def test_a_fabric_is_in_service_with_an_address_and_nothing_against_it() -> None:
    host = a_host(fabrics=(a_fabric("a"), a_fabric("b", down="no port is ACTIVE"), a_fabric("c", address=None)))
    assert host.fabrics == {"a"}


def test_hosts_of_the_same_facts_are_the_same() -> None:
    host = a_host(gpus=a_box(2))
    assert host == Host(node=host.node)
    assert host != replace(host, cordoned=True)
