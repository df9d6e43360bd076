"""The tinker service and the engines' servers: which adapters are where, and that every request gets a result."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prime_hpc.client.inference import InferenceError
from prime_hpc.config import Experiment
from prime_hpc.trainer.tinker.batches import BadRequestError
from prime_hpc.trainer.tinker.board import Failure, Kind, Operation
from prime_hpc.trainer.tinker.engines import Engines, _Server
from prime_hpc.trainer.tinker.paths import Index, Shape, Shelf, new_save
from prime_hpc.trainer.tinker.requests import CreateSession, SaveForSampler, SaveWeights
from prime_hpc.trainer.tinker.service import Service
from prime_hpc.trainer.tinker.sessions import Future, Line

ROOM = 2
SESSION = "0123456789abcdef" * 2
DEADLINE_S = 30.0


class Client:
    """A server with places for adapters, as vLLM's: a further name is refused where all are taken."""

    def __init__(self, places: int = ROOM) -> None:
        self.places = places
        self.served: dict[str, int] = {}
        self.fails: list[InferenceError] = []
        """What the next requests end with."""
        self.mute_unload = False
        """The next one is done, and its answer is lost."""
        self.held: dict[str, asyncio.Event] = {}

    async def adapter_versions(self) -> dict[str, int]:
        return dict(self.served)

    async def update_weights(self, path: Path, version: int, name: str) -> dict[str, Any]:
        if name not in self.served and len(self.served) >= self.places:
            raise InferenceError(f"all {self.places} places are taken", 400)
        self.served[name] = version
        return {}

    async def reload_weights(self, name: str) -> dict[str, Any]:
        muted, self.mute_unload = self.mute_unload, False
        if muted:
            raise InferenceError("no answer in time")
        self.served.pop(name, None)
        return {}

    async def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        if body["model"] in self.held:
            await self.held[body["model"]].wait()
        if self.fails:
            raise self.fails.pop()
        if body["model"] not in {*self.served, "policy"}:
            raise InferenceError("no such model", 404)
        return {}


def saved(number: int, session: str = SESSION) -> Any:
    run = SimpleNamespace(root=Path(f"/run/tinker/{session}-0"))
    return SimpleNamespace(run=run, save=SimpleNamespace(number=number), folder=Path("/x"))


def name_of(number: int) -> str:
    return f"{SESSION}-0-{number}"


def engines_of(client: Client, is_ours: Callable[[str], bool] = lambda adapter: True) -> Engines:
    engines = Engines(lambda: ["u"], None, ROOM, 100, 5.0, is_ours)
    shared: Any = client
    engines._servers["u"] = _Server(shared, ROOM, is_ours)
    return engines


async def lose(engines: Engines, client: Client, status: int | None = None) -> None:
    """A request of the base model that ends without an answer, or with a status."""
    client.fails.append(InferenceError("no answer in time", status))
    with pytest.raises(InferenceError):
        await engines._ask({}, None)


def test_requests_without_an_answer_fill_no_servers_places() -> None:
    async def main() -> None:
        client = Client()
        client.served = {f"{'f' * 32}-0-1": 1, "run_b": 3}  # one of an earlier life of the service; another run's
        client.places = ROOM + 1
        engines = engines_of(client)
        for number in range(12):
            await engines._ask({}, saved(number))
            assert name_of(number) in client.served and len(client.served) <= client.places
            await lose(engines, client, None if number % 2 else 404)
        assert client.served["run_b"] == 3

    asyncio.run(main())


def test_services_that_share_a_server_leave_each_other_s_adapters_alone(tmp_path: Path) -> None:
    async def main() -> None:
        client = Client(places=2 * ROOM)
        sessions, services = ["a" * 32, "b" * 32], []
        for session in sessions:
            shelf = Shelf(tmp_path / session)
            shelf.write(f"{session}:train:0", Index(Shape("base", 4, 1)))
            services.append(engines_of(client, shelf.has))
        client.served[f"{sessions[1]}-0-9"] = 9  # of the second one's earlier life
        for engines, session in zip(services, sessions, strict=True):
            await engines._ask({}, saved(1, session))
        assert client.served == {f"{session}-0-1": 1 for session in sessions}
        for engines, session in zip(services, sessions, strict=True):
            await lose(engines, client)
            await engines._ask({}, saved(2, session))
        assert client.served.keys() == {f"{session}-0-{number}" for session in sessions for number in (1, 2)}

    asyncio.run(main())


def test_what_came_in_too_late_gives_its_place_back() -> None:
    """An update that was loaded after its answer was waited for: the server is full of what nobody here knows of."""

    async def main() -> None:
        client = Client()
        engines = engines_of(client)
        await engines._ask({}, saved(0))
        client.served[name_of(7)] = 7
        await engines._ask({}, saved(1))
        assert client.served == {name_of(0): 0, name_of(1): 1}

    asyncio.run(main())


def test_a_refused_save_is_not_the_clients_mistake_and_a_refused_request_is() -> None:
    async def main() -> None:
        client = Client(places=0)
        engines = engines_of(client)
        with pytest.raises(InferenceError, match="places are taken"):
            await engines._ask({}, saved(0))
        client.fails.append(InferenceError("no such option", 422))
        with pytest.raises(BadRequestError, match="no such option"):
            await engines._ask({}, None)

    asyncio.run(main())


def test_an_adapter_whose_unloading_had_no_answer_is_unloaded_later() -> None:
    async def main() -> None:
        client = Client()
        engines = engines_of(client)
        for number in range(ROOM):
            await engines._ask({}, saved(number))
        client.mute_unload = True
        with pytest.raises(InferenceError):
            await engines._ask({}, saved(ROOM))
        for number in range(ROOM, 3 * ROOM):
            await engines._ask({}, saved(number))
            assert len(client.served) <= ROOM

    asyncio.run(main())


@pytest.mark.parametrize("is_another", [False, True])
def test_requests_in_flight_at_a_server_that_is_in_doubt_are_counted_once(is_another: bool) -> None:
    """Whether it is the same server or one that was started again: later samplers find room."""

    async def main() -> None:
        client = Client()
        engines = engines_of(client)
        ends = {number: asyncio.Event() for number in range(ROOM)}
        client.held = {name_of(number): end for number, end in ends.items()}
        slow = [asyncio.create_task(engines._ask({}, saved(number))) for number in range(ROOM)]
        async with asyncio.timeout(DEADLINE_S):
            while len(client.served) < ROOM:
                await asyncio.sleep(0)
        await lose(engines, client)
        if is_another:
            client.served, client.held = {}, {}
            for number in range(ROOM):
                await engines._ask({}, saved(number))
        waiting = asyncio.create_task(engines._ask({}, saved(ROOM)))
        for _ in range(20):
            await asyncio.sleep(0)
        assert waiting.done() == is_another  # nothing that samples is unloaded
        for end in ends.values():
            end.set()
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(*slow, return_exceptions=True)
            await waiting
            await engines._ask({}, saved(ROOM + 1))

    asyncio.run(main())


def test_who_waits_for_engines_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client says why it waits only if the service does: for minutes, while engines start or start again."""
    monkeypatch.setattr("prime_hpc.trainer.tinker.engines.RETRY_S", 0.01)

    async def main() -> None:
        client = Client()
        ours = engines_of(client)
        stated = {"model": {"name": "base", "lora": {}}, "trainer": {"max_concurrent_runs": 2, "tinker": {}}}
        service = Service(Experiment.model_validate(stated), Shelf(tmp_path), ours, "base", 64)
        service._futures["s:1"], service._futures["m:1"] = Future(""), Future("m")
        monkeypatch.setattr(service.board, "has_slot", lambda model_id: False)
        wanted = SimpleNamespace(prompt=SimpleNamespace(chunks=[]))
        monkeypatch.setattr(ours, "_body", lambda *_: {})
        monkeypatch.setattr("prime_hpc.trainer.tinker.engines._written", lambda *_: b"samples")
        assert service.waits_for("s:1") == "" and service.waits_for("unknown") == ""
        assert service.waits_for("m:1") == "every adapter slot of this service is taken"
        client.fails = [InferenceError("connection refused")] * 2
        sampling: Any = ours.sample
        request = asyncio.create_task(sampling(wanted, None, 64))
        async with asyncio.timeout(DEADLINE_S):
            while not service.waits_for("s:1"):
                await asyncio.sleep(0)
            assert service.waits_for("s:1") == "the engines do not answer (connection refused)"
            assert await request == b"samples" and service.waits_for("s:1") == ""

    asyncio.run(main())


# ---------------------------------------------------------------------------------------------------- every result


def with_service(run: Callable[[Service, str], Any], tmp_path: Path) -> None:
    """Run something with a service and an adapter's id in a session of it."""
    stated = {"model": {"name": "base", "lora": {}}, "trainer": {"max_concurrent_runs": 2, "tinker": {}}}

    async def main() -> None:
        made = Service(Experiment.model_validate(stated), Shelf(tmp_path), None, "base", 64)
        made._loop = asyncio.get_running_loop()
        request = CreateSession.model_validate({"tags": [], "user_metadata": None, "sdk_version": "0"})
        await run(made, f"{made.create_session(request)['session_id']}:train:0")

    asyncio.run(main())


async def answer(service: Service, request_id: str) -> dict[str, Any]:
    future = await service.result(request_id, DEADLINE_S)
    assert future is not None, "no result"
    return json.loads(future.body)


def begin(service: Service, model_id: str, build: Callable[[], Operation]) -> str:
    return service._begin(service._sessions[model_id.partition(":")[0]], model_id, build)


def creation() -> Operation:
    return Operation(Kind.CREATE, payload={"shape": Shape("base", 4, 1)})


def test_a_save_whose_index_cannot_be_read_has_a_result(tmp_path: Path) -> None:
    async def run(service: Service, model_id: str) -> None:
        request_id = begin(service, model_id, creation)
        save = new_save(1, 1, has_optimizer=False, user_metadata=None)
        service.shelf.write(model_id, Index(Shape("base", 4, 1)).with_save("sampler_weights", "unnamed-1", save))
        for file in service.shelf.of_model(model_id).root.iterdir():
            file.write_text("{")
        sampler = {"sampler": f"{model_id.partition(':')[0]}:sample:0", "follows": False}
        published = Operation(Kind.PUBLISH, model_id, request_id, sampler)
        service._deliver(published, {"path": f"tinker://{model_id}/sampler_weights/unnamed-1", "type": "x"})
        assert (await answer(service, request_id))["category"] == "server"

    with_service(run, tmp_path)


@pytest.mark.parametrize("name", ["unnamed-7", "mine-unnamed-7"])
def test_no_save_that_a_user_names_ends_with_its_session(name: str, tmp_path: Path) -> None:
    async def run(service: Service, model_id: str) -> None:
        service._lines[model_id] = Line(next=1)
        service.publish(SaveForSampler.model_validate({"model_id": model_id, "seq_id": 1, "path": name}))
        operation = service.board.take(0.0)
        assert operation is not None
        if name.startswith("unnamed-"):
            assert operation.kind is Kind.REFUSE and "unnamed- begins the names" in operation.payload["why"]
        else:
            assert operation.kind is Kind.PUBLISH

    with_service(run, tmp_path)


def test_a_request_for_samples_has_a_result_whatever_the_engines_end_with(tmp_path: Path) -> None:
    async def run(service: Service, model_id: str) -> None:
        async def fail(*_: Any) -> bytes:
            raise json.JSONDecodeError("no JSON", "x", 0)

        request_id = begin(service, model_id, creation)
        engines: Any = SimpleNamespace(sample=fail)
        request: Any = None
        await service._sample(request_id, request, None, engines)
        found = await answer(service, request_id)
        assert found["category"] == "server" and "no JSON" in found["error"]

    with_service(run, tmp_path)


@pytest.mark.parametrize("is_refused", [False, True])
def test_requests_that_came_early_end_with_an_adapter_that_never_was(is_refused: bool, tmp_path: Path) -> None:
    def refuse() -> Operation:
        raise BadRequestError("no such rank")

    async def run(service: Service, model_id: str) -> None:
        session = service._sessions[model_id.partition(":")[0]]
        if is_refused:
            session.models.append(model_id)
            service._lines[model_id] = Line(next=0)
        else:
            request_id = begin(service, model_id, creation)
        early = service.save(SaveWeights.model_validate({"model_id": model_id, "seq_id": 2, "path": "x"}))
        if is_refused:
            request_id = begin(service, model_id, refuse)
        else:
            failure = Failure("no memory", is_user=False)
            service._deliver(Operation(Kind.CREATE, model_id, request_id, creation().payload), failure)
        assert "error" in await answer(service, request_id)
        assert model_id in (await answer(service, early))["error"]

    with_service(run, tmp_path)
