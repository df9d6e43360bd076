"""Versions of a run that an evaluation finds, by directory and step."""

import json
import shutil
from pathlib import Path

import pytest

from prime_hpc.config import ConfigError
from prime_hpc.config.sections.standalone_eval import StandaloneEvalConfig
from prime_hpc.evals.versions import Version, adapter_rank, check_published, find_versions, version_template
from prime_hpc.store.artifact import ArtifactWriter
from prime_hpc.store.run_paths import RunPaths


def test_versions(tmp_path: Path) -> None:
    for step in (5, 10, 20):
        (tmp_path / "weights" / f"step_{step:06d}").mkdir(parents=True)

    def found(**keys: object) -> list[Version]:
        return find_versions(StandaloneEvalConfig.model_validate({"weights_dir": tmp_path / "weights", **keys}))

    assert [v.step for v in found()] == [0, 5, 10, 20]
    assert [v.step for v in found(steps=[20, 5], eval_base=False)] == [5, 20]
    assert [v.step for v in found(weights_dir=tmp_path)] == [0, 5, 10, 20]  # the run itself
    with pytest.raises(ConfigError, match="no step 7; there are 5, 10, 20"):
        found(steps=[7])
    with pytest.raises(ConfigError, match="not a directory"):
        found(weights_dir=tmp_path / "no")
    (tmp_path / "other").mkdir()
    with pytest.raises(ConfigError, match=r"other holds no version"):  # the base model alone is not what is asked for
        found(weights_dir=tmp_path / "other")
    weights = StandaloneEvalConfig(weights_dir=tmp_path / "weights")
    assert adapter_rank(found()) is None and version_template(weights) is None
    (tmp_path / "weights" / "step_000010" / "chat_template.jinja").write_text("own")
    assert version_template(weights) == "own"
    assert version_template(StandaloneEvalConfig()) is None
    for step, rank in ((5, 4), (10, 8), (20, 8)):
        (tmp_path / "weights" / f"step_{step:06d}" / "adapter_config.json").write_text(json.dumps({"r": rank}))
    assert adapter_rank(found()) == 8
    (tmp_path / "weights" / "step_000005" / "adapter_config.json").unlink()
    with pytest.raises(ConfigError, match="side by side"):
        adapter_rank(found())


def test_a_directory_that_no_run_has_published_is_refused_and_one_that_its_run_removes_is_not(tmp_path: Path) -> None:
    (tmp_path / "step_000003").mkdir()
    (versions := find_versions(StandaloneEvalConfig(weights_dir=tmp_path))).append(Version(4, tmp_path / "step_000004"))
    with pytest.raises(ConfigError, match=r"step_000003 is no version .* holds no manifest.json"):
        check_published(versions)
    (tmp_path / "step_000003" / "manifest.json").touch()
    check_published(versions)


def test_versions_that_went_over_the_network_are_left_out(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    for step, meta in ((10, {}), (11, {"transport": "gloo"}), (12, {"transport": "nccl"})):
        with ArtifactWriter(paths.weights_step(step), kind="weights", version=step, writer="trainer") as writer:
            writer.write("model.safetensors.header", [b"names"])
            writer.meta |= meta
    config = StandaloneEvalConfig(weights_dir=tmp_path)
    assert [version.label for version in find_versions(config)] == ["base", "step 10"]
    with pytest.raises(ConfigError, match="only a version without weights.* of step 12; there are 10$"):
        find_versions(config.model_copy(update={"steps": [10, 12]}))
    shutil.rmtree(paths.weights_step(10))
    with pytest.raises(ConfigError, match="holds only versions without weights, which went over the network"):
        find_versions(config.model_copy(update={"eval_base": False}))


def test_a_version_that_is_named_is_looked_at_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory of thousands is on a network file system."""
    asked: list[str] = []
    monkeypatch.setattr("prime_hpc.evals.versions.went_over_network", lambda folder: asked.append(folder.name))
    for step in (10, 11, 12):
        (tmp_path / f"step_{step:06d}").mkdir()
    config = StandaloneEvalConfig(weights_dir=tmp_path, steps=[11], eval_base=False)
    assert [version.step for version in find_versions(config)] == [11] and asked == ["step_000011"]
