"""The default text and the reading of the user's own."""

import json

import pytest

from focus_attn.text import MIN_REPEATED_PARAGRAPH, default_text, read_text, split_documents, without_repeats


@pytest.fixture(scope="module")
def split():
    return default_text()


def long_paragraphs(documents):
    words = (" ".join(paragraph.split()) for document in documents for paragraph in document.split("\n\n"))
    return {paragraph for paragraph in words if len(paragraph) >= MIN_REPEATED_PARAGRAPH}


def test_default_text_is_the_same_on_every_call(split):
    assert default_text() == split


def test_default_text_is_large_enough_to_fit_and_to_measure(split):
    assert 500_000 < split.characters < 2_000_000
    assert sum(map(len, split.held_out)) > 100_000


def test_parts_share_no_document_and_no_long_paragraph(split):
    assert not set(split.train) & set(split.held_out)
    assert not long_paragraphs(split.train) & long_paragraphs(split.held_out)


def test_without_repeats_keeps_the_longer_home_of_a_paragraph():
    shared = "a paragraph that stands in two documents, long enough to be recognised as the same one"
    longer, shorter = f"{shared}\n\n{'own text ' * 40}", f"{shared}\n\n{'other words ' * 20}"
    kept = without_repeats([shorter, longer])
    assert sum(shared in document for document in kept) == 1
    assert shared in kept[0]


def test_one_document_is_cut_without_overlap():
    text = "\n\n".join(f"paragraph {number} " + "word " * 30 for number in range(40))
    split = split_documents([text], "one")
    assert split.train[0] + "\n\n" + split.held_out[0] == text


def test_read_text_reads_every_kind_below_a_folder(tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "a.txt").write_text("plain", encoding="utf-8")
    (tmp_path / "b.jsonl").write_text('{"text": "first"}\n\n{"text": "second"}\n', encoding="utf-8")
    (tmp_path / "inner" / "c.md").write_text("# marked", encoding="utf-8")
    (tmp_path / "ignored.py").write_text("code", encoding="utf-8")
    assert read_text(tmp_path) == ["plain", "first", "second", "# marked"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", b"  \n", "holds no text"),
        ("latin.txt", b"caf\xe9 au lait", "not UTF-8"),
        ("binary.txt", b"ab\0cd", "binary"),
        ("bad.jsonl", b"{nonsense", "line 1"),
        ("other.jsonl", json.dumps({"body": "x"}).encode(), "no string field"),
        ("program.py", b"print()", "not one of the kinds"),
    ],
)
def test_read_text_says_what_is_wrong(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_text(tmp_path / name)


def test_a_jsonl_line_ends_where_the_file_says_so(tmp_path):
    texts = ["one\u2028line", "and\x85another\x0c", "the last"]  # what `splitlines` takes for the end of a line
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts))
    assert read_text(file) == texts


def test_read_text_of_nothing(tmp_path):
    with pytest.raises(ValueError, match="no such file"):
        read_text(tmp_path / "absent")
    with pytest.raises(ValueError, match=r"no \.txt"):
        read_text(tmp_path)
    with pytest.raises(ValueError, match="no text to split"):
        split_documents([], "nothing")
