"""A site's purge of its scratch: which file goes first, and who warns of it when."""

import os
import time
from pathlib import Path

import pytest
import yaml

from prime_hpc.cli import main
from prime_hpc.config.sections.slurm import SiteConfig
from prime_hpc.config.site import write_site
from prime_hpc.launch.purge import DAY_S, first_purge, warn_s

NOW = time.time()


def aged(path: Path, *, read_days: float, changed_days: float) -> Path:
    """A file that was last read and changed so many days ago."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    os.utime(path, (NOW - read_days * DAY_S, NOW - changed_days * DAY_S))
    return path


def site(scratch: Path | None, **keys: object) -> SiteConfig:
    return SiteConfig.model_validate({"name": "s", "scratch": scratch, "purge_days": 30, **keys})


def test_the_first_file_by_the_time_that_the_site_counts_from(tmp_path: Path) -> None:
    read = aged(tmp_path / "run" / "a" / "read", read_days=25, changed_days=1)
    changed = aged(tmp_path / "run" / "changed", read_days=1, changed_days=28)
    by_read = first_purge(tmp_path / "run", site(tmp_path))
    by_change = first_purge(tmp_path / "run", site(None, purge_by="mtime"))
    assert by_read is not None and by_change is not None
    assert (by_read.path, round((by_read.when - NOW) / DAY_S)) == (read, 5)
    assert (by_change.path, round((by_change.when - NOW) / DAY_S)) == (changed, 2)
    assert first_purge(tmp_path / "run", site(tmp_path / "elsewhere")) is None, "not on scratch"
    assert first_purge(tmp_path / "run", site(tmp_path, purge_days=None)) is None
    assert first_purge(tmp_path / "none", site(tmp_path)) is None
    assert first_purge(read, site(tmp_path)) == first_purge(read.parent, site(tmp_path)), "a file alone"
    assert (warn_s(site(None)), warn_s(site(None, purge_days=4))) == (7 * DAY_S, 2 * DAY_S)


def test_status_names_the_date_and_the_command(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "run.yaml").write_text("max_steps: 3\n")
    write_site(site(tmp_path), run_dir)
    assert main(["status", str(run_dir)]) == 0
    assert "purge" not in capsys.readouterr().out, "nothing is old"
    aged(run_dir / "logs" / "old.log", read_days=28, changed_days=28)  # which `status` does not read
    assert main(["status", str(run_dir)]) == 0
    told = capsys.readouterr().out
    date = time.strftime("%Y-%m-%d", time.localtime(NOW + 2 * DAY_S))
    assert f"from {date} on (s deletes files that nobody has read for 30 days; first logs/old.log)" in told
    assert f"prime-hpc archive {run_dir} DESTINATION" in told
    (run_dir / "site.yaml").write_text("name: [")
    assert main(["status", str(run_dir)]) == 0, "a damaged profile is no reason to say nothing"


def test_lint_warns_of_what_goes_before_the_job_may_be_over(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    model = tmp_path / "scratch" / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    aged(model / "code.py", read_days=20, changed_days=20)  # lint reads the others
    profile = {"name": "s", "scratch": str(tmp_path / "scratch"), "purge_days": 30}
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(profile))

    def findings(limit: str) -> str:
        tree = {"name": "r", "output_dir": str(tmp_path / "out"), "model": {"name": str(model)}, "launch": "slurm"}
        tree |= {"orchestrator": {"env": [{"id": "reverse-text"}]}}
        tree |= {"slurm": {"site": str(tmp_path / "s.yaml"), "time": limit, "gpus_per_node": 0}}
        (tmp_path / "exp.yaml").write_text(yaml.safe_dump(tree))
        main(["lint", str(tmp_path / "exp.yaml")])
        return str(capsys.readouterr().out)

    assert "PH332" not in findings("2-00:00:00")
    told = next(line for line in findings("4-00:00:00").splitlines() if "PH332" in line)
    assert told.startswith("warning") and "model.name" in told and "code.py is purged from " in told
    assert "prime-hpc fetch" in told
