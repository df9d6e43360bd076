"""Names, splits and columns of the hub's, told before a job waits in a queue for them: a hub over real HTTP."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from prime_hpc.config import ConfigError, Experiment, Loaded
from prime_hpc.config.sections.slurm import SiteConfig
from prime_hpc.config.site import GENERIC
from prime_hpc.launch.fetch import hub as hub_module
from prime_hpc.launch.fetch.fetch import require_model
from prime_hpc.launch.lint.lint import lint
from tests.support.hub_server import Hub, serving

FEATURES = [{"name": "question", "dtype": "string"}, {"name": "answer", "dtype": "string"}]
CARD = {"dataset_info": {"features": FEATURES, "splits": [{"name": "train"}, {"name": "test"}]}}
MAPPED = {"prompt": "question", "completion": "answer"}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE", "HF_HUB_CACHE", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setattr(hub_module, "_SILENT", set())
    hub_module._ask.cache_clear()
    with serving({"owner/model": {"config.json": b"{}"}}) as found:
        monkeypatch.setenv("HF_ENDPOINT", found.url)
        found.cards["owner/rows"] = CARD
        yield found


def said(site: SiteConfig = GENERIC, model: str = "owner/model", **data: Any) -> list[tuple[str, str, str | None, str]]:
    tree = {"kind": "sft", "model": {"name": model}, "sft": {"data": data}, "trainer": {"optim": {"lr": 1e-5}}}
    found = lint(Experiment.model_validate(tree), site)
    return [(f.code, f.severity, f.key, f.message) for f in found if f.code in ("PH207", "PH215")]


def test_names_that_the_hub_does_not_know(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert said(name="owner/rows", columns=MAPPED) == []
    assert said(name="owner/rowz", model="owner/modle") == [
        ("PH215", "warning", "model.name", "the hub has no model owner/modle, or none that you may see"),
        ("PH215", "warning", "sft.data.name", "the hub has no dataset owner/rowz, or none that you may see"),
    ]
    assert len(hub.asked) == len(set(hub.asked)) == 4, "each name once a process"
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "token").write_text("mine\n")
    said(name="owner/mine")
    assert hub.asked[-1] == "/api/datasets/owner/mine Bearer mine"
    hub.asked.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert said(name="owner/none") == [] == hub.asked
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert said(name="owner/none") == [] and list(hub_module._SILENT) == ["http://127.0.0.1:9"], "nobody there"


def test_a_role_by_hand_says_that_its_model_is_nowhere_or_the_hub_silent(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A server waited without a word, and then named none."""

    def required(name: str) -> str:
        experiment = Experiment.model_validate({"model": {"name": name}})
        require_model(Loaded(experiment, {}, [], "inference"))
        return capsys.readouterr().err

    assert required("owner/model") == ""
    with pytest.raises(ConfigError, match="the hub has no model owner/modle, or none that you may see"):
        required("owner/modle")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert "owner/modle is not on this disk, and the hub does not answer" in required("owner/modle")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE keeps it from the hub"):
        required("owner/modle")


def test_a_hub_that_does_not_answer_is_asked_once(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is the name of one looked up for longer: no timeout of a request bounds that."""
    hangs, tries = Event(), list[str]()

    def looked_up(host: str, *more: Any, **named: Any) -> Any:
        tries.append(host)
        hangs.wait()
        raise OSError("released")

    monkeypatch.setattr(hub_module, "TIMEOUT_S", 0.1)
    monkeypatch.setattr(socket, "getaddrinfo", looked_up)
    monkeypatch.setenv("HF_ENDPOINT", "http://far.invalid")
    try:
        assert said(name="owner/none", model="owner/nothing") == [] and tries == ["far.invalid"]
    finally:
        hangs.set()


def test_splits_and_columns_of_a_card(hub: Hub) -> None:
    ((code, severity, key, message),) = said(name="owner/rows")
    assert (code, severity, key) == ("PH207", "warning", "sft.data.name")
    assert message.startswith("owner/rows: needs `messages`") and "the columns are: answer, question" in message
    ((*_, message),) = said(name="owner/rows", columns=MAPPED, split="trian")
    assert message == "owner/rows has the splits train, test, not trian"
    assert said(name="owner/rows", columns=MAPPED, split="train[:10%]+test") == []
    several = [{"config_name": "main", **CARD["dataset_info"]}, {"config_name": "socratic", "splits": [{"name": "x"}]}]
    hub.cards["owner/several"] = {"dataset_info": several}
    assert [m for *_, m in said(name="owner/several", subset="socratic")] == [
        "owner/several has the splits x, not train"
    ]
    assert said(name="owner/several") == [], "nobody knows which"
    hub.cards["owner/silent"] = {"configs": "odd", "dataset_info": [None, {"splits": "odd", "features": 3}]}
    assert said(name="owner/silent") == []


@pytest.mark.parametrize("whole", [True, False])
def test_splits_and_columns_of_what_datasets_saved(tmp_path: Path, whole: bool) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([{"question": "q", "answer": "a"}])
    (rows if whole else datasets.DatasetDict(train=rows, test=rows)).save_to_disk(str(tmp_path / "saved"))
    path = str(tmp_path / "saved")
    ((code, severity, key, message),) = said(path=path)
    assert (code, severity, key) == ("PH207", "error", "sft.data.path") and "columns are: answer, question" in message
    assert said(path=path, columns=MAPPED) == []
    found = [] if whole else [("PH207", "error", "sft.data.path", f"{path} has the splits train, test, not trian")]
    assert said(path=path, columns=MAPPED, split="trian") == found


def test_columns_of_what_is_in_the_cache(hub: Hub, tmp_path: Path) -> None:
    folder = tmp_path / "hf" / "datasets" / "owner___kept" / "default" / "0.0.0" / "abc"
    folder.mkdir(parents=True)
    info: dict[str, Any] = {"splits": {"train": {}}, "features": {"question": {}, "answer": {}}}
    (folder / "dataset_info.json").write_text(json.dumps(info))
    ((*_, message),) = said(name="owner/kept")
    assert "the columns are: answer, question" in message and said(name="owner/kept", columns=MAPPED) == []
    assert not [path for path in hub.asked if "kept" in path]
