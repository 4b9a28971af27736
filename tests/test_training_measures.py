"""Measures of routers against their definitions."""

import pytest
import torch
from tiny import focus, tokens

from focus_attn import FocusConfig
from focus_attn.training.measures import collapsed_routers, coverage, group_dominance, probe_groups, stability
from focus_attn.visibility import Pattern, covered_mass, near_and_reachable, visible_mask

CONFIG = FocusConfig(num_groups=4, window=8, num_sinks=2, router_dim=8)


def test_dominance_is_the_largest_share():
    loads = torch.tensor([[[10, 10, 10, 10], [40, 0, 0, 0]], [[20, 20, 0, 0], [0, 0, 0, 0]]])
    assert group_dominance(loads) == (pytest.approx((0.25 + 1 + 0.5) / 3), 1.0)
    with pytest.raises(ValueError, match="no token"):
        group_dominance(torch.zeros(1, 1, 4))


def test_collapse_is_named():
    model = focus(config=CONFIG)
    healthy = torch.full((2, 2, 4), 50)
    assert collapsed_routers(model, healthy) == []
    loads = healthy.clone()
    loads[0, 1] = torch.tensor([2, 3, 190, 5])
    loads[1, 0] = torch.tensor([100, 0, 100, 0])
    assert collapsed_routers(model, loads) == ["layer 0, key/value head 1: group 2 holds 95% of the keys"]
    loads[1, 0] = torch.tensor([170, 0, 0, 0]) + torch.tensor([0, 30, 0, 0])
    assert len(collapsed_routers(model, loads)) == 1  # half of the groups live
    loads[1, 0] = torch.tensor([100_000, 20_000, 30, 0])
    loads[1, 1] = torch.tensor([80_000, 30, 30, 0]) + torch.tensor([0, 0, 0, 9_000])
    assert collapsed_routers(model, loads)[1:] == []
    loads[1, 1] = torch.tensor([800, 0, 0, 0])
    assert collapsed_routers(model, loads)[1:] == ["layer 1, key/value head 1: group 0 holds 100% of the keys"]


def test_mostly_dead_groups_are_a_collapse_too():
    model = focus(config=FocusConfig(num_groups=8, window=8))
    loads = torch.full((2, 2, 8), 50)
    loads[1, 1] = torch.tensor([400, 300, 300, 0, 0, 0, 0, 0])
    assert collapsed_routers(model, loads) == ["layer 1, key/value head 1: 5 of 8 groups are empty"]


def test_stability_counts_the_tokens_that_stayed():
    model, probe = focus(config=CONFIG).train(), tokens(2, 40)
    before = probe_groups(model, probe)
    assert model.training and stability(before, before) == 1
    after = {index: groups.clone() for index, groups in before.items()}
    after[1][:, :, :10] = (after[1][:, :, :10] + 1) % 4
    assert stability(before, after) == pytest.approx((1 + 0.75) / 2)
    with pytest.raises(ValueError, match="same probe"):
        stability(before, probe_groups(model, tokens(2, 30)))


def test_order_of_ids_is_no_change():
    ids = torch.tensor([[[[0, 1], [2, 3]]]])
    assert stability({0: ids}, {0: ids.flip(-1)}) == 1


@pytest.mark.parametrize("top_k", [(1, 1), (2, 1), (2, 2)])
def test_coverage_is_the_attention_on_visible_keys(top_k):
    config = FocusConfig(num_groups=5, window=8, num_sinks=2, query_top_k=top_k[0], key_top_k=top_k[1])
    model, ids = focus(config=config), tokens(1, 60)
    seen = []
    with torch.no_grad(), model.observe_attention(seen.append):
        model(ids)
    got = coverage(model, ids, queries=60)
    for inputs, layer in zip(seen, model.focus_layers(), strict=True):
        routing = layer.router(inputs.hidden)
        pattern = Pattern(5, 8, 2)
        _, reachable = near_and_reachable(inputs.tokens, pattern)
        scores = inputs.q @ inputs.k.repeat_interleave(2, 1).transpose(-1, -2) * inputs.scale
        attention = scores.masked_fill(~reachable, -torch.inf).softmax(-1)
        attention = attention * inputs.v.norm(dim=-1).repeat_interleave(2, 1)[:, :, None]
        visible = visible_mask(routing.query_groups, routing.key_groups, inputs.tokens, pattern)
        wanted = covered_mass(attention, visible)[:, :, 9:].mean().item()
        assert got[layer.spec.layer_idx] == pytest.approx(wanted, abs=1e-5)
