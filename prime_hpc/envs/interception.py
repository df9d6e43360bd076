"""Model calls of in-process harnesses, without the HTTP hop; and verifiers' own server for all other harnesses.

One instance per environment. verifiers puts a small HTTP server between a harness and the model: limits, stop hooks,
the message graph and the call records live there. A harness in the same process can do the same steps on the same
session by a plain call.
"""

import time
import uuid
import weakref
from collections.abc import Mapping
from typing import Any

from verifiers.v1 import graph
from verifiers.v1.clients import Client
from verifiers.v1.configs.client import BaseClientConfig
from verifiers.v1.dialects.chat import ChatDialect, message_to_wire
from verifiers.v1.errors import HarnessError, TaskError
from verifiers.v1.interception import InterceptionServer
from verifiers.v1.interception.base import Slot
from verifiers.v1.session import RolloutSession
from verifiers.v1.trace import Error, ModelCall, TimeSpan
from verifiers.v1.types import Request, Response

from prime_hpc.envs.chat_client import ChatClient
from prime_hpc.envs.model_client import ContextFullError, PolicyClient

CHAT = ChatDialect()
_LIVE: weakref.WeakValueDictionary[str, "PolicyInterception"] = weakref.WeakValueDictionary()


class TurnRefused(Exception):
    """A limit or a stop hook ended the rollout before or after this model call; its trace says which."""


def interception_of(endpoint: str) -> "PolicyInterception":
    """Return the interception that a harness was pointed to by verifiers.
    Raises HarnessError: the endpoint is not one of this process's."""
    found = _LIVE.get(endpoint.removesuffix("/v1"))
    if found is None:
        raise HarnessError(f"the in-process harness runs only inside prime-hpc's EnvPool (endpoint {endpoint})")
    return found


class PolicyInterception(InterceptionServer):
    """verifiers' interception with the pool's policy clients and a direct door for in-process harnesses."""

    def __init__(
        self,
        policies: Mapping[str, PolicyClient | ChatClient],
        *,
        serve_http: bool,
        state_service_secrets: tuple[str, ...] = (),
    ) -> None:
        """Make one; `start` (by `async with`) brings it up.

        Args:
            policies: client of each server, by the base URL that sessions name.
            serve_http: some harness or tool server of the environment is another process.
        """
        super().__init__(state_service_secrets=state_service_secrets)
        self.policies = policies
        self.serve_http = serve_http

    async def start(self) -> None:
        """Listen on loopback where something will call; else only give this instance a name."""
        if self.serve_http:
            await super().start()
        else:
            self.base_url = f"http://in-process.invalid/{uuid.uuid4().hex}"
        _LIVE[self.base_url] = self

    def _client(self, config: BaseClientConfig) -> Client:
        """Return the pool's client of that server, or verifiers' own for another endpoint (a judge's, say)."""
        return self.policies.get(config.base_url) or super()._client(config)

    def is_policy(self, secret: str) -> bool:
        """Return whether the model of a rollout is the policy on servers of ours."""
        session = self.sessions.get(secret)
        return session is not None and isinstance(session.client, PolicyClient)

    def shows_images(self, secret: str) -> bool:
        """Return whether the model of a rollout may be sent pictures: an API may, a policy where its prompts hold
        images."""
        session = self.sessions.get(secret)
        client = session.client if session is not None else None
        return not isinstance(client, PolicyClient) or bool(client.renderer.image_places)

    def acquire(self, session: RolloutSession) -> Any:
        """Return the scope in which a rollout is registered, which gives its `Slot`."""
        return super().acquire(session) if self.serve_http else _Seat(self, session)

    async def complete(self, secret: str, request: Request) -> Response:
        """One model call of an in-process harness: verifiers' steps for a request, in verifiers' order.

        Raises:
            TurnRefused: a limit or a stop hook ended the rollout; the harness ends quietly.
            RolloutError: the model call or a hook failed; the harness lets it pass.
        """
        session = self.sessions.get(secret)
        if session is None or session.released or session.stopped:
            raise TurnRefused
        request = await self._admit(session, request)
        turn = graph.prepare_turn(session.trace, request.messages, request.tools)
        session.trace.preview(turn, turn.tail)
        if session.on_turn_input is not None:
            on_input, session.on_turn_input = session.on_turn_input, None
            on_input()
        started = time.time()
        node: int | None = None
        response: Response | None = None
        failure: BaseException | None = None
        try:
            response = await self._sample(session, turn)
            if session.released or session.stopped:
                raise TurnRefused
            records, stopped = [], None
            if session.response_interceptors or session.response_stops:
                response, records, stopped = await session.rewrite_response(response)
                if records:  # words that the model did not say cannot be trained on
                    response = response.model_copy(update={"tokens": None})
            node = turn.commit(response)
            session.consume_prepared(turn.tail)
            session.trace.response_rewrites.extend(records)
            stopped = stopped or await session.gate_tool_calls(node)
            if stopped is not None:
                session.trace.stop(stopped)
                raise TurnRefused
            return response
        except ContextFullError as error:
            if not session.trace.num_turns:
                failure = error
                raise
            session.trace.stop("max_total_tokens")  # as verifiers calls it: the episode is truncated, not failed
            raise TurnRefused from error
        except BaseException as error:
            failure = None if isinstance(error, TurnRefused) else error
            raise
        finally:
            if node is None:
                turn.abandon()
            if response is not None or failure is not None:
                _record(session, started, node, response, failure)

    async def _admit(self, session: RolloutSession, request: Request) -> Request:
        """Limits, stop hooks and request hooks; returns the request as it may go on."""
        try:
            if await session.refused() is not None:
                raise TurnRefused
            if not (session.request_interceptors or session.request_stops):
                return request
            request, records, stopped = await session.rewrite_request(request)
        except (TurnRefused, TaskError):
            raise
        except Exception as error:
            raise TaskError(f"model boundary hook failed: {type(error).__name__}: {error}") from error
        session.trace.request_rewrites.extend(records)
        if stopped is not None:
            graph.prepare_turn(session.trace, request.messages, request.tools).commit_prompt()
            session.trace.stop(stopped)
            raise TurnRefused
        return request

    async def _sample(self, session: RolloutSession, turn: graph.PendingTurn) -> Response:
        """Return the reply of whichever model this rollout's seat plays."""
        ctx, client = session.ctx, session.client
        assert client is not None  # given at registration
        if isinstance(client, PolicyClient):
            return await client.sample(turn.prompt, turn.tools, ctx.sampling, ctx.model, session.trace.id, turn)
        body: dict[str, Any] = {"model": ctx.model, "messages": [message_to_wire(m) for m in turn.prompt]}
        if turn.tools:
            body["tools"] = [
                {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}
                for tool in turn.tools
            ]
        body = CHAT.apply_overrides(body, ctx.model, ctx.sampling)
        return await client.get_response(CHAT, body, ctx.sampling, session_id=session.trace.id, turn=turn)


class _Seat:
    """A rollout's registration without HTTP: its trace id is secret enough, nobody else can present it."""

    __slots__ = ("_interception", "_session")

    def __init__(self, interception: PolicyInterception, session: RolloutSession) -> None:
        self._interception, self._session = interception, session

    async def __aenter__(self) -> Slot:
        interception, session = self._interception, self._session
        session.client = interception._client(session.ctx.client)
        interception.sessions[session.trace.id] = session
        return interception.base_url, session.trace.id, ""

    async def __aexit__(self, *error: object) -> None:
        self._interception.sessions.pop(self._session.trace.id, None)
        self._session.release()


def _record(
    session: RolloutSession, started: float, node: int | None, response: Response | None, failure: BaseException | None
) -> None:
    """Append the exchange to the trace's call records, unless the trace is sealed."""
    if session.released:
        return
    error = None
    if failure is not None:
        error = Error(
            type=type(failure).__name__, message=str(failure), status_code=getattr(failure, "status_code", None)
        )
    session.trace.calls.append(
        ModelCall(
            node=node,
            model=session.ctx.model,
            sampling=session.ctx.sampling,
            endpoint=CHAT.upstream_path,
            finish_reason=response.finish_reason if response else None,
            usage=response.usage if response else None,
            time=TimeSpan(start=started, end=time.time()),
            error=error,
        )
    )
    session.trace.notify()
