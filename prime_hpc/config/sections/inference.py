"""The engine groups' sections, servers of the policy, a teacher and a judge, and how weight versions get into them."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from prime_hpc.config.secret import Arguments, Secret
from prime_hpc.config.sections.base import Section
from prime_hpc.config.sections.names import BackendName, TransportName

DEFAULT_PORT = 8000
"""Of the first server on one machine."""
ENGINE_GPU_IDS = {
    "inference_gpu_ids": "inference",
    "teacher_gpu_ids": "teacher_inference",
    "judge_gpu_ids": "judge_inference",
}
"""Key that names GPUs of engines -> their servers' section."""


class ServerConfig(Section):
    """Address and port of the OpenAI-compatible server."""

    host: str = "127.0.0.1"
    """Address to bind; `::` to serve other nodes (every address of both families)."""
    port: int | None = Field(None, ge=0, le=65535)
    """First port, from which servers on one node count up; 0: a free one is found. Default: 8000 on one machine, a
    free one in a Slurm job or where `network.port_range` is set."""


class InferenceConfig(Section):
    """Engines behind an OpenAI-compatible server with weight updates."""

    backend: BackendName = "vllm"
    """Engine that samples. `vllm`: vLLM, for all that these keys state. `transformers`: a small continuous batch over
    transformers' forward pass, for machines where vLLM cannot be installed (`pip install 'prime-hpc[transformers]'`):
    one device a server, no adapters, no windows of attention. Or your own, as `module:ATTRIBUTE`."""
    python: str | None = None
    """Interpreter of an environment of the servers' own, an absolute path on their nodes (within the image, where there
    is one): the same prime-hpc, beside the backend in a version that need not suit the trainer's torch. Default: the
    interpreter of the other roles."""
    server: ServerConfig = ServerConfig()
    """Address."""
    api_key: Secret | None = None
    """Bearer token that clients must send; `@FILE`: what stands in a file that only you can read."""
    num_replicas: int = Field(1, ge=1)
    """Independent servers."""
    data_parallel_size: int = Field(1, ge=1)
    """Engines behind one server, each with a whole copy of the weights."""
    data_parallel_size_local: int | None = Field(None, ge=1)
    """Engines on this node; default: all."""
    data_parallel_address: str | None = None
    """Address of the data-parallel head node."""
    data_parallel_rpc_port: int | None = Field(None, ge=1, le=65535)
    """Port of the data-parallel head."""
    data_parallel_start_rank: int | None = Field(None, ge=0)
    """First data-parallel rank on this node."""
    across_nodes: Literal["auto", "servers", "engine_group"] = "auto"
    """Data parallel over several nodes: a server a node behind our own balancing, or one vLLM group (head and headless
    nodes), which expert parallelism needs; `auto`: servers unless `vllm.enable_expert_parallel` is set."""
    headless: bool = False
    """Serve no HTTP here: the engines belong to another node's head."""
    tensor_parallel_size: int = Field(1, ge=1)
    """GPUs over which one engine's tensors are split."""
    pipeline_parallel_size: int = Field(1, ge=1)
    """Stages into which one engine's layers are cut, each on `tensor_parallel_size` GPUs; for servers whose weights
    never change: `synthesize`, `eval` of one model, a teacher's, a judge's, `inference` by hand."""
    max_model_len: int | None = Field(None, ge=1)
    """Longest prompt + completion; default: the tree's `seq_len`."""
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1)
    """Share of a GPU's memory that an engine may take; so much must be free when it starts, and starts again. On a GPU
    that it shares: less, and the trainer starts when the engine is ready."""
    kv_cache_gib: float | None = Field(None, gt=0)
    """KV cache of one engine on one GPU, GiB; default: what `gpu_memory_utilization` leaves beside the weights."""
    kv_offload_gib: float | None = Field(None, gt=0)
    """Host memory of one engine, over all its GPUs, GiB, into which vLLM moves blocks of the KV cache that the GPU has
    no room for, and takes them back instead of computing them again; default: none. At an update of the weights it is
    emptied as the cache is. On a GPU it was started, and not filled."""
    cpu_kv_cache_gib: float = Field(1.0, gt=0)
    """KV cache of one engine on CPU, GiB."""
    cpu_threads: int = Field(1, ge=1)
    """OpenMP threads of one engine on CPU."""
    max_num_seqs: int | None = Field(None, ge=1)
    """Sequences that one engine decodes together."""
    enforce_eager: bool | None = None
    """No graph capture or compilation; default: only on CPU."""
    batch_invariant: bool = False
    """A request's log-probabilities do not depend on what else is in the batch (vLLM's VLLM_BATCH_INVARIANT; CUDA with
    compute capability 8.0 or more): with `trainer.deterministic` a check of the true on-policy ratio. Slower."""
    compile_cache: Path | None = None
    """Directory of yours that all nodes see, in which servers keep what vLLM compiled as one archive, for nodes that
    start later; default: each fresh node compiles again (minutes with CUDA graphs), into its own caches."""
    keep_kv_cache: bool = False
    """At an update of the weights running requests keep their key-value cache and go on at once. Default: it is dropped
    and computed again with the new weights, so that each token's log-probability is that of one version, exactly; with
    many long requests that is millions of tokens of prefill a step. Kept, the tokens after an update see keys and
    values of older weights: the trainer's importance ratio corrects for the lag alone, and `mismatch` grows."""
    sleep: bool = False
    """On a GPU that engine and trainer share, with `async_level: 0`: while the trainer computes, the engine sleeps
    (vLLM's level 1): its weights lie in host memory, its key-value cache is given up. Each step both move once."""
    ready_timeout_s: float = Field(900, gt=0)
    """Deadline of the start-up."""
    max_restarts: int = Field(3, ge=0)
    """How often a dead server is started again before the run fails."""
    vllm: Arguments = {}
    """Any other vLLM engine argument, by its own name."""

    @field_validator("python")
    @classmethod
    def _absolute(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith("/"):
            raise ValueError(f"{value} is no absolute path: say where the interpreter is on the servers' nodes")
        return value

    @field_validator("vllm")
    @classmethod
    def _counted(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name in ("pipeline_parallel_size", "pipeline-parallel-size"):
            if value.get(name, 1) not in (1, "1"):
                raise ValueError(
                    f"{name} decides how many GPUs are taken: state it as inference.pipeline_parallel_size"
                )
        return value

    @property
    def gpus_per_engine(self) -> int:
        """GPUs of one engine: tensors split within each stage of its pipeline."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def engines_together(self) -> Literal["servers", "engine_group"]:
        """Return the meaning of `across_nodes: auto`: expert parallelism spans all engines of a data-parallel group."""
        return "engine_group" if self.vllm.get("enable_expert_parallel") else "servers"

    @property
    def num_gpus(self) -> int:
        """GPUs of all servers."""
        return self.num_replicas * self.data_parallel_size * self.gpus_per_engine


class FrozenServerConfig(ServerConfig):
    """Address and port of a server whose weights never change."""

    port: int = Field(0, ge=0, le=65535)
    """First port (replica i takes port + i); 0 lets the supervisor choose."""


class FrozenInferenceConfig(InferenceConfig):
    """Servers of another model that the run starts beside the policy's; their weights never change."""

    server: FrozenServerConfig = FrozenServerConfig()
    """Address."""
    api_key: Secret | None = None
    """Bearer token that clients must send, or `@FILE`; default: the policy's."""

    @field_validator("sleep")
    @classmethod
    def _awake(cls, value: bool) -> bool:
        if value:
            raise ValueError("only the policy's engines sleep; leave it out")
        return value


class TeacherInferenceConfig(FrozenInferenceConfig):
    """Servers of `orchestrator.teacher.model` that the run starts beside the policy's; their weights never change."""

    max_model_len: int | None = Field(None, ge=1)
    """Longest sequence; default: `seq_len` + 1, since a score samples one token that is not used."""


class JudgeInferenceConfig(FrozenInferenceConfig):
    """Servers of a model that rewards ask (`$JUDGE_URL`, `$JUDGE_MODEL`), started beside the policy's."""

    model: str
    """Directory or hub name of the judge: a causal language model, or, with `runner: pooling`, a reward model."""
    runner: Literal["generate", "pooling"] = "generate"
    """`generate`: it replies, behind chat completions. `pooling`: it scores what it is given, behind vLLM's `/classify`
    and `/pooling`: a sequence classifier such as `Qwen3ForSequenceClassification`."""
    max_model_len: int | None = Field(None, ge=1)
    """Longest prompt + verdict; default: twice `seq_len`, since the prompt holds a whole sample."""

    @model_validator(mode="after")
    def _can_score(self) -> "JudgeInferenceConfig":
        if self.runner == "pooling" and self.backend != "vllm":
            raise ValueError(f"runner = pooling needs backend = vllm, not {self.backend}")
        return self


class WeightsConfig(Section):
    """Weight versions on their way from the trainer to the engines; adapters (`model.lora`) always go as files."""

    transport: TransportName = "files"
    """`files`: each version is a directory that Hugging Face loads, in the run directory. `delta`: most hold only what
    changed since the one before, to the bit: of bfloat16 at learning rates of 1e-6 some percent of the bytes. Whole
    versions come between, and by themselves where too much changes. For file systems that are slower than the nodes'
    memory; each server's node keeps a version's bytes in its temporary directory. `gloo`, `nccl`: from the trainer's
    memory into vLLM's workers over the network, through host memory or from GPU to GPU; files come between. The whole
    model trains, engines are vLLM's. All but `files` cost each rank its share of the published weights in host memory
    (twice where versions are published beside the next step, as they are from GPUs); where a node has too little for
    that, versions go as whole files."""
    whole_interval: int = Field(32, ge=1)
    """With `delta`, `gloo` and `nccl`: of so many versions one is whole, from which a server begins that has none or
    missed some."""
