"""A weight version as a server takes it or refuses it, without a server."""

import errno
import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from prime_hpc.config.experiment import Experiment
from prime_hpc.config.snapshot import write_snapshot
from prime_hpc.inference import check_version
from prime_hpc.inference.check_version import BadVersionError, read_signature, receive_version
from prime_hpc.inference.policy import UnavailableError
from prime_hpc.store.artifact import ArtifactWriter
from prime_hpc.store.errors import Unreadable
from prime_hpc.weight_transport.transport import VersionReader


def write_version(folder: Path, version: int, tensors: dict[str, list[int]], names: tuple[str, ...] = ()) -> Path:
    """A weight version of float32 zeros; `names` splits it into shards with an index."""
    with ArtifactWriter(folder, kind="weights", step=version, version=version, writer="test") as writer:
        shards = {"model.safetensors": list(tensors)}
        if names:
            shards = {name: list(tensors)[i :: len(names)] for i, name in enumerate(names)}
            index = {"weight_map": {t: name for name, ts in shards.items() for t in ts}}
            (writer.path / "model.safetensors.index.json").write_text(json.dumps(index))
        for name, members in shards.items():
            header, offset = {}, 0
            for tensor in members:
                size = 4
                for n in tensors[tensor]:
                    size *= n
                header[tensor] = {"dtype": "F32", "shape": tensors[tensor], "data_offsets": [offset, offset + size]}
                offset += size
            raw = json.dumps(header).encode()
            (writer.path / name).write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(offset))
    return folder


MODEL = {"a.weight": [2, 3], "b.weight": [4]}


def test_a_version_that_fits_is_accepted(tmp_path: Path) -> None:
    weights = tmp_path / "run" / "weights"
    base = read_signature(write_version(weights / "step_000001", 1, MODEL))
    assert base == {"a.weight": (2, 3), "b.weight": (4,)}
    receive_version(VersionReader(tmp_path), weights / "step_000001", 1, base, tied=False)
    sharded = write_version(weights / "step_000002", 2, MODEL, ("model-1.safetensors", "model-2.safetensors"))
    receive_version(VersionReader(tmp_path), sharded, 2, base, tied=False)
    headed = write_version(weights / "step_000003", 3, {**MODEL, "lm_head.weight": [4]})
    receive_version(VersionReader(tmp_path), headed, 3, base, tied=True)
    with pytest.raises(BadVersionError, match=r"unknown tensors \['lm_head.weight'\]"):
        receive_version(VersionReader(tmp_path), headed, 3, base, tied=False)


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"a.weight": [3, 2], "b.weight": [4]}, r"a.weight has shape \[3, 2\], the model's is \[2, 3\]"),
        ({"a.weight": [2, 3]}, r"missing tensors \['b.weight'\]"),
        ({**MODEL, "c.weight": [1]}, r"unknown tensors \['c.weight'\]"),
    ],
)
def test_another_models_version_is_refused(tmp_path: Path, tensors: dict[str, list[int]], reason: str) -> None:
    version = write_version(tmp_path / "run" / "weights" / "step_000001", 1, tensors)
    with pytest.raises(BadVersionError, match=reason):
        receive_version(VersionReader(tmp_path), version, 1, {"a.weight": (2, 3), "b.weight": (4,)}, tied=False)


def test_a_model_that_is_not_on_the_node_is_named(tmp_path: Path) -> None:
    """A mount that one node lacks; vLLM would say that it is no name of a repository."""
    tree = {"name": "r", "output_dir": str(tmp_path), "model": {"name": str(tmp_path / "model")}, "inference": {}}
    made = Experiment.model_validate(tree)
    write_snapshot(made, made.run_dir, ["test"])
    command = [sys.executable, "-m", "prime_hpc.inference.main", str(made.run_dir)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 1
    assert f"NodeError: the model {tmp_path}/model: no such directory on " in done.stderr


def test_a_version_that_a_node_cannot_read_now_is_not_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal ends the run; a mount that is gone on one node (EIO, ESTALE) costs that node's server alone."""
    folder = write_version(tmp_path / "run" / "weights" / "step_000001", 1, MODEL)

    def fails(*_: Any, **__: Any) -> None:
        raise Unreadable(folder / "manifest.json", "Stale file handle", errno.ESTALE)

    monkeypatch.setattr(check_version, "verify_artifact", fails)
    with pytest.raises(UnavailableError, match="version 1: .*cannot be read now: Stale file handle"):
        receive_version(VersionReader(tmp_path), folder, 1, None, tied=False)
    monkeypatch.undo()
    reader = VersionReader(tmp_path)
    monkeypatch.setattr(reader, "fetch", fails)
    with pytest.raises(UnavailableError, match="cannot be read now"):
        receive_version(reader, folder, 1, None, tied=False)
    monkeypatch.setattr(reader, "fetch", lambda *_: Path(folder))
    for number, kind in ((errno.EIO, UnavailableError), (errno.ENOENT, BadVersionError)):

        def breaks(_: Path, number: int = number) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(check_version, "read_signature", breaks)
        with pytest.raises(kind, match=f"cannot be had on this node.*{os.strerror(number)}"):
            receive_version(reader, folder, 1, None, tied=False)


def test_a_broken_version_is_refused(tmp_path: Path) -> None:
    folder = write_version(tmp_path / "run" / "weights" / "step_000001", 1, MODEL)
    with pytest.raises(BadVersionError, match="holds version 1, not 2"):
        receive_version(VersionReader(tmp_path), folder, 2, None, tied=False)
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(BadVersionError, match="not a complete weight version"):
        receive_version(VersionReader(tmp_path), folder, 1, None, tied=False)
    with pytest.raises(BadVersionError, match="not a safetensors file"):
        read_signature(folder)
    with pytest.raises(BadVersionError, match="not a directory"):
        read_signature(tmp_path / "nowhere")
