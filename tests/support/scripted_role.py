"""A role that follows a script, for the supervisor's tests: a real process with real status files.

usage: python -m tests.support.scripted_role ROLE RUN_DIR ACTION [ACTION ...]
actions: ready, listens:URL (ready, and where its clients find it), done, fail:REASON, sleep:SECONDS, exit:CODE,
child (starts a child in a session of its own),
once:FILE:ACTION (only the first time, remembered by FILE), serve:PORT (a health route), kill (SIGKILL itself),
beat:SECONDS (a heartbeat from now on), touch:FILE, await:FILE (until it is there), require:FILE (fail without),
write:FILE:COUNT (so many lines, one every 0.1 s, each by opening it), step:N (a beat at that step),
train:COUNT (so many steps, with their rows of metrics), doing:PHASE:WHOM (its word: what it does, and for whom it
waits), stop (SIGSTOP itself), hold:VERSION:FIRST:LAST (an orchestrator that outlives its attempt: what it answers; it
moves when it is told where to), saves:FILE (a trainer that saves when it is asked to), ends:FILE (a trainer of many
runs, which saves as it ends when it is asked to)
"""

import http.server
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from prime_hpc.observe.metrics import MetricsWriter
from prime_hpc.observe.role_status import RoleStatus
from prime_hpc.runtime import activity
from prime_hpc.runtime.role_context import RoleContext
from prime_hpc.store.messaging.bus import BusClient


class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        return


def hold(bus: BusClient, answer: list[int]) -> None:
    names = ("version", "first_batch", "last_batch")

    def on_hold(message: dict[str, Any]) -> None:
        bus.publish("held", incarnation=message["incarnation"], **dict(zip(names, answer, strict=True)))

    bus.subscribe("hold", on_hold)
    bus.subscribe("go_on", lambda message: bus.move(message["hub"], message["incarnation"]))


def save(bus: BusClient, path: Path, request: int) -> None:
    path.write_text(str(request))
    bus.publish("saved", step=7, path="", ids=[request])


def end(status: RoleStatus, path: Path, message: dict[str, Any]) -> None:
    if message["save"]:
        path.write_text(message["reason"])
        status.done()
        os._exit(0)


def train(status: RoleStatus, run_dir: Path, count: int) -> None:
    """A run's steps as the console sees them: rows of both sides, and a beat."""
    rows = {name: MetricsWriter(run_dir / "metrics" / f"{name}.jsonl") for name in ("orchestrator", "trainer")}
    figures = dict.fromkeys(("loss", "kl", "ratio", "tokens_per_s", "lr", "grad_norm", "reward", "time/step"), 0.5)
    for step in range(1, count + 1):
        rows["orchestrator"].log(step, **{"reward/mean": 0.5, "lag/mean": 0.5, "lag/max": 1, "episodes/completed": 16})
        rows["trainer"].log(step, **figures)
        status.beat(step=step)
        time.sleep(0.02)


def act(action: str, status: RoleStatus, bus: BusClient) -> None:
    name, _, value = action.partition(":")
    if name == "once":
        marker, _, rest = value.partition(":")
        if not Path(marker).exists():
            Path(marker).touch()
            act(rest, status, bus)
    elif name == "touch":
        Path(value).touch()
    elif name == "await":
        while not Path(value).exists():
            time.sleep(0.05)
    elif name == "require":
        if not Path(value).exists():
            status.failed(f"{value} is not there")
            sys.exit(1)
    elif name == "sleep":
        time.sleep(float(value))
    elif name == "saves":
        bus.subscribe("save", lambda message: save(bus, Path(value), message["id"]))
    elif name == "ends":
        bus.subscribe("stop", lambda message: end(status, Path(value), message))
    elif name == "hold":
        hold(bus, [int(number) for number in value.split(":")])
    elif name == "ready":
        status.ready()
    elif name == "listens":
        status.ready(url=value)
    elif name == "done":
        status.done()
    elif name == "fail":
        status.failed(value)
    elif name == "refuse":
        status.failed(ValueError(value))
    elif name == "exit":
        sys.exit(int(value))
    elif name == "beat":
        status.start_heartbeat(float(value))
    elif name == "write":
        path, _, count = value.rpartition(":")
        for number in range(int(count)):
            with Path(path).open("a") as file:
                file.write(f"{number}\n")
            time.sleep(0.1)
    elif name == "train":
        train(status, Path(sys.argv[2]), int(value))
    elif name == "step":
        status.beat(step=int(value))
    elif name == "doing":
        phase, _, awaits = value.partition(":")
        activity.doing(phase, awaits=awaits)
    elif name == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif name == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif name == "child":
        subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(300)", "stray-of", value], start_new_session=True
        )
    elif name == "serve":
        server = http.server.HTTPServer(("127.0.0.1", int(value)), Health)
        threading.Thread(target=server.serve_forever, daemon=True).start()
    else:
        raise SystemExit(f"unknown action {action}")


def main() -> None:
    role, run_dir, *actions = sys.argv[1:]
    context = RoleContext.from_env(role, run_dir)
    bus = BusClient(context.bus_address, role, incarnation=context.incarnation)
    status = RoleStatus(context, bus)
    activity.introduce(role, context.index, run_dir)
    status.starting()
    for action in actions:
        print(f"{role}: {action}", flush=True)
        act(action, status, bus)


if __name__ == "__main__":
    main()
