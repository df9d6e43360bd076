"""A scripted inference server that serves several runs: a version for each model name, unknown names refused."""

from pathlib import Path
from typing import Any

from aiohttp import web
from transformers import PreTrainedTokenizerFast

from tests.support.scripted_server import ScriptedServer, reverse_last_user


class NamedServer(ScriptedServer):
    """`versions` holds every name that is served; `updates` what was loaded: (name, version, path)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.versions: dict[str, int] = {}
        self.updates: list[tuple[str, int, str]] = []

    @classmethod
    def of_model(cls, model: Path) -> "NamedServer":
        """Answers reverse-text."""
        return cls(PreTrainedTokenizerFast.from_pretrained(model), reverse_last_user)

    def routes(self) -> list[web.RouteDef]:
        """What our server answers when `model.lora` is set."""
        return [
            web.post("/inference/v1/generate", self._generate_named),
            web.get("/v1/models", self._models),
            web.get("/health", self._health),
            web.get("/policy_version", self._named_version),
            web.post("/update_weights", self._update_named),
            web.post("/serve_base", self._serve_base),
            web.post("/reload_weights", self._forget),
        ]

    async def _generate_named(self, request: web.Request) -> web.Response:
        name = (await request.json())["model"]
        if name not in self.versions:
            return web.json_response({"error": {"message": f"The model {name} does not exist."}}, status=404)
        self.version = self.versions[name]
        return await self._generate(request)

    async def _named_version(self, request: web.Request) -> web.Response:
        name = request.query.get("name", "policy")
        if name != "policy" and name not in self.versions:
            return web.json_response({"error": f"no adapter is served as {name}"}, status=404)
        return web.json_response({"version": self.versions.get(name, 0), "adapters": self.versions})

    async def _update_named(self, request: web.Request) -> web.Response:
        body = await request.json()
        path = Path(body["path"])
        if not (path / "adapter_config.json").exists():
            return web.json_response({"error": f"{path} holds no adapter"}, status=400)
        self.versions[body["name"]] = body["version"]
        self.updates.append((body["name"], body["version"], body["path"]))
        return web.json_response({"version": body["version"], "path": body["path"], "changed": True})

    async def _serve_base(self, request: web.Request) -> web.Response:
        self.versions[request.query["name"]] = 0
        return web.json_response({"version": 0, "path": "", "changed": True})

    async def _forget(self, request: web.Request) -> web.Response:
        changed = self.versions.pop(request.query["name"], None) is not None
        return web.json_response({"version": 0, "path": "", "changed": changed})
