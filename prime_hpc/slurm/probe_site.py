"""`prime-hpc site probe`: a draft of a site profile from what Slurm says of itself; a person checks it.

    draft = probe()                # asks scontrol, sinfo, `sbatch --test-only` and, where there is accounting, sacctmgr
    print(draft.text)              # YAML with comments; draft.site is the same, checked

What Slurm cannot know (modules, scratch, containers, the right network interface) stays a comment.
"""

import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from prime_hpc.config.sections.slurm import SiteConfig
from prime_hpc.slurm.client import SlurmError, run_slurm
from prime_hpc.slurm.hostlist import expand_hosts
from prime_hpc.slurm.queue_facts.probe_submit import Ask, try_partitions

TIMEOUT_S = 20.0
GPU_MEMORY_GIB = {
    **{"h100": 80, "h200": 141, "b200": 180, "b300": 288, "mi300x": 192, "a40": 48, "l40": 48, "l40s": 48, "a6000": 48},
    **{"a30": 24, "a10": 24, "l4": 24, "t4": 16, "p100": 16},
}
"""Of GPU types that come with one size of memory (the A100 and the V100 do not)."""
_PAIR = re.compile(r"(\w+)=(\S*)")
_SETTING = re.compile(r"^(\S+)\s*=\s*(.*?)\s*$")
_GPU = re.compile(r"(?:^|,)gpu(?::([^:(),]+))??:(\d+)(?=,|$)")


@dataclass(frozen=True)
class NodeType:
    """Nodes of one partition that are alike."""

    partition: str
    count: int
    cpus: int
    mem_mib: int
    gpus: int
    gpu_type: str | None
    features: str

    def describe(self) -> str:
        """One line for people."""
        gpus = f"{self.gpus} GPUs{f' {self.gpu_type}' if self.gpu_type else ''}" if self.gpus else "no GPU"
        features = f", features {self.features}" if self.features else ""
        return f"{self.count} nodes with {gpus}, {self.cpus} CPUs, {self.mem_mib / 1024:.0f} GiB{features}"


@dataclass
class Answers:
    """Slurm's answers, parsed."""

    config: dict[str, str]
    partitions: list[dict[str, str]]
    types: list[NodeType]
    accounts: list[str] = field(default_factory=list)
    """Of this user; empty where accounting does not say."""
    trials: dict[str, list[str]] = field(default_factory=dict)
    """Partition -> what `sbatch --test-only` says of small jobs there, in lines."""


@dataclass(frozen=True)
class SiteDraft:
    """A profile to be checked by a person."""

    site: SiteConfig
    text: str
    """YAML with comments, which parses to `site`."""


def probe(ask: Ask | None = None, interfaces: Callable[[], list[str]] | None = None) -> SiteDraft:
    """Ask Slurm and draft a profile.
    Raises SlurmError: Slurm is missing, hangs or refuses (the accounting and sbatch alone may)."""
    answers = ask_slurm(ask or partial(run_slurm, of_user=True))  # no partition where he may send no job
    cards = (interfaces or network_cards)()
    return draft_site(answers, cards)


def ask_slurm(ask: Ask) -> Answers:
    """All questions. Raises SlurmError."""
    config = parse_settings(ask(["scontrol", "show", "config"], TIMEOUT_S))
    partitions = parse_partitions(ask(["scontrol", "show", "partition", "--oneliner"], TIMEOUT_S))
    layout = "%R|%D|%c|%m|%G|%f"
    types = parse_sinfo(ask(["sinfo", "--noconvert", "-a", "-h", "-e", "-o", layout], TIMEOUT_S))  # 1024, not 1K
    accounts: list[str] = []
    if has_accounting(config):
        user = os.environ.get("USER") or str(os.getuid())
        words = ["sacctmgr", "-nP", "show", "associations", f"user={user}", "format=account"]
        try:
            accounts = sorted({line.strip() for line in ask(words, TIMEOUT_S).splitlines() if line.strip()})
        except SlurmError:
            pass  # many sites close sacctmgr to users: the account stays a comment
    names = [row["PartitionName"] for row in partitions]
    with_gpus = {kind.partition for kind in types if kind.gpus}
    trials = try_partitions(ask, names, accounts=accounts, with_gpus=with_gpus)
    return Answers(config, partitions, types, accounts, trials)


def parse_settings(text: str) -> dict[str, str]:
    """`scontrol show config` as a dictionary; "(null)" counts as empty."""
    found = {}
    for line in text.splitlines():
        match = _SETTING.match(line)
        if match:
            found[match[1]] = "" if match[2] in ("(null)", "N/A") else match[2]
    return found


def parse_partitions(text: str) -> list[dict[str, str]]:
    """`scontrol show partition --oneliner`: one dictionary a partition."""
    rows = [dict(_PAIR.findall(line)) for line in text.splitlines()]
    return [row for row in rows if row.get("PartitionName")]


def parse_sinfo(text: str) -> list[NodeType]:
    """Lines of `%R|%D|%c|%m|%G|%f`: partition, nodes, CPUs, MiB, gres, features."""
    types = []
    for line in text.splitlines():
        cells = line.strip().split("|")
        if len(cells) < 6 or not cells[1].isdigit():
            continue
        gpus, gpu_type = parse_gres(cells[4])
        features = "" if cells[5] == "(null)" else cells[5]
        cpus, mem = (int(cell.rstrip("+") or 0) for cell in cells[2:4])
        types.append(NodeType(cells[0], int(cells[1]), cpus, mem, gpus, gpu_type, features))
    return types


def parse_gres(text: str) -> tuple[int, str | None]:
    """GPUs of a node and the type of most of them: `gpu:h100:8(S:0-1),nvme:1` is (8, "h100")."""
    found: dict[str | None, int] = {}
    for kind, count in _GPU.findall(re.sub(r"\([^)]*\)", "", text)):
        found[kind or None] = found.get(kind or None, 0) + int(count)
    if not found:
        return 0, None
    return sum(found.values()), max(found, key=lambda kind: found[kind])


def has_accounting(config: dict[str, str]) -> bool:
    """Return whether sacct can answer."""
    return config.get("AccountingStorageType", "") not in ("", "accounting_storage/none")


def preempt_mode(row: dict[str, str], partitions: Iterable[dict[str, str]], config: dict[str, str]) -> str:
    """Return a partition's preempt mode: off, requeue, cancel or suspend."""
    kind = config.get("PreemptType", "preempt/none")
    modes = (row.get("PreemptMode") or config.get("PreemptMode") or "OFF").upper().split(",")
    mode = next((m for m in modes if m != "GANG"), "OFF")
    if kind == "preempt/none" or mode in ("OFF", "WITHIN"):
        return "off"
    if kind == "preempt/partition_prio":
        mine = set(expand_hosts(row.get("Nodes", "")))
        tier = int(row.get("PriorityTier", "1"))
        stronger = (p for p in partitions if int(p.get("PriorityTier", "1")) > tier)
        if not any(mine & set(expand_hosts(p.get("Nodes", ""))) for p in stronger):
            return "off"
    return {"REQUEUE": "requeue", "CANCEL": "cancel", "SUSPEND": "suspend"}.get(mode, "off")


def network_cards() -> list[str]:
    """Network interfaces of this machine that are up, with speed and address; containers' and the loopback left out."""
    import psutil

    addresses = psutil.net_if_addrs()
    cards = []
    for name, stats in sorted(psutil.net_if_stats().items()):
        if stats.isup and not re.match(r"lo|docker|virbr|veth|br-|cni|flannel|tun|tap", name):
            numbers = [a.address for a in addresses.get(name, []) if a.family == 2]
            cards.append(f"{name} ({', '.join([*numbers, f'{stats.speed} Mb/s' if stats.speed else 'speed unknown'])})")
    infiniband = Path("/sys/class/infiniband")
    if infiniband.is_dir():
        cards += [f"InfiniBand device {path.name}" for path in sorted(infiniband.iterdir())]
    return cards


def draft_site(answers: Answers, cards: list[str]) -> SiteDraft:
    """Return the profile's text and what it parses to."""
    import yaml

    config = answers.config
    name = config.get("ClusterName") or "cluster"
    lines = [
        f"# Drafted by `prime-hpc site probe` from Slurm {config.get('SLURM_VERSION', '(version unknown)')}.",
        "# Check the lines marked `check`, then keep it in slurm/sites/ or ~/.config/prime-hpc/sites/.",
        f"name: {_scalar(name)}",
        f"cluster: {_scalar(name)}",
        "partitions:" if answers.partitions else "partitions: {}",
    ]
    for row in answers.partitions:
        lines += _partition_lines(row, answers)
    lines += [*_option_lines(answers), *_setup_lines(config), *_switch_lines(config), *_network_lines(cards)]
    text = "\n".join(lines) + "\n"
    return SiteDraft(SiteConfig.model_validate(yaml.safe_load(text)), text)


def _partition_lines(row: dict[str, str], answers: Answers) -> list[str]:
    name = row["PartitionName"]
    # of several node types the one with GPUs that is there most often speaks for the partition
    types = sorted((t for t in answers.types if t.partition == name), key=lambda t: (t.gpus > 0, t.count), reverse=True)
    notes = [] if row.get("State", "UP") == "UP" else [f"state {row['State']}"]
    notes += ["the default partition"] if row.get("Default") == "YES" else []
    notes += [f"only for groups {row['AllowGroups']}"] if row.get("AllowGroups", "ALL") != "ALL" else []
    notes += [f"only for accounts {row['AllowAccounts']}"] if row.get("AllowAccounts", "ALL") != "ALL" else []
    lines = [f"  {_scalar(name)}:" + (f"  # {'; '.join(notes)}" if notes else "")]
    body = [f"# {line}" for line in answers.trials.get(name, [])]
    total = sum(t.count for t in types) or int(row.get("TotalNodes", "0") or 0)
    if total:
        body.append(f"nodes: {total}")
    if types:
        main = types[0]
        if len(types) > 1:
            body += ["# check: several node types; the first is taken, ask for the others by constraint:"]
            body += [f"#   {t.describe()}" for t in types]
        body.append(f"gpus_per_node: {main.gpus}")
        if main.gpu_type:
            body += [f"gpu_type: {_scalar(main.gpu_type)}", *_memory_lines(main.gpu_type)]
        elif main.gpus:
            body.append("# gpu_type: h100         # check: Slurm names no type here")
        body += [f"cpus_per_node: {main.cpus}"] if main.cpus else []
        body += [f"mem_gib: {main.mem_mib / 1024:.1f}"] if main.mem_mib else []
    limit = row.get("MaxTime", "UNLIMITED")
    if limit not in ("UNLIMITED", "INFINITE", "NONE", ""):
        body.append(f"max_time: {_scalar(limit)}")
    mode = preempt_mode(row, answers.partitions, answers.config)
    by_qos = (
        "  # check: by QOS, only jobs of a preemptable one" if "qos" in answers.config.get("PreemptType", "") else ""
    )
    body.append(f"preempt: {_scalar(mode)}{by_qos if mode != 'off' else ''}")
    return [*lines, *(f"    {line}" for line in body)]


def _memory_lines(gpu_type: str) -> list[str]:
    words = re.split(r"[^a-z0-9]+", gpu_type.lower())
    size = next((GPU_MEMORY_GIB[word] for word in words if word in GPU_MEMORY_GIB), None)
    if size is None:
        return ["# gpu_memory_gib: 80      # check: not known from the type; lint estimates with it"]
    return [f"gpu_memory_gib: {size}  # check: guessed from the type"]


def _option_lines(answers: Answers) -> list[str]:
    lines = ["options: {}  # sbatch options of every job, e.g. {partition: ..., account: ..., qos: ...}"]
    if answers.accounts:
        lines.append(f"# accounts of this user: {', '.join(answers.accounts)}")
    if "associations" in answers.config.get("AccountingStorageEnforce", ""):
        lines.append("# check: accounting is enforced: jobs without an account may be refused")
    if any(line.startswith("--mem=0: refused") for said in answers.trials.values() for line in said):
        lines.append("# whole_node_mem: ...   # check: --mem=0 was refused: what `mem: 0` is sent as, null: no --mem")
    return lines


def _setup_lines(config: dict[str, str]) -> list[str]:
    local = config.get("TmpFS") or "/tmp"
    return [
        "setup: []  # check: shell lines before the job, e.g. `module load cuda`",
        "# env: {HF_HOME: ...}",
        "# container: {runtime: apptainer, image: ...}",
        "# scratch: ...            # a shared directory for large output",
        f"node_local: {_scalar(local)}  # check: Slurm's TmpFS; is it a disk, or memory?",
    ]


def _switch_lines(config: dict[str, str]) -> list[str]:
    parameters = config.get("SchedulerParameters", "")
    het = config.get("SchedulerType") == "sched/backfill"
    requeue = config.get("JobRequeue", "1") == "1"
    accounting = has_accounting(config)
    lines = [
        f"het_jobs: {_scalar(het)}  # {config.get('SchedulerType') or 'scheduler unknown'}"
        + ("" if het else ": het jobs need sched/backfill"),
        f"requeue: {_scalar(requeue)}  # JobRequeue={config.get('JobRequeue', 'unknown')}"
        + ("" if requeue else "; check: `sbatch --requeue` may be allowed all the same"),
        f"sacct: {_scalar(accounting)}  # {config.get('AccountingStorageType') or 'no accounting'}",
        "gpu_option: gres  # check: some sites want gpus-per-node",
    ]
    if "disable_hetjob_steps" in parameters:
        lines.append("# disable_hetjob_steps is set: a step cannot span het components (prime-hpc does not need that)")
    for key, meaning in (
        ("SlurmdTimeout", "a dead node is noticed after this"),
        ("KillWait", "from SIGTERM to SIGKILL"),
        ("MaxArraySize", "largest array index + 1"),
        ("JobSubmitPlugins", "site rules that may change or refuse jobs"),
    ):
        if config.get(key):
            lines.append(f"# {key} = {config[key]}: {meaning}")
    return lines


def _network_lines(cards: list[str]) -> list[str]:
    found = "; ".join(cards) or "none found"
    return [
        f"# network_interface: ...   # check: NCCL and gloo choose unless it is set; up on this machine: {found}",
        "srun_args: [--mpi=none]",
    ]


def _scalar(value: Any) -> str:
    """Return a YAML scalar, quoted where it must be."""
    import yaml

    return str(yaml.safe_dump(value, default_flow_style=True, width=10_000)).removesuffix("...\n").strip()
