"""verifiers' own `vf-eval` plays an installed environment against our server, typed as its users type it."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from prime_hpc.envs.tasksets.reverse_text_data import score
from tests.support.inference_server import ServerProcess, save_model
from tests.support.runs import BIN, ROOT

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]
KEY = "a-key-of-the-user"
PACKAGE = '''
"""An environment package as one would install it: a taskset, and the harness that plays it."""
import os

import httpx
import verifiers.v1 as vf
from verifiers.v1.harness import ProgramResult

from prime_hpc.envs.tasksets.reverse_text import ReverseTextTaskset

__all__ = ["AskOnce", "ReverseTextTaskset"]


class AskOnce(vf.Harness[vf.HarnessConfig]):
    """One question over the endpoint, in this process."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        _, prompt = self.resolve_prompt(data)
        body = {"model": ctx.model, "messages": [{"role": "user", "content": prompt}]}
        async with httpx.AsyncClient(timeout=100) as client:
            headers = {"Authorization": f"Bearer {secret}"}
            (await client.post(f"{endpoint}/chat/completions", json=body, headers=headers)).raise_for_status()
        return ProgramResult(exit_code=0, stdout="", stderr="")
'''


@pytest.mark.parametrize("backend", ["vllm", "transformers"])
def test_vf_eval_scores_every_episode(tmp_path: Path, backend: str) -> None:
    model = save_model(tmp_path / "model", tied=True, seed=0)
    (tmp_path / "reverse_package.py").write_text(PACKAGE)
    server = ServerProcess(tmp_path / "run", model, {"backend": backend, "api_key": KEY})
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "VLLM_API_KEY": KEY}
    words = [str(BIN / "vf-eval"), "reverse_package", "-m", "policy", "-n", "4", "-r", "2"]
    words += ["--client.base-url", f"{server.url}/v1", "--client.api-key-var", "VLLM_API_KEY"]
    words += ["--env.agent.runtime.type", "subprocess", "--sampling.max-tokens", "16", "--no-push", "--no-rich"]
    try:
        server.wait_ready()
        done = subprocess.run(words, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=200)
        refused = subprocess.run(
            words, cwd=tmp_path, env=environ | {"VLLM_API_KEY": "another"}, capture_output=True, text=True, timeout=200
        )
    finally:
        server.close()
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    first, second = sorted((tmp_path / "outputs").glob("*/traces.jsonl"), key=lambda path: path.stat().st_mtime_ns)
    episodes = [json.loads(line) for line in first.read_text().splitlines()]
    assert len(episodes) == 8
    for episode in episodes:
        (trace,) = episode["traces"]
        assert trace["errors"] == [] and trace["num_output_tokens"] > 0
        reply = trace["nodes"][-1]["message"]["content"] or ""
        assert trace["rewards"]["similarity"]["score"] == pytest.approx(score(reply, trace["task"]["data"]["text"]))
    assert all(json.loads(line)["traces"][0]["errors"] for line in second.read_text().splitlines()), refused.stderr
