"""What becomes of a server whose node was lost: a spare node at once, else its own node, else a job of its own."""

from types import SimpleNamespace
from typing import Any

from prime_hpc.supervisor.roles.replicas import Replicas


def server(*hosts: str) -> Any:
    spec = SimpleNamespace(label="inference[0]")
    return SimpleNamespace(
        spec=spec, state="ready", hosts=list(hosts), is_substitute_job=False, can_be_substituted=True
    )


def test_a_spare_node_takes_the_place_of_a_lost_one_at_once() -> None:
    replicas = Replicas(retry_s=60.0, spares=["n8", "n9"], clock=lambda: 5.0)
    role = server("n1", "n2")
    assert replicas.mark_lost(role, ["n2"]) == "its server is started on the spare node n8"
    assert (role.hosts, role.state, role.is_substitute_job) == (["n1", "n8"], "away", False)
    assert replicas.awaiting_recovery(role)
    assert replicas._due["inference[0]"] == 0.0, "nothing is waited for"
    role.state = "ready"
    assert not replicas.awaiting_recovery(role)
    assert replicas.mark_lost(role, ["n1"]).endswith("spare node n9") and role.hosts == ["n9", "n8"]


def test_the_servers_of_a_lost_node_move_to_one_spare_together() -> None:
    replicas = Replicas(retry_s=60.0, spares=["n8", "n9"], clock=lambda: 5.0)
    first, second, other = server("n1"), server("n1"), server("n2")
    for role in (first, second, other):
        replicas.mark_lost(role, role.hosts)
    assert [role.hosts for role in (first, second, other)] == [["n8"], ["n8"], ["n9"]]
    assert replicas.mark_lost(other, ["n9"]) == "its server is tried again on its node in 60 s", "none is left"


def test_what_spare_nodes_can_take_the_place_of() -> None:
    replicas = Replicas(retry_s=60.0, spares=["n8"], clock=lambda: 5.0)
    role, over_two, stand_in = server("n1"), server("n1", "n2"), server("m7")
    stand_in.is_substitute_job = True
    assert replicas.can_replace(role, ["n1"]) and not replicas.can_replace(role, [])
    assert not replicas.can_replace(over_two, ["n1", "n2"]) and not replicas.can_replace(stand_in, ["m7"])
    replicas.mark_lost(role, ["n1"])
    assert replicas.can_replace(server("n1"), ["n1"]), "it goes where the first of that node went"
    assert not replicas.can_replace(role, role.hosts)


def test_without_enough_spares_its_node_is_tried_and_then_a_job_of_its_own() -> None:
    replicas = Replicas(retry_s=60.0, spares=["n8"], clock=lambda: 5.0)
    role = server("n1", "n2")
    assert replicas.mark_lost(role, ["n1", "n2"]) == "its server is tried again on its node in 60 s"
    assert role.hosts == ["n1", "n2"] and not role.is_substitute_job
    assert replicas.mark_lost(role, ["n1", "n2"]) == "its server is tried again as a job of its own in 60 s"
    assert role.is_substitute_job


def test_a_stand_in_leaves_spare_nodes_to_others() -> None:
    """It would take one and go on as a job of its own."""
    replicas = Replicas(retry_s=60.0, spares=["n8"], clock=lambda: 5.0)
    role = server("m7")
    role.is_substitute_job = True
    assert replicas.mark_lost(role, ["m7"]) == "its server is tried again as a job of its own in 60 s"
    assert role.hosts == ["m7"] and replicas.take_spares(["n1"]) == {"n1": "n8"}
