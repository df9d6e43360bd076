"""How busy the run's servers are: each one's own `/metrics`, asked every few seconds by threads of their own.

For `prime-hpc status` and for the metrics that the supervisor hands on. The servers' key is the attempt's, which only
the run's own processes know. A server that does not answer holds nobody up.
"""

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from prime_hpc.client.figures import parse_figures
from prime_hpc.client.http import ask
from prime_hpc.client.keys import KEY_VARIABLES
from prime_hpc.supervisor.roles.process import Role

EVERY_S = 10.0
TIMEOUT_S = 3.0
_AT_ONCE = 8
Load = dict[str, float | str]


class ServerLoads:
    """Asks from its making to `close`.

    Args:
        roles: of the attempt; more may come.
        environment: of the roles, with the servers' keys.
        every_s: between two questions to a server.
        keep_texts: whole answers are wanted, too.
    """

    def __init__(
        self,
        roles: Sequence[Role],
        environment: Mapping[str, str],
        every_s: float = EVERY_S,
        *,
        keep_texts: bool = False,
    ) -> None:
        self._roles, self._every_s, self._keep_texts = roles, every_s, keep_texts
        self._texts: dict[str, str] = {}
        self._keys = {name: environment.get(variable, "") for name, variable in KEY_VARIABLES.items()}
        self._loads: dict[str, Load] = {}
        self._sampled: dict[str, tuple[float, float]] = {}
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="server-loads", daemon=True).start()

    def close(self) -> None:
        """Ask no more."""
        self._closed.set()

    def facts(self) -> dict[str, Load]:
        """Return by label what each server said last: `running` and `waiting` requests, `kv_use` (0 to 1),
        `sampled_per_s`; or `error`. Only servers that serve now."""
        there = {role.spec.label for role in list(self._roles) if role.state == "ready"}
        return {label: load for label, load in list(self._loads.items()) if label in there}

    def texts(self) -> dict[str, str]:
        """Return by label what each server that serves now has answered last, whole."""
        there = self.facts()
        return {label: text for label, text in list(self._texts.items()) if label in there}

    def _run(self) -> None:
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="server-loads") as pool:
            while not self._closed.wait(self._every_s):
                ready = [role for role in list(self._roles) if role.is_server and role.state == "ready"]
                list(pool.map(self._look, ready))

    def _look(self, role: Role) -> None:
        label, address = role.spec.label, role.health_url
        if address is None or self._closed.is_set():
            return
        key = self._keys.get(role.spec.name, "")
        try:
            text = ask(f"{address.removesuffix('/health')}/metrics", timeout_s=TIMEOUT_S, key=key).decode()
        except (OSError, ValueError) as error:
            self._sampled.pop(label, None)
            self._texts.pop(label, None)
            self._loads[label] = {"error": f"{type(error).__name__}: {error}"}
            return
        self._loads[label] = self._load(label, parse_figures(text))
        if self._keep_texts:
            self._texts[label] = text

    def _load(self, label: str, figures: dict[str, float]) -> Load:
        """Make a rate of the tokens sampled since the last answer; a server that was started again counts anew."""
        now, sampled = time.monotonic(), figures.pop("sampled", 0.0)
        before = self._sampled.get(label)
        self._sampled[label] = now, sampled
        load: Load = dict(figures)
        if before is not None and sampled >= before[1]:
            load["sampled_per_s"] = round((sampled - before[1]) / max(now - before[0], 1e-9), 1)
        return load


def doing(statuses: Mapping[tuple[str, int], Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Say by role what its processes do now and for whom they wait, those that do the same as one.
    `statuses`: the last word of each process, by role and index.
    Returns rows of `phase`, `awaits`, `blocked` (why a part of it cannot go on), `since` (epoch seconds, the earliest)
    and `count`."""
    found: dict[str, dict[tuple[str, ...], dict[str, Any]]] = {}
    for (role, _), row in sorted(statuses.items(), key=lambda item: item[0]):
        word = row.get("doing") or {}
        if "phase" not in word:
            continue
        said = {"phase": word["phase"], "awaits": word["awaits"]}
        said |= {"blocked": word["blocked"]} if word.get("blocked") else {}
        same = found.setdefault(role, {}).setdefault(tuple(said.values()), {**said, "since": word["since"], "count": 0})
        same["since"], same["count"] = min(same["since"], word["since"]), same["count"] + 1
    return {role: list(rows.values()) for role, rows in found.items()}
