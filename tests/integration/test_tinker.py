"""The tinker service with the unchanged client of PyPI: losses are our own path's, what was saved outlives the service,
adapters do not disturb each other, and what is wrong is said to whom it concerns."""

import json
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinker import AuthenticationError, NotFoundError, RequestFailedError, RestClient, UnprocessableEntityError, types
from tinker.types import RequestErrorCategory

from prime_hpc.runtime import activity
from prime_hpc.runtime.look import look
from tests.support.runs import wait_until
from tests.support.tinker_losses import ADAM, OWN, client_data, client_losses, own_losses
from tests.support.tinker_world import TinkerWorld, datum
from tests.support.tiny_model import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 4
LENGTHS = (17, 40, 9, 33)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def world(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinkerWorld]:
    world = TinkerWorld(tmp_path_factory.mktemp("tinker") / "service", model)
    world.start()
    yield world
    world.close()


def samples(seed: int, step: int) -> list[dict[str, Any]]:
    """Tokens of a few sequences, which of them are trained, advantages and the sampler's log-probabilities."""
    rng = np.random.default_rng([seed, step])
    made = []
    for n in LENGTHS:
        tokens = rng.integers(0, 300, n).tolist()
        mask = np.arange(n) >= n // 3
        mask[0] = False
        advantages, logprobs = rng.standard_normal(n), rng.normal(-6, 0.3, n)
        made.append({"tokens": tokens, "mask": mask, "advantages": advantages, "logprobs": logprobs})
    return made


def train(adapter: Any, seed: int, loss: str, steps: range, adam: dict[str, float] = ADAM) -> list[float]:
    """Losses of the client's own loop on some steps of a seed."""
    return client_losses(adapter, loss, [samples(seed, step) for step in steps], adam)


def test_losses_are_those_of_our_own_trainer(tmp_path: Path, model: Path, world: TinkerWorld) -> None:
    batches = {loss: [samples(i, step) for step in range(1, STEPS + 1)] for i, loss in enumerate(OWN)}
    own = own_losses(tmp_path / "own", model, batches)
    theirs: dict[str, list[float]] = {}
    for seed, loss in enumerate(OWN):
        with world.client() as client:
            adapter = client.create_lora_training_client(base_model=str(model), rank=4, seed=seed).result()
            theirs[loss] = train(adapter, seed, loss, range(1, STEPS + 1))
    for loss, curve in own.items():
        print(f"{loss}: own {curve}, client {theirs[loss]}")
        assert len(curve) == STEPS and np.ptp(curve) > 0
        np.testing.assert_allclose(theirs[loss], curve, rtol=2e-5, atol=2e-6)


@pytest.mark.exhaustive
def test_two_ranks_train_as_one_does(tmp_path: Path, model: Path, world: TinkerWorld) -> None:
    """Data for both ranks, and a single datum, of which one rank has nothing; passes that add up, a save of two ranks
    that one loads, and an error after which both still agree."""
    two = TinkerWorld(tmp_path / "two", model, trainer={"num_ranks": 2}).start()
    found: dict[str, dict[str, list[float]]] = {}
    saved: dict[str, str] = {}
    try:
        for name, place in (("one", world), ("two", two)):
            with place.client() as client:
                adapter = adapter_of(client, model, seed=3)
                found[name] = passes(adapter)
                saved[name] = adapter.save_state("end").result().path
                assert "more than the 64" in refusal(
                    adapter.forward([datum([1] * 90, weights=[1] * 89)], "cross_entropy")
                )
                found[name]["after"] = train(adapter, 4, "ppo", range(1, 3))
        name = "-".join(saved["two"].split("/")[2].split(":")[::2])
        shutil.copytree(two.directory / "tinker" / name, world.directory / "tinker" / name)
        with world.client() as client:
            adapter = client.create_training_client_from_state_with_optimizer(saved["two"]).result()
            found["loaded"] = {"after": train(adapter, 4, "ppo", range(1, 3))}
    finally:
        two.close()
    assert len(set(found["one"]["losses"])) == len(found["one"]["losses"]) and min(found["one"]["norms"]) > 1e-3
    for key, expected in found["one"].items():
        np.testing.assert_allclose(found["two"][key], expected, rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(found["loaded"]["after"], found["one"]["after"], rtol=2e-5, atol=2e-6)


def passes(adapter: Any) -> dict[str, list[float]]:
    """Losses, log-probabilities and norms of gradients over steps of one, two and all data, in one pass or several."""
    found: dict[str, list[float]] = {"losses": [], "logprobs": [], "norms": []}
    for step, counts in enumerate(([1], [4], [2], [3, 1], [1, 1, 2]), 1):
        data = client_data(samples(8, step), "importance_sampling")
        for count in counts:
            passed = adapter.forward_backward(data[:count], "importance_sampling").result()
            data = data[count:]
            found["losses"].append(passed.metrics["loss:sum"])
            found["logprobs"] += [x for row in passed.loss_fn_outputs for x in row["logprobs"].data]
        stepped = adapter.optim_step(types.AdamParams(**ADAM)).result()
        found["norms"].append(stepped.metrics["grad_norm:mean"])
    return found


def adapter_of(client: Any, model: Path, **changes: Any) -> Any:
    """A new adapter in training."""
    return client.create_lora_training_client(base_model=str(model), **{"rank": 4, "seed": 5, **changes}).result()


def test_a_service_says_that_it_waits_for_clients(world: TinkerWorld) -> None:
    def awaited() -> list[str]:
        words = [one["word"] for one in look(str(world.directory.absolute())) if one["word"]]
        return [word["awaits"] for word in words if word["role"] == "trainer"]

    wait_until(lambda: awaited() == [activity.CLIENTS], 200, "`prime-hpc why` is told")


def test_saves_outlive_a_service_that_is_killed(tmp_path: Path, model: Path) -> None:
    world = TinkerWorld(tmp_path / "service", model).start()
    client = world.client()
    adapter = adapter_of(client, model)
    train(adapter, 7, "ppo", range(1, 3))
    path = adapter.save_state("half", user_metadata={"why": "test"}).result().path
    on = train(adapter, 7, "ppo", range(3, 6))
    with pytest.raises(RequestFailedError, match="exists"):
        adapter.save_state("half").result()
    big = [datum(np.random.default_rng(i).integers(0, 300, 60).tolist(), weights=np.ones(59)) for i in range(512)]
    begun = adapter._turn_counter
    lost = [adapter.forward_backward(big, "cross_entropy") for _ in range(4)][-1]
    wait_until(lambda: adapter._turn_counter == begun + 4, 200, "the passes were taken in")
    world.kill()
    world.start()
    with pytest.raises(ValueError, match="started again since"):
        lost.result()
    with world.client() as second:
        resumed = second.create_training_client_from_state_with_optimizer(path).result()
        assert resumed.get_info().lora_rank == 4
        assert train(resumed, 7, "ppo", range(3, 6)) == on  # bit for bit
        anew = second.create_training_client_from_state(path).result()
        again = train(anew, 7, "ppo", range(3, 6))
        assert again[0] == on[0] and again[1:] != on[1:]  # the same weights, Adam's moments begin anew
    rest = RestClient(base_url=world.url, api_key=world.key)
    (listed,) = rest.list_checkpoints(path.split("/")[2]).result().checkpoints
    assert (listed.tinker_path, listed.user_metadata) == (path, {"why": "test"})
    world.close()


def test_adapters_do_not_disturb_each_other(world: TinkerWorld, model: Path) -> None:
    with world.client() as alone:
        adapter = adapter_of(alone, model, seed=11)
        expected = train(adapter, 11, "importance_sampling", range(1, 5))
        others = train(adapter_of(alone, model, seed=12, rank=2), 12, "cross_entropy", range(1, 5))
    with world.client() as first, world.client() as second:
        mine, other = adapter_of(first, model, seed=11), adapter_of(second, model, seed=12, rank=2)
        third = second.create_lora_training_client(base_model=str(model), rank=4)  # no slot is free: it waits
        both: dict[str, list[float]] = {"mine": [], "other": []}
        for step in range(1, 5):
            both["other"] += train(other, 12, "cross_entropy", range(step, step + 1))
            both["mine"] += train(mine, 11, "importance_sampling", range(step, step + 1))
        assert both == {"mine": expected, "other": others}
        assert not third.future().done()
        first.close("success").result()
        assert train(third.result(), 13, "cross_entropy", range(1, 2))


def logprobs_of(adapter: Any, *data: types.Datum) -> list[np.ndarray]:
    """Log pi of each datum's targets, in their shape."""
    found = adapter.forward(list(data), "cross_entropy").result()
    return [np.asarray(row["logprobs"].data).reshape(row["logprobs"].shape) for row in found.loss_fn_outputs]


def datum_of(tokens: list[int], targets: np.ndarray, weights: np.ndarray) -> types.Datum:
    """Targets that need not be the next tokens."""
    fields: Any = {"target_tokens": targets.astype(np.int64), "weights": weights.astype(np.float32)}
    made = {name: types.TensorData.from_numpy(array) for name, array in fields.items()}
    return types.Datum(types.ModelInput.from_ints(tokens), made)


def test_targets_may_be_any_tokens_and_several_at_once(world: TinkerWorld, model: Path) -> None:
    rng = np.random.default_rng(4)
    tokens, weights = rng.integers(0, 300, 30).tolist(), rng.random((29, 2))
    following, others = np.array(tokens[1:]), np.full(29, 7)
    both = np.stack([following, others], axis=1)
    one = datum_of(tokens[:-1], following, weights[:, 0])
    other = datum_of(tokens[:-1], others, weights[:, 1])
    joint = datum_of(tokens[:-1], both, weights)
    padded = datum_of(tokens[:-1], np.where(np.arange(29) < 12, 0, following), weights[:, 0])
    with world.client() as client:
        adapter = adapter_of(client, model)
        found = logprobs_of(adapter, one, joint, other, padded)
        assert [row.shape for row in found] == [(29,), (29, 2), (29,), (29,)]
        np.testing.assert_allclose(found[1], np.stack([found[0], found[2]], axis=1), rtol=1e-5)
        np.testing.assert_allclose(found[3][12:], found[0][12:], rtol=1e-5)
        assert np.abs(found[3][:12] - found[0][:12]).min() > 1e-4
    curves: list[list[float]] = []
    for data in ([joint], [one, other]):
        with world.client() as client:
            adapter = adapter_of(client, model, seed=9)
            curves.append([])
            for _ in range(3):
                curves[-1].append(adapter.forward_backward(data, "cross_entropy").result().metrics["loss:sum"])
                adapter.optim_step(types.AdamParams(**ADAM)).result()
    np.testing.assert_allclose(curves[0], curves[1], rtol=2e-5)
    assert curves[0][-1] < 0.95 * curves[0][0]


def test_custom_losses_give_the_gradients_of_the_losses_that_they_are(world: TinkerWorld, model: Path) -> None:
    def squared(data: list[types.Datum], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
        return sum((row**2).sum() for row in logprobs), {"custom": 1.0}

    def negated(data: list[types.Datum], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
        weights = [datum.loss_fn_inputs["weights"].to_torch() for datum in data]
        return -sum((row * w).sum() for row, w in zip(logprobs, weights, strict=True)), {}

    data = client_data(samples(2, 1), "cross_entropy")
    curves: dict[str, list[float]] = {"served": [], "negated": [], "squared": []}
    for name, loss in (("served", None), ("negated", negated), ("squared", squared)):
        with world.client() as client:
            adapter = adapter_of(client, model, seed=3)
            for _ in range(3):
                passed = adapter.forward_backward(data, "cross_entropy") if loss is None else None
                passed = passed or adapter.forward_backward_custom(data, loss)
                adapter.optim_step(types.AdamParams(**ADAM)).result()
                curves[name].append(passed.result().metrics["loss:sum"])
    np.testing.assert_allclose(curves["negated"], curves["served"], rtol=2e-5)
    assert curves["squared"][-1] < curves["squared"][0]


def test_saves_are_listed_described_and_expire(world: TinkerWorld, model: Path) -> None:
    rest = RestClient(base_url=world.url, api_key=world.key)
    client = world.client(user_metadata={"recipe_name": "a"})
    adapter = adapter_of(client, Path(*model.parts[-2:]), user_metadata={"renderer": "b"})  # <org>/<model>, say
    kept = adapter.save_state("kept").result().path
    brief = adapter.save_state("brief", ttl_seconds=3600).result().path
    adapter.save_weights_for_sampler("kept", ttl_seconds=1).result()
    assert "at least 1" in refusal(adapter.save_state("never", ttl_seconds=0))
    assert "PEFT directory" in refusal(adapter.save_weights_external("weights"))
    assert train(adapter, 1, "ppo", range(1, 2))  # the requests after those were not held up
    run = rest.get_training_run_by_tinker_path(kept).result()
    assert (run.training_run_id, run.base_model, run.lora_rank) == (adapter.model_id, str(model), 4)
    assert run.user_metadata == {"recipe_name": "a", "renderer": "b"}
    listed = {row.tinker_path: row for row in rest.list_checkpoints(adapter.model_id).result().checkpoints}
    assert {kept, brief} <= set(listed) and listed[kept].expires_at is None and listed[brief].expires_at is not None
    rest.set_checkpoint_ttl_from_tinker_path(brief, None).result()
    rest.set_checkpoint_ttl_from_tinker_path(kept, 1).result()

    def paths() -> list[str]:
        return [row.tinker_path for row in rest.list_checkpoints(adapter.model_id).result().checkpoints]

    wait_until(lambda: paths() == [brief], 200, "two saves have expired")
    assert "has expired" in refusal(client.create_training_client_from_state(kept))
    assert adapter.save_state("kept", ttl_seconds=1).result().path == kept  # its name is free again
    wait_until(lambda: paths() == [brief], 200, "it has expired as well")
    page = rest.list_user_checkpoints(limit=1).result()
    assert page.checkpoints[0].tinker_path == brief and page.cursor is not None and page.cursor.total_count >= 1
    first = rest.list_training_runs(limit=1).result()
    assert first.cursor.total_count > 1 and first.training_runs[0].training_run_id == adapter.model_id
    rest.delete_checkpoint_from_tinker_path(brief).result()
    assert paths() == []
    with pytest.raises(NotFoundError, match="no adapter"):
        rest.get_training_run("0123456789abcdef:train:0").result()
    with pytest.raises(NotFoundError, match="has saved"):
        rest.delete_checkpoint_from_tinker_path(brief).result()
    session = adapter.model_id.split(":")[0]
    assert session in rest.list_sessions().result().sessions
    assert rest.get_session(session).result().user_metadata == {"recipe_name": "a"}
    client.close("success").result()


def refusal(future: Any) -> str:
    """Words of a request that failed for its user's fault."""
    with pytest.raises(RequestFailedError) as failed:
        future.result()
    assert failed.value.category is RequestErrorCategory.User
    return str(failed.value)


def test_what_is_wrong_with_a_request_is_said_and_harms_nothing(world: TinkerWorld, model: Path) -> None:
    with world.client() as client:
        assert "is not served here" in refusal(client.create_lora_training_client(base_model="Qwen/Qwen3-8B"))
        wide = client.create_lora_training_client(base_model=str(model), rank=8)
        assert "rank 8 is above 4" in refusal(wide)
        dimuon = types.DimuonOptimizerConfig()
        muon = client.create_lora_training_client(base_model=str(model), rank=4, optimizer=dimuon)
        assert "'dimuon' is not served" in refusal(muon)
        adapter = adapter_of(client, model)
        good = client_data(samples(3, 1), "cross_entropy")
        before = adapter.forward(good, "cross_entropy").result().metrics["loss:sum"]
        wrong = {
            "token 999999": [datum([1, 2, 999999], weights=[1, 1])],
            "token -3": [datum([-3, 2, 7], weights=[1, 1])],
            "more than the 64": [datum(list(range(90)), weights=np.ones(89))],
            "not finite": [datum([1, 2, 3], weights=[1, np.nan])],
            "has shape": [datum([1, 2, 3], weights=[1, 1, 1])],
            "takes target_tokens, weights": [datum([1, 2, 3], weights=[1, 1], mask=[1, 1])],
            "65 targets a token": [types.Datum(types.ModelInput.from_ints([1, 2]), shifted(np.ones((2, 65))))],
            "target_tokens has shape [1]": [types.Datum(types.ModelInput.from_ints([1, 2]), shifted([9]))],
        }
        for words, data in wrong.items():
            passed = adapter.forward_backward(good + data, "cross_entropy")
            stepped = adapter.optim_step(types.AdamParams(**ADAM))
            assert words in refusal(passed)
            assert "no step was taken" in refusal(stepped)
        assert "'dro' is not served" in refusal(adapter.forward(good, "dro"))
        ones = types.TensorData.from_numpy(np.ones((2, 2), np.float32))
        pairs = shifted(np.ones((2, 2))) | {"advantages": ones, "logprobs": ones}
        several = types.Datum(types.ModelInput.from_ints([1, 2]), pairs)
        assert "this loss takes one target a token" in refusal(adapter.forward([several], "ppo"))
        assert "lacks advantages, logprobs" in refusal(adapter.forward(good, "ppo"))
        low = adapter.forward(client_data(samples(3, 1), "ppo"), "ppo", {"clip_low_threshold": 2.0})
        assert "0 <= low <= 1 <= high" in refusal(low)
        assert "beta1" in refusal(adapter.optim_step(types.AdamParams(learning_rate=1e-3, beta1=1.5)))
        assert "no path of a save" in refusal(adapter.load_state("tinker://x"))
        assert "names no save" in refusal(adapter.save_state("../../evil"))
        assert adapter.forward(good, "cross_entropy").result().metrics["loss:sum"] == before
        sampler = client.create_sampling_client(base_model=str(model)).result()
        with pytest.raises(UnprocessableEntityError, match="no engines"):
            sampler.sample(types.ModelInput.from_ints([1]), 1, types.SamplingParams(max_tokens=2)).result()
        other = world.client()
        other.create_lora_training_client(base_model=str(model), rank=4).result()
        ask(world, "unload_model", {"model_id": adapter.model_id})
        with pytest.raises(NotFoundError, match="its session is over"):
            adapter.forward_backward(good, "cross_entropy").result()
        other.close("success").result()


def shifted(targets: Any) -> dict[str, Any]:
    return {"target_tokens": types.TensorData.from_numpy(np.asarray(targets, np.int64))}


def ask(world: TinkerWorld, route: str, body: Any, key: str | None = None) -> tuple[int, Any]:
    """Status and answer of a request that no client of ours would make."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(f"{world.url}/api/v1/{route}", data=data, method="POST")
    request.add_header("X-API-Key", world.key if key is None else key)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def test_strangers_learn_nothing_and_other_clients_are_told_what_is_missing(world: TinkerWorld, model: Path) -> None:
    with pytest.raises(AuthenticationError, match="needs its key"):
        world.client(key="tml-" + "0" * 40).create_lora_training_client(base_model=str(model)).result()
    for route in ("create_session", "retrieve_future", "no/such/route", "healthz"):
        assert ask(world, route, {}, key="tml-wrong")[0] == 401
    assert (world.directory / "tinker.key").stat().st_mode & 0o777 == 0o600
    assert ask(world, "forward", {})[0] == 404
    status, answer = ask(world, "optim_step", {"model_id": "x"})
    assert status == 422 and "seq_id" in answer["detail"]
    assert ask(world, "create_model", b"no json")[0] == 422
    assert ask(world, "forward_backward", b"\xff\xff\xff")[0] == 422
    assert ask(world, "session_heartbeat", {"session_id": "gone"})[0] == 410
    assert ask(world, "retrieve_future", {"request_id": "gone:1"})[0] == 404
    session = ask(world, "create_session", {"sdk_version": "99.0", "a_new_field": [1]})[1]["session_id"]
    old = {"session_id": session, "model_seq_id": 0, "base_model": str(model), "lora_config": {"rank": 4, "new": 1}}
    created = ask(world, "create_model", old)[1]["request_id"]
    assert ask(world, "retrieve_future", {"request_id": created})[1]["model_id"] == f"{session}:train:0"
    for number, rate in ((2, "NaN"), (3, "Infinity"), (1, '"fast"')):  # they come in another order than they are meant
        body = f'{{"model_id": "{session}:train:0", "seq_id": {number}, "adam_params": {{"learning_rate": {rate}}}}}'
        assert ask(world, "optim_step", body.encode())[0] == 200
    for number in (1, 2, 3):
        result = ask(world, "retrieve_future", {"request_id": f"{session}:train:0:{number}"})[1]
        assert result["category"] == "user" and "learning_rate" in result["error"] and "no step" in result["error"]
    assert ask(world, f"sessions/{session}/finish", {})[0] == 200
