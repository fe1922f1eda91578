"""Items of every kind of source, without a model."""

from __future__ import annotations

import io
import json
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from checkpoints import saved_picture, says, text
from saccade.data.conversations import Messages, Template
from saccade.errors import InputError, SaccadeError
from saccade.jobs.items import _BLOCK, Item, ItemSource, Stored, TemplateOptions, json_row_at, json_rows
from saccade.jobs.job import BatchJob, Shard, preview
from saccade.jobs.running import ReadAhead


def items(*inputs: Any, **options: Any) -> list[Item]:
    return list(BatchJob(ItemSource([str(i) for i in inputs], **options)).items())


def problem_of(item: Item, prompt: str | None = "What?") -> str:
    """The sentence of an item that cannot be used; empty for others."""
    try:
        TemplateOptions(prompt).of(item)
    except InputError as problem:
        return str(problem)
    return ""


def contents(messages: Messages) -> list[Any]:
    """Texts and media of a conversation, with the bytes of those inside archives."""
    values = [part[part["type"]] for message in messages for part in message["content"]]
    return [value.read() if isinstance(value, Stored) else value for value in values]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    for name in ("b.png", "a.JPG", "sub/c.png", "sub/d.png", "sub/e.png", "z.mp4", ".hidden.png", "notes.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(name.encode())
    return folder


def archive(path: Path, files: Sequence[tuple[str, bytes]], mode: Any = "w") -> Path:
    with tarfile.open(path, mode) as tar:
        for name, content in files:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def test_a_folder_is_its_pictures_and_videos_by_path_also_behind_links(photos: Path) -> None:
    """Links to folders elsewhere are followed, each folder once."""
    groups = items(photos, images_per_row=2)
    names = [["a.JPG", "b.png"], ["z.mp4"], ["c.png", "d.png"], ["e.png"]]
    assert [[Path(s).name for _, s in i.media] for i in groups] == names, "of one folder, and a video alone"
    assert [i.media[0][0] for i in groups] == ["image", "video", "image", "image"]
    far = photos.parent / "far"
    far.mkdir()
    (far / "f.png").write_bytes(b"f")
    (far / "round").symlink_to(photos)
    for name, target in {"again": photos / "sub", "back": photos.parent, "far": far, "far2": far}.items():
        (photos / name).symlink_to(target)
    ids = [i.id for i in items(photos)]
    assert ids == ["a.JPG", "b.png", "z.mp4", "far/f.png", "sub/c.png", "sub/d.png", "sub/e.png"]


def test_files_of_other_kinds_are_skipped_in_folders_and_globs_and_refused_among_several(photos: Path) -> None:
    everything = sorted(photos.glob("*"))
    expected = [str(photos / name) for name in ("a.JPG", "sub/c.png", "z.mp4")]
    assert [i.id for i in items(photos / "[a-z]*", images_per_row=9)] == expected
    with pytest.raises(SaccadeError, match=r"notes\.txt is no picture, .* give its folder, whose other files are"):
        items(*everything)


def test_several_folders_keep_their_names_in_the_ids_and_a_tilde_is_a_letter(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(photos.parent)
    (photos.parent / "more").mkdir()
    (photos.parent / "more" / "~$a.png").write_bytes(b"x")
    assert [i.id for i in items("photos/sub", "more")] == [*(f"photos/sub/{n}.png" for n in "cde"), "more/~$a.png"]
    monkeypatch.chdir(photos.parent / "more")
    assert [i.id for i in items("~$a.png")] == ["~$a.png"]
    with pytest.raises(SaccadeError, match="There is no file or folder ~nobody"):
        items("~nobody-of-this-name/*.png")


def test_rows_of_every_form_ask_their_question(tmp_path: Path) -> None:
    image = saved_picture(tmp_path / "a.png")
    turns = [
        {"from": "human", "value": "<image>\nOne?"},
        {"from": "gpt", "value": "1"},
        {"from": "human", "value": "2?"},
    ]
    parts = [{"type": "image_url", "image_url": {"url": "a.png"}}, {"type": "text", "text": "Last?"}]
    rows = [
        {"id": 7, "prompt": "What?", "image": "a.png"},
        {"prompt": "Both?", "images": ["a.png", "a.png"]},
        {"prompt": "No picture?"},
        {"id": "llava", "conversations": turns, "image": "a.png"},
        {"id": "openai", "messages": [{"role": "user", "content": parts}]},
        {"prompt": "Be brief?", "system": "Be brief."},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = items(path)
    assert [i.id for i in found] == ["7", "rows.jsonl:2", "rows.jsonl:3", "llava", "openai", "rows.jsonl:6"]
    shown = {"type": "image", "image": image}
    system = {"role": "system", "content": [text("Be brief.")]}
    assert [TemplateOptions().of(i) for i in found] == [
        says(shown, text("What?")),
        says(shown, shown, text("Both?")),
        says(text("No picture?")),
        says(shown, text("One?")),
        says(shown, text("Last?")),
        [system, *says(text("Be brief?"))],
    ]
    assert TemplateOptions(system="Be brief.").of(found[3]) == [system, *says(shown, text("One?"))]
    array = tmp_path / "rows.json"
    array.write_text(json.dumps(rows, indent=1))
    assert [i.row for i in items(array)] == [i.row for i in found]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"{", "not valid JSON"),
        (b"[1", "not valid JSON"),
        (b'"text"', "expected a JSON object"),
        (b"\xff", "not UTF-8"),
        (b'{"id": {"a": 1}, "prompt": "x"}', "the id must be"),
        (b'{"image": "a.png"}', "it has no question; its fields are image; give it a field prompt"),
        (b'{"prompt": 5}', "the prompt must be a text, not '5'"),
        (b'{"prompt": "x", "image": 3}', "must be the path of a file"),
        (b'{"prompt": "x", "image": "https://example.com/a.png"}', "on the network"),
        (b'{"prompt": "x", "system": 3}', "system must be a text"),
        (b'{"conversations": [], "messages": []}', "not both"),
    ],
)
def test_a_bad_row_is_an_item_with_a_reason(tmp_path: Path, line: bytes, words: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt": "fine"}\n' + line + b'\n\n{"prompt": "fine"}')
    found = items(path)
    assert [bool(problem_of(i, None)) for i in found] == [False, True, False]
    assert words in problem_of(found[1], None)


def test_repeated_ids_are_numbered_the_same_way_in_every_attempt(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    names = ["a", "a", "b", "a@2", "a"]
    path.write_text("".join(json.dumps({"id": n, "prompt": "x"}) + "\n" for n in names))
    assert [i.id for i in items(path)] == ["a", "a@2", "b", "a@2@2", "a@3"]


def test_shards_are_disjoint_and_their_union_is_the_whole(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"id": n % 40, "prompt": "x"}) + "\n" for n in range(50)))
    source = ItemSource([str(path)])
    whole = [i.id for i in BatchJob(source).items()]
    parts = [[i.id for i in BatchJob(source, shard=Shard.parse(f"{n}/3")).items()] for n in (1, 2, 3)]
    assert sorted(name for part in parts for name in part) == sorted(whole)
    assert all(len(part) > 5 for part in parts)
    for wrong in ("0/3", "4/3", "3", "a/b", "1/0"):
        with pytest.raises(InputError, match="such as 2/8"):
            Shard.parse(wrong)


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_samples_of_a_tar_are_neighbours_of_one_name(tmp_path: Path, mode: str) -> None:
    row = json.dumps({"prompt": "What?", "width": 3}).encode()
    files = [
        ("x/1.png", b"one"),
        ("x/1.json", row),
        ("x/2.seg.png", b"two"),
        ("x/2.txt", b"a dog\n"),
        ("x/3.txt", b"t"),
    ]
    path = archive(tmp_path / ("a.tar" if mode == "w" else "a.tar.gz"), files, mode)
    found = items(path)
    assert [i.id for i in found] == ["x/1", "x/2", "x/3"]
    assert contents(TemplateOptions().of(found[0])) == [b"one", "What?"]
    assert contents(TemplateOptions("Is {txt} right in {name}?").of(found[1])) == [b"two", "Is a dog right in 2?"]
    assert isinstance(found[0].media[0][1], Stored) == (mode == "w"), "only a compressed one is read in order"
    planned = list(ItemSource([str(path)]).items(with_media=False))
    assert [i.version for i in planned] == [i.version for i in found]


def test_a_conversation_in_a_tar_has_the_pictures_next_to_it(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "What is <image>?"}, {"from": "gpt", "value": "x"}]
    row = json.dumps({"id": "q", "image": "elsewhere.jpg", "conversations": turns}).encode()
    path = archive(tmp_path / "a.tar", [("1.jpg", b"one"), ("1.json", row), ("2.json", b"[]"), ("3.json", b"{")])
    found = items(path)
    assert contents(TemplateOptions().of(found[0])) == ["What is ", b"one", "?"]
    assert [problem_of(i) for i in found[1:]] == ["its json is no object", "its json is not valid JSON"]


def test_a_torn_tar_gives_what_is_whole_and_one_reason(tmp_path: Path) -> None:
    whole = archive(tmp_path / "whole.tar", [(f"{n}.png", bytes(5000)) for n in range(4)]).read_bytes()
    for length in (2 * 5632 + 300, 2 * 5632, 2 * 5632 - 1000):  # in a header, after a file, in a file
        (tmp_path / "torn.tar").write_bytes(whole[:length])
        found = items(tmp_path / "torn.tar")
        assert [i.id for i in found if not i.problem] == ["0"]
        assert "the archive torn.tar is damaged in or behind sample 1" in found[-1].problem
    (tmp_path / "none.tar.gz").write_bytes(b"nothing")
    assert "is damaged at its beginning" in items(tmp_path / "none.tar.gz")[0].problem


def test_parquet_rows_have_their_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "pyarrow.parquet", None)
        (tmp_path / "none.parquet").write_bytes(b"PAR1")
        with pytest.raises(SaccadeError, match=r"pip install saccade\[data\]"):
            items(tmp_path / "none.parquet")
    arrow = pytest.importorskip("pyarrow", reason="the extra data is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    pictures = [{"bytes": b"one", "path": None}, {"bytes": None, "path": "b.png"}, None]
    table = arrow.table(
        {"id": [1, 2, 3], "question": ["A?", "B?", "C?"], "image": pictures, "frames": [[b"f", b"g"], [], None]}
    )
    parquet.write_table(table, tmp_path / "a.parquet")
    found = items(tmp_path / "a.parquet")
    asked = [contents(TemplateOptions("{question}").of(i)) for i in found]
    assert asked == [[b"one", b"f", b"g", "A?"], [str(tmp_path / "b.png"), "B?"], ["C?"]]
    planned = list(ItemSource([str(tmp_path / "a.parquet")]).items(with_media=False))
    assert [(i.id, i.version) for i in planned] == [(i.id, i.version) for i in found]
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(SaccadeError, match="Cannot read the Parquet file"):
        items(tmp_path / "bad.parquet")


def test_an_array_is_read_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = [{"id": n, "text": "]}," * (n % 7) + 'é\\" ' * (n % 50)} for n in range(300)]
    path = tmp_path / "a.json"
    for indent, begin in ((None, b""), (1, b"\xef\xbb\xbf \n")):
        path.write_bytes(begin + json.dumps(objects, indent=indent, ensure_ascii=False).encode())
        for block in (1, 17, _BLOCK):
            monkeypatch.setattr("saccade.jobs.items._BLOCK", block)
            found = list(json_rows(path))
            assert [json.loads(piece) for _, _, piece in found] == objects
            assert [number for number, _, _ in found] == list(range(1, 301))
            assert all(json_row_at(path, offset) == piece for _, offset, piece in found[::37])
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n\n" for row in objects[:9]))
    assert [(number, json.loads(json_row_at(path, offset))) for number, offset, _ in json_rows(path)] == [
        (2 * n + 1, row) for n, row in enumerate(objects[:9])
    ]
    for torn, pieces in {
        b'[{"a": 1}, {"b": ': [b'{"a": 1}', b'{"b": ', b"["],
        b'[{"a": 1}, oops, 3]': [b'{"a": 1}', b"oops, 3]", b"["],
        b"[]": [],
        b"[12, 345]": [b"12", b"345"],
    }.items():
        path.write_bytes(torn)
        assert [piece for _, _, piece in json_rows(path)] == pieces


def test_a_template_takes_plain_names_alone() -> None:
    assert Template("{{{name}}} of {n}").fill({"name": "x", "n": 3}) == "{x} of 3"
    for words, wrong in {
        "no plain name": ("{name.__class__}", "{0}", "{}", "{name!r}", "{name:>9}", '{"a": 1}'),
        "single brace": ("{", "}"),
        "is empty": (" ",),
    }.items():
        for prompt in wrong:
            with pytest.raises(InputError, match=words):
                Template(prompt)
    with pytest.raises(InputError, match=r"names \{title\}, but the item has id, name"):
        Template("{title}").fill({"id": 1, "name": "x"})
    with pytest.raises(InputError, match="must be a text or a number"):
        Template("{tags}").fill({"tags": ["a"]})


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda folder: BatchJob(ItemSource([str(folder / "none")])), "There is no file or folder"),
        (lambda folder: BatchJob(ItemSource([str(folder / "*.png")])), "There is no file or folder"),
        (lambda folder: BatchJob(ItemSource([])), "No input is given"),
        (lambda folder: BatchJob(ItemSource([str(folder)], images_per_row=0)), "images_per_row must be"),
        (lambda folder: BatchJob(ItemSource([str(folder)], media_root=folder / "none")), "There is no folder"),
        (lambda folder: BatchJob(ItemSource([str(folder)])), "There is no item in"),
        (lambda folder: BatchJob(ItemSource([str(folder)]), options={"x": object()}), "must be a number, a text or"),
        (lambda folder: BatchJob(ItemSource([str(folder)]), limit=0), "limit must be"),
    ],
)
def test_a_job_that_cannot_run_is_one_sentence(tmp_path: Path, make: Callable[[Path], BatchJob], words: str) -> None:
    with pytest.raises(SaccadeError, match=words):
        preview(make(tmp_path), tmp_path / "out.jsonl")


def test_a_prompt_for_what_has_one_and_none_for_what_has_none_are_refused_before_anything_runs(tmp_path: Path) -> None:
    saved_picture(tmp_path / "a.png")
    with pytest.raises(
        SaccadeError, match=r"None of the items can be used\. The first one: a\.png: It has no question"
    ):
        preview(BatchJob(ItemSource([str(tmp_path)])), tmp_path / "out")
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"id": "x", "messages": [{"role": "user", "content": "?"}]}))
    with pytest.raises(SaccadeError, match="x is a conversation with a question of its own; leave out --prompt"):
        preview(BatchJob(ItemSource([str(path)]), TemplateOptions("Why?")), tmp_path / "out")
    path.write_text(json.dumps({"custom_id": "x", "body": {}}))
    with pytest.raises(SaccadeError, match=r"x is a request .* leave out --system"):
        preview(BatchJob(ItemSource([str(path)]), TemplateOptions(system="Short.")), tmp_path / "out")


def test_a_wrong_folder_of_media_is_named_before_a_job_of_errors(tmp_path: Path) -> None:
    rows = [{"prompt": "What?", "image": f"{n}.png"} for n in range(30)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(SaccadeError, match=r"None of the first 20 files .* such as .*19\.png; give .* --media-root"):
        preview(BatchJob(ItemSource([str(path)])), tmp_path / "out")
    saved_picture(tmp_path / "7.png")
    assert preview(BatchJob(ItemSource([str(path)])), tmp_path / "out").kinds == {"image": 30}


def test_every_item_is_prepared_once_and_never_more_than_the_window_ahead() -> None:
    lock, read, taken, most = threading.Lock(), 0, 0, 0

    def numbers() -> Iterator[int]:
        nonlocal read, most
        for number in range(100):
            with lock:
                read += 1
                most = max(most, read - taken)
            yield number
        raise SaccadeError("The file is gone.")

    ahead = ReadAhead(numbers(), lambda number: number * number, threads=3, ahead=5)
    for number in range(100):
        assert ahead.pop(wait=True) == number * number
        if number % 50 == 9:
            time.sleep(0.05)  # the workers could run away
        with lock:
            taken += 1
    with pytest.raises(SaccadeError, match="is gone"):  # after the items before it
        ahead.pop(wait=True)
    ahead.close()
    assert most <= 6, "the window, and the one that has just been taken"


def test_what_is_not_ready_is_not_waited_for() -> None:
    gate = threading.Event()
    ahead = ReadAhead(iter([1]), lambda _: gate.wait(), threads=1, ahead=1)
    assert ahead.pop(wait=False) is None
    assert not ahead.is_empty
    gate.set()
    assert ahead.pop(wait=True) is True
    assert ahead.pop(wait=True) is None
    assert ahead.is_empty
    ahead.close()
