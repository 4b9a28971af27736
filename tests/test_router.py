import pytest
import torch

from focus_attn import FocusConfig, Router
from focus_attn.router import sinkhorn, top_groups


@pytest.mark.parametrize("scores_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1000, 4096])
def test_sinkhorn_rows_sum_to_one_and_columns_balance(tokens: int, scores_dtype: torch.dtype) -> None:
    scores = torch.randn(2, 3, tokens, 8).to(scores_dtype)
    p = sinkhorn(scores, 10).exp()
    assert p.dtype == torch.float32
    assert (p.sum(-1) - 1).abs().max() < 1e-5
    assert (p.sum(-2) / (tokens / 8) - 1).abs().max() < 0.05


def test_sinkhorn_is_the_published_alternation_in_value_and_gradient() -> None:
    logits, pull = torch.randn(2, 3, 40, 5, requires_grad=True), torch.randn(2, 3, 40, 5)
    plain = logits.detach().double().requires_grad_()
    p = plain.exp()
    for _ in range(10):
        p = p / p.sum(-2, keepdim=True)
        p = p / p.sum(-1, keepdim=True)
    log_p = sinkhorn(logits, 10)
    torch.testing.assert_close(log_p.double(), p.log(), rtol=1e-5, atol=1e-5)
    (log_p * pull).sum().backward()
    (p.log() * pull).sum().backward()
    assert logits.grad is not None and plain.grad is not None
    torch.testing.assert_close(logits.grad.double(), plain.grad, rtol=1e-4, atol=1e-5)


def test_sinkhorn_at_the_published_temperature_is_less_balanced_as_documented() -> None:
    p = sinkhorn(torch.randn(4, 1, 1024, 8) / 0.1, 10).exp()
    assert (p.sum(-1) - 1).abs().max() < 1e-5
    deviation = (p.sum(-2) / 128 - 1).abs().max()
    assert 0.05 < deviation < 0.5


def test_sinkhorn_stays_finite_where_exp_would_overflow() -> None:
    assert sinkhorn(torch.randn(1, 1, 64, 4) * 1e4, 10).exp().isfinite().all()


def test_padding_takes_no_part_in_the_balance() -> None:
    scores = torch.randn(2, 1, 50, 4)
    mask = torch.ones(2, 50, dtype=torch.bool)
    mask[0, :20] = False
    padded = sinkhorn(scores, 10, mask)
    torch.testing.assert_close(padded[0, :, 20:], sinkhorn(scores[:1, :, 20:], 10)[0])
    torch.testing.assert_close(padded[1], sinkhorn(scores[1:], 10)[0])
    assert padded.isfinite().all()


def test_ties_go_to_the_lower_id() -> None:
    scores = torch.tensor([[1.0, 3.0, 3.0, 0.0, 3.0]])
    assert top_groups(scores, 1).tolist() == [[1]]
    assert top_groups(scores, 2).tolist() == [[1, 2]]
    assert top_groups(scores, 4).tolist() == [[1, 2, 4, 0]]


@pytest.mark.parametrize("routers", [1, 3])
@pytest.mark.parametrize("shared", [False, True])
def test_routing_shapes_and_scores(routers: int, shared: bool) -> None:
    config = FocusConfig(num_groups=6, query_top_k=2, key_top_k=1, shared_router=shared)
    router = Router(config, 32, routers)
    routing = router(torch.randn(2, 17, 32))
    assert routing.query_groups.shape == (2, routers, 17, 2) and routing.query_groups.dtype == torch.int64
    assert routing.key_groups.shape == (2, routers, 17, 1)
    assert routing.query_scores.shape == routing.key_scores.shape == (2, routers, 17, 6)
    torch.testing.assert_close(routing.key_groups[..., 0], routing.key_scores.argmax(-1))
    sides = 1 if shared else 2
    assert sum(p.numel() for p in router.parameters()) == sides * routers * (32 * 16 + 6 * 16)


def test_scores_are_the_published_formula_on_normalised_hidden_states() -> None:
    router = Router(FocusConfig(shared_router=True), 24, 2)
    router.bias.normal_()
    hidden = torch.randn(1, 5, 24)
    x = hidden / hidden.square().mean(-1, keepdim=True).sqrt()
    for r in range(2):
        want = x @ router.projection[0, r] @ router.centroids[0, r].T + router.bias[0, r]
        torch.testing.assert_close(router(hidden).key_scores[:, r], want, rtol=1e-4, atol=1e-5)


def test_the_scale_of_hidden_states_does_not_matter() -> None:
    router = Router(FocusConfig(), 24, 2)
    hidden = torch.randn(1, 50, 24)
    torch.testing.assert_close(router(hidden).query_scores, router(1000 * hidden).query_scores, rtol=1e-4, atol=1e-4)


def test_ids_depend_on_the_tokens_own_hidden_state_alone_unless_the_published_leak_is_asked_for() -> None:
    hidden = torch.randn(1, 40, 24)
    changed = torch.cat([hidden[:, :20], torch.randn(1, 20, 24)], 1)
    causal = Router(FocusConfig.paper(), 24, 1)
    assert torch.equal(causal(hidden).key_groups[:, :, :20], causal(changed).key_groups[:, :, :20])
    leaky = Router(FocusConfig.paper(routing="paper_leaky"), 24, 1)
    assert not torch.equal(leaky(hidden).key_groups[:, :, :20], leaky(changed).key_groups[:, :, :20])


def test_the_bias_moves_tokens_and_is_saved_but_not_trained() -> None:
    router = Router(FocusConfig(), 24, 1)
    router.bias[1, :, 3] = 100.0
    routing = router(torch.randn(1, 30, 24))
    assert (routing.key_groups == 3).all() and not (routing.query_groups == 3).all()
    assert "bias" in router.state_dict() and "bias" not in dict(router.named_parameters())


def test_a_bf16_model_is_routed_in_fp32() -> None:
    router = Router(FocusConfig(), 24, 1)
    hidden = torch.randn(1, 30, 24).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        routing = router(hidden)
    assert routing.query_scores.dtype == torch.float32
    torch.testing.assert_close(routing.query_scores, router(hidden.float()).query_scores, rtol=0, atol=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_hidden_states_are_named(bad: float) -> None:
    router = Router(FocusConfig(), 24, 1)
    hidden = torch.randn(1, 30, 24)
    hidden[0, 3, 5] = bad
    with pytest.raises(ValueError, match="NaN or infinite"):
        router(hidden)
    with pytest.raises(ValueError, match=r"24.*\[1, 30, 25\]"):
        router(torch.randn(1, 30, 25))


@pytest.mark.parametrize(
    "changes", [{}, {"shared_router": True}, {"query_top_k": 2}, {"routing": "paper_leaky"}], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_gradients_are_those_of_the_operators(changes, dtype, monkeypatch):
    router = Router(FocusConfig(num_groups=4, router_dim=8, **changes), 32, 3)
    router.bias.normal_()
    hidden = (2 * torch.randn(2, 17, 32)).to(dtype).requires_grad_()
    pull = torch.randn(2, 2, 3, 17, 4)
    grads = []
    for by_hand in (True, False):
        if not by_hand:
            monkeypatch.setattr("focus_attn.router.goes_by_hand", lambda weight: False)
        routing = router(hidden)
        assert routing.query_scores.grad_fn is not None and not routing.query_groups.requires_grad
        assert (routing.query_scores is routing.key_scores) == ("shared_router" in changes)
        loss = (pull[0] * routing.query_scores).sum() + (pull[1] * routing.key_scores.square()).sum()
        grads.append(torch.autograd.grad(loss, (hidden, router.projection, router.centroids)))
    for got, wanted in zip(*grads, strict=True):
        assert got.dtype == wanted.dtype
        tolerance = 1e-2 if got.dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance * float(wanted.abs().max()))


def test_training_keeps_hidden_states_in_their_own_dtype():
    router, hidden = Router(FocusConfig(num_groups=4, router_dim=8), 512, 1), torch.randn(1, 64, 512).bfloat16()
    kept: dict[int, torch.Tensor] = {}
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: kept.setdefault(x.data_ptr(), x), lambda x: x)
    with hooks:
        router(hidden.requires_grad_())
    wide = [x for x in kept.values() if x.numel() >= hidden.numel()]
    assert len(wide) == 1 and wide[0].dtype == torch.bfloat16


def test_hidden_states_that_want_no_gradient_get_none():
    router, hidden = Router(FocusConfig(num_groups=4, router_dim=8), 32, 1), torch.randn(1, 9, 32)
    router(hidden).key_scores.sum().backward()
    assert hidden.grad is None and router.projection.grad.abs().max() > 0
