"""Scores of requests against plain computations: batches, prefixes, generation, interruptions."""

import json

import pytest
import torch
from tiny import SPARSE, VOCAB, tiny_model, tokens

from focus_attn import FocusConfig, get_focus_model
from focus_attn.evaluation import scoring
from focus_attn.evaluation.requests import Item, Requests, Task, merge
from focus_attn.evaluation.score_file import ScoreFile, read_scores
from focus_attn.evaluation.scoring import score
from focus_attn.zoo import tiny_random_model

HEADER = {"requests": "x"}


def ids(length, seed):
    return tokens(1, length, seed)[0].tolist()


def likelihood_requests(prefixes=0):
    """Items of many lengths, behind none or one of several prefixes."""
    names = {f"p{n}": ids(30 + n, 100 + n) for n in range(prefixes)}
    items = [
        Item(
            "t", str(n), "loglikelihood", ids(3 + 5 * n, n), [ids(1 + c + n % 3, 50 + n + c) for c in range(1 + n % 3)]
        )
        for n in range(9)
    ]
    if prefixes:
        items = [Item(**{**vars(item), "prefix": f"p{n % prefixes}"}) for n, item in enumerate(items)]
    return Requests({"t": Task("t", "choice", "task")}, items, names)


@torch.no_grad()
def plain_scores(model, requests, item):
    """One sequence at a time, whole logits."""
    found = []
    start = [*(requests.prefixes[item.prefix] if item.prefix else []), *item.context]
    for continuation in item.continuations:
        logits = model(torch.tensor([[*start, *continuation]])).logits[0].double().log_softmax(-1)
        rows = logits[len(start) - 1 : -1]
        wanted = torch.tensor(continuation)
        found.append([rows[range(len(wanted)), wanted].sum().item(), bool((rows.argmax(-1) == wanted).all())])
    return found


def scored(model, requests, path, **options):
    scores = ScoreFile(path, HEADER)
    score(model, requests, scores, **options)
    return scores.scores


@pytest.mark.parametrize("prefixes", [0, 2], ids=["whole", "behind a prefix"])
@pytest.mark.parametrize("with_focus", [False, True], ids=["base", "focus"])
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma2", "llama-sdpa"])
def test_likelihoods_equal_a_plain_computation(architecture, with_focus, prefixes, tmp_path):
    name, _, attention = architecture.partition("-")
    model = tiny_model(name, attention or "eager")
    model = get_focus_model(model, SPARSE) if with_focus else model
    requests = likelihood_requests(prefixes)
    scores = scored(model, requests, tmp_path / "s.jsonl", batch_tokens=200)
    for item in requests.items:
        for (log_prob, greedy), (expected, expected_greedy) in zip(
            scores[item.key]["scores"], plain_scores(model, requests, item), strict=True
        ):
            assert log_prob == pytest.approx(expected, abs=2e-4)
            assert greedy == expected_greedy


def test_prefixes_need_not_be_shared(tmp_path):
    model, requests = get_focus_model(tiny_model(), SPARSE), likelihood_requests(prefixes=2)
    shared = scored(model, requests, tmp_path / "shared.jsonl")
    whole = scored(model, requests, tmp_path / "whole.jsonl", share_prefixes=False)
    for key, found in shared.items():
        assert [s[0] for s in whole[key]["scores"]] == pytest.approx([s[0] for s in found["scores"]], abs=2e-4)


def test_losses_are_summed_between_the_edges(tmp_path):
    model = get_focus_model(tiny_model(), SPARSE)
    blocks = [ids(40, n) for n in range(3)]
    items = [Item("t", str(n), "losses", block, options={"edges": [1, 4, 20]}) for n, block in enumerate(blocks)]
    items.append(Item("t", "short", "losses", ids(24, 9), options={"edges": [1, 4, 20]}))
    items.append(Item("t", "strided", "losses", blocks[0], options={"edges": [30]}))
    scores = scored(model, Requests({"t": Task("t", "text_losses", "perplexity")}, items), tmp_path / "s.jsonl")
    with torch.no_grad():
        logits = model(torch.tensor(blocks)).logits.double()
    losses = torch.nn.functional.cross_entropy(
        logits[:, :-1].transpose(1, 2), torch.tensor(blocks)[:, 1:], reduction="none"
    )
    for n in range(3):
        expected = [losses[n, first - 1 : last - 1].sum().item() for first, last in ((1, 4), (4, 20), (20, 40))]
        assert scores["t", str(n)]["losses"] == pytest.approx(expected, abs=1e-3)
    assert scores["t", "strided"]["losses"] == pytest.approx([losses[0, 29:].sum().item()], abs=1e-3)
    with model.record_stats() as stats, torch.no_grad():
        model(torch.tensor([ids(24, 9)]))
    assert scores["t", "short"]["pairs_kept"] == pytest.approx(stats.pairs_kept)
    with model.disable_focus():
        assert (
            "pairs_kept"
            not in scored(
                model, Requests({"t": Task("t", "text_losses", "perplexity")}, items[:1]), tmp_path / "base.jsonl"
            )["t", "0"]
        )


def test_window_covers_prompt_scores_are_those_of_the_base_model(tmp_path):
    """Short forms: where every prompt fits the window, Focus is the base model."""
    requests = likelihood_requests()
    longest = max(map(requests.length, requests.items))
    model = get_focus_model(tiny_model(attn_implementation="sdpa"), FocusConfig(num_groups=4, window=longest))
    focus = scored(model, requests, tmp_path / "focus.jsonl")
    with model.disable_focus():
        base = scored(model, requests, tmp_path / "base.jsonl")
    for key, found in base.items():
        for mine, theirs in zip(focus[key]["scores"], found["scores"], strict=True):
            assert mine[0] == pytest.approx(theirs[0], abs=1e-5) and mine[1] == theirs[1]
    narrow = get_focus_model(tiny_model(attn_implementation="sdpa"), SPARSE)
    other = scored(narrow, requests, tmp_path / "narrow.jsonl")
    assert any(abs(other[key]["scores"][0][0] - base[key]["scores"][0][0]) > 1e-3 for key in base)


def test_generation_is_greedy_and_stops(tmp_path):
    model, tokenizer = tiny_random_model()
    model = get_focus_model(model, FocusConfig(num_groups=4, window=4))
    texts = ["hello", "a longer prompt than the first one", "the third"]
    prompts = [tokenizer.encode(text) for text in texts]
    options = [{"max_new_tokens": 12}, {"max_new_tokens": 9}, {"max_new_tokens": 12}]
    with torch.no_grad():
        free = [model.generate(torch.tensor([p]), max_new_tokens=12, do_sample=False)[0, len(p) :] for p in prompts]
    whole = [tokenizer.decode(written, skip_special_tokens=True) for written in free]
    stop = whole[2][3]
    options[2]["until"] = [stop]
    items = [
        Item("t", str(n), "generate", prompt, options=option)
        for n, (prompt, option) in enumerate(zip(prompts, options, strict=True))
    ]
    requests = Requests({"t": Task("t", "found_strings", "retrieval")}, items)
    model.base_model.generation_config.repetition_penalty = 5.0  # some models come with one
    scores = scored(model, requests, tmp_path / "s.jsonl", tokenizer=tokenizer)
    assert scores["t", "0"]["text"] == whole[0]
    assert scores["t", "1"]["text"] == tokenizer.decode(free[1][:9], skip_special_tokens=True) != whole[1]
    assert scores["t", "2"]["text"] == whole[2][: whole[2].index(stop)]
    with pytest.raises(ValueError, match="tokenizer"):
        scored(model, requests, tmp_path / "without.jsonl")


def test_a_killed_run_goes_on_where_it_was(tmp_path, monkeypatch):
    model, requests = tiny_model(), likelihood_requests()
    whole = scored(model, requests, tmp_path / "whole.jsonl", batch_tokens=64)
    path = tmp_path / "killed.jsonl"
    calls = []

    def die(done, total):
        calls.append(done)
        if len(calls) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        scored(model, requests, path, batch_tokens=64, progress=die)
    with path.open("a") as file:
        file.write('{"task": "t", "ite')  # cut in the middle of a line
    asked = []
    original = scoring.Scorer._likelihoods
    monkeypatch.setattr(
        scoring.Scorer,
        "_likelihoods",
        lambda self, items, cache: asked.extend(i.key for i in items) or original(self, items, cache),
    )
    _, before = read_scores(path)
    assert 0 < len(before) < len(whole)
    again = scored(model, requests, path, batch_tokens=64)
    assert not set(asked) & set(before) and again == whole
    assert read_scores(path)[1] == whole


def test_memory_that_does_not_suffice_halves_the_batch(tmp_path, monkeypatch):
    model, requests = tiny_model(), likelihood_requests()
    whole = scored(model, requests, tmp_path / "whole.jsonl")
    original, sizes = scoring.Scorer._likelihoods, []

    def small(self, items, cache):
        sizes.append(len(items))
        if len(items) > 2:
            raise torch.OutOfMemoryError("no room")
        return original(self, items, cache)

    monkeypatch.setattr(scoring.Scorer, "_likelihoods", small)
    halved = scored(model, requests, tmp_path / "halved.jsonl")
    assert max(sizes) == 9 and halved.keys() == whole.keys()
    for key, found in whole.items():
        assert [s[0] for s in halved[key]["scores"]] == pytest.approx([s[0] for s in found["scores"]], abs=1e-4)


def test_a_file_killed_before_its_header_is_begun_anew(tmp_path):
    path, header = tmp_path / "s.jsonl", {"requests": "x", "ranks": (4, 8)}
    path.write_text('{"requ')
    ScoreFile(path, header).append([(("t", "0"), {"text": "a"})])
    assert ScoreFile(path, header).scores == {("t", "0"): {"text": "a"}}
    assert read_scores(path)[0] == {"requests": "x", "ranks": [4, 8]}


def test_a_decoder_keeps_what_was_put_on_it(tmp_path):
    """accelerate replaces `forward` on the module itself."""
    model, requests = tiny_model(), likelihood_requests()
    expected = scored(model, requests, tmp_path / "plain.jsonl")
    decoder, calls = model.get_decoder(), []
    plain = decoder.forward
    decoder.forward = lambda *args, **kwargs: calls.append(1) or plain(*args, **kwargs)
    assert scored(model, requests, tmp_path / "hooked.jsonl", batch_tokens=64).keys() == expected.keys()
    assert len(calls) > 1


def test_requests_survive_a_file_and_metrics_need_no_tokens(tmp_path):
    requests = likelihood_requests(prefixes=2)
    for name in ("r.jsonl", "r.jsonl.xz"):
        read = Requests.load(requests.save(tmp_path / name))
        assert read.digest == requests.digest == read._digest()
        assert [item.key for item in read.items] == [item.key for item in requests.items]
        assert read.prefixes == requests.prefixes
    bare = Requests.load(requests.without_tokens().save(tmp_path / "bare.jsonl"))
    assert bare.digest == requests.digest and not bare.items[0].context
    with pytest.raises(ValueError, match="for the metrics"):
        scored(tiny_model(), bare, tmp_path / "s.jsonl")


def test_what_a_user_gets_wrong(tmp_path):
    model, requests = tiny_model(), likelihood_requests()
    scored(model, requests, tmp_path / "s.jsonl")
    with pytest.raises(ValueError, match="another run"):
        ScoreFile(tmp_path / "s.jsonl", {"requests": "y"})
    task = {"t": Task("t", "choice", "task")}
    far = Requests(task, [Item("t", "0", "loglikelihood", ids(600, 0), [ids(2, 1)])])
    with pytest.raises(ValueError, match="512 positions"):
        scored(model, far, tmp_path / "far.jsonl")
    foreign = Requests(task, [Item("t", "0", "loglikelihood", [VOCAB + 5], [[1]])])
    with pytest.raises(ValueError, match="another model's tokenizer"):
        scored(model, foreign, tmp_path / "foreign.jsonl")
    leaking = get_focus_model(tiny_model(), FocusConfig.paper(num_groups=4, window=3, routing="paper_leaky"))
    with pytest.raises(ValueError, match="later tokens"):
        scored(leaking, requests, tmp_path / "leaking.jsonl")
    (tmp_path / "bad.jsonl").write_text(json.dumps({"type": "requests", "format": 0}) + "\n")
    with pytest.raises(ValueError, match="format 0"):
        Requests.load(tmp_path / "bad.jsonl")
    (tmp_path / "worse.jsonl").write_text("hello\n")
    with pytest.raises(ValueError, match="not a file of requests"):
        Requests.load(tmp_path / "worse.jsonl")
    with pytest.raises(ValueError, match="asked for twice"):
        merge([requests, requests], {})
    with pytest.raises(ValueError, match="two items"):
        Requests(task, [requests.items[0]] * 2)
