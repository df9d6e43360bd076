"""Alarms: rules and when they fire; what they do, each with the real thing; what lint and the config say."""

import http.server
import json
import math
import os
import signal
import socketserver
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from prime_hpc.config import Experiment
from prime_hpc.config.secret import MASK, names_secret
from prime_hpc.config.sections.supervisor import AlarmRule, AlarmsConfig
from prime_hpc.config.site import GENERIC
from prime_hpc.launch.lint.lint import lint
from prime_hpc.observe.metric_names import is_known, near
from prime_hpc.supervisor.alarms.actions import TELL, ActionError, call_webhook, run_command, send_mail, with_retries
from prime_hpc.supervisor.alarms.alarm_watch import AlarmWatch
from prime_hpc.supervisor.alarms.rules import BUILT_IN, Alarm, Watcher, figures_of, rules_of

LIMIT_S = 200.0
ALARM = Alarm(AlarmRule(metric="trainer.entropy", below=0.1), 0.05, 7, "trainer.entropy is 0.05 at step 7, below 0.1")


def wait_for(holds: Callable[[], Any], what: str) -> Any:
    end = time.monotonic() + LIMIT_S
    while not (found := holds()):
        assert time.monotonic() < end, what
        time.sleep(0.02)
    return found


def fired(rule: AlarmRule, values: list[Any]) -> list[int]:
    """Positions at which it fires."""
    watcher = Watcher(rule)
    return [n for n, value in enumerate(values) if watcher.take(value, n) is not None]


def test_a_rule_fires_once_a_crossing_and_again_at_the_next() -> None:
    rule = AlarmRule(metric="trainer.entropy", below=0.1, for_steps=2)
    assert fired(rule, [1, 0.05, 1, 0.05, 0.04, 0.03, 1, 0.05, 0.01]) == [4, 8]
    assert fired(AlarmRule(metric="trainer.kl", above=1), [0, 2, 3, 0, 2]) == [1, 4]


def test_a_rule_without_a_name_says_its_metric_once() -> None:
    for name, text in (("", "trainer.kl is 2 at step 5, above 1"), ("far", "far: trainer.kl is 2 at step 5, above 1")):
        alarm = Watcher(AlarmRule(name=name, metric="trainer.kl", above=1)).take(2.0, 5)
        assert alarm is not None and alarm.text == text


def test_a_figure_that_is_no_number_breaks_every_line_and_one_that_is_absent_none() -> None:
    for line in ({"below": 0.1}, {"above": 1e9}, {"falls_to": 0.5}):
        assert fired(AlarmRule(metric="trainer.loss", **line), [1.0, "nan", None, "words", 1.0]) == [1]
    assert fired(AlarmRule(metric="trainer.loss", above=5), ["inf"]) == [0]


def test_a_collapse_is_measured_by_the_best_mean() -> None:
    rule = AlarmRule(metric="orchestrator.reward/mean", falls_to=0.5, for_steps=3)
    rising, fallen = [0.1, 0.2, 0.3, 0.8, 0.8, 0.8], [0.3, 0.3, 0.3, 0.3]
    assert fired(rule, [*rising, *fallen]) == [8]
    assert fired(rule, [0.0] * 10) == [], "what never rose did not fall"
    assert fired(rule, [0.8, 0.8, "inf", 0.8, 0.8, "inf", "-inf", 0.8]) == [], "an infinite one is nobody's best"


def test_built_in_rules_give_way_to_those_of_the_same_name() -> None:
    config = AlarmsConfig(rules=[AlarmRule(name="kl", metric="trainer.kl", above=9)])
    by_name = {rule.title: rule for rule in rules_of(config)}
    assert by_name["kl"].above == 9 and {"entropy", "reward", "idle", "disk", "walltime", "stall"} < by_name.keys()
    assert all(is_known(rule.metric) for rule in by_name.values())
    assert rules_of(AlarmsConfig(enabled=False)) == []
    assert figures_of("trainer", {"step": 1, "time/wait": 3.0, "time/step": 4.0})["trainer.idle_share"] == 0.75


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ({"metric": "trainer.kl"}, "exactly one of below, above and falls_to, and has none"),
        ({"metric": "trainer.kl", "below": 1, "above": 2}, "has below, above"),
        ({"metric": "entropy", "below": 1}, "begins with one of trainer., orchestrator., run."),
        ({"metric": "trainer.kl", "above": 1, "actions": ["shout"]}, "actions"),
        ({"metric": "trainer.kl", "above": 1, "actions": ["mail"]}, "alarms.mail is not stated"),
    ],
)
def test_rules_that_say_nothing_are_refused(rule: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        AlarmsConfig.model_validate({"rules": [rule]})


def test_lint_names_the_near_metrics() -> None:
    assert near("trainer.entrpy")[0] == "trainer.entropy"
    assert near("trainer.reward/mean")[0] == "orchestrator.reward/mean"
    assert is_known("orchestrator.env/mine/reward/f") and not is_known("run.disk")
    assert is_known("orchestrator.reward/lab/one/std") and not is_known("orchestrator.reward/men")
    assert all(is_known(f"trainer.{name}") for name in ("nll", "kl_penalty", "corrected")), "some objectives' own"
    rules = [{"metric": "trainer.entrpy", "below": 0.1}, {"metric": "run.free", "below": 1}]
    experiment = Experiment.model_validate({"alarms": {"rules": rules}, "model": {"name": "absent"}})
    found = {finding.key: finding for finding in lint(experiment, GENERIC) if finding.code == "PH240"}
    assert found["alarms.rules.0.metric"].severity == "warning"
    assert "trainer.entropy" in found["alarms.rules.0.metric"].remedy
    assert found["alarms.rules.1.metric"].severity == "error"


def test_the_webhooks_address_is_a_secret() -> None:
    assert names_secret("webhook")
    config = AlarmsConfig.model_validate({"webhook": "https://hooks.example/T0/very-secret"})
    assert "very-secret" not in f"{config!r} {config.model_dump()} {config.model_dump_json()}"
    assert MASK in config.model_dump_json()


# ------------------------------------------------------------------------------------------------ actions


def refuse_constant(name: str) -> None:
    """NaN is Python's own: most programs that read JSON refuse all of it."""
    raise ValueError(f"{name} is no JSON")


class Hook(http.server.BaseHTTPRequestHandler):
    """Takes posts; the first few are answered with 503."""

    posts: list[dict[str, Any]]
    refuse = 0

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])), parse_constant=refuse_constant)
        type(self).posts.append(body)
        self.send_response(503 if len(self.posts) <= self.refuse else 200)
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        return


@pytest.fixture
def hook() -> Iterator[tuple[type[Hook], str]]:
    kind = type("OneHook", (Hook,), {"posts": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), kind)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield kind, f"http://127.0.0.1:{server.server_port}/T0/secret-path"
    server.shutdown()
    server.server_close()


class Silent(socketserver.BaseRequestHandler):
    """Takes connections, never says a word, and hangs up at the event."""

    asked, over = threading.Event(), threading.Event()

    def handle(self) -> None:
        self.asked.set()
        self.over.wait()


@pytest.fixture
def silent() -> Iterator[str]:
    Silent.asked.clear()
    Silent.over.clear()
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Silent) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_address[1]}"
        Silent.over.set()
        server.shutdown()


def config(**given: Any) -> AlarmsConfig:
    return AlarmsConfig.model_validate({"timeout_s": 5, **given})


def test_a_webhook_gets_json_and_is_tried_again(hook: tuple[type[Hook], str], tmp_path: Path) -> None:
    kind, address = hook
    kind.refuse = 2
    pauses: list[float] = []
    with_retries(lambda: call_webhook(config(webhook=address), ALARM, tmp_path), 3, pauses.append)
    assert len(kind.posts) == 3 and pauses == sorted(pauses)
    assert kind.posts[0]["text"].endswith(ALARM.text) and kind.posts[0]["metric"] == "trainer.entropy"
    call_webhook(config(webhook=address), replace(ALARM, value=math.nan), tmp_path)
    assert kind.posts[-1]["value"] == "nan"
    kind.refuse = 99
    with pytest.raises(ActionError, match="503") as caught:
        with_retries(lambda: call_webhook(config(webhook=address), ALARM, tmp_path), 1, pauses.append)
    assert "secret-path" not in str(caught.value)


def test_an_answer_that_is_no_http_is_tried_again(tmp_path: Path) -> None:
    asked: list[bytes] = []

    class Tls(socketserver.BaseRequestHandler):
        """Says what a port of HTTPS says to a client of HTTP."""

        def handle(self) -> None:
            asked.append(self.request.recv(65536))
            self.request.sendall(b"\x15\x03\x01\x00\x02\x02\x46\n")

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Tls) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        hook = config(webhook=f"http://127.0.0.1:{server.server_address[1]}/x")
        with pytest.raises(ActionError, match="BadStatusLine"):
            with_retries(lambda: call_webhook(hook, ALARM, tmp_path), 1, lambda _: None)
        server.shutdown()
    assert len(asked) == 2


def test_what_hangs_has_a_deadline(silent: str, tmp_path: Path) -> None:
    short = config(webhook=f"http://{silent}/x", mail="a@b", mail_server=silent, command="sleep 600", timeout_s=0.3)
    for act in (call_webhook, send_mail, run_command):
        with pytest.raises(ActionError):
            act(short, ALARM, tmp_path)


def test_a_command_gets_the_facts_and_none_of_the_runs_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIMEHPC_BUS", "secret@host:1")
    said = tmp_path / "said"
    run_command(config(command=f'env > {said}; test "$PRIMEHPC_ALARM_STEP" = 7'), ALARM, tmp_path)
    lines = dict(line.partition("=")[::2] for line in said.read_text().splitlines())
    assert lines["PRIMEHPC_ALARM_METRIC"] == "trainer.entropy" and "PRIMEHPC_BUS" not in lines
    assert lines["PRIMEHPC_ALARM_TEXT"] == ALARM.text
    with pytest.raises(ActionError, match="exit status 3: no"):
        run_command(config(command="echo no; exit 3"), ALARM, tmp_path)


def test_a_command_tells_of_a_full_disk_where_temporary_files_lie_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    run_command(config(command="echo told"), ALARM, tmp_path)
    with pytest.raises(ActionError, match="exit status 3: no"):
        run_command(config(command="echo no; exit 3"), ALARM, tmp_path)


def test_what_a_command_leaves_in_the_background_is_no_failure(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    run_command(config(command=f"sleep 600 & echo $! > {pid}", timeout_s=30.0), ALARM, tmp_path)
    os.kill(int(pid.read_text()), signal.SIGKILL)  # it lives
    with pytest.raises(ActionError, match="exit status 3: no"):
        run_command(config(command=f"sleep 600 & echo $! > {pid}; echo no; exit 3", timeout_s=30.0), ALARM, tmp_path)
    os.kill(int(pid.read_text()), signal.SIGKILL)


class MailServer(socketserver.StreamRequestHandler):
    """As much of SMTP as a client needs."""

    mails: list[str]

    def handle(self) -> None:
        def say(text: str) -> None:
            self.wfile.write(f"{text}\r\n".encode())

        say("220 test")
        lines: list[str] | None = None
        for raw in self.rfile:
            line = raw.decode().rstrip("\r\n")
            if lines is not None:
                lines = self._mail_line(lines, line, say)
            elif line.upper() == "DATA":
                lines = []
                say("354 go on")
            elif line.upper() == "QUIT":
                say("221 bye")
                return
            else:
                say("250 ok")

    def _mail_line(self, lines: list[str], line: str, say: Callable[[str], None]) -> list[str] | None:
        if line != ".":
            return [*lines, line]
        type(self).mails.append("\n".join(lines))
        say("250 taken")
        return None


def test_a_mail(tmp_path: Path) -> None:
    kind = type("OneMailServer", (MailServer,), {"mails": []})
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), kind) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        named = ALARM.rule.model_copy(update={"name": "entropy is low,\nagain"})
        mail_server = f"127.0.0.1:{server.server_address[1]}"
        send_mail(config(mail="me@example.org", mail_server=mail_server), replace(ALARM, rule=named), tmp_path)
        server.shutdown()
    (mail,) = kind.mails  # type: ignore[attr-defined]
    assert "To: me@example.org" in mail and ALARM.text.split(",")[0] in mail and "Subject: prime-hpc" in mail
    assert "entropy is low, again" in mail


# ------------------------------------------------------------------------------------------------ the watch


class Watched:
    """A watch over a run directory, and what it asked for."""

    def __init__(self, run_dir: Path, **given: Any) -> None:
        self.dir, self.saves, self.stops = run_dir, 0, list[str]()
        self.facts: dict[str, float | None] = {"stall_s": 0.0, "time_left_s": None}
        (run_dir / "metrics").mkdir(parents=True)
        self.watch = AlarmWatch(
            run_dir, 1, config(**given), facts=lambda: self.facts, save=self.save, stop=self.stops.append, tick_s=0.02
        )

    def save(self) -> None:
        self.saves += 1

    def step(self, step: int, **figures: Any) -> None:
        with (self.dir / "metrics" / "trainer.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "time": time.time(), **figures}) + "\n")

    def record(self) -> list[dict[str, Any]]:
        path = self.dir / "alarms.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_all_actions_of_one_alarm_though_the_webhook_hangs(silent: str, tmp_path: Path) -> None:
    rule = {"metric": "trainer.entropy", "below": 0.1, "for_steps": 2}
    rule["actions"] = ["warn", "save", "stop", "command", "webhook"]
    said = tmp_path / "said"
    one = Watched(
        tmp_path / "run",
        rules=[rule],
        builtin=False,
        command=f"echo $PRIMEHPC_ALARM_VALUE >> {said}",
        webhook=f"http://{silent}/x",
        timeout_s=LIMIT_S,
        retries=0,
    )
    for step, entropy in enumerate([1.0, 0.05, 0.04, 0.03], start=1):
        one.step(step, entropy=entropy)
    wait_for(lambda: said.exists() and said.read_text(), "the command's end, whatever the webhook does")
    assert Silent.asked.wait(LIMIT_S)
    Silent.over.set()
    rows = wait_for(lambda: len(one.record()) == 3 and one.record(), "the alarm and both actions")
    one.watch.close()
    assert (one.saves, one.stops) == (1, [f"alarm: {rows[0]['text']}"])
    assert rows[0]["step"] == 3 and rows[0]["value"] == 0.04 and rows[0]["attempt"] == 1
    errors = {row["action"]: row["error"] for row in rows[1:]}
    assert errors.keys() == {"command", "webhook"} and errors["command"] is None
    assert errors["webhook"], "it was hung up on"
    assert said.read_text() == "0.04\n"
    assert one.watch.shown()[0].endswith(rows[0]["text"])


def test_figures_of_the_run_itself(tmp_path: Path) -> None:
    rules = [
        {"name": "stall", "metric": "run.stall_s", "above": 0},
        {"name": "space", "metric": "run.free_gib", "below": 1e12},
        {"name": "walltime", "metric": "run.time_left_s", "below": 600},
    ]
    one = Watched(tmp_path / "run", rules=rules, builtin=False)
    wait_for(lambda: [row["rule"] for row in one.record()] == ["space"], "only what is true")
    one.facts = {"stall_s": 99.0, "time_left_s": 700.0}
    wait_for(lambda: {row["rule"] for row in one.record()} == {"stall", "space"}, "there is time")
    one.facts["time_left_s"] = 30.0
    wait_for(lambda: {row["rule"] for row in one.record()} == {"stall", "space", "walltime"}, "the others")
    one.watch.close()
    assert math.isfinite(one.record()[0]["value"])


def test_a_job_that_is_given_little_time_is_not_warned_of_it_as_it_begins() -> None:
    walltime = next(rule for rule in BUILT_IN if rule.name == "walltime")
    assert fired(walltime, [590.0, 300.0, 3.0]) == []
    assert fired(walltime, [590.0, 4000.0, 599.0, 500.0]) == [2]  # Slurm gave it more meanwhile
    assert fired(walltime, [601.0, 599.0]) == [1]
    assert fired(walltime.model_copy(update={"metric": "run.free_gib"}), [590.0]) == [0]


def test_a_built_in_rule(tmp_path: Path) -> None:
    one = Watched(tmp_path / "run")
    for step in range(1, 20):
        one.step(step, entropy="nan", kl=0.0)
    rows = wait_for(lambda: [row for row in one.record() if row["rule"] == "entropy"], "entropy is no number")
    one.watch.close()
    assert rows[0]["actions"] == ["warn"] and rows[0]["step"] == 10 and rows[0]["value"] == "nan"


def test_a_failure_of_any_kind_is_recorded_and_the_watch_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("as it comes")

    monkeypatch.setitem(TELL, "command", fail)
    rule = {"name": "low", "metric": "trainer.entropy", "below": 0.1, "actions": ["command"]}
    one = Watched(tmp_path / "run", rules=[rule], builtin=False, command="true")
    real, looks = one.watch._take, list[int]()

    def take(figures: Any, step: int | None) -> None:
        looks.append(1)
        if len(looks) == 1:
            raise KeyError("a row of another version")
        real(figures, step)

    monkeypatch.setattr(one.watch, "_take", take)
    wait_for(lambda: looks, "a look that fails")
    one.step(1, entropy=0.01)
    rows = wait_for(lambda: len(one.record()) == 2 and one.record(), "the alarm and its action")
    one.watch.close()
    assert "as it comes" in rows[1]["error"]
