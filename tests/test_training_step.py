"""A training step: its losses against plain ones, its pair counts against the predicate, its gradients."""

import dataclasses
from functools import partial

import pytest
import torch
from tiny import EXACT, VOCAB, focus, logits, tiny_model, tokens
from torch.utils._python_dispatch import TorchDispatchMode

from focus_attn import FocusConfig, focus_attention, get_focus_model
from focus_attn.layer import AttentionInputs
from focus_attn.router import Routing
from focus_attn.training.balance import nudge_bias, sinkhorn_divergence
from focus_attn.training.packing import read_packing
from focus_attn.training.pairs import PairCount
from focus_attn.training.probe import Probe
from focus_attn.training.step import StepOptions, over_budget, training_step
from focus_attn.training.watch import RoutingWatch
from focus_attn.visibility import Pattern, Tokens, count_visible_pairs, far_run, near_and_reachable, visible_mask

CONFIG = FocusConfig(num_groups=4, window=8, num_sinks=2, router_dim=8)
PLAIN = StepOptions(balance_weight=0.0, dominance_weight=0.0, probes=0)


def step(model, ids, options=PLAIN, **more):
    return training_step(model, ids, options=options, **more)


def gradients(model):
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma2", "gpt_oss", "deepseek_v3", "granite", "cohere2"])
def test_next_token_loss_is_that_of_the_whole_logits(architecture, monkeypatch):
    monkeypatch.setattr("focus_attn.training.token_losses.LOGITS_AT_ONCE", 7 * VOCAB)
    model, ids = focus(architecture, CONFIG).train(), tokens(length=40)
    result = step(model, ids)
    plain = torch.nn.functional.cross_entropy(logits(model, ids)[:, 8:-1].flatten(0, 1), ids[:, 9:].flatten())
    torch.testing.assert_close(result.loss.detach(), plain, **EXACT)
    torch.testing.assert_close(result.measures["lm"], plain, **EXACT)
    result.loss.backward()
    mine = gradients(model)
    model.zero_grad()
    out = model(ids).logits[:, 8:-1]
    torch.nn.functional.cross_entropy(out.flatten(0, 1), ids[:, 9:].flatten()).backward()
    for got, wanted in zip(mine, gradients(model), strict=True):
        torch.testing.assert_close(got, wanted, **EXACT)


def test_distillation_is_the_divergence_from_the_base_model():
    model, ids = focus(config=CONFIG).train(), tokens(length=40)
    result = step(model, ids, StepOptions(objective="distill", balance_weight=0.0, probes=0))
    with model.disable_focus():
        teacher = logits(model, ids)[:, 8:-1].log_softmax(-1)
    student = logits(model, ids)[:, 8:-1].log_softmax(-1)
    wanted = (teacher.exp() * (teacher - student)).sum(-1).mean()
    assert wanted > 0.01
    torch.testing.assert_close(result.measures["distill"], wanted, **EXACT)


@pytest.mark.parametrize("learning", [False, True], ids=["a frozen head", "a head that learns"])
def test_the_gradient_of_distillation_is_that_of_the_whole_logits(learning, monkeypatch):
    monkeypatch.setattr("focus_attn.training.token_losses.LOGITS_AT_ONCE", 7 * VOCAB)
    model, ids = focus(config=CONFIG).train(), tokens(length=40)
    model.base_model.get_output_embeddings().weight.requires_grad_(learning)
    options = StepOptions(objective="distill", balance_weight=0.0, dominance_weight=0.0, probes=0)
    (3 * step(model, ids, options).loss).backward()
    mine = gradients(model)
    model.zero_grad()
    with model.disable_focus():
        teacher = logits(model, ids)[:, 8:-1].log_softmax(-1)
    student = model(ids).logits[:, 8:-1].log_softmax(-1)
    (3 * (teacher.exp() * (teacher - student)).sum(-1).mean()).backward()
    wanted = gradients(model)
    assert any(one.shape[0] == VOCAB for one in wanted) == learning
    for got, one in zip(mine, wanted, strict=True):
        torch.testing.assert_close(got, one, **EXACT)


def test_a_second_derivative_is_refused():
    model, ids = focus(config=CONFIG).train(), tokens(length=40)
    loss = step(model, ids, StepOptions(objective="distill", balance_weight=0.0, dominance_weight=0.0, probes=0)).loss
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(loss**2, [p for p in model.parameters() if p.requires_grad], create_graph=True)


def test_distillation_of_an_identical_model_is_nothing():
    model = focus(config=FocusConfig(num_groups=1, window=8)).train()
    result = step(model, tokens(length=40), StepOptions(objective="distill", balance_weight=0.0, dominance_weight=0.0))
    assert result.loss.abs() < 1e-6
    assert result.measures["pairs_kept"] == 1


@pytest.mark.parametrize("objective", ["lm", "distill", "lm+distill"])
def test_answers_count_more(objective):
    model, ids = focus(config=CONFIG).train(), tokens(length=40)
    answers = torch.zeros_like(ids, dtype=torch.bool)
    answers[0, 4:7] = answers[1, 20:24] = answers[0, 39] = True  # the first three are inside the window
    options = StepOptions(objective=objective, answer_weight=3.0, dominance_weight=0.0, probes=0)
    plain = step(model, ids, dataclasses.replace(options, answer_weight=0.0), answers=answers)
    result = step(model, ids, options, answers=answers)
    part = "lm" if objective == "lm" else "distill"
    alone = step(model, ids, StepOptions(objective=part), labels=ids.where(answers, -100)).measures[part]
    assert "answers" not in plain.measures and alone > 0.01
    share = 5 / (2 * (40 - 9))  # of the tokens that are predicted
    torch.testing.assert_close(result.measures["answers"], alone * share, **EXACT)
    torch.testing.assert_close(result.loss, plain.loss + 3 * share * alone, **EXACT)
    result.loss.backward()
    weighted = gradients(model)
    model.zero_grad()
    plain.loss.backward()
    assert any(not torch.equal(one, other) for one, other in zip(weighted, gradients(model), strict=True))


@pytest.mark.parametrize("objective", ["lm", "lm+distill"])
@pytest.mark.parametrize("given", [True, False])
def test_a_batch_without_answers_trains_as_any_other(objective, given):
    model, ids = focus(config=CONFIG).train(), tokens(length=40)
    options = StepOptions(objective=objective, answer_weight=3.0, dominance_weight=0.0, probes=0)
    result = step(model, ids, options, answers=torch.zeros_like(ids, dtype=torch.bool) if given else None)
    plain = step(model, ids, dataclasses.replace(options, answer_weight=0.0))
    assert result.measures["answers"] == 0 and result.loss == plain.loss
    result.loss.backward()
    assert all(gradient.isfinite().all() for gradient in gradients(model))


def test_both_objectives_add_up():
    model, ids = focus(config=CONFIG).train(), tokens(length=40)
    options = StepOptions(
        objective="lm+distill", distill_weight=3.0, balance_weight=0.0, dominance_weight=0.0, probes=0
    )
    measures = step(model, ids, options).measures
    torch.testing.assert_close(measures["loss"], measures["lm"] + 3 * measures["distill"])


def test_documents_packed_in_a_row_train_as_by_themselves():
    """The same loss, pairs and gradients as one document at a time, padding apart."""
    one, two = tokens(1, 30, seed=1), tokens(1, 45, seed=2)
    packed = torch.cat([one, two, torch.zeros(1, 5, dtype=torch.long)], 1)
    segments = torch.tensor([0] * 30 + [1] * 45 + [-1] * 5)[None]
    model = focus(config=CONFIG).train()
    result = step(model, packed, segments=segments)
    result.loss.backward()
    mine = gradients(model)
    model.zero_grad()

    apart = [step(model, ids) for ids in (one, two)]
    counts = [30 - 9, 45 - 9]
    total = sum(n * part.loss for n, part in zip(counts, apart, strict=True)) / sum(counts)
    total.backward()
    torch.testing.assert_close(result.loss, total, **EXACT)
    torch.testing.assert_close(result.loads, apart[0].loads + apart[1].loads)
    pairs = [n * (n + 1) / 2 for n in (30, 45)]
    kept = sum(n * part.measures["pairs_kept"] for n, part in zip(pairs, apart, strict=True)) / sum(pairs)
    torch.testing.assert_close(result.measures["pairs_kept"], kept)
    # A gate from Sinkhorn looks at the whole row, so the gradients are alike only.
    for got, wanted in zip(mine, gradients(model), strict=True):
        assert torch.nn.functional.cosine_similarity(got.flatten(), wanted.flatten(), dim=0) > 0.9


def test_restarting_position_ids_are_documents_too():
    ids = tokens(1, 60)
    segments = torch.tensor([4] * 25 + [7] * 35)[None]
    position_ids = torch.cat([torch.arange(25), torch.arange(35)])[None]
    model = focus(config=CONFIG).train()
    by_segments, by_positions = step(model, ids, segments=segments), step(model, ids, position_ids=position_ids)
    assert torch.equal(by_segments.loss, by_positions.loss)
    assert by_segments.measures["pairs_kept"] == by_positions.measures["pairs_kept"]


def test_ignored_labels_do_not_count():
    model, ids = focus(config=CONFIG).train(), tokens(length=40)
    labels = torch.full_like(ids, -100)
    labels[1, 20:30] = ids[1, 20:30]
    plain = torch.nn.functional.cross_entropy(logits(model, ids)[1, 19:29], ids[1, 20:30])
    torch.testing.assert_close(step(model, ids, labels=labels).loss.detach(), plain, **EXACT)


@pytest.mark.parametrize(("query_k", "key_k"), [(1, 1), (2, 1)])
def test_pairs_are_those_the_model_keeps(query_k, key_k):
    config = FocusConfig(num_groups=4, window=8, num_sinks=2, query_top_k=query_k, key_top_k=key_k, dense_layers=(1,))
    model, ids = focus(config=config), tokens(length=96)
    with torch.no_grad():
        measures = step(model, ids).measures
        with model.record_stats() as stats:
            model(ids)
    assert measures["pairs_kept"].item() == pytest.approx(stats.pairs_kept, abs=1e-6)
    # What the soft assignments expect is near it: they say with which weight, not whether.
    assert measures["expected_pairs"].item() == pytest.approx(stats.pairs_kept, rel=0.1)
    assert measures["dominance"].item() == pytest.approx(stats.dominance, abs=1e-6)


@pytest.mark.parametrize("architecture", ["gemma2", "gpt_oss"])
def test_sliding_layers_count_what_they_keep(architecture):
    config = FocusConfig(num_groups=4, window=2, num_sinks=1, sliding_layers="intersect")
    model, ids = focus(architecture, config), tokens(length=64)
    assert any(layer.router is not None and layer.spec.sliding_window for layer in model.focus_layers())
    with torch.no_grad():
        measures = step(model, ids).measures
        with model.record_stats() as stats:
            model(ids)
    assert measures["pairs_kept"].item() == pytest.approx(stats.pairs_kept, abs=1e-6)


@pytest.mark.parametrize("sliding", [None, 20, 5])
def test_pair_counts_equal_the_predicate(sliding):
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randint(0, 4, (2, 3, 70, 1), generator=generator) for _ in range(2))
    segments = torch.tensor([0] * 30 + [1] * 1 + [2] * 39)[None].expand(2, -1)
    packing = read_packing(torch.zeros(2, 70, dtype=torch.long), segments, None)
    pattern = Pattern(4, 7, 2, sliding)
    where = Tokens(packing.positions, packing.positions, segments, segments)
    counted = count_visible_pairs(query, key, where, pattern).double().mean(1).sum() / 2
    causal = sum(n * (n + 1) / 2 for n in (30, 1, 39))
    one_hot = [torch.nn.functional.one_hot(ids[..., 0], 4).double() for ids in (query, key)]
    assert PairCount(packing, pattern).share(*one_hot).item() == pytest.approx((counted / causal).item(), rel=1e-9)


def counted_by_gathers(packing, pattern, query, key):
    """Kept over causal pairs as autograd differentiates it, from running sums of the keys."""
    far = far_run(packing.positions, pattern)
    start = torch.arange(query.shape[2]) - packing.positions
    members = torch.nn.functional.pad(key.cumsum(2), (0, 0, 1, 0))
    first, last = ((start + x).clamp_max(query.shape[2])[:, None, :, None].expand(query.shape) for x in far[:2])
    kept = query * (members.gather(2, last) - members.gather(2, first)) * packing.real[:, None, :, None]
    near, causal = (far.near * packing.real).sum(), ((packing.positions + 1) * packing.real).sum()
    return (near + kept.sum() / query.shape[1]) / causal


@pytest.mark.parametrize("sinks", [0, 4])
@pytest.mark.parametrize("sliding", [None, 20, 5])
@pytest.mark.parametrize("ends", [[70], [30, 31, 68, 70], [30, 69, 70]])
def test_pair_counts_have_the_gradients_of_plain_sums(ends, sliding, sinks):
    """Also where a row ends in a document, or in padding, of fewer tokens than there are sinks."""
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.rand(2, 3, 70, 4, dtype=torch.double, generator=generator).requires_grad_() for _ in range(2))
    segments = torch.bucketize(torch.arange(70), torch.tensor(ends), right=True)[None].repeat(2, 1)
    if len(ends) > 1:
        segments[1][segments[1] == len(ends) - 1] = -1
    packing, pattern = read_packing(torch.zeros(2, 70, dtype=torch.long), segments, None), Pattern(4, 7, sinks, sliding)
    results = [
        count(query, key)
        for count in (PairCount(packing, pattern).share, partial(counted_by_gathers, packing, pattern))
    ]
    torch.testing.assert_close(*results, rtol=1e-12, atol=0)
    grads = [torch.autograd.grad(3 * share, (query, key)) for share in results]
    for got, wanted in zip(*grads, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_balance_has_a_graph_where_it_counts(weight, monkeypatch):
    graphs = []

    def divergence(scores, *rest, **more):
        answer = sinkhorn_divergence(scores, *rest, **more)
        graphs.append(answer.requires_grad)
        return answer

    monkeypatch.setattr("focus_attn.training.routing_terms.sinkhorn_divergence", divergence)
    model, ids = focus(config=CONFIG).train(), tokens(length=40)
    measures = step(model, ids, StepOptions(balance_weight=weight, probes=0)).measures
    assert graphs == [weight > 0] and measures["imbalance"] > 0


def test_imbalance_for_the_log_alone_is_that_of_a_part_of_the_tokens(monkeypatch):
    model, ids, figures = focus(config=CONFIG).train(), tokens(length=96), []
    for most, weight in ((2048, 0.0), (24, 0.0), (24, 0.3)):
        monkeypatch.setattr("focus_attn.training.routing_terms.LOGGED_TOKENS", most)
        measures = step(model, ids, StepOptions(balance_weight=weight, probes=0)).measures
        figures.append(float(measures["imbalance"].detach()))
    assert figures[0] == figures[2] != figures[1]  # what is learned from counts every token
    assert 0.5 < figures[1] / figures[0] < 2


def test_gradients_reach_the_routers_and_nothing_else():
    model, ids = focus(config=CONFIG).train(), tokens(length=64)
    step(model, ids, StepOptions(objective="lm+distill", budget=0.2)).loss.backward()
    for name, parameter in model.named_parameters():
        if ".focus." in name:
            assert parameter.grad.abs().max() > 0
        else:
            assert parameter.grad is None


@pytest.mark.parametrize("options", [PLAIN, StepOptions(objective="lm+distill", budget=0.2, probes=7)])
def test_checkpointing_gives_the_same_gradients(options):
    """The layers that run again in the backward pass must take the turns that the forward took."""
    results = []
    for checkpointing in (False, True):
        model = focus(config=CONFIG).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        torch.manual_seed(1)
        loss = step(model, tokens(length=64), options).loss
        torch.manual_seed(2)
        (loss / 2).backward()
        assert model._state.override is None
        results.append(gradients(model))
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt_oss", "deepseek_v3"])
def test_probes_change_gradients_and_nothing_else(architecture):
    model, ids = focus(architecture, CONFIG).train(), tokens(length=64)
    results = []
    for probes in (0, 16):
        result = step(model, ids, StepOptions(probes=probes, balance_weight=0.0))
        model.zero_grad()
        result.loss.backward()
        results.append((result, gradients(model)))
    (plain, without), (probed, with_probes) = results
    assert torch.equal(plain.loss, probed.loss) and torch.equal(plain.loads, probed.loads)
    assert all(not torch.equal(a, b) for a, b in zip(without, with_probes, strict=True))


@pytest.mark.parametrize("changes", [{}, {"softcap": 1.0}, {"sliding_window": 20}, {"sink_logits": torch.randn(4)}])
def test_a_probe_learns_what_keeping_a_dropped_key_would_change(changes):
    """By definition: let the query see the key, run the oracle again, and see how its output moves."""
    torch.manual_seed(0)
    length, groups = 40, 4
    positions = torch.arange(length)[None]
    inputs = AttentionInputs(
        0, None, torch.randn(1, 4, length, 8), torch.randn(1, 2, length, 8), torch.randn(1, 2, length, 6),
        0.5, changes.get("softcap"), Tokens(positions, positions), changes.get("sliding_window"),
        changes.get("sink_logits"),
    )  # fmt: skip
    pattern = Pattern(groups, 5, 2, inputs.sliding_window)
    ids = [torch.randint(0, groups, (1, 2, length, 1)) for _ in range(2)]
    gates = tuple(torch.randn(1, 2, length, groups).log_softmax(-1).requires_grad_() for _ in range(2))

    def attend(query_groups, key_groups):
        return focus_attention(
            inputs.q, inputs.k, inputs.v, query_groups, key_groups, num_groups=groups + 1, window=5, num_sinks=2,
            scale=0.5, softcap=inputs.softcap, sliding_window=inputs.sliding_window, sink_logits=inputs.sink_logits,
            backend="reference", return_lse=True,
        )  # fmt: skip

    (out, lse), query = attend(*ids), 33
    probe = Probe(length, query, 1, 1.0, out.device)
    probe.positions, probe.scale = torch.tensor([query]), 1.0
    pull = torch.randn_like(out)
    (probe(inputs, Routing(*ids, *gates), gates, pattern, out, lse) * pull).sum().backward()

    wanted = torch.zeros_like(gates[1])
    _, reachable = near_and_reachable(inputs.tokens, pattern)
    visible = visible_mask(*ids, inputs.tokens, pattern)
    for router in range(2):
        for key in range(length):
            if reachable[0, 0, query, key] and not visible[0, router, query, key]:
                # One more group, which this key and this query have together.
                query_groups, key_groups = (torch.cat([side, side], -1) for side in ids)
                query_groups[0, router, query, 1] = key_groups[0, router, key, 1] = groups
                gain = ((attend(query_groups, key_groups)[0] - out) * pull)[0, 2 * router : 2 * router + 2, query].sum()
                wanted[0, router, key, ids[0][0, router, query, 0]] += gain
    torch.testing.assert_close(gates[1].grad, wanted, atol=1e-5, rtol=1e-4)
    for router in range(2):  # what the keys of each group would bring the query, together
        by_group = torch.zeros(groups).index_add_(0, ids[1][0, router, :, 0], wanted[0, router].sum(-1))
        torch.testing.assert_close(gates[0].grad[0, router, query], by_group, atol=1e-5, rtol=1e-4)
    assert gates[0].grad[0, :, :query].abs().max() == 0


def test_a_rerun_gets_the_ids_of_the_first_run():
    router = focus(config=FocusConfig(num_groups=4, window=3, shared_router=True)).focus_layers()[0].router
    watch = RoutingWatch()
    first, second = watch(0, router(torch.randn(1, 32, 32))), watch(0, router(torch.randn(1, 32, 32)))
    assert first.query_groups is first.key_groups  # backends recognise shared ids by identity
    assert second.query_groups is first.query_groups and second.key_groups is first.key_groups
    assert not torch.equal(second.query_scores, first.query_scores)


class CountLaunches(TorchDispatchMode):
    """Counts the operators that compute something: about as many launches on a GPU."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.count += not (operator.is_view or "empty" in operator.name())
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize(("normalization", "most"), [("softmax", 60), ("sinkhorn", 100)])
def test_a_layer_adds_few_launches(normalization, most, monkeypatch):
    """A step of a small model is bound by the host: what Focus does outside its kernels must stay a handful."""

    class OneLaunch(torch.autograd.Function):  # in place of a backend
        @staticmethod
        def forward(ctx, q, k, v, *gates):
            ctx.like = (q, k, v, *gates)
            return q.clone()

        @staticmethod
        def backward(ctx, grad):
            return tuple(torch.empty_like(x) for x in ctx.like)

    def attention(q, k, v, *ids, query_gate, key_gate, return_lse, **rest):
        out = OneLaunch.apply(q, k, v, query_gate, key_gate)
        return (out, torch.empty(q.shape[:3])) if return_lse else out

    monkeypatch.setattr("focus_attn.attend.focus_attention", attention)
    monkeypatch.setattr("focus_attn.router.value_checks", lambda tensor: False)  # as on a GPU
    config = FocusConfig(num_groups=4, window=8, num_sinks=2, router_dim=8, normalization=normalization)
    ids, launches = tokens(length=40), {}
    for layers in (2, 4):
        model = focus(config=config, num_hidden_layers=layers).train()
        with CountLaunches() as counted:
            result = step(model, ids, StepOptions(budget=0.2))
            result.loss.backward()
            nudge_bias(model, result.loads, 0.1)
        hidden = model.base_model.get_input_embeddings()(ids).requires_grad_()
        with CountLaunches() as base, model.disable_focus():
            model.base_model.get_decoder()(inputs_embeds=hidden, use_cache=False).last_hidden_state.sum().backward()
        launches[layers] = counted.count - base.count
    assert 0 < (launches[4] - launches[2]) / 2 <= most


def test_more_than_the_budget_costs_and_less_does_not():
    kept = torch.tensor([0.1, 0.2, 0.21, 0.3, 0.4], requires_grad=True)
    costs = torch.stack([over_budget(x, 0.2) for x in kept])
    costs.sum().backward()
    assert costs[:2].tolist() == [0, 0] and kept.grad[:2].tolist() == [0, 0]
    assert 0 < costs[2] < costs[3] < costs[4]
    assert kept.grad[3] == kept.grad[4] == 1 / 0.2  # linear once far above it


def planted_model():
    """One layer whose attention looks for tokens of its own kind, most of them beyond the window."""
    kinds, width = 16, 16
    model = tiny_model("gpt2", num_hidden_layers=1)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        body = model.transformer
        body.wpe.weight.mul_(0.1)
        codes = torch.linalg.qr(torch.randn(width, width, generator=generator)).Q
        body.wte.weight[:, :width] = 4 * codes[torch.arange(VOCAB) % kinds]
        weight = body.h[0].attn.c_attn.weight  # [32, q | k | v]
        for head in range(4):
            look = 1.5 * torch.linalg.qr(torch.randn(width, 8, generator=generator)).Q
            for start in (8 * head, 32 + 8 * head):
                weight[:, start : start + 8] = 0
                weight[:width, start : start + 8] = look
        weight[:, 64:] *= 3
    return model


def test_training_finds_far_pairs_within_the_budget():
    model = get_focus_model(planted_model(), FocusConfig(num_groups=4, window=4, num_sinks=1, router_dim=8)).train()
    held_out = tokens(8, 128, seed=999)

    def measure():
        with torch.no_grad():
            return step(model.eval(), held_out, StepOptions(objective="distill", balance_weight=0.0)).measures

    before = measure()
    model.train()
    options = StepOptions(objective="distill", budget=0.3, probes=16)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.03)
    for done in range(40):
        result = step(model, tokens(4, 128, seed=done), options)
        optimizer.zero_grad()
        result.loss.backward()
        optimizer.step()
        nudge_bias(model, result.loads, 0.02)
    after = measure()
    assert after["distill"] < before["distill"] / 2  # without probes: five sixths of it
    assert after["pairs_kept"] < 0.3 * 1.05
    assert after["worst_dominance"] < 0.6  # one group with everything: 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"objective": "mlm"}, "'lm', 'distill', 'lm\\+distill', got 'mlm'"),
        ({"budget": 0.0}, "`budget`"),
        ({"balance_weight": -1.0}, "`balance_weight` must be 0 or more"),
        ({"largest_group": 2.0}, "`largest_group`"),
        ({"probes": -1}, "`probes`"),
    ],
)
def test_options_that_mean_nothing_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        StepOptions(**options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_ids": tokens(1, 9)}, "nothing past a window of 8"),
        ({"input_ids": tokens(1, 30)[0]}, r"\[batch, tokens\]"),
        ({"input_ids": tokens(1, 30), "segments": torch.zeros(30)}, "`segments` must have the shape"),
        (
            {
                "input_ids": tokens(1, 30),
                "segments": torch.arange(30)[None] // 15,
                "position_ids": torch.arange(30)[None],
            },
            "must restart where `segments` change",
        ),
        ({"input_ids": tokens(1, 30), "labels": tokens(1, 29)}, "`labels` must have the shape"),
        (
            {"input_ids": tokens(1, 30), "answers": tokens(1, 29) > 0, "options": StepOptions(answer_weight=1.0)},
            "`answers` must have the shape",
        ),
    ],
)
def test_batches_that_cannot_be_trained_on_are_refused(arguments, message):
    model = focus(config=CONFIG).train()
    with pytest.raises(ValueError, match=message):
        training_step(model, **{"options": PLAIN, **arguments})
    with pytest.raises(ValueError, match="in eval mode"):
        step(model.eval(), tokens(1, 30))
