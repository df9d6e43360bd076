"""A reward model as the reward of `rows`: `reward: prime_hpc.envs.rows.reward_model:score`.

The judge that the run starts (`judge_inference` with `runner: pooling`), or a vLLM of `--runner pooling` whose address
is in `$JUDGE_URL`, reads the conversation in its own chat template, without a prompt for another turn and without
tokens beside the template's, as reward models are trained; its score is the logit of its one class.
"""

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from typing import Any

DEADLINE_S = 600.0
"""For so long a judge that is away is asked again."""
PAUSE_S = 1.0
TIMEOUT_S = 60.0


def score(messages: list[dict[str, Any]]) -> float:
    """Return the logit of a conversation, without what the model thought before it replied.

    Raises:
        ValueError: the judge refuses it, or has more than one class.
        OSError: no answer until the deadline.
    """
    said = [{"role": message["role"], "content": message.get("content") or ""} for message in messages]
    asked: dict[str, Any] = {"messages": said, "use_activation": False}
    if "JUDGE_MODEL" in os.environ:  # else the server's one model
        asked["model"] = os.environ["JUDGE_MODEL"]
    request = urllib.request.Request(
        os.environ["JUDGE_URL"].rstrip("/").removesuffix("/v1") + "/classify",
        json.dumps(asked).encode(),
        {"Authorization": f"Bearer {os.environ.get('JUDGE_API_KEY', '')}", "Content-Type": "application/json"},
    )
    logits = _answer(request)["data"][0]["probs"]
    if len(logits) != 1:
        raise ValueError(f"the judge has {len(logits)} classes, and a reward model has one: whose logit is the reward?")
    return float(logits[0])


def _answer(request: urllib.request.Request) -> dict[str, Any]:
    end = time.monotonic() + DEADLINE_S
    while True:
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            if error.code < 500 and error.code not in (408, 429):
                said = error.read(500).decode(errors="replace")
                raise ValueError(f"the judge answered {error.code}: {said}") from error
            if time.monotonic() > end:
                raise
        except (OSError, ValueError, http.client.HTTPException):  # no answer, or half of one
            if time.monotonic() > end:
                raise
        time.sleep(PAUSE_S)
