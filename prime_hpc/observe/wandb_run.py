"""A role's W&B run: begun online only where its server can be reached, ended within a time.

Compute nodes often have no way to the internet. `wandb.init` then tries for a minute and a half and keeps nothing; and
`finish` tries for hours to send what the network does not take, while the job holds its nodes. Whatever was not sent
lies in the run's own files, for `wandb sync`.
"""

import os
import ssl
import threading
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import OpenerDirector, ProxyHandler, Request, build_opener, getproxies

from loguru import logger

REACH_S = 10.0
"""For the server's first answer."""
FINISH_S = 60.0
"""For what is left to be sent at the end."""


def begin(arguments: dict[str, Any]) -> Any:
    """Return a new W&B run, or one that goes on.

    Args:
        arguments: of `wandb.init`, and `id_file`, which keeps the run's id for later attempts.

    Raises whatever W&B does.
    """
    import wandb

    arguments = dict(arguments)
    id_file: Path | None = arguments.pop("id_file", None)
    mode = arguments.get("mode") or os.environ.get("WANDB_MODE")
    if not mode and not _has_credentials(wandb):
        arguments["mode"] = "offline"  # it would ask for a key, and nobody is there to answer
        logger.info("W&B has no credentials (`wandb login`, WANDB_API_KEY): its files stay here, `wandb sync`")
    elif mode in (None, "", "online") and (why := _why_unreachable(wandb)):
        arguments["mode"] = "offline"
        logger.warning(f"W&B's server cannot be reached from here ({why}): its files stay here, `wandb sync` them")
    run = wandb.init(**arguments)
    # our step is an ordinary value: an evaluation of an earlier version may come after a later batch
    run.define_metric("*", step_metric="step")
    if id_file is not None:
        id_file.parent.mkdir(parents=True, exist_ok=True)
        id_file.write_text(str(run.id) + "\n", encoding="utf-8")
    return run


def finish(run: Any, exit_code: int) -> None:
    """Let W&B send what is left, and go on after `FINISH_S` whether it has or not. Never raises."""

    def wait() -> None:
        try:
            run.finish(exit_code=exit_code)
        except Exception as error:  # noqa: BLE001 - whatever W&B does, the run goes on
            logger.warning(f"W&B did not finish: {error}")

    thread = threading.Thread(target=wait, name="wandb-finish", daemon=True)
    thread.start()
    thread.join(FINISH_S)
    if thread.is_alive():
        folder = getattr(getattr(run, "settings", None), "sync_dir", "")
        logger.warning(f"W&B did not take everything within {FINISH_S:.0f} s: `wandb sync {folder}` sends the rest")


def _has_credentials(wandb: Any) -> bool:
    """Return whether W&B itself finds a key: in the environment, in its settings, in ~/.netrc. Its server is not
    asked."""
    try:
        return bool(wandb.login(verify=False, prompt=False))
    except TypeError:  # a version whose `login` always asks
        return bool(wandb.api.api_key)


def _why_unreachable(wandb: Any) -> str:
    """Say why W&B's server gives no answer from here, through the proxy that is named, if any; empty where it gives
    one, whatever it says."""
    settings, found = wandb.setup().settings, [f"no answer within {REACH_S:.0f} s"]
    own = {kind: getattr(settings, f"{kind}_proxy", None) for kind in ("http", "https")}
    opener = build_opener(ProxyHandler(getproxies() | {kind: proxy for kind, proxy in own.items() if proxy}))
    thread = threading.Thread(target=_reach, args=(opener, str(settings.base_url), found), daemon=True)
    thread.start()
    thread.join(REACH_S)  # a name server that is silent is waited for longer than any timeout of a connection
    return found[-1]


def _reach(opener: OpenerDirector, url: str, found: list[str]) -> None:
    try:
        with opener.open(Request(url, method="HEAD"), timeout=REACH_S):
            found.append("")
    except HTTPError:
        found.append("")
    except URLError as error:  # a certificate that Python does not trust W&B may
        found.append("" if isinstance(error.reason, ssl.SSLError) else f"{url}: {error.reason}")
    except (OSError, ValueError) as error:
        found.append(f"{url}: {error}")
