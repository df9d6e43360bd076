"""Rows with images as training data: where images are read from, the tokens that stand for them, the way to a rank."""

import base64
import json
import threading
from collections.abc import Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prime_hpc.config.sections.sft import SFTDataConfig
from prime_hpc.runtime.failures import is_permanent
from prime_hpc.store.batch.images import image_runs
from prime_hpc.store.dataset.files import find_data
from prime_hpc.store.io import retry_reads
from prime_hpc.trainer.batching.image_inputs import ImageInputs
from prime_hpc.trainer.data.samples import RowResult, SFTSample
from prime_hpc.trainer.data.stream import Batch, BatchShape, Position, RowOrder, SampleStream
from prime_hpc.trainer.data.workers import Recipe, RowProcesses, RowReader
from prime_hpc.trainer.rank_group import RankGroup
from tests.support.failing_reads import failing_reads
from tests.support.tiny_vision import make_image, make_vision_model
from tests.unit.test_sft_stream import Peers, ThreadRanks

SMALL, LARGE = make_image(1), make_image(2, 64, 64)
"""Of 6 and of 16 tokens."""
ASKED = {"type": "text", "text": "name"}
ANSWER = {"role": "assistant", "content": "number"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model(tmp_path_factory.mktemp("model"))


def recipe_for(rows: Sequence[Any], folder: Path, model: Path, *, sees: bool = True, **config: Any) -> Recipe:
    """Write rows with images beside them; return how they become samples."""
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    for name in ("small.png", "a small.png"):
        (folder / name).write_bytes(SMALL)
    return recipe_of_file(file, folder, model, sees=sees, **config)


def recipe_of_file(file: Path, folder: Path, model: Path, *, sees: bool = True, **config: Any) -> Recipe:
    data = SFTDataConfig(path=str(file), **config)
    return Recipe(data, data, find_data(data), folder / "cache", model, False, False, 128, 384, sees)


def results(recipe: Recipe) -> list[RowResult]:
    reader = RowReader(recipe)
    return reader(range(recipe.open_rows().num_rows))


def turn(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [*parts, ASKED]}, ANSWER]}


def data_url(image: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(image).decode()


FORMS: dict[str, dict[str, Any]] = {
    "data url": turn({"type": "image_url", "image_url": {"url": data_url(SMALL)}}),
    "path": turn({"type": "image", "image": "small.png"}),
    "url of a file": turn({"type": "image_url", "image_url": {"url": "file://a%20small.png"}}),
    "url of a path": turn({"type": "image_url", "image_url": "small.png"}),
    "column": {**turn({"type": "image"}), "images": ["small.png"]},
    "bytes and path": {**turn({"type": "image"}), "images": [{"bytes": None, "path": "small.png"}]},
    "one of a column": {**turn({"type": "image"}), "images": "small.png"},
    "mark": {"messages": [{"role": "user", "content": "<image>name"}, ANSWER], "images": ["small.png"]},
    "prompt": {"prompt": "<image>name", "completion": "number", "images": ["small.png"]},
}


def test_every_way_to_state_an_image_gives_the_same_sample(tmp_path: Path, model: Path) -> None:
    made = results(recipe_for(list(FORMS.values()), tmp_path, model))
    assert [one.error for one in made] == [None] * len(FORMS)
    found = [one.samples[0] for one in made]
    assert all(one.image_data == (SMALL,) for one in found)
    assert {tuple(one.token_ids.tolist()) for one in found} == {tuple(found[0].token_ids.tolist())}
    [one] = [found[0]]
    assert one.images is not None
    [(first, end, number)] = image_runs(one.images).tolist()
    assert (end - first, number) == (6, 1) and not one.loss_mask[: end + 1].any() and one.loss_mask.any()
    token = json.loads((model / "config.json").read_text())["image_token_id"]
    assert set(one.token_ids[first:end]) == {token} and token not in one.token_ids[one.images == 0]


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("measures", [(16, 16), (700, 20), (33, 47), (640, 480), (3, 5)])
def test_as_many_tokens_as_the_trainers_processor_makes_embeddings(
    tmp_path: Path, model: Path, kind: str, measures: tuple[int, int]
) -> None:
    from PIL import Image

    buffer = BytesIO()
    Image.new("RGB", measures, (1, 2, 3)).save(buffer, kind)
    [made] = results(recipe_for([turn({"type": "image", "image": data_url(buffer.getvalue())})], tmp_path, model))
    inputs = ImageInputs.load(model, 2)
    wanted = inputs.num_tokens(inputs.pixels(buffer.getvalue()))
    if not made.samples:  # longer than a sample may be
        assert made.counts.overlong == 1 and wanted > 100
        return
    numbers = made.samples[0].images
    assert numbers is not None and np.count_nonzero(numbers) == wanted


def test_several_images_of_a_conversation_and_turns_of_their_own(tmp_path: Path, model: Path) -> None:
    first, second = data_url(LARGE), "small.png"
    talk = [
        *turn({"type": "image", "image": first})["messages"],
        *turn({"type": "image", "image": second}, {"type": "image", "image": first})["messages"],
    ]
    [whole] = results(recipe_for([{"messages": talk}], tmp_path, model))[0].samples
    assert whole.images is not None and whole.image_data == (LARGE, SMALL, LARGE)
    assert (np.diff(image_runs(whole.images)[:, :2]).ravel()).tolist() == [16, 6, 16]
    one, two = results(recipe_for([{"messages": talk}], tmp_path, model, split_turns=True))[0].samples
    assert (one.image_data, two.image_data) == ((LARGE,), (LARGE, SMALL, LARGE))
    assert two.token_ids.tolist() == whole.token_ids.tolist()
    assert one.token_ids.tolist() == whole.token_ids[: len(one.token_ids)].tolist()


def test_a_sample_is_cut_before_an_image_that_does_not_fit(tmp_path: Path, model: Path) -> None:
    talk = [*FORMS["path"]["messages"], *turn({"type": "image", "image": data_url(LARGE)})["messages"]]
    recipe = recipe_for([{"messages": talk}], tmp_path, model)
    [whole] = results(recipe)[0].samples
    assert whole.images is not None
    second = int(np.flatnonzero(whole.images == 2)[0])
    for length, kept in ((second + 5, second), (second + 16, second + 16), (second, second)):
        [cut] = results(replace(recipe, seq_len=length, config=SFTDataConfig(overlong="truncate")))[0].samples
        assert len(cut.token_ids) == kept and cut.image_data == (SMALL, LARGE)[: 1 + (kept > second)]
        assert cut.images is not None and cut.images.max() == len(cut.image_data)
    [error] = results(replace(recipe, seq_len=second, config=SFTDataConfig(overlong="error")))
    assert f"{len(whole.token_ids)} tokens (22 of them images), more than seq_len" in str(error.error)


def test_rows_of_the_hub_library_and_parquet_keep_the_bytes(tmp_path: Path, model: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"prompt": "<image>name", "completion": "number", "images": [{"bytes": SMALL, "path": None}]}] * 2
    features = datasets.Features(
        {"prompt": datasets.Value("string"), "completion": datasets.Value("string")}
        | {"images": datasets.List(datasets.Image())}
    )
    made = datasets.Dataset.from_list(rows, features=features)
    made.save_to_disk(tmp_path / "saved")
    made.to_parquet(tmp_path / "rows.parquet")
    for path in (tmp_path / "saved", tmp_path / "rows.parquet"):
        recipe = recipe_of_file(path, tmp_path, model)
        assert [one.samples[0].image_data for one in results(recipe)] == [(SMALL,)] * 2
        assert recipe.open_rows().fingerprint == recipe.open_rows().fingerprint
        unseen = replace(recipe, sees_images=False)
        assert "images" not in unseen.open_rows().row(0)


BROKEN: dict[str, tuple[Any, list[str]]] = {
    "missing": (turn({"type": "image", "image": "no.png"}), ["image no.png", "No such file", "relative paths"]),
    "torn": (turn({"type": "image", "image": data_url(LARGE[:-900])}), ["cannot be decoded"]),
    "no image": (turn({"type": "image", "image": data_url(b"text")}), ["cannot be decoded"]),
    "no base64": (turn({"type": "image", "image": "data:image/png;base64,?"}), ["no base64"]),
    "no word of it": (
        turn({"type": "image", "image": "data:image/png,YWJj"}),
        ["image data:image/png,", "no data: URL"],
    ),
    "of the web": (turn({"type": "image", "image": "https://x/a.png"}), ["https://x/a.png", "not downloaded"]),
    "too long": (turn({"type": "image", "image": data_url(make_image(1, 1024, 2))}), ["1024 x 2 pixels", "crop"]),
    "too many": ({**turn({"type": "image"}), "images": ["small.png"] * 3}, ["holds 3", "2 of them have no place"]),
    "too few": (turn({"type": "image"}), ["more places for images than the 0"]),
    "no place": ({"prompt": "name", "completion": "a", "images": ["small.png"]}, ["holds 1", "<image>"]),
    "spelt": (
        {"prompt": "<image><|image_pad|>", "completion": "a", "images": ["small.png"]},
        ["1 images, and 2 places", "sft.data.chat_template"],
    ),
    "number": (turn({"type": "image", "image": 3}), ["path, a data: URL or bytes, got 3"]),
    "video": (turn({"type": "video", "video": "a.mp4"}), ["type video", "only text and images"]),
    "video of a column": (
        {"prompt": "<video>name", "completion": "a", "videos": ["a.mp4"]},
        ["<video> in a message", "only text and images"],
    ),
}


@pytest.mark.parametrize("name", list(BROKEN))
def test_an_image_that_cannot_be_shown_is_named_with_its_row(tmp_path: Path, model: Path, name: str) -> None:
    row, words = BROKEN[name]
    recipe = recipe_for([FORMS["path"], row], tmp_path, model)
    fine, made = results(recipe)
    assert fine.error is None and f"{tmp_path / 'rows.jsonl'}:2: " in str(made.error)
    assert all(word in str(made.error) for word in words), made.error
    skipped = results(replace(recipe, config=SFTDataConfig(bad_rows="skip")))[1]
    assert (skipped.error, skipped.counts.bad) == (None, 1)


def test_an_image_that_cannot_be_read_now_is_no_bad_row(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_for([FORMS["path"]], tmp_path, model, bad_rows="skip")
    with failing_reads(monkeypatch, tmp_path / "small.png", 2):
        (made,) = results(recipe)
    assert made.counts.bad == 0 and len(made.samples) == 1
    monkeypatch.setattr(retry_reads, "FILE_S", 0.1)
    with failing_reads(monkeypatch, tmp_path / "small.png"), pytest.raises(OSError, match="Input/output") as found:
        results(recipe)
    assert not is_permanent(found.value) and found.value.filename == str(tmp_path / "small.png")


def test_a_huge_image_is_refused_before_it_is_decoded(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from PIL import Image

    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 3000)
    rows = [turn({"type": "image", "image": data_url(make_image(1, 64, side))}) for side in (32, 48, 640)]
    small, large, bomb = results(recipe_for(rows, tmp_path, model))
    assert small.error is None and "64 x 48 pixels, more than 3,000; make it smaller" in str(large.error)
    assert "make it smaller" in str(bomb.error)


def test_without_the_key_images_are_refused(tmp_path: Path, model: Path) -> None:
    rows = [FORMS["path"], FORMS["data url"], {"prompt": "<image>name", "completion": "a", "images": ["x.png"]}]
    one, two, three = results(recipe_for(rows, tmp_path, model, sees=False))
    assert "only text" in str(one.error) and "model.vision" in str(one.error) and "model.vision" in str(two.error)
    assert three.error is None, "a column that nothing asks for"


def test_a_token_of_an_image_without_one_is_refused(tmp_path: Path, model: Path) -> None:
    token = json.loads((model / "config.json").read_text())["image_token_id"]
    spelt = recipe_for([{"text": "a"}], tmp_path, model).load_tokenizer().decode([token])
    rows = [{"input_ids": [5, token, 6]}, {"text": spelt}, {"text": "a"}]
    [ids, text, plain] = results(recipe_for(rows, tmp_path, model))
    assert plain.error is None
    assert all(f"token {token} stands for an image, and the row has none" in str(row.error) for row in (ids, text))


def mixed_rows() -> list[Any]:
    """Rows with no image, one, or two of them."""
    rows: list[Any] = [{"prompt": f"name {i}", "completion": "number" * (1 + i % 3)} for i in range(12)]
    for i in (1, 4, 5, 9):
        images = [make_image(i, 16 * (1 + i % 3)), SMALL][: 1 + i % 2]
        rows[i]["prompt"] = "a".join(["<image>"] * len(images)) + f"name {i}"
        rows[i]["images"] = [data_url(image) for image in images]
    return rows


def shown(batches: Sequence[Batch]) -> list[tuple[int, list[int], list[tuple[int, bytes]]]]:
    """Each sample's row, tokens and images with their place, in a fixed order."""
    found = []
    for batch in batches:
        ranked = batch.ranked
        ranked.check()
        for i, (a, b) in enumerate(zip(ranked.seq_offsets[:-1].tolist(), ranked.seq_offsets[1:].tolist(), strict=True)):
            numbers = np.zeros(b - a, np.int32) if ranked.images is None else ranked.images[a:b]
            table = [ranked.encoded_image(n) for n in range(1, 1 + int(numbers.max(initial=0)))]
            images = [(int(first), table[n - 1]) for first, _, n in image_runs(numbers).tolist()]
            found.append((int(ranked.sample_ids[i]), ranked.token_ids[a:b].tolist(), images))
    return sorted(found)


def stream_of(make: Any, num_rows: int, ranks: RankGroup, **shape: Any) -> SampleStream:
    wanted = BatchShape(**({"batch_size": 5, "batch_tokens": None, "micro_batch_tokens": 128} | shape))
    order = RowOrder(num_rows, seed=3, shuffle=True)
    return SampleStream(
        make, order, wanted, ranks, share=ranks.rank, num_shares=ranks.world_size, last_row=2 * num_rows
    )


def all_of(stream: SampleStream) -> list[Batch]:
    batches: list[Batch] = []
    while (batch := stream.next()) is not None:
        batches.append(batch)
    return batches


@pytest.mark.parametrize("shape", [{}, {"pack": False, "rows": 2, "pad_multiple": 32}])
def test_ranks_get_the_images_of_their_samples_whoever_read_them(
    tmp_path: Path, model: Path, shape: dict[str, Any]
) -> None:
    recipe = recipe_for(mixed_rows(), tmp_path, model)
    reader = RowReader(recipe)
    alone = all_of(stream_of(reader, 12, RankGroup(10), **shape))
    peers, found = Peers(3), {}

    def on_rank(rank: int) -> None:
        found[rank] = all_of(stream_of(RowReader(recipe), 12, ThreadRanks(peers, rank), **shape))

    threads = [threading.Thread(target=on_rank, args=(rank,), daemon=True) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200)
    for step, batch in enumerate(alone):
        assert shown([found[rank][step] for rank in range(3)]) == shown([batch])
    assert sum(len(images) for *_, images in shown(alone)) == 2 * 7


def test_a_stream_goes_on_in_the_middle_with_the_same_images(tmp_path: Path, model: Path) -> None:
    reader = RowReader(recipe_for(mixed_rows(), tmp_path, model))
    whole = all_of(stream_of(reader, 12, RankGroup(10)))
    resumed = stream_of(reader, 12, RankGroup(10))
    resumed.start(whole[1].position)
    assert [shown([batch]) for batch in all_of(resumed)] == [shown([batch]) for batch in whole[2:]]
    assert whole[0].position != Position()


@pytest.mark.exhaustive
def test_processes_that_read_ahead_give_the_same_samples(tmp_path: Path, model: Path) -> None:
    recipe = recipe_for(mixed_rows()[:6], tmp_path, model)
    processes = RowProcesses(recipe, 1)
    try:
        ahead = processes(range(6))
    finally:
        processes.close()
    for one, other in zip(ahead, RowReader(recipe)(range(6)), strict=True):
        for a, b in zip(one.samples, other.samples, strict=True):
            assert a.token_ids.tolist() == b.token_ids.tolist() and a.image_data == b.image_data
            again = SFTSample.unpacked(a.packed(), len(a.token_ids))
            assert (again.images is None) == (a.images is None) and again.image_data == a.image_data
            assert again.token_ids.tolist() == a.token_ids.tolist() and len(a.packed()) == a.num_bytes
            assert a.images is None or (again.images is not None and again.images.tolist() == a.images.tolist())
