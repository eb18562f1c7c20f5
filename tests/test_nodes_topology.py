"""Nodes: which layouts are accepted, how ranks of several nodes find each other, exchange and leave."""

import os
import time

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import epmoe
from cases import outcome, process_ranks
from epmoe import _C
from epmoe.comm.nodes import Card, check_layout, own_card
from nodes_cases import run_nodes
from pace import HANG_S, is_soon

pytestmark = pytest.mark.cpu_only
A, B, C = (bytes([i]) * 8 for i in range(3))


def cards(local, *hosts):
    return [Card(_C.ABI_VERSION, local, host, f"host{host[0]}") for host in hosts]


def test_layout_accepts_nodes_by_local():
    """Several nodes may be on one host; ranks of a node may not be on several."""
    assert check_layout(cards(2, A, A, B, B)) == 2
    assert check_layout(cards(1, A, A, B)) == 1
    assert check_layout(cards(2, A, A, A, A)) == 2


@pytest.mark.parametrize("local, hosts, texts", [
    (2, (A, A, B), ("3 ranks are not nodes of 2", "host host0: ranks 0-1, local_world_size 2",
                    "host host1: ranks 2")),
    (3, (A, A, A, B, B, C), ("ranks 3 to 5 should be node 1", "host host1: ranks 3-4",
                             "host host2: ranks 5")),
    (2, (A, B, A, B), ("rank 1 is on another host than rank 0", "host host0: ranks 0, 2", "consecutive")),
    (9, (A,) * 9 + (B,) * 9, ("a node has at most 8 ranks", "ranks 0-8"))])
def test_layout_that_is_not_nodes_by_local_is_printed(local, hosts, texts):
    """Uneven nodes, ranks that are not consecutive, and nodes of too many ranks."""
    with pytest.raises(ValueError) as error:
        check_layout(cards(local, *hosts))
    for text in texts:
        assert text in str(error.value)


def test_layout_of_nodes_of_different_sizes_is_printed():
    """Nodes whose ranks were told different sizes."""
    with pytest.raises(epmoe.EpMismatch, match="rank 2 has local_world_size 1, rank 0 has 2") as error:
        check_layout(cards(2, A, A) + cards(1, B))
    assert "host host1: ranks 2, local_world_size 1" in str(error.value)


def test_layout_of_other_builds_and_failed_ranks():
    """A card survives its way; ranks that cannot take part, or have another protocol, are named."""
    card = own_card(4)
    back = Card.unpack(card.pack())
    assert back[:3] == card[:3] and card.name.startswith(back.name) and Card.unpack(bytes(28)) is None
    with pytest.raises(epmoe.PeerError, match="rank 1 could not"):
        check_layout(cards(1, A) + cards(0, B))
    with pytest.raises(epmoe.EpMismatch, match="rank 1 has another epmoe"):
        check_layout([card, card._replace(abi=7)])
    with pytest.raises(epmoe.EpMismatch, match="rank 1 takes the group for one node"):
        check_layout([card, None])


def _describe(nodes):
    return (nodes.rank, nodes.size, nodes.node, nodes.num_nodes, nodes.local_rank, nodes.local_size,
            nodes.exchange(bytes([nodes.rank]) * 3), nodes.lost_ranks())


def _ranks(rank, size):
    facts = {}
    with epmoe.Nodes(local_world_size=2, timeout_s=HANG_S) as nodes:
        facts["argument"] = _describe(nodes)
        wrong = b"text" if rank != 3 else "text"
        facts["type"] = outcome(lambda: nodes.exchange(wrong)).kind
        facts["length"] = outcome(lambda: nodes.exchange(bytes(1 + rank))).kind
        facts["long"] = outcome(lambda: nodes.exchange(bytes(513))).kind
        facts["again"] = nodes.exchange(b"x") == [b"x"] * size
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "local"))
    nodes = epmoe.Nodes.of(mesh, timeout_s=HANG_S)
    facts["mesh"] = _describe(nodes)
    facts["of"] = epmoe.Nodes.of(mesh) is nodes and outcome(lambda: epmoe.Nodes.of(mesh, 4)).kind
    nodes.close()
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    with epmoe.Nodes(timeout_s=HANG_S) as nodes:
        facts["environment"] = _describe(nodes)
    os.environ["LOCAL_WORLD_SIZE"] = "3"
    facts["uneven"] = outcome(epmoe.Nodes)
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    facts["own"] = outcome(lambda: epmoe.Nodes(local_world_size=0 if rank == 1 else 2))
    facts["different"] = outcome(lambda: epmoe.Nodes(local_world_size=1 if rank == 1 else 2))
    facts["one node"] = outcome(lambda: epmoe.World() if rank == 1 else epmoe.Nodes(local_world_size=2))
    facts["mesh_own"] = outcome(lambda: epmoe.Nodes(mesh, 1 if rank == 0 else None))
    everyone = dist.new_group([0, 1, 2, 3])  # one node: the World of the group
    # A layer on one node, although LOCAL_WORLD_SIZE says 2.
    group = dist.new_group([0, 1, 2, 3])
    layer = epmoe.EPAll2AllLayer(group, 4, 16, 1, num_tot_experts=4, local_world_size=4, device="cpu",
                                 timeout_s=HANG_S)
    facts["layer"] = repr(layer.world)
    layer.finalize()
    facts["one"] = repr(epmoe.Nodes(everyone, local_world_size=4, timeout_s=HANG_S))
    return facts


def test_nodes_of_processes():
    """Four ranks: from the argument, a mesh and LOCAL_WORLD_SIZE; then what is wrong."""
    results = process_ranks(_ranks, 4)
    everyone = [bytes([r]) * 3 for r in range(4)]
    for rank, facts in enumerate(results):
        of_two = (rank, 4, rank // 2, 2, rank % 2, 2, everyone, [])
        assert facts["argument"] == of_two and facts["mesh"] == of_two
        assert facts["environment"] == (rank, 4, rank, 4, 0, 1, everyone, [])
        assert facts["type"] == ("TypeError" if rank == 3 else "PeerError")
        assert facts["length"] == "EpMismatch" and facts["long"] == "ValueError" and facts["again"]
        assert facts["of"] == "ValueError"
        assert facts["uneven"].kind == "ValueError"
        assert "ranks 0-3, local_world_size 3" in facts["uneven"].text
        assert facts["own"].kind == ("ValueError" if rank == 1 else "PeerError")
        assert facts["different"].kind == "EpMismatch" and "rank 1 has local" in facts["different"].text
        assert facts["one node"].kind == ("PeerError" if rank == 1 else "EpMismatch")
        assert facts["mesh_own"].kind == ("ValueError" if rank == 0 else "PeerError")
        assert facts["layer"] == f"epmoe.World(rank={rank}, size=4)"
        assert facts["one"] == f"epmoe.Nodes(rank={rank}, nodes=1, local=4)"


def _dies(rank, size):
    nodes = epmoe.Nodes(local_world_size=2, timeout_s=HANG_S)
    nodes.exchange(b"")
    if rank == 3:
        os._exit(1)
    began = time.monotonic()
    error = outcome(lambda: [nodes.exchange(b"") for _ in range(1000)])
    return error.kind, time.monotonic() - began, nodes.lost_ranks(), error.text


def test_death_on_a_node_is_heard_on_all():
    """A rank that dies ends the exchange on its node and on the others."""
    results = process_ranks(_dies, 4, may_die=(3,))
    for kind, seconds, lost, text in results[:3]:
        assert kind == "PeerDied" and lost == [3] and "rank 3 (rank 1 of node 1)" in text, text
        assert is_soon(seconds, 3)


def test_nodes_of_threads():
    """The nodes of the other tests: ranks that are threads."""
    results = run_nodes(_describe, 3, 2)
    for rank, facts in enumerate(results):
        assert facts == (rank, 6, rank // 2, 3, rank % 2, 2, [bytes([r]) * 3 for r in range(6)], [])
