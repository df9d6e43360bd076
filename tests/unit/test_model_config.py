"""The config.json that a model's name stands for."""

import json
import os
from pathlib import Path

from prime_hpc.store.model.config import hub_folder, read_config


def test_a_hub_models_config_is_that_of_the_version_that_is_loaded(tmp_path: Path) -> None:
    """A pinned version that was fetched last is another one's; alone, it is all there is to go by."""
    kept, environ = hub_folder("owner/model", tmp_path), {"HF_HUB_CACHE": str(tmp_path)}
    for commit, layers, at in (("aa", 4, 100), ("bb", 8, 200)):
        (kept / "snapshots" / commit).mkdir(parents=True)
        config = kept / "snapshots" / commit / "config.json"
        config.write_text(json.dumps({"num_hidden_layers": layers}))
        os.utime(config, (at, at))
    assert read_config("owner/model", environ) == {"num_hidden_layers": 8}
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("aa\n")
    assert read_config("owner/model", environ) == {"num_hidden_layers": 4}
    assert read_config("owner/other", environ) is None
