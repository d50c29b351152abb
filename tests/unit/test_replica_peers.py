"""Which node keeps the replica of which."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunetool.checkpoint.peers import peer_of, switch_of
from tunetool.errors import UsageProblem

DOMAINS = st.dictionaries(
    st.integers(1, 999).map(lambda number: f"node{number}"), st.sampled_from(["a", "b", "c", "rack10"]), min_size=2
)


@given(DOMAINS, st.randoms())
def test_each_node_keeps_one_replica_of_another_node(domains: dict[str, str], chance: random.Random) -> None:
    peers = {node: peer_of(domains, node, domains) for node in domains}
    assert set(peers.values()) == set(domains)
    assert all(node != peer for node, peer in peers.items())
    # The same on every rank, in whatever order the names come, and however often.
    names = [*domains, *domains]
    chance.shuffle(names)
    assert peers == {node: peer_of(names, node, domains.__getitem__) for node in domains}


@given(DOMAINS)
def test_as_many_peers_as_possible_are_in_another_domain(domains: dict[str, str]) -> None:
    apart = sum(domains[str(peer_of(domains, node, domains))] != domains[node] for node in domains)
    largest = max(Counter(domains.values()).values())
    assert apart == min(len(domains), 2 * (len(domains) - largest))


def test_without_domains_the_next_node_is_the_peer() -> None:
    nodes = ["node3", "node1", "node2"]
    assert [peer_of(nodes, node) for node in ("node1", "node2", "node3")] == ["node2", "node3", "node1"]
    assert peer_of(["node1", "node1"], "node1") is None


def test_nodes_of_two_racks_keep_each_other_s_replicas() -> None:
    racks = {"node1": "r1", "node2": "r1", "node3": "r2", "node4": "r2"}
    assert [peer_of(racks, node, racks) for node in racks] == ["node3", "node4", "node1", "node2"]


def test_an_unknown_node_or_domain_is_named() -> None:
    with pytest.raises(UsageProblem, match="`node3` is not among the 2 nodes of the job"):
        peer_of(["node1", "node2"], "node3")
    with pytest.raises(UsageProblem, match="`node2` has no failure domain"):
        peer_of(["node1", "node2"], "node1", {"node1": "r1"})


@pytest.mark.parametrize(
    ("address", "pattern", "expected"),
    [
        ("s0.s4.node7", "switch.switch.node", "s0.s4"),
        ("node7", "node", ""),
        ("", "", ""),
    ],
)
def test_slurm_names_the_switches_of_a_node(address: str, pattern: str, expected: str) -> None:
    environment = {"SLURM_TOPOLOGY_ADDR": address, "SLURM_TOPOLOGY_ADDR_PATTERN": pattern}
    assert switch_of({name: value for name, value in environment.items() if value}) == expected
