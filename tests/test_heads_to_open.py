"""benchmarks/heads_to_open.py: what every head gives back on the way to full attention."""

import sys
from pathlib import Path

import pytest
import torch

from focus_attn import FocusConfig, get_focus_model
from focus_attn.zoo import tiny_random_model

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import heads_to_open

HIDDEN = torch.randn(1, 70, 32, generator=torch.Generator().manual_seed(1))
CONFIG = {"num_groups": 4, "window": 8, "num_sinks": 1, "router_dim": 8}


def opening(**changes) -> heads_to_open.Opening:
    model = get_focus_model(tiny_random_model()[0], FocusConfig(**CONFIG, **changes))
    return heads_to_open.Opening(model.eval().requires_grad_(False))


def questions(count: int = 3) -> list[heads_to_open.Question]:
    ids = torch.randint(5, 60, (count, 70), generator=torch.Generator().manual_seed(0))
    return [heads_to_open.Question(row, 3 + number) for number, row in enumerate(ids)]


@torch.no_grad()
def answer_loss(model, question) -> float:
    logits = model(question.ids[None], use_cache=False).logits[0, -question.answer - 1 : -1]
    return torch.nn.functional.cross_entropy(logits, question.ids[-question.answer :], reduction="sum").item()


def test_the_path_leads_from_the_adapter_to_full_attention():
    path = opening(dense_layers=(1,))
    for question in questions():
        assert path.mean_loss([question], path.at(0.0)) == pytest.approx(answer_loss(path.model, question), abs=1e-4)
        with path.model.disable_focus():
            full = answer_loss(path.model, question)
        assert path.mean_loss([question], path.at(1.0)) == pytest.approx(full, abs=1e-4)


def test_what_heads_give_back_adds_up_to_the_gap():
    path = opening()
    # A token that changes its groups on the way is a step in the loss, which no gradient sees: it must not here.
    path.layers = {at: lambda _, layer=layer: layer(HIDDEN) for at, layer in path.layers.items()}
    gap = path.mean_loss(questions(), path.at(0.0)) - path.mean_loss(questions(), path.at(1.0))
    assert abs(gap) > 1e-3  # otherwise the next line says nothing
    assert path.gives_back(questions(), steps=40).sum().item() == pytest.approx(gap, rel=0.02)


def test_dense_heads_have_nothing_to_give():
    path = opening(dense_heads=((0, 0),))
    each = path.gives_back(questions(1), steps=2)
    assert each[0, 0] == 0 and each[0, 1] != 0


def test_heads_that_give_back_most_are_named_and_checked_on_other_items(capsys):
    path = opening()
    found = heads_to_open.find(path, {"facts": questions(4)}, 2)
    task = found["tasks"]["facts"]
    assert task["items"] == 2
    gap = task["adapter_loss"] - task["open_loss"]
    each = torch.tensor(task["heads"]) / gap
    expected = heads_to_open.best(each, 2) if gap > heads_to_open.LEAST_GAP else []
    assert found["open"] == expected
    other = questions(4)[1::2]
    assert task["other_items"]["with_heads_open"] == pytest.approx(path.mean_loss(other, path.opening(expected)))
    assert "facts, other items" in capsys.readouterr().out
