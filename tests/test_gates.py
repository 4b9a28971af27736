"""What a training forward computes: the soft gates, and the gradients of the routers."""

from __future__ import annotations

import math

import pytest
import torch
from tiny import EXACT, focus, logits, tokens

from focus_attn import FocusConfig

pytestmark = pytest.mark.filterwarnings("ignore:this input of")


@pytest.mark.parametrize("gate", ["multiplicative", "additive"])
@pytest.mark.parametrize("normalization", ["softmax", "sinkhorn"])
@pytest.mark.filterwarnings("ignore:a soft gate")
def test_soft_gates_compute_their_formula(gate, normalization):
    config = FocusConfig(
        num_groups=4, window=3, num_sinks=2, gate=gate, gate_sharpness=3.0, normalization=normalization
    )
    model, ids = focus(config=config, num_hidden_layers=1), tokens(batch=1, length=20)
    seen = []
    with model.observe_attention(seen.append):
        logits(model, ids)
    (inputs,), (layer,) = seen, model.focus_layers()
    captured = []
    handle = model.base_model.model.layers[0].self_attn.o_proj.register_forward_pre_hook(
        lambda module, args: captured.append(args[0])
    )
    model.train()(ids)
    handle.remove()

    routing = layer.router(inputs.hidden)
    routing = routing._replace(query_scores=routing.query_scores.detach(), key_scores=routing.key_scores.detach())
    a, b = (layer.router.log_assignments(s).exp() for s in (routing.query_scores, routing.key_scores))
    out = torch.zeros(1, 20, 4, 8)
    for head in range(4):
        for i in range(20):
            scores = []
            for j in range(i + 1):
                score = float(inputs.q[0, head, i] @ inputs.k[0, head // 2, j]) * inputs.scale
                affinity = float(a[0, head // 2, i] @ b[0, head // 2, j])
                if i - j > 3 and j >= 2:
                    if gate == "multiplicative":
                        score *= 1 / (1 + math.exp(-3.0 * affinity))
                    else:
                        score += 3.0 * (affinity - 1)
                scores.append(score)
            out[0, i, head] = torch.tensor(scores).softmax(0) @ inputs.v[0, head // 2, : i + 1]
    torch.testing.assert_close(captured[0].unflatten(-1, (4, 8)), out, **EXACT)


@pytest.mark.parametrize("architecture", ["llama", "gpt_oss", "gemma2"])
@pytest.mark.filterwarnings("ignore:a soft gate")
def test_a_sharp_additive_gate_is_the_hard_mask(architecture):
    """With confident assignments and a large lambda, what training computes is what is served."""
    config = FocusConfig(
        num_groups=4, window=3, gate="additive", gate_sharpness=1e4, temperature=1e-3, normalization="softmax"
    )
    model, ids = focus(architecture, config), tokens(length=40)
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    with torch.no_grad():
        for layer in model.focus_layers():
            if layer.router is not None:
                layer.router.centroids.mul_(1e3)
    hard = logits(model, ids, attention_mask=mask)
    soft = model.train()(ids, attention_mask=mask).logits
    torch.testing.assert_close(soft[mask.bool()], hard[mask.bool()], atol=1e-4, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:a soft gate")
@pytest.mark.parametrize("gate", ["hard", "multiplicative", "additive"])
def test_every_gate_trains_the_routers_alone(gate):
    model, ids = focus(config=FocusConfig.paper(num_groups=4, window=3, gate=gate)), tokens(length=40)
    model.train()
    first = model(ids, labels=ids).loss
    optimiser = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.02)
    for _ in range(12):
        optimiser.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimiser.step()
    assert loss < first
