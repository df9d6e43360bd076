"""A small experiment and a sweep file over it, for the tests of sweeps."""

from pathlib import Path


def make_experiment(folder: Path, slurm: str = "") -> Path:
    """Write `exp.yaml`, an SFT run of four steps whose model is files of a name only.

    Args:
        folder: of the experiment.
        slurm: more keys of that section, each with a comma behind it.
    """
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text('{"max_position_embeddings": 512, "model_type": "x"}')
    (model / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}" + b"x" * 90)
    (folder / "exp.yaml").write_text(
        f"kind: sft\noutput_dir: {folder / 'out'}\nmax_steps: 4\nseq_len: 64\n"
        f"model: {{name: {model}, dtype: float32}}\nsft: {{data: {{type: fake, batch_size: 8}}}}\n"
        f"slurm: {{{slurm}partition: gpu, time: '10:00', cpus_per_task: 2, gpus_per_node: 0}}\n"
    )
    return folder


def write_sweep(folder: Path, text: str) -> Path:
    """Write `s.yaml`, a sweep over `exp.yaml`."""
    path = folder / "s.yaml"
    path.write_text(f"experiment: exp.yaml\n{text}")
    return path
