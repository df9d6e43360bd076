"""`python -m prime_hpc.orchestrator.main RUN_DIR`: the orchestrator process. The supervisor starts it, or a person."""

import asyncio
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack, nullcontext
from typing import Any

from loguru import logger

from prime_hpc.client.inference import POLICY, InferenceError
from prime_hpc.client.judge import open_judge
from prime_hpc.config import Experiment
from prime_hpc.config.engine_groups import sampling_role
from prime_hpc.config.monitors import open_metrics
from prime_hpc.envs.errors import EnvError
from prime_hpc.envs.held_out import leave_out_trained
from prime_hpc.envs.pool import EnvPool
from prime_hpc.observe.bench import results, table, write_report
from prime_hpc.observe.role_status import RoleStatus
from prime_hpc.orchestrator.bench import bench_experiment, bench_paths, bench_report
from prime_hpc.orchestrator.errors import OrchestratorError
from prime_hpc.orchestrator.evaluation import plans
from prime_hpc.orchestrator.loop import Orchestrator
from prime_hpc.orchestrator.metrics import SampleLog
from prime_hpc.orchestrator.parts import Parts
from prime_hpc.orchestrator.setup import (
    load_resume_state,
    make_clients,
    make_endless_tasks,
    make_pool,
    make_teacher,
    ready_timeout,
    server_urls,
    warn_of_few_open_files,
    with_env_hosts,
)
from prime_hpc.orchestrator.sft_eval_loop import EvalLoop, with_last_version
from prime_hpc.orchestrator.trace_log import TraceLog
from prime_hpc.runtime.limits import raise_descriptor_limit
from prime_hpc.runtime.process_memory import freeze_gc
from prime_hpc.runtime.role_context import RoleContext
from prime_hpc.store.messaging.bus import BusClient
from prime_hpc.store.messaging.file_transfer import HandoverServer
from prime_hpc.store.messaging.network import Network
from prime_hpc.store.role_process import leave, run_role
from prime_hpc.store.run_paths import RunPaths

ROLE = "orchestrator"
SWITCH_S = 0.001
"""So long another thread may compute before the loop of all episodes takes over. With Python's own 5 ms it waits for
several of the threads that pack and write a batch, one after the other, and longer where one has lost its core."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the role; returns the exit code."""
    return run_role(ROLE, _run, (EnvError, InferenceError, OrchestratorError), argv=argv)


async def _run(exp: Experiment, context: RoleContext, bus: BusClient, status: RoleStatus) -> None:
    """Build the parts, run the loop, take everything down again."""
    real_paths = RunPaths(context.run_dir, exp.ckpt.path.resolve() if exp.ckpt and exp.ckpt.path else None)
    start_step = context.resume_step or 0
    state = load_resume_state(real_paths, start_step) if start_step and exp.kind == "rl" else None
    if exp.orchestrator.bench:
        exp = bench_experiment(exp)
    exp = with_env_hosts(exp, context)
    config = exp.orchestrator
    if exp.kind == "rl":
        warn_of_few_open_files(exp, raise_descriptor_limit())
    urls = server_urls(exp, context)
    served_as = context.run or POLICY
    async with AsyncExitStack() as stack:
        await open_judge(stack, exp, context, bus, config.env_servers.addresses)
        paths = stack.enter_context(bench_paths(context.run_dir) if config.bench else nullcontext(real_paths))
        clients = make_clients(exp, urls)
        for client in clients:
            stack.push_async_callback(client.close)
        train_pool, eval_pool = await _open_pools(exp, context, urls, state, stack)
        teacher = make_teacher(exp, context, clients, train_pool, served_as) if train_pool is not None else None
        if teacher is not None:
            stack.push_async_callback(teacher.close)
            if teacher.is_other:  # the policy's own servers may still be starting
                started = exp.teacher_inference
                await teacher.check(exp.seq_len, started.ready_timeout_s if started else None)
        metrics = open_metrics(exp, ROLE, paths.metrics(ROLE), context.run_dir)
        stack.callback(metrics.close)
        samples = SampleLog(paths.metrics("samples"), config.log_samples)
        stack.callback(samples.close)
        handover = HandoverServer(bus, Network.from_env())
        stack.callback(handover.close)
        traces = None
        if config.traces is not None and train_pool is not None and not config.bench:
            names = [source.name for source in train_pool.sources]
            traces = TraceLog(config.traces, paths, names, context.incarnation)
            stack.callback(traces.close)
        parts = Parts(
            paths=paths,
            train_pool=train_pool,
            eval_pool=eval_pool,
            urls=urls,
            clients=clients,
            bus=bus,
            handover=handover,
            status=status,
            metrics=metrics,
            samples=samples,
            incarnation=0 if config.bench else context.incarnation,
            ready_timeout_s=ready_timeout(exp, sampling_role(exp)),
            served_as=served_as,
            traces=traces,
            teacher=teacher,
        )
        freeze_gc()
        sys.setswitchinterval(SWITCH_S)
        if exp.kind == "sft":
            await EvalLoop(await with_last_version(exp, parts), parts, start_step=start_step).run()
            return
        orchestrator = Orchestrator(exp, parts, start_step=start_step, state=state)
        logger.info(_start_line(exp, urls, start_step, orchestrator))
        await orchestrator.run()
        if config.bench:
            report = bench_report(exp, orchestrator.rows, orchestrator.shape, context.incarnation)
            write_report(context.run_dir, report)
            metrics.log_bench(len(orchestrator.rows), results(report))
            logger.info("\n" + table(report))


async def _open_pools(
    exp: Experiment, context: RoleContext, urls: list[str], state: dict[str, Any] | None, stack: AsyncExitStack
) -> tuple[EnvPool | None, EnvPool | None]:
    """Open the environments of training (none for SFT) and of held-out evaluation (none where nothing is evaluated).

    The two share no task.
    """
    config, served_as = exp.orchestrator, context.run or POLICY
    train_pool = eval_pool = None
    if exp.kind == "rl":
        pool = make_pool(exp, urls, config.env, config.sampling, "train", served_as, context.log_dir)
        train_pool = await stack.enter_async_context(pool)
        if state is not None:
            await asyncio.to_thread(make_endless_tasks, train_pool, state)
    if config.eval is not None:
        envs = config.eval.env or config.env
        pool = make_pool(exp, urls, envs, config.eval_sampling, "eval", served_as, context.log_dir)
        eval_pool = await stack.enter_async_context(pool)
        if train_pool is not None:
            asked = [plan.num_examples for plan in plans(config.eval, len(eval_pool.sources))]
            await asyncio.to_thread(leave_out_trained, eval_pool.sources, train_pool.sources, asked)
    return train_pool, eval_pool


def _start_line(exp: Experiment, urls: list[str], start_step: int, orchestrator: Orchestrator) -> str:
    config = exp.orchestrator
    pending = orchestrator.stream.num_pending
    resumed = f", resumed after step {start_step} with {pending} prompts to dispatch again" if start_step else ""
    return (
        f"{exp.num_prompts} prompts x {config.rollouts_per_example} rollouts a step from "
        f"{', '.join(orchestrator.env_names)}; {len(urls)} inference server(s), async level {exp.async_level}{resumed}"
    )


if __name__ == "__main__":
    leave(main())
