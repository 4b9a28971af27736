"""benchmarks/choose_adapter.py: which of several adapters is kept, and why."""

import json
import sys
from pathlib import Path

import pytest
from test_eval_command import answers, choices

from focus_attn.evaluation.run import ITEMS
from focus_attn.evaluation.score_file import ScoreFile

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import choose_adapter

TEXTS = ["--train", "a", "--test", "b", "--requests", "q.jsonl"]


def record(test=0.99, pairs=0.19, elsewhere=1.01, worst=0.4):
    ratio = {"ratio": {"estimate": test}, "pairs_kept": pairs}
    other = {"ratio": {"estimate": elsewhere}}
    return json.dumps({"8192": ratio, "elsewhere": other, "largest_group": {"mean": 0.2, "worst": worst}})


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("one.yaml", "two.v1.yaml", "three.yaml", "q.jsonl"):
        (tmp_path / name).touch()
    return tmp_path


def test_the_one_that_keeps_to_the_bars_and_loses_least_comes_first(folder, monkeypatch, capsys):
    made = {"one_s0": record(test=1.01), "two_v1_s0": record(), "three_s0": record()}
    right = {"base": [True] * 40, "one_s0": [True] * 40, "two_v1_s0": [False] * 40, "three_s0": [True] * 40}

    class Done:
        def poll(self):
            return 0

        def terminate(self):
            raise AssertionError("it is done")

    def train(trial, texts):
        assert texts == ["--train", "a", "--test", "b"]
        trial.record.write_text(made[trial.name])
        return Done()

    def score(trial, requests, scores):
        asked = choices(40)
        for name in ("base", trial.name):
            ScoreFile(scores / f"{name}.jsonl", {"requests": asked.digest}).append(answers(right[name]).items())
        asked.without_tokens().save(scores / ITEMS)

    monkeypatch.setattr(choose_adapter, "begin_training", train)
    monkeypatch.setattr(choose_adapter, "score", score)
    monkeypatch.setattr(choose_adapter.time, "sleep", lambda seconds: None)
    arguments = ["choose", "one.yaml", "two.v1.yaml", "three.yaml", "--at-once", "2", "--output", "out", *TEXTS]
    monkeypatch.setattr(sys, "argv", arguments)
    choose_adapter.main()
    found = json.loads((folder / "out" / "choice.json").read_text())
    assert [one["name"] for one in found["trials"]] == ["three_s0", "two_v1_s0", "one_s0"]
    assert found["trials"][2]["over_the_bars"] == ["test"] and found["trials"][1]["worse"] == ["t, acc"]
    assert "three_s0: nothing speaks against it" in capsys.readouterr().out
    monkeypatch.setattr(choose_adapter, "begin_training", lambda *args: pytest.fail("it was there"))
    choose_adapter.main()


def test_one_that_fails_is_left_out(folder, monkeypatch, capsys):
    class Failed:
        def poll(self):
            return 1

    monkeypatch.setattr(choose_adapter, "begin_training", lambda *args: Failed())
    monkeypatch.setattr(choose_adapter.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(sys, "argv", ["choose", "one.yaml", "--output", "out", *TEXTS])
    choose_adapter.main()
    assert "one_s0: failed, out/one_s0.log says why" in capsys.readouterr().out


def test_what_is_missing_is_named(folder, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["choose", "absent.yaml", "--output", "out", *TEXTS])
    with pytest.raises(SystemExit):
        choose_adapter.main()
    assert "no such file: absent.yaml" in capsys.readouterr().err
