"""The one experiment tree. Roles receive views computed from it, never copies.

`Experiment` is what `run.yaml` holds and what every role reads back with `load_run`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from prime_hpc.config.secret import secrets_of
from prime_hpc.config.sections.base import Section, in_home
from prime_hpc.config.sections.common import (
    CkptConfig,
    LogConfig,
    MlflowConfig,
    ModelConfig,
    PrometheusConfig,
    WandbConfig,
)
from prime_hpc.config.sections.inference import (
    InferenceConfig,
    JudgeInferenceConfig,
    TeacherInferenceConfig,
    WeightsConfig,
)
from prime_hpc.config.sections.names import directory_name
from prime_hpc.config.sections.network import NetworkConfig
from prime_hpc.config.sections.orchestrator import EnvConfig, OrchestratorConfig
from prime_hpc.config.sections.sft import SFTConfig
from prime_hpc.config.sections.slurm import SlurmConfig
from prime_hpc.config.sections.standalone_eval import EpisodesConfig, StandaloneEvalConfig
from prime_hpc.config.sections.supervisor import AlarmsConfig, KubernetesConfig, SupervisorConfig
from prime_hpc.config.sections.synthesize import SynthesizeConfig
from prime_hpc.config.sections.teacher import check_teacher
from prime_hpc.config.sections.trainer import TrainerConfig

COMPONENTS = ("trainer", "orchestrator", "inference", "sft", "eval", "synthesize")
ALONE = ("eval", "synthesize")
"""Kinds that train nothing: they play episodes, each with the section of its name."""
NO_ROOM = "together with a prompt: lower it, or raise seq_len, or that limit where it is stated"
TOO_FEW = "rollouts_per_example must be at least 2 (or set advantage.type = none)"


class Experiment(Section):
    """Everything that a run is, stated once."""

    kind: Literal["rl", "sft", "eval", "synthesize"] = "rl"
    """The loop that runs; `eval` and `synthesize` train nothing."""
    name: str = "run"
    """Run name; the run directory is `<output_dir>/<name>` (`--exp-id` is an alias)."""
    output_dir: Path = Path("outputs")
    """Parent of the run directory, on a file system that all nodes share."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of everything random: weights that are drawn, the order of tasks and rows. Replies of two runs of one seed
    differ all the same: engines draw them in the order in which requests come (`prime-hpc replay` repeats batches)."""
    max_steps: int = Field(100, ge=1)
    """Steps in all, of a batch each, also after a resume. SFT may state `sft.data.num_epochs` instead."""
    async_level: int = Field(2, ge=0)
    """Batch n holds no token sampled by a version older than max(0, n - 1 - async_level); 0 is on-policy."""
    seq_len: int = Field(2048, ge=2)
    """Longest sample in tokens, prompt and completions together."""
    model: ModelConfig = ModelConfig()
    """The policy."""
    ckpt: CkptConfig | None = None
    """Checkpoints; off when absent."""
    wandb: WandbConfig | None = None
    """Weights & Biases; off when absent."""
    mlflow: MlflowConfig | None = None
    """Send the numbers to MLflow too."""
    tensorboard: bool = False
    """Write the numbers as TensorBoard's event files too: `<run>/tensorboard/<role>` (pip install tensorboard)."""
    prometheus: PrometheusConfig | None = None
    """Hand figures to Prometheus; off when absent."""
    log: LogConfig = LogConfig()
    """Logging."""
    weights: WeightsConfig = WeightsConfig()
    """Weight versions between trainer and engines."""
    trainer: TrainerConfig = TrainerConfig()
    """FSDP2 trainer."""
    orchestrator: OrchestratorConfig = OrchestratorConfig()
    """Rollouts."""
    inference: InferenceConfig | None = None
    """Servers to start; absent: attach to `orchestrator.client`."""
    teacher_inference: TeacherInferenceConfig | None = None
    """Servers to start for the teacher; absent: `orchestrator.teacher.base_url`, where there is one at all."""
    judge_inference: JudgeInferenceConfig | None = None
    """Servers to start for a model that rewards ask; off when absent."""
    sft: SFTConfig = SFTConfig()
    """Supervised fine-tuning."""
    eval: StandaloneEvalConfig = StandaloneEvalConfig()
    """Evaluation as a job of its own (`kind: eval`)."""
    synthesize: SynthesizeConfig = SynthesizeConfig()
    """Synthetic data, or replies to prompts, as a job of its own (`kind: synthesize`)."""
    supervisor: SupervisorConfig = SupervisorConfig()
    """Deadlines of the process that watches the roles."""
    alarms: AlarmsConfig = AlarmsConfig()
    """Rules over the run's figures that warn, save, stop, or tell somebody."""
    launch: Literal["auto", "slurm", "local"] = "auto"
    """The place at which `submit` starts the job: `auto` takes Slurm where there is an sbatch, else this machine."""
    slurm: SlurmConfig = SlurmConfig()
    """The Slurm job."""
    kubernetes: KubernetesConfig | None = None
    """The pods of `render --target kubernetes`."""
    network: NetworkConfig = NetworkConfig()
    """Ports and networks."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """The device of trainer and engines. `auto`: the GPUs that the job asks for, or, on one machine, those that are
    there; `cuda`: GPUs or an error; `cpu`: no GPU, wherever it runs."""
    clean: bool = False
    """Start over: delete a run directory of this name that no running job holds."""
    inference_gpu_ids: list[int] | None = None
    """GPUs of the engines on one node, as positions (0, 1, ...) among those that the job or CUDA_VISIBLE_DEVICES gives;
    default: split in order."""
    teacher_gpu_ids: list[int] | None = None
    """GPUs of the teacher's engines on one node, as positions likewise; default: those after the policy's."""
    judge_gpu_ids: list[int] | None = None
    """GPUs of the judge's engines on one node, as positions likewise; default: those after the teacher's."""
    trainer_gpu_ids: list[int] | None = None
    """GPUs of the trainer on one node, as positions likewise."""

    @field_validator("name")
    @classmethod
    def _names_a_directory(cls, name: str) -> str:
        return directory_name(name)

    @field_validator("output_dir")
    @classmethod
    def _of_home(cls, value: Path) -> Path:
        return in_home(value)

    @property
    def run_dir(self) -> Path:
        """Directory that holds everything this run writes."""
        return self.output_dir / self.name

    @property
    def num_steps(self) -> int | None:
        """Optimizer updates in all; None where the data decide (`sft.data.num_epochs`): the trainer counts them."""
        return None if self.kind == "sft" and self.sft.data.num_epochs is not None else self.max_steps

    @property
    def micro_batch_tokens(self) -> int:
        """Token budget of one packed micro-batch."""
        of_sft = (self.sft.data.seq_len or self.seq_len) * self.sft.num_sides
        return self.trainer.micro_batch_tokens or (of_sft if self.kind == "sft" else self.seq_len)

    @property
    def max_model_len(self) -> int:
        """Longest prompt + completion that the engines accept."""
        return (self.inference.max_model_len if self.inference else None) or self.seq_len

    @property
    def context(self) -> int:
        """Tokens of a sample that the model is trained for: the engines' limit, or the data's."""
        return self.max_model_len if self.kind == "rl" else self.sft.data.seq_len or self.seq_len

    @property
    def holds_secret(self) -> bool:
        """True if the tree states a key, a token or a password."""
        return any(True for _ in secrets_of(self))

    @property
    def samples(self) -> bool:
        """True if the run samples from engines: SFT for evaluations in environments alone, all others always."""
        return self.kind != "sft" or self.orchestrator.eval is not None

    @property
    def replays_routers(self) -> bool:
        """True if engines record to which experts they send tokens, for a trainer that sends them there, too."""
        return self.kind == "rl" and self.trainer.router_replay

    @property
    def trains_reward_model(self) -> bool:
        """True if a scalar head is trained in the place of the language model's."""
        return self.kind == "sft" and self.sft.preference is not None and self.sft.preference.scores

    @property
    def trains(self) -> bool:
        """True if the run has a trainer."""
        return self.kind not in ALONE

    @property
    def orchestrating_role(self) -> str:
        """Name of the process that plays the episodes."""
        return "orchestrator" if self.trains else self.kind

    @property
    def episodes(self) -> EpisodesConfig:
        """Episodes that a run without a trainer plays."""
        return self.synthesize if self.kind == "synthesize" else self.eval

    @property
    def environment_lists(self) -> dict[str, Sequence[EnvConfig]]:
        """The lists of environments that are stated, of runs of all kinds, by their keys."""
        keys = ("orchestrator.env", "orchestrator.eval.env", "eval.env", "synthesize.env")
        sections = (self.orchestrator, self.orchestrator.eval, self.eval, self.synthesize)
        return {key: section.env for key, section in zip(keys, sections, strict=True) if section is not None}

    @property
    def num_prompts(self) -> int:
        """Groups of one batch."""
        return self.orchestrator.batch_size // self.orchestrator.rollouts_per_example

    @property
    def episodes_per_step(self) -> int:
        """Rollouts of one batch, and its prompts' greedy ones, which do not train."""
        return self.orchestrator.batch_size + self.num_prompts * bool(self.orchestrator.greedy_sources)

    @model_validator(mode="before")
    @classmethod
    def _evaluates_on_engines(cls, values: Any) -> Any:
        """Have a run without a trainer that attaches to nothing start engines, on a free port where none is stated."""
        if not isinstance(values, dict) or values.get("kind") not in ALONE:
            return values
        stated, engines = values.get(values["kind"]), values.get("inference")
        client = stated.get("client") if isinstance(stated, dict) else getattr(stated, "client", None)
        if engines is None and client is None:
            engines = {}
        if not isinstance(engines, dict) or not isinstance(engines.get("server") or {}, dict):
            return values
        server = {"port": 0} | {key: value for key, value in (engines.get("server") or {}).items() if value is not None}
        return {**values, "inference": {**engines, "server": server}}

    @model_validator(mode="after")
    def _consistent(self) -> "Experiment":
        if not self.trains:
            self._can_play_alone()
            return self
        o = self.orchestrator
        if o.batch_size % o.rollouts_per_example:
            raise ValueError(
                f"orchestrator.batch_size ({o.batch_size}) must be a multiple of "
                f"orchestrator.rollouts_per_example ({o.rollouts_per_example})"
            )
        if self.kind == "rl" and not o.env and o.advantage.compares_rollouts and o.rollouts_per_example < 2:
            raise ValueError(f"orchestrator: {o.advantage.type} compares rollouts of one prompt: {TOO_FEW}")
        if self.kind == "rl" and min(map(o.group_size, range(len(o.env))), default=o.rollouts_per_example) < 2:
            for i, gate in enumerate(o.curriculum.gates):
                if gate.type == "advantage_range":
                    raise ValueError(
                        f"orchestrator.curriculum.gates.{i}: advantage_range compares rollouts of one prompt and would "
                        "reject every group of one: rollouts_per_example must be at least 2, of each environment"
                    )
        # Without environments nobody samples: a trainer or a server alone is not held to the orchestrator's defaults.
        if self.kind == "rl" and o.env and o.sampling.max_tokens >= self.max_model_len:
            raise ValueError(
                f"orchestrator.sampling.max_tokens ({o.sampling.max_tokens}) cannot fit "
                f"inference.max_model_len ({self.max_model_len}) {NO_ROOM}"
            )
        for name, why in o.policy_sampling.untrainable().items() if self.kind == "rl" else ():
            raise ValueError(f"orchestrator.sampling.extra.{name} cannot be used in training: {why}; leave it out")
        self._sources_fit()
        self._can_evaluate()
        resume = self.ckpt.resume_step if self.ckpt is not None else None
        if isinstance(resume, int) and self.num_steps is not None and resume >= self.num_steps:
            raise ValueError(
                f"ckpt.resume_step ({resume}) is not below max_steps ({self.max_steps}): nothing is left to do; raise "
                "--max-steps"
            )
        self._can_sleep()
        check_teacher(self)
        if self.trainer.max_concurrent_runs > 1:
            self._can_train_many()
        elif self.trainer.tinker is not None:
            raise ValueError(
                "trainer.tinker serves the adapters of a trainer of many: set trainer.max_concurrent_runs (2 or more) "
                "to the number of adapters that may be in training at once"
            )
        if self.model.fp8:
            self._can_use_fp8()
        for key in ("tp", "ep"):
            if self.model.lora is not None and getattr(self.trainer.parallel, key) > 1:
                raise ValueError(
                    f"trainer.parallel.{key} ({getattr(self.trainer.parallel, key)}) would split what model.lora "
                    "adapts whole: set it to 1 (dp_shard spreads the weights over ranks, cp the tokens)"
                )
        if self.kind == "rl" and self.micro_batch_tokens < self.seq_len:
            raise ValueError(
                f"trainer.micro_batch_tokens ({self.micro_batch_tokens}) is below seq_len ({self.seq_len}): "
                "the longest sample would not fit"
            )
        if self.kind == "sft":
            self._sft_fits()
        return self

    def _can_sleep(self) -> None:
        """Engines sleep only where nobody needs them while the trainer computes."""
        if self.inference is None or not self.inference.sleep:
            return
        for wrong, why in (
            (self.kind != "rl", f"is for RL, this is {self.kind}"),
            (self.async_level > 0, f"needs async_level 0: with {self.async_level} engines sample beside the trainer"),
            (self.trainer.max_concurrent_runs > 1, "would stop the other runs of trainer.max_concurrent_runs > 1"),
        ):
            if wrong:
                raise ValueError(f"inference.sleep {why}; leave it out")

    @property
    def engines_sleep(self) -> bool:
        """True if the engines sleep while the trainer computes; a bench of the orchestrator has no trainer."""
        return self.inference is not None and self.inference.sleep and not self.orchestrator.bench

    @property
    def own_template(self) -> str | None:
        """The chat template that an SFT run trains with, where it is a file of its own: who samples the weights needs
        the same one. None: the model's. Raises ValueError where it cannot be read."""
        return self.sft.data.read_template() if self.kind == "sft" else None

    def _sft_fits(self) -> None:
        data, evaluation = self.sft.data, self.orchestrator.eval
        unstated = Experiment.model_fields["max_steps"].default
        if self.num_steps is None and self.max_steps != unstated:
            raise ValueError(
                f"max_steps ({self.max_steps}) and sft.data.num_epochs ({data.num_epochs:g}) both say how long to "
                f"train: leave one of them out (of a run or a base that states it: --max-steps {unstated}, the default)"
            )
        if evaluation is not None and not evaluation.env:
            raise ValueError("orchestrator.eval names no environment to evaluate on: set orchestrator.eval.env")
        if self.trains_reward_model and (evaluation or self.model.vision):
            unfit = "reads text and writes no replies: leave model.vision and orchestrator.eval out"
            raise ValueError(f"a reward model (sft.preference.type = bradley_terry) {unfit}")
        longest, twice = (
            (data.seq_len or self.seq_len) * self.sft.num_sides,
            " of both sides" * (self.sft.num_sides - 1),
        )
        if data.type != "fake" and longest > self.micro_batch_tokens:
            raise ValueError(
                f"sft.data.seq_len ({longest}{twice}) exceeds trainer.micro_batch_tokens ({self.micro_batch_tokens}): "
                "the longest sample would not fit"
            )
        if data.batch_tokens is not None and data.batch_tokens < longest:
            raise ValueError(
                f"sft.data.batch_tokens ({data.batch_tokens}) is below sft.data.seq_len ({longest}{twice}): the "
                "longest sample would not fit into a step"
            )

    def _sources_fit(self) -> None:
        """Check what single environments do otherwise than the others."""
        o = self.orchestrator
        for i, env in enumerate(o.env if self.kind == "rl" else []):
            key, advantage = f"orchestrator.env.{i}", o.advantage_of(i)
            if env.algorithm is not None and any(a.distils or a.imitates for a in (advantage, o.advantage)):
                raise ValueError(
                    f"{key}.algorithm = {env.algorithm} beside orchestrator.advantage.type = {o.advantage.type}: an "
                    "algorithm with a teacher is for all environments of a run"
                )
            if advantage.compares_rollouts and o.group_size(i) < 2:
                raise ValueError(f"{key}: {advantage.type} compares rollouts of one prompt: {TOO_FEW}")
            if o.group_size(i) < advantage.least_group:
                raise ValueError(
                    f"{key}: {advantage.type} with orchestrator.advantage.pass_k = {advantage.pass_k} needs at least "
                    f"{advantage.least_group} rollouts of one prompt, and rollouts_per_example is {o.group_size(i)}: "
                    "raise it, or lower pass_k"
                )
            sampling = env.sampling.over(o.sampling)
            if sampling.max_tokens >= self.max_model_len:
                raise ValueError(
                    f"{key}.sampling.max_tokens ({sampling.max_tokens}) cannot fit inference.max_model_len "
                    f"({self.max_model_len}) {NO_ROOM}"
                )
            changed = (sampling.temperature, sampling.truncates) != (o.sampling.temperature, o.sampling.truncates)
            compares = self.trainer.loss.distillation is not None and not advantage.imitates
            if (advantage.distils or compares) and changed and (sampling.temperature != 1 or sampling.truncates):
                by = "trainer.loss.distillation" if compares else advantage.type
                raise ValueError(f"{key}.sampling: {by} needs temperature 1, without top_p, top_k and min_p")
            for name, why in sampling.untrainable().items() if not o.advantage.imitates else ():
                raise ValueError(f"{key}.sampling.extra.{name} cannot be used in training: {why}; leave it out")
        for i, held_out in enumerate(o.eval.env if o.eval is not None else []):
            length = held_out.sampling.max_tokens
            if length is not None and length >= self.max_model_len:
                raise ValueError(
                    f"orchestrator.eval.env.{i}.sampling.max_tokens ({length}) cannot fit inference.max_model_len "
                    f"({self.max_model_len}) {NO_ROOM}"
                )

    def _can_evaluate(self) -> None:
        """Refuse evaluations whose replies leave no room for a prompt."""
        o = self.orchestrator
        if o.eval is None or not (o.eval.env or o.env):
            return
        length = o.eval_sampling.max_tokens
        if length >= self.max_model_len:
            stated = "orchestrator.eval.sampling" if o.eval.sampling.max_tokens else "orchestrator.sampling"
            raise ValueError(
                f"{stated}.max_tokens ({length}) cannot fit inference.max_model_len ({self.max_model_len}) {NO_ROOM}"
            )

    def _can_play_alone(self) -> None:
        """Refuse settings that a run without a trainer has no use for, and replies that leave no room for a prompt."""
        kind, config = self.kind, self.episodes
        if self.inference is not None and config.client is not None:
            raise ValueError(
                f"{kind}.client attaches to servers that run, inference starts servers: leave one of them out"
            )
        for key, there in (
            ("teacher_inference", self.teacher_inference is not None),
            ("orchestrator.eval", self.orchestrator.eval is not None),
            (f"orchestrator.env (state {kind}.env)", bool(self.orchestrator.env)),
        ):
            if there:
                raise ValueError(f"{key} is not used by kind = {kind}: leave it out")
        stages = self.inference.pipeline_parallel_size if self.inference is not None else 1
        if stages > 1 and kind == "eval" and self.eval.weights_dir is not None:
            raise ValueError(
                f"inference.pipeline_parallel_size ({stages}) and eval.weights_dir: engines that load versions "
                "have one stage; set inference.tensor_parallel_size instead"
            )
        length = config.sampling.max_tokens
        if self.inference is not None and length is not None and length >= self.max_model_len:
            raise ValueError(
                f"{kind}.sampling.max_tokens ({length}) cannot fit inference.max_model_len ({self.max_model_len}) "
                f"{NO_ROOM}"
            )

    def _can_use_fp8(self) -> None:
        if self.model.dtype != "bfloat16":
            raise ValueError(f"model.fp8 multiplies bfloat16 in float8; model.dtype is {self.model.dtype}")
        for key, used in (
            ("model.lora", self.model.lora is not None),
            ("trainer.parallel.tp", self.trainer.parallel_dims.tp > 1),
        ):
            if used:
                raise ValueError(f"model.fp8 does not go together with {key}: leave one of them out")
        if not self.model.compile:
            raise ValueError(
                "model.fp8 without compilation makes each conversion a pass of its own over float32 and is slower than "
                "bfloat16: set model.compile = true too, or leave model.fp8 out"
            )

    def _can_train_many(self) -> None:
        key = f"trainer.max_concurrent_runs = {self.trainer.max_concurrent_runs}"
        if self.kind != "rl":
            raise ValueError(f"{key}: only RL runs share a trainer, this is {self.kind}")
        if self.model.lora is None:
            raise ValueError(f"{key} needs model.lora: each run trains an adapter of its own in one frozen model")
        if self.trainer.data.fake is not None or self.trainer.bench:
            raise ValueError(f"{key}: its runs bring their own data, so leave trainer.data.fake and trainer.bench out")
