"""What is looked up once instead of for every episode gives the same."""

import asyncio
import sys
import warnings
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import verifiers.v1 as vf
from pydantic import BaseModel
from renderers import base, parsing, reasoning
from verifiers.v1 import errors, graph, rollout
from verifiers.v1.graph import MessageNode
from verifiers.v1.task import task_key
from verifiers.v1.types import AssistantMessage, Request, Tool, ToolCall, TurnTokens, UserMessage
from verifiers.v1.utils import decorators

from prime_hpc.envs.lazy_runtime import LazyRuntime
from prime_hpc.envs.legacy.messages import accepted, tool_declaration
from prime_hpc.envs.patches import lookups
from prime_hpc.envs.patches.lookups import patch_verifiers
from prime_hpc.envs.rendering import MAX_TEXTS, SHORT_CHARS, cache_short_texts


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
            found = lookups._discover_decorated(obj, "reward")
            assert [method.__name__ for method in found] == names
            assert found == lookups._discover(obj, "reward")
            assert all(isinstance(method, MethodType) and method.__self__ is obj for method in found)
            assert lookups._discover_decorated(obj, "stop") == []


def test_hooks_get_the_arguments_that_they_name() -> None:
    patch_verifiers()
    trace = SimpleNamespace(value=0.5)
    for obj in (Scores(), Scores()):
        assert asyncio.run(decorators.invoke(obj.low, {"trace": trace, "more": 1})) == 0.5
        assert asyncio.run(decorators.invoke(obj.high, {"trace": trace})) == 2.0
    assert decorators.invoke(lambda more: more, {"trace": trace, "more": 1}) == 1


@pytest.mark.skipif(sys.version_info < (3, 14), reason="such a module cannot be imported before Python 3.14")
def test_annotations_may_name_what_is_imported_for_type_checkers_alone() -> None:
    own: dict[str, Any] = {}
    exec("def reward(trace: Absent, answer: int, *, extra: Absent = 0) -> Absent:\n    return answer", own)
    offered = {"trace": None, "answer": 2, "other": 3}
    assert accepted(own["reward"], offered) == {"trace": None, "answer": 2}
    patch_verifiers()
    assert decorators.invoke(own["reward"], offered) == 2
    shown = tool_declaration(own["reward"], without=["trace", "extra"])["function"]["parameters"]
    assert shown["properties"] == {"answer": {"title": "Answer", "type": "integer"}}


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


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a byte-level tokenizer of transformers, as the quickstart's model has it."""
    from transformers import AutoTokenizer

    from prime_hpc.starter.make import make_starter

    folder = tmp_path_factory.mktemp("starter")
    make_starter(folder)
    return AutoTokenizer.from_pretrained(folder / "model")


def test_a_fast_tokenizer_is_asked_directly_and_gives_the_same_tokens_and_places(fast: Any) -> None:
    patch_verifiers()
    direct = base._get_offset_tokenizer(fast)
    assert direct is not fast and base._get_offset_tokenizer(fast) is direct
    options = {"add_special_tokens": False, "return_offsets_mapping": True}
    for text in ("user\nReverse: abc", "a  b\n\n", "é \U0001f600 <|im_end|> x", "x" * 3000, "\ud7ff"):
        theirs, own = fast(text, **options), direct(text, **options)
        assert list(own["input_ids"]) == theirs["input_ids"], text
        assert [tuple(pair) for pair in own["offset_mapping"]] == [tuple(p) for p in theirs["offset_mapping"]], text
    fast(["a", "bcd"], truncation=True, max_length=2, padding=True)  # another caller's setting stays in the backend
    assert list(direct("abcdef", **options)["input_ids"]) == fast("abcdef", **options)["input_ids"]


def test_a_long_text_is_encoded_by_what_lets_other_threads_go_on() -> None:
    """`encode` of a megabyte kept the loop of all episodes waiting for seconds."""
    patch_verifiers()

    def encoded(text: str, **_: Any) -> Any:
        assert len(text) < 1000, "no other thread runs meanwhile"
        return batch([text])[0]

    def batch(texts: list[str], **_: Any) -> list[Any]:
        return [SimpleNamespace(ids=list(range(len(t))), offsets=[(i, i + 1) for i in range(len(t))]) for t in texts]

    class Fast:
        backend_tokenizer = SimpleNamespace(truncation=None, padding=None, encode=encoded, encode_batch=batch)

        def __call__(self, text: str, **options: Any) -> dict[str, Any]:
            (found,) = batch([text])
            return {"input_ids": found.ids, "offset_mapping": found.offsets}

    direct = base._get_offset_tokenizer(fast := Fast())
    assert direct is not fast
    found = direct("x" * 30_000, add_special_tokens=False, return_offsets_mapping=True)
    assert found["input_ids"] == list(range(30_000))


def test_a_tokenizer_whose_backend_encodes_otherwise_is_asked_itself() -> None:
    patch_verifiers()

    class Other:
        backend_tokenizer = SimpleNamespace(
            truncation=None, padding=None, encode=lambda text, **_: SimpleNamespace(ids=[1], offsets=[(0, len(text))])
        )

        def __call__(self, text: str, **options: Any) -> dict[str, Any]:
            return {"input_ids": [2], "offset_mapping": [(0, len(text))]}

    other = Other()
    assert base._get_offset_tokenizer(other) is other and base._get_offset_tokenizer(other) is other


def test_markers_and_short_texts_of_tokens_are_those_of_renderers(fast: Any) -> None:
    patch_verifiers()
    other = SimpleNamespace(decode=lambda ids, **_: "other", convert_tokens_to_ids=lambda marker: 7)
    for _ in range(2):
        for ids in ([], [198], [259, 198, 198], fast.encode("five tokens, or more")):
            assert reasoning._decode(fast, ids) == (fast.decode(ids, skip_special_tokens=False) if ids else "")
        for marker in ("<think>", "</think>", "nowhere"):
            assert reasoning._single_marker_id(fast, marker) == lookups._marker_id(fast, marker)
        assert reasoning._decode(other, [198]) == "other" and reasoning._single_marker_id(other, "<think>") == 7


def test_sums_over_tools_and_tasks_are_those_of_verifiers() -> None:
    patch_verifiers()
    tool = Tool(name="add", description="adds", parameters={})
    for tools in (None, [], [tool]):
        assert graph._tools_hash(tools) == lookups._tools_hash(tools)
    assert graph._tools_hash([tool]) != graph._tools_hash([])

    class Data(vf.TaskData):
        text: str

    task: Any = vf.Task(Data(prompt="p", text="one"))
    other = task.with_data(text="two")
    for each in (task, other, task):
        assert each.hash == each.key == task_key(each.data.model_dump(mode="json", exclude_none=True))
    assert task.hash != other.hash
    task.data = other.data
    assert task.hash == other.hash


def test_a_call_whose_arguments_nest_too_deep_has_a_sum_too() -> None:
    """The episode failed with a RecursionError, and so was left out of the scores."""
    patch_verifiers()
    deep = "[" * 100_000 + "]" * 100_000

    def sum_of(arguments: str) -> Any:
        call = ToolCall(id="c", name="add", arguments=arguments)
        return graph.message_hash(AssistantMessage(content=None, tool_calls=[call]))

    assert sum_of(deep) == sum_of(deep) != sum_of(deep + " ")
    assert sum_of('{"b": 1, "a": 2}') == sum_of('{"a":2,"b":1}')


def test_a_trace_has_its_private_attributes_and_no_others() -> None:
    patch_verifiers()
    data = vf.TaskData(prompt="p")
    traces = [vf.Trace.model_construct(task=data) for _ in range(2)]
    for trace in traces:
        assert trace._on_change is None and trace._pending == {} and trace._head_index == {}
        with pytest.raises(AttributeError, match="no_such"):
            trace.no_such  # noqa: B018
    seen: list[Any] = []
    traces[0].watch(seen.append)
    for trace in traces:
        trace.notify()
    assert seen == [traces[0]]


def test_none_one_and_many_hooks_are_invoked_in_order() -> None:
    patch_verifiers()

    async def plus(value: float, more: float) -> float:
        await asyncio.sleep(0)
        return value + more

    async def fails() -> None:
        raise ValueError("mine")

    available = {"value": 1.0, "more": 2.0}
    for number in range(3):
        assert asyncio.run(decorators.invoke_all([plus] * number, available)) == [3.0] * number
    for functions in ([fails], [plus, fails]):
        with pytest.raises(ValueError, match="mine"):
            asyncio.run(decorators.invoke_all(functions, available))


@pytest.mark.parametrize(
    "raised", [None, ValueError("no"), TimeoutError("late"), errors.SandboxError("box"), asyncio.CancelledError()]
)
def test_a_scope_says_whose_failure_an_error_is_as_verifiers_does(raised: BaseException | None) -> None:
    patch_verifiers()

    async def leave(scope: Any) -> None:
        async with scope(errors.TaskError, "scoring"):
            if raised is not None:
                raise raised

    async def both() -> list[BaseException | None]:
        scopes = (rollout.boundary, errors.boundary)
        return list(await asyncio.gather(*map(leave, scopes), return_exceptions=True))

    assert rollout.boundary is not errors.boundary
    own, theirs = asyncio.run(both())
    assert type(own) is type(theirs) and str(own) == str(theirs)
    if isinstance(own, errors.TaskError):
        assert own.__cause__ is raised and theirs is not None and theirs.__cause__ is raised


def test_scopes_of_a_rollout_are_the_interception_s_own_and_no_tools_are_none() -> None:
    patch_verifiers()
    shared = SimpleNamespace(acquire=lambda session: ("scope of", session))
    assert rollout.serve_interception(shared, None, "session", [], {}) == ("scope of", "session")
    own = rollout.serve_interception(None, None, None, [], {})
    assert type(own) is type(lookups._serve_interception(None, None, None, [], {}))

    async def urls() -> dict[str, str]:
        async with rollout.serve_tools([], None, shared={}, state_route="x") as found:
            return found

    assert asyncio.run(urls()) == {}
    tool = SimpleNamespace(external=True, url="http://elsewhere")
    served = rollout.serve_tools([], SimpleNamespace(host_url=lambda url: url), shared={"search": tool})

    async def of_others() -> Any:
        async with served as found:
            return found

    assert asyncio.run(of_others()) == {"search": "http://elsewhere"}


@pytest.mark.parametrize("model", [MessageNode, TurnTokens, Request])
def test_objects_that_are_made_without_a_look_at_each_field_are_pydantic_s(model: type[BaseModel]) -> None:
    patch_verifiers()
    required = {name: None for name, info in model.model_fields.items() if info.is_required()}
    plain = BaseModel.model_construct.__func__  # type: ignore[attr-defined]
    some = next(name for name, info in model.model_fields.items() if not info.is_required())
    for values in (required, required | {some: [7]}, required | {"unknown": 1}):
        own, theirs = model.model_construct(**values), plain(model, **values)
        times = {"timestamp"} & vars(own).keys()
        assert vars(own).keys() == vars(theirs).keys()
        assert all(vars(own)[name] == vars(theirs)[name] for name in vars(own).keys() - times)
        assert own.model_fields_set == theirs.model_fields_set
        assert own.__pydantic_extra__ is None and own.__pydantic_private__ is None
    first, second = model.model_construct(**required), model.model_construct(**required)
    for name, value in vars(first).items():
        assert value is not vars(second)[name] or not isinstance(value, list | dict), name

    class Derived(model):  # type: ignore[misc, valid-type]
        more: int = 3

    assert Derived.model_construct(**required).more == 3


def test_replies_are_decoded_as_transformers_does(fast: Any) -> None:
    patch_verifiers()
    text = "Say \u00e9 hi , 1 + 1 .<think>\n</think><|im_end|>"
    ids = fast.encode(text, add_special_tokens=False)
    pieces: list[list[int]] = [ids, ids[3:], ids[::-1], ids[:1], []]
    for some in pieces:
        assert parsing._decode(fast, some) == (fast.decode(some, skip_special_tokens=False) if some else "")
    assert lookups._decoders[fast] is not None

    class Cleaned:
        clean_up_tokenization_spaces = True
        backend_tokenizer = fast.backend_tokenizer

        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            return "its own"

    assert parsing._decode(Cleaned(), ids) == "its own"


def test_scoring_of_task_and_harness_is_gathered_without_tasks() -> None:
    """Results in order; where the first fails, the second is never begun and warns of nothing."""
    patch_verifiers()
    gather = vars(rollout)["asyncio"].gather
    begun: list[str] = []

    async def score(name: str, fails: bool = False) -> str:
        begun.append(name)
        await asyncio.sleep(0)
        if fails:
            raise ValueError(name)
        return name

    async def both(fails: bool) -> list[str]:
        return await gather(score("task", fails), score("harness"))

    assert asyncio.run(both(False)) == ["task", "harness"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ValueError, match="task"):
            asyncio.run(both(True))
    assert begun == ["task", "harness", "task"]


def test_a_stage_without_a_deadline_has_none_and_one_with_keeps_it() -> None:
    """`timeout(None)` costs nothing and never expires."""
    patch_verifiers()
    timeout, timeout_at = vars(rollout)["asyncio"].timeout, vars(rollout)["asyncio"].timeout_at

    async def wait(scope: Any) -> bool:
        async with scope as entered:
            await asyncio.sleep(0.01)
        return bool(entered.expired())

    assert not asyncio.run(wait(timeout(None))) and not asyncio.run(wait(timeout_at(None)))

    async def late() -> None:
        async with timeout(0):
            await asyncio.sleep(60)

    async def late_at() -> None:
        async with timeout_at(asyncio.get_running_loop().time()):
            await asyncio.sleep(60)

    for run in (late, late_at):
        with pytest.raises(TimeoutError):
            asyncio.run(run())


def test_a_box_is_its_own_view_where_the_environment_is_no_other() -> None:
    """A task with variables of its own gets a view, which shares everything else."""
    box = LazyRuntime()
    assert box.with_env({}) is box
    view = box.with_env({"A": "1"})
    assert view is not box and view.env == {"A": "1"} and box.env == {} and vars(view) is vars(box)


class PluggedTask(vf.Task[vf.TaskData]):
    """Hooks of each kind, one of them under two names."""

    @vf.reward
    async def low(self) -> float:
        return 0.0

    @vf.reward(priority=5)
    async def high(self) -> float:
        return 1.0

    @vf.metric
    async def length(self) -> float:
        return 2.0

    other_length = length


def test_hooks_and_judges_of_a_task_are_those_that_verifiers_finds() -> None:
    patch_verifiers()
    config = PluggedTask.config_type()(rewards={"low": {"weight": 0.5}})
    for task in (PluggedTask(vf.TaskData(prompt="x")), PluggedTask(vf.TaskData(prompt="x"), config)):
        for kind in ("stop", "metric", "reward"):
            found, theirs = task.hooks(kind), lookups._task_hooks(task, kind)
            assert [hook.__name__ for hook in found] == [hook.__name__ for hook in theirs]
            assert [getattr(hook, "_vf_weight", 1.0) for hook in found] == [
                getattr(hook, "_vf_weight", 1.0) for hook in theirs
            ]
        assert [hook.__name__ for hook in task.hooks("reward")] == ["high", "low"]
        assert len(task.hooks("metric")) == 1
        assert task.plugged_judges() == [] == lookups._plugged_judges(task)
    assert task.hooks("reward")[1]._vf_weight == 0.5
    judged = PluggedTask(vf.TaskData(prompt="x"))
    judged.config = SimpleNamespace(judges=["nobody"])
    with pytest.raises(AttributeError, match="'str' object has no attribute 'id'"):
        judged.plugged_judges()
