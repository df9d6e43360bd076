"""Any API that answers OpenAI's chat completions, as verifiers' model client: for evaluations, which need no tokens.

What passes (rate limits, a server's errors, broken or cut answers) is asked again with growing pauses; what does not
(a wrong key, a model that is not there) fails at once, under a name of its own.
"""

import asyncio
import json
import random
import time
from collections.abc import Mapping, Sequence
from email.utils import parsedate_to_datetime
from typing import Any

from pydantic import ValidationError
from pydantic_core import from_json, to_json
from verifiers.v1.clients import Client
from verifiers.v1.clients.client import SESSION_ID_HEADER
from verifiers.v1.dialects import ChatDialect, Dialect
from verifiers.v1.errors import ProviderError
from verifiers.v1.graph import PendingTurn
from verifiers.v1.types import Response, SamplingConfig

from prime_hpc.client.http import NoAnswerError, ServerClient
from prime_hpc.envs.legacy.messages import whole_characters
from prime_hpc.envs.model_client import CUT_OFF, FULL, ContextFullError, RequestRefusedError, SampledTurn
from prime_hpc.envs.pool_settings import ChatOptions
from prime_hpc.runtime.event_loops import loop_time

PASSING = (408, 409, 425, 429)
"""HTTP statuses below 500 that may be gone the next time."""
FORBIDDEN_IN_A_ROW = 20
"""Replies 403 with no other between them, after which it is no longer a filter: the key was revoked, say."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0


class EndpointRefusedError(ProviderError):
    """The API takes no request of this kind from us: the key, the model's name or the URL is wrong."""


class ChatClient(ServerClient, Client):
    """One API. Lives on the event loop that first uses it; `close` ends its connections."""

    _suffix = ""

    def __init__(self, base_url: str, api_key: str | None, options: ChatOptions, patience_s: float) -> None:
        """Make a client; opens no connection yet.

        Args:
            base_url: up to and with `/v1`.
            patience_s: for how long a request may be sent again: less than an episode's deadline, so that an API that
                fails is not taken for a model that rambles.
        """
        super().__init__(base_url, api_key, proxied=True)
        self.options = options
        self.patience_s = patience_s
        self._renamed: dict[str, str] = {}
        self.num_retries = 0
        self._num_forbidden = FORBIDDEN_IN_A_ROW
        """Since the last reply. To one who may ask 403 is about a request: a filter has found something in it."""
        self._answered: dict[str, bool] = {}  # by conversation that goes on: whether there was a reply

    def take_turns(self, session_id: str) -> list[SampledTurn]:
        """None: an API does not say what its tokens were."""
        self._answered.pop(session_id, None)
        return []

    def is_unanswered(self, session_ids: Sequence[str]) -> bool:
        """Return whether of these conversations something was asked, and nothing answered yet."""
        found = [self._answered[session] for session in session_ids if session in self._answered]
        return bool(found) and not any(found)

    async def get_response(
        self,
        dialect: Dialect,
        body: dict[str, Any],
        sampling: SamplingConfig,
        session_id: str | None = None,
        turn: PendingTurn | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Response:
        """One reply (verifiers' `Client` contract).

        Raises:
            EndpointRefusedError: no request of ours can succeed.
            ContextFullError: no room for a reply.
            RequestRefusedError: the API says that this request is wrong.
            ProviderError: it failed, again and again.
        """
        if not isinstance(dialect, ChatDialect):
            kind = type(dialect).__name__
            raise ProviderError(f"the API is asked for chat completions, not {kind}; use another harness")
        if session_id is not None:
            self._answered.setdefault(session_id, False)
        give_up = loop_time() + self.patience_s
        attempt = 0
        while True:
            sent = {self._renamed.get(name, name): value for name, value in body.items()}
            status, raw, wait = await self._post(sent, session_id)
            did = f"answered {status}" if status else "gave no answer"
            if status == 200:
                try:
                    answer = _read(raw)
                    response = dialect.parse_response(dialect.validate_response(answer))
                    response.raw, self._num_forbidden = answer, 0
                    if session_id in self._answered:
                        self._answered[session_id] = True
                    return response
                except (ValueError, ValidationError, IndexError, KeyError, TypeError, AttributeError) as error:
                    status, did = 502, f"{did}, but no completion ({_why(error)}),"  # cut in the middle, an error page
            status = status or 503
            if self._heeds(status, raw, sent):
                continue
            if not (status in PASSING or status >= 500):
                raise self._refusal(status, raw)
            pause = wait or random.uniform(0.5, 1.0) * min(FIRST_PAUSE_S * 2**attempt, LONGEST_PAUSE_S)
            if attempt >= self.options.max_retries or loop_time() + pause > give_up:
                text = raw[:300].decode(errors="replace")
                raise ProviderError(
                    f"{self.base_url} {did} {attempt + 1} times{self._too_long(wait or 0.0)}: {text}",
                    status_code=status,
                )
            await asyncio.sleep(pause)
            attempt += 1
            self.num_retries += 1

    async def _post(self, body: dict[str, Any], session_id: str | None) -> tuple[int, bytes, float | None]:
        """Status, body, and the pause that the server asks for; 0 and why where there is no whole answer."""
        headers = {SESSION_ID_HEADER: session_id} if session_id else {}
        try:
            answer = await self._http.request(
                "POST", "/chat/completions", to_json(body), timeout_s=self.options.timeout_s, headers=headers
            )
        except NoAnswerError as error:
            return 0, str(error).encode(), None
        return answer.status, answer.body, _seconds(answer.headers.get("Retry-After"))

    def _too_long(self, pause: float) -> str:
        """Say that no deadline bears the pause that an API asks for."""
        if pause <= self.patience_s:
            return ""
        return (
            f" and asks for a pause of {pause:g} s, where the environments' shortest timeout_s has room for "
            f"{self.patience_s:g} s (half of it)"
        )

    def _heeds(self, status: int, raw: bytes, sent: Mapping[str, Any]) -> bool:
        """Newer models want the limit under another name, and say so: ask again that way, from now on."""
        if status != 400 or b"max_completion_tokens" not in raw or "max_tokens" not in sent:
            return False
        self._renamed["max_tokens"] = "max_completion_tokens"
        return True

    def _refusal(self, status: int, raw: bytes) -> ProviderError:
        text = raw[:500].decode(errors="replace")
        said = f"{self.base_url} answered {status}: {text}"
        self._num_forbidden += status == 403
        if status in (401, 402, 404, 405) or (status == 403 and self._num_forbidden > FORBIDDEN_IN_A_ROW):
            return EndpointRefusedError(said, status_code=status)
        if any(words in text.lower() for words in FULL):
            return ContextFullError(said, status_code=status)
        return RequestRefusedError(said, status_code=status)


def _read(raw: bytes) -> Any:
    """Return an answer's JSON, with a replacement for each half of a character: sampled anew there may be one again.
    Raises ValueError: it is none."""
    try:
        return _with_known_reasons(from_json(raw))
    except ValueError:
        if b"\\u" not in raw:
            raise
        try:
            return from_json(whole_characters(json.dumps(json.loads(raw), ensure_ascii=False)))
        except RecursionError as error:
            raise ValueError("it is nested too deep") from error


def _with_known_reasons(answer: Any) -> Any:
    """Return an answer in which each reply ended for a reason that verifiers knows."""
    choices = answer.get("choices") if isinstance(answer, dict) else None
    for choice in choices if isinstance(choices, list) else ():
        if isinstance(choice, dict) and (reason := choice.get("finish_reason")) in CUT_OFF:
            choice["finish_reason"] = CUT_OFF[reason]
    return answer


def _why(error: Exception) -> str:
    """Return what is wrong with an answer, in a few words."""
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_input=False)[0]
        return f"{'.'.join(map(str, first['loc'])) or 'all of it'}: {first['msg']}"
    return f"{type(error).__name__}: {error}"[:200]


def _seconds(text: str | None) -> float | None:
    """Return the pause of a Retry-After header, which gives seconds or a date."""
    if not text:
        return None
    try:
        wait = float(text)
    except ValueError:
        try:
            wait = parsedate_to_datetime(text).timestamp() - time.time()
        except (ValueError, OverflowError):
            return None
    return min(max(0.0, wait), 300.0)
