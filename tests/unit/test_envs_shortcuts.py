"""What is looked up once instead of for every episode gives the same."""

import asyncio
from types import MethodType, SimpleNamespace
from typing import Any

import verifiers.v1 as vf
from renderers import base
from verifiers.v1.graph import MessageNode
from verifiers.v1.types import UserMessage
from verifiers.v1.utils import decorators

from prime_hpc.envs import verifiers_patches
from prime_hpc.envs.rendering import MAX_TEXTS, SHORT_CHARS, cache_short_texts
from prime_hpc.envs.verifiers_patches import patch_verifiers


class Scores:
    """Rewards of two priorities, one of them under another name, and a plain method."""

    @vf.reward
    async def low(self, trace: Any) -> float:
        return trace.value

    @vf.reward(priority=5)
    async def high(self) -> float:
        return 2.0

    def neither(self) -> None: ...


class Overridden(Scores):
    async def low(self, trace: Any) -> float:  # an undecorated override takes the reward away
        return trace.value


class Aliased(Scores):
    other = Scores.low


def test_decorated_methods_are_those_that_verifiers_finds_bound_to_the_object_at_hand() -> None:
    patch_verifiers()
    for kind, names in ((Scores, ["high", "low"]), (Overridden, ["high"]), (Aliased, ["high", "low", "low"])):
        for obj in (kind(), kind()):
            found = verifiers_patches._discover_decorated(obj, "reward")
            assert [method.__name__ for method in found] == names
            assert found == verifiers_patches._discover(obj, "reward")
            assert all(isinstance(method, MethodType) and method.__self__ is obj for method in found)
            assert verifiers_patches._discover_decorated(obj, "stop") == []


def test_hooks_get_the_arguments_that_they_name() -> None:
    patch_verifiers()
    trace = SimpleNamespace(value=0.5)
    for obj in (Scores(), Scores()):
        assert asyncio.run(decorators.invoke(obj.low, {"trace": trace, "more": 1})) == 0.5
        assert asyncio.run(decorators.invoke(obj.high, {"trace": trace})) == 2.0
    assert decorators.invoke(lambda more: more, {"trace": trace, "more": 1}) == 1


def test_message_nodes_share_no_list() -> None:
    patch_verifiers()
    patch_verifiers()
    first, second = (MessageNode.model_construct(message=UserMessage(content="hi")) for _ in range(2))
    first.token_ids.append(1)
    assert second.token_ids == [] and MessageNode.model_construct(message=None).token_ids == []
    assert MessageNode(message=UserMessage(content="hi")).mask == []


def test_a_tokenizer_that_remembers_short_texts_gives_the_same_tokens() -> None:
    asked: list[str] = []

    class Tokenizer:
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            asked.append(text)
            return [1] * add_special_tokens + [ord(c) for c in text]

    tokenizer = Tokenizer()
    cache_short_texts(tokenizer)
    cache_short_texts(tokenizer)
    first = tokenizer.encode("user\n", add_special_tokens=False)
    first.append(-1)  # a caller's list is the caller's
    assert tokenizer.encode("user\n", add_special_tokens=False) == [ord(c) for c in "user\n"]
    assert asked == ["user\n"]
    assert tokenizer.encode("user\n") == [1, *(ord(c) for c in "user\n")]  # otherwise asked for: encoded anew
    long = "x" * (SHORT_CHARS + 1)
    assert tokenizer.encode(long, add_special_tokens=False) == tokenizer.encode(long, add_special_tokens=False)
    assert asked == ["user\n", "user\n", long, long]
    for number in range(MAX_TEXTS + 1):
        assert tokenizer.encode(str(number), add_special_tokens=False) == [ord(c) for c in str(number)]
    assert tokenizer.encode("user\n", add_special_tokens=False) == [ord(c) for c in "user\n"]


def test_whether_a_tokenizer_knows_offsets_is_asked_once() -> None:
    patch_verifiers()
    asked: list[str] = []

    class WithOffsets:
        def __call__(self, text: str, **options: Any) -> dict[str, Any]:
            asked.append(text)
            return {"input_ids": [1], "offset_mapping": [(0, 1)]}

    class Without:
        def __call__(self, text: str, **options: Any) -> dict[str, Any]:
            raise NotImplementedError

    known, unknown = WithOffsets(), Without()
    for _ in range(2):
        assert base._get_offset_tokenizer(known) is known
        assert base._get_offset_tokenizer(unknown) is None
    assert asked == ["a"]
