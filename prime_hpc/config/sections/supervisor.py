"""The supervisor's section, its deadlines; alarms over the run's figures; and the Kubernetes section, the pods that it
may lead instead of nodes."""

from pathlib import PurePosixPath
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from prime_hpc.config.secret import Secret
from prime_hpc.config.sections.base import Section
from prime_hpc.observe.metric_names import NAMES, split_metric


class StallsConfig(Section):
    """A step that stands still is looked into once, as `prime-hpc why` does, and the cause kept with the attempt's
    logs."""

    enabled: bool = True
    """Look into steps that stand still."""
    factor: float = Field(10.0, gt=1)
    """A step stands still that takes so many times as long as usual: the median of the last 20."""
    least_s: float = Field(60.0, gt=0)
    """No step counts before so many seconds; before the first step of an attempt, not before `factor` times as many."""


class SupervisorConfig(Section):
    """The process that runs inside the job and watches the roles."""

    start_timeout_s: float = Field(900, gt=0)
    """Deadline by which the trainer and the orchestrator must report ready."""
    heartbeat_timeout_s: float = Field(300, gt=0)
    """A role silent for longer is dead."""
    read_timeout_s: float = Field(600, gt=0)
    """How long the start of an attempt waits for what cannot be read (an I/O error, a stale handle, a file system that
    is not mounted, a disk that is full) before it ends with the reason, so that the job comes back."""
    write_timeout_s: float = Field(600, ge=0)
    """How long a batch, a weight version, and the last checkpoint or one that a stop asks for, wait for room on a full
    disk or in a quota. Other checkpoints are tried again while training goes on. The trainer waits for a batch
    no longer than `trainer.batch_timeout_s`, whatever holds it up."""
    recheck_s: float = Field(120, ge=0)
    """A checkpoint that is not what its manifest says is read again so many seconds later, before the run goes back to
    an older one."""
    grace_s: float = Field(5, gt=0, le=60)
    """From the polite end of a role to its kill."""
    stalls: StallsConfig = StallsConfig()
    """Steps that stand still, and how they are told."""


Action = Literal["warn", "save", "stop", "command", "webhook", "mail"]


class AlarmRule(Section):
    """One rule: a metric that is below, above, or has fallen."""

    name: str = ""
    """Shown where it fires; default: the metric. A built-in rule's name takes that one's place."""
    metric: str = ""
    """A figure of `metrics/<role>.jsonl`, as in trainer.entropy and orchestrator.reward/mean; or one of the run itself:
    `run.stall_s`, `run.free_gib`, `run.free_share`, `run.time_left_s`, `run.no_successor_s`."""
    below: float | None = None
    """It fires below this value."""
    above: float | None = None
    """It fires above this value."""
    falls_to: float | None = Field(None, gt=0, lt=1)
    """It fires at this share of the best mean of `for_steps` steps so far (0.3: 70 % are lost)."""
    for_steps: int = Field(1, ge=1)
    """So many steps in a row; of `run.` figures looks, 10 s apart."""
    actions: list[Action] = ["warn"]
    """Done once, each time the line is crossed: `warn` in log and status, `save` now, `stop` (saves first), run
    `alarms.command`, call `alarms.webhook`, send `alarms.mail`."""

    @field_validator("metric")
    @classmethod
    def _has_a_file(cls, metric: str) -> str:
        file, name = split_metric(metric)
        if file not in NAMES or not name:
            raise ValueError(f"begins with one of {', '.join(f'{file}.' for file in NAMES)} as in trainer.entropy")
        return metric

    @model_validator(mode="after")
    def _has_one_line(self) -> "AlarmRule":
        stated = [key for key in ("below", "above", "falls_to") if getattr(self, key) is not None]
        if len(stated) != 1:
            raise ValueError(f"needs exactly one of below, above and falls_to, and has {', '.join(stated) or 'none'}")
        return self

    @property
    def title(self) -> str:
        """Its name for people."""
        return self.name or self.metric


class AlarmsConfig(Section):
    """Rules over the run's figures. They fire once each time a line is crossed, are kept in `<run>/alarms.jsonl`, and
    shown by `status`; nothing that they do can hold the run up."""

    enabled: bool = True
    """Watch at all."""
    builtin: bool = True
    """Watch `entropy`, `kl`, `reward`, `idle`, `disk`, `walltime`, `stall` and `successor` as well, with lines that few
    good runs cross (`prime_hpc/supervisor/alarms/rules.py`)."""
    builtin_actions: list[Action] = ["warn"]
    """Done when a built-in rule fires."""
    rules: list[AlarmRule] = []
    """Rules of your own."""
    command: str | None = None
    """For /bin/sh on the supervisor's node, with `PRIMEHPC_ALARM`, `_METRIC`, `_VALUE`, `_STEP`, `_TEXT` and `_RUN`."""
    webhook: Secret | None = None
    """Address to which a JSON object with `text` is posted (Slack, Mattermost and many others take it)."""
    mail: str | None = None
    """Address to which a mail is sent."""
    mail_server: str = "localhost:25"
    """`host:port` of the SMTP server that takes it."""
    timeout_s: float = Field(10.0, gt=0, le=600)
    """Deadline of one try of a command, webhook or mail."""
    retries: int = Field(3, ge=0, le=20)
    """Further tries of a webhook or mail, with growing pauses."""

    @model_validator(mode="after")
    def _has_what_it_does(self) -> "AlarmsConfig":
        used = {action for rule in self.rules for action in rule.actions} | set(self.builtin_actions)
        for action, value in (("command", self.command), ("webhook", self.webhook), ("mail", self.mail)):
            if action in used and value is None:
                raise ValueError(f"an action is `{action}`, but alarms.{action} is not stated")
        return self


class KubernetesConfig(Section):
    """A run as pods: one for supervisor and orchestrator, one for each node of the trainer and of the engines. How many
    nodes, and how many GPUs each: `slurm.gpus_per_node`, `slurm.trainer.nodes`, `slurm.inference.nodes`, as on Slurm.
    """

    image: str = ""
    """Container image that holds prime-hpc, e.g. one of slurm/images; `render` refuses to go on without."""
    python: str = "/opt/prime-hpc/.venv/bin/python"
    """Interpreter in the image."""
    namespace: str | None = None
    """Namespace of all objects; default: kubectl's or helm's own."""
    claim: str | None = None
    """An existing ReadWriteMany claim, which several runs may share; default: one is made for this run, and kept after
    it."""
    storage: str = "500Gi"
    """Size of the claim that is made."""
    storage_class: str | None = None
    """Its storage class, of a file system that many nodes write to; default: the cluster's."""
    mount_path: str = "/shared"
    """The volume's place in every pod, and their working directory: relative paths of the experiment begin here."""
    gpu_resource: str = "nvidia.com/gpu"
    """Name of the device plugin's resource; AMD's is `amd.com/gpu`."""
    requests: dict[str, str] = {}
    """Resources of a trainer's or a server's pod besides GPUs, e.g. `{cpu: "32", memory: 500Gi, rdma/ib: "1"}`."""
    supervisor_requests: dict[str, str] = {"cpu": "2", "memory": "8Gi"}
    """Resources of the pod of supervisor and orchestrator."""
    shared_memory: str = "16Gi"
    """Size of /dev/shm in every pod."""
    node_selector: dict[str, str] = {}
    """Labels of the nodes that may be used."""
    tolerations: list[dict[str, Any]] = []
    """Taints of nodes that may be used all the same."""
    security_context: dict[str, Any] = {}
    """Of every pod, e.g. `{runAsUser: 1000, fsGroup: 1000}` where a volume is not root's to write to."""
    container_security_context: dict[str, Any] = {}
    """Of every container, e.g. `{capabilities: {add: [IPC_LOCK]}}` for RDMA."""
    image_pull_secrets: list[str] = []
    """Names of Secrets with which the image is pulled."""
    env_from: list[str] = []
    """Names of Secrets whose entries become environment variables of every pod: HF_TOKEN, WANDB_API_KEY, keys of the
    experiment as `PRIME_...`."""
    grace_s: int = Field(600, ge=30)
    """From Kubernetes' notice that a pod goes to its end: the time for a save."""
    pods_timeout_s: int = Field(3600, ge=1)
    """So long the supervisor waits at its start until all pods of the run are there."""

    @field_validator("mount_path")
    @classmethod
    def _is_absolute(cls, text: str) -> str:
        if not PurePosixPath(text).is_absolute() or text == "/":
            raise ValueError("must be an absolute path, and not the root itself")
        return text.rstrip("/")
