"""Episodes with images through real verifiers against a scripted token server: tokens, bytes, refusals."""

import base64
import functools
import http.server
import importlib.util
import io
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from prime_hpc.config.sections.orchestrator import EnvConfig
from prime_hpc.config.sections.sampling import SamplingConfig
from prime_hpc.envs.errors import EnvError
from prime_hpc.envs.images import encode_image
from prime_hpc.envs.pool_settings import ChatOptions
from prime_hpc.envs.samples import EpisodeResult, EpisodeState, Sample
from prime_hpc.starter.vision import CHAT_TEMPLATE
from prime_hpc.store.batch.images import image_runs
from prime_hpc.store.io import retry_reads
from tests.support.album import PICTURES, picture
from tests.support.env_world import World
from tests.support.failing_reads import failing_reads
from tests.support.inference_server import ServerProcess
from tests.support.scripted_api import ScriptedApi
from tests.support.scripted_server import Reply, experts_of, tokens_of
from tests.support.tiny_vision import make_vision_model, make_vision_tokenizer

pytestmark = pytest.mark.slow

CAMERA = "tests.support.camera"
LOOK = '<tool_call>\n{"name": "camera_tools_look", "arguments": {}}\n</tool_call>'


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """Environments whose policy sees."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))  # of tool servers and workers
    folder = tmp_path / "tokenizer"
    made = World(make_vision_tokenizer(folder), folder)
    with made.server:
        yield made


def a_png(colour: str = "red", size: tuple[int, int] = (48, 32)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, "PNG")
    return file.getvalue()


def sent_images(request: dict[str, Any]) -> list[bytes]:
    return [base64.b64decode(part["url"].partition(",")[2]) for part in request["content_parts"]]


def check_images(sample: Sample, world: World) -> None:
    """Tokens and images are those of the last request, token for token and byte for byte."""
    request = world.server.requests[-1]
    expanded, places = world.server._expand(request)
    assert sample.token_ids[: len(expanded)].tolist() == expanded
    assert sample.images is not None and sample.images.dtype == np.int32
    runs = image_runs(sample.images)
    assert [(int(a), int(b - a)) for a, b, _ in runs] == [(p["offset"], p["length"]) for p in places]
    assert [sample.image_data[number - 1] for _, _, number in runs] == sent_images(request)


def test_an_image_is_the_tokens_that_the_engine_saw_and_the_bytes_that_it_got(world: World) -> None:
    world.script = lambda prompt, number: "red"
    world.server.version = 4
    world.server.records_experts = True
    (result,) = world.play(EnvConfig(id="shapes", args={"kinds": ["colour"]}), vision=True)
    assert result.usable, result.reason
    (sample,), (request,) = result.samples, world.server.requests
    check_images(sample, world)
    (image,) = sample.image_data
    assert (
        image.startswith(b"\x89PNG")
        and sample.images is not None
        and np.count_nonzero(sample.images) == tokens_of(image) > 1
    )
    assert request["token_ids"].count(world.tokenizer.convert_tokens_to_ids("<|image_pad|>")) == 1
    assert set(sample.versions[sample.loss_mask].tolist()) == {4}
    assert sample.routed is not None and np.array_equal(sample.routed[:-1], experts_of(0, sample.num_tokens - 1))
    assert "[image 64x64 png, 0.2 kB] What colour is the shape?" in result.prompt_text
    assert result.num_prompt_tokens == sample.num_tokens - sample.num_loss_tokens


def test_images_of_the_prompt_and_of_tools_stay_through_the_turns(world: World) -> None:
    shown = a_png()
    world.script = lambda prompt, number: LOOK if number < 2 else "a cat"
    env = EnvConfig(id=CAMERA, args={"shown": encode_image(shown)}, max_turns=3)
    (result,) = world.play(env, vision=True)
    assert result.usable and result.reward == 1.0, (result.reason, result.completion_text)
    (sample,) = result.samples  # one: each turn has extended the tokens of the one before
    check_images(sample, world)
    assert sent_images(world.server.requests[-1]) == [shown, b"no picture", b"no picture"]
    assert sample.image_data == (shown, b"no picture") and sample.num_turns == 3
    assert result.completion_text.count("[image png, 0.0 kB]") == 2


def test_images_of_later_user_turns_extend_the_tokens_so_far(world: World) -> None:
    world.script = lambda prompt, number: "seen"
    (result,) = world.play(EnvConfig(id="tests.support.album"), vision=True)
    assert result.usable, result.reason
    (sample,) = result.samples
    check_images(sample, world)
    assert sent_images(world.server.requests[-1]) == [picture(i) for i in range(len(PICTURES))]
    assert sample.image_data == (picture(0), picture(1)) and sample.num_turns == len(PICTURES)
    assert "[user] Page 2 [image 32x48 png, 0.1 kB] ?" in result.completion_text


@pytest.mark.exhaustive
def test_a_tools_image_is_named_to_a_policy_that_sees_none(world: World) -> None:
    world.script = lambda prompt, number: "a cat" if "picture (image/png)" in prompt else LOOK
    (result,) = world.play(EnvConfig(id=CAMERA, max_turns=2), renderer="qwen3-vl")
    assert result.usable and result.reward == 1.0 and result.metrics["num_turns"] == 2, result.completion_text
    assert "content_parts" not in world.server.requests[-1]
    prompt = world.tokenizer.decode(world.server.requests[-1]["token_ids"])
    assert "a cat\n[a picture (image/png), which cannot be shown here: prompts are text]" in prompt
    assert result.samples[0].images is None and result.samples[0].image_data == ()


def test_qwen3_5_writes_images_as_its_template_does(tmp_path: Path) -> None:
    """Its think section included."""
    folder = tmp_path / "tokenizer"
    tokenizer = make_vision_tokenizer(folder)
    tokenizer.chat_template = CHAT_TEMPLATE.replace("assistant\\n'", "assistant\\n<think>\\n\\n</think>\\n\\n'")
    tokenizer.save_pretrained(folder)
    world = World(tokenizer, folder)
    world.script = lambda prompt, number: "seen"
    with world.server:
        (result,) = world.play(EnvConfig(id="tests.support.album"), vision=True)
        assert result.usable, result.reason
        assert "<think>\n\n</think>" in tokenizer.decode(world.server.requests[0]["token_ids"])
        for sample in result.samples:
            assert sample.images is not None and len(image_runs(sample.images)) in (1, 2, 3)
        check_images(result.samples[-1], world)


def test_a_template_without_a_renderer_writes_images_itself(tmp_path: Path) -> None:
    """Of Qwen2.5-VL, which begins each conversation with a system message, and whose vocabulary knows no thoughts."""
    folder = tmp_path / "tokenizer"
    tokenizer = make_vision_tokenizer(folder)
    tokenizer.chat_template = "{{- '<|im_start|>system\nYou help.<|im_end|>\n' -}}" + CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    world = World(tokenizer, folder)
    world.script = lambda prompt, number: "seen"
    with world.server:
        (result,) = world.play(EnvConfig(id="tests.support.album"), vision=True, renderer="default")
        assert result.usable, result.reason
        (sample,) = result.samples
        check_images(sample, world)
        assert sample.image_data == (picture(0), picture(1)) and sample.num_turns == len(PICTURES)
        assert tokenizer.decode(world.server.requests[0]["token_ids"]).startswith("<|im_start|>system\nYou help.")
    tokenizer.chat_template = CHAT_TEMPLATE.replace("<|image_pad|>", "")
    tokenizer.save_pretrained(folder)
    with pytest.raises(EnvError, match=r"renderer 'default' writes prompts without images"):
        World(tokenizer, folder).play(EnvConfig(id="tests.support.album"), vision=True, renderer="default")


@pytest.mark.usefixtures("forked_hosts")
def test_workers_play_the_same(world: World) -> None:
    world.script = lambda prompt, number: "red 2"
    env: dict[str, Any] = {"id": "shapes", "args": {"seed": 3}}
    ours = world.play(EnvConfig(**env), 4, vision=True)
    theirs = world.play(EnvConfig(**env, workers=1), 4, vision=True)
    for left, right in zip(ours, theirs, strict=True):
        assert (left.prompt_text, left.usable) == (right.prompt_text, True)
        (one,), (other,) = left.samples, right.samples
        assert one.image_data == other.image_data and one.image_data
        for name in ("token_ids", "images", "loss_mask", "logprobs", "versions"):
            a, b = getattr(one, name), getattr(other, name)
            assert a.dtype == b.dtype and np.array_equal(a, b)


def test_a_file_or_an_address_is_read_once(world: World, tmp_path: Path) -> None:
    (tmp_path / "a b.png").write_bytes(a_png("blue"))
    handler = functools.partial(CountingFiles, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/a%20b.png"
        world.script = lambda prompt, number: LOOK if number == 0 else "a cat"
        for shown in (address, str(tmp_path / "a b.png"), (tmp_path / "a b.png").as_uri()):
            two_turns = EnvConfig(id=CAMERA, args={"shown": shown}, max_turns=2)
            env = two_turns if shown == address else asking(tmp_path, shown)
            (result,) = world.play(env, vision=True)
            assert result.usable, result.reason
            assert result.samples[0].image_data[0] == a_png("blue")
        server.shutdown()
    assert CountingFiles.asked == 1


class CountingFiles(http.server.SimpleHTTPRequestHandler):
    """Files, and how often one was asked for."""

    asked = 0

    def do_GET(self) -> None:
        CountingFiles.asked += 1
        super().do_GET()

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


def asking(folder: Path, *parts: str, system: str | None = None) -> EnvConfig:
    """An environment of one row: `parts` are texts or URLs of images."""
    content = [
        {"type": "image_url", "image_url": {"url": part}}
        if part.startswith(("data:", "/", "file:", "http"))
        else {"type": "text", "text": part}
        for part in parts
    ]
    messages = [{"role": "system", "content": system}] if system else []
    row = {"messages": [*messages, {"role": "user", "content": content}]}
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    return EnvConfig(id="prompts", args={"files": [str(folder / "rows.jsonl")]})


@pytest.mark.parametrize(
    ("shown", "reason"),
    [
        ("/nowhere/at/all.png", "image '/nowhere/at/all.png' cannot be read: "),
        (__file__, "is no image: it begins with"),
        ("data:text/plain,hello", "an image is not sent as a data: URL"),
        ("data:image/png;base64,@@", "its text is no base64"),
    ],
)
def test_what_is_no_image_fails_its_episode_with_the_reason(
    shown: str, reason: str, world: World, tmp_path: Path
) -> None:
    world.script = lambda prompt, number: "a cat"
    (result,) = world.play(asking(tmp_path, shown, "what?"), vision=True)
    assert not result.usable and reason in result.reason, result.reason


def test_an_image_that_cannot_be_read_is_read_again(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.script = lambda prompt, number: "a cat"
    path = tmp_path / "a.png"
    path.write_bytes(a_png())
    with failing_reads(monkeypatch, path, 2):
        (result,) = world.play(asking(tmp_path, str(path), "what?"), vision=True)
    assert result.usable, result.reason
    monkeypatch.setattr(retry_reads, "FILE_S", 0.1)
    with failing_reads(monkeypatch, path):
        (result,) = world.play(asking(tmp_path, str(path), "what?"), vision=True)
    assert "cannot be read: " in result.reason and "waited 0 s" in result.reason


def test_a_renderer_without_images_is_refused_when_the_environment_loads(world: World) -> None:
    with pytest.raises(EnvError, match=r"renderer 'qwen3' writes prompts without images.*model\.renderer"):
        world.play(EnvConfig(id="shapes"), renderer="qwen3", vision=True)
    (result,) = world.play(EnvConfig(id="shapes"), renderer="qwen3")
    assert not result.usable and "a user message holds image_url" in result.reason and "model.vision" in result.reason


def test_the_context_is_counted_in_the_engines_tokens(world: World, tmp_path: Path) -> None:
    """What a reply has beyond it, as only the engine knows how many tokens an image is, is cut off."""
    env = asking(tmp_path, encode_image(a_png()), "what?")

    def play(**options: Any) -> EpisodeResult:
        (result,) = world.play(env, vision=True, **options)
        return result

    world.script = lambda prompt, number: "a cat"
    world.server.records_experts = True
    whole = play().samples[0]
    cut = play(max_model_len=whole.num_tokens - 2)
    assert cut.usable and cut.truncated
    (sample,) = cut.samples
    assert sample.num_tokens == whole.num_tokens - 2 and sample.num_loss_tokens == whole.num_loss_tokens - 2 > 0
    assert np.array_equal(sample.token_ids, whole.token_ids[:-2])
    assert np.array_equal(sample.logprobs, whole.logprobs[:-2])
    assert sample.routed is not None and len(sample.routed) == sample.num_tokens
    full = play(max_model_len=whole.num_tokens - whole.num_loss_tokens)
    assert not full.usable and full.error_type == "ContextFullError" and "the model's context" in full.reason
    world.server.failure = "The decoder prompt (length 900) is longer than the maximum model length of 400."
    world.script = lambda prompt, number: Reply(status=400)
    assert play().error_type == "ContextFullError"
    world.server.failure = "cannot identify image file"
    assert play().error_type == "RequestRefusedError"


@pytest.mark.exhaustive
def test_images_and_their_places_must_agree(world: World, tmp_path: Path) -> None:
    world.script = lambda prompt, number: "a cat"
    (result,) = world.play(asking(tmp_path, encode_image(a_png()), "what is <|image_pad|>?"), vision=True)
    assert not result.usable and "the prompt has 1 images, and 2 tokens that stand for one" in result.reason
    world.script = lambda prompt, number: LOOK.replace("{}", '{"a": "<|image_pad|>"}')
    (result,) = world.play(EnvConfig(id=CAMERA, max_turns=3), vision=True)
    assert not result.usable and "the model has sampled a token that stands for an image" in result.reason
    world.script = lambda prompt, number: "a <|image_pad|>"  # the last reply: no turn takes it for an image
    (result,) = world.play(asking(tmp_path, encode_image(a_png()), "what?"), vision=True)
    assert result.usable
    check_images(result.samples[0], world)


def test_an_api_gets_images_as_they_are_and_supervised_rows_keep_them(world: World, tmp_path: Path) -> None:
    """What is a file, which no API can read, goes as bytes."""
    (tmp_path / "a.png").write_bytes(a_png())
    bodies: list[list[dict[str, Any]]] = []

    def reply(messages: list[dict[str, Any]]) -> str:
        bodies.append(messages)
        return "seen"

    inline, address = encode_image(a_png()), "https://example.org/a.png"
    with ScriptedApi(reply) as api:
        options: dict[str, Any] = {"urls": [api.url], "chat": ChatOptions(60, 0), "keep_samples": False}
        for shown in (inline, address, str(tmp_path / "a.png")):
            env = asking(tmp_path, shown, "what?")
            (result,) = world.play(env, keep_messages=True, **options)
            assert result.state is EpisodeState.COMPLETED, result.reason
            sent = address if shown == address else inline
            parts = [{"type": "image_url", "image_url": {"url": sent}}, {"type": "text", "text": "what?"}]
            assert [message["content"] for message in bodies[-1]] == [parts]
            assert result.conversations[0]["messages"][0] == {"role": "user", "content": parts}
            assert len(result.prompt_text) < 100 and result.prompt_text.startswith("[user] [image ")


@pytest.mark.parametrize("answer", [{"mm_placeholders": None}, {"mm_placeholders": {"image": []}}])
def test_a_server_that_does_not_say_where_it_saw_images_is_none_of_ours(
    answer: dict[str, Any], world: World, tmp_path: Path
) -> None:
    world.script = lambda prompt, number: Reply("a cat", answer=answer)
    (result,) = world.play(asking(tmp_path, encode_image(a_png()), "what?"), vision=True)
    assert result.error_type == "ProviderError" and "does not say where" in result.reason


@pytest.mark.timeout(600)
@pytest.mark.skipif(importlib.util.find_spec("torchvision") is None, reason="no torchvision, which vLLM needs")
def test_with_a_real_engine(tmp_path: Path) -> None:
    """A conversation of three pictures, and a prompt that is too long in the engine's tokens alone."""
    model = make_vision_model(tmp_path / "model")
    tree = {"model": {"name": str(model), "dtype": "float32", "vision": "frozen"}}
    server = ServerProcess(tmp_path / "run", model, seq_len=256, tree=tree)
    world = World(None, model)
    try:
        world.server.port = server.wait_ready().port
        options: dict[str, Any] = {"vision": True, "max_model_len": 256}
        results = world.play(EnvConfig(id="tests.support.album"), 4, sampling=SamplingConfig(max_tokens=8), **options)
        whole = [result for result in results if result.usable]  # else one has sampled a token of an image
        assert whole, [result.reason for result in results]
        for result in whole:
            (sample,) = result.samples
            assert sample.images is not None and sample.num_turns == 3 and 3 <= sample.num_loss_tokens <= 24
            runs = image_runs(sample.images)
            lengths = [width * height // 256 for _, (width, height) in PICTURES]
            assert [(int(b - a), int(n)) for a, b, n in runs] == list(zip(lengths, (1, 2, 1), strict=True))
            assert sample.image_data == (picture(0), picture(1))
        full = tmp_path / "full.png"
        full.write_bytes(a_png(size=(256, 256)))
        (result,) = world.play(asking(tmp_path, str(full), "what?"), **options)
        assert result.error_type == "ContextFullError", result.reason
        full.write_bytes(a_png(size=(256, 192)))
        (result,) = world.play(asking(tmp_path, str(full), "what?"), sampling=SamplingConfig(max_tokens=250), **options)
        assert result.usable and result.samples[0].num_tokens <= 256, result.reason
        full.write_bytes(a_png()[:60])
        (result,) = world.play(asking(tmp_path, str(full), "what?"), **options)
        assert result.error_type == "RequestRefusedError", result.reason
    finally:
        server.close()
