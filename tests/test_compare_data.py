"""The texts of a comparison: parts that share nothing, and token files that carry them elsewhere."""

import dataclasses

import numpy as np
import pytest
import torch

from focus_attn.compare.data import Texts, split_store
from focus_attn.compare.recipe import Dataset
from focus_attn.training.data import open_tokens
from focus_attn.training.recipe import Data
from focus_attn.training.token_file import open_token_file, read_tokens, write_tokens
from focus_attn.zoo import tiny_random_model


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_random_model()[1]


def store(*lengths):
    first = np.cumsum([0, *lengths])[:-1]
    return open_tokens([torch.arange(a, a + n) for a, n in zip(first, lengths, strict=True)], None, Data())


def ids(part):
    return {token for first, last in part.documents.tolist() for token in part.ids[first:last].tolist()}


@pytest.mark.parametrize("lengths", [(40,), (8, 30, 20, 25), (5, 6, 7, 8, 9, 10, 11, 12, 13)])
def test_one_source_is_split_without_overlap(lengths):
    whole = store(*lengths)
    train, test = split_store(whole)
    assert not ids(train) & ids(test)
    assert ids(train) | ids(test) == ids(whole)
    assert train.tokens > test.tokens > 0
    assert train.digest != test.digest


def test_token_files_come_back(tmp_path):
    written = store(7, 3, 5)
    write_tokens(tmp_path / "books.test.npy", written)
    assert np.load(tmp_path / "books.test.npy").dtype == np.uint16
    documents = read_tokens(tmp_path / "books.test.npy")
    assert [document.tolist() for document in documents] == [[*range(7)], [*range(7, 10)], [*range(10, 15)]]


def test_answers_come_back_beside_their_tokens(tmp_path):
    written, file = store(7, 3, 5), tmp_path / "books.npy"
    marked = dataclasses.replace(written, answers=written.ids % 4 == 3, documents=written.documents[[2, 0]])
    write_tokens(file, marked)
    back = open_token_file(file)
    assert back.ids[back.answers].tolist() == [11, 3] and back.documents.tolist() == [[0, 5], [5, 12]]
    np.save(tmp_path / "longer.npy", np.arange(20))
    (tmp_path / "books_completion_mask.npy").rename(tmp_path / "longer_completion_mask.npy")
    with pytest.raises(ValueError, match=r"which has 20 tokens: it must hold a bit for each, as numpy\.packbits"):
        open_token_file(tmp_path / "longer.npy")
    assert open_token_file(tmp_path / "longer.npy", answers=False).tokens == 20
    write_tokens(file, marked)
    write_tokens(file, written)
    assert open_token_file(file).answers is None  # nothing is left of other tokens
    assert open_token_file(file).digest == written.digest != back.digest


def test_answers_make_no_other_comparison(tmp_path, tokenizer):
    written = store(70, 30)
    write_tokens(tmp_path / "a.npy", dataclasses.replace(written, answers=written.ids % 4 == 3))
    texts = Texts(Dataset(test=str(tmp_path / "a.npy"), train=str(tmp_path / "a.npy")), tokenizer, 257)
    assert texts.train.answers is None and texts.train.digest == written.digest


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (np.array(["a", "b"], dtype=object), "'t.npy'.* does not hold integers as numpy.save writes them"),
        (np.array([1.5]), "one row of whole numbers, it has float64"),
        (np.array([], dtype=np.int64), "one row of whole numbers, it has int64 .0."),
        (np.array([3, -1]), "token ids start at 0, .* has -1"),
    ],
)
def test_what_is_no_token_file_is_refused(content, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("t.npy", content, allow_pickle=True)
    with pytest.raises(ValueError, match=message):
        open_tokens("t.npy", None, Data())


def test_token_files_that_are_wrong(tmp_path):
    with pytest.raises(ValueError, match="--write-tokens"):
        read_tokens(tmp_path / "none.npy")
    np.save(tmp_path / "a.npy", np.arange(5))
    np.save(tmp_path / "a_len.npy", np.array([2, 2]))
    with pytest.raises(ValueError, match="add up to 4, the ids are 5"):
        read_tokens(tmp_path / "a.npy")
    np.save(tmp_path / "b.npy", np.ones(3))
    with pytest.raises(ValueError, match="whole numbers"):
        read_tokens(tmp_path / "b.npy")


def test_token_file_for_another_model_is_refused(tmp_path, tokenizer):
    np.save(tmp_path / "a.npy", np.arange(300, 700))
    texts = Texts(Dataset(test=str(tmp_path / "a.npy"), train=str(tmp_path / "a.npy")), tokenizer, 257)
    with pytest.raises(ValueError, match="another model"):
        _ = texts.test


def test_parts_are_opened_when_asked_for(tmp_path, tokenizer):
    (tmp_path / "test.txt").write_text("what is measured on " * 40)
    texts = Texts(Dataset(test=str(tmp_path / "test.txt"), train="hub:no/such"), tokenizer, 257)
    assert texts.test_blocks(64, 3).shape == (3, 64)


def test_lines_are_joined_to_one_document(tmp_path, tokenizer):
    file = tmp_path / "lines.jsonl"
    file.write_text("".join(f'{{"text": "line number {n} of a text"}}\n' for n in range(40)))
    lines = Texts(Dataset(test=str(file), train=str(file)), tokenizer, 257)
    with pytest.raises(ValueError, match="no document reaches"):
        lines.test_blocks(128, 2)
    joined = Texts(Dataset(test=str(file), train=str(file), join=True), tokenizer, 257)
    assert joined.test_blocks(128, 2).shape == (2, 128)
    assert joined.test.tokens == lines.test.tokens
    assert joined.test.digest != lines.test.digest


def test_blocks_begin_as_the_tokenizer_begins_a_text(tmp_path):
    from tokenizers.processors import TemplateProcessing

    tokenizer = tiny_random_model()[1]
    tokenizer.bos_token = "<end>"
    first = tokenizer.bos_token_id
    (tmp_path / "a.txt").write_text("abcdefgh" * 100)
    dataset = Dataset(test=str(tmp_path / "a.txt"), train=str(tmp_path / "a.txt"))
    plain = Texts(dataset, tokenizer, 257).test_blocks(32, 2)
    assert first not in plain
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<end> $A", special_tokens=[("<end>", first)]
    )
    texts = Texts(dataset, tokenizer, 257)
    assert texts.test_blocks(32, 2)[:, 0].tolist() == [first, first]
    assert texts.test_blocks(32, 2)[0, 1:].tolist() == plain[0, :31].tolist()
    assert all(document[0] == first and len(document) == 48 for document in texts.train_documents(48))
