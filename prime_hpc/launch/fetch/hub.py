"""The hub's own word about a model or a data set, before anything waits in a queue for it: one request, of a few KB.

Where nobody answers within seconds, as on a login node without internet, nothing is said.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import Thread
from typing import Any, Literal

from prime_hpc.store.model.config import hub_home

TIMEOUT_S = 3.0
_MOST_BYTES = 1 << 24
_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_SILENT: set[str] = set()
"""Hubs that did not answer this process: they are not asked again."""


@dataclass(frozen=True)
class Word:
    """The hub's answer."""

    is_there: bool
    """False: there is none of this name, or none that this user may see."""
    card: Mapping[str, Any]
    """The head of its card, which of most data sets states configurations, splits and columns."""


def ask(kind: Literal["model", "dataset"], name: str, environ: Mapping[str, str]) -> Word | None:
    """Ask the hub that `environ` names, as the user that it names; None: no answer, or it is no name of the hub's."""
    if not _NAME.fullmatch(name) or Path(name).exists():
        return None
    hub = (environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
    return _ask(hub, f"/api/{kind}s/{name}?expand[]=cardData", _token(environ))


def _token(environ: Mapping[str, str]) -> str:
    stated = environ.get("HF_TOKEN") or environ.get("HUGGING_FACE_HUB_TOKEN")
    try:
        return stated or Path(environ.get("HF_TOKEN_PATH") or hub_home(environ) / "token").read_text().strip()
    except (OSError, ValueError):
        return ""


@cache
def _ask(hub: str, path: str, token: str) -> Word | None:
    if hub in _SILENT:
        return None
    found: list[Word | None] = []
    thread = Thread(target=lambda: found.append(_get(hub + path, token)), daemon=True)
    thread.start()
    thread.join(TIMEOUT_S)  # a request's own timeout is none of the look-up of a name
    if not any(found):
        _SILENT.add(hub)
        return None
    return found[0]


def _get(url: str, token: str) -> Word | None:
    from http.client import HTTPException  # here: few commands ask
    from urllib.error import HTTPError
    from urllib.request import Request, urlopen

    try:
        request = Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
        with urlopen(request, timeout=TIMEOUT_S) as answer:
            card = json.loads(answer.read(_MOST_BYTES)).get("cardData")
    except HTTPError as error:
        return Word(False, {}) if error.code in (401, 404) else None
    except (OSError, HTTPException, ValueError, AttributeError):
        return None
    return Word(True, card if isinstance(card, dict) else {})


@dataclass(frozen=True)
class Shape:
    """Splits and columns of a data set's configuration; None: not known."""

    splits: list[str] | None = None
    columns: list[str] | None = None


def shape_of(card: Mapping[str, Any], subset: str | None) -> Shape:
    """Return what a data set's card tells of a configuration, by default of the only one, or the one so called."""
    infos, configs = (
        [entry for entry in found if isinstance(entry, dict)]
        for found in (_listed(card.get("dataset_info")), _listed(card.get("configs")))
    )
    info, config = _chosen(infos, subset), _chosen(configs, subset)
    splits = _names(info.get("splits"), "name") or _names(config.get("data_files"), "split")
    return Shape(splits or None, _names(info.get("features"), "name") or None)


def _listed(found: Any) -> list[Any]:
    return found if isinstance(found, list) else [found]


def _chosen(entries: list[dict[str, Any]], subset: str | None) -> dict[str, Any]:
    named = {str(entry.get("config_name", "default")): entry for entry in entries}
    usual = next((name for name, entry in named.items() if entry.get("default") is True), "default")
    alone = next(iter(named)) if len(named) == 1 else usual
    return named.get(subset or alone, {})


def _names(entries: Any, key: str) -> list[str]:
    return [str(entry[key]) for entry in _listed(entries) if isinstance(entry, dict) and key in entry]


def shape_of_prepared(folder: Path) -> Shape:
    """Return what `datasets` keeps of a data set beside it, in its cache or where it was saved."""
    try:
        found = json.loads((folder / "dataset_info.json").read_text(encoding="utf-8"))
        return Shape(sorted(found.get("splits") or {}) or None, sorted(found.get("features") or {}) or None)
    except (OSError, ValueError, AttributeError, TypeError):
        return Shape()
