"""Every experiment in `configs/` resolves."""

from pathlib import Path

import pytest

from prime_hpc.config import load_experiment

ROOT = Path(__file__).resolve().parents[2]
ON_GPUS = ("reasoning_gym", "instructions", "games", "math")
"""More of these: tests/unit/test_recipes.py."""
CONFIGS = sorted(
    path for path in (ROOT / "configs").rglob("*") if path.suffix in (".yaml", ".toml") and path.parent.name != "sizes"
)
"""Sizes are no experiments: they lie over one (tests/unit/test_recipes.py)."""


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: str(p.relative_to(ROOT)))
def test_config_resolves(path: Path) -> None:
    experiment = load_experiment(["@", str(path)], "plan", environ={}).experiment
    named = path.parent.name if path.parent.name == "eval" else path.stem
    assert experiment.kind == next((kind for kind in ("sft", "eval", "synthesize") if named.startswith(kind)), "rl")
    if path.parent.name not in ON_GPUS and not path.stem.endswith("_4b"):
        assert experiment.model.dtype == "float32"  # these run on a machine without a GPU


def test_there_are_configs() -> None:
    assert {p.parent.name for p in CONFIGS} >= {"reverse_text", "word_sorting", "games", "math"}
    assert {p.name for p in CONFIGS if p.suffix == ".toml"} >= {"single_env.toml", "multi_env.toml", "local_model.toml"}
