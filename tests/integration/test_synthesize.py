"""`synthesize` from the command line against a scripted API: killed and started again, refused, and then trained on."""

import itertools
import json
import os
import random
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from prime_hpc.config.sections.sft import SFTDataConfig
from prime_hpc.evals.episodes import results_file
from prime_hpc.runtime.process_tree import family
from prime_hpc.store.dataset.files import find_data
from prime_hpc.store.manifest import verify_artifact
from prime_hpc.trainer.data.messages import Conversation, parse_row
from prime_hpc.trainer.data.template import ChatTokenizer
from tests.integration.test_evals import KEY, num_lines, run, start, wait_for_end
from tests.support.scripted_api import Fault, ScriptedApi
from tests.support.tiny_model import make_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

QWEN3 = Path(pytest.importorskip("trl").__file__ or "").parent / "chat_templates" / "qwen3.jinja"
TASKS, ROLLOUTS = (60 if "PRIMEHPC_TEST_KILLS" in os.environ else 12), 3


def command(api_url: str, out: Path, *more: str) -> list[str]:
    return [
        *("tests.faults.entry", "prime-hpc", "synthesize", "--model.name", "scripted"),
        *("--client.base-url", api_url, "--client.api-key-var", "SCRIPTED_KEY", "--output-dir", str(out)),
        *("--num-examples", str(TASKS), "--rollouts-per-example", str(ROLLOUTS), "--max-concurrent", "8", *more),
    ]


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    files = find_data(SFTDataConfig(path=str(run_dir / "data"))).files
    return [json.loads(line) for path in files for line in path.read_text().splitlines()]


def log_of(run_dir: Path) -> str:
    return "".join(path.read_text() for path in (run_dir / "logs" / "latest" / "synthesize").iterdir())


def report_of(run_dir: Path) -> dict[str, Any]:
    return dict(json.loads((run_dir / "results" / "summary.json").read_text()))


def test_killed_at_any_moment_the_rows_are_those_of_an_uninterrupted_run(tmp_path: Path) -> None:
    num_kills, rng = int(os.environ.get("PRIMEHPC_TEST_KILLS", "1")), random.Random(7)
    more = ("--environment-ids", "reverse-text", "--min-reward", "1", "--n-best", "1", "--shard-rows", "4")
    killed, whole = tmp_path / "killed" / "synthesize", tmp_path / "whole" / "synthesize"
    total = TASKS * ROLLOUTS
    with ScriptedApi(key=KEY, delay_s=0.25) as api:
        for _ in range(num_kills):
            goal = min(total - 1, num_lines(killed) + rng.randrange(1, max(2, total // (num_kills + 1))))
            process = start(command(api.url, tmp_path / "killed", *more))
            while process.poll() is None and num_lines(killed) < goal:
                time.sleep(rng.uniform(0.0, 0.05))
            assert process.poll() is None, process.communicate()
            started = family(process.pid)
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            wait_for_end(started)
            with results_file(killed).open("ab") as file:
                file.write(b'{"step": 0, "env": "reverse-te')  # as if it had died in a write
        code, said = run(command(api.url, tmp_path / "killed", *more))
        assert code == 0, said[-3000:]
    with ScriptedApi(key=KEY) as api:
        code, said = run(command(api.url, tmp_path / "whole", *more))
        assert code == 0, said[-3000:]
    lines = [json.loads(line) for line in results_file(killed).read_text().splitlines()]
    assert len(lines) == len({(row["task"], row["rollout"]) for row in lines}) == total
    rows = rows_of(killed)
    assert rows == rows_of(whole) and len({row["provenance"]["task"] for row in rows}) == len(rows)
    verify_artifact(killed / "data" / "rows")
    assert all(row["provenance"]["reward"] == 1.0 and row["provenance"]["rollout"] == 0 for row in rows)
    report = report_of(killed)["environments"]["reverse-text"]
    assert len(rows) == report["num_rows"] == report["num_tasks_with_rows"]
    assert report["dropped"] == {"reward": total - ROLLOUTS * len(rows), "duplicate": (ROLLOUTS - 1) * len(rows)}
    assert len(list((killed / "data" / "rows").glob("*.jsonl"))) == -(-len(rows) // 4)
    assert f"{len(rows)} rows: prime-hpc sft --model.name MODEL --data.path" in said
    again = [*command(api.url, tmp_path / "whole", *more), "--n-best", "2", "--no-drop-duplicates"]
    code, said = run(again)  # other filters ask nobody: the API is gone
    assert code == 0 and "nobody is asked" in log_of(whole), said[-3000:]
    assert [row["provenance"]["rollout"] for row in rows_of(whole)] == [0, 1] * len(rows)
    for row in rows:  # `sft` trains on the reply
        found = parse_row(row, SFTDataConfig(), SFTDataConfig(), has_template=True)
        assert isinstance(found, Conversation) and found.trained == (False, True)
        assert found.messages[1]["content"] == found.messages[0]["content"][::-1]


def test_a_teacher_that_never_passes_ends_with_the_counts_and_nothing_more_is_spent(tmp_path: Path) -> None:
    run_dir = tmp_path / "synthesize"
    more = ("--environment-ids", "reverse-text", "--min-reward", "1", "--give-up-after", "9")
    with ScriptedApi(reply=lambda messages: "no", key=KEY) as api:
        code, said = run(command(api.url, tmp_path, *more))
        asked = api.num_requests
    assert code == 1 and "none of" in said and "reward below synthesize.min_reward" in said, said[-3000:]
    assert 9 <= asked <= 9 + 8 and not (run_dir / "data").exists()
    report = report_of(run_dir)
    assert report["num_rows"] == 0 and report["environments"]["reverse-text"]["dropped"] == {
        "reward": num_lines(run_dir)
    }
    code, said = run(command("http://127.0.0.1:9/v1", tmp_path, *more, "--n-best", str(ROLLOUTS + 1)))
    assert code == 2 and "synthesize.n_best" in said
    with ScriptedApi(key=KEY) as api:  # another teacher's replies, or other settings, do not mix with these
        code, said = run(command(api.url, tmp_path, *more, "--sampling.temperature", "0.3"))
    assert code == 2 and "settings.json" in said and "synthesize.sampling" in said


def test_faults_of_an_api_cost_no_row_or_are_counted(tmp_path: Path) -> None:
    """Every conversation is answered badly at first; then a key that is not valid, and an API that is not there."""
    passing = [
        Fault(429, headers={"Retry-After": "0.1"}),
        Fault(500),
        Fault(half=True),
        Fault(body=b"<html>"),
        Fault(503),
    ]

    def fault(conversation: str, number: int) -> Fault | None:
        return passing[sum(conversation.encode()) % len(passing)] if number == 0 else None

    args = ("--environment-ids", "reverse-text", "--client.max-retries", "2", "--no-drop-duplicates")
    with ScriptedApi(key=KEY, fault=fault) as api:
        code, said = run(command(api.url, tmp_path / "a", *args))
    assert code == 0 and len(rows_of(tmp_path / "a" / "synthesize")) == TASKS * ROLLOUTS, said[-3000:]
    with ScriptedApi(key=KEY, fault=lambda conversation, number: Fault(500)) as api:
        code, said = run(command(api.url, tmp_path / "b", *args))
        dropped = report_of(tmp_path / "b" / "synthesize")["environments"]["reverse-text"]["dropped"]
        assert code == 1 and dropped == {"failed": TASKS * ROLLOUTS} and "too many failed" in said, said[-3000:]
        code, said = run(command(api.url, tmp_path / "c", *args), key="wrong")
        assert code == 1 and "SCRIPTED_KEY" in said and "401" in said, said[-2000:]
    code, said = run(command("http://127.0.0.1:9/v1", tmp_path / "c", "--environment-ids", "no-such-environment"))
    assert code == 2 and "no-such-environment" in said and "synthesize.environment_ids.0" in said


def test_files_of_prompts_get_replies_beside_their_own_fields(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"word{i}", "id": i}) + "\n" for i in range(20)))
    argv = command("URL", tmp_path, "--prompts", str(prompts), "--json")
    argv = [
        text for text in argv if text not in ("--num-examples", str(TASKS), "--rollouts-per-example", str(ROLLOUTS))
    ]
    with ScriptedApi(reply=lambda messages: messages[-1]["content"].upper(), key=KEY) as api:
        code, said = run([api.url if text == "URL" else text for text in argv])
    assert code == 0, said[-3000:]
    rows = rows_of(tmp_path / "synthesize")
    assert [(row["input"]["id"], row["messages"][-1]["content"]) for row in rows] == [
        (i, f"WORD{i}") for i in range(20)
    ]


def works_it_out(messages: list[dict[str, Any]]) -> str | dict[str, Any]:
    """Right replies to `calculator`, a call a step, with a thought; to `guess-number`, by halving."""
    question = next(m["content"] for m in messages if m["role"] == "user")
    if "Guess my number" in question:
        low, high = map(int, re.findall(r"\d+", question)[:2])
        for reply, hint in itertools.pairwise(messages):
            if reply["role"] == "assistant":
                guess = int(reply["content"])
                low, high = (guess + 1, high) if "higher" in hint["content"] else (low, guess - 1)
        return str((low + high) // 2)
    numbers = list(map(int, re.findall(r"\d+", question)))
    results = [m["content"] for m in messages if m["role"] == "tool"]
    names = [{"+": "add", "*": "multiply"}[sign] for sign in re.findall(r"[+*]", question)]
    if len(results) == len(names):
        return f"It is {results[-1]}."
    left = int(results[-1]) if results else numbers[0]
    arguments = json.dumps({"a": left, "b": numbers[len(results) + 1]})
    function = {"name": names[len(results)], "arguments": arguments}
    call = {"id": f"c{len(results)}", "type": "function", "function": function}
    return {"content": None, "reasoning_content": "first this", "tool_calls": [call]}


def test_tool_calls_and_turns_become_rows_that_a_chat_template_takes(tmp_path: Path) -> None:
    with ScriptedApi(reply=works_it_out, key=KEY) as api:
        argv = command(api.url, tmp_path, "--environment-ids", "calculator,guess-number", "--min-reward", "0.1")
        code, said = run(argv)
    assert code == 0, said[-3000:]
    rows = rows_of(tmp_path / "synthesize")
    report = report_of(tmp_path / "synthesize")["environments"]
    assert report["calculator"]["num_tasks_with_rows"] == TASKS == report["calculator"]["mean_reward"] * TASKS
    assert report["guess-number"]["num_tasks_with_rows"] >= TASKS - 2
    games = [row for row in rows if row["provenance"]["environment"] == "guess-number"]
    assert max(sum(m["role"] == "assistant" for m in row["messages"]) for row in games) > 2
    sums = [row for row in rows if row["provenance"]["environment"] == "calculator"]
    assert {tool["function"]["name"] for row in sums for tool in row["tools"]} == {"add", "multiply"}
    chat = ChatTokenizer(make_tokenizer(tmp_path / "tokenizer"), chat_template=str(QWEN3))
    for row in rows:
        found = parse_row(row, SFTDataConfig(), SFTDataConfig(), has_template=True)
        assert isinstance(found, Conversation)
        assert [m["role"] == "assistant" for m in found.messages] == list(found.trained)
        shown = chat.render(found.messages, found.tools)
        calls = sum(len(m.get("tool_calls", [])) for m in found.messages)
        assert shown.count("<tool_call>\n{") == calls + bool(found.tools) and shown.count("<think>") >= bool(calls)
