"""Benchmarks as part of a comparison."""

import dataclasses
import json

import pytest
import torch
from rich.console import Console

from focus_attn.baselines import make_baseline
from focus_attn.compare import Comparison, Dataset, Method
from focus_attn.compare.runner import Settings, run
from focus_attn.compare.subject import OutOfTimeError
from focus_attn.compare.tasks import is_scored, score_row, task_cell
from focus_attn.compare.terminal import task_table
from focus_attn.compare.together import put_together
from focus_attn.evaluation.requests import Item, Requests, Task
from focus_attn.evaluation.score_file import read_scores
from focus_attn.zoo import tiny_random_model


def ids(count, seed):
    return torch.randint(0, 250, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module")
def requests():
    items = [
        Item(
            "quiz",
            str(n),
            "loglikelihood",
            ids(40, n),
            [ids(3, 100 + n), ids(3, 200 + n)],
            prefix="shots",
            answer={"gold": n % 2, "characters": [3, 3]},
        )
        for n in range(12)
    ]
    return Requests({"quiz": Task("quiz", "choice", "task")}, items, {"shots": ids(30, 9)})


@pytest.fixture
def comparison(tmp_path):
    text = tmp_path / "prose.txt"
    text.write_text("the white whale " * 100)
    return Comparison(
        models=("tiny",),
        data={"prose": Dataset(test=str(text), lengths=(64,), blocks=2)},
        window=8,
        timing=False,
        tasks=True,
        methods=(
            Method(name="all of it", attention="window", options={"window": 500}),
            Method(name="near", attention="window", options={"window": 2}),
        ),
    )


def settings(folder, requests):
    return Settings(folder, torch.device("cpu"), torch.float32, requests=requests)


def test_every_row_is_scored_and_compared_with_the_base(comparison, requests, tmp_path):
    outcome = run(comparison, settings(tmp_path, requests))
    row = next(row for row in outcome.tasks if row["metric"] == "acc")
    assert list(row["models"]) == ["base", "all of it", "near"]
    assert row["n"] == 12
    assert row["against_base"]["all of it"]["estimate"] == 0.0
    assert len(list((tmp_path / "scores").iterdir())) == 3
    shown = task_table(outcome.tasks)
    assert [column.header for column in shown.columns] == ["task", "n", "base", "all of it", "near"]


ROWS = ["all of it", "near"]


def only(comparison, *names):
    return dataclasses.replace(comparison, methods=tuple(one for one in comparison.methods if one.name in names))


def written(folder, name, comparison, outcome):
    content = {"comparison": comparison.to_dict(), **dataclasses.asdict(outcome), "scores": outcome.scored}
    (folder / name).write_text(json.dumps(content))
    return folder / name


def test_benchmarks_of_several_runs_are_put_together(comparison, requests, tmp_path):
    """From what each row made of every item, as if they had been asked in one run."""
    whole = run(comparison, settings(tmp_path / "whole", requests))
    files = []
    for name in ("near", "all of it"):
        part = only(comparison, name)
        files.append(written(tmp_path, f"{name}.json", part, run(part, settings(tmp_path / name, requests))))
    with pytest.raises(ValueError, match=r"have benchmarks: give the --requests"):
        put_together(files)
    shown = put_together(files, requests=requests, rows=ROWS)
    assert [one["row"] for one in shown.scored] == ["base", "near", "all of it"]
    assert shown.tasks == whole.tasks and shown.models == ("tiny",)
    with pytest.raises(ValueError, match="no benchmarks"):
        put_together(files, tasks=False, requests=requests)


def test_seeds_of_several_runs_are_put_together(requests, comparison, tmp_path):
    trained = Method(name="tuned", tune={"how": "lora", "lr": 0.1})
    few = {"steps": 1, "length": 64, "sequences": 1}
    both = dataclasses.replace(comparison, methods=(trained,), tuning=few, seeds=(0, 1))
    whole = run(both, settings(tmp_path / "whole", requests))
    files = []
    for seed in (1, 0):
        one = dataclasses.replace(both, seeds=(seed,))
        files.append(written(tmp_path, f"{seed}.json", one, run(one, settings(tmp_path / str(seed), requests))))
    shown = put_together(files, requests=requests, rows=["tuned"])
    assert shown.tasks == whole.tasks
    assert shown.tasks[0]["seeds"] == {"tuned": 2}


def test_of_another_run_the_summary_may_be_enough(comparison, requests, tmp_path):
    """Which kept no answers. The base model's score tells that the same was asked."""
    whole = run(comparison, settings(tmp_path / "whole", requests))
    older = json.loads(written(tmp_path, "older.json", comparison, whole).read_text()) | {"scores": []}
    (tmp_path / "older.json").write_text(json.dumps(older))
    part = only(comparison, "near")
    newer = written(tmp_path, "newer.json", part, run(part, settings(tmp_path / "part", requests)))
    files = [tmp_path / "older.json", newer]
    assert put_together(files, requests=requests, rows=ROWS).tasks == whole.tasks
    assert list(put_together(files, requests=requests, rows=["near"]).tasks[0]["models"]) == ["base", "near"]
    older["tasks"][0]["n"] += 1
    (tmp_path / "older.json").write_text(json.dumps(older))
    with pytest.raises(ValueError, match=r"all of it answered other items.*measure them with these --requests"):
        put_together(files, requests=requests, rows=ROWS)


def test_answers_do_not_outlive_their_row(comparison, requests, tmp_path):
    """A row that was measured anew under other settings, and not asked."""
    before = written(tmp_path, "before.json", comparison, run(comparison, settings(tmp_path / "before", requests)))
    near = dataclasses.replace(comparison.methods[2], options={"window": 30})
    changed = dataclasses.replace(comparison, methods=(near,))
    after = written(tmp_path, "after.json", changed, run(changed, settings(tmp_path / "after", None)))
    assert [one["row"] for one in put_together([before, after], tasks=False).scored] == ["base", "all of it"]
    assert len(put_together([after, before], tasks=False).scored) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda scored: [one for one in scored if one["row"] != "base"], "full attention has not answered.*--json"),
        (lambda scored: [*scored, scored[0] | {"model": "another"}], "answers of a tiny random model and another"),
        (lambda scored: [{"row": "base"}], "is not what `focus compare --json` wrote"),
    ],
    ids=["base", "models", "malformed"],
)
def test_answers_that_do_not_belong_together(change, message, comparison, requests, tmp_path):
    outcome = run(comparison, settings(tmp_path / "cells", requests))
    file = written(tmp_path, "all.json", comparison, dataclasses.replace(outcome, scored=change(outcome.scored)))
    with pytest.raises(ValueError, match=message):
        put_together([file], requests=requests, rows=ROWS)


def test_known_benchmarks_are_not_asked_again(comparison, requests, tmp_path):
    first = run(comparison, settings(tmp_path / "first", requests))
    wider = Method(name="near", attention="window", options={"window": 3})  # another row under the same name
    for methods, asked in ((comparison.methods, 0), ((*comparison.methods[:2], wider), 1)):
        folder = tmp_path / str(asked)
        known = {"known": first.cells, "known_scores": first.scored}
        outcome = run(
            dataclasses.replace(comparison, methods=methods), dataclasses.replace(settings(folder, requests), **known)
        )
        assert [row["task"] for row in outcome.tasks] == [row["task"] for row in first.tasks]
        assert (outcome.tasks == first.tasks) is (asked == 0)
        assert len(list(folder.glob("scores/*"))) == asked


def test_other_requests_are_asked_anew(comparison, requests, tmp_path):
    """With the same names and as many items, as another seed makes them."""
    other = [dataclasses.replace(item, context=ids(40, 500 + n)) for n, item in enumerate(requests.items)]
    other = Requests(requests.tasks, other, requests.prefixes)
    run(comparison, settings(tmp_path, requests))
    assert run(comparison, settings(tmp_path, other)).tasks
    assert len(list((tmp_path / "scores").iterdir())) == 6
    for file in (tmp_path / "scores").iterdir():
        assert is_scored(requests, file) != is_scored(other, file)


def test_texts_are_asked_of_peers_too(tmp_path):
    """Which have no cache: whole sequences, a token at a time."""
    model, tokenizer = tiny_random_model()
    options = {"max_new_tokens": 5}
    items = [Item("t", str(n), "generate", ids(20 + 9 * n, n), options=options) for n in range(3)]
    asked = Requests({"t": Task("t", "found_strings", "retrieval")}, items)
    texts = []
    for name, peer in {"base": None, "wide": make_baseline("window", window=500)}.items():
        score_row(model, peer, asked, tmp_path / f"{name}.jsonl", tokenizer, 1e18, None, name)
        texts.append({key: one["text"] for key, one in read_scores(tmp_path / f"{name}.jsonl")[1].items()})
    assert texts[0] == texts[1]


def test_a_peer_that_cannot_be_had_at_that_cost_has_no_tasks(comparison, requests, tmp_path):
    dear = Method(name="dear", attention="sparq", budget=0.02)
    lines = []
    chosen = dataclasses.replace(settings(tmp_path, requests), log=lines.append)
    outcome = run(dataclasses.replace(comparison, methods=(*comparison.methods, dear)), chosen)
    assert list(outcome.tasks[0]["models"]) == ["base", "all of it", "near"]
    assert any(line.startswith("dear: no tasks: sparq cannot go as low") for line in lines)


def test_a_difference_and_a_ratio_are_told_apart():
    interval = {"estimate": 1.02, "low": 1.01, "high": 1.03}
    row = {"models": {"near": {"estimate": 20.5}}, "against_base": {"near": interval}, "is_ratio": True}
    assert task_cell(row, "near") == "20.5, x1.020 [x1.010, x1.030]"
    assert task_cell({**row, "is_ratio": False}, "near") == "20.5, +1.020 [+1.010, +1.030]"
    assert task_cell({**row, "against_base": {}}, "near") == "20.5"


def test_brackets_are_no_markup(capsys):
    interval = {"estimate": 1.02, "low": 1.01, "high": 1.03}
    models = {"Focus [ours]": {"estimate": 20.5}}
    row = {"task": "lambada", "metric": "perplexity", "n": 9, "at_floor": False, "is_ratio": True}
    Console(width=120).print(task_table([{**row, "models": models, "against_base": {"Focus [ours]": interval}}]))
    shown = capsys.readouterr().out
    assert "[x1.010, x1.030]" in shown and "Focus [ours]" in shown


def test_a_window_over_everything_scores_as_the_base_does(requests, tmp_path):
    model, tokenizer = tiny_random_model()
    peers = {"base": None, "wide": make_baseline("window", window=500), "narrow": make_baseline("window", window=2)}
    for name, peer in peers.items():
        score_row(model, peer, requests, tmp_path / f"{name}.jsonl", tokenizer, 1e18, None, name)
    base, wide, narrow = (
        [pair[0] for score in read_scores(tmp_path / f"{name}.jsonl")[1].values() for pair in score["scores"]]
        for name in peers
    )
    assert sorted(wide) == pytest.approx(sorted(base), abs=1e-4)
    assert sorted(narrow) != pytest.approx(sorted(base), abs=1e-4)


def test_scoring_stops_in_time_and_goes_on(requests, tmp_path):
    model, tokenizer = tiny_random_model()
    file = tmp_path / "a.jsonl"
    with pytest.raises(OutOfTimeError):
        score_row(model, None, requests, file, tokenizer, -1.0, None, "a")
    assert not is_scored(requests, file)
    score_row(model, None, requests, file, tokenizer, 1e18, None, "a")
    assert is_scored(requests, file)


def test_requests_are_for_one_model(comparison, requests, tmp_path):
    two = dataclasses.replace(comparison, models=("tiny", "default"))
    with pytest.raises(ValueError, match="tokens of one model"):
        run(two, settings(tmp_path, requests))


def test_the_benchmarks_of_several_seeds_are_their_mean(comparison, requests, tmp_path):
    window = {"attention": "window", "options": {"window": 4}}
    tuned = Method(name="tuned", **window, tune={"how": "full", "lr": 0.05, "steps": 3, "length": 64, "sequences": 1})
    chosen = dataclasses.replace(comparison, methods=(tuned,), seeds=(0, 1))
    together = run(chosen, settings(tmp_path / "both", requests)).tasks
    alone = [
        run(dataclasses.replace(chosen, seeds=(seed,)), settings(tmp_path / str(seed), requests)).tasks
        for seed in (0, 1)
    ]
    assert list(together[0]["models"]) == ["base", "tuned"]
    assert together[0]["seeds"] == {"tuned": 2} and alone[0][0]["seeds"] == {}
    for row, first, second in zip(together, *alone, strict=True):
        mean = (first["models"]["tuned"]["estimate"] + second["models"]["tuned"]["estimate"]) / 2
        assert row["models"]["tuned"]["estimate"] == pytest.approx(mean)
        assert row["against_base"]["tuned"]["estimate"] == pytest.approx(mean - row["models"]["base"]["estimate"])
