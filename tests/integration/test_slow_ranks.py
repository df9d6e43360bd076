"""Two real ranks, of which one computes, reads and writes slowly: the log of rank 0 names it."""

from pathlib import Path

import pytest

from prime_hpc.observe.metrics import read_metrics
from tests.integration.test_trainer import command, environment, write_batches, write_run
from tests.support import forked
from tests.support.runs import wait_until
from tests.support.tiny_model import make_tiny_model

pytestmark = pytest.mark.slow
SAID = (
    "rank 1 computes a matrix product in",
    "rank 1 reads its part of a batch in",
    "rank 1 writes its files of checkpoints and weights in",
)


def test_a_slow_rank_is_named(tmp_path: Path) -> None:
    changes = {
        "max_steps": 200,
        "trainer": {"threads_per_rank": 1, "publish_beside": True},
        "ckpt": {"interval": 1, "keep_last": 1},
    }
    paths = write_run(tmp_path / "run", make_tiny_model(tmp_path / "model"), **changes)
    write_batches(paths, range(1, 201), 2)
    log = paths.logs(1, "trainer") / "rank_0.log"

    def told() -> list[str]:
        lines = log.read_text().splitlines() if log.exists() else []
        return [line for line in lines if "on node node1, slow" in line]

    def is_named() -> bool:
        counted = any(row["ranks/slow"] == 1 for row in read_metrics(paths.metrics("trainer")))
        return counted and all(any(words in line for line in told()) for words in SAID)

    with (tmp_path / "out").open("wb") as out:
        ranks = command(paths, 2, "tests.support.slow_rank")
        process = forked.ForkedProcess(ranks, env=environment(), stdout=out, stderr=out)
        try:
            wait_until(lambda: process.poll() is not None or is_named(), 200, "the log names the slow rank")
            assert process.poll() is None, (tmp_path / "out").read_text()[-3000:]
        finally:
            process.kill()
            process.wait(30)
    assert all("node1 added to slurm.exclude" in line for line in told())
    rows = read_metrics(paths.metrics("trainer"))
    for kind, figure in (("product", "ratio"), ("read", "excess_s"), ("write", "excess_s")):
        found = [row for row in rows if f"ranks/{kind}_{figure}" in row]
        assert found and 1.0 in {row[f"ranks/{kind}_rank"] for row in found}, kind
