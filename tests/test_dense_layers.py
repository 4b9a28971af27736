"""benchmarks/dense_layers.py: what layers and heads give back when they see everything."""

import sys
from pathlib import Path

import pytest
import torch

from focus_attn import FocusConfig, get_focus_model
from focus_attn.evaluation.requests import Item, Requests, Task
from focus_attn.zoo import tiny_random_model

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import dense_layers


def requests() -> Requests:
    """A task with a choice among answers behind a prefix, and one of two true answers."""
    tasks = {
        "choice": Task("choice", "choice", "task", {}),
        "labels": Task("labels", "probability_of_true", "task", {}),
    }
    ids = torch.randint(5, 60, (6, 40), generator=torch.Generator().manual_seed(0)).tolist()
    items = [
        Item("choice", str(n), "loglikelihood", row[:30], [row[30:33], row[33:]], "p", {"gold": n % 2})
        for n, row in enumerate(ids)
    ]
    items.append(Item("labels", "0", "loglikelihood", ids[0], [ids[1], ids[2]], None, {"labels": [1, 0]}))
    return Requests(tasks, items, {"p": ids[5] * 3})


def test_a_task_is_asked_for_its_right_answers():
    whole = requests()
    asked = dense_layers.of_task(whole, "choice", 3)
    assert [item.item for item in asked.items] == ["0", "2", "4"] and set(asked.prefixes) == {"p"}
    assert all(item.continuations == [whole.items[int(item.item)].continuations[0]] for item in asked.items)
    for name in ("labels", "missing"):
        with pytest.raises(SystemExit, match=r"with a right answer to take the loss of; the file has 'choice'$"):
            dense_layers.of_task(whole, name, 3)


def test_all_layers_together_give_back_all():
    model = get_focus_model(tiny_random_model()[0], FocusConfig(num_groups=4, window=8, num_sinks=1, router_dim=8))
    found = dense_layers.measure(model.eval(), dense_layers.answer_loss(dense_layers.of_task(requests(), "choice", 6)))
    lost = found["adapter_loss"] - found["base_loss"]
    assert abs(lost) > 1e-3  # otherwise the next line says nothing
    assert len(found["together"][-1]["layers"]) == len(found["layers"])
    assert found["together"][-1]["gives_back"] == pytest.approx(lost, abs=1e-4)


def test_what_the_base_model_writes_is_asked_behind_its_prefix():
    base, tokenizer = tiny_random_model()
    model = get_focus_model(base, FocusConfig(num_groups=4, window=8, num_sinks=1, router_dim=8)).eval()
    whole = requests()
    options = {"max_new_tokens": 8, "until": []}

    def asked(strings: list[str]) -> Requests:
        task = {"spread": Task("spread", "found_strings", "retrieval", {})}
        item = Item("spread", "0", "generate", whole.items[0].context, (), "p", {"strings": strings}, options)
        return Requests(task, [item], whole.prefixes)

    with model.disable_focus():
        scorer = dense_layers.Scorer(model, asked([]), tokenizer)
        ((_, score),) = [pair for batch in scorer.run(scorer.requests.items) for pair in batch]
    text = score["text"].lstrip()
    assert len(text) > 3
    found = dense_layers.right_answers(model, asked([text[:3], text[:2]]), tokenizer)
    assert found.items[0].kind == "loglikelihood" and found.prefixes == whole.prefixes
    assert tokenizer.decode(found.items[0].continuations[0]) == " " + text[:3]
    with pytest.raises(SystemExit, match="finds nothing to compare with"):
        dense_layers.right_answers(model, asked(["nowhere", "to be found"]), tokenizer)


def test_hidden_facts_themselves_are_asked():
    base, tokenizer = tiny_random_model()
    model = get_focus_model(base, FocusConfig(num_groups=4, window=8, num_sinks=1, router_dim=8)).eval()
    whole = requests()
    tasks = {**whole.tasks, "spread": Task("spread", "found_strings", "retrieval", {})}
    item = Item("spread", "0", "generate", whole.items[0].context, (), "p", {"strings": ["ab", "cd"]}, {"until": []})
    asked = Requests(tasks, [item], whole.prefixes)
    (found,) = dense_layers.right_answers(model, asked, tokenizer, true=True).items
    assert found.kind == "loglikelihood" and found.context == item.context and not found.options
    assert tokenizer.decode(found.continuations[0]) == " ab, cd"
    choice = dense_layers.of_task(whole, "choice", 3)
    assert dense_layers.right_answers(model, choice, tokenizer, true=True) is choice
    for one in (asked, choice):  # a text that is given is asked for whatever the task asks
        found = dense_layers.right_answers(model, one, tokenizer, given=" 1. V")
        assert len(found.items) == len(one.items) and found.prefixes == one.prefixes
        assert {tokenizer.decode(answer) for item in found.items for answer in item.continuations} == {" 1. V"}


@pytest.mark.parametrize(
    "arguments", [[], ["--requests", "a"], ["--requests", "a", "--task", "b", "--retrieval", "needle"]], ids=str
)
def test_what_is_asked_has_to_be_said(arguments, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["dense_layers.py", "--adapter", "k8", "--json", "x", *arguments])
    with pytest.raises(SystemExit):
        dense_layers.main()
    assert "name a --task" in (said := capsys.readouterr().err) or "give --text, or" in said
