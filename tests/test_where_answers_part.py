"""benchmarks/where_answers_part.py: at which token of an answer Focus writes another one, and how likely it was."""

import json
import sys
from pathlib import Path

import pytest
import torch

from focus_attn import FocusConfig, get_focus_model
from focus_attn.evaluation.requests import Item, Requests, Task
from focus_attn.zoo import tiny_random_model

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import where_answers_part as parts

CONTEXT = torch.randint(5, 60, (70,), generator=torch.Generator().manual_seed(0)).tolist()


def focused(num_groups=4):
    model, tokenizer = tiny_random_model()
    return get_focus_model(model, FocusConfig(num_groups=num_groups, window=8, num_sinks=1)).eval(), tokenizer


def written(model, context, count=12):
    """Greedily, without a cache."""
    ids = list(context)
    with torch.no_grad():
        for _ in range(count):
            ids.append(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax().item())
    return ids[len(context) :]


def test_what_focus_writes_agrees_up_to_the_token_that_is_named():
    model, tokenizer = focused()
    with model.disable_focus():
        answer = written(model, CONTEXT)
    found = parts.compare(model, CONTEXT, answer, tokenizer)
    with_focus = written(model, CONTEXT)
    assert found["base_parts_at"] is None and answer != with_focus
    at = found["focus_parts_at"]
    assert answer[:at] == with_focus[:at] and answer[at] != with_focus[at]
    assert found["focus_writes"] == tokenizer.decode([with_focus[at]])
    with torch.no_grad():
        logits = model(torch.tensor([CONTEXT + answer[:at]]), use_cache=False).logits[0, -1]
    assert found["focus"][at] == pytest.approx(logits.softmax(-1)[answer[at]].item(), abs=1e-4)
    assert found["base"][at] > found["focus"][at] - 1e-4
    with torch.no_grad():
        both = torch.tensor([CONTEXT + answer])
        focus = model(both, use_cache=False).logits[0, len(CONTEXT) - 1 : -1].log_softmax(-1)
        with model.disable_focus():
            base = model(both, use_cache=False).logits[0, len(CONTEXT) - 1 : -1].log_softmax(-1)
    assert found["divergence"] == pytest.approx((base.exp() * (base - focus)).sum(-1).mean().item(), abs=2e-5) != 0.0


def test_one_group_writes_what_the_base_model_writes():
    model, tokenizer = focused(num_groups=1)
    with model.disable_focus():
        answer = written(model, CONTEXT)
    found = parts.compare(model, CONTEXT, answer, tokenizer)
    assert found["focus_parts_at"] is None and found["divergence"] == pytest.approx(0.0, abs=1e-5)


def test_an_answer_ends_with_the_last_string_that_was_asked_for():
    assert parts.up_to_the_last(["AB", "CD", "XY"], " 1. CD 2. AB 3. EF", 1) == " 1. CD 2. AB"
    assert parts.up_to_the_last(["XY"], " 1. CD", 1) == ""


def test_the_program_reads_what_focus_eval_left(tmp_path, monkeypatch, capsys):
    model, tokenizer = focused()
    model.save_pretrained(tmp_path / "adapter")
    monkeypatch.setattr(parts, "load_compared", lambda *_: type("Loaded", (), {"model": model, "tokenizer": tokenizer}))
    item = Item("variables@70", "0", "generate", CONTEXT, answer={"strings": ["AB"]})
    requests = Requests({"variables@70": Task("variables@70", "found_strings", "retrieval")}, [item])
    requests.save(tmp_path / "r.jsonl")
    scores = [{"requests": requests.digest}, {"task": "variables@70", "item": "0", "text": " 1. AB 2."}]
    (tmp_path / "base.jsonl").write_text("".join(json.dumps(line) + "\n" for line in scores))
    given = ["--adapter", str(tmp_path / "adapter"), "--requests", str(tmp_path / "r.jsonl"), "--task", "variables@70"]
    given += ["--scores", str(tmp_path / "base.jsonl"), "--json", str(tmp_path / "out.json")]
    monkeypatch.setattr(sys, "argv", ["where_answers_part.py", *given])
    parts.main()
    (one,) = json.loads((tmp_path / "out.json").read_text())["items"]
    assert "".join(one["tokens"]) == " 1. AB"
    assert "1 of 1 items" in capsys.readouterr().out
    (tmp_path / "base.jsonl").write_text(json.dumps({"requests": "others"}) + "\n")
    with pytest.raises(SystemExit):
        parts.main()
    assert "other requests" in capsys.readouterr().err
