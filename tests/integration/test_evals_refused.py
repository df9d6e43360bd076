"""Evaluations and syntheses that are refused in words: of a directory in use, with a chat template of another model."""

import itertools
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_evals import KEY, ROLLOUTS, TASKS, command, episodes, run, start
from tests.support.scripted_api import ScriptedApi, noisy_reverse
from tests.support.scripted_server import AdminServer, reverse_last_user
from tests.support.tiny_tokenizer import make_tokenizer

pytestmark = pytest.mark.slow
LEAVES_OUT = "{% for message in messages %}{{ message.role }}{% endfor %}"
HALF = "{% for message in messages %}{{ message.content }"
RAISES = "{{ raise_exception('no such role') }}"


def test_a_second_evaluation_of_a_live_directory_is_refused_and_harms_nothing(tmp_path: Path) -> None:
    words = ("--environment-ids", "reverse-text")
    refused, replies = threading.Event(), itertools.count()

    def reply(messages: list[dict[str, Any]]) -> str | dict[str, Any]:
        """Answer three; the others wait, with the whole API, until the second evaluation was refused."""
        if next(replies) >= 3:
            refused.wait(280)
        return noisy_reverse(messages)

    with ScriptedApi(reply, key=KEY) as api:
        first = start(command(api.url, tmp_path, *words))
        deadline = time.monotonic() + 250
        while not episodes(tmp_path / "eval"):
            assert first.poll() is None and time.monotonic() < deadline, first.communicate()[0]
            time.sleep(0.1)
        for more in ((), ("--clean",)):
            code, said = run(command(api.url, tmp_path, *words, *more))
            assert code == 2 and f"{tmp_path / 'eval'}: a run is going on there" in said, said[-2000:]
        assert first.poll() is None
        refused.set()
        said, _ = first.communicate(timeout=240)
    assert first.returncode == 0, said[-3000:]
    scored = Counter((row["task"], row["rollout"]) for row in episodes(tmp_path / "eval"))
    assert len(scored) == TASKS * ROLLOUTS and set(scored.values()) == {1}


@pytest.mark.parametrize(
    ("program", "template", "words"),
    [
        ("eval", LEAVES_OUT, "chat template (model.enable_thinking = False) is none that the renderers"),
        ("eval", RAISES, "cannot write a prompt"),
        ("synthesize", HALF, "cannot write a prompt"),
    ],
)
def test_a_wrong_chat_template_ends_it_before_an_episode(
    tmp_path: Path, program: str, template: str, words: str
) -> None:
    model = tmp_path / "model"
    tokenizer = make_tokenizer(model)
    (model / "config.json").write_text('{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}')
    (model / "model.safetensors").touch()  # the server is there already: nobody loads it
    asked: list[str] = []

    def reply(prompt: str, number: int) -> str:
        asked.append(prompt)
        return reverse_last_user(prompt, number)

    with AdminServer(tokenizer, reply) as server:
        tokenizer.chat_template = template
        tokenizer.save_pretrained(model)
        argv = command(server.url, tmp_path, "--environment-ids", "reverse-text", "--seq-len", "512")
        argv[argv.index("eval")] = program
        argv[argv.index("scripted")] = str(model)
        code, said = run([*argv, "--sampling.max-tokens", "64"])
    assert code == 1 and words in said and "set model.renderer" in said.lower(), said[-2500:]
    assert not asked and not episodes(tmp_path / program)
