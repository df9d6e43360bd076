"""The protocol of an inference backend: all that the rest of the suite asks of what samples from the policy.

**How it is started.** As `python -m prime_hpc.inference.main RUN_DIR --replica I --port P`, whatever the backend:
`main` reads the run, binds the port, reports to the supervisor, and calls `Backend.serve`, which returns when SIGTERM
or SIGINT has ended it, within 5 s, requests in flight answered with `abort`.

**Its routes**, all but `GET /health` behind `guard.KeyGuard`:

- `POST /inference/v1/generate`: token ids and vLLM's sampling parameters in; `choices[]` out, each with `token_ids` (a
  final end-of-sequence token included), `logprobs.content[]` (`token_id`, `logprob`: of the distribution that was
  sampled from, after temperature and truncation), `weight_versions[]` (half-open spans: the policy version of every
  token, exactly), `finish_reason` (`stop`, `length`, `abort`); with `prompt_logprobs`, those of the prompt at
  temperature 1, of each token and of so many likeliest ones at its place; with `trainer.router_replay`,
  `routed_experts`: of every token but the last one, as `envs.routing` reads them. 400 for a request that is wrong or
  cannot be honoured. A backend may answer a request with the header `client.inference.BARE_LOGPROBS` with
  `logprobs.values[]`, one number a token, in place of `content[]`, and with those of a prompt as
  `client.inference.unpack_top` reads them.
- `POST /v1/chat/completions`, `POST /v1/completions`, `GET /v1/models` (`policy` and the model's own name), as OpenAI
  has them.
- `GET /health`: 200 while requests are answered.
- `routes.ROUTES`: the admin routes, in front of a `policy.Policy`, which changes the weights while requests are in
  flight.

**Its memory**: `Backend.overhead_gib`, beside weights and key-value cache.

**What it need not have**: `OverNodes`, servers over several nodes; `TellsWhy`, reasons of engines that died;
`StepsBesideCache`, memory that grows with the sequences of a step.

The table is `config.named_code.BACKENDS`, one line a backend. Imports here are light: lint asks on a login
node.
"""

import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from prime_hpc.config.engine_groups import MODELS, SECTIONS, EngineRole
from prime_hpc.config.errors import ConfigError
from prime_hpc.config.experiment import Experiment
from prime_hpc.config.named_code import BACKENDS
from prime_hpc.config.sections.inference import InferenceConfig, JudgeInferenceConfig
from prime_hpc.config.sections.sampling import SamplingOverride, SamplingSection
from prime_hpc.runtime.device import Device
from prime_hpc.runtime.failures import NodeError
from prime_hpc.store.model.config import read_config
from prime_hpc.store.model.files import is_classifier

POLICY = "policy"
"""Name under which every server serves the policy, beside the model's own."""

REPLICA_SEED_STRIDE = 10_007
"""Replicas must not draw the same noise: two of them sampling one prompt would return one completion twice."""


@dataclass(frozen=True)
class Start:
    """One server that is to be started."""

    experiment: Experiment
    """As its group of engines sees it (`engine_groups.served_by`)."""
    role: EngineRole
    replica: int
    device: Device
    scratch: Path
    """A folder of its own, with a short name; removed afterwards."""
    sock: socket.socket | None
    """Bound, not listening; None: its engines belong to another node's head, and nothing listens. Set SO_REUSEADDR when
    it begins to listen, not before: else this server, killed and started again, does not get its port."""
    key: str
    """Without which a client gets nothing."""
    on_ready: Callable[[dict[str, Any]], None]
    """Called once requests are answered, with facts for the console: `num_engines`, `version`."""

    @property
    def config(self) -> InferenceConfig:
        """The group's section."""
        return section(self.experiment)


@dataclass(frozen=True)
class Refusal:
    """A key that asks a backend for what it cannot do."""

    key: str
    """Dotted, below the tree's root; `inference.` stands for the group's section."""
    reason: str
    remedy: str


class Backend(Protocol):
    """One way to sample from the policy."""

    title: str
    """For people: `vLLM`."""
    overhead_gib: float
    """Memory of a GPU that an engine takes beside weights and key-value cache."""

    def missing(self) -> str:
        """Name the packages that are not installed here, and how they come; empty where nothing lacks."""

    def refusals(self, experiment: Experiment) -> Iterator[Refusal]:
        """Yield what the experiment, as a group of engines sees it, asks for and the backend cannot do.

        Its `device` is the engines', `auto` where it is not decided yet.
        """

    def serve(self, start: Start) -> None:
        """Start, answer requests, end in order when told to.

        Raises:
            ValueError: the config cannot be served; the message names the key.
            RuntimeError: the engines died, or a weight update left them undefined.
        """


class OverNodes(Protocol):
    """A backend one of whose servers can have engines on several nodes (`across_nodes = engine_group`)."""

    def node_options(self, dp_size: int, num_nodes: int, address: str, port: int) -> list[list[str]]:
        """Return further words of `inference.main`'s command on each node, the one that answers HTTP first.

        Args:
            dp_size: data-parallel engines, as many on each node.
            address, port: where its first node waits for the others.
        """


class TellsWhy(Protocol):
    """A backend whose engines say in the server's log why they ended."""

    def death_reason(self, words: str, log: str) -> str:
        """Return why a server ended. `log`: the end of its log, since its last start."""


class StepsBesideCache(Protocol):
    """A backend whose step takes memory for each sequence, beside the key-value cache."""

    def step_bytes(self, *, num_heads: int, shared_width: int, vocab_size: int, max_len: int, width: int) -> int:
        """Return the bytes of one sequence in a decoding step, at most.

        Args:
            num_heads: of a layer.
            shared_width: of a head's keys and values together, where several heads share them; else 0.
            max_len: tokens of the sequence.
            width: bytes of a value of the cache.
        """


def node_options(name: str, dp_size: int, num_nodes: int, address: str, port: int) -> list[list[str]]:
    """Return further words of a server's command on each of its nodes: see `OverNodes`.
    Raises ConfigError: the backend's servers have one node each."""
    backend: Any = load_backend(name)
    if num_nodes == 1:
        return [["--data-parallel-size", str(dp_size)]]
    if not hasattr(backend, "node_options"):
        raise ConfigError(f"a server of {name!r} cannot span nodes: leave it out", "inference.across_nodes")
    spread: OverNodes = backend
    return spread.node_options(dp_size, num_nodes, address, port)


def step_bytes(experiment: Experiment, **sizes: int) -> int:
    """Return the bytes of one sequence in a step of its engines, beside the cache: see `StepsBesideCache`."""
    backend: Any = load_backend(section(experiment).backend)
    return int(backend.step_bytes(**sizes)) if hasattr(backend, "step_bytes") else 0


def death_reason(name: str, words: str, log: str) -> str:
    """Return why a server ended, by its last words and the end of its log: see `TellsWhy`."""
    backend: Any = load_backend(name)
    if not hasattr(backend, "death_reason"):
        return words
    telling: TellsWhy = backend
    return telling.death_reason(words, log)


def section(experiment: Experiment) -> InferenceConfig:
    """Return the tree's inference section, or its defaults where the tree has none."""
    return experiment.inference or InferenceConfig.model_validate({})


def stated_samplings(experiment: Experiment) -> dict[str, SamplingSection | SamplingOverride]:
    """Return each `sampling` section of what is played in training and evaluation, by its key."""
    o = experiment.orchestrator
    sections: dict[str, Any] = {"orchestrator": o, "orchestrator.eval": o.eval}
    if not experiment.trains:
        sections = {experiment.kind: experiment.episodes}
    found: dict[str, SamplingSection | SamplingOverride] = {}
    for key, section in sections.items():
        if section is not None:
            own = {f"{key}.env.{i}": env for i, env in enumerate(section.env)}
            found |= {f"{part}.sampling": each.sampling for part, each in ({key: section} | own).items()}
    return found


def load_backend(name: str, key: str = "inference.backend") -> Backend:
    """Return the backend that a config names: one of the table, or `module:ATTRIBUTE`.
    Raises ConfigError: there is none at that path; names the key."""
    module, _, attribute = BACKENDS.get(name, name).partition(":")
    try:
        found: Backend = getattr(import_module(module), attribute)
    except Exception as error:  # a user's module may raise anything, and hold what is no Python
        raise ConfigError(f"cannot import {name!r}: {type(error).__name__}: {error}", key) from error
    lacks = [part for part in ("title", "overhead_gib", "missing", "refusals", "serve") if not hasattr(found, part)]
    if lacks:
        raise ConfigError(f"{name!r} is no inference backend: it has no {', '.join(lacks)}", key)
    return found


def engines_title(servers: InferenceConfig) -> str:
    """Name the backend of a group for people."""
    return load_backend(servers.backend).title


def scores(experiment: Experiment) -> bool:
    """Return whether a group of engines, as it sees the experiment, serves a model that scores and writes no reply."""
    servers = experiment.inference
    if isinstance(servers, JudgeInferenceConfig):
        return servers.runner == "pooling"
    return is_classifier(read_config(experiment.model.name) or {})


def refusals_of(backend: Backend, experiment: Experiment, role: EngineRole) -> Iterator[Refusal]:
    """Yield a backend's refusals of a group of engines by the keys that state the group.
    `experiment`: as the group sees it, with its device."""
    for refusal in backend.refusals(experiment):
        is_own = refusal.key.startswith("inference.")
        key = f"{SECTIONS[role]}{refusal.key.removeprefix('inference')}" if is_own else refusal.key
        remedy = refusal.remedy.replace("inference.backend", f"{SECTIONS[role]}.backend")
        yield Refusal(MODELS[role] if key == "model.name" else key, refusal.reason, remedy)


def check_backend(experiment: Experiment, role: EngineRole, device: Device) -> Backend:
    """Return the backend of a group of engines, ready to start on a device.
    Raises ValueError: it is not installed, or cannot do what the config asks for."""
    name, key = section(experiment).backend, SECTIONS[role]
    backend = load_backend(name, f"{key}.backend")
    if missing := backend.missing():
        raise NodeError(f"{key}.backend = {name}: {missing}")
    for refusal in refusals_of(backend, experiment.model_copy(update={"device": device.type}), role):
        raise ValueError(f"{refusal.key}: {refusal.reason}; {refusal.remedy}")
    return backend
