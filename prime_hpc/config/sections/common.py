"""Shared sections: the model, checkpoints, W&B, logging. Each is stated once, at the tree's root."""

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from prime_hpc.config.sections.base import Section, from_here, in_home
from prime_hpc.config.sections.lora import LoraConfig

Dtype = Literal["float32", "bfloat16", "float16"]


class ActivationCheckpointConfig(Section):
    """Recompute activations in the backward pass instead of keeping them (`--model.ac`)."""

    freq: int = Field(1, ge=1)
    """Every freq-th transformer block is recomputed."""
    mode: Literal["full", "selective"] = "full"
    """`full` keeps only a block's input; `selective` also the results of matrix products and attention, which cost most
    to compute again."""
    offload: bool = False
    """Keep the recomputed blocks' inputs in host memory between the forward and the backward pass."""


class ModelConfig(Section):
    """The policy: which weights, in which precision, which chat template."""

    name: str = "Qwen/Qwen3-0.6B"
    """Local directory or hub name of a Hugging Face causal language model."""
    dtype: Dtype = "bfloat16"
    """Compute precision of the trainer's forward and backward pass, and of the engines."""
    head_dtype: Literal["model", "float32"] = "model"
    """The type to which the output head's logits are rounded, in the trainer and in the engines alike: `model.dtype`,
    or not at all (bfloat16 products summed and kept in float32)."""
    router_dtype: Literal["model", "float32"] = "model"
    """The type in which the routers of a mixture of experts compute their logits, in the trainer and in the engines
    alike: `model.dtype`, or float32."""
    fused_head: bool = True
    """On GPUs in half precision, compute log-probabilities by kernels that never make float32 logits. Not used beside
    `head_dtype: float32`, truncated sampling, tensor parallelism, or a head with a bias or capped logits."""
    attn: Literal["auto", "flash", "sdpa"] = "auto"
    """Varlen attention of the trainer. `auto`: on GPUs in half precision torch's own kernel (FlashAttention 2; 3 where
    `flash_attn_interface` is installed) or flash-attn's where that is, else padded sdpa; `flash`: flash-attn or an
    error."""
    compile: bool = False
    """torch.compile each transformer block of the trainer; attention and experts stay outside of the graphs."""
    ac: ActivationCheckpointConfig | None = None
    """Activation checkpointing; off when absent."""
    lora: LoraConfig | None = None
    """Low-rank adapters; off when absent: the whole model is trained."""
    fp8: bool = False
    """Multiply in float8 in the trainer's transformer blocks (GPUs of compute capability 8.9 and above)."""
    vision: Literal["frozen", "trained"] | None = None
    """Prompts may hold images, for a model that sees them (Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen3.5): `frozen` trains
    the language model alone, `trained` what makes embeddings of images too. Default: text alone."""
    trust_remote_code: bool = False
    """Run model code that ships with the weights."""
    renderer: str = "auto"
    """How messages become tokens: a `renderers` name (`qwen3`, `default`, ...); `auto` looks at the model, and refuses
    one whose chat template writes other prompts than its renderer."""
    enable_thinking: bool = False
    """Let the chat template open a think section."""

    @field_validator("name")
    @classmethod
    def _has_a_home(cls, name: str) -> str:
        in_home(name)
        return name

    @model_validator(mode="after")
    def _trains_one_thing(self) -> "ModelConfig":
        if self.lora is not None and self.vision == "trained":
            raise ValueError(
                "vision = trained beside lora, which adapts the language model alone: set vision to frozen"
            )
        return self


class CkptConfig(Section):
    """Checkpoints. Off unless `--ckpt` (or any `--ckpt.*`) is given."""

    interval: int | Literal["auto"] = 50
    """Save every so many steps; the last step is always saved. `auto`: as often as the measured cost of a save and the
    failure rate of the nodes make best (Young/Daly)."""
    save_async: bool = False
    """Write in the background: the step goes on as soon as the state is copied to host memory or `staging_dir`."""
    staging_dir: Path | None = None
    """Node-local directory that holds the copy of an asynchronous save; default: host memory."""
    keep_last: int | None = Field(None, ge=1)
    """Keep only the newest so many checkpoints (and those of `keep_interval`); default: all."""
    keep_interval: int | None = Field(None, ge=1)
    """Keep a checkpoint of every so many steps for ever, the first one saved at or after each multiple; alone, it keeps
    them and the newest."""
    path: Path | None = None
    """Directory of the checkpoints; default `<run>/checkpoints`."""
    resume_step: int | Literal["latest"] | Path | None = None
    """Resume from this step's checkpoint; `latest` takes the newest whole one; a path, the checkpoint of another run:
    its run directory or `checkpoints` (the newest one there) or one `step_<n>`."""
    timeout_s: float = Field(3600, gt=0)
    """Deadline of writing one checkpoint."""

    _from_here = field_validator("staging_dir", "path", "resume_step")(from_here)

    @field_validator("interval")
    @classmethod
    def _at_least_one(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 1:
            raise ValueError(f"must be at least 1 step, or auto; got {value}")
        return value

    @field_validator("resume_step")
    @classmethod
    def _known_step(cls, value: int | str | Path | None) -> int | str | Path | None:
        if isinstance(value, int) and value < 1:
            if value == -1:
                return "latest"
            raise ValueError(f"must be a step, latest, or a path; got {value}")
        return value


class PrometheusConfig(Section):
    """Figures of all roles and servers for Prometheus, from the supervisor."""

    serve: bool = True
    """Answer `GET /metrics` to whoever sends the token in `<folder>/token`, and to nobody else."""
    port: int = Field(0, ge=0, le=65535)
    """Port of the supervisor's node; 0: a free one, told in `<folder>/<run>.json`."""
    textfile: bool = False
    """Write `<folder>/<run>.prom` for node exporter's textfile collector, where no port may be opened."""
    folder: Path | None = None
    """Directory of the token, targets and text files; default `<output_dir>/.prometheus`, of a sweep's point the
    one beside its sweep; runs share it."""
    servers: bool = True
    """Hand on what the servers say of themselves, all of it."""
    every_s: float = Field(15.0, ge=1)
    """Seconds between two collections."""

    _from_here = field_validator("folder")(from_here)

    @model_validator(mode="after")
    def _does_something(self) -> "PrometheusConfig":
        if not self.serve and not self.textfile:
            raise ValueError("neither serve nor textfile: leave the section out, or switch one of them on")
        return self


class MlflowConfig(Section):
    """MLflow beside the files: a run for the trainer and one for the orchestrator, in which a later attempt goes on.
    Needs `pip install mlflow-skinny`."""

    tracking_uri: str | None = None
    """A server's address; default: MLFLOW_TRACKING_URI, else files in `<run>/mlflow/store`."""
    experiment: str = "prime-hpc"
    """Name under which MLflow collects runs."""


class WandbConfig(Section):
    """Weights & Biases. Offline where it has no credentials; it can never stop a run."""

    project: str = "prime-hpc"
    """W&B project."""
    name: str | None = None
    """Run name; default the experiment's name. Roles append `-trainer`, `-orchestrator`."""
    id: str | None = None
    """Ids of the roles' W&B runs: `<id>-trainer`, `<id>-orchestrator`; those that exist are resumed. Default: a
    requeued or resumed job goes on in the W&B runs of its run directory."""
    trainer_id: str | None = None
    """W&B run of the trainer, by its whole id, in place of `id`."""
    orchestrator_id: str | None = None
    """W&B run of the orchestrator, likewise."""
    samples_interval: int | None = Field(None, ge=1)
    """Every so many steps the orchestrator's W&B run gets `samples` and `distributions`; default: never."""
    samples: bool | None = None
    """The logged rollouts (`orchestrator.log_samples` of them) as a table; default: yes, every `samples_interval`."""
    distributions: bool | None = None
    """Rewards, advantages and lengths of the batch as histograms; default: yes, every `samples_interval`."""
    offline: bool | None = None
    """Force offline (or online) mode; default: as WANDB_MODE says, else offline where W&B finds no credentials
    (WANDB_API_KEY, `wandb login`). Where its server cannot be reached: offline, whatever is said."""

    @model_validator(mode="after")
    def _at_some_time(self) -> "WandbConfig":
        if self.samples_interval is None and (self.samples or self.distributions):
            raise ValueError("samples and distributions need samples_interval, the steps between two of them")
        return self

    def run_id(self, role: str) -> str | None:
        """Return the stated id of a role's W&B run."""
        own = {"trainer": self.trainer_id, "orchestrator": self.orchestrator_id}.get(role)
        return own or (f"{self.id}-{role}" if self.id else None)


class LogConfig(Section):
    """Console and log files."""

    level: Literal["TRACE", "DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Least severe level that is written."""
    json_lines: bool = False
    """Write log files as one JSON object a line."""
