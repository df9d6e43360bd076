"""Environment evaluations of an SFT run: the orchestrator's process without training rollouts.

    trainer --weights/step_<v>--> [wait] -> [every server loads v] -> [evaluate v] -> metrics, next due version

`main` runs it where `kind = sft` and `orchestrator.eval` names environments. The trainer publishes the due versions and
never waits; they are evaluated one after another, each wholly by itself, and kept on disk until they were. An attempt
that resumes catches up on due versions that are on disk and have no row in the metrics yet.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from loguru import logger

from prime_hpc.config import Experiment
from prime_hpc.observe.metrics import iterate_metrics
from prime_hpc.orchestrator.errors import OrchestratorError
from prime_hpc.orchestrator.evaluation import Evaluator, plans
from prime_hpc.orchestrator.parts import Parts
from prime_hpc.orchestrator.rollouts.dispatcher import Dispatcher
from prime_hpc.orchestrator.rollouts.servers import ServerTable
from prime_hpc.orchestrator.server_news import ServerNews
from prime_hpc.orchestrator.weight_sync import READER, WeightSync, wait_for_event
from prime_hpc.runtime.event_loops import loop_time
from prime_hpc.store.errors import ArtifactError, ArtifactTimeout
from prime_hpc.store.leases import drop_lease, last_version, set_floor
from prime_hpc.store.waiting import wait_for_artifact
from prime_hpc.store.weights import list_versions, newest_of_attempt

ROLE = "orchestrator"
LOOK_S = 2.0


def due_versions(intervals: Sequence[int], last: int, start: int, on_disk: Sequence[int], done: set[int]) -> list[int]:
    """Versions to evaluate, in order, by an attempt that begins after step `start`.

    Args:
        intervals: every so many steps, of each source; the base model and the last version too.
        last: steps of the run.
    """
    due = sorted({last, *(version for interval in intervals for version in range(0, last, interval))})
    return [v for v in due if v not in done and (v > start or v == 0 or v in on_disk)]


def due_sources(intervals: Sequence[int], version: int, last: int) -> list[int]:
    """Return sources to evaluate at a version: the first and the last one concern all."""
    return [source for source, interval in enumerate(intervals) if version == last or version % interval == 0]


async def with_last_version(exp: Experiment, parts: Parts) -> Experiment:
    """Return the experiment with the run's last step, which the trainer says where the data decide it.

    The trainer may count for long: it ends the run, and this wait, where it cannot.
    """
    if exp.num_steps is not None:
        return exp
    parts.status.ready(servers=list(parts.urls))
    while (last := await asyncio.to_thread(last_version, parts.paths)) is None:
        await asyncio.sleep(LOOK_S)
    return exp.model_copy(update={"max_steps": last})


class EvalLoop:
    """One attempt: evaluates what is due until the last version."""

    def __init__(self, exp: Experiment, parts: Parts, *, start_step: int = 0) -> None:
        assert exp.orchestrator.eval is not None
        self._exp, self._parts, self._config, self._start_step = exp, parts, exp.orchestrator.eval, start_step
        # what comes after the start is made anew, maybe otherwise than what an earlier attempt evaluated
        rows = (row for row in iterate_metrics(parts.paths.metrics(ROLE)) if row["step"] <= start_step)
        done = {int(row["step"]) for row in rows if "eval/seconds" in row}
        self._intervals = [plan.interval for plan in plans(self._config, len(parts.eval_pool.sources))]
        self.versions = due_versions(
            self._config.intervals, exp.max_steps, start_step, list_versions(parts.paths), done
        )
        self._table = ServerTable(parts.urls, loop_time())
        self._changed = asyncio.Event()
        self._broken: Exception | None = None
        """What a callback failed with."""
        self._dispatcher = Dispatcher(
            self._table,
            exp.orchestrator.max_concurrent,
            refill=lambda: False,
            on_server_error=lambda index: self._weights.report_error(index),
        )
        self._weights = WeightSync(parts, self._table, on_change=self._changed.set)

    async def run(self) -> None:
        """Evaluate every due version.
        Raises OrchestratorError: a server does not answer or refuses a version, or a version does not come."""
        paths, versions = self._parts.paths, self.versions
        if versions:
            set_floor(paths, READER, versions[0])
        news = ServerNews(self._exp, self._parts, self._table, self._weights, self._dispatcher, self._fail)
        news.listen(asyncio.get_running_loop())
        await self._weights.prepare(0)
        self._parts.status.ready(servers=list(self._parts.urls), evaluations=len(versions))
        try:
            for i, version in enumerate(versions):
                if await self._wait_for(version):
                    if version > 0:
                        await self._weights.serve(version)
                    await self._evaluate(version)
                set_floor(paths, READER, versions[i + 1] if i + 1 < len(versions) else version)
        finally:
            await self._dispatcher.close()
        drop_lease(paths, READER)

    async def _wait_for(self, version: int) -> bool:
        """Until the trainer has published it; False where it was, and is gone again.

        What this attempt makes anew counts only as its own: a fenced one may have left some.
        """
        waited, incarnation = loop_time(), self._parts.incarnation if version > self._start_step else 0
        while version > 0:
            try:
                await asyncio.to_thread(
                    wait_for_artifact,
                    self._parts.paths.weights_step(version),
                    deadline_s=LOOK_S,
                    bus=self._parts.bus,
                    topic="weights",
                    key={"version": version},
                    min_incarnation=incarnation,
                )
                return True
            except (ArtifactTimeout, ArtifactError):
                if await asyncio.to_thread(newest_of_attempt, self._parts.paths, version, incarnation) is not None:
                    logger.warning(f"version {version} is not on disk any more: not evaluated")
                    return False
                if self._broken is not None:
                    raise self._broken from None
                limit = self._exp.orchestrator.weights_timeout_s * self._steps_to(version)
                if loop_time() - waited > limit:
                    raise OrchestratorError(
                        f"no weights version {version} within {limit:.0f} s (orchestrator.weights_timeout_s a step); "
                        "see the trainer's log"
                    ) from None
                self._parts.status.beat(waiting_for=version)
        return True

    def _steps_to(self, version: int) -> int:
        """Return the steps that the trainer takes for a version after the due one before it, or from its start on."""
        before = max((v for v in self.versions if v < version), default=0)
        return max(1, version - max(before, self._start_step))

    def _fail(self, error: Exception) -> None:
        self._broken = error

    async def _evaluate(self, version: int) -> None:
        """Every episode of one version; servers that fail are brought back meanwhile."""
        ended = asyncio.Event()

        def report(version: int, row: dict[str, Any], samples: list[dict[str, Any]]) -> None:
            self._parts.report_evaluation(version, row, samples)
            ended.set()

        evaluator = Evaluator(
            self._config,
            self._parts.eval_pool,
            self._parts.eval_pool.sources,
            self._dispatcher,
            start_version=version,
            last_version=version,
            on_report=report,
        )
        began = loop_time()
        keep = asyncio.create_task(self._weights.keep(), name="keep-servers")
        try:
            evaluator.evaluate(version, due_sources(self._intervals, version, self._exp.max_steps))
            while not ended.is_set():
                if keep.done():
                    keep.result()
                self._dispatcher.pump()
                self._check_servers(began)
                await wait_for_event(ended, 0.5)
        finally:
            keep.cancel()
            await asyncio.gather(keep, return_exceptions=True)

    def _check_servers(self, began: float) -> None:
        """Raise what ends the run. Servers that were lost while nothing was evaluated are looked for since `began`."""
        if self._broken is not None:
            raise self._broken
        down = min(self._table.all_down_since(loop_time()), loop_time() - began)
        if down > self._parts.ready_timeout_s:
            urls = ", ".join(server.url for server in self._table.servers)
            raise OrchestratorError(f"no inference server answered for {down:.0f} s ({urls}); see their logs")
