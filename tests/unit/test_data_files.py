# SPDX-License-Identifier: Apache-2.0
"""Files of every form give the same examples; what cannot be read is named with the remedy."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from memascend_jax.data import plain_text, source, unpack
from memascend_jax.data.files import open_source
from memascend_jax.data.records import Example
from memascend_jax.data.source import Fault
from memascend_jax.data.unpack import Unpacker
from memascend_jax.errors import DataError

RECORDS = [
    {
        "messages": [
            {"role": "user", "content": f"question {n} é 日本 😀?"},
            {"role": "assistant", "content": "a\n" * (n % 7)},
        ]
    }
    for n in range(300)
]
LINES = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in RECORDS)


def items(path: Path, cache: Path | None = None, kind: str = "auto") -> Iterator[Example | Fault]:
    opened = open_source(str(path), kind, Unpacker(cache))
    for block in range(len(opened.sizes)):
        yield from opened.load(block).items(kind)
    opened.close()


def messages(path: Path, **options: Any) -> list[Any]:
    found = list(items(path, **options))
    assert not [item for item in found if isinstance(item, Fault)]
    return [{"messages": item.messages} for item in found if isinstance(item, Example)]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that lines cross, and pieces that end within elements."""
    monkeypatch.setattr(source, "BLOCK_BYTES", 100)
    monkeypatch.setattr("memascend_jax.data.jsonl.BLOCK_BYTES", 100)
    monkeypatch.setattr("memascend_jax.data.tables.BLOCK_BYTES", 100)
    monkeypatch.setattr(unpack, "_PIECE_BYTES", 37)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("end", ["\n", ""])
def test_every_line_is_in_one_block(tmp_path: Path, end: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\ufeff" + LINES.rstrip("\n") + end, encoding="utf-8")
    assert messages(path) == RECORDS
    opened = open_source(str(path), "auto", Unpacker(None))
    assert len(opened.sizes) > 200
    # Alone a block counts its lines when it is asked for them.
    alone = [str(item.where) for item in opened.load(150).items("auto")]
    inside = [str(item.where) for number, item in enumerate(items(path)) if str(item.where) in alone]
    assert alone == inside
    assert alone


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("indent", [None, 1])
def test_a_json_array_is_read_element_by_element(tmp_path: Path, indent: int | None) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(RECORDS, indent=indent, ensure_ascii=False), encoding="utf-8")
    assert messages(path) == RECORDS
    path.write_text('[{"text": 3}, {"text": "b"}]')
    first, second = items(path)
    assert (str(first.where), str(second.where)) == (f"{path}: element 1", f"{path}: element 2")
    path.write_text(" [ ] ")
    with pytest.raises(DataError, match="empty"):
        open_source(str(path), "auto", Unpacker(None)).load(0)


@pytest.mark.usefixtures("small_blocks")
def test_gzip_is_unpacked_in_memory_or_to_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(LINES[:9000].encode()) + gzip.compress(LINES[9000:].encode()))
    assert messages(path) == RECORDS
    monkeypatch.setattr(unpack, "_MOST_IN_MEMORY_BYTES", 1000)
    with pytest.raises(DataError, match=r"set data\.cache to a folder"):
        messages(path)
    looked = open_source(str(path), "auto", Unpacker(None, looks_only=True))
    assert [len(list(looked.load(block).items("auto"))) for block in range(len(looked.sizes))]
    assert not any(isinstance(item, Fault) for item in looked.load(len(looked.sizes) - 1).items("auto"))
    told: list[str] = []
    opened = open_source(str(path), "auto", Unpacker(tmp_path / "cache", told.append))
    assert len(opened.sizes) > 200
    assert "which is done once" in told[0]
    assert messages(path, cache=tmp_path / "cache") == RECORDS
    assert len(told) == 1
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DataError, match=r"cannot unpack the data file .*a\.jsonl\.gz"):
        messages(path, cache=tmp_path / "cache")
    assert len(list((tmp_path / "cache").iterdir())) == 1, "nothing of it is left"


def test_tables_of_every_form_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    monkeypatch.setattr("memascend_jax.data.tables.BLOCK_BYTES", 2000)
    table = pa.Table.from_pylist([{**record, "id": n} for n, record in enumerate(RECORDS)])
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=120)
    saved = tmp_path / "saved" / "train"
    saved.mkdir(parents=True)
    with pa.ipc.new_stream(saved / "data-00000-of-00001.arrow", table.schema) as stream:
        stream.write_table(table, max_chunksize=70)
    with pa.ipc.new_file(tmp_path / "b.arrow", table.schema) as file:
        file.write_table(table, max_chunksize=70)
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    (saved / "state.json").write_text('{"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}')
    for path in (tmp_path / "a.parquet", tmp_path / "saved", tmp_path / "b.arrow"):
        assert messages(path) == RECORDS
        opened = open_source(str(path), "auto", Unpacker(None))
        assert len(opened.sizes) >= 8
        keys = {opened.load(block).key for block in range(len(opened.sizes))}
        assert len(keys) == len(opened.sizes)
    cut = (tmp_path / "b.arrow").read_bytes()[:20000]
    (tmp_path / "c.arrow").write_bytes(cut)
    with pytest.raises(DataError, match="cut short"):
        messages(tmp_path / "c.arrow")
    (tmp_path / "d.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:500])
    with pytest.raises(DataError, match=r"cannot read the data file .*as Parquet"):
        messages(tmp_path / "d.parquet")
    parquet.write_table(pa.table({"question": ["q"], "answer": ["a"]}), tmp_path / "e.parquet")
    with pytest.raises(DataError, match="has the columns 'question', 'answer', which make no record"):
        messages(tmp_path / "e.parquet")


def test_tables_without_pyarrow_say_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    for name, start in (("a.parquet", b"PAR1"), ("a.arrow", b"ARROW1\0\0")):
        (tmp_path / name).write_bytes(start + bytes(100))
        with pytest.raises(DataError, match=r"pip install 'memascend-jax\[parquet\]'"):
            messages(tmp_path / name)


def test_plain_text_is_one_document_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_text, "_PIECE_BYTES", 500)
    monkeypatch.setattr(plain_text, "_SLACK_BYTES", 100)
    path = tmp_path / "book.txt"
    text = "\n\n".join(f"Paragraph {n}. " + "é日😀" * (n % 40) for n in range(200)) + "é" * 700
    path.write_text("\ufeff" + text, encoding="utf-8")
    found = [item for item in items(path) if isinstance(item, Example)]
    assert "".join(item.text or "" for item in found) == text
    assert [(item.begins, item.ends) for item in found[:2]] == [(True, False), (False, False)]
    assert (found[-1].begins, found[-1].ends) == (False, True)
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 " * 10)
    (fault,) = items(tmp_path / "latin.txt")
    assert isinstance(fault, Fault)
    assert "byte 0xE9 at byte 3 of the file" in fault.why
    (tmp_path / "notes").write_text("Just words.")
    assert [item.text for item in items(tmp_path / "notes", kind="text") if isinstance(item, Example)] == [
        "Just words."
    ]


def test_folders_give_their_train_split_or_all_files_of_one_kind(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    lines = LINES.splitlines(keepends=True)
    (folder / "b.jsonl").write_text("".join(lines[100:]))
    (folder / "a.jsonl").write_text("".join(lines[:100]))
    (folder / "README.md").write_text("About it.")
    assert messages(folder) == RECORDS
    assert messages(folder / "*.jsonl") == RECORDS
    (folder / "a.jsonl").rename(folder / "train-00000-of-00002.jsonl")
    (folder / "b.jsonl").rename(folder / "test-00000-of-00001.jsonl")
    assert messages(folder) == RECORDS[:100]
    (folder / "train-00000-of-00002.jsonl").rename(folder / "validation.jsonl")
    with pytest.raises(DataError, match=r"none is called train: .*data\.source="):
        messages(folder)
    (folder / "validation.jsonl").rename(folder / "a.jsonl")
    (folder / "test-00000-of-00001.jsonl").unlink()
    (folder / "x.txt").write_text("text")
    with pytest.raises(DataError, match=r"files of several kinds: .*is JSONL; .*is plain text"):
        messages(folder)


def test_what_is_no_data_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "zst.jsonl").write_bytes(b"\x28\xb5\x2f\xfdxxxx")
    (tmp_path / "pretty.json").write_text('{\n "text": "a"\n}\n')
    (tmp_path / "bad.json").write_text('[{"text": "a"}, {"text": }]')
    (tmp_path / "open.json").write_text('[{"text": "a"}, ')
    for name, said in (
        ("empty", "there is no data in .*it is empty"),
        ("zst.jsonl", "packed with zstd; unpack it"),
        ("nothing-*.jsonl", "no file is named"),
        ("bad.json", "not a JSON array: element 2"),
        ("open.json", "not a JSON array"),
    ):
        with pytest.raises(DataError, match=said):
            list(items(tmp_path / name))
    assert all(isinstance(item, Fault) and item.not_json for item in items(tmp_path / "pretty.json"))


def test_a_file_that_changes_while_it_is_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(LINES)
    opened = open_source(str(path), "auto", Unpacker(None))
    opened.check_unchanged()
    with path.open("a") as file:
        file.write("more\n")
    with pytest.raises(DataError, match=r"a\.jsonl' was changed while it was read"):
        opened.check_unchanged()
