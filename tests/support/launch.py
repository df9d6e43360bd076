"""A small experiment before it starts, and a model that nobody loads."""

from pathlib import Path

from prime_hpc.config import Experiment, Loaded


def make_model(folder: Path) -> Path:
    """A config without fields, and weights without tensors."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}" + b"x" * 990)
    return folder


def loaded(tmp_path: Path, model: Path | str, **values: object) -> Loaded:
    tree = {
        "output_dir": str(tmp_path / "out"),
        "name": "x",
        "model": {"name": str(model)},
        "orchestrator": {"env": [{"id": "reverse-text"}]},
    }
    return Loaded(Experiment.model_validate({**tree, **values}), {}, [], "rl")
