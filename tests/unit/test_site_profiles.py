"""Profiles in slurm/sites: they load, each fact names its source, and a job has the options that its site demands."""

import re
from pathlib import Path
from typing import Any

import pytest

from prime_hpc.config import ConfigError, Experiment
from prime_hpc.config.sections.slurm import SiteConfig
from prime_hpc.config.site import list_sites, load_site, parse_site, read_site, write_site
from prime_hpc.launch.lint.lint import lint
from prime_hpc.slurm.options import resolve
from prime_hpc.slurm.placement import place_slurm
from prime_hpc.slurm.script import render_job
from prime_hpc.slurm.times import parse_time_s

FOLDER = Path(__file__).resolve().parents[2] / "slurm" / "sites"
PROFILES = sorted(path.stem for path in FOLDER.glob("*.yaml"))

GPUS = {  # sizes of memory, in GiB, that each GPU is sold with; and of a GH200's or an MI250X's half
    "A100": {40, 64, 80},  # 64: Leonardo's own
    "GH200": {96, 144},
    "H100": {64, 80, 94},  # 64: MareNostrum's own
    "MI250X": {64},
}
PUBLIC: dict[str, tuple[str, int, dict[str, str | None]]] = {
    # site -> its GPU, how many a node, and the options of a job that states its account and a time alone
    "alps": (
        "GH200",
        4,
        {"partition": "normal", "cpus-per-task": "288", "mem": "450G", "exclusive": None, "gpus-per-node": "4"},
    ),
    "frontier": (
        "MI250X",
        8,
        {
            "partition": "batch",
            "cpus-per-task": "56",
            "constraint": "nvme",
            "network": "disable_rdzv_get",
            "gpus-per-node": "8",
        },
    ),
    "leonardo": (
        "A100",
        4,
        {
            "partition": "boost_usr_prod",
            "cpus-per-task": "32",
            "mem": "494000M",
            "exclusive": None,
            "gres": "gpu:4",
        },
    ),
    "lumi": ("MI250X", 8, {"partition": "standard-g", "cpus-per-task": "56", "gpus-per-node": "8"}),
    "marenostrum5": (
        "H100",
        4,
        {"partition": "acc", "qos": "acc_ehpc", "cpus-per-task": "80", "exclusive": None, "gres": "gpu:4"},
    ),
    "perlmutter": (
        "A100",
        4,
        {
            "constraint": "gpu",
            "qos": "regular",
            "cpus-per-task": "128",
            "exclusive": None,
            "gpus-per-node": "4",
        },
    ),
}
OF_EVERY_JOB = {
    "account",
    "comment",
    "job-name",
    "no-kill",
    "nodes",
    "ntasks-per-node",
    "open-mode",
    "output",
    "requeue",
    "signal",
    "time",
}
FACTS = r"nodes|gpus_per_node|gpu_memory_gib|cpus_per_node|mem_gib|max_time|constraint|partition|qos|internet|requeue"
FACTS += r"|purge_days|purge_by|scratch|node_local|gpu_option|max_submit_jobs|whole_node_mem|network_interface|het_jobs"
SOURCE = re.compile(r"^#   \[(\w+)\] +(.+)$", re.MULTILINE)


def job(profile: SiteConfig, num_gpus: int, **slurm: Any) -> Experiment:
    """A minimal run: one node that trains and one that serves."""
    return Experiment.model_validate(
        {
            "name": "x",
            "output_dir": f"{profile.scratch}/runs",
            "orchestrator": {"env": [{"id": "reverse-text"}]},
            "trainer": {"num_ranks": num_gpus},
            "inference": {"num_replicas": num_gpus},
            "slurm": {"account": "abc123", "time": "1:00:00", **slurm},
        }
    )


def options(site: SiteConfig, one: Experiment) -> dict[str, str | None]:
    """The script's options that depend on the site."""
    script = render_job(place_slurm(one, site), one, site, python="/venv/bin/python", command_tail=[])
    stated = [line.removeprefix("#SBATCH --").partition("=") for line in script.splitlines() if "#SBATCH --" in line]
    return {name: value if equals else None for name, equals, value in stated if name not in OF_EVERY_JOB}


@pytest.mark.parametrize("name", PROFILES)
def test_a_profile_is_called_as_its_file_and_knows_its_default_partition(name: str) -> None:
    site = parse_site(FOLDER / f"{name}.yaml")
    assert site.name == name and site.partitions
    asked = resolve("trainer", job(site, 1), site)
    assert asked.partitions and set(asked.partitions) <= set(site.partitions)
    assert asked.gpus_per_node > 0
    for part in site.partitions.values():
        assert part.max_time is None or parse_time_s(part.max_time)


def test_the_public_machines_are_known_to_this_test() -> None:
    assert set(PROFILES) == {*PUBLIC, "devcluster", "example"}


@pytest.mark.parametrize("name", PUBLIC)
def test_each_fact_of_a_public_machine_names_its_source(name: str) -> None:
    text = (FOLDER / f"{name}.yaml").read_text()
    head = " ".join(line.removeprefix("#").strip() for line in text.splitlines()[:5])
    assert re.search(r"[Ww]ritten on \d{4}-\d\d-\d\d from public documents", head) and "not tried" in head
    sources = dict(SOURCE.findall(text))
    assert any("https://" in page for page in sources.values())
    for tag, page in sources.items():
        assert "https://" in page or "second-hand" in page or "page " in page, f"[{tag}] names no page"
        assert text.count(f"[{tag}]") > 1, f"[{tag}] is the source of nothing"
    facts = re.findall(rf"^ *((?:{FACTS}): [^#\n]*)(.*)$", text, re.MULTILINE)
    assert len(facts) > 10
    for fact, comment in facts:
        named = set(re.findall(r"\[(\w+)\]", comment))
        assert named & set(sources) or "as above" in comment or "not stated" in comment, f"{fact}: no source"
        assert named <= set(sources), f"{fact}: {named - set(sources)} is not among the sources"


@pytest.mark.parametrize("name", PUBLIC)
def test_a_job_has_exactly_the_options_that_its_site_demands(name: str) -> None:
    site = parse_site(FOLDER / f"{name}.yaml")
    gpu, count, expected = PUBLIC[name]
    for part in site.partitions.values():
        assert part.gpus_per_node in (0, count)
        assert (part.gpu_memory_gib in GPUS[gpu]) if part.gpus_per_node else part.gpu_memory_gib is None
        assert part.mem_gib and (part.gpus_per_node or part.cpus_per_node) and part.mem_gib < 1024
    assert options(site, job(site, count)) == expected
    asked = {**expected, "mem": site.whole_node_mem} if site.whole_node_mem else expected
    assert options(site, job(site, count, mem="0")) == asked


@pytest.mark.parametrize("name", PUBLIC)
def test_lint_has_nothing_against_a_small_job_on_a_public_machine(name: str) -> None:
    site = parse_site(FOLDER / f"{name}.yaml")
    found = lint(job(site, PUBLIC[name][1], site=name), site)
    assert not [finding.line() for finding in found if finding.severity == "error"]


def test_where_a_site_takes_no_partition_the_constraint_stands_for_one() -> None:
    site = parse_site(FOLDER / "perlmutter.yaml")
    asked = resolve("trainer", job(site, 4, constraint="gpu&hbm80g"), site)
    assert asked.partitions == ("gpu-80g",) and asked.gpus_per_node == 4 and "partition" not in asked.options
    beside = {"constraint": "cpu", "gpus_per_node": 0, "cpus_per_task": 256}
    one = job(site, 4, orchestrator=beside)
    assert resolve("orchestrator", one, site).partitions == ("cpu",)
    components = options(site, one)
    assert "partition" not in components
    with_name = resolve("trainer", job(site, 4, partition="mine"), site)
    assert with_name.partitions == ("mine",)


@pytest.mark.parametrize(
    ("stated", "sent_as", "mem"),
    [("0", "0", "0"), ("0G", "450G", "450G"), ("0", None, None), ("10G", "450G", "10G"), ("10G", None, "10G")],
)
def test_all_of_a_nodes_memory_is_asked_for_as_the_site_takes_it(
    stated: str, sent_as: str | None, mem: str | None
) -> None:
    site = SiteConfig.model_validate({"name": "s", "scratch": "/scratch", "whole_node_mem": sent_as})
    assert resolve("trainer", job(site, 1, mem=stated, gpus_per_node=1), site).options.get("mem") == mem


def test_what_is_no_profile_in_a_sites_folder_hinders_nobody(tmp_path: Path) -> None:
    folder = tmp_path / "home" / "sites"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text("cluster: c1\nenv: {OMP_NUM_THREADS: 1}\npartitions: {p: {max_time: 60}}\n")
    (folder / ".#mine.yaml").symlink_to("me@host.1")
    (folder / "gone.yaml").symlink_to("nowhere.yaml")
    (folder / "latin.yaml").write_bytes("# caf\u00e9\ncluster: c2\n".encode("latin-1"))
    environ = {"PRIMEHPC_SITES": str(folder)}
    assert {".#mine", "gone"}.isdisjoint(list_sites(environ)) and {"mine", "latin"} <= set(list_sites(environ))
    site = load_site(None, environ, "c1")
    assert (site.env, site.partitions["p"].max_time) == ({"OMP_NUM_THREADS": "1"}, "60")
    with pytest.raises(ConfigError, match=r"latin\.yaml: it is not UTF-8"):
        load_site(None, environ, "c2")


def test_home_is_known_where_a_site_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.yaml").write_text("cluster: c1\npartitions: {p: {preempt: off}}\n")
    assert load_site("~/mine.yaml", {}).partitions["p"].preempt == "off"
    assert load_site("mine", {"PRIMEHPC_SITES": "~"}).cluster == "c1"


def test_a_runs_profile_is_replaced_whole(tmp_path: Path) -> None:
    """A job that reads it meanwhile sees the old one or the new one; half of one is a profile, too."""
    write_site(SiteConfig(name="a", max_submit_jobs=3), tmp_path)
    (tmp_path / "open").hardlink_to(tmp_path / "site.yaml")
    write_site(SiteConfig(name="b"), tmp_path)
    assert (parse_site(tmp_path / "open").max_submit_jobs, read_site(tmp_path).name) == (3, "b")


def test_a_folder_that_cannot_be_looked_at_hinders_nobody() -> None:
    """As the home of another user, in which the file system lets nobody else search."""
    assert list_sites({"PRIMEHPC_SITES": "x" * 300}) == list_sites({})
