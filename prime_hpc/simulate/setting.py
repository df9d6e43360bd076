"""An experiment as the model of events sees it, and the shapes in which it is tried."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prime_hpc.config import ConfigError, Experiment
from prime_hpc.supervisor.attempt.device_split import split_choices

SHAPE_KEYS = ("trainer", "inference", "servers", "async", "batch", "group", "concurrent")


@dataclass(frozen=True)
class Setting:
    """Counts that decide how a run goes."""

    ranks: int
    servers: int
    engines: int
    """Of one server."""
    gpus_per_engine: int
    """0: the engines are not the run's own."""
    async_level: int
    num_prompts: int
    group_size: int
    max_concurrent: int
    max_tokens: int
    """Of one model call."""
    max_turns: int | None
    max_num_seqs: int | None
    """Requests that one engine decodes together, where it is stated."""
    max_steps: int
    save_interval: int | None
    """Steps between checkpoints; None: none, or decided in the run."""
    masks_stale: bool = False
    """`orchestrator.stale` is `mask`."""
    epochs: int = 1
    """Passes over a batch."""
    updates: int = 1
    """Optimizer steps by a batch, in all passes."""
    greedy: bool = False
    """Each prompt has one more rollout, which does not train."""

    @property
    def inference(self) -> int:
        """GPUs (or processes) of all engines."""
        return self.servers * self.engines * self.gpus_per_engine

    @property
    def devices(self) -> int:
        """GPUs (or processes) of trainer and engines."""
        return self.ranks + self.inference


def setting_of(experiment: Experiment) -> Setting:
    """Return the counts of an experiment.
    Raises ConfigError: it trains nothing by reinforcement, or its trainer trains many runs."""
    if experiment.kind != "rl":
        raise ConfigError(f"kind: {experiment.kind}: only kind: rl has engines beside a trainer to be simulated")
    if experiment.trainer.max_concurrent_runs > 1:
        raise ConfigError("trainer.max_concurrent_runs: a trainer of many runs is not simulated; set it to 1")
    config, engines = experiment.orchestrator, experiment.inference
    turns = [env.max_turns for env in config.env]
    interval = experiment.ckpt.interval if experiment.ckpt is not None else None
    return Setting(
        ranks=experiment.trainer.num_ranks,
        servers=engines.num_replicas if engines is not None else len(config.client.urls),
        engines=engines.data_parallel_size if engines is not None else 1,
        gpus_per_engine=engines.gpus_per_engine if engines is not None else 0,
        async_level=experiment.async_level,
        num_prompts=experiment.num_prompts,
        group_size=config.rollouts_per_example,
        max_concurrent=config.most_in_flight,
        max_tokens=config.sampling.max_tokens,
        max_turns=None if None in turns or not turns else max(turn for turn in turns if turn is not None),
        max_num_seqs=engines.max_num_seqs if engines is not None else None,
        max_steps=experiment.max_steps,
        save_interval=interval if isinstance(interval, int) else None,
        masks_stale=config.stale == "mask",
        epochs=experiment.trainer.epochs_per_batch,
        updates=experiment.trainer.num_mini_batches * experiment.trainer.epochs_per_batch,
        greedy=bool(config.greedy_sources),
    )


def parse_shape(text: str) -> dict[str, int]:
    """Return the numbers of `trainer=2,inference=6`.
    Raises ConfigError: a key that there is not, a value that is no whole number, a key twice."""
    found: dict[str, int] = {}
    for part in text.split(","):
        key, _, value = (word.strip() for word in part.partition("="))
        if key not in SHAPE_KEYS:
            raise ConfigError(f"--shape {text}: {key or part!r} is none of {', '.join(SHAPE_KEYS)}")
        least = 0 if key == "async" else 1
        if not value.isascii() or not value.isdigit() or int(value) < least:
            raise ConfigError(f"--shape {text}: {key} must be a whole number of at least {least}")
        if key in found:
            raise ConfigError(f"--shape {text}: {key} is stated twice")
        found[key] = int(value)
    return found


def reshaped(experiment: Experiment, shape: Mapping[str, int]) -> Experiment:
    """Return the experiment in another shape.
    `shape`: of `parse_shape`: `trainer` ranks, `inference` GPUs of all engines, `servers`, `async` level, `batch` size,
    `group` size, `concurrent` episodes.
    Raises ConfigError: the numbers do not fit each other."""
    words = "--shape " + ",".join(f"{key}={value}" for key, value in shape.items())
    config = experiment.orchestrator
    changes: dict[str, Any] = {"async_level": shape.get("async", experiment.async_level)}
    names = {"batch": "batch_size", "group": "rollouts_per_example", "concurrent": "max_concurrent"}
    config = config.model_copy(update={names[key]: value for key, value in shape.items() if key in names})
    if "concurrent" in shape:
        config = config.model_copy(update={"adaptive_concurrency": None})
    if config.batch_size % config.rollouts_per_example:
        raise ConfigError(f"{words}: batch {config.batch_size} is no multiple of group {config.rollouts_per_example}")
    changes["orchestrator"] = config
    if "trainer" in shape:
        trainer = experiment.trainer.model_copy(update={"num_ranks": shape["trainer"]})
        try:
            trainer.parallel.dims(trainer.num_ranks)
        except ValueError as error:
            raise ConfigError(f"{words}: {error}") from error
        changes["trainer"] = trainer
    if "inference" in shape or "servers" in shape:
        changes["inference"] = _engines(experiment, shape, words)
    return experiment.model_copy(update=changes)


def _engines(experiment: Experiment, shape: Mapping[str, int], words: str) -> Any:
    own = experiment.inference
    if own is None:
        raise ConfigError(f"{words}: the experiment starts no engines (there is no section inference)")
    count, rest = divmod(shape.get("inference", own.num_gpus), own.gpus_per_engine)
    if rest or not count:
        raise ConfigError(f"{words}: inference must be a multiple of {own.gpus_per_engine}, the GPUs of one engine")
    servers = shape.get("servers", own.num_replicas)
    if count % servers:
        if "servers" in shape:
            raise ConfigError(f"{words}: {count} engines cannot be shared out over {servers} servers")
        servers = 1
    if "servers" not in shape and own.num_replicas > 1 and own.data_parallel_size == 1:
        servers = count  # it is servers of one engine that the experiment has many of
    update = {"num_replicas": servers, "data_parallel_size": count // servers, "data_parallel_size_local": None}
    return own.model_copy(update=update)


def other_shapes(setting: Setting) -> list[dict[str, int]]:
    """Return splits of the same number of GPUs that are worth a look."""
    if not setting.gpus_per_engine:
        return []
    found = split_choices(setting.ranks, setting.inference, setting.gpus_per_engine, 5)
    return [{"trainer": trainer, "inference": engines} for trainer, engines in found]


def shape_text(setting: Setting, asked: Setting) -> str:
    """Name a shape by what makes it differ from the experiment's own."""
    parts = [f"trainer={setting.ranks}", f"inference={setting.inference}"]
    names = {"async_level": "async", "max_concurrent": "concurrent", "group_size": "group"}
    if setting.inference == asked.inference and setting.servers != asked.servers:
        parts.append(f"servers={setting.servers}")
    if setting.num_prompts * setting.group_size != asked.num_prompts * asked.group_size:
        parts.append(f"batch={setting.num_prompts * setting.group_size}")
    changed: Sequence[str] = [name for name in names if getattr(setting, name) != getattr(asked, name)]
    return ",".join([*parts, *(f"{names[name]}={getattr(setting, name)}" for name in changed)])
