"""benchmarks/heads_to_open.py: what every head gives back on the way to full attention."""

import sys
from pathlib import Path

import pytest
import torch
from tiny import tiny_model

from focus_attn import FocusConfig, get_focus_model
from focus_attn.evaluation.requests import Item, Requests, Task
from focus_attn.zoo import tiny_random_model

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import heads_to_open

HIDDEN = torch.randn(1, 70, 32, generator=torch.Generator().manual_seed(1))
CONFIG = {"num_groups": 4, "window": 8, "num_sinks": 1, "router_dim": 8}


def opening(model=None, **changes) -> heads_to_open.Opening:
    focused = get_focus_model(model or tiny_random_model()[0], FocusConfig(**{**CONFIG, **changes}))
    return heads_to_open.Opening(focused.eval().requires_grad_(False))


def questions(count: int = 3) -> list[heads_to_open.Question]:
    ids = torch.randint(5, 60, (count, 70), generator=torch.Generator().manual_seed(0))
    return [heads_to_open.Question(row, 3 + number) for number, row in enumerate(ids)]


@torch.no_grad()
def answer_loss(model, question) -> float:
    logits = model(question.ids[None], use_cache=False).logits[0, -question.answer - 1 : -1]
    return torch.nn.functional.cross_entropy(logits, question.ids[-question.answer :], reduction="sum").item()


@pytest.mark.parametrize("architecture", ["llama", "gpt_oss", "gemma2"])
def test_the_path_leads_from_the_adapter_to_full_attention(architecture):
    path = opening(tiny_model(architecture), dense_layers=(-1,))
    for question in questions():
        assert path.mean_loss([question], path.all_at(0.0)) == pytest.approx(
            answer_loss(path.model, question), abs=1e-4
        )
        with path.model.disable_focus():
            full = answer_loss(path.model, question)
        assert path.mean_loss([question], path.all_at(1.0)) == pytest.approx(full, abs=1e-4)


def test_what_heads_give_back_adds_up_to_the_gap():
    path = opening()
    # A token that changes its groups on the way is a step in the loss, which no gradient sees: it must not here.
    path.layers = {at: lambda _, layer=layer: layer(HIDDEN) for at, layer in path.layers.items()}
    gap = path.mean_loss(questions(), path.all_at(0.0)) - path.mean_loss(questions(), path.all_at(1.0))
    assert abs(gap) > 1e-3  # otherwise the next line says nothing
    assert path.gives_back(questions(), steps=40).sum().item() == pytest.approx(gap, rel=0.02)


def test_dense_heads_have_nothing_to_give():
    path = opening(dense_heads=((0, 0),))
    each = path.gives_back(questions(1), steps=2)
    assert each[0, 0] == 0 and each[0, 1] != 0


class Bending(heads_to_open.Opening):
    """A path whose losses are known: two heads matter to the first question, one to the second, none to the last."""

    WORTH = ({(0, 1): 1.0, (1, 0): 3.0}, {(1, 1): 0.3}, {})

    def loss(self, question, opened):
        worth = self.WORTH[question.answer]
        return 5.0 - sum((value * opened[head] for head, value in worth.items()), torch.zeros(()))


def bending() -> Bending:
    model = get_focus_model(tiny_random_model()[0], FocusConfig(**CONFIG))
    return Bending(model)


def test_every_gap_counts_alike_and_other_items_check(capsys):
    asked = {name: [heads_to_open.Question(HIDDEN, number)] * 3 for number, name in enumerate(["both", "one", "none"])}
    found = heads_to_open.find(bending(), asked, 2)
    # Of its gap the one head gives back all, the larger of the two three quarters.
    assert found["heads"] == [(1, 1), (1, 0)]
    both = found["tasks"]["both"]
    assert both["items"] == 2 and torch.tensor(both["heads"])[1, 0].item() == pytest.approx(3.0)
    assert both["others"] == {"items": 1, "adapter_loss": 5.0, "full_loss": 1.0, "loss_with_heads_open": 2.0}
    assert "heads" not in found["tasks"]["none"]
    said = capsys.readouterr().out
    assert "none: nothing is lost there" in said and "over all of them: 1.1, 1.0" in said
    with pytest.raises(SystemExit, match="no head gives anything back"):
        heads_to_open.find(bending(), {"none": asked["none"]}, 2)


def test_the_last_tokens_of_an_answer_count():
    items = [Item("facts", str(number), "loglikelihood", [7, 8 + number], [[1, 2, 3]]) for number in (0, 1)]
    asked = Requests({"facts": Task("facts", "found_strings", "retrieval")}, items)
    for last, counted in ((1, 1), (None, 3), (99, 3)):
        found = heads_to_open.questions_of(asked, torch.device("cpu"), last)
        assert [question.ids.tolist() for question in found] == [[7, 8, 1, 2, 3], [7, 9, 1, 2, 3]]
        assert {question.answer for question in found} == {counted}


@pytest.mark.parametrize("options", [["--last", "0"], ["--answer", " "], ["--answer", "a", "--true"]], ids=str)
def test_questions_that_cannot_be_asked(monkeypatch, capsys, options):
    asked = ["--adapter", "a", "--requests", "b", "--task", "c", "--json", "d"]
    monkeypatch.setattr(sys, "argv", ["heads_to_open.py", *asked, *options])
    with pytest.raises(SystemExit) as stopped:
        heads_to_open.main()
    assert stopped.value.code == 2 and options[0] in capsys.readouterr().err


def test_what_it_cannot_open_it_refuses():
    with pytest.raises(SystemExit, match="no router for each KV head"):
        opening(router_scope="layer")
    with pytest.raises(SystemExit, match="layers that slide"):
        opening(tiny_model("gemma2"), sliding_layers="intersect", window=2)
