"""`site probe`: the draft of a profile, from words of a real Slurm (the dev cluster's) and of sites that it is not."""

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from prime_hpc.cli.verbs.cluster import site as verb
from prime_hpc.config.site import parse_site
from prime_hpc.slurm import probe_site
from prime_hpc.slurm.client import SlurmError, run_slurm
from prime_hpc.slurm.queue_facts.probe_submit import try_partitions
from tests.support.fake_slurm import FakeSlurm

# recorded on the dev cluster (Slurm 22.05.8) with the commands of `probe.ask_slurm`
DATA = Path(__file__).resolve().parents[1] / "data" / "slurm"

LARGE = {
    "config": (
        "SLURM_VERSION = 24.11.5\nClusterName = atlas\nSchedulerType = sched/builtin\nJobRequeue = 0\n"
        "AccountingStorageType = accounting_storage/slurmdbd\nAccountingStorageEnforce = associations,limits\n"
        "PreemptType = preempt/qos\nPreemptMode = GANG,SUSPEND\nTmpFS = /local/$SLURM_JOB_ID\nKillWait = 30 sec\n"
        "JobSubmitPlugins = lua\nProlog = (null)\n"
    ),
    "partition": (
        "PartitionName=no AllowGroups=ALL Default=YES MaxTime=2-00:00:00 Nodes=g[001-010] State=UP PriorityTier=1 "
        "PreemptMode=SUSPEND TotalNodes=10\n"
        "PartitionName=old AllowGroups=staff AllowAccounts=ALL MaxTime=UNLIMITED Nodes=o[1-2] State=DOWN "
        "PreemptMode=OFF TotalNodes=2\n"
    ),
    "sinfo": (
        "no|2|64|515000|gpu:a100:4(S:0-1)|ib\nno|8|112|2063000|gpu:h100:8(S:0-1),nvme:1|h100,ib\n"
        "no|1|64|257000|(null)|(null)\nold|2|32|128000|gpu:2|(null)\n"
    ),
}


def asker(words: dict[str, str], accounts: str | None = "rl\nrl\nvision\n") -> Callable[..., str]:
    def ask(argv: Sequence[str], timeout_s: float, **_: Any) -> str:
        assert timeout_s > 0
        if argv[0] == "sbatch":
            assert argv == ["sbatch", "--test-only"]
            return "sbatch: Job 9 to start at 2026-11-22T07:05:14 using 1 processors on nodes n1 in partition gpu\n"
        if argv[0] == "sacctmgr":
            if accounts is None:
                raise SlurmError(argv, 1, "Access/permission denied")
            return accounts
        return words[argv[2] if argv[0] == "scontrol" else argv[0]]

    return ask


def recorded() -> dict[str, str]:
    files = {"config": "config", "partition": "partitions", "sinfo": "sinfo"}
    return {key: (DATA / f"devcluster_{name}.txt").read_text() for key, name in files.items()}


def test_nodes_of_1024_cpus() -> None:
    """sinfo writes 1K, unless it is told not to."""
    plain = asker(recorded())

    def ask(argv: Sequence[str], timeout_s: float, **options: Any) -> str:
        said = plain(argv, timeout_s, **options)
        return said.replace("|16|", "|1024|" if "--noconvert" in argv else "|1K|") if argv[0] == "sinfo" else said

    assert probe_site.probe(ask, lambda: []).site.partitions["gpu"].cpus_per_node == 1024


def test_the_dev_clusters_own_words(tmp_path: Path) -> None:
    draft = probe_site.probe(asker(recorded()), lambda: ["eth0 (10.0.0.1)"])
    site = draft.site
    assert site.name == site.cluster == "primehpcdev"
    assert list(site.partitions) == ["gpu", "cpu", "all", "scavenge", "scavcancel", "high"]
    gpu, cpu, everything = (site.partitions[name] for name in ("gpu", "cpu", "all"))
    assert (gpu.nodes, gpu.gpus_per_node, gpu.cpus_per_node, gpu.mem_gib) == (4, 8, 16, 62.5)
    assert (cpu.nodes, cpu.gpus_per_node) == (2, 0)
    assert (everything.nodes, everything.gpus_per_node) == (6, 8)
    modes = {name: part.preempt for name, part in site.partitions.items()}
    assert modes == {
        **dict.fromkeys(("gpu", "cpu", "all", "high"), "off"),
        "scavenge": "requeue",
        "scavcancel": "cancel",
    }
    assert site.het_jobs and site.requeue and not site.sacct and site.node_local == "/tmp"
    assert "several node types" in draft.text and "eth0 (10.0.0.1)" in draft.text
    for name in site.partitions:
        lines = draft.text.partition(f"\n  {name}:")[2].splitlines()
        assert lines[1].startswith("    # this user may submit here") and "    # a het job: accepted" in lines[:6]
    path = tmp_path / "drafted.yaml"
    path.write_text(draft.text)
    assert parse_site(path) == site, "the text is what was checked"


def test_a_site_with_typed_gpus_and_other_rules() -> None:
    draft = probe_site.probe(asker(LARGE), lambda: [])
    site = draft.site
    part = site.partitions["no"]
    assert (part.nodes, part.gpus_per_node, part.gpu_type, part.gpu_memory_gib) == (11, 8, "h100", 80)
    assert part.max_time == "2-00:00:00" and part.preempt == "suspend"
    assert site.partitions["old"].max_time is None and site.partitions["old"].gpu_type is None
    assert not site.het_jobs and not site.requeue and site.sacct
    assert site.node_local == "/local/$SLURM_JOB_ID"
    for words in (
        "2 nodes with 4 GPUs a100, 64 CPUs, 503 GiB, features ib",
        "accounts of this user: rl, vision",
        "by QOS",
        "het jobs need sched/backfill",
        "state DOWN; only for groups staff",
        "accounting is enforced",
        "JobSubmitPlugins = lua",
        "none found",
    ):
        assert words in draft.text, words


def test_closed_accounting_is_no_error() -> None:
    draft = probe_site.probe(asker(LARGE, accounts=None), lambda: [])
    assert "accounts of this user" not in draft.text and draft.site.sacct


def test_a_slurm_that_says_almost_nothing() -> None:
    draft = probe_site.probe(asker({"config": "", "partition": "", "sinfo": ""}), lambda: [])
    assert draft.site.name == "cluster" and draft.site.partitions == {} and not draft.site.sacct


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("(null)", (0, None)),
        ("gpu:8", (8, None)),
        ("gpu:h100:8(S:0-1)", (8, "h100")),
        ("gpu:a100:4(S:0,1),gpu:v100:2,nvme:1", (6, "a100")),
        ("craynetwork:4,gpu:1g.10gb:7(S:0)", (7, "1g.10gb")),
        ("gpu:tesla_t4:1(IDX:0)", (1, "tesla_t4")),
        ("mygpu:8", (0, None)),
    ],
)
def test_gres(text: str, expected: tuple[int, str | None]) -> None:
    assert probe_site.parse_gres(text) == expected


def test_preemption_needs_a_stronger_partition_on_the_same_nodes() -> None:
    config = {"PreemptType": "preempt/partition_prio", "PreemptMode": "REQUEUE"}
    weak = {"PartitionName": "w", "Nodes": "n[1-4]", "PriorityTier": "1", "PreemptMode": "REQUEUE"}
    apart = {"PartitionName": "a", "Nodes": "n[5-8]", "PriorityTier": "9", "PreemptMode": "OFF"}
    above = {"PartitionName": "b", "Nodes": "n[4-8]", "PriorityTier": "9", "PreemptMode": "OFF"}
    assert probe_site.preempt_mode(weak, [weak, apart], config) == "off"
    assert probe_site.preempt_mode(weak, [weak, above], config) == "requeue"
    assert probe_site.preempt_mode(weak, [weak, above], {"PreemptType": "preempt/none"}) == "off"


# ---- what may be submitted


def test_what_a_site_refuses_stands_in_the_draft_in_its_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeSlurm(tmp_path)
    fake.use(monkeypatch)
    invalid = "sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified"
    fake.expect("--partition=closed", code=1, say=invalid)
    fake.expect("--mem=0", code=1, say="sbatch: error: Memory specification can not be satisfied")
    fake.expect(
        "hetjob", code=1, say="sbatch: error: Job components are not allowed here\nsbatch: error: ask the staff"
    )
    fake.expect("--account=rl", after=5)
    fake.expect("--partition=gpu", code=1, say="sbatch: error: state an account")
    said = try_partitions(run_slurm, ["cpu", "gpu", "closed"], accounts=["rl", "b"])
    assert said["cpu"][:3] == [
        "this user may submit here (sbatch --test-only: one node for a minute)",
        "without --account: accepted",
        "--mem=0: refused: Memory specification can not be satisfied",
    ]
    assert said["gpu"] == [
        "this user may submit here (sbatch --test-only: one node for a minute, --account=rl)",
        "without --account: refused: state an account",
        "--mem=0: refused: Memory specification can not be satisfied",
        "--exclusive: accepted",
        "a het job: refused: Job components are not allowed here; ask the staff",
    ]
    (only,) = said["closed"]
    assert only.startswith("this user may not submit here") and only.endswith("combination specified")
    assert fake.jobs() == [] and all(call == ["sbatch", "--test-only"] for call in fake.calls())


def test_where_all_memory_is_refused_the_draft_names_the_key() -> None:
    for words, named in (("refused: no", True), ("accepted", False)):
        draft = probe_site.draft_site(probe_site.Answers({}, [], [], trials={"gpu": [f"--mem=0: {words}"]}), [])
        assert ("# whole_node_mem: ..." in draft.text) is named


def test_where_gpus_must_be_asked_for_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeSlurm(tmp_path)
    fake.use(monkeypatch)
    fake.expect("--gpus-per-node=1", after=5)
    fake.expect("--partition", code=1, say="sbatch: error: state your GPUs")
    said = try_partitions(run_slurm, ["gpu", "cpu"], with_gpus=["gpu"])
    assert said["gpu"][0].endswith("one node for a minute, --gpus-per-node=1)")
    assert said["gpu"][1] == "without --account: accepted"
    assert said["cpu"] == ["this user may not submit here (sbatch --test-only: one node for a minute): state your GPUs"]


@pytest.mark.parametrize(
    ("code", "stderr", "words"),
    [
        (None, "sbatch is not found on PATH", "gave no answer, no more was asked"),
        (1, "sbatch: error: Unable to contact slurm controller (connect failure)", "gave no answer"),
    ],
)
def test_a_silent_sbatch_costs_the_draft_nothing_else(code: int | None, stderr: str, words: str) -> None:
    asked = []
    others = asker(LARGE)

    def ask(argv: Sequence[str], timeout_s: float, **more: Any) -> str:
        if argv[0] == "sbatch":
            asked.append(argv)
            raise SlurmError(argv, code, stderr)
        return others(argv, timeout_s, **more)

    draft = probe_site.probe(ask, lambda: [])
    assert list(draft.site.partitions) == ["no", "old"] and words in draft.text and len(asked) == 1


def test_the_questions_end_with_their_time() -> None:
    seconds = iter(range(1000))

    def ask(argv: Sequence[str], timeout_s: float, **_: Any) -> str:
        return "sbatch: Job 9 to start at 2026-11-22T07:05:14 using 1 processors on nodes n1 in partition gpu\n"

    said = try_partitions(ask, ["a", "b", "c"], total_s=5, clock=lambda: next(seconds))
    assert said["a"][-1] == "a het job: accepted" and said["b"] == ["not asked: the questions before took 5 s"]
    assert "c" not in said


def test_an_sbatch_that_submits_all_the_same_is_asked_once_and_its_job_cancelled() -> None:
    calls = []

    def ask(argv: Sequence[str], timeout_s: float, **_: Any) -> str:
        calls.append(list(argv))
        return "Submitted batch job 77\n" if argv[0] == "sbatch" else ""

    said = try_partitions(ask, ["a", "b"])
    assert calls == [["sbatch", "--test-only"], ["scancel", "77"]]
    assert said == {"a": [said["a"][0]]} and "made job 77 of one minute; it was cancelled" in said["a"][0]


# ---- the verb


def test_probe_never_overwrites_and_writes_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(probe_site, "run_slurm", None)
    draft = probe_site.probe(asker(LARGE), lambda: [])
    monkeypatch.setattr(probe_site, "probe", lambda: draft)
    target = tmp_path / "atlas.yaml"
    assert verb.run(["probe", "--output", str(target)], "prime-hpc site") == 0
    assert target.read_text() == draft.text and capsys.readouterr().out == ""
    target.write_text("mine")
    with pytest.raises(ValueError, match="not overwritten"):
        verb.run(["probe", f"--output={target}"], "prime-hpc site")
    with pytest.raises(ValueError, match="cannot be written"):
        verb.run(["probe", "--output", str(tmp_path / "missing" / "x.yaml")], "prime-hpc site")
    assert target.read_text() == "mine"


def test_without_slurm_it_says_so_and_exits_3(tmp_path: Path) -> None:
    environ = {"PATH": str(tmp_path), "HOME": str(tmp_path)}
    code = "import sys; from prime_hpc.cli import main; sys.exit(main(['site', 'probe']))"
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=280)
    assert done.returncode == 3 and done.stdout == ""
    assert "scontrol is not found on PATH" in done.stderr and "Traceback" not in done.stderr


def test_list_and_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "atlas.yaml").write_text("cluster: atlas\nsacct: false\n")
    conf = tmp_path / "slurm.conf"
    conf.write_text("ClusterName=atlas\n")
    monkeypatch.setenv("PRIMEHPC_SITES", str(tmp_path))
    monkeypatch.setenv("SLURM_CONF", str(conf))
    monkeypatch.delenv("PRIMEHPC_SITE", raising=False)
    assert verb.run(["list"], "prime-hpc site") == 0
    assert "* atlas" in capsys.readouterr().out
    assert verb.run(["show", "atlas"], "prime-hpc site") == 0
    assert "sacct: false" in capsys.readouterr().out
    with pytest.raises(ValueError, match="did you mean atlas"):
        verb.run(["show", "atlsa"], "prime-hpc site")


@pytest.mark.parametrize("words", [[], ["prob"], ["list", "x"], ["probe", "x"], ["show", "--output", "f"], ["--x"]])
def test_wrong_usage(words: list[str]) -> None:
    with pytest.raises(ValueError, match="usage"):
        verb.run(words, "prime-hpc site")
