"""What is said of the groups: word classes, purity, two texts, long-range pairs."""

import dataclasses
import json
from collections import Counter

import numpy as np
import pytest
import torch
from tiny import SPARSE, focus, tokens

from focus_attn import get_focus_model
from focus_attn.evaluation.coverage import coverage_by_layer
from focus_attn.report.acting_sinks import ActingSinks
from focus_attn.report.attended import LEAST, attended_keys
from focus_attn.report.domains import compare_domains
from focus_attn.report.group_content import describe_groups
from focus_attn.report.long_pairs import StrongestPairs
from focus_attn.report.sample import RoutingSample, SampledLayer, take_sample, token_pieces
from focus_attn.report.word_classes import CLASSES, word_classes
from focus_attn.zoo import tiny_random_model


def sample(pieces, key, query=None, num_groups=3, length=None):
    """One layer, one router, one group a token."""
    layer = SampledLayer(*(np.array(ids, dtype="<u1")[None, :, None] for ids in (query or key, key)))
    return RoutingSample(length or len(pieces), num_groups, list(pieces), {4: layer})


# Word classes


def test_tokens_have_the_class_of_their_word():
    pytest.importorskip("textblob")
    pieces = ["Hen", "ry", " did", "n", "'t", " see", " the", " old", " house", ",", " and", " 1", "2", "\n", "."]
    classes = dict(zip(pieces, word_classes(pieces), strict=True))
    assert classes["Hen"] == classes["ry"] == "name"
    assert classes[" did"] == classes[" see"] == "verb"
    assert classes["n"] == classes["'t"] == "adverb"
    assert (classes[" the"], classes[" old"], classes[" house"]) == ("determiner", "adjective", "noun")
    assert (classes[","], classes[" and"], classes[" 1"], classes["2"]) == (
        "punctuation",
        "conjunction",
        "number",
        "number",
    )
    assert (classes["\n"], classes["."]) == ("space", "punctuation")


def test_every_token_has_a_class_whatever_the_text():
    pytest.importorskip("textblob")
    pieces = ["/", " a/b", "\n\n", "", " ", "&slash;", "日本", " x_y", "\u2019s", "\t<b>", "\n \n", "…"]
    classes = word_classes(pieces)
    assert len(classes) == len(pieces) and set(classes) <= set(CLASSES)
    assert word_classes([]) == []


# Groups


def test_purity_is_one_where_groups_are_classes():
    names = ["noun", "verb", "punctuation"]
    classes = names * 40
    pieces = [f" {name}" for name in classes]
    key = [names.index(name) for name in classes]
    shuffled = np.random.default_rng(0).permutation(key).tolist()
    (layer,) = describe_groups(sample(pieces, key, query=shuffled), classes)
    (router,) = layer["routers"]
    pure, mixed = router["key"]["classes"], router["query"]["classes"]
    assert pure["purity"] == 1 and pure["information"] == pytest.approx(1)
    assert 1 / 3 <= pure["purity_random"] < 0.6
    assert mixed["purity"] == pytest.approx(mixed["purity_random"], abs=0.1) and mixed["information"] < 0.1
    assert pure["largest"] == names and pure["largest_share"] == [1, 1, 1]
    assert router["key"]["tokens"] == [[f" {name}"] for name in names]


def test_tokens_listed_are_those_a_group_has_more_of_than_the_text():
    pieces = ["the"] * 50 + ["cat"] * 10 + ["dog"] * 10
    key = [0, 1] * 25 + [0] * 10 + [1] * 10
    (layer,) = describe_groups(sample(pieces, key), None)
    groups = layer["routers"][0]["key"]
    assert groups["tokens"] == [["cat"], ["dog"], []]
    assert groups["shares"] == pytest.approx([0.5, 0.5, 0])
    assert "classes" not in groups


def test_a_sample_survives_json():
    model, tokenizer = tiny_random_model()
    model = get_focus_model(model, SPARSE)
    blocks = torch.tensor([list(b"what a token sees, and why"), list(b"where the attention goes..")])
    taken = take_sample(model, tokenizer, blocks)
    again = RoutingSample.from_dict(json.loads(json.dumps(taken.to_dict())))
    assert again.pieces == taken.pieces and again.length == blocks.shape[1]
    for layer_idx, layer in taken.layers.items():
        assert layer.key.shape == (2, blocks.numel(), 1)
        np.testing.assert_array_equal(again.layers[layer_idx].key, layer.key)
        np.testing.assert_array_equal(again.layers[layer_idx].query, layer.query)


def test_a_character_of_several_tokens_stands_in_the_first():
    _, tokenizer = tiny_random_model()
    ids = tokenizer("a€b")["input_ids"]
    assert len(ids) == 5
    assert token_pieces(tokenizer, ids) == ["a", "€", "", "", "b"]
    assert token_pieces(tokenizer, ids[:2])[0] == "a"  # cut inside the character: nothing to join it with


# Two texts


def test_a_token_that_keeps_its_group_agrees_in_both_texts():
    pieces = ["a", "b", "c"] * 20
    same, moved = [0, 1, 2] * 20, [1, 2, 0] * 20
    (layer,) = compare_domains(sample(pieces, same), sample(pieces, same))
    assert layer["key"]["agreement_within"] == layer["key"]["agreement_across"] == 1
    assert layer["key"]["agreement_chance"] == pytest.approx(1 / 3, abs=0.02) and layer["key"]["shift"] == 0
    (layer,) = compare_domains(sample(pieces, same), sample(pieces, moved))
    assert layer["key"]["agreement_within"] == 1 and layer["key"]["agreement_across"] == 0
    (layer,) = compare_domains(sample(pieces, same), sample(pieces, [0] * 60))
    assert layer["key"]["shift"] == pytest.approx(2 / 3)


def test_texts_without_a_common_token_agree_in_nothing():
    (layer,) = compare_domains(sample(["a"] * 6, [0] * 6), sample(["z"] * 6, [0] * 6))
    assert layer["key"]["agreement_across"] == 0 and layer["key"]["agreement_within"] == 1


# Pairs


@pytest.fixture(scope="module")
def watched():
    """All distant attention of a tiny model with a dense head, and what the watcher picked of it."""
    model, blocks = focus(config=dataclasses.replace(SPARSE, dense_heads=((1, 0),))), tokens(2, 48)
    pieces = [[f" {chr(97 + token % 26) * 3}" if token % 3 else "," for token in block] for block in blocks.tolist()]
    pairs, views = StrongestPairs(pieces, per_layer=4), []

    def look(view):
        pairs(view)
        views.append(view)

    coverage_by_layer(model, blocks, queries=None, watchers=[look], weights_at_once=8 * 4 * 48)
    return pairs, views, pieces


def test_pairs_are_the_strongest_of_two_different_words_in_routed_heads(watched):
    pairs, views, pieces = watched
    found = pairs.to_dict()
    for name, kept in (("kept", True), ("dropped", False)):
        for layer_idx in {view.layer_idx for view in views}:
            best = {}
            for view in (view for view in views if view.layer_idx == layer_idx):
                words, shared, acting = pieces[view.block], view.by_head(view.shared), view.acts_as_sink
                for head, row, key in (view.distant > 0).nonzero().tolist():
                    query = int(view.positions[row])
                    pair = words[query], words[key]
                    dense = layer_idx == 1 and head < 2  # the query heads of its KV head 0
                    counts = "," not in pair and pair[0] != pair[1] and not acting[head, key] and not dense
                    if counts and bool(shared[head, row, key]) == kept:
                        best[pair] = max(best.get(pair, 0.0), view.distant[head, row, key].item())
            listed = [pair for pair in found[name] if pair["layer_idx"] == layer_idx]
            assert [pair["weight"] for pair in listed] == pytest.approx(sorted(best.values(), reverse=True)[:4])
            for pair in listed:
                words = pieces[pair["block"]]
                assert pair["distance"] == pair["query"] - pair["key"] > SPARSE.window
                assert pair["query_text"][1] == words[pair["query"]] and pair["key_text"][1] == words[pair["key"]]
                assert 0 <= pair["affinity"] <= 1


def test_acting_sinks_are_counted_by_their_text(watched):
    _, views, pieces = watched
    sinks = ActingSinks(pieces)
    for view in views:
        sinks(view)
    found = sinks.to_dict(most=100)
    for layer in found["layers"]:
        last = [view for view in views if view.last and view.layer_idx == layer["layer_idx"]]
        keys = [(view.block, key) for view in last for _, key in view.acts_as_sink.nonzero().tolist()]
        assert layer["keys"] == pytest.approx(len(keys) / sum(len(view.acts_as_sink) for view in last))
        assert dict(layer["tokens"]) == Counter(pieces[block][key] for block, key in keys)
        assert keys


def test_attended_keys_are_all_that_reach_the_least():
    import base64

    model, block = focus(), tokens(1, 48)[0]
    packed = json.loads(json.dumps(attended_keys(model, block)))
    views = []
    coverage_by_layer(model, block[None], queries=None, watchers=[views.append])
    for view in views:
        layer = packed["layers"][str(view.layer_idx)]
        counts, keys, percent = (
            np.frombuffer(base64.b64decode(layer[name]), dtype)
            for name, dtype in (("counts", "<u1"), ("keys", "<u2"), ("percent", "<u1"))
        )
        weights = view.distant.unflatten(0, (2, -1)).mean(1)
        expected = [
            (router, int(view.positions[row]), key, round(100 * weights[router, row, key].item()))
            for router, row, key in (weights >= LEAST).nonzero().tolist()
        ]
        owners = np.repeat(np.arange(len(counts)), counts)
        found = zip(owners // len(block), owners % len(block), keys, percent, strict=True)
        assert sorted(tuple(map(int, one)) for one in found) == sorted(expected)
        assert len(expected) > 0


def test_a_block_inside_the_window_has_no_distant_keys():
    packed = attended_keys(focus(), tokens(1, 4)[0])
    assert all(layer["keys"] == "" for layer in packed["layers"].values())
