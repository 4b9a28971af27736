"""Text to blocks: every kind of source, the cache, packing, the order, and what is refused."""

import dataclasses
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny import tokenizer_with_bos

from focus_attn.evaluation import token_blocks
from focus_attn.training import documents as documents_module
from focus_attn.training import token_cache
from focus_attn.training.blocks import ShuffledBlocks, cut_blocks
from focus_attn.training.data import Sources, check_vocabulary, open_tokens
from focus_attn.training.documents import Answered, documents_to_measure
from focus_attn.training.recipe import Data
from focus_attn.training.token_file import write_tokens
from focus_attn.training.token_store import TokenStore
from focus_attn.zoo import tiny_random_model

LONG, SHORT = "a long document, " * 20, "a short one"


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_random_model()[1]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FOCUS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tokens"


def documents(store, tokenizer):
    return [tokenizer.decode(store.ids[first:last].tolist()) for first, last in store.documents]


def store_of(*lengths, begin=()):
    """Documents whose tokens say where they stand: 1000 times the document plus the place."""
    ids = np.concatenate([1000 * index + np.arange(length) for index, length in enumerate(lengths, start=1)])
    ends = np.cumsum(lengths)
    return TokenStore(ids, np.stack([ends - lengths, ends], axis=1), "digest", "numbers", begin)


def test_files_folders_and_jsonl(tmp_path, tokenizer):
    (tmp_path / "b.txt").write_text(LONG)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "c.md").write_text(SHORT)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"body": text}) + "\n" for text in (SHORT, LONG, " ")))
    assert documents(open_tokens(tmp_path / "b.txt", tokenizer, Data()), tokenizer) == [LONG]
    assert documents(open_tokens(str(tmp_path), tokenizer, Data(field="body")), tokenizer) == [SHORT, LONG, LONG, SHORT]


def test_what_a_program_has_at_hand(tokenizer):
    assert documents(open_tokens([LONG, SHORT], tokenizer, Data()), tokenizer) == [LONG, SHORT]
    for source in (torch.tensor([[5, 6, 7], [8, 9, 10]]), [[5, 6, 7], [8, 9, 10]]):
        store = open_tokens(source, None, Data())
        assert store.ids.tolist() == [5, 6, 7, 8, 9, 10] and store.documents.tolist() == [[0, 3], [3, 6]]
    assert open_tokens([5, 6, 7], None, Data()).documents.tolist() == [[0, 3]]


def test_rows_say_which_tokens_are_answers():
    rows = [{"input_ids": [5, 6, 7], "completion_mask": [0, 0, 1]}, {"input_ids": torch.tensor([8, 9])}]
    store = open_tokens(rows, None, Data())
    assert store.ids.tolist() == [5, 6, 7, 8, 9] and store.answers.tolist() == [False, False, True, False, False]
    plain = open_tokens([[5, 6, 7], [8, 9]], None, Data())
    assert plain.answers is None and store.digest != plain.digest  # a run does not go on with other answers
    none = open_tokens([{"input_ids": [5, 6, 7], "completion_mask": [0, 0, 0]}], None, Data())
    assert none.answers is None
    dataset = pytest.importorskip("datasets").Dataset.from_list([{**row, "labels": "unread"} for row in rows[:1]])
    assert open_tokens(dataset, None, Data()).answers.tolist() == [False, False, True]


ASKED = [{"prompt": "Who came?", "completion": " The doctor."}, {"prompt": "", "completion": "All."}]


def marked(store, tokenizer):
    """The answers of a store's documents, as text."""
    spans = store.documents.tolist()
    return [tokenizer.decode(store.ids[first:last][store.answers[first:last]]) for first, last in spans]


def test_a_completion_is_an_answer(tmp_path, tokenizer, cache, monkeypatch):
    file = tmp_path / "asked.jsonl"
    lines = [*ASKED, {"text": "Only text."}]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    store = open_tokens(file, tokenizer, Data())
    assert documents(store, tokenizer) == ["Who came? The doctor.", "All.", "Only text."]
    assert marked(store, tokenizer) == [" The doctor.", "All.", ""]
    monkeypatch.setattr(token_cache, "_tokenise", lambda *args: pytest.fail("tokenised twice"))
    assert open_tokens(file, tokenizer, Data()).answers.tolist() == store.answers.tolist()  # from the cache


def test_completions_of_datasets_are_answers(tokenizer, monkeypatch):
    whole = pytest.importorskip("datasets").Dataset.from_list(ASKED)
    fake_datasets(monkeypatch, lambda: iter(ASKED))
    for dataset in (whole, whole.to_iterable_dataset(), "hub:owner/asked"):
        assert marked(open_tokens(dataset, tokenizer, Data()), tokenizer) == [" The doctor.", "All."]


def test_a_token_between_prompt_and_answer_is_the_answers():
    class Pairs:
        def __call__(self, texts, **options):
            return {"input_ids": [[*text.encode()] if len(text) < 4 else [1, 2, *text[4:].encode()] for text in texts]}

    (ids, answer), (plain, none) = token_cache.token_rows([Answered("abc", "defg"), "text"], Pairs())
    assert ids == [1, 2, *b"efg"] and answer == 5  # nothing is left of "abc" by itself
    assert plain == [1, 2] and none == 0


def test_cached_answers_that_were_cut_short_are_made_anew(tmp_path, tokenizer, cache):
    file = tmp_path / "asked.jsonl"
    file.write_text(json.dumps(ASKED[0]))
    whole = open_tokens(file, tokenizer, Data())
    (kept,) = cache.glob("*/answers.bin")
    kept.write_bytes(b"")
    assert open_tokens(file, tokenizer, Data()).answers.tolist() == whole.answers.tolist()


def test_several_sources_are_one_text(tmp_path, tokenizer):
    (tmp_path / "text.txt").write_text(LONG)
    (tmp_path / "asked.jsonl").write_text(json.dumps(ASKED[0]))
    names = [str(tmp_path / name) for name in ("text.txt", "asked.jsonl")]
    text, asked = (open_tokens(name, tokenizer, Data()) for name in names)
    write_tokens(tmp_path / "asked.npy", asked)
    names.append(str(tmp_path / "asked.npy"))
    store = open_tokens(Sources([*names, names[0]]), tokenizer, Data())
    assert documents(store, tokenizer) == [LONG, "Who came? The doctor.", "Who came? The doctor.", LONG]
    assert marked(store, tokenizer) == ["", " The doctor.", " The doctor.", ""]
    assert store.answer_tokens == 2 * len(" The doctor.")
    other_way = open_tokens(Sources([names[1], names[0], names[2]]), tokenizer, Data())
    assert marked(other_way, tokenizer) == [" The doctor.", "", " The doctor."]
    assert len(other_way.answers) == len(other_way.ids)
    assert open_tokens(Sources([names[1]] * 3), tokenizer, Data()).answer_tokens == 3 * asked.answer_tokens > 0
    assert store.name == f"{names[0]}, {names[1]}, asked.npy, {names[0]}"
    one, twice = (open_tokens(Sources([names[0]] * times), tokenizer, Data()) for times in (1, 2))
    assert one.digest == text.digest != twice.digest and one.answers is None is twice.answers


@pytest.mark.parametrize("order", ["abb", "bba", "ab"])
def test_what_is_held_out_of_a_text_that_counts_twice_is_not_trained_on(order, tmp_path, tokenizer):
    for name, first in (("a", 33), ("b", 80)):
        (tmp_path / f"{name}.txt").write_text("".join(chr(first + number % 47) for number in range(400)))
    store = open_tokens(Sources([tmp_path / f"{name}.txt" for name in order]), tokenizer, Data())
    assert store.tokens == 400 * len(order) and len(store.ids) == 800
    rest, aside = store.split_off(64, 3)
    places = [{place for span in part.documents.tolist() for place in range(*span)} for part in (rest, aside, store)]
    assert not places[0] & places[1] and places[0] | places[1] <= places[2]
    assert aside.tokens == 3 * 64 and rest.tokens == 400 * len(order) - 3 * 64 * order.count(order[-1])


def test_several_sources_are_read_as_one_is(tmp_path, monkeypatch):
    tokenizer, first = tokenizer_with_bos()
    (tmp_path / "t.txt").write_text(LONG)
    taken = []

    def rows():
        for number in range(10_000):
            taken.append(number)
            yield {"text": f"row {number} " * 20}

    fake_datasets(monkeypatch, rows)
    store = open_tokens(Sources(["hub:owner/name", tmp_path / "t.txt"]), tokenizer, Data(), limit=2000)
    assert store.begin == (first,) and len(taken) <= 2 * token_cache.DOCUMENTS_AT_ONCE


@pytest.mark.parametrize("names", [[], "text.txt"])
def test_names_of_sources_are_a_list(names):
    with pytest.raises(ValueError, match="must be a list of at least one text's name"):
        Sources(names)


def test_rows_in_python_may_be_text(tokenizer):
    store = open_tokens([*ASKED, {"text": "Only text.", "prompt": None}], tokenizer, Data())
    assert documents(store, tokenizer) == ["Who came? The doctor.", "All.", "Only text."]
    assert marked(store, tokenizer) == [" The doctor.", "All.", ""]
    other = [{"prompt": "Who came? The", "completion": " doctor."}, *ASKED[1:]]  # the same text, another answer
    assert marked(open_tokens(other, tokenizer, Data()), tokenizer) == [" doctor.", "All."]


MESSAGES = [{"role": "user", "content": "Who came?"}]


@pytest.mark.parametrize(
    ("row", "data", "message"),
    [
        (ASKED[0], Data(join=True), "`data.join` puts the lines .* rows of `prompt` and `completion` are none"),
        (ASKED[0], Data(field="body"), r"no field 'body' \(it has: prompt, completion\); name it with `data.field`$"),
        ({"prompt": "alone"}, Data(), r"no field 'text' \(it has: prompt\).*or give `prompt` and `completion`"),
        ({"prompt": MESSAGES, "completion": "x"}, Data(), "'prompt' holds a list, no text; make text of messages"),
    ],
)
def test_rows_without_an_answer_that_can_be_told_are_refused(row, data, message, tmp_path, tokenizer):
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    with pytest.raises(ValueError, match=message):
        open_tokens(tmp_path / "rows.jsonl", tokenizer, data)


def test_a_text_without_a_name_is_not_this_folder(tokenizer):
    for source in ("", Sources([""])):
        with pytest.raises(ValueError, match="the name of a text is empty"):
            open_tokens(source, tokenizer, Data())


def test_blocks_of_a_token_file_begin_as_the_tokenizer_begins_a_text(tmp_path):
    tokenizer, first = tokenizer_with_bos()
    write_tokens(tmp_path / "t.npy", open_tokens([[5, 6, 7]], None, Data()))
    assert open_tokens(tmp_path / "t.npy", tokenizer, Data()).begin == (first,)
    assert open_tokens(tmp_path / "t.npy", None, Data()).begin == ()
    digests = {open_tokens(tmp_path / "t.npy", each, Data()).digest for each in (tokenizer, None)}
    assert len(digests) == 2  # other blocks, another run


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"input_ids": [5, 6], "completion_mask": [1]}], "row 0 must have a number for each of its 2 ids, it has 1"),
        ([{"input_ids": [5, 6]}, {"text": "words"}], "row 1 has no `input_ids` .it has: text"),
        ([{"input_ids": [5, 6]}, [7, 8]], "row 1 has no `input_ids` .it is a list"),
        ([{"input_ids": [[5, 6]]}], "flat lists of integers"),
    ],
)
def test_rows_that_do_not_fit_are_refused(rows, message):
    with pytest.raises(ValueError, match=message):
        open_tokens(rows, None, Data())


def answered(*lengths, begin=()):
    """A store whose every fifth token is of an answer."""
    store = store_of(*lengths, begin=begin)
    return dataclasses.replace(store, answers=store.ids % 5 == 0)


@pytest.mark.parametrize("begin", [(), (5,)])
def test_answers_stand_beside_their_tokens(begin):
    cut = cut_blocks(answered(50, 23, begin=begin), 16, packing=True, shortest=4)
    assert len(cut) > 4
    for index in range(len(cut)):
        block = cut[index]
        starts = torch.ones(16, dtype=torch.bool)
        starts[1:] = block["segments"].diff() != 0
        text = (block["segments"] >= 0) & ~(starts if begin else torch.zeros_like(starts))
        assert block["answers"].tolist() == (text & (block["input_ids"] % 5 == 0)).tolist()
        assert block["answers"].any()
    assert "answers" not in cut_blocks(store_of(50), 16, packing=False, shortest=4)[0]


def test_packing_keeps_an_answer_with_its_prompt():
    rows = [120] * 9
    store = store_of(*rows)
    ends = store.documents[:, 1]
    asked = dataclasses.replace(store, answers=np.isin(store.ids, store.ids[np.concatenate([ends - 2, ends - 1])]))
    cut = cut_blocks(asked, 300, packing=True, shortest=10)
    assert {span for block in cut.spans for span in block} == {*map(tuple, store.documents.tolist())}
    halved = {span for block in cut_blocks(store, 300, packing=True, shortest=10).spans for span in block}
    assert len(halved) > 9  # what has no answer is cut
    longer = dataclasses.replace(store_of(250), answers=np.ones(250, dtype=bool))
    assert cut_blocks(longer, 100, packing=True, shortest=10).share == 1  # what fits no block is


def test_a_repeated_passage_is_no_answer():
    store = dataclasses.replace(store_of(400), answers=np.ones(400, dtype=bool))
    cut = cut_blocks(store, 400, packing=False, shortest=4)
    block = ShuffledBlocks(cut, 0, 1, repeats=0.3, window=8)[0]
    changed = block["input_ids"] != cut[0]["input_ids"]
    assert 50 < changed.sum() < 200 and block["answers"].tolist() == (~changed).tolist()


LINES = ["The first line.", "", "The second.\n", "The last."]
JOINED = "The first line.\n\nThe second.\nThe last.\n"


def test_rows_that_are_the_lines_of_one_text_are_joined(tmp_path, tokenizer, monkeypatch):
    file = tmp_path / "lines.jsonl"
    file.write_text("".join(json.dumps({"text": line}) + "\n" for line in LINES))
    apart = open_tokens(file, tokenizer, Data())
    together = open_tokens(file, tokenizer, Data(join=True))
    assert documents(apart, tokenizer) == [line for line in LINES if line]
    assert documents(together, tokenizer) == [JOINED]
    assert together.digest != apart.digest
    fake_datasets(monkeypatch, lambda: ({"text": line} for line in LINES))
    assert documents(open_tokens("hub:owner/name", tokenizer, Data(join=True)), tokenizer) == [JOINED]
    monkeypatch.setattr(documents_module, "JOINED_CHARACTERS", 16)  # a stream need not end: it is read in pieces
    pieces = documents(open_tokens("hub:owner/name:long", tokenizer, Data(join=True)), tokenizer)
    assert len(pieces) > 1 and "".join(pieces) == JOINED


def test_text_is_tokenised_once(tmp_path, tokenizer, cache, monkeypatch):
    path = tmp_path / "t.txt"
    path.write_text(LONG)
    first = open_tokens(path, tokenizer, Data())
    assert first.ids.dtype == np.uint16
    with monkeypatch.context() as patch:
        patch.setattr(token_cache, "_tokenise", lambda *args: pytest.fail("tokenised twice"))
        assert open_tokens(path, tokenizer, Data()).digest == first.digest
    path.write_text(LONG + "!")  # other text, other tokens
    assert open_tokens(path, tokenizer, Data()).tokens == first.tokens + 1
    tokenizer = tiny_random_model()[1]
    tokenizer.add_tokens(["document"])  # another tokenizer, too
    assert open_tokens(path, tokenizer, Data()).tokens < first.tokens
    assert len([folder for folder in cache.iterdir() if folder.is_dir()]) == 3


def test_a_damaged_copy_is_made_anew(tmp_path, tokenizer, cache):
    path = tmp_path / "t.txt"
    path.write_text(LONG)
    tokens = open_tokens(path, tokenizer, Data()).tokens
    ids = next(cache.glob("*/ids.bin"))
    ids.write_bytes(ids.read_bytes()[:-10])
    assert open_tokens(path, tokenizer, Data()).tokens == tokens


def fake_datasets(monkeypatch, rows):
    calls = []

    def load_dataset(*args, **kwargs):
        calls.append((args, kwargs))
        return rows()

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    return calls


def test_a_hub_dataset_is_streamed_up_to_what_is_needed(monkeypatch, tokenizer):
    taken = []

    def rows():
        for number in range(10_000):
            taken.append(number)
            yield {"text": LONG}

    calls = fake_datasets(monkeypatch, rows)
    store = open_tokens("hub:owner/name:validation:part", tokenizer, Data(), limit=1000)
    assert 1000 <= store.tokens < 1000 + len(LONG)
    assert len(taken) <= 2 * token_cache.DOCUMENTS_AT_ONCE
    assert calls == [(("owner/name", "part"), {"split": "validation", "streaming": True})]


def test_texts_to_measure_come_from_the_hub_too(monkeypatch, tmp_path):
    calls = fake_datasets(monkeypatch, lambda: iter([{"text": " "}, *[{"text": LONG}] * 9]))
    assert documents_to_measure("hub:owner/name:test", most=2 * len(LONG) - 1) == [LONG, LONG]
    assert calls == [(("owner/name", None), {"split": "test", "streaming": True})]
    assert documents_to_measure(Path("hub:owner/name")) == [LONG] * 9
    (tmp_path / "a.txt").write_text(SHORT)
    assert documents_to_measure(tmp_path / "a.txt") == [SHORT]
    fake_datasets(monkeypatch, lambda: iter([{"text": " "}]))
    with pytest.raises(ValueError, match="holds no text"):
        documents_to_measure("hub:owner/name")


def test_an_interrupted_download_is_a_sentence_and_leaves_nothing(monkeypatch, tokenizer, cache):
    def rows():
        yield from [{"text": LONG}] * 70
        raise ConnectionError("peer went away")

    fake_datasets(monkeypatch, rows)
    with pytest.raises(OSError, match=r"stopped after 70 rows \(peer went away\).*start the same command again"):
        open_tokens("hub:owner/name", tokenizer, Data())
    assert not [folder for folder in cache.iterdir() if folder.is_dir()]


def test_a_local_dataset_through_datasets(tmp_path, tokenizer):
    datasets = pytest.importorskip("datasets")
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in (LONG, SHORT)))
    assert documents(open_tokens(f"hub:{tmp_path / 'd'}", tokenizer, Data()), tokenizer) == [LONG, SHORT]
    texts = datasets.Dataset.from_dict({"text": [LONG, SHORT]})
    for one in (texts, texts.to_iterable_dataset()):
        assert documents(open_tokens(one, tokenizer, Data()), tokenizer) == [LONG, SHORT]
        joined = documents(open_tokens(one, tokenizer, Data(join=True)), tokenizer)
        assert joined == [f"{LONG}\n{SHORT}\n"]
    ids = datasets.Dataset.from_dict({"input_ids": [[1, 2], [3]]})
    assert open_tokens(ids, None, Data()).documents.tolist() == [[0, 2], [2, 3]]
    with pytest.raises(ValueError, match=r"has splits \(train, test\).*dataset\['train'\]"):
        open_tokens(datasets.DatasetDict(train=texts, test=texts), tokenizer, Data())


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ("absent.txt", ValueError, "no such file or folder.*hub:owner/name"),
        ("empty.txt", ValueError, "holds no text"),
        ("picture.png", ValueError, "kinds that can be read"),
        ("bad.jsonl", ValueError, "line 2 of .* is not JSON"),
        ("other.jsonl", ValueError, r"no field 'text' \(it has: title\); name it with `data.field`"),
        ("number.jsonl", ValueError, "line 1 of .*the field 'text' holds a int, no text"),
        ("list.jsonl", ValueError, "line 1 of .* is a list: a document is an object with a field 'text'"),
        ("binary.txt", ValueError, "not UTF-8|zero bytes"),
        (LONG + "\n", ValueError, r"given as a list of documents, \[text\]"),
        ("x" * 300, ValueError, r"given as a list of documents, \[text\]"),
        ([], ValueError, "list is empty"),
        ([""], ValueError, "holds no text"),
        (torch.empty(0, dtype=torch.long), ValueError, "token ids must be"),
        (torch.rand(3), ValueError, r"token ids must be .*got float32 \[3\]"),
        ([[1, -2]], ValueError, "start at 0"),
        (7, TypeError, "cannot train on a int"),
    ],
)
def test_bad_text_is_refused_with_a_sentence(source, error, message, tmp_path, tokenizer, cache, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").write_text("  \n")
    (tmp_path / "picture.png").write_bytes(b"x")
    (tmp_path / "bad.jsonl").write_text('{"text": "x"}\n{')
    (tmp_path / "other.jsonl").write_text('{"title": "x"}\n')
    (tmp_path / "number.jsonl").write_text('{"text": 5}\n')
    (tmp_path / "list.jsonl").write_text('["x"]\n')
    (tmp_path / "binary.txt").write_bytes(bytes(range(256)))
    with pytest.raises(error, match=message):
        open_tokens(source, tokenizer, Data())
    assert not list(cache.glob("*/")) if cache.exists() else True


def test_text_needs_a_tokenizer():
    with pytest.raises(ValueError, match="pass `tokenizer=`"):
        open_tokens([LONG], None, Data())


def test_no_room_for_the_tokens_is_a_sentence(tokenizer, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(token_cache, "_tokenise", full)
    with pytest.raises(OSError, match=r"No space left.*FOCUS_CACHE"):
        open_tokens([LONG], tokenizer, Data())


@pytest.mark.parametrize(("vocabulary", "message"), [(200, "do not belong together"), (9000, "do not belong together")])
def test_a_tokenizer_of_another_model_is_refused(vocabulary, message, tokenizer):
    store = open_tokens([LONG], tokenizer, Data())
    check_vocabulary(store, tokenizer, len(tokenizer))
    check_vocabulary(store, tokenizer, len(tokenizer) + 60)  # embeddings are often padded
    with pytest.raises(ValueError, match=message):
        check_vocabulary(store, tokenizer, vocabulary)


def test_ids_that_the_model_does_not_know_are_refused():
    with pytest.raises(ValueError, match="token id 2,003, the model knows 100"):
        check_vocabulary(store_of(5, 4), None, 100)


def test_blocks_stay_inside_documents():
    blocks = cut_blocks(store_of(25, 9, 30), 10, packing=False, shortest=4)
    rows = [blocks[index]["input_ids"].tolist() for index in range(len(blocks))]
    starts = [1000, 1010, 3000, 3010, 3020]
    assert rows == [list(range(start, start + 10)) for start in starts]
    assert blocks.rows(2).tolist() == [rows[0], rows[2]]


def test_blocks_begin_as_the_tokenizer_begins_a_text(tokenizer):
    texts = [LONG, SHORT * 9]
    beginning, first = tokenizer_with_bos()
    store = open_tokens(texts, beginning, Data())
    assert store.begin == (first,) and first not in store.ids
    rows = cut_blocks(store, 32, packing=False, shortest=32).rows(100)
    assert rows.equal(token_blocks(beginning, texts, 32))  # what is trained on is what is measured on
    assert rows[:, 0].eq(first).all() and rows.shape == (len(LONG) // 31 + 9 * len(SHORT) // 31, 32)
    stream = pytest.importorskip("datasets").Dataset.from_dict({"text": texts}).to_iterable_dataset()
    assert open_tokens(stream, beginning, Data()).begin == (first,)
    assert open_tokens(texts, tokenizer, Data()).begin == ()
    assert open_tokens([[5, 6, 7]], beginning, Data()).begin == ()  # ids are taken as they are


def test_every_packed_piece_begins_as_a_text_does():
    blocks = cut_blocks(store_of(25, 9, 3, 30, 7, 8, begin=(7,)), 10, packing=True, shortest=5)
    seen = []
    for block in (blocks[index] for index in range(len(blocks))):
        for segment in set(block["segments"].tolist()) - {-1}:
            begin, *piece = block["input_ids"][block["segments"] == segment].tolist()
            assert begin == 7 and piece == list(range(piece[0], piece[0] + len(piece))) and len(piece) >= 4
            seen += piece
    assert len(seen) == len(set(seen)) == 25 + 9 + 27 + 7 + 8  # 3 tokens are too few, of a document or left of one
    assert blocks.share == len(seen) / (len(seen) + 6)


def test_blocks_held_out_begin_so_too():
    rest, aside = store_of(25, 95, begin=(7,)).split_off(10, 2)
    assert aside.documents.tolist() == [[102, 120]] and rest.documents.tolist() == [[0, 25], [25, 102]]
    rows = cut_blocks(aside, 10, packing=False, shortest=10).rows(2)
    assert rows.tolist() == [[7, *range(2077, 2086)], [7, *range(2086, 2095)]]


def test_packing_keeps_documents_apart_and_drops_what_cannot_teach():
    store = store_of(25, 9, 3, 30, 7, 8)
    blocks = cut_blocks(store, 10, packing=True, shortest=4)
    seen = []
    for index in range(len(blocks)):
        block = blocks[index]
        ids, segments = block["input_ids"], block["segments"]
        for segment in segments.unique().tolist():
            piece = ids[segments == segment].tolist()
            if segment < 0:
                assert piece == [0] * len(piece)
                continue
            assert len({token // 1000 for token in piece}) == 1  # one document a segment
            assert piece == list(range(piece[0], piece[0] + len(piece)))  # side by side, in order
            assert len(piece) >= 4
            seen += piece
    assert len(seen) == len(set(seen))
    assert {token // 1000 for token in seen} == {1, 2, 4, 5, 6}  # the document of 3 tokens is too short to teach
    assert len(seen) == 25 + 9 + 30 + 7 + 8


def test_blocks_that_cannot_be_cut_are_refused():
    for packing, what in ((False, "one block of 40 tokens"), (True, "the 4 tokens of a packed piece")):
        cure = "longer documents" if packing else "packing: true"
        with pytest.raises(ValueError, match=f"{what}, the longest of 2 has 3: .*{cure}.*join: true"):
            cut_blocks(store_of(3, 2), 40, packing=packing, shortest=4)


def test_order_is_the_seeds_and_any_place_can_be_asked_for():
    blocks = cut_blocks(store_of(70), 10, packing=False, shortest=4)
    order = [int(item["input_ids"][0]) for item in (ShuffledBlocks(blocks, 3, 20)[place] for place in range(20))]
    assert sorted(order[:7]) == sorted(order[7:14]) == list(range(1000, 1070, 10))  # every block once an epoch
    assert order[:7] != order[7:14]
    again = ShuffledBlocks(blocks, 3, 20)
    assert [int(again[place]["input_ids"][0]) for place in (17, 2, 9)] == [order[17], order[2], order[9]]
    other = ShuffledBlocks(blocks, 4, 20)
    assert [int(other[place]["input_ids"][0]) for place in range(7)] != order[:7]


@pytest.mark.parametrize(
    ("lengths", "length", "blocks", "left", "held_out"),
    [
        ((25, 95), 10, 2, [[0, 25], [25, 100]], [[100, 120]]),  # from the end of a long document
        (
            (115, 25, 3),
            10,
            3,
            [[0, 105], [140, 143]],
            [[105, 115], [120, 140]],
        ),  # the last that has a block, and the next
        ((80, 25), 10, 2, [[0, 80]], [[85, 105]]),  # what is left of it is less than a block
        ((40,), 10, 4, [[0, 30]], [[30, 40]]),  # a quarter at most
        ((30,), 10, 4, [[0, 30]], []),
        ((10, 10, 10, 9, 9, 9, 9), 10, 2, None, []),  # of the blocks, which what is shorter has none of
    ],
)
def test_what_is_held_out_comes_from_the_last_documents_and_is_not_trained_on(lengths, length, blocks, left, held_out):
    rest, aside = store_of(*lengths).split_off(length, blocks)
    assert left is None or rest.documents.tolist() == left
    assert aside.documents.tolist() == held_out
