"""Perplexity and retrieval as requests: what is counted, what is hidden where."""

import math

import pytest
from eval_data import write_text
from tokenizers import Tokenizer, models, normalizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from focus_attn import FocusConfig, get_focus_model
from focus_attn.evaluation import perplexity, token_blocks
from focus_attn.evaluation.metrics import MEASURES
from focus_attn.evaluation.requests import Item
from focus_attn.evaluation.retrieval import KINDS, SPREAD, retrieval
from focus_attn.evaluation.score_file import ScoreFile
from focus_attn.evaluation.scoring import score
from focus_attn.evaluation.summary import by_position, summarise
from focus_attn.evaluation.text_requests import blocked, position_edges, strided
from focus_attn.text import read_text
from focus_attn.zoo import tiny_random_model


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    return read_text(write_text(tmp_path_factory.mktemp("text") / "t.txt"))


@pytest.fixture(scope="module")
def tiny():
    return tiny_random_model()


def test_blocked_is_the_perplexity_of_the_library(tiny, documents, tmp_path):
    model, tokenizer = tiny
    model = get_focus_model(model, FocusConfig(num_groups=4, window=16))
    requests = blocked(tokenizer, documents, 100, 16, max_blocks=5)
    scores = ScoreFile(tmp_path / "focus.jsonl", {})
    score(model, requests, scores)
    expected = perplexity(model, tokenizer, documents, length=100, window=16, max_blocks=5)
    ppl, bits = summarise(requests, {"focus": scores.scores})
    assert (ppl.metric, ppl.n) == ("perplexity", 5)
    assert ppl.models["focus"].estimate == pytest.approx(expected.ppl, rel=1e-5)
    assert ppl.pairs_kept["focus"] == pytest.approx(expected.pairs_kept)
    assert bits.models["focus"].estimate == pytest.approx(math.log2(expected.ppl), rel=1e-5)  # a token is a byte here
    positions = by_position(requests, {"focus": scores.scores})
    assert [row.metric for row in positions] == ["1-16", "17-31", "32-49", "50-63", "64-99"]
    past = [row for row in positions if row.metric in ("50-63", "64-99")]
    half = (math.log(past[0].models["focus"].estimate) * 14 + math.log(past[1].models["focus"].estimate) * 36) / 50
    assert math.exp(half) == pytest.approx(expected.ppl_last_half, rel=1e-5)
    model.unload()


def test_strided_windows_predict_every_token_once(tiny):
    _, tokenizer = tiny
    text = "".join(chr(97 + n % 26) for n in range(100))
    requests = strided(tokenizer, [text], 40, 10)
    starts = [int(item.item.split(":")[1]) for item in requests.items]
    assert starts == [0, 10, 20, 30, 40, 50, 60]
    counted = [start + place for start in starts for place in range(requests.items[0].answer["first"], 40)]
    assert counted == list(range(30, 100))
    assert all(item.answer["bytes"] == 10 and len(item.context) == 40 for item in requests.items)


def test_a_tokenizers_first_token_begins_every_block():
    _, tokenizer = tiny_random_model()
    end = tokenizer.eos_token_id
    assert token_blocks(tokenizer, "abcdef", 3).tolist() == [tokenizer.encode("abc"), tokenizer.encode("def")]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<end> $A", special_tokens=[("<end>", end)])
    tokenizer.bos_token = "<end>"
    text = "".join(chr(97 + n % 26) for n in range(60))
    rows = token_blocks(tokenizer, text, 20).tolist()
    assert [tokenizer.decode(row) for row in rows] == [f"<end>{text[start : start + 19]}" for start in (0, 19, 38)]
    items = blocked(tokenizer, [text], 20, 4).items
    assert [item.context for item in items] == rows and all(item.answer["bytes"] == 15 for item in items)
    starts = [int(item.item.split(":")[1]) for item in strided(tokenizer, [text], 20, 5).items]
    assert starts == list(range(0, 41, 5))  # the last 5 of 19 letters count, so that none is left out between two
    with pytest.raises(ValueError, match="`length` must be at least 2"):
        token_blocks(tokenizer, text, 1)


def test_edges():
    assert position_edges(2048, 128) == [1, 129, 256, 512, 1024]
    assert position_edges(100, 16) == [1, 17, 32, 50, 64]


@pytest.mark.parametrize("kind", KINDS)
def test_facts_are_in_the_text_at_their_depth(tiny, documents, kind):
    _, tokenizer = tiny
    requests = retrieval(tokenizer, kind, documents, [1000, 1500], depths=(0.0, 0.5, 1.0), per_cell=2)
    assert len(requests.tasks) == 2 and len(requests.items) == 2 * 3 * 2
    for item in requests.items:
        length, text = item.answer["length"], tokenizer.decode(item.context)
        assert 0.9 * length < requests.length(item) <= length
        for string in item.answer["strings"]:
            assert string in text
        if kind in SPREAD:
            assert item.kind == "generate" and item.answer["depth"] is None
            continue
        assert [tokenizer.decode(tokens) for tokens in item.continuations] == [" " + item.answer["strings"][0]]
        body = text.index(item.answer["strings"][0]) / len(text)
        low, high = {0.0: (0, 0.3), 0.5: (0.35, 0.65), 1.0: (0.65, 1)}[item.answer["depth"]]
        assert low <= body <= high
        if kind == "multi_key":
            assert text.count("special magic numbers for") == 4


def test_answers_are_tokens_as_they_go_on(documents):
    """Tokenizers like Llama 2's put a space before every text: an answer has one already."""
    letters = sorted({*"".join(documents), *"".join(map(chr, range(33, 127))), "\n", "▁"} - {" "})
    vocabulary = {token: n for n, token in enumerate(["<unk>", "▁▁", *letters])}
    spaces = Tokenizer(models.BPE(vocabulary, [("▁", "▁")], unk_token="<unk>"))
    spaces.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=spaces, unk_token="<unk>")
    item = retrieval(tokenizer, "needle", documents, [2000], [0.5], 1).items[0]
    written = "".join(tokenizer.convert_ids_to_tokens([*item.context, *item.continuations[0]]))
    assert written.endswith(f"text▁is:▁{item.answer['strings'][0]}") and "▁▁" not in written


def test_a_chain_is_in_its_order_and_not_given_away(tiny, documents):
    _, tokenizer = tiny
    for item in retrieval(tokenizer, "variables", documents, [1500], per_cell=2).items:
        text, names = tokenizer.decode(item.context), item.answer["strings"]
        places = [text.index(f"VAR {name} = ") for name in names]
        assert places == sorted(places) and len(set(names)) == 5
        question = text.rpartition("\n")[2]
        assert not any(name in question for name in names)


def test_retrieval_repeats_with_its_seed(tiny, documents):
    _, tokenizer = tiny
    first, again, other = (
        retrieval(tokenizer, "needle", documents, [800], per_cell=1, seed=seed).digest for seed in (0, 0, 1)
    )
    assert first == again != other


def test_what_counts_as_found():
    def value(measure, scored, **answer):
        return MEASURES[measure](Item("t", "0", "generate", [1], answer=answer), scored)

    assert value("found_strings", {"text": "12 and 34"}, strings=["12", "34", "56", "78"]) == {"recall": 0.5}
    assert value("exact_continuation", {"scores": [[-1.0, True]]}) == {"recall": 1.0}
    # the likeliest is the second; for each character it is the first
    scored = {"scores": [[-10.0, False], [-5.0, False]]}
    assert value("choice", scored, gold=0, characters=[20, 2]) == {"acc": 0.0, "acc_norm": 1.0}
    shares = value("probability_of_true", {"scores": [[math.log(0.1), 0], [math.log(0.3), 0]]}, labels=[1, 0])
    assert shares == {"acc": pytest.approx(0.25)}


def test_what_a_user_gets_wrong(tiny, documents):
    _, tokenizer = tiny
    with pytest.raises(ValueError, match="nothing past a window"):
        blocked(tokenizer, documents, 100, 120)
    with pytest.raises(ValueError, match="at least 0"):
        blocked(tokenizer, documents, 100, -1)
    with pytest.raises(ValueError, match="no document reaches 100000 tokens"):
        blocked(tokenizer, documents, 100_000, 16)
    with pytest.raises(ValueError, match="stride"):
        strided(tokenizer, documents, 40, 40)
    with pytest.raises(ValueError, match="alone take"):
        retrieval(tokenizer, "needle", documents, [100])
    with pytest.raises(ValueError, match="no sentence"):
        retrieval(tokenizer, "needle", ["hm"], [1000])
    with pytest.raises(ValueError, match="`kind`"):
        retrieval(tokenizer, "noodle", documents, [1000])
    with pytest.raises(ValueError, match="depth"):
        retrieval(tokenizer, "needle", documents, [1000], depths=(50,))


def test_a_text_that_has_to_be_repeated_is_named():
    tokenizer = tiny_random_model()[1]
    with pytest.warns(UserWarning, match=r"fewer than the length of 1,000: it is repeated"):
        retrieval(tokenizer, "needle", ["Hello world. This is short."], [1000], per_cell=1)
