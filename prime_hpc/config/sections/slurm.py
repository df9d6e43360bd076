"""The Slurm section: what the job asks for, how its roles are laid out, how it survives. And the site profile.

Read by `launch` (plan, render, submit) on the login node and by the supervisor inside the job.
"""

from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, Field, field_validator

from prime_hpc.config.secret import Variables, plainly_assigned
from prime_hpc.config.sections.base import Section
from prime_hpc.config.sections.network import NetworkConfig
from prime_hpc.config.sections.sbatch_options import extra_problems


def _refuse_plain_secrets(texts: list[str]) -> list[str]:
    """Raise a ValueError for a key or token in plain text where everybody can read it: a script, a command line."""
    for text in texts:
        if (name := plainly_assigned(text)) is not None:
            raise ValueError(
                f"gives {name} its value in plain text, for everybody to read; state it in slurm.env, best as "
                f"`{name}: '@FILE'`, or have the line read it from a file"
            )
    return texts


class SlurmOptions(Section):
    """sbatch options of the job or of one component; unset ones are inherited (component, `slurm`, site)."""

    model_config = ConfigDict(coerce_numbers_to_str=True)  # `time: 60`, `mem: 0`

    partition: str | None = None
    """Partition, or several separated by commas."""
    account: str | None = None
    """Account that is charged."""
    qos: str | None = None
    """Quality of service."""
    constraint: str | None = None
    """Node features, e.g. `h100&ib`."""
    gres: str | None = None
    """Generic resources a node, verbatim; replaces what is derived from `gpus_per_node`."""
    gpus_per_node: int | None = Field(None, ge=0)
    """GPUs asked of each node; default: the partition's in the site profile, or none with `device: cpu`; where neither
    says how many, `submit` refuses; 0: none, the roles compute on the CPU."""
    gpu_type: str | None = None
    """GPU type as the site names it, e.g. `h100`."""
    mem: str | None = None
    """Memory a node, e.g. `500G`; `0` is all of it, in the words of the site profile's `whole_node_mem`."""
    cpus_per_task: int | None = Field(None, ge=1)
    """CPUs a node (one task a node is started)."""
    time: str | None = None
    """Time limit: minutes, MM:SS, HH:MM:SS or D-HH:MM:SS."""
    time_min: str | None = None
    """Shortest time limit that backfill may lower `time` to."""
    exclude: str | None = None
    """Nodes never to use."""
    nodelist: str | None = None
    """Nodes that must be used."""
    reservation: str | None = None
    """Reservation."""
    switches: str | None = None
    """Most leaf switches, and the longest wait for them: `1@10:00`."""
    exclusive: bool | None = None
    """Whole nodes."""
    mail_user: str | None = None
    """The mail's recipient."""
    mail_type: str | None = None
    """When: BEGIN, END, FAIL, REQUEUE, ALL."""
    comment: str | None = None
    """Free text kept with the job."""
    dependency: str | None = None
    """E.g. `afterok:123`."""
    licenses: str | None = None
    """E.g. `matlab:2`."""
    extra: dict[str, Any] = {}
    """Any other sbatch option by its long name; true gives a bare flag, false takes back what the site states."""

    @field_validator("extra")
    @classmethod
    def _leaves_the_job_whole(cls, extra: dict[str, Any]) -> dict[str, Any]:
        if problems := extra_problems(extra):
            raise ValueError("; ".join(problems))
        return extra

    @field_validator("extra")
    @classmethod
    def _without_secrets(cls, value: dict[str, Any]) -> dict[str, Any]:
        _refuse_plain_secrets([f"{name}={text}" for name, text in value.items()])
        return value


class SlurmGroupConfig(SlurmOptions):
    """The nodes of one role group."""

    nodes: int | None = Field(None, ge=1)
    """Nodes; default: as many as its ranks or engines need."""


class ElasticConfig(SlurmOptions):
    """Servers beyond those of `inference`, each a job of its own on one node, on nodes that are idle or that others may
    take back: it joins the run once it has a node, and the run goes on without it when that is gone."""

    servers: int = Field(1, ge=1)
    """At most so many at once."""


class RestartConfig(Section):
    """How a job comes back: one policy for time limits, preemption, lost nodes and crashes."""

    how: Literal["auto", "requeue", "successor", "off"] = "auto"
    """`requeue` the same job; a `successor` queued beforehand with afternotok; `auto` asks the site profile."""
    signal_lead_s: int = Field(120, ge=5)
    """Slurm warns the job so long before its time limit; everyone saves and the job comes back."""
    in_place: bool = True
    """After a crash of the trainer or the orchestrator, or with a spare node for a lost one of theirs, these start
    again inside the job, from the newest checkpoint, while the servers serve on. Of a crash of the trainer alone the
    orchestrator goes on too, with all rollouts in flight and its batches since the checkpoint; the second time in a row
    that nothing new was saved, the job is requeued."""
    max_crashes: int = Field(3, ge=0)
    """Crashes in a row without a newly saved step, since the run was submitted or resumed, after which the job stays
    down; two that end with the same error of data, code or keys are enough."""
    max_attempts: int = Field(200, ge=1)
    """Attempts in all."""
    node_timeout_s: float = Field(30, gt=1)
    """A node whose agent is silent for so long counts as lost."""
    fence_s: float = Field(60, gt=2)
    """Agents that do not hear their supervisor for so long end their roles: no second attempt beside a new one."""
    stall_s: float = Field(1800, gt=0)
    """A supervisor that its own file system holds up for so long is given up; roles and agents wait as long."""
    replica_retry_s: float = Field(60, gt=0)
    """Pause between attempts to bring a lost inference node's server back."""
    successor_retry_s: float = Field(180, gt=0)
    """Pause between attempts to queue a successor that Slurm has refused, as it does at a full submit limit."""
    exclude_bad_nodes: bool | None = None
    """Exclude nodes that failed or failed preflight from the next attempt; default: the site profile's."""
    bad_node_days: float = Field(7, gt=0)
    """After so many days a bad node is forgotten."""


class PreflightConfig(Section):
    """Checks inside the allocation before the roles start."""

    enabled: bool = True
    """Run them."""
    allreduce: bool | None = None
    """All-reduce across the trainer's nodes, with every GPU of theirs tried; default: with more than one, or with
    GPUs."""
    timeout_s: float = Field(120, gt=0)
    """Deadline of all checks but the all-reduce."""
    allreduce_timeout_s: float = Field(600, gt=0)
    """Deadline of the all-reduce: torch's libraries may be read from a cold file system first."""
    min_network_share: float = Field(0.1, ge=0, le=1)
    """A node on which NCCL takes TCP sockets though it has InfiniBand or RoCE fails below this share of the fastest
    port's rate, and is warned of above; 0: only warned of."""
    max_gpu_memory_used: float = Field(0.1, ge=0, le=1)
    """A GPU of the roles of whose memory others hold more than this share fails: engines take nearly all of it."""
    min_free_gib: float = Field(1.0, ge=0)
    """Free space that the run directory must have."""
    max_clock_skew_s: float = Field(5.0, gt=0)
    """Greatest difference between the nodes' clocks."""
    max_visibility_s: float = Field(90.0, gt=0)
    """A node must see another's new file within this."""


class ShapeConfig(Section):
    """One allowed shape of an experiment's job: what of it differs from the experiment as it stands."""

    name: str = Field(pattern=r"^[\w.+-]+$")
    """Letters, digits, `_`, `.`, `+` and `-`."""
    overrides: dict[str, Any] = {}
    """Keys of the experiment, dotted or nested: nodes, ranks, engines, partition, time limit, layout."""
    step_s: float | None = Field(None, gt=0)
    """Seconds a step takes in this shape, measured or expected: shapes are then ranked by the time to the last step."""


class SlurmConfig(SlurmOptions):
    """One experiment as one Slurm job."""

    layout: Literal["auto", "het", "packed"] = "auto"
    """`het`: a component per role group; `packed`: one homogeneous job; `auto`: het only where node types differ."""
    site: str | None = None
    """Site profile: a name in `slurm/sites`, or a path; default: $PRIMEHPC_SITE, else the one of this cluster."""
    cluster: str | None = None
    """Of a site with several clusters, the one that the job goes to (`-M`); default: $SLURM_CLUSTERS, else this one."""
    job_name: str | None = None
    """Default: the experiment's name."""
    trainer: SlurmGroupConfig = SlurmGroupConfig()
    """The trainer's nodes."""
    inference: SlurmGroupConfig = SlurmGroupConfig()
    """The inference servers' nodes."""
    teacher: SlurmGroupConfig = SlurmGroupConfig()
    """The nodes of the teacher's servers (`teacher_inference`)."""
    judge: SlurmGroupConfig = SlurmGroupConfig()
    """The nodes of the judge's servers (`judge_inference`)."""
    orchestrator: SlurmGroupConfig | None = None
    """Nodes (CPU-only) of the orchestrator in a het job; absent: it runs beside the trainer. With `nodes` above 1 the
    workers of its environments (`orchestrator.env_servers`) are on the others, in a packed job too."""
    elastic: ElasticConfig | None = None
    """More servers that come and go, each as a job of its own; what it does not state of a node is that of `inference`.
    RL with weights over files."""
    shapes: list[ShapeConfig] | Literal["auto"] = []
    """Shapes that the job may have: `plan --when` says which starts first, `submit --best` takes it. `auto`: derived by
    these two: other splits between trainer and engines, half and twice the size, where they fit."""
    shape: str | None = None
    """Name of the shape in force, over what else the files state; a run keeps the one that it began with."""
    spare_nodes: int = Field(0, ge=0)
    """Homogeneous jobs: nodes kept free to take the place of lost ones."""
    env_pack: Path | None = None
    """Packed Python environment (`prime-hpc env pack`) that each node unpacks or mounts; default: the site's."""
    setup: list[str] = []
    """Shell lines of the batch script before the supervisor starts, after the site's."""
    env: Variables = {}
    """Environment of all roles, over the site's; `@FILE` as the value of a key or token: what stands in that file."""
    srun_args: list[str] = []
    """More arguments of every srun."""
    restart: RestartConfig = RestartConfig()
    """How the job comes back."""
    preflight: PreflightConfig = PreflightConfig()
    """Checks before the roles start."""

    _in_nobodys_sight = field_validator("setup", "srun_args")(_refuse_plain_secrets)

    @property
    def waits(self) -> bool:
        """True if the job waits for another one, which may make its model or its data."""
        nodes = (self, self.trainer, self.inference, self.teacher, self.judge, self.orchestrator)
        return any(options is not None and options.dependency for options in nodes)


class SitePartition(Section):
    """Facts about a partition's nodes."""

    model_config = ConfigDict(coerce_numbers_to_str=True)  # `max_time: 60`

    nodes: int | None = Field(None, ge=1)
    """How many."""
    gpus_per_node: int = Field(0, ge=0)
    """GPUs of a node."""
    gpu_type: str | None = None
    """As in gres."""
    gpu_memory_gib: float | None = Field(None, gt=0)
    """Memory of one GPU."""
    cpus_per_node: int | None = Field(None, ge=1)
    """CPUs of a node."""
    mem_gib: float | None = Field(None, gt=0)
    """Memory of a node."""
    max_time: str | None = None
    """Longest time limit; absent: none."""
    preempt: Literal["off", "requeue", "cancel", "suspend"] = "off"
    """The fate of a job of it that is preempted."""
    constraint: str | None = None
    """Features by which its nodes are asked for where the site takes no partition's name (`gpu&hbm80g`): a job that
    states this `constraint` and no partition is taken to run on them."""

    @field_validator("preempt", mode="before")
    @classmethod
    def _off(cls, value: object) -> object:
        return "off" if value is False else value  # YAML 1.1 reads the bare word as false


class ContainerConfig(Section):
    """Container in which the roles run; the supervisor runs outside."""

    runtime: Literal["apptainer", "pyxis", "edf"] = "apptainer"
    """`apptainer`: or singularity, where a node has that alone; `pyxis`: srun --container-image (enroot); `edf`: srun
    --environment, as at CSCS."""
    image: str
    """Path or URI; of `edf` an environment definition file, by path or by name."""
    mounts: list[str] = []
    """host:container pairs; what the experiment states (run directory, checkpoints, model, data, caches) is always
    mounted, at its own path."""
    args: list[str] = []
    """More arguments of the runtime."""
    python: str = "python3"
    """Python inside, with prime-hpc installed."""
    start_timeout_s: float = Field(1800, gt=0)
    """So long a node may take to fetch the image and to start it for the first time."""

    @field_validator("mounts")
    @classmethod
    def _are_pairs(cls, mounts: list[str]) -> list[str]:
        for mount in mounts:
            if not mount.startswith(("/", "$", "~")) or "," in mount:
                raise ValueError(f"{mount!r} is not host:container with absolute paths, one pair an entry")
        return mounts

    _in_nobodys_sight = field_validator("args")(_refuse_plain_secrets)


class SiteConfig(Section):
    """A cluster: `slurm/sites/<name>.yaml`. Nothing of an experiment."""

    model_config = ConfigDict(coerce_numbers_to_str=True)  # `env: {OMP_NUM_THREADS: 1}`

    name: str
    """Name of the profile."""
    cluster: str | None = None
    """Slurm's ClusterName: the profile of a cluster is found by it."""
    partitions: dict[str, SitePartition] = {}
    """Its partitions."""
    options: SlurmOptions = SlurmOptions()
    """Defaults of every job."""
    setup: list[str] = []
    """Shell lines of the batch script, e.g. `module load cuda`."""
    env: Variables = {}
    """Environment of all roles."""
    container: ContainerConfig | None = None
    """Container of the roles."""
    scratch: Path | None = None
    """Shared scratch directory, for people."""
    env_pack: Path | None = None
    """`slurm.env_pack` of every experiment that does not state it."""
    purge_days: float | None = Field(None, gt=0)
    """Days after which the site deletes files below `scratch` (without it: anywhere); `status`, `lint` and `submit`
    warn before. Absent: none are deleted."""
    purge_by: Literal["atime", "mtime"] = "atime"
    """Counted from a file's last reading, or from its last change."""
    internet: bool | None = None
    """Compute nodes reach the internet; false: lint says what is not on disk (`prime-hpc fetch` brings it)."""
    node_local: str | None = None
    """Node-local directory for caches and staging; may hold $SLURM_JOB_ID and the like."""
    network_interface: str | None = None
    """Interface for NCCL's and gloo's sockets; unset: they choose. `network.collectives` says more."""
    network: NetworkConfig = NetworkConfig()
    """Ports and networks of every job."""
    het_jobs: bool = True
    """Het jobs are accepted."""
    requeue: bool = True
    """`scontrol requeue` is allowed."""
    sacct: bool = True
    """Accounting answers."""
    gpu_option: Literal["gres", "gpus-per-node", "none"] = "gres"
    """How GPUs are asked for; `none`: Slurm does not know them, whole nodes are given out."""
    whole_node_mem: str | None = "0"
    """Request that a job with `mem: 0`, all of a node's memory, makes here: a size such as `450G` where the site
    refuses 0; null: no memory at all, where it may not be stated."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """`device` of every experiment that does not state it; `cpu`: the GPUs exist in Slurm's tables alone."""
    startup_s: float = Field(300, ge=0)
    """Typical time from the job's start to the first step, for lint."""
    failures_per_1000_node_days: float = Field(6.5, ge=0)
    """Hardware failures (default: Kokolis et al., arXiv 2410.21680), for the checkpoint interval."""
    max_submit_jobs: int | None = Field(None, ge=1)
    """Jobs that a user may have in the queue at once, each task of an array and each component of a het job counted;
    absent: what `sacctmgr` says."""
    max_array_size: int | None = Field(None, ge=2)
    """MaxArraySize; absent: what `scontrol show config` says."""
    exclude_bad_nodes: bool = False
    """Exclude a bad node from the next attempt."""
    srun_args: list[str] = ["--mpi=none"]
    """Arguments of every srun."""

    _in_nobodys_sight = field_validator("setup", "srun_args")(_refuse_plain_secrets)
