"""Attention kept, against the same thing counted pair by pair."""

import dataclasses
import math

import pytest
import torch
from tiny import SPARSE, focus, tiny_model, tokens

from focus_attn import FocusConfig, get_focus_model
from focus_attn.baselines import RandomGroups
from focus_attn.evaluation.attention_mass import Mass, mean_mass
from focus_attn.evaluation.attention_view import FEWEST_PROBES, SINK_SHARE, watch_attention
from focus_attn.evaluation.coverage import LargestValues, coverage_by_layer
from focus_attn.visibility import Pattern, Tokens, near_and_reachable, shares_group, visible_mask

LENGTH = 40
CASES = {
    "llama-k1": ("llama", SPARSE),
    "llama-k2-per-layer": (
        "llama",
        dataclasses.replace(SPARSE, num_groups=6, query_top_k=2, key_top_k=2, router_scope="layer"),
    ),
    "gpt2-shared-no-sinks": ("gpt2", dataclasses.replace(SPARSE, shared_router=True, num_sinks=0)),
    "gemma2-softcap-sliding-left-alone": ("gemma2", SPARSE),
    "cohere2-sliding-intersected": ("cohere2", dataclasses.replace(SPARSE, window=2, sliding_layers="intersect")),
    "gpt_oss-learned-sinks": ("gpt_oss", SPARSE),
}


@pytest.fixture(params=CASES, scope="module")
def case(request):
    architecture, config = CASES[request.param]
    return focus(architecture, config), tiny_model(architecture), tokens(2, LENGTH)


def by_hand(model, base, block):
    """{layer: (attention [H, T, T], routing, pattern)} of one block, from the eager model's own attention."""
    seen = {}

    def look(inputs):
        layer = next(layer for layer in model.focus_layers() if layer.spec.layer_idx == inputs.layer_idx)
        config = model.focus_config
        pattern = Pattern(config.num_groups, config.window, config.num_sinks, inputs.sliding_window)
        seen[inputs.layer_idx] = layer.router(inputs.hidden), pattern

    with torch.no_grad(), model.observe_attention(look):
        model(block[None])
    with torch.no_grad():
        attentions = base(block[None], output_attentions=True).attentions
    together = {}
    for layer_idx, (routing, pattern) in seen.items():
        attention = attentions[layer_idx][0].double()
        together[layer_idx] = attention / attention.sum(-1, keepdim=True), routing, pattern
    return together


def masses_by_hand(attention, routing, pattern):
    """Every query with a distant key, [H] of `Mass`."""
    heads, length = attention.shape[:2]
    positions = torch.arange(length)[None]
    near, reachable = (mask[0, 0] for mask in near_and_reachable(Tokens(positions, positions), pattern))
    visible = visible_mask(routing.query_groups, routing.key_groups, Tokens(positions, positions), pattern)[0]
    shares = shares_group(routing.query_groups, routing.key_groups, pattern.num_groups)[0]
    first = pattern.window + pattern.num_sinks + 1
    rows = range(first, length)
    result = []
    for head in range(heads):
        router = head * len(visible) // heads
        sums = dict.fromkeys((spec.name for spec in dataclasses.fields(Mass)), 0.0)
        together = attention[[h for h in range(heads) if h * len(visible) // heads == router]].sum(0)
        acting = sinks_by_hand(attention[head], reachable & ~near, rows)
        everything, pairs = [], 0
        for i in rows:
            distant, kept, ranked, content, content_kept = [], 0, [], [], 0
            for j in range(i + 1):
                weight = attention[head, i, j].item()
                if i - j <= pattern.window:
                    sums["window"] += weight
                elif j < pattern.num_sinks:
                    sums["sinks"] += weight
                elif reachable[i, j]:
                    distant.append(weight)
                    ranked.append((together[i, j].item(), weight))
                    shown = bool(visible[router, i, j])
                    if j in acting:
                        sums["acting"] += weight
                        sums["acting_kept"] += weight * shown
                    else:
                        content.append(weight)
                        content_kept += shown
                    if visible[router, i, j]:
                        sums["kept"] += weight
                        kept += 1
                if not shares[router, i, j] and (i - j <= pattern.window or j >= pattern.num_sinks):
                    sums["apart"] += weight
            sums["distant"] += sum(distant)
            sums["best"] += sum(sorted(distant, reverse=True)[:kept])
            sums["best_shared"] += sum(weight for _, weight in sorted(ranked, reverse=True)[:kept])
            sums["content_best"] += sum(sorted(content, reverse=True)[:content_kept])
            everything += distant
            pairs += kept
        sums["best_total"] = sum(sorted(everything, reverse=True)[:pairs])
        chance = shares[router].double().mean().item()
        sums["random"], sums["content_random"] = sums["distant"] * chance, (sums["distant"] - sums["acting"]) * chance
        result.append(Mass(**{name: value / len(rows) for name, value in sums.items()}))
    return result


def sinks_by_hand(attention, distant, rows):
    """Keys that the queries which see them at a distance give at least 2 % on average."""
    acting = set()
    for j in range(len(attention)):
        given = [attention[i, j].item() for i in rows if distant[i, j]]
        if len(given) >= FEWEST_PROBES and sum(given) / len(given) >= SINK_SHARE:
            acting.add(j)
    return acting


def assert_same(found, expected):
    for spec in dataclasses.fields(Mass):
        tolerance = 5e-3 if spec.name == "best_total" else 2e-5  # a bin of its histogram is 0.8 % wide
        assert getattr(found, spec.name) == pytest.approx(getattr(expected, spec.name), abs=tolerance), spec.name


def test_every_share_is_what_counting_pairs_gives(case):
    model, base, blocks = case
    coverage = coverage_by_layer(model, blocks, queries=None)
    hands = [by_hand(model, base, block) for block in blocks]
    assert [layer.layer_idx for layer in coverage.layers] == sorted(hands[0])
    for layer in coverage.layers:
        expected = [masses_by_hand(*hand[layer.layer_idx]) for hand in hands]
        for head, found in enumerate(layer.heads):
            assert_same(found, mean_mass([masses[head] for masses in expected]))
            assert found.window + found.sinks + found.distant == pytest.approx(1, abs=1e-5)
            assert max(found.kept, found.best_shared) <= found.best + 1e-6 <= found.best_total + 5e-3
        for router in layer.routers:
            heads = len(layer.heads) // len(layer.routers)
            mass = mean_mass(layer.heads[router.router * heads :][:heads])
            assert mass.kept <= mass.best_shared + 1e-6
        assert_same(mean_mass(layer.heads), layer.mass)


def test_sizes_and_pairs_of_every_router(case):
    model, base, blocks = case
    coverage = coverage_by_layer(model, blocks[:1])
    positions = torch.arange(LENGTH)[None]
    for layer in coverage.layers:
        _, routing, pattern = by_hand(model, base, blocks[0])[layer.layer_idx]
        visible = visible_mask(routing.query_groups, routing.key_groups, Tokens(positions, positions), pattern)[0]
        near, reachable = (mask[0, 0] for mask in near_and_reachable(Tokens(positions, positions), pattern))
        for router in layer.routers:
            seen = visible[router.router]
            assert router.pairs_kept == pytest.approx(seen.sum().item() / (LENGTH * (LENGTH + 1) / 2))
            distant = (reachable & ~near).sum().item()
            assert router.distant_pairs_kept == pytest.approx((seen & ~near).sum().item() / distant)
            assert sum(router.key_shares) == pytest.approx(routing.key_groups.shape[-1])
            assert sum(router.query_shares) == pytest.approx(routing.query_groups.shape[-1])
            assert 1 / pattern.num_groups <= router.key_confidence <= 1
            assert sum(map(sum, router.flow)) == pytest.approx(1)


def test_flow_along_the_diagonal_is_what_one_group_a_token_keeps():
    coverage = coverage_by_layer(focus(), tokens(1, LENGTH), queries=None)
    for layer in coverage.layers:
        per_router = len(layer.heads) // len(layer.routers)
        for router in layer.routers:
            mass = mean_mass(layer.heads[router.router * per_router :][:per_router])
            assert sum(router.flow[g][g] for g in range(4)) == pytest.approx(mass.kept / mass.distant, abs=1e-5)


def test_chunks_make_no_difference():
    model, blocks = focus(), tokens(1, LENGTH)
    whole, chunked = (
        coverage_by_layer(model, blocks, queries=20, weights_at_once=size) for size in (1 << 20, 3 * 4 * LENGTH)
    )
    for one, two in zip(whole.layers, chunked.layers, strict=True):
        for first, second in zip(one.heads, two.heads, strict=True):
            assert_same(second, first)


def test_random_groups_keep_the_same_on_average_when_they_are_dealt():
    model, block = focus(), tokens(1, LENGTH)[0]
    expected = {layer.layer_idx: layer.heads for layer in coverage_by_layer(model, block[None], queries=None).layers}
    kept, draws = {}, 300
    deal = RandomGroups(seed=1)
    positions = torch.arange(5, LENGTH)

    def look(view):
        for _ in range(draws):
            dealt = deal(view.layer_idx, view.routing)
            shared = shares_group(dealt.query_groups, dealt.key_groups, 4)[0][:, view.positions]
            kept[view.layer_idx] = kept.get(view.layer_idx, 0) + (view.distant * view.by_head(shared)).sum((1, 2))

    watch_attention(model, block[None], positions, look)
    for layer_idx, heads in expected.items():
        for head, mass in enumerate(heads):
            assert kept[layer_idx][head].item() / draws / len(positions) == pytest.approx(mass.random, rel=0.1)


def test_queries_are_spread_over_those_with_distant_keys():
    seen = []
    coverage = coverage_by_layer(
        focus(), tokens(1, LENGTH), queries=7, watchers=[lambda view: seen.append(view.positions.tolist())]
    )
    assert coverage.queries == 7 and all(positions == seen[0] for positions in seen)
    assert seen[0][0] >= SPARSE.window + SPARSE.num_sinks + 1 and seen[0][-1] < LENGTH
    steps = {b - a for a, b in zip(seen[0], seen[0][1:], strict=False)}
    assert len(steps) <= 2 and max(steps) - min(steps) <= 1


def test_sums_of_the_largest():
    values = torch.rand(3, 5, 64) ** 6
    histogram = LargestValues(3, torch.device("cpu"))
    histogram.add(values[:, :2])
    histogram.add(values[:, 2:])
    for count in (0, 1, 17, 200, 320):
        exact = values.flatten(1).double().sort(1, descending=True).values[:, :count].sum(1)
        found = histogram.sum_of_largest(torch.full((3,), float(count), dtype=torch.float64))
        torch.testing.assert_close(found, exact, rtol=4e-3, atol=1e-9)


def test_the_interval_holds_the_share_and_needs_blocks_that_differ():
    coverage = coverage_by_layer(focus(), tokens(4, LENGTH))
    interval = coverage.interval("distant_kept")
    assert interval.n == 4 and interval.low < interval.estimate < interval.high
    assert interval.estimate == pytest.approx(coverage.mass.share("distant_kept"))
    assert coverage.to_dict()["intervals"]["distant_kept"]["low"] == interval.low


def test_routed_figures_are_those_of_the_heads_that_are_not_dense():
    model = focus(config=dataclasses.replace(SPARSE, dense_heads=((1, 0),)))
    coverage = coverage_by_layer(model, tokens(3, LENGTH), queries=None)
    first, second = coverage.layers
    assert (first.dense_heads, second.dense_heads) == ((), (0,))
    for head in second.heads[:2]:  # those of the dense KV head
        assert [head.kept, head.best, head.random] == pytest.approx([head.distant] * 3)
    assert_same(coverage.mass, mean_mass([*first.heads, *second.heads]))
    alone = [*first.heads, *second.heads[2:]]
    assert_same(coverage.routed.mass, mean_mass(alone))
    by_hand = sum(head.kept for head in alone) / sum(head.distant for head in alone)
    assert coverage.routed.mass.share("distant_kept") == pytest.approx(by_hand)
    assert by_hand < coverage.mass.share("distant_kept")
    assert coverage.routed.interval("distant_kept").estimate == pytest.approx(by_hand)
    routers = [*first.routers, second.routers[1]]
    assert coverage.routed.distant_pairs_kept == pytest.approx(sum(one.distant_pairs_kept for one in routers) / 3)
    written = coverage.to_dict()
    assert (written["routers"], written["routed"]["routers"]) == (4, 3)
    assert written["routed"]["mass"]["distant_kept"] == pytest.approx(by_hand)
    # What is the same under every mask moves no layer nearer to the best one.
    assert second.mass.gain == pytest.approx(mean_mass(second.heads[2:]).gain, abs=1e-5)


@pytest.mark.parametrize("config", [SPARSE, dataclasses.replace(SPARSE, dense_layers=(1,))], ids=["none", "a layer"])
def test_without_dense_heads_all_heads_are_routed(config):
    coverage = coverage_by_layer(focus(config=config), tokens(2, LENGTH))
    assert [layer.layer_idx for layer in coverage.layers] == ([0] if config.dense_layers else [0, 1])
    assert coverage.routed == coverage.kept


def test_blocks_of_a_document_are_drawn_together():
    model, blocks = focus(), tokens(9, LENGTH)
    documents = [0, 0, 1, 2, 3, 4, 5, 6, 7]
    singly, together = coverage_by_layer(model, blocks), coverage_by_layer(model, blocks, documents=documents)
    assert singly.interval("distant_kept").drawn_together is None and singly.to_dict()["documents"] is None
    found = together.interval("distant_kept")
    assert (found.n, found.drawn_together) == (9, 8) and found != singly.interval("distant_kept")
    written = together.to_dict()
    assert written["documents"] == documents and written["intervals"]["distant_kept"]["drawn_together"] == 8
    assert written["routed"]["intervals"]["distant_kept"]["drawn_together"] == 8


def test_shares_of_nothing_are_none():
    nothing = dict.fromkeys((spec.name for spec in dataclasses.fields(Mass)), 0.0)
    mass = Mass(**{**nothing, "window": 0.5, "sinks": 0.5})
    assert mass.share("distant_kept") is None and mass.share("content_kept_share") is None
    assert mass.gain is None and mass.content_gain is None and mass.visible == 1


@pytest.mark.parametrize(
    ("blocks", "options", "message"),
    [
        (torch.zeros(1, 4, dtype=torch.long), {}, "nothing beyond a window"),
        (torch.zeros(8, dtype=torch.long), {}, r"\[blocks, tokens\]"),
        (torch.zeros(0, 64, dtype=torch.long), {}, "at least one block"),
        (torch.zeros(1, 64, dtype=torch.long), {"queries": 0}, "`queries`"),
        (torch.zeros(2, 64, dtype=torch.long), {"documents": [0]}, "`documents`.* 2 blocks, got 1"),
    ],
)
def test_what_cannot_be_measured_is_said(blocks, options, message):
    with pytest.raises(ValueError, match=message):
        coverage_by_layer(focus(), blocks, **options)


def test_one_group_keeps_everything():
    model = get_focus_model(tiny_model(), FocusConfig(num_groups=1, window=3, num_sinks=1))
    for layer in coverage_by_layer(model, tokens(1, LENGTH)).layers:
        assert math.isclose(layer.mass.visible, 1, abs_tol=1e-5) and layer.mass.lost == pytest.approx(0, abs=1e-6)
        assert layer.mass.random == pytest.approx(layer.mass.distant)
