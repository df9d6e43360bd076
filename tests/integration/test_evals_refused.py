"""Evaluations and syntheses that are refused in words: of a directory in use, with a chat template of another model."""

import itertools
import json
import shutil
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
TEMPLATES = {
    "{% for message in messages %}{{ message.role }}{% endfor %}": "leaves out what the user says",
    "{% for message in messages %}{{ message.content }": "cannot write a prompt",
    "{{ raise_exception('no such role') }}": "cannot write a prompt",
}
"""Chat template -> the words that refuse it."""


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


@pytest.mark.parametrize("program", ["eval", "synthesize"])
def test_a_wrong_chat_template_ends_it_before_an_episode(tmp_path: Path, program: str) -> None:
    """Each is refused with the model's path and what to do; the model with its own template is played."""
    model = tmp_path / "model"
    tokenizer = make_tokenizer(model)
    shape: dict[str, Any] = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    (model / "config.json").write_text(json.dumps(shape))
    (model / "model.safetensors").write_bytes(b"")  # the server is there already: nobody loads it
    own = tokenizer.chat_template
    with AdminServer(tokenizer, reverse_last_user) as server:
        for number, (template, words) in enumerate([*TEMPLATES.items(), (own, "")]):
            tokenizer.chat_template = template
            tokenizer.save_pretrained(model)
            out = tmp_path / str(number)
            argv = command(server.url, out, "--environment-ids", "reverse-text", "--seq-len", "512")
            argv[argv.index("eval")] = program
            argv[argv.index("scripted")] = str(model)
            code, said = run([*argv, "--sampling.max-tokens", "64", "--num-examples", "2"])
            results = episodes(out / program)
            if words:
                assert code == 1 and words in said and "chat_template.jinja" in said, (template, said[-2500:])
                assert not results
            else:
                assert code == 0 and len(results) == 2 * ROLLOUTS, said[-2500:]
            shutil.rmtree(out, ignore_errors=True)
