"""Parts of an orchestrator, built from the experiment tree: server urls and clients, the environments' pools."""

import contextlib
import json
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from loguru import logger

from prime_hpc.client import judge
from prime_hpc.client.inference import POLICY, InferenceClient
from prime_hpc.client.keys import KEY_VARIABLES
from prime_hpc.config import Experiment
from prime_hpc.config.engine_groups import SECTIONS, EngineRole, sampling_role, servers_of
from prime_hpc.config.secret import revealed
from prime_hpc.config.sections.orchestrator import EnvConfig, EvalEnvConfig, TrainEnvConfig
from prime_hpc.config.sections.sampling import SamplingConfig
from prime_hpc.config.sections.teacher import TeacherConfig
from prime_hpc.envs.errors import EnvError
from prime_hpc.envs.pool import EnvPool
from prime_hpc.envs.pool_settings import PoolSettings
from prime_hpc.envs.rendering import load_prompt_renderer
from prime_hpc.envs.task_sources import Split
from prime_hpc.orchestrator.algorithms import get_algorithm
from prime_hpc.orchestrator.algorithms.teacher import FrozenServer, Peers, Teacher
from prime_hpc.orchestrator.bench import gate_of_bench
from prime_hpc.orchestrator.cross_tokenizer.reading import TeacherReader
from prime_hpc.orchestrator.errors import OrchestratorError
from prime_hpc.runtime.role_context import ENV_KEY, RoleContext
from prime_hpc.store.batches import find_batch, read_state
from prime_hpc.store.checkpoint.checkpoints import ORCHESTRATOR_STATE
from prime_hpc.store.io.files import retry_read
from prime_hpc.store.manifest import check_file, read_manifest
from prime_hpc.store.run_paths import RunPaths

DEFAULT_READY_TIMEOUT_S = 900.0
OTHER_FILES = 256
"""Open files of an orchestrator besides connections of episodes: logs, metrics, the bus, trainer ranks that fetch."""


def gate_of(exp: Experiment) -> dict[str, Any]:
    """When groups may be opened, and what becomes of old tokens: fields of `GroupBook`."""
    if exp.orchestrator.bench:
        return gate_of_bench(exp)
    masks_stale = exp.orchestrator.stale == "mask"
    return {"async_level": exp.async_level, "last_batch": exp.max_steps, "masks_stale": masks_stale}


def server_urls(exp: Experiment, context: RoleContext) -> list[str]:
    """`http://host:port/v1` of every server: the supervisor's, else those of `orchestrator.client`; the teacher's
    where the teacher samples."""
    if sampling_role(exp) == "teacher":
        return teacher_urls(exp, context)
    if context.inference_urls:
        return list(context.inference_urls)
    return exp.orchestrator.client.urls


def teacher_urls(exp: Experiment, context: RoleContext) -> list[str]:
    """Of the teacher's servers: those that the run has started, else those of `orchestrator.teacher`.
    Raises OrchestratorError: an orchestrator that was started by hand knows of no server."""
    config = exp.orchestrator.teacher
    assert config is not None, "the config refuses it"
    urls = context.teacher_urls or config.urls
    if not urls:
        raise OrchestratorError(
            "teacher_inference is started with the whole run: an orchestrator by hand takes its urls from "
            "orchestrator.teacher.base_url instead"
        )
    return urls


def ready_timeout(exp: Experiment, role: EngineRole) -> float:
    """Deadline of the start or restart of a server of a group, seconds."""
    section = getattr(exp, SECTIONS[role])
    return section.ready_timeout_s if section is not None else DEFAULT_READY_TIMEOUT_S


def make_clients(exp: Experiment, urls: list[str]) -> list[InferenceClient]:
    """One client per server, for weight updates and health."""
    if sampling_role(exp) == "teacher":
        return [_teacher_client(FrozenServer, url, exp) for url in urls]
    key, config = _policy_key(exp), exp.orchestrator
    return [InferenceClient(url, key, config.client.timeout_s, config.weights_timeout_s) for url in urls]


def _key_variable(role: EngineRole, stated: str) -> str:
    """Name the variable with the key of a group of servers: the supervisor's where it has started them."""
    return KEY_VARIABLES[role] if KEY_VARIABLES[role] in os.environ else stated


def _policy_key(exp: Experiment) -> str | None:
    stated = exp.inference.api_key if exp.inference else None
    return os.environ.get(_key_variable("inference", exp.orchestrator.client.api_key_var)) or revealed(stated)


def make_teacher(
    exp: Experiment, context: RoleContext, clients: Sequence[InferenceClient], pool: EnvPool, served_as: str
) -> Teacher | None:
    """Build the teacher of the configured algorithm; None where it needs none.
    `served_as`: the policy's name on its servers.
    Raises OrchestratorError: the algorithm asks for a teacher, and none is configured, or prompts hold images."""
    config, whole = exp.orchestrator, exp.trainer.loss.distillation
    asked = get_algorithm(config.advantage.type).teacher or ("model" if whole is not None else "")
    top_k = whole.top_k if whole is not None else 0
    if asked and exp.model.vision is not None:
        raise OrchestratorError(
            f"orchestrator.advantage.type = {config.advantage.type} asks its teacher with tokens alone, without the "
            "images among them: choose an algorithm without a teacher, or leave model.vision out"
        )
    if asked in ("self", "peer"):
        advantage = config.advantage
        shown = partial(pool.demonstration, field=advantage.demonstration, text=advantage.demonstration_text)
        others = Peers(partial(pool.lead, advantage.demonstration_text), advantage.success_reward)
        limits = config.teacher or TeacherConfig(base_url=[client.base_url for client in clients])
        return Teacher(
            clients,
            served_as,
            deadline_s=limits.deadline_s,
            max_concurrent=limits.max_concurrent,
            prefix=shown if asked == "self" else None,
            peers=others if asked == "peer" else None,
            top_k=top_k,
        )
    if asked != "model":
        return None
    if config.teacher is None:
        raise OrchestratorError(
            f"orchestrator.advantage.type = {config.advantage.type} needs a teacher: set orchestrator.teacher.base_url "
            "to one that runs, or orchestrator.teacher.model and teacher_inference"
        )
    teachers = [_teacher_client(InferenceClient, url, exp) for url in teacher_urls(exp, context)]
    return Teacher(
        teachers,
        config.teacher.served_name,
        deadline_s=config.teacher.deadline_s,
        max_concurrent=config.teacher.max_concurrent,
        top_k=top_k,
        reader=_reader(exp, config.teacher, pool) if _teacher_reads(exp) else None,
    )


def _reader(exp: Experiment, teacher: TeacherConfig, pool: EnvPool) -> TeacherReader:
    """Return what writes conversations for a teacher with another tokenizer.
    Raises OrchestratorError: its tokenizer or chat template cannot be used."""
    assert teacher.model is not None, "the config refuses it"
    how = (exp.model.enable_thinking, exp.model.trust_remote_code)
    try:
        renderer = load_prompt_renderer(teacher.model, "default", *how)
    except EnvError as error:
        raise OrchestratorError(f"orchestrator.teacher.model: {error}") from error
    return TeacherReader(pool.renderer, renderer)


def _teacher_reads(exp: Experiment) -> bool:
    teacher = exp.orchestrator.teacher
    return teacher is not None and teacher.tokenizer == "own"


def _teacher_client(kind: type[InferenceClient], url: str, exp: Experiment) -> InferenceClient:
    config = exp.orchestrator.teacher
    assert config is not None, "the config refuses it"
    return kind(url, _teacher_key(exp, config), config.timeout_s)


def _teacher_key(exp: Experiment, config: TeacherConfig) -> str | None:
    """Of the teacher's servers, the run's own or others: the policy's may have another one."""
    own = None
    if exp.teacher_inference is not None:
        own = os.environ.get(KEY_VARIABLES["teacher"]) or revealed(servers_of(exp, "teacher").api_key)
    return own or os.environ.get(config.api_key_var)


def make_pool(
    exp: Experiment,
    urls: list[str],
    envs: Sequence[EnvConfig],
    sampling: SamplingConfig,
    split: Split,
    name: str = POLICY,
    log_dir: Path | None = None,
) -> EnvPool:
    """Return the environments of one split, with the run's model, renderer and seed; `name`: of the policy on the
    servers; `log_dir`: of environments' processes."""
    imitated = exp.orchestrator.teacher if sampling_role(exp) == "teacher" else None
    kind = TrainEnvConfig if split == "train" else EvalEnvConfig  # a training environment's own is not for evaluations
    own = [env.sampling.over(sampling) if isinstance(env, kind) else sampling for env in envs]
    settings = PoolSettings(
        envs=envs,
        samplings=[each.parameters() for each in own],
        split=split,
        seed=exp.seed,
        beside=_environments_beside(exp, split),
        urls=urls,
        model_name=imitated.served_name if imitated else name,
        is_policy=imitated is None,
        api_key=_teacher_key(exp, imitated) if imitated else _policy_key(exp),
        api_key_var=_key_variable(
            "teacher" if imitated else "inference", (imitated or exp.orchestrator.client).api_key_var
        ),
        max_model_len=exp.max_model_len,
        tokenizer_path=exp.model.name,
        renderer=exp.model.renderer,
        enable_thinking=exp.model.enable_thinking,
        trust_remote_code=exp.model.trust_remote_code,
        chat_template=exp.own_template,
        vision=exp.model.vision is not None,
        environ=judge.variables(exp),
        teacher_reads=_teacher_reads(exp),
        keep_samples=split == "train",
    )
    return EnvPool(settings, exp.orchestrator.env_servers, log_dir / split if log_dir is not None else None)


def with_env_hosts(exp: Experiment, context: RoleContext) -> Experiment:
    """Return the experiment with the job's own nodes that play episodes as addresses; without any, as it is."""
    if not context.env_hosts:
        return exp
    servers = exp.orchestrator.env_servers.model_copy(update={"addresses": context.env_hosts, "key_var": ENV_KEY})
    return exp.model_copy(update={"orchestrator": exp.orchestrator.model_copy(update={"env_servers": servers})})


def _environments_beside(exp: Experiment, split: Split) -> Sequence[EnvConfig]:
    """Return the environments of the other split: those evaluated on, where these are trained on, and the reverse."""
    config = exp.orchestrator
    if config.eval is None or exp.kind != "rl":
        return []
    return config.env if split == "eval" else config.eval.env or config.env


def warn_of_few_open_files(exp: Experiment, limit: int) -> None:
    """Say so where a process may have fewer open files than connections, one an episode whose reply is sampled: those
    above the limit would look like servers that cannot be reached."""
    config = exp.orchestrator
    numbers = [config.env_servers.workers if env.workers is None else env.workers for env in config.env]
    processes = min(max(1, number) if isinstance(number, int) else 1 for number in numbers)
    if config.max_concurrent // processes + OTHER_FILES > limit:
        logger.warning(
            f"a process here may have {limit} open files, and the connections of {config.max_concurrent} episodes in "
            f"flight are shared by {processes}: raise the hard limit (ulimit -Hn), set "
            "orchestrator.env_servers.workers, each of which has its own, or lower orchestrator.max_concurrent"
        )


def make_endless_tasks(pool: EnvPool, state: dict[str, Any]) -> None:
    """Make the tasks of endless environments up to where a resumed run goes on: slow, so not on the event loop."""
    for source, used in zip(pool.sources, state["prompts"]["counts"], strict=False):  # changed ones are refused later
        if source.num_tasks is None and used > 0:
            with contextlib.suppress(Exception):  # an endless taskset's code: the episode that needs the task says why
                source.task(used - 1)


def load_resume_state(paths: RunPaths, step: int) -> dict[str, Any]:
    """Return the orchestrator's state after batch `step`: the checkpoint's half, else the batch's own.

    Raises ArtifactError where neither is whole.
    """
    checkpoint = paths.checkpoint_step(step)

    def read() -> dict[str, Any] | None:
        manifest = read_manifest(checkpoint)
        entry = manifest.files.get(ORCHESTRATOR_STATE)
        if entry is None:
            return None
        check_file(checkpoint / ORCHESTRATOR_STATE, entry, deep=True)
        return json.loads((checkpoint / ORCHESTRATOR_STATE).read_bytes())

    state = retry_read(read, deadline_s=30.0) if checkpoint.exists() else None
    return state if state is not None else read_state(find_batch(paths, step))
