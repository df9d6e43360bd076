"""Images of a batch: the table, tokens that name its entries, and both when batches are cut and joined."""

from dataclasses import replace
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from prime_hpc.store.batch.images import ImageTable, image_keys, image_runs, open_image
from prime_hpc.store.batch.rank_batch import RankBatch, decode_rank, encode_rank, select_micro_batches
from prime_hpc.store.batch.shared_prefixes import find_sharing, token_keys
from prime_hpc.trainer.batching.micro_batches import build_rank_batch, redistribute, refuse_untrainable

FIRST, SECOND, THIRD = b"first image", b"second", b"the third"


def numbers(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def batch_of(*samples: tuple[np.ndarray, tuple[bytes, ...]]) -> RankBatch:
    """A micro-batch for each sample, given by its images; token ids tell samples apart."""
    ids = [np.arange(len(images), dtype=np.int32) + 100 * i for i, (images, _) in enumerate(samples)]
    masks = [np.ones(len(i), bool) for i in ids]
    return build_rank_batch([[i] for i in range(len(ids))], ids, masks, images=list(samples))


def shown(batch: RankBatch, micro: int) -> list[bytes]:
    """The image of every token of a micro-batch; empty for text."""
    part = batch.micro_batch(micro)
    return [b"" if part.images is None or not n else part.encoded_image(n) for n in part.values("images").tolist()]


def test_a_table_holds_each_image_once() -> None:
    table = ImageTable()
    assert table.renumber(numbers(0, 2, 2, 0, 1), [FIRST, SECOND]).tolist() == [0, 2, 2, 0, 1]
    assert table.renumber(numbers(1, 1, 2), [SECOND, THIRD]).tolist() == [2, 2, 3]
    content, offsets = table.arrays()
    assert content.tobytes() == FIRST + SECOND + THIRD and offsets.tolist() == [0, 11, 17, 26]


def test_runs_end_where_the_number_changes_or_a_sequence_begins() -> None:
    found = image_runs(numbers(1, 1, 0, 2, 2, 1, 1), np.array([1, 0, 0, 0, 0, 0, 1], bool))
    assert found.tolist() == [[0, 2, 1], [3, 5, 2], [5, 6, 1], [6, 7, 1]]
    assert image_runs(numbers(), None).shape == image_runs(numbers(0, 0)).shape == (0, 3)


def test_a_file_holds_the_images_of_its_tokens(tmp_path: Path) -> None:
    batch = batch_of((numbers(0, 1, 1), (FIRST,)), (numbers(0, 0), ()), (numbers(2, 0, 1), (FIRST, SECOND)))
    raw = b"".join(bytes(part) for part in encode_rank(batch))
    found = decode_rank(np.frombuffer(raw, np.uint8), tmp_path / "file")
    assert [shown(found, i) for i in range(3)] == [[b"", FIRST, FIRST], [b"", b""], [SECOND, b"", FIRST]]
    assert raw.count(FIRST) == 1
    assert batch_of((numbers(0, 0), ())).images is None


def test_parts_of_several_batches_come_with_their_images() -> None:
    one = batch_of((numbers(1, 0), (FIRST,)), (numbers(0, 1), (SECOND,)))
    other = batch_of((numbers(0, 0, 0), ()), (numbers(2, 1, 0), (SECOND, THIRD)))
    text = batch_of((numbers(0, 0), ()))
    found = select_micro_batches([(other, 1), (one, 1), (text, 0), (other, 0)], 5)
    found.check()
    want = [[THIRD, SECOND, b""], [b"", SECOND], [b"", b""], [b"", b"", b""]]
    assert [shown(found, i) for i in range(4)] == want and found.num_micro_batches == 5
    assert found.image_bytes is not None and found.image_bytes.tobytes() == SECOND + THIRD
    ranks = [redistribute([one, other], rank, 3) for rank in range(3)]
    dealt = [image for rank in ranks for i in range(rank.num_micro_batches) for image in shown(rank, i) if image]
    assert sorted(dealt) == sorted([FIRST, SECOND, SECOND, THIRD])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"images": numbers(0, 2)}, "images: names image 2 of 1"),
        ({"images": numbers(0, -1)}, "images: holds values below 0"),
        ({"image_offsets": np.array([0, 4])}, "image_offsets: must grow from 0 to 11"),
        ({"image_offsets": np.array([0, 11, 11])}, "image_offsets: must grow from 0 to 11"),
        ({"image_bytes": None}, "image_bytes: must be there, as image"),
    ],
)
def test_a_table_that_does_not_fit_is_named(change: dict[str, np.ndarray], says: str) -> None:
    batch = batch_of((numbers(0, 1), (FIRST,)))
    batch.check()
    with pytest.raises(ValueError, match=says):
        replace(batch, **change).check()


def test_prompts_are_shared_up_to_the_first_other_image() -> None:
    ids = np.arange(6, dtype=np.int32)
    same, other = numbers(0, 1, 1, 0, 0, 0), numbers(0, 1, 1, 0, 0, 0)
    keys = [token_keys(ids, None, image_keys(n, [image])) for n, image in ((same, FIRST), (other, SECOND))]
    assert find_sharing([keys[0], keys[0]], [0, 0]).prefixes.tolist() == [6, 6]
    assert find_sharing(keys, [0, 0]).prefixes.tolist() == [1, 1]
    assert token_keys(ids, None, np.zeros(6, np.int64)).tolist() == ids.tolist()


def test_a_trainer_of_many_runs_refuses_a_batch_with_images() -> None:
    with pytest.raises(ValueError, match="holds images, and a trainer of many runs takes text alone"):
        refuse_untrainable(batch_of((numbers(0, 1), (FIRST,))), 1000, 64)


@pytest.mark.parametrize(
    ("mode", "kind", "orientation"),
    [("RGBA", "PNG", 0), ("LA", "PNG", 0), ("P", "PNG", 0), ("L", "PNG", 0), ("RGB", "JPEG", 6), ("CMYK", "JPEG", 0)],
)
def test_an_image_is_opened_as_the_engine_opens_it(mode: str, kind: str, orientation: int) -> None:
    """Upright, and on white where it is transparent."""
    image = pytest.importorskip("vllm.multimodal.image")
    picture = Image.effect_mandelbrot((48, 32), (-2, -1.5, 1, 1.5), 50).convert(mode)
    if "A" in mode:
        picture.putalpha(Image.linear_gradient("L").resize((48, 32)))
    exif = picture.getexif()
    if orientation:
        exif[0x0112] = orientation
    file = BytesIO()
    picture.save(file, kind, exif=exif, **({"transparency": 3} if mode == "P" else {}))
    found = open_image(file.getvalue())
    wanted = image.convert_image_mode(image.normalize_image(Image.open(file)), "RGB")
    assert found.mode == "RGB" and found.size == wanted.size == ((32, 48) if orientation else (48, 32))
    assert found.tobytes() == wanted.tobytes()
