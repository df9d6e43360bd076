"""The trainer's checkpoints are read whichever release of torch described their tensors."""

import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorProperties

from prime_hpc.trainer.checkpointing.dcp_metadata import METADATA, PlainReader


def test_a_checkpoint_of_a_newer_torch_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """2.15 describes a tensor by one field more than 2.13 does, which cannot take it."""
    saved = {"weight": torch.arange(6.0).reshape(2, 3)}
    dcp.save(saved, storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)
    metadata = pickle.loads((tmp_path / METADATA).read_bytes())
    described = TensorProperties.__getstate__
    with monkeypatch.context() as newer:
        newer.setattr(TensorProperties, "__getstate__", lambda properties: (*described(properties), (3, 1)))
        (tmp_path / METADATA).write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match="too many values"):
        dcp.FileSystemReader(tmp_path).read_metadata()
    read = {"weight": torch.empty(2, 3)}
    dcp.load(read, storage_reader=PlainReader(tmp_path), no_dist=True)
    assert torch.equal(read["weight"], saved["weight"])
