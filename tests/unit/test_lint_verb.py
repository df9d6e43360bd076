"""The verb `lint`: its exit codes, its text and its JSON."""

import json
from pathlib import Path

import pytest

from prime_hpc import cli
from tests.support.lint import SITE, good


@pytest.fixture
def file(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    import yaml

    site = tmp_path / "site.yaml"
    site.write_text(yaml.safe_dump(SITE))
    monkeypatch.setenv("PRIMEHPC_SITE", str(site))
    path = tmp_path / "exp.yaml"
    path.write_text(yaml.safe_dump(good(model)))
    return path


def test_the_verb(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["lint", str(file)]) == 0
    assert capsys.readouterr().out == "clean\n"
    assert cli.main(["lint", str(file), "--no-ckpt"]) == 0
    assert "warning PH205" in capsys.readouterr().out
    assert cli.main(["lint", str(file), "--no-ckpt", "--strict"]) == 2
    capsys.readouterr()
    assert cli.main(["lint", str(file), "--slurm.time", "0"]) == 2
    out = capsys.readouterr().out
    assert "error PH305 command line (--slurm.time): slurm.time: a time of zero" in out
    assert out.endswith("1 error\n")


def test_several_files_as_json(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("max_step: 3\n")
    assert cli.main(["lint", str(file), str(wrong), "--json", "--slurm.time", "1:00:00"]) == 2
    first, second = json.loads(capsys.readouterr().out)
    assert (first["file"], first["site"], first["findings"]) == (str(file), "test", [])
    (finding,) = second["findings"]
    assert (finding["code"], finding["severity"]) == ("PH000", "error")
    assert "max_steps" in finding["message"]
