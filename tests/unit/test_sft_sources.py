"""Rows by number out of JSON lines, compressed files, Parquet and data sets of `datasets`."""

import errno
import gzip
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from prime_hpc.config.sections.sft import SFTDataConfig, SFTEvalConfig
from prime_hpc.store.dataset.files import find_data, first_columns, first_parquet_rows, missing_columns
from prime_hpc.trainer.data import build, patient_file, sources
from prime_hpc.trainer.data.messages import SFTDataError
from prime_hpc.trainer.data.sources import Rows, fingerprint_of, former_fingerprint, open_rows
from prime_hpc.trainer.data.workers import Recipe, RowReader


def rows_of(count: int, first: int = 0) -> list[dict[str, Any]]:
    return [{"prompt": f"p{i}", "completion": "é" * (i % 7)} for i in range(first, first + count)]


def lines(rows: list[dict[str, Any]]) -> bytes:
    return "\n".join(json.dumps(row, ensure_ascii=False) for row in rows).encode()


def opened(cache: Path, **config: Any) -> Rows:
    source = SFTDataConfig(**config)
    return open_rows(source, find_data(source), cache)


def read(rows: Rows) -> list[Any]:
    return [rows.row(i) for i in range(rows.num_rows)]


def test_lines_are_found_whatever_the_blocks_and_blank_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = rows_of(40)
    text = b"\n \n" + lines(content[:20]) + b"\r\n\r\n\t\n" + b" " * 40 + b"\n" + lines(content[20:])
    for block in (1, 7, 64, 2**20):
        monkeypatch.setattr(sources, "_BLOCK", block)
        for end in (b"", b"\n", b"\n \n"):
            (tmp_path / "a.jsonl").write_bytes(text + end)
            rows = opened(tmp_path / f"cache-{block}-{len(end)}", path=tmp_path / "a.jsonl")
            assert read(rows) == content
    assert rows.where(0) == f"{tmp_path / 'a.jsonl'}:3" and rows.where(20).endswith(":26")


def test_columns_of_held_out_rows_are_mapped_by_their_own_key() -> None:
    for source, key in ((SFTDataConfig(), "sft.data.columns"), (SFTEvalConfig(path="held.jsonl"), "sft.eval.columns")):
        assert f"Map them with {key}" in missing_columns(["question", "answer"], source)


def test_many_files_compressed_or_not(tmp_path: Path) -> None:
    data, cache = tmp_path / "data", tmp_path / "cache"
    data.mkdir()
    (data / "a.jsonl").write_bytes(lines(rows_of(3)))
    (data / "b.jsonl.gz").write_bytes(gzip.compress(lines(rows_of(4, 3))))
    wanted = rows_of(7)
    for path in (data, data / "*.jsonl*", [data / "a.jsonl", data / "b.jsonl.gz"]):
        rows = opened(cache, path=path)
        assert read(rows) == wanted and rows.where(5) == f"{data / 'b.jsonl.gz'}:3"
    assert len(list(cache.iterdir())) == 3  # two indices and what was unpacked, made once
    zstandard = pytest.importorskip("zstandard")
    (data / "c.jsonl.zst").write_bytes(zstandard.compress(lines(rows_of(2, 7))))
    assert read(opened(cache, path=data)) == rows_of(9)


def test_parquet_is_unpacked_once_and_read_by_row(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    content = [
        {
            "messages": [
                {"role": "user", "content": f"q{i}"},
                {"role": "assistant", "content": None, "tool_calls": [{"name": "add", "arguments": {"a": i}}]},
            ],
            "number": i,
        }
        for i in range(600)
    ]
    pq.write_table(pa.Table.from_pylist(content), tmp_path / "a.parquet", row_group_size=130)
    rows = opened(tmp_path / "cache", path=tmp_path / "a.parquet")
    assert rows.num_rows == 600
    for i in (599, 0, 255, 256, 130):
        user, assistant = rows.row(i)["messages"]
        assert user == {"role": "user", "content": f"q{i}"}  # without the null tool_calls that Arrow adds
        assert assistant["tool_calls"] == [{"name": "add", "arguments": {"a": i}}]
    made = next((tmp_path / "cache").glob("*.arrow")).stat()
    again = opened(tmp_path / "cache", path=tmp_path / "a.parquet")
    assert next((tmp_path / "cache").glob("*.arrow")).stat().st_ino == made.st_ino
    assert again.fingerprint == rows.fingerprint and rows.where(4).endswith("a.parquet: row 5")
    alpaca: dict[str, Any] = {"instruction": ["a"], "input": ["b"], "output": ["c"], "system": ["d"], "more": ["e"]}
    alpaca["history"] = [[["f", "g"]]]
    pq.write_table(pa.table(alpaca), tmp_path / "alpaca.parquet")
    mapped = {"prompt": "instruction", "completion": "output"}
    (row,) = read(opened(tmp_path / "cache", path=tmp_path / "alpaca.parquet", columns=mapped))
    assert row == {"instruction": "a", "input": "b", "output": "c", "system": "d", "history": [["f", "g"]]}
    pq.write_table(pa.table({"question": ["a"], "answer": ["b"]}), tmp_path / "b.parquet")
    with pytest.raises(SFTDataError, match=r"b\.parquet: needs `messages`.*answer, question"):
        opened(tmp_path / "cache", path=tmp_path / "b.parquet")
    (tmp_path / "c.parquet").write_bytes(b"no")
    with pytest.raises(SFTDataError, match="cannot be read as Parquet"):
        opened(tmp_path / "cache", path=tmp_path / "c.parquet")


def test_text_of_parquet_that_is_no_text_is_named_with_its_row(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    bad = pa.array([b"ok", b"caf\xe9"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"prompt": bad, "completion": ["x", "y"]}), tmp_path / "rows.parquet")
    source = SFTDataConfig(path=str(tmp_path / "rows.parquet"))
    recipe = Recipe(source, source, find_data(source), tmp_path / "cache", tmp_path, False, False, 64, 100)
    reader = RowReader(recipe, tokenizer=cast(Any, SimpleNamespace(has_template=False)))
    (result,) = reader([1])
    assert "rows.parquet: row 2: 'utf-8' codec can't decode byte 0xe9" in (result.error or "")


@pytest.mark.parametrize(
    ("column", "held"),
    [
        ("videos", [[{"bytes": b"x" * 500, "path": "a.mp4"}], None, [], [{"bytes": b"y", "path": None}]]),
        ("audios", [["a.wav"], None, [], ["b.wav"]]),
        ("video", ["a.mp4", None, "", "b.mp4"]),
        ("audio", [b"x", None, b"", b"y"]),
    ],
)
def test_rows_of_tables_say_that_videos_and_sounds_are_beside_them(
    tmp_path: Path, column: str, held: list[Any]
) -> None:
    """Where the text shows one, as JSON lines do; the column is not among those that are read for every row."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    datasets = pytest.importorskip("datasets")
    shown = "<video>" if column.startswith("video") else "<audio>"
    table = pa.table({"prompt": [f"{shown} what?"] * 3 + ["a"], "completion": ["b"] * 4, column: held})
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=3)
    datasets.Dataset(table).save_to_disk(tmp_path / "saved")
    for path in (tmp_path / "rows.parquet", tmp_path / "saved"):
        source = SFTDataConfig(path=str(path))
        rows = opened(tmp_path / "cache", path=path)
        assert [row.get(column) for row in read(rows)] == [True, None, None, None]
        recipe = Recipe(source, source, find_data(source), tmp_path / "cache", tmp_path, False, False, 64, 100)
        reader = RowReader(recipe, rows, cast(Any, SimpleNamespace(has_template=True, images=None)))
        assert f"{shown} in a message: only text and images can be shown" in (reader([0])[0].error or "")
    first = first_parquet_rows(tmp_path / "rows.parquet", SFTDataConfig(), 9)
    assert [row.get(column) for row in first] == [True, None, None, None]


def test_videos_beside_rows_are_looked_for_again_where_they_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = {"prompt": ["<video> what?", "a"], "completion": ["b"] * 2, "video": ["a.mp4", None]}
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    rows, pread = opened(tmp_path / "cache", path=tmp_path / "rows.parquet"), os.pread
    failures = [errno.EIO, errno.ESTALE]

    def fail(*asked: int) -> bytes:
        if failures:
            raise OSError(failures.pop(), "no answer")
        return pread(*asked)

    monkeypatch.setattr(patient_file.os, "pread", fail)
    assert [row.get("video") for row in read(rows)] == [True, None] and not failures


def test_data_sets_of_the_hub_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(rows_of(5)).save_to_disk(tmp_path / "saved")
    assert read(opened(tmp_path / "cache", path=tmp_path / "saved")) == rows_of(5)
    before = opened(tmp_path / "cache", path=tmp_path / "saved")
    shutil.rmtree(tmp_path / "saved")
    datasets.Dataset.from_list([{"prompt": f"other {n}", "completion": ""} for n in range(5)]).save_to_disk(
        tmp_path / "saved"
    )
    after = opened(tmp_path / "cache", path=tmp_path / "saved")
    assert before.fingerprint != after.fingerprint and former_fingerprint(before) == former_fingerprint(after)
    assert former_fingerprint(before) != before.fingerprint
    for commit in ("one", "another"):  # which changes no row
        loaded = datasets.load_from_disk(tmp_path / "saved")
        loaded._fingerprint = commit
        with monkeypatch.context() as patch:
            patch.setattr(datasets, "load_from_disk", lambda _, loaded=loaded: loaded)
            assert opened(tmp_path / "cache", path=tmp_path / "saved").fingerprint == after.fingerprint
    image = pytest.importorskip("PIL.Image").new("RGB", (4, 4))
    features = datasets.Features(
        {**{name: datasets.Value("string") for name in rows_of(1)[0]}, "seen": datasets.Image()}
    )
    pictured = [{**row, "seen": image} for row in rows_of(2)]
    datasets.Dataset.from_list(pictured, features=features).save_to_disk(tmp_path / "pictured")
    seen = [opened(tmp_path / "cache", path=tmp_path / "pictured") for _ in range(2)]
    assert seen[0].fingerprint == seen[1].fingerprint and read(seen[0]) == rows_of(2)
    datasets.Dataset.from_list([{"body": "a"}]).save_to_disk(tmp_path / "other")
    with pytest.raises(SFTDataError, match="the columns are: body"):
        opened(tmp_path / "cache", path=tmp_path / "other")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="saved is a folder that `datasets` saved: state it as path"):
        find_data(SFTDataConfig(name=str(tmp_path / "saved")))
    with pytest.raises(SFTDataError, match=r"sft\.data\.name = nobody/nothing .* is not to be had.*Without network"):
        opened(tmp_path / "cache", name="nobody/nothing")


def test_folders_of_the_hub_library_are_read_whole_with_their_splits(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    splits = {"train": rows_of(5), "validation": rows_of(2)}
    made = {name: datasets.Dataset.from_list(rows) for name, rows in splits.items()}
    made["train"].save_to_disk(tmp_path / "one")
    datasets.DatasetDict(made).save_to_disk(tmp_path / "several")
    both = [tmp_path / "one", tmp_path / "several"]
    assert read(opened(tmp_path / "cache", path=both)) == [*rows_of(5), *rows_of(5)]
    assert read(opened(tmp_path / "cache", path=tmp_path / "several", split="validation")) == rows_of(2)
    (tmp_path / "rows.jsonl").write_bytes(lines(rows_of(1)))
    for path, kind, words in (
        ([tmp_path / "one", tmp_path / "rows.jsonl"], "auto", r"rows.jsonl is no folder .* as .*one is"),
        (tmp_path / "rows.jsonl", "hub", "rows.jsonl is no folder that `datasets` saved$"),
    ):
        with pytest.raises(ValueError, match=words):
            find_data(SFTDataConfig(path=path, type=kind))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for path, words in ((tmp_path / "none.jsonl", "does not exist"), (tmp_path / "*.jsonl", "matches no file")):
        with pytest.raises(ValueError, match=words):
            find_data(SFTDataConfig(path=path))
    with pytest.raises(ValueError, match="names no file"):
        find_data(SFTDataConfig())
    (tmp_path / "rows").mkdir()
    with pytest.raises(ValueError, match=r"rows is a directory without data files \(\.jsonl"):
        find_data(SFTDataConfig(path=tmp_path / "rows"))
    for count, words in ((1, "0.jsonl is empty$"), (2, "all 2 files of .*rows are empty")):
        (tmp_path / "rows" / f"{count - 1}.jsonl").touch()
        with pytest.raises(ValueError, match=words):
            find_data(SFTDataConfig(path=tmp_path / "rows"))
    (tmp_path / "rows" / "1.jsonl").write_bytes(lines(rows_of(1)))
    assert len(find_data(SFTDataConfig(path=tmp_path / "rows")).files) == 2
    with pytest.raises(ValueError, match="two sources"):
        SFTDataConfig(path="a.jsonl", name="owner/name")
    (tmp_path / "array.json").write_text('[{"prompt": "a", "completion": "b"}]')
    with pytest.raises(SFTDataError, match=r"one JSON array.*jq -c"):
        opened(tmp_path / "cache", path=tmp_path / "array.json")
    (tmp_path / "broken.jsonl").write_text('{"prompt": "a", "completion": "b"}\n{"prompt"', encoding="utf-8")
    rows = opened(tmp_path / "cache", path=tmp_path / "broken.jsonl")
    with pytest.raises(SFTDataError, match="not JSON"):
        rows.row(1)
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(SFTDataError, match="no row"):
        opened(tmp_path / "cache", path=tmp_path / "empty.jsonl")
    packed = bytearray(gzip.compress(lines(rows_of(500))))
    packed[30:60] = bytes(30)
    (tmp_path / "bad.jsonl.gz").write_bytes(packed)
    with pytest.raises(SFTDataError, match=r"bad.jsonl.gz is no whole gzip file"):
        opened(tmp_path / "cache", path=tmp_path / "bad.jsonl.gz")
    (tmp_path / "torn.jsonl.gz").write_bytes(gzip.compress(lines(rows_of(500)))[:-20])
    with pytest.raises(SFTDataError, match="no whole gzip file"):
        opened(tmp_path / "cache", path=tmp_path / "torn.jsonl.gz")
    assert not list((tmp_path / "cache").glob(".tmp-*"))


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "latin-1"])
def test_other_encodings_are_named_with_what_to_do(tmp_path: Path, encoding: str) -> None:
    file = tmp_path / "rows.jsonl"
    text = '{"prompt": "a", "completion": "b"}\n{"prompt": "caf\u00e9", "completion": "b"}\n'
    file.write_bytes(text.encode(encoding))
    names = {"latin-1": "ISO-8859-1", "utf-16": "UTF-16", "utf-16-le": "UTF-16LE", "utf-16-be": "UTF-16BE"}
    with pytest.raises(SFTDataError) as refused:
        read(opened(tmp_path / "cache", path=file))
    assert f"iconv -f {names[encoding]} -t UTF-8 rows.jsonl > utf8.jsonl" in str(refused.value)
    if encoding != "latin-1":
        with pytest.raises(ValueError, match="not UTF-8"):
            first_columns(find_data(source := SFTDataConfig(path=str(file))), source)
    (tmp_path / "rows.csv").write_text("prompt,completion\na,b\n")
    with pytest.raises(ValueError, match=r"rows.csv is a table.*read_csv"):
        find_data(SFTDataConfig(path=str(tmp_path / "rows.csv")))


def test_fingerprint_sees_rows_that_change(tmp_path: Path) -> None:
    prints: list[int] = []
    for content in (rows_of(10), rows_of(10), rows_of(11), [*rows_of(9), {"prompt": "another", "completion": ""}]):
        path = tmp_path / str(len(prints)) / "a.jsonl"
        path.parent.mkdir()
        path.write_bytes(lines(content))
        prints.append(opened(tmp_path / "cache", path=path).fingerprint)
    assert prints[0] == prints[1] and len(set(prints)) == 3
    assert all(0 <= p < 2**63 for p in prints) and isinstance(prints[0], int | np.integer)


def test_zstd_files_of_several_frames_are_read_and_torn_ones_refused(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    frames = [zstandard.compress(lines(rows_of(40, first)) + b"\n") for first in (0, 40)]
    (tmp_path / "a.jsonl.zst").write_bytes(b"".join(frames))
    assert read(opened(tmp_path / "cache", path=tmp_path / "a.jsonl.zst")) == rows_of(80)
    damaged = bytearray(frames[1])
    damaged[10:40] = bytes(30)
    for name, content in (("torn", frames[0] + frames[1][:-9]), ("bad", bytes(damaged)), ("none", b"[1]" * 9)):
        (tmp_path / f"{name}.jsonl.zst").write_bytes(content)
        with pytest.raises(SFTDataError, match=f"{name}.jsonl.zst is no whole zstd file"):
            opened(tmp_path / "cache", path=tmp_path / f"{name}.jsonl.zst")


def test_a_checkpoint_of_a_version_before_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of a version that took a hub's data set by its name and size, and one that looked at all its columns."""
    datasets = pytest.importorskip("datasets")
    whole = [{**row, "id": n} for n, row in enumerate(rows_of(5))]
    datasets.Dataset.from_list(whole).save_to_disk(tmp_path / "saved")
    began: list[int] = []
    monkeypatch.setattr(build, "Prefetcher", lambda *_: None)
    data = build.RealData.__new__(build.RealData)
    data._config, data._timeout_s = SFTDataConfig(name="owner/set"), 1.0
    data._fingerprint, data._former, data._num_rows, data._prefetcher = 1, 2, 5, None
    data._looks, data._template = 8, "the chat template own.jinja"
    data._rows, data._seed = opened(tmp_path / "cache", path=tmp_path / "saved"), 7
    with_id = fingerprint_of(fingerprint_of(former_fingerprint(data._rows), *whole), True, 7)
    data._stream = SimpleNamespace(start=lambda position: began.append(position.row))  # type: ignore[assignment]
    for known in (1, 2, with_id):
        assert data.start({"data_row": 3, "data_fingerprint": known})["data_fingerprint"] == 1
    with pytest.raises(SFTDataError, match="other rows"):
        data.start({"data_row": 3, "data_fingerprint": 4})
    with pytest.raises(SFTDataError, match=r"another chat template.*own\.jinja now.*on_change = restart"):
        data.start({"data_row": 3, "data_fingerprint": 1, "data_looks": 9})
    assert data.start({"data_row": 3, "data_fingerprint": 1, "data_looks": 8})["data_looks"] == 8
    assert began == [3, 3, 3, 3]


def test_rows_of_tokens_are_read_alike_from_every_source(tmp_path: Path) -> None:
    datasets, pq = pytest.importorskip("datasets"), pytest.importorskip("pyarrow.parquet")
    from tests.support.tiny_tokenizer import make_tokenizer

    make_tokenizer(tmp_path / "model")
    content = [{"input_ids": [i, 5, 6, 0], "labels": [-100, 5, 6, 0], "attention_mask": [1, 1, 1, 0]} for i in range(9)]
    table = datasets.Dataset.from_list([row | {"token_type_ids": [0] * 4} for row in content])
    table.with_format("numpy").save_to_disk(tmp_path / "saved")
    pq.write_table(table.data.table, tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_bytes(lines(content))
    for path in ("saved", "a.parquet", "a.jsonl"):
        source = SFTDataConfig(path=tmp_path / path)
        found = find_data(source)
        recipe = Recipe(source, source, found, tmp_path / "cache", tmp_path / "model", False, False, 8, 300)
        made = [result.samples[0] for result in RowReader(recipe)(range(9))]
        assert [one.token_ids.tolist() for one in made] == [[i, 5, 6] for i in range(9)]
        assert all(one.loss_mask.tolist() == [False, True, True] for one in made)
        assert first_columns(found, source) is None or "input_ids" in (first_columns(found, source) or [])
    masked = [{"input_ids": [5, 6], "assistant_masks": [0, 1]}]
    pq.write_table(datasets.Dataset.from_list(masked).data.table, tmp_path / "b.parquet")
    with pytest.raises(SFTDataError, match=r'Map it: sft\.data\.columns = {"loss_mask": "assistant_masks"}'):
        opened(tmp_path / "cache", path=tmp_path / "b.parquet")
    (row,) = read(opened(tmp_path / "cache", path=tmp_path / "b.parquet", columns={"loss_mask": "assistant_masks"}))
    assert row == masked[0]
