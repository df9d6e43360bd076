"""Tell somebody of an alarm: a command, a webhook, a mail. Each has a deadline, and a thread of its own."""

import json
import os
import signal
import smtplib
import subprocess
import time
from collections.abc import Callable, Mapping
from email.message import EmailMessage
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, build_opener

from prime_hpc.config.secret import masked, revealed
from prime_hpc.config.sections.supervisor import AlarmsConfig
from prime_hpc.observe.metrics import jsonable
from prime_hpc.store.messaging.json_lines import parse_address
from prime_hpc.supervisor.alarms.rules import Alarm

FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 30.0
_READ = 1 << 16
"""Bytes of a command's output that are looked at."""
_TOLD = 500
"""Characters of what went wrong that are kept."""


class ActionError(Exception):
    """It could not be done; the message says why, without secrets."""


def run_command(config: AlarmsConfig, alarm: Alarm, run_dir: Path) -> None:
    """Run `alarms.command`. Raises ActionError where it fails, or does not end in time: then it is killed. What it
    leaves in the background is its own affair: it does not keep the end of a pipe that is read here."""
    facts = facts_of(alarm, run_dir)
    names = {"PRIMEHPC_ALARM": alarm.rule.title} | {f"PRIMEHPC_ALARM_{k.upper()}": str(v) for k, v in facts.items()}
    with os.fdopen(os.memfd_create("alarm"), "w+b") as output:  # in memory: the alarm may be that a disk is full
        process = subprocess.Popen(
            ["/bin/sh", "-c", config.command or ""],
            env={**_without_secrets(os.environ), **names},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(timeout=config.timeout_s)
        except subprocess.TimeoutExpired as error:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(timeout=5)
            raise ActionError(f"it did not end within {config.timeout_s:g} s") from error
        if process.returncode:
            output.seek(max(0, output.seek(0, os.SEEK_END) - _READ))
            told = masked(output.read().decode(errors="replace").strip())[-_TOLD:]
            raise ActionError(f"exit status {process.returncode}: {told}")


def call_webhook(config: AlarmsConfig, alarm: Alarm, run_dir: Path) -> None:
    """Post the alarm as JSON. Raises ActionError."""
    address = str(revealed(config.webhook))
    body = json.dumps({**facts_of(alarm, run_dir), "text": f"{run_dir.name}: {alarm.text}"}).encode()
    request = Request(address, data=body, headers={"Content-Type": "application/json"}, method="POST")
    try:
        with build_opener().open(request, timeout=config.timeout_s) as answer:
            answer.read(1)
    except HTTPError as error:
        raise ActionError(f"it answers {error.code} {error.reason}") from error
    except (OSError, ValueError, HTTPException) as error:  # the last: an answer that is no HTTP
        told = str(error).replace(address, "the webhook")
        raise ActionError(f"{type(error).__name__}: {told}" if isinstance(error, HTTPException) else told) from error


def send_mail(config: AlarmsConfig, alarm: Alarm, run_dir: Path) -> None:
    """Send a mail. Raises ActionError."""
    message = EmailMessage()
    message["Subject"] = " ".join(f"prime-hpc {run_dir.name}: {alarm.rule.title}".split())  # a header is one line
    message["From"] = message["To"] = config.mail or ""
    message.set_content("\n".join([alarm.text, "", *(f"{k}: {v}" for k, v in facts_of(alarm, run_dir).items())]))
    host, port = parse_address(config.mail_server)
    try:
        with smtplib.SMTP(host, port, timeout=config.timeout_s) as server:
            server.send_message(message)
    except (OSError, smtplib.SMTPException) as error:
        raise ActionError(f"{config.mail_server}: {error}") from error


def facts_of(alarm: Alarm, run_dir: Path) -> dict[str, str | float | int | None]:
    """Return what is told of an alarm."""
    return {
        "rule": alarm.rule.title,
        "metric": alarm.rule.metric,
        "value": jsonable(alarm.value),
        "step": alarm.step,
        "text": alarm.text,
        "run": str(run_dir),
    }


def with_retries(act: Callable[[], None], retries: int, sleep: Callable[[float], object] = time.sleep) -> None:
    """Try until it works, `retries` times more at most. Raises the last ActionError."""
    pause = FIRST_PAUSE_S
    for left in range(retries, -1, -1):
        try:
            act()
        except ActionError:
            if not left:
                raise
        else:
            return
        sleep(pause)
        pause = min(2 * pause, MAX_PAUSE_S)


def _without_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the run's own keys, which are no business of a user's command."""
    return {key: value for key, value in environ.items() if not key.startswith("PRIMEHPC_")}


TELL = {"command": run_command, "webhook": call_webhook, "mail": send_mail}
