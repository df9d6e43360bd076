"""The orchestrator's section: environments, sandboxes, batching, staleness, evaluation, the client."""

from collections.abc import Iterable
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from prime_hpc.config.env_files import with_whole_paths
from prime_hpc.config.secret import Arguments
from prime_hpc.config.sections.advantage import AdvantageConfig
from prime_hpc.config.sections.base import Section
from prime_hpc.config.sections.curriculum import CurriculumConfig
from prime_hpc.config.sections.names import AdvantageName
from prime_hpc.config.sections.sampling import EvalSamplingConfig, SamplingConfig, SamplingOverride
from prime_hpc.config.sections.teacher import TeacherConfig


def _checked_workers(workers: int | Literal["auto"]) -> int | Literal["auto"]:
    if workers != "auto" and workers < 0:
        raise ValueError(f"{workers} workers: state 0 (the orchestrator's own process), a number, or auto")
    return workers


MOST_ROLLOUTS = 4096
"""Of one prompt: the ids of a batch's samples have so much room for their number in the group."""


class SandboxConfig(Section):
    """A sandbox for each episode: no view of the host's files, processes, network and keys; all of it is gone at the
    episode's end."""

    runtime: Literal["bubblewrap", "apptainer"] = "bubblewrap"
    """Its maker; both need user namespaces, no daemon and no root. `bubblewrap` (`bwrap`): the node's own system, read
    only; `apptainer`: that of `image`."""
    image: str | None = None
    """`apptainer`: absolute path of the image that it has for a system, a file (.sif) or an unpacked folder, with a
    Python of 3.9 or newer as `python3`, which runs its programs. A folder starts sooner."""
    network: bool = False
    """Give it the node's network, and with it whatever listens there; else it has a loopback interface of its own."""
    packages: bool = False
    """Its Python has the packages of this one (those of the image), read-only; else the standard library alone, which
    starts sooner."""
    read_only: list[str] = []
    """Further absolute paths of the node that it may read, at the same place."""
    memory_mib: int = Field(1024, ge=32)
    """Of all its processes together; also the address space of each."""
    disk_mib: int = Field(64, ge=1)
    """Of its files, which are in memory too, and of each of them."""
    files: int = Field(10_000, ge=100)
    """Files and folders in it at most."""
    processes: int = Field(64, ge=1)
    """Processes and threads at once."""
    open_files: int = Field(128, ge=16)
    """Of one process."""
    cpu_s: float = Field(30, gt=0)
    """CPU time of one command with all that it starts."""
    command_s: float = Field(30, gt=0)
    """Wall-clock time of one command."""
    start_s: float = Field(20, gt=0)
    """Deadline of its start, which is none of the command's time: an episode whose sandbox does not start has failed,
    and counts as no reward."""
    output_kib: int = Field(256, ge=1)
    """Kept of each output of a command; the rest is dropped."""
    warm: int = Field(2, ge=0)
    """Sandboxes that are started ahead and wait, of each process that plays the environment."""
    parallel: int | None = Field(None, ge=1)
    """Commands that run at once, in each process that plays the environment; default: its cores."""

    @model_validator(mode="after")
    def _has_an_image(self) -> "SandboxConfig":
        if self.runtime == "apptainer" and self.image is None:
            raise ValueError("runtime: apptainer needs image, the path of a .sif or of an unpacked folder")
        if self.image is not None and (self.runtime != "apptainer" or not self.image.startswith("/")):
            raise ValueError(f"image: {self.image!r}: an absolute path, with runtime: apptainer")
        return self

    @field_validator("read_only")
    @classmethod
    def _are_absolute(cls, paths: list[str]) -> list[str]:
        for path in paths:
            if not path.startswith("/") or path.rstrip("/") in ("", "/proc", "/dev", "/work", "/tmp"):
                raise ValueError(f"{path!r} cannot be shown in a sandbox: name an absolute path below /")
        return paths


class EnvConfig(Section):
    """One environment: an installed verifiers taskset by name."""

    id: str
    """Taskset: one that prime-hpc bundles (`reverse-text`, `calculator`, `wordle`, ...: prime_hpc/envs/README.md), a
    benchmark's name, or any importable module that follows verifiers' v1 contract."""
    name: str | None = None
    """Label in metrics; default the id."""
    args: Arguments = {}
    """Arguments of the taskset, by its own names."""
    env_args: Arguments = {}
    """Arguments of the verifiers environment around the taskset, by its own names."""
    ratio: float = Field(1.0, gt=0)
    """Share of the prompts, relative to the other environments."""
    harness: str | None = None
    """Agent harness; default: prime-hpc's in-process one, or the taskset's own."""
    max_turns: int | None = Field(8, ge=1)
    """Model calls of one episode at most."""
    timeout_s: float = Field(120, gt=0)
    """Deadline of one episode."""
    workers: int | Literal["auto"] | None = None
    """Processes that play its episodes, a number or `auto`; default `env_servers.workers` of the section."""
    sandbox: SandboxConfig | None = None
    """Run what its episodes run (commands, tools, programs of a model) in sandboxes. An environment that cannot do
    without has them anyhow."""

    @property
    def label(self) -> str:
        """Its name, else its id."""
        return self.name or self.id

    @field_validator("id")
    @classmethod
    def _is_no_file(cls, ident: str) -> str:
        if ident.endswith(".py"):
            folder, _, file = ident.rpartition("/")
            raise ValueError(
                f"{ident} is a file, an id the name of a module: write {file.removesuffix('.py')}, with the folder on "
                f"PYTHONPATH (PYTHONPATH={folder or '.'} before the command; of a job slurm.env.PYTHONPATH, absolute)"
            )
        return ident

    @field_validator("args")
    @classmethod
    def _from_the_root(cls, args: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        return with_whole_paths(info.data.get("id", ""), args)

    @field_validator("workers")
    @classmethod
    def _counts(cls, workers: int | Literal["auto"] | None) -> int | Literal["auto"] | None:
        return None if workers is None else _checked_workers(workers)


def check_labels(envs: Iterable[EnvConfig]) -> None:
    """Refuse two environments of one label: the figures and results of one would take the other's place.
    Raises ValueError: names the label."""
    names = [env.label for env in envs]
    if doubled := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"env: two environments are called {doubled[0]}; give one of them a name")


class EnvServersConfig(Section):
    """Processes of their own for episodes: what an environment does there harms no other one, nor the run."""

    workers: int | Literal["auto"] = 0
    """Of each environment. 0: its episodes are played in the orchestrator's process, on one thread, which is the
    quickest for rewards that cost less than a millisecond; `auto`: one at first, and one more for as long as all are
    busy for more than 70 % of a core."""
    max_workers: int | None = Field(None, ge=1)
    """`auto`: at most so many of each environment; default: the process's cores but one."""
    memory_gib: float | None = Field(None, gt=0)
    """A worker that holds more is replaced, once what it plays has ended; at half more it is ended at once. Default: no
    limit."""
    stall_s: float = Field(30.0, gt=0)
    """An environment's code that keeps its worker's event loop for longer is interrupted, and where that does not help
    the worker is ended; the other episodes of that worker are played again."""
    silence_s: float = Field(60.0, gt=0)
    """A worker that says nothing for so long (it speaks every second, whatever its environment does) is ended."""
    max_restarts: int = Field(5, ge=0)
    """How often in a row a worker may end before it has played one episode."""
    addresses: list[str] = []
    """`host:port` of hosts that run elsewhere, `python -m prime_hpc.envs.workers.host --listen`: the workers are
    started there, in turn, and none on this machine."""
    key_var: str = "PRIMEHPC_ENV_SERVER_KEY"
    """Environment variable with the key of the hosts at `addresses`."""

    @field_validator("addresses")
    @classmethod
    def _are_addresses(cls, addresses: list[str]) -> list[str]:
        for address in addresses:
            host, _, port = address.rpartition(":")
            if not host or not port.isdecimal() or not 0 < int(port) < 65536:
                raise ValueError(f"{address!r} is no address: write host:port")
        return addresses

    @model_validator(mode="after")
    def _has_a_bound(self) -> "EnvServersConfig":
        if self.addresses and self.workers == "auto" and self.max_workers is None:
            raise ValueError("workers: auto at addresses needs max_workers: this machine's cores say nothing of theirs")
        return self

    @field_validator("workers")
    @classmethod
    def _counts(cls, workers: int | Literal["auto"]) -> int | Literal["auto"]:
        return _checked_workers(workers)


class TrainEnvConfig(EnvConfig):
    """One environment that is trained on, with what it does otherwise than the others."""

    rollouts_per_example: int | None = Field(None, ge=1, le=MOST_ROLLOUTS)
    """Rollouts of one of its prompts; default `orchestrator.rollouts_per_example`. A batch has as many prompts as ever,
    so more of these make it larger."""
    algorithm: AdvantageName | None = None
    """Its algorithm, named as in `orchestrator.advantage.type`, whose other settings it shares; none with a teacher."""
    sampling: SamplingOverride = SamplingOverride()
    """Its sampling; what is not stated is `orchestrator.sampling`'s."""


class EvalEnvConfig(EnvConfig):
    """One environment that is evaluated, with what it does otherwise than the others."""

    interval: int | None = Field(None, ge=1)
    """Every so many steps; default `orchestrator.eval.interval`."""
    num_examples: int | None = Field(None, ge=1)
    """Tasks; default `orchestrator.eval.num_examples`."""
    rollouts_per_example: int | None = Field(None, ge=1)
    """Completions of each task; default `orchestrator.eval.rollouts_per_example`."""
    sampling: SamplingOverride = SamplingOverride()
    """Its sampling; what is not stated is `orchestrator.eval.sampling`'s."""


class EvalConfig(Section):
    """Evaluation on held-out tasks, interleaved with training."""

    interval: int = Field(20, ge=1)
    """Every so many steps (and before the first and after the last)."""
    num_examples: int = Field(128, ge=1)
    """Tasks of each environment."""
    rollouts_per_example: int = Field(1, ge=1)
    """Completions of each task; of several, `eval/<env>/pass@k` is the chance that one of k is good."""
    pass_threshold: float = 1.0
    """A completion is good from this reward on; so are training's rollouts (`groups/solved_all`, `solved_none`)."""
    sampling: EvalSamplingConfig = EvalSamplingConfig()
    """Greedy and as long as in training, where it does not say otherwise."""
    prefer: Literal["eval", "train"] = "eval"
    """The episodes that start first. `eval`: an evaluation is of one version and soon there, and rollouts wait for it;
    `train`: it takes what room rollouts leave, at least a sixteenth of `orchestrator.max_concurrent`, and the last one
    runs on after the last batch. Its tokens may be of several versions then: `eval/version_min` and `_max` say so."""
    env: list[EvalEnvConfig] = []
    """Held-out environments; default: the training ones, on their `eval` split where they have one, else on a tenth of
    the tasks, which is then not trained on."""

    @property
    def intervals(self) -> list[int]:
        """Of each environment; of all, where none is stated."""
        return [env.interval or self.interval for env in self.env] or [self.interval]


class ClientConfig(Section):
    """How the orchestrator reaches the servers when it does not start them."""

    base_url: list[str] | str | None = None
    """`http://host:port/v1` of each server; default: the run's own servers."""
    host: str = "127.0.0.1"
    """Host, with `port`, instead of a whole URL."""
    port: int = Field(8000, ge=1, le=65535)
    """Port of a server on `host`."""
    api_key_var: str = "VLLM_API_KEY"
    """Environment variable that holds the servers' key."""
    timeout_s: float = Field(120, gt=0)
    """Deadline of one HTTP request."""

    @property
    def urls(self) -> list[str]:
        """Of the servers, as stated or by host and port."""
        if self.base_url:
            return [self.base_url] if isinstance(self.base_url, str) else list(self.base_url)
        return [f"http://{self.host}:{self.port}/v1"]


class TracesConfig(Section):
    """Every rollout as a line of JSON in `<run>/traces`, one file a step."""

    max_mib_per_step: float = Field(64, gt=0)
    """Size of a step's file at most; further rollouts are counted, not written."""
    keep_steps: int | None = Field(None, ge=1)
    """Newest files kept; default: all."""
    tokens: bool = False
    """Token ids and masks too."""


class AdaptiveConcurrencyConfig(Section):
    """Episodes in flight by each server's queue, KV cache and preemptions, looked at every second: more while the queue
    is empty and the cache has room, fewer after many preemptions. A server that does not tell them keeps its share."""

    least: int = Field(1, ge=1)
    """Episodes in flight at least, over all servers."""
    most: int = Field(8192, ge=1)
    """Episodes in flight at most, over all servers."""

    @model_validator(mode="after")
    def _has_room(self) -> "AdaptiveConcurrencyConfig":
        if self.least > self.most:
            raise ValueError(f"least ({self.least}) is above most ({self.most})")
        return self


class OrchestratorConfig(Section):
    """Collects rollouts, scores them, packs batches, keeps the engines on the newest policy."""

    batch_size: int = Field(128, ge=1)
    """Rollouts a step; a multiple of `rollouts_per_example`."""
    rollouts_per_example: int = Field(8, ge=1, le=MOST_ROLLOUTS)
    """Rollouts of one prompt (the group)."""
    max_concurrent: int = Field(256, ge=1)
    """Episodes in flight at most; with `adaptive_concurrency`, at first."""
    adaptive_concurrency: AdaptiveConcurrencyConfig | None = None
    """As many episodes in flight as the engines' own figures ask for, in place of a constant; off when absent."""
    stale: Literal["resample", "mask"] = "resample"
    """The fate of tokens of an older version than `async_level` allows. `resample`: the whole group is sampled again,
    and waited for the second time. `mask`: nothing is thrown away or waited for; such tokens are part of what is scored
    and of the context, and only the younger ones train."""
    sampling: SamplingConfig = SamplingConfig()
    """Training rollouts' sampling."""
    env: list[TrainEnvConfig] = []
    """Training environments."""
    env_servers: EnvServersConfig = EnvServersConfig()
    """Processes that play the episodes of training and evaluation."""
    eval: EvalConfig | None = None
    """Evaluation; off when absent."""
    advantage: AdvantageConfig = AdvantageConfig()
    """Advantages."""
    curriculum: CurriculumConfig = CurriculumConfig()
    """The choice of tasks that are drawn and of groups that train."""
    teacher: TeacherConfig | None = None
    """The teacher of `advantage.type = opd` and `sft`."""
    client: ClientConfig = ClientConfig()
    """Servers."""
    weights_timeout_s: float = Field(1800, gt=0)
    """Deadline of the wait for a new version."""
    max_failed_share: float = Field(0.9, gt=0, le=1)
    """End the run when more than this share of the last episodes failed: 200, or as many as may be in flight. Below 1
    also when five times as many have ended whose groups were all dropped for want of rollouts that may train."""
    log_samples: int = Field(2, ge=0)
    """Sample rollouts written to the metrics at each step."""
    traces: TracesConfig | None = None
    """Every rollout's text, scores and fate, also where it failed, grew stale or was rejected; off when absent."""
    keep_rollouts: int | None = Field(None, ge=1)
    """Newest batches kept on disk; default: all, which `replay` and `export` need."""
    compress_rollouts: bool = False
    """Compress batches (zstd) in the background once they were trained on; `replay` and `export` read both kinds."""
    bench: bool = False
    """Run a few steps without a trainer, print a table, end."""

    @property
    def most_in_flight(self) -> int:
        """Episodes in flight at most, at any time."""
        return self.adaptive_concurrency.most if self.adaptive_concurrency is not None else self.max_concurrent

    @property
    def eval_sampling(self) -> SamplingConfig:
        """How evaluations are sampled, with training's length where they state none."""
        assert self.eval is not None
        stated = self.eval.sampling.model_dump()
        return SamplingConfig(**stated | {"max_tokens": stated["max_tokens"] or self.sampling.max_tokens})

    def group_size(self, source: int) -> int:
        """Rollouts of one prompt of a training environment."""
        return self.env[source].rollouts_per_example or self.rollouts_per_example

    def num_rollouts(self, source: int) -> int:
        """Episodes of one of its prompts: the group, and the greedy one of an algorithm that asks for it."""
        return self.group_size(source) + self.advantage_of(source).has_greedy

    @property
    def greedy_sources(self) -> list[int]:
        """Training environments whose prompts have a greedy rollout, too."""
        return [source for source in range(len(self.env)) if self.advantage_of(source).has_greedy]

    def advantage_of(self, source: int) -> AdvantageConfig:
        """How a training environment's rewards become advantages."""
        own = self.env[source].algorithm
        return self.advantage if own is None else self.advantage.model_copy(update={"type": own})

    @property
    def policy_samplings(self) -> list[SamplingConfig]:
        """`policy_sampling` of each training environment."""
        if self.advantage.imitates:
            return [SamplingConfig()] * len(self.env)
        return [env.sampling.over(self.sampling) for env in self.env]

    @property
    def policy_sampling(self) -> SamplingConfig:
        """The distribution of which the trainer computes log-probabilities: what is sampled, unless a teacher does."""
        return SamplingConfig() if self.advantage.imitates else self.sampling
