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
        with pytest.raises(SystemExit, match="no task with one right answer; the file has 'choice', 'labels'"):
            dense_layers.of_task(whole, name, 3)


def test_all_layers_together_give_back_all():
    model = get_focus_model(tiny_random_model()[0], FocusConfig(num_groups=4, window=8, num_sinks=1, router_dim=8))
    found = dense_layers.measure(model.eval(), dense_layers.answer_loss(dense_layers.of_task(requests(), "choice", 6)))
    lost = found["adapter_loss"] - found["base_loss"]
    assert abs(lost) > 1e-3  # otherwise the next line says nothing
    assert len(found["together"][-1]["layers"]) == len(found["layers"])
    assert found["together"][-1]["gives_back"] == pytest.approx(lost, abs=1e-4)
