"""The orchestrator's loop: collect the groups of batch n, write it, report it, n = 1 .. max_steps.

    prompts -> [gate] -> dispatch -> envs/servers -> groups -> batch n -> assemble -> store -> trainer
                 ^                                     |                                         |
                 |            stale: back to prompts <-+                                         |
                 +---- served version <--- weights <---- weights/step_<v> <----------------------+

Who waits for whom: the gate opens when `weights` has a version served; `_collect` wakes when an episode ends or a
version is served; the trainer wakes on the batch. `main` builds the parts and runs `Orchestrator.run`. Who decides:
`GroupBook` what is stale and when a batch is complete, `score_groups` advantages, `WeightSync` which version is served.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from loguru import logger

from prime_hpc.config import Experiment
from prime_hpc.envs.samples import EpisodeResult, EpisodeState
from prime_hpc.observe.metrics import iterate_metrics
from prime_hpc.orchestrator.algorithms.echo import Echo
from prime_hpc.orchestrator.algorithms.scorer import References
from prime_hpc.orchestrator.algorithms.sources import load_scorers, make_scorers, scorers_state
from prime_hpc.orchestrator.batching.batch_builder import (
    ScoredGroup,
    build_ranks,
    count_rollouts,
    score_groups,
    train_samples,
    zero_groups,
)
from prime_hpc.orchestrator.batching.batch_writer import BatchContent, BatchWriter
from prime_hpc.orchestrator.bench import batch_shape
from prime_hpc.orchestrator.curriculum import Curriculum
from prime_hpc.orchestrator.deadlines import Deadlines, explain
from prime_hpc.orchestrator.errors import OrchestratorError
from prime_hpc.orchestrator.evaluation import Evaluator, newest_evaluated
from prime_hpc.orchestrator.metrics import (
    StepStats,
    batch_metrics,
    group_metrics,
    longest_wait,
    train_rows,
    troubles,
    wandb_extras,
)
from prime_hpc.orchestrator.next_attempt import NextAttempt
from prime_hpc.orchestrator.parts import Parts
from prime_hpc.orchestrator.rollouts.carried import GroupCarrier
from prime_hpc.orchestrator.rollouts.concurrency import AdaptiveConcurrency
from prime_hpc.orchestrator.rollouts.dispatcher import Dispatcher, Greedy, Job, Lane
from prime_hpc.orchestrator.rollouts.engine_figures import EngineFigures
from prime_hpc.orchestrator.rollouts.episodes import Episode, to_episode
from prime_hpc.orchestrator.rollouts.failures import BarrenGroups, FailureWindow
from prime_hpc.orchestrator.rollouts.groups import Group, GroupBook
from prime_hpc.orchestrator.rollouts.prompts import PromptStream, SourceInfo
from prime_hpc.orchestrator.rollouts.same_tasks import digests, warn_of_others
from prime_hpc.orchestrator.rollouts.seats import why_empty
from prime_hpc.orchestrator.rollouts.servers import ServerTable
from prime_hpc.orchestrator.server_news import ServerNews
from prime_hpc.orchestrator.setup import gate_of
from prime_hpc.orchestrator.weight_sync import WeightSync, wait_for_event
from prime_hpc.runtime import activity
from prime_hpc.runtime.event_loops import loop_time
from prime_hpc.store.manifest import Manifest
from prime_hpc.store.model.config import rows_of

TICK_S = 1.0
"""Longest sleep between two looks at the deadlines."""
COUNTED = ("tokens", "loss_tokens", "sequences", "micro_batches")
Scored = tuple[list[ScoredGroup], dict[str, float]]
"""A batch's groups and their `batch_metrics`, both of a thread: the loop has no time for them."""


class Orchestrator:
    """One attempt of the loop, from step `start_step` + 1 to the last one."""

    def __init__(
        self, exp: Experiment, parts: Parts, *, start_step: int = 0, state: dict[str, Any] | None = None
    ) -> None:
        """`state` is what was stored with batch `start_step`; None for a fresh run."""
        config = exp.orchestrator
        self.exp, self.parts, self.start_step = exp, parts, start_step
        self.last_step = exp.max_steps
        self.single_rows = rows_of(exp) == "single"
        self.rows: list[dict[str, Any]] = []
        """Of a bench: the metrics of its batches."""
        self.shape: list[dict[str, list[int]]] = []
        """Of a bench: what the last batch looked like."""
        sources = [SourceInfo(s.name, s.ratio, s.num_tasks) for s in parts.train_pool.sources]
        self.env_names = [source.name for source in sources]
        self.curriculum = Curriculum(config.curriculum, num_prompts=exp.num_prompts, env_names=self.env_names)
        self.stream = PromptStream(sources, exp.seed, self.curriculum.choose)
        self.totals = {"samples": 0, "tokens": 0}
        self.scorers = make_scorers(config, in_loss=exp.trainer.loss.distillation is not None)
        self.echo = Echo(config.advantage.echo) if config.advantage.echo is not None else None
        self.task_digests = digests(parts.train_pool.sources)
        if state is not None:
            self.stream.load_state_dict(state["prompts"])
            warn_of_others(state.get("task_digests", {}), self.task_digests)
            self.curriculum.load_state_dict(state.get("curriculum", {}))
            self.totals = dict(state["totals"])
            load_scorers(self.scorers, state)
        self.book = GroupBook(
            num_prompts=exp.num_prompts,
            **gate_of(exp),
            sizes=[config.group_size(source) for source in range(len(config.env))],
            minima=[scorer.min_group for scorer in self.scorers],
            greedy=[source for source, scorer in enumerate(self.scorers) if scorer.greedy],
            next_batch=start_step + 1,
            gate=self.curriculum.judge,
        )
        self.broken: Exception | None = None
        """What a callback failed with (a sampler or gate of the user's own, or a bug); the loop raises it."""
        now = loop_time()
        self.table = ServerTable(parts.urls, now)
        self.failures = FailureWindow(config.max_failed_share, config.most_in_flight)
        self.barren = BarrenGroups(config.max_failed_share, config.most_in_flight)
        self.stats = StepStats(now)
        self.changed = asyncio.Event()
        self.dispatcher = Dispatcher(
            self.table,
            config.max_concurrent,
            refill=self._open_group,
            on_server_error=self._server_failed,
            why_empty=lambda: why_empty(self.table, self.book, self.weights.is_updating),
        )
        self.weights = WeightSync(parts, self.table, on_change=self._served_changed, sleeps=exp.engines_sleep)
        carried_from = 0 if config.bench else parts.incarnation
        self.carrier = GroupCarrier(parts.paths, exp, carried_from, start_step, state)
        self.writer = BatchWriter(parts, start_step, exp.supervisor.write_timeout_s)
        self.next_attempt = NextAttempt(parts, self.weights, self.writer, self.carrier, self.fail)
        figures = EngineFigures(self.table, parts.clients, self.weights.is_loading)
        self.engines: EngineFigures | AdaptiveConcurrency = figures
        if (limits := config.adaptive_concurrency) is not None:
            self.engines = AdaptiveConcurrency(limits, self.dispatcher, self.table, figures)
        self.deadlines = Deadlines(exp, parts.ready_timeout_s, self.table, self.dispatcher, self.weights)
        self.evaluator = self._make_evaluator()

    # ------------------------------------------------------------------------------------------------ the run

    async def run(self) -> None:
        """From ready servers to the last batch and its evaluation. Raises OrchestratorError where it cannot go on."""
        loop = asyncio.get_running_loop()
        ServerNews(self.exp, self.parts, self.table, self.weights, self.dispatcher, self.fail).listen(loop)
        self.next_attempt.listen(loop)
        with self._groups_kept():
            await self._prepare()
        await self._work_and_watch()

    @contextmanager
    def _groups_kept(self) -> Iterator[None]:
        """Keep what is complete for the next attempt where this one is told to stop: first of all, for whoever told it
        waits for some seconds only, and episodes may be as long to end."""
        try:
            yield
        except asyncio.CancelledError:
            self.carrier.save(self.book.complete)
            raise

    async def _prepare(self) -> None:
        await self.weights.prepare(self.start_step)
        if self.parts.teacher is not None and not self.parts.teacher.is_other:
            await self.parts.teacher.check_room(self.exp.seq_len, [s.num_tasks for s in self.stream.sources])
        activity.explain("orchestrator", partial(explain, self.dispatcher, self.weights, self.env_names))
        self.parts.status.ready(version=self.start_step, step=self.start_step, servers=list(self.parts.urls))

    async def _work_and_watch(self) -> None:
        work = asyncio.create_task(self._work(), name="work")
        beside = [
            asyncio.create_task(self.weights.run(), name="weights"),
            asyncio.create_task(self.engines.run(), name="engines"),
        ]
        try:
            with self._groups_kept():
                await asyncio.wait([*beside, work], return_when=asyncio.FIRST_COMPLETED)
                for ended in filter(asyncio.Task.done, beside):
                    ended.result()
                await work
        finally:
            for task in (*beside, work):
                task.cancel()
            await self.dispatcher.close()
            await asyncio.gather(*beside, work, return_exceptions=True)

    async def _work(self) -> None:
        self.stats = StepStats(loop_time())
        self._served_changed()
        for step in range(self.start_step + 1, self.last_step + 1):
            groups, state = await self._collect(step)
            scored, manifest = await self._write(step, groups, state)
            self._report(step, scored, manifest)
        await self._finish()

    async def _collect(self, step: int) -> tuple[list[Group], dict[str, Any]]:
        """Return the groups of batch `step`, and the state that an attempt resuming after this batch needs."""
        while not self.book.batch_ready():
            await self._wait_for_change(f"batch {step}", version=self.book.floor)
        groups = self.book.take_batch()
        for group in groups:
            self._trace(step, group, "in_batch")
        self._send_back_stale()
        state = self._state(step, groups)
        self.carrier.batch(step, groups, state, self.table.served_version)
        self.dispatcher.pump()
        return groups, state

    async def _write(self, step: int, groups: list[Group], state: dict[str, Any]) -> tuple[Scored, Manifest]:
        """Score, pack and commit batch `step` (in a thread: dispatch goes on), then announce it."""
        references = None
        activity.doing(f"write batch {step}", step=step)
        if self.parts.teacher is not None:
            references = await self.parts.teacher.collect(groups)
            groups = [g for g in groups if g.has_tokens]
            references = [found for found in references if found]
        if self.exp.engines_sleep:  # before the batch is there: the trainer begins with it
            while self.evaluator is not None and self.evaluator.running:
                await self._wait_for_change("the evaluation, before the engines sleep", version=0)
            await self.weights.sleep()
        content, scored = await asyncio.to_thread(self._assemble, step, groups, state, references)
        return scored, await self.writer.write(content)

    def fail(self, error: Exception) -> None:
        """Have the loop raise what was raised beside it."""
        self.broken = error
        self.changed.set()

    async def _finish(self) -> None:
        """Serve the last version, evaluate it. A bench has no trainer that would make one."""
        if self.exp.orchestrator.bench:
            return
        while self.table.served_version < self.last_step:
            await self._wait_for_change("the last weights", version=self.last_step)
        while self.evaluator is not None and self.evaluator.pending:
            await self._wait_for_change("the last evaluation", version=0)

    # ------------------------------------------------------------------------------------------------ episodes

    def _open_group(self) -> bool:
        """Start the next group if the gate allows it: the dispatcher has room."""
        served = self.table.served_version
        while self.book.may_open(served):
            try:
                prompt = self.stream.next()
            except OrchestratorError as error:
                self.fail(error)
                return False
            group = self.book.open(prompt, served)
            group.lane = lane = Lane()
            if carried := self.carrier.take(group):
                for index, result in enumerate(carried):
                    self._episode_ended(group, index, result, again=True)
                continue
            for index in range(group.num_rollouts):
                pool = Greedy(self.parts.train_pool) if group.is_greedy(index) else self.parts.train_pool
                ended = partial(self._episode_ended, group, index)
                self.dispatcher.add(Job(pool, prompt.source, prompt.task, lane, ended))
            return True
        return False

    def _episode_ended(self, group: Group, index: int, result: EpisodeResult, *, again: bool = False) -> None:
        """Take an episode's end; `again`: the attempt before has counted it."""
        advantage = self.exp.orchestrator.advantage
        timeout_reward = advantage.timeout_reward if advantage.timeout == "penalize" else None
        episode = to_episode(result, self.exp.seq_len, is_policy=not advantage.imitates, timeout_reward=timeout_reward)
        trains = episode.usable and not group.abandoned and not group.is_greedy(index)
        if self.parts.teacher is not None and trains:
            episode = self.parts.teacher.begin(group, index, episode)
        if not again:
            self._count(group, index, episode)
        num_dropped, num_completed = self.book.counts.dropped, self.book.counts.completed
        self.book.add(group, index, episode)
        if self.book.counts.completed > num_completed:
            self.barren.begin_anew()
            if self.parts.teacher is not None:
                self.parts.teacher.begin_complete(group)
        for consumed in self.book.take_consumed():
            fate = "dropped" if self.book.counts.dropped > num_dropped else "rejected"
            if fate == "dropped":
                self.barren.add([episode.reason for episode in consumed.ended])
            else:
                self.barren.begin_anew()
            self._trace(self.book.next_batch, consumed, fate)
            if self.parts.teacher is not None:
                self.parts.teacher.discard(consumed)
        self._send_back_stale()
        self.changed.set()

    def _count(self, group: Group, index: int, episode: Episode) -> None:
        """Note an episode that has ended in this attempt, for the metrics, the limit of failures and the traces."""
        self.stats.add_episode(episode, is_greedy=group.is_greedy(index))
        if episode.result.state is not EpisodeState.CANCELLED:
            self.failures.add("" if episode.usable else episode.reason)
        if episode.reason.startswith("reward "):
            prompt = group.prompt
            where = f"prompt {prompt.position} ({self.env_names[prompt.source]}, task {prompt.task}), rollout {index}"
            logger.warning(f"{where}: {episode.reason}; it counts as failed")
        if self.parts.traces is not None:
            self.parts.traces.rollout(self.book.next_batch, group, index, episode)

    def _trace(self, step: int, group: Group, fate: str) -> None:
        if self.parts.traces is not None:
            self.parts.traces.group(step, group, fate)

    def _send_back_stale(self) -> None:
        for group in sorted(self.book.take_stale(), key=lambda g: -g.prompt.position):
            self._trace(self.book.next_batch, group, "stale")
            self.dispatcher.cancel(group.lane)
            if self.parts.teacher is not None:
                self.parts.teacher.discard(group)
            self.stream.put_back(group.prompt)

    def _server_failed(self, index: int) -> None:
        self.weights.report_error(index)
        self.changed.set()

    def _served_changed(self) -> None:
        if self.evaluator is not None:
            self.evaluator.served(self.table.served_version)
        self.dispatcher.pump()
        self.changed.set()

    # ------------------------------------------------------------------------------------------------ batches

    def _state(self, step: int, groups: list[Group]) -> dict[str, Any]:
        """JSON-able state after batch `step`. `used` and `dropped` since the batch before it are for the record."""
        self.totals["samples"] += sum(len(group.usable) for group in groups)
        self.totals["tokens"] += sum(e.num_sampled_tokens for group in groups for e in group.usable)
        curriculum = self.curriculum.batch_taken(groups)
        return {
            "step": step,
            "prompts": self.stream.state_dict(self.book.outstanding()),
            "used": [group.prompt.position for group in groups],
            "dropped": self.book.drain_dropped(),
            "totals": dict(self.totals),
            "task_digests": self.task_digests,
            **({"curriculum": curriculum} if curriculum else {}),
        }

    def _assemble(
        self, step: int, groups: list[Group], state: dict[str, Any], references: list[References] | None
    ) -> tuple[BatchContent, Scored]:
        config = self.exp.orchestrator
        scored = score_groups(
            groups,
            self.scorers,
            zero=zero_groups(self.exp),
            scale=config.advantage.scale,
            env_names=self.env_names,
            references=references,
            floor=self.book.mask_floor(step),
        )
        state = state | scorers_state(self.scorers)
        samples = train_samples(scored, self.echo)
        if self.echo is not None:
            self.echo.tell_if_idle([(found.sample_id, found.sample) for found in samples])
        ranks = build_ranks(
            samples,
            num_ranks=self.exp.trainer.parallel_dims.num_data_ranks,
            micro_batch_tokens=self.exp.micro_batch_tokens,
            sampling=config.policy_samplings,
            share_prefixes=self.exp.trainer.shares_prefixes,
            single_rows=self.single_rows,
            totals=count_rollouts(scored),
            num_mini_batches=self.exp.trainer.num_mini_batches,
            seed=(self.exp.seed, step),
        )
        if config.bench:
            self.shape = batch_shape(ranks)
        row = batch_metrics(scored, self.env_names, step, config.eval.pass_threshold if config.eval else 1.0)
        meta = {key: row[key] for key in ("reward/mean", "reward/std", "lag/mean", "lag/max", "groups/trained")}
        return BatchContent(step, ranks, state, meta), (scored, row)

    def _report(self, step: int, written: Scored, manifest: Manifest) -> None:
        """One metrics row, one status beat, one console line, the sample rollouts."""
        scored, row = written[0], self.stats.drain(loop_time(), self.weights.drain_updates()) | written[1]
        row |= group_metrics(self.book.drain_counts()) | self.curriculum.drain_metrics()
        row |= self.dispatcher.drain_load() | self.engines.drain()
        row |= {
            **{f"batch/{name}": manifest.meta[f"num_{name}"] for name in COUNTED},
            "queue/in_flight": self.dispatcher.num_running,
            "queue/complete_groups": len(self.book.complete),
            "queue/sent_back": self.stream.num_pending,
            "failed/share": self.failures.share,
            "policy/served_version": self.table.served_version,
            "time/weight_update": self.weights.update_seconds,
            "time/weight_pause": self.weights.paused_seconds,
            "total/samples": self.totals["samples"],
            "total/tokens": self.totals["tokens"],
        }
        for pool in (self.parts.train_pool, self.parts.eval_pool):
            row |= pool.metrics() if pool is not None else {}
        row |= self.parts.teacher.drain_metrics() if self.parts.teacher is not None else {}
        if self.exp.orchestrator.bench:
            self.rows.append(row)
        self.parts.metrics.log(step, **row)
        samples = train_rows(scored, self.env_names, self.exp.orchestrator.log_samples)
        self.parts.samples.write(step, samples)
        if self.exp.wandb is not None and step % (self.exp.wandb.samples_interval or step + 1) == 0:
            self.parts.metrics.log_samples(step, *wandb_extras(self.exp.wandb, samples, scored))
        info = {"reward": row["reward/mean"], "tokens_per_second": row["tokens/sampled_per_second"]}
        self.parts.status.beat(step, **info, lag_mean=row["lag/mean"], waited=longest_wait(row))
        logger.info(
            f"batch {step}: reward {row['reward/mean']:.3f} +- {row['reward/std']:.3f}, "
            f"{row['groups/with_signal']:.0f}/{row['groups/in_batch']:.0f} groups with a signal, "
            f"lag {row['lag/mean']:.2f} (max {row['lag/max']:.0f}), {row['tokens/sampled_per_second']:.0f} tokens/s, "
            f"{row['episodes/per_second']:.1f} episodes/s, {row['time/step']:.2f} s{troubles(row)}"
        )

    # ------------------------------------------------------------------------------------------------ waiting

    async def _wait_for_change(self, what: str, version: int) -> None:
        """Sleep until an episode ends or a version is served; every deadline of the loop is looked at here."""
        reason = self._wait_reason(version)
        activity.doing(f"collect {what}", awaits=reason)
        start = loop_time()
        await wait_for_event(self.changed, TICK_S)
        self.changed.clear()
        if self.broken is not None:
            raise self.broken
        now = loop_time()
        self.stats.add_wait(reason, start, now)
        self.dispatcher.pump()
        self.failures.check()
        self.barren.check()
        self.deadlines.check(what, version, reason, now)

    def _wait_reason(self, version: int) -> str:
        if not self.table.any_ready:
            return "servers"
        return "weights" if self.table.served_version < version else "rollouts"

    def _make_evaluator(self) -> Evaluator | None:
        config = self.exp.orchestrator
        if config.eval is None or config.bench or self.parts.eval_pool is None:
            return None
        return Evaluator(
            config.eval,
            self.parts.eval_pool,
            self.parts.eval_pool.sources,
            self.dispatcher,
            start_version=self.start_step,
            last_version=self.last_step,
            on_report=self._report_evaluation,
            newest=newest_evaluated(
                iterate_metrics(self.parts.paths.metrics("orchestrator")) if self.start_step else ()
            ),
        )

    def _report_evaluation(self, version: int, row: dict[str, Any], samples: list[dict[str, Any]]) -> None:
        self.parts.report_evaluation(version, row, samples)
        assert self.evaluator is not None
        self.evaluator.served(self.table.served_version)
        self.changed.set()
