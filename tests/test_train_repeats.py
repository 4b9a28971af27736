"""Training text in which passages come once more."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from focus_attn.training.blocks import ShuffledBlocks
from focus_attn.training.recipe import Stage
from focus_attn.training.repeats import SHORTEST, repeat_passages, strange_words

WINDOW = 100


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("share", [0.05, 0.15, 0.5])
def test_so_many_tokens_are_those_of_an_earlier_passage(share: float):
    ids = torch.arange(20_000)
    again = repeat_passages(ids, None, share, WINDOW + 1, generator())
    places = (again != ids).nonzero()[:, 0]
    assert len(places) / len(ids) == pytest.approx(share, rel=0.15)
    assert (places - again[places] > WINDOW).all()  # a token is its own place here
    runs = torch.tensor_split(again[places], (places.diff() != 1).nonzero()[:, 0] + 1)
    assert sum(len(run) >= SHORTEST for run in runs) > 0.9 * len(runs)


def test_a_passage_stays_in_its_document_and_leaves_its_beginning_alone():
    ids, segments = torch.arange(4000), torch.arange(4000) // 500
    again = repeat_passages(ids, segments, 0.3, WINDOW, generator(), begin=2)
    changed = again != ids
    assert changed.float().mean() > 0.2
    assert torch.equal(segments[again], segments)
    assert (again[changed] % 500 >= 2).all()


def test_short_text_has_nothing_to_repeat():
    ids = torch.arange(WINDOW)
    assert torch.equal(repeat_passages(ids, None, 0.5, WINDOW + 1, generator()), ids)


def test_strange_passages_are_random_and_still_come_twice():
    ids, vocabulary = torch.arange(20_000), torch.arange(20_000, 20_100)
    again = repeat_passages(ids, None, 0.1, WINDOW + 1, generator(), strange=1.0, words=[vocabulary])
    foreign = (again >= 20_000).nonzero()[:, 0]
    assert 0.02 < len(foreign) / len(ids) < 0.12  # half of a tenth, where it stands and where it comes again
    assert again[foreign].unique().numel() == 100
    runs = torch.tensor_split(again[foreign], (foreign.diff() != 1).nonzero()[:, 0] + 1)
    texts = [tuple(run.tolist()) for run in runs if len(run) >= SHORTEST]
    assert len(texts) > 20
    assert sum(texts.count(text) >= 2 for text in texts) > 0.9 * len(texts)  # a third one may copy a part
    shuffled = repeat_passages(ids, None, 0.1, WINDOW + 1, generator(), strange=1.0)
    moved = (shuffled != ids).nonzero()[:, 0]
    assert (shuffled[moved] - moved > WINDOW).any()  # words of the block itself, from later on too


class OneBlock:
    """What `ShuffledBlocks` asks of its blocks."""

    store = SimpleNamespace(begin=[])

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.arange(3000)}


def test_a_place_in_the_data_has_its_own_passages_whenever_it_is_asked_for():
    data = ShuffledBlocks(OneBlock(), 3, 10, repeats=0.2, window=WINDOW)
    first, second = data[0]["input_ids"], data[1]["input_ids"]
    assert not torch.equal(first, second)
    assert torch.equal(ShuffledBlocks(OneBlock(), 3, 10, repeats=0.2, window=WINDOW)[1]["input_ids"], second)
    assert not torch.equal(ShuffledBlocks(OneBlock(), 4, 10, repeats=0.2, window=WINDOW)[1]["input_ids"], second)


def test_a_place_in_the_data_has_its_strange_words_too():
    words = [torch.arange(3000, 3100)]
    strange = ShuffledBlocks(OneBlock(), 3, 10, repeats=0.2, strange=1.0, words=words, window=WINDOW)
    assert strange[0]["input_ids"].max() >= 3000
    assert torch.equal(strange[0]["input_ids"], strange[0]["input_ids"])


def test_strange_words_are_those_of_the_text_and_digits():
    tokenizer = SimpleNamespace(get_vocab=lambda: {"a": 0, "7": 3, "12": 5, "b9": 4, "²": 6})
    types, digits = strange_words(np.array([4, 1, 4, 0]), tokenizer)
    assert types.tolist() == [0, 1, 4]
    assert digits.tolist() == [3, 5]
    with pytest.raises(ValueError, match="give the `tokenizer`"):
        strange_words(np.array([4, 1]), None)


def test_more_than_half_is_refused():
    with pytest.raises(ValueError, match="repeats"):
        Stage(repeats=0.6)
