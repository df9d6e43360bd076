"""What an orchestrator is made of, built from the experiment tree: server urls and clients, the environments' pools.

Called by `main` and by `loop`'s tests.
"""

import json
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from prime_hpc.client.inference import POLICY, InferenceClient
from prime_hpc.config import Experiment
from prime_hpc.config.sections.orchestrator import EnvConfig, SamplingConfig
from prime_hpc.config.sections.teacher import TeacherConfig
from prime_hpc.envs.pool import EnvPool
from prime_hpc.envs.sources import Split
from prime_hpc.observe.context import RoleContext
from prime_hpc.orchestrator.algorithms import get_algorithm
from prime_hpc.orchestrator.errors import OrchestratorError
from prime_hpc.orchestrator.teacher import FrozenServer, Teacher
from prime_hpc.store.artifact import read_manifest
from prime_hpc.store.batches import find_batch, read_state
from prime_hpc.store.checkpoints import ORCHESTRATOR_STATE
from prime_hpc.store.files import retry_read
from prime_hpc.store.layout import RunPaths

DEFAULT_READY_TIMEOUT_S = 900.0


def server_urls(exp: Experiment, context: RoleContext) -> list[str]:
    """`http://host:port/v1` of every server: the supervisor's, else those of `orchestrator.client`; the teacher's
    where the teacher samples."""
    if exp.orchestrator.advantage.type == "sft":
        assert exp.orchestrator.teacher is not None, "the config refuses it"
        return exp.orchestrator.teacher.urls
    if context.inference_urls:
        return list(context.inference_urls)
    client = exp.orchestrator.client
    if client.base_url:
        return [client.base_url] if isinstance(client.base_url, str) else list(client.base_url)
    return [f"http://{client.host}:{client.port}/v1"]


def ready_timeout(exp: Experiment) -> float:
    """Deadline of a server's start or restart, seconds."""
    return exp.inference.ready_timeout_s if exp.inference else DEFAULT_READY_TIMEOUT_S


def make_clients(exp: Experiment, urls: list[str]) -> list[InferenceClient]:
    """One client per server, for weight updates and health."""
    config = exp.orchestrator.client
    key = os.environ.get(config.api_key_var) or (exp.inference.api_key if exp.inference else None)
    if exp.orchestrator.advantage.type == "sft":
        assert exp.orchestrator.teacher is not None, "the config refuses it"
        return [_client(FrozenServer, url, exp.orchestrator.teacher) for url in urls]
    return [InferenceClient(url, key, config.timeout_s, exp.orchestrator.weights_timeout_s) for url in urls]


def make_teacher(exp: Experiment, clients: Sequence[InferenceClient], pool: EnvPool, served_as: str) -> Teacher | None:
    """Who scores the policy's tokens for the configured algorithm; None where nobody need.

    Raises:
        OrchestratorError: the algorithm asks for a teacher, and none is configured.
    """
    config = exp.orchestrator
    asked = get_algorithm(config.advantage.type).teacher
    if asked == "self":
        shown = partial(
            pool.demonstration, field=config.advantage.demonstration, text=config.advantage.demonstration_text
        )
        limits = config.teacher or TeacherConfig(base_url=[client.base_url for client in clients])
        return Teacher(
            clients,
            served_as,
            deadline_s=limits.deadline_s,
            max_concurrent=limits.max_concurrent,
            prefix=shown,
        )
    if asked != "model":
        return None
    if config.teacher is None:
        raise OrchestratorError(
            f"orchestrator.advantage.type = {config.advantage.type} needs a teacher: set orchestrator.teacher.base_url"
        )
    teachers = [_client(InferenceClient, url, config.teacher) for url in config.teacher.urls]
    return Teacher(
        teachers,
        config.teacher.served_name,
        deadline_s=config.teacher.deadline_s,
        max_concurrent=config.teacher.max_concurrent,
    )


def _client(kind: type[InferenceClient], url: str, config: TeacherConfig) -> InferenceClient:
    return kind(url, os.environ.get(config.api_key_var), config.timeout_s)


def make_pool(
    exp: Experiment, urls: list[str], envs: list[EnvConfig], sampling: SamplingConfig, split: Split, name: str = POLICY
) -> EnvPool:
    """The environments of one split, with the run's model, renderer and seed; `name`: of the policy on the servers."""
    imitated = exp.orchestrator.teacher if exp.orchestrator.advantage.type == "sft" else None
    return EnvPool(
        envs,
        model_name=imitated.served_name if imitated else name,
        tokenizer_path=exp.model.name,
        renderer=exp.model.renderer,
        enable_thinking=exp.model.enable_thinking,
        urls=urls,
        api_key_var=(imitated or exp.orchestrator.client).api_key_var,
        sampling=sampling,
        split=split,
        seed=exp.seed,
        max_model_len=exp.max_model_len,
        api_key=exp.inference.api_key if exp.inference else None,
        hold_out=_shares_environments(exp),
    )


def _shares_environments(exp: Experiment) -> bool:
    """Whether an environment is both trained and evaluated on: only then some of its tasks must be held out."""
    config = exp.orchestrator
    if config.eval is None:
        return False
    trained = {env.id for env in config.env}
    return not config.eval.env or any(env.id in trained for env in config.eval.env)


def load_resume_state(paths: RunPaths, step: int) -> dict[str, Any]:
    """The orchestrator's state after batch `step`: the checkpoint's half, else the batch's own.

    Raises ArtifactError where neither is whole.
    """
    checkpoint = paths.checkpoint_step(step)
    if checkpoint.exists() and ORCHESTRATOR_STATE in read_manifest(checkpoint).files:
        return retry_read(lambda: _read_json(checkpoint / ORCHESTRATOR_STATE), deadline_s=30.0)
    return read_state(find_batch(paths, step))


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_bytes())
