"""Fixtures of the tests on a real Slurm.

The cluster is started once a session, by slurm/devcluster, which installs Slurm where it is missing (root on Debian);
where it can be neither found nor installed, the tests are skipped and say why.

    PRIME_HPC_TEST_SLURM=sid pytest tests/slurm    # on the Slurm of another Debian (see `up --suite`): trixie, sid
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults import pairs
from tests.support.slurm import SLOWEST, SLURM_IS_MISSING, Cluster, ClusterError, start_or_skip

HERE = Path(__file__).parent
SUITE = os.environ.get("PRIME_HPC_TEST_SLURM", "")
"""Debian suite whose Slurm is to run; empty: this machine's."""


def pytest_configure(config: pytest.Config) -> None:
    """Markers of this folder."""
    config.addinivalue_line("markers", "slurm: needs a real Slurm, which it starts")
    config.addinivalue_line("markers", "netns: needs nodes with namespaces of their own (root)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Whatever uses the cluster is marked; a test here is not ended before its waits are over on a busy machine."""
    for item in items:
        if item.path.parent == HERE:
            stated = item.get_closest_marker("timeout")
            limit_s = float(stated.args[0] if stated else config.getini("timeout"))
            item.add_marker(pytest.mark.timeout(SLOWEST * limit_s), append=False)
        if "cluster" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slurm)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """The session's cluster: 4 GPU nodes n1-n4 and 2 CPU-only nodes n5-n6, all idle when a test begins."""
    cluster = start_or_skip(*(["--suite", SUITE] if SUITE else []))
    yield cluster
    cluster.down()


@pytest.fixture
def bubblewrap(cluster: Cluster) -> None:
    """The nodes have it: another Debian's, which have apptainer instead, are `test_sandbox_image`'s."""
    if cluster.x(["bash", "-c", "command -v bwrap"]).returncode:
        pytest.skip("the nodes have no bubblewrap")


@pytest.fixture(scope="module")
def site() -> Iterator[pairs.Site]:
    """A cluster of the module's own, on a file system that can hang."""
    if SUITE:
        pytest.skip(f"the root of {SUITE} has no bindfs: it would be this machine's Slurm")
    try:
        with pairs.site() as place:
            yield place
    except ClusterError as error:
        if error.code == SLURM_IS_MISSING:
            pytest.skip(str(error))
        raise


@pytest.fixture(autouse=True)
def _whole_cluster(request: pytest.FixtureRequest) -> Iterator[None]:
    """No test finds what another left: nodes without power, jobs that wait."""
    if "cluster" not in request.fixturenames:
        yield
        return
    cluster: Cluster = request.getfixturevalue("cluster")
    if request.node.get_closest_marker("netns") and not cluster.netns:
        pytest.skip("the nodes have no namespaces of their own here (not root, or a container without the right)")
    cluster.heal()
    yield
    cluster.heal()
