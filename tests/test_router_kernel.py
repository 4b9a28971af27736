"""The router's kernel against PyTorch's operators: on the GPU where there is one, otherwise in Triton's interpreter."""

import copy
import gc
import pickle
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest
import torch
from kernel_bounds import bounded
from kernels_everywhere import DEVICE, ON_GPU, kernels_everywhere
from tiny import tiny_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import focus_attn.router as router_module
from focus_attn import FocusConfig, Router, get_focus_model
from focus_attn.router import Routing, top_groups

pytest.importorskip("triton")
from focus_attn import kernel_use, router_backward, router_kernel, router_training, router_weight

WIDTH = 50


@pytest.fixture(autouse=True)
def _kernel_everywhere() -> Iterator[None]:
    with kernels_everywhere(within_bounds=False):
        yield


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The hidden states of every launch."""
    seen: list[Tensor] = []
    launch = router_kernel.launch

    def watched(router: Router, hidden: Tensor, *rest: object) -> Routing:
        seen.append(hidden)
        return launch(router, hidden, *rest)

    monkeypatch.setattr(router_kernel, "launch", watched)
    return seen


def make_router(routers: int = 1, width: int = WIDTH, **config: object) -> Router:
    router = Router(FocusConfig(**config), width, routers, DEVICE).eval()
    router.bias.normal_(std=0.3)
    return router


def make_hidden(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (3 * torch.randn(*(shape or (1, 19, WIDTH)))).to(DEVICE, dtype)


def by_operators(router: Router, hidden: Tensor) -> Routing:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_use, "DEVICES", ())
        return router(hidden)


def assert_same(got: Routing, want: Routing, tolerance: float = 1e-5) -> None:
    """Ids may differ only where two scores nearly tie."""
    for scores, exact in zip(got[2:], want[2:], strict=True):
        assert scores.shape == exact.shape and scores.dtype == exact.dtype and scores.is_contiguous()
        torch.testing.assert_close(scores, exact, rtol=tolerance, atol=tolerance)
    for ids, exact, scores in zip(got[:2], want[:2], want[2:], strict=True):
        assert ids.shape == exact.shape and ids.dtype == exact.dtype and ids.is_contiguous()
        best = scores.sort(-1, descending=True).values[..., : ids.shape[-1] + 1]
        sure = (best.diff().abs() > 1e-4).all(-1)
        assert sure.float().mean() > 0.95
        assert torch.equal(ids[sure], exact[sure])
    assert (got.query_groups is got.key_groups) == (want.query_groups is want.key_groups)
    assert (got.query_scores is got.key_scores) == (want.query_scores is want.key_scores)


SIZES = {
    "T37-R3-K8": ((2, 37, 64), 3, {}),
    "T1-R1-K5-k2": ((3, 1, 33), 1, {"num_groups": 5, "query_top_k": 2}),
    "T17-R2-K8-shared": ((1, 17, 50), 2, {"shared_router": True}),
    "T5-R8-K64": ((1, 5, 48), 8, {"num_groups": 64}),
    "T40-R1-K6-k23": ((1, 40, 200), 1, {"num_groups": 6, "query_top_k": 2, "key_top_k": 3}),
    "T9-R1-K3-shared-k2": ((2, 9, 16), 1, {"num_groups": 3, "query_top_k": 2, "key_top_k": 2, "shared_router": True}),
    "T9-R2-K7-shared-k13": ((1, 9, 16), 2, {"num_groups": 7, "key_top_k": 3, "shared_router": True}),
    "T6-R2-K1": ((1, 6, 32), 2, {"num_groups": 1}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", SIZES)
@torch.no_grad()
def test_scores_and_ids_are_those_of_the_operators(size: str, dtype: torch.dtype, launches: list[Tensor]) -> None:
    shape, routers, config = SIZES[size]
    router, hidden = make_router(routers, shape[-1], **config), make_hidden(*shape, dtype=dtype)
    with nullcontext() if ON_GPU else bounded():
        got = router(hidden)
    assert_same(got, by_operators(router, hidden))
    assert len(launches) == 1


@pytest.mark.parametrize("tile", [(32, 4, 32, 4, 2), (64, 8, 64, 4, 3), (128, 2, 64, 8, 2)], ids=str)
@torch.no_grad()
def test_every_tile_gives_the_same(tile: tuple[int, ...]) -> None:
    router, hidden = make_router(3, query_top_k=2), make_hidden(2, 90, WIDTH, dtype=torch.bfloat16)
    weight = router_weight.weight_parts(router, hidden.dtype)
    assert_same(router_kernel.launch(router, hidden, weight, router_kernel.Tile(*tile)), by_operators(router, hidden))


@torch.no_grad()
def test_a_dense_head_has_one_group(launches: list[Tensor]) -> None:
    router, hidden = Router(FocusConfig(), WIDTH, 3, DEVICE, dense_heads=(1,)).eval(), make_hidden(2, 37, WIDTH)
    router.bias.normal_(std=0.3)
    got = router(hidden)
    assert_same(got, by_operators(router, hidden))
    assert len(launches) == 1
    for ids in got[:2]:
        assert ids[:, 1].eq(0).all() and ids[:, [0, 2]].unique().numel() > 1


@torch.no_grad()
def test_hidden_states_may_be_a_view() -> None:
    router = make_router(2)
    whole = make_hidden(WIDTH, 2, 40)
    for view in (whole.permute(1, 2, 0), make_hidden(2, 30, WIDTH)[:, 3:21], make_hidden(2, 9, WIDTH + 7)[..., 7:]):
        assert_same(router(view), by_operators(router, view))


@torch.no_grad()
def test_ties_go_to_the_lower_id() -> None:
    router = make_router(1, num_groups=5, query_top_k=3)
    router.centroids[:, :, 3] = router.centroids[:, :, 1]
    router.bias.zero_()
    router.bias[..., 1] = router.bias[..., 3] = 50.0
    routing = router(make_hidden())
    assert (routing.query_groups[..., :2] == torch.tensor([1, 3], device=DEVICE)).all()
    assert (routing.key_groups == 1).all()


@torch.no_grad()
def test_nan_and_infinity_are_ranked_as_the_operators_do() -> None:
    router, hidden = make_router(2, num_groups=5, query_top_k=2), make_hidden()
    hidden[0, 3, 7], hidden[0, 5, 1] = torch.nan, torch.inf
    router.centroids[1, 0, 2] = torch.nan
    routing = router_kernel.route(router, hidden)  # without the check of values that a forward makes on a CPU
    assert routing is not None and routing.query_scores[0, :, [3, 5]].isnan().all()
    assert routing.query_groups[0, :, [3, 5]].tolist() == [[[0, 1], [0, 1]]] * 2
    assert (routing.key_groups[:, 0] == torch.where(routing.key_scores[:, 0, :, :1].isnan(), 0, 2)).all()
    assert torch.equal(routing.query_groups, top_groups(routing.query_scores, 2))
    if not ON_GPU:
        with pytest.raises(ValueError, match="NaN or infinite"):
            router(hidden)
    with pytest.raises(ValueError, match=r"50.*\[1, 19, 51\]"):
        router(make_hidden(1, 19, WIDTH + 1))


def change_in_place(router: Router) -> None:
    router.projection[:, :, 3:].mul_(-2)


def change_data(router: Router) -> None:
    for _ in range(2):  # the second one may be given the memory of the first
        router.centroids.data = -1.5 * router.centroids.data


def change_by_replacing(router: Router) -> None:
    router.projection = nn.Parameter(torch.randn_like(router.projection), requires_grad=False)


def change_by_loading(router: Router) -> None:
    router.load_state_dict(make_router(2).state_dict())


def change_by_assigning(router: Router) -> None:
    router.load_state_dict(make_router(2).state_dict(), assign=True)


def change_by_optimiser(router: Router) -> None:
    with torch.enable_grad():
        optimiser = torch.optim.AdamW(router.requires_grad_().parameters(), lr=0.1)
        router(make_hidden()).key_scores.square().mean().backward()
        optimiser.step()


def change_by_a_fused_optimiser(router: Router) -> None:
    """It counts no version, and the weight is kept once more before it steps."""
    with torch.enable_grad():
        optimiser = torch.optim.AdamW(router.requires_grad_().parameters(), lr=0.1, fused=True)
        router(make_hidden()).key_scores.square().mean().backward()
    router.requires_grad_(False)(make_hidden())
    router.requires_grad_()
    optimiser.step()
    router.requires_grad_(False)


def change_after_training_behind_its_back(router: Router) -> None:
    """As sharded training does: the parameter's version stays what it was."""
    router.requires_grad_().train()(make_hidden())
    router.projection.data.mul_(-1)
    router.eval()


def change_bias(router: Router) -> None:
    router.bias.copy_(torch.randn_like(router.bias))


@pytest.mark.parametrize(
    "change",
    [
        change_in_place, change_data, change_by_replacing, change_by_loading, change_by_assigning, change_by_optimiser,
        change_by_a_fused_optimiser, change_after_training_behind_its_back, change_bias,
    ],
    ids=lambda change: change.__name__,
)  # fmt: skip
@torch.no_grad()
def test_the_kept_weight_follows_the_parameters(change: Callable[[Router], None]) -> None:
    router, hidden = make_router(2).requires_grad_(False), make_hidden()
    before = router(hidden)
    change(router)
    after = router(hidden)
    assert_same(after, by_operators(router, hidden))
    assert not torch.allclose(after.key_scores, before.key_scores, atol=1e-2)


@torch.no_grad()
def test_the_weight_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.dtype] = []
    make = router_weight.weight_parts
    monkeypatch.setattr(
        router_weight, "weight_parts", lambda router, dtype: (made.append(dtype), make(router, dtype))[1]
    )
    router = make_router()
    for tokens in (1, 3, 3):
        router(make_hidden(1, tokens, WIDTH))
    assert made == [torch.float32]
    router(make_hidden(dtype=torch.bfloat16))
    assert made == [torch.float32, torch.bfloat16]


@torch.no_grad()
def test_three_bf16_parts_are_the_whole_weight() -> None:
    router = make_router(3)
    parts = router_weight.weight_parts(router, torch.bfloat16)
    assert parts.dtype == torch.bfloat16 and parts.is_contiguous()
    assert torch.equal(parts.double().sum(0).float(), router.combined_weight().flatten(0, 2))


@torch.no_grad()
def test_copies_and_pickles_know_nothing_of_the_kept_weight() -> None:
    router, hidden = make_router(2), make_hidden()
    bare = len(pickle.dumps(router))
    want = router(hidden)
    assert len(pickle.dumps(router)) == bare
    assert list(router.state_dict()) == ["projection", "centroids", "bias"]
    for twin in (copy.deepcopy(router), pickle.loads(pickle.dumps(router))):
        assert_same(twin(hidden), want)
        twin.projection.mul_(-1)
        assert_same(twin(hidden), by_operators(twin, hidden))
    assert_same(router(hidden), want)
    assert twin in router_weight._kept
    kept = len(router_weight._kept)
    twin.to(DEVICE)
    assert twin not in router_weight._kept
    twin(hidden)
    del twin
    gc.collect()
    assert len(router_weight._kept) < kept


def test_whoever_wants_to_see_operators_gets_them(launches: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_module, "value_checks", lambda scores: False)  # vmap cannot look at values
    router, hidden = make_router(), make_hidden()
    with torch.no_grad():
        for odd in (hidden.double(), hidden[:, :0]):
            router(odd)
        for config in ({"routing": "paper_leaky"}, {"num_groups": 129}, {"num_groups": 16, "query_top_k": 9}):
            make_router(**config)(hidden)  # type: ignore[arg-type]
        with FlopCounterMode(display=False) as counted:
            router(hidden)
        assert counted.get_total_flops() > 0
        torch.func.vmap(lambda one: router(one[None]).key_scores)(hidden)
    with torch.inference_mode():
        make_router()(hidden)
    router.requires_grad_(False)
    traced, other = torch.jit.trace(lambda x: router(x).key_scores, hidden, check_trace=False), make_hidden()
    assert torch.equal(traced(other), by_operators(router, other).key_scores)
    assert router(hidden.requires_grad_()).key_scores.requires_grad
    assert not launches
    with torch.inference_mode():
        router(make_hidden())
    assert len(launches) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_gradients_are_those_of_the_operators(
    size: str, dtype: torch.dtype, launches: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, routers, config = SIZES[size]
    router, hidden = make_router(routers, shape[-1], **config).train(), make_hidden(*shape, dtype=dtype)
    pull, grads = torch.randn(2, shape[0], routers, shape[1], router.config.num_groups, device=DEVICE), []
    ran: list[Tensor] = []
    kernels = router_backward.gradients
    monkeypatch.setattr(
        router_backward, "gradients", lambda hidden, *rest: ran.append(hidden) or kernels(hidden, *rest)
    )
    for devices in ((DEVICE,), ()):
        monkeypatch.setattr(kernel_use, "DEVICES", devices)
        routing = router(hidden.requires_grad_())
        loss = (pull[0] * routing.query_scores).sum() + (pull[1] * routing.key_scores.square()).sum()
        grads.append(torch.autograd.grad(loss, (hidden, router.projection, router.centroids)))
    assert len(launches) == len(ran) == 1 and not routing.key_groups.requires_grad
    for got, want in zip(*grads, strict=True):
        tolerance = 1e-4 if got.dtype == torch.float32 else 1e-2
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance * float(want.abs().max()))


@pytest.mark.parametrize("to_hidden", [True, False], ids=["to hidden states", "to the weight alone"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sizes", [(2, 3, 8, 64), (1, 2, 5, 50), (2, 5, 16, 80)], ids=str)
def test_gradients_of_many_tokens(
    sizes: tuple[int, ...], dtype: torch.dtype, to_hidden: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In several stretches and, where routers are many, several blocks of columns."""
    monkeypatch.setattr(router_backward, "PROGRAMS", 16)
    sides, routers, groups, width = sizes
    hidden, weight = make_hidden(2, 170, width, dtype=dtype), torch.randn(*sizes, device=DEVICE)
    grads = [torch.randn(2, routers, 170, groups, device=DEVICE) for _ in range(sides)]
    grads[-1] = grads[-1].transpose(1, 2).contiguous().transpose(1, 2)  # as autograd may give them
    with nullcontext() if ON_GPU else bounded():
        got = router_backward.gradients(hidden, weight, grads, to_hidden)
    want = router_training.by_operators(hidden, weight, grads, to_hidden)
    assert (got[0] is None) == (want[0] is None) == (not to_hidden)
    for one, other in zip(got, want, strict=True):
        if one is not None and other is not None:
            assert one.dtype == other.dtype and one.shape == other.shape
            tolerance = 1e-5 if one.dtype == torch.float32 else 1e-2
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance * float(other.abs().max()))


def test_whoever_watches_the_backward_sees_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    router, hidden = make_router().train(), make_hidden().requires_grad_()
    ran: list[Tensor] = []
    monkeypatch.setattr(router_backward, "gradients", lambda hidden, *rest: ran.append(hidden))
    with FlopCounterMode(display=False) as counted:
        scores = router(hidden).key_scores
        forward = counted.get_total_flops()
        scores.sum().backward()
    assert counted.get_total_flops() > 2 * forward and not ran and hidden.grad is not None


@pytest.mark.parametrize(("room", "stages"), [(65_536, 1), (101_376, 2), (166_912, 3), (232_448, 3)])
def test_gradients_fit_into_shared_memory(room: int, stages: int) -> None:
    """Compiled for sm_90 at blocks of 64 in fp32, three stages take 131,584 bytes."""
    assert router_backward.stages_for(room, 64, 3) == stages


def test_a_checkpointed_router_says_the_same_twice(launches: list[Tensor]) -> None:
    """The first time without gradients, the second with them."""
    router, hidden, said = make_router().train(), make_hidden().requires_grad_(), []

    def scores(x: Tensor) -> Tensor:
        said.append(router(x))
        return said[-1].key_scores

    checkpoint(scores, hidden, use_reentrant=True).square().sum().backward()
    assert len(launches) == len(said) == 2
    assert all(torch.equal(first, second) for first, second in zip(*said, strict=True))


def test_second_derivatives_are_refused() -> None:
    router, hidden = make_router().train(), make_hidden().requires_grad_()
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(router(hidden).key_scores.sum(), hidden, create_graph=True)


def test_a_compiled_router_has_no_graph_break(launches: list[Tensor]) -> None:
    router, hidden = make_router(), make_hidden()
    with torch.no_grad():
        routing = torch.compile(router, backend="eager", fullgraph=True)(hidden)
        assert_same(routing, by_operators(router, hidden))
    assert not launches


@torch.no_grad()
def test_autocast_changes_nothing() -> None:
    router, hidden = make_router(), make_hidden(dtype=torch.bfloat16)
    want = router(hidden)
    router_weight._kept.clear()
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        got = router(hidden)
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)


@torch.no_grad()
def test_a_model_says_the_same_with_it(launches: list[Tensor]) -> None:
    model = get_focus_model(tiny_model("llama"), FocusConfig(window=4, num_groups=4)).to(DEVICE)
    ids = torch.randint(0, model.config.vocab_size, (1, 24), device=DEVICE)
    got = model(ids).logits
    assert launches
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_use, "DEVICES", ())
        torch.testing.assert_close(got, model(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 16, 2048, 1 << 20])
@pytest.mark.parametrize(("routers", "groups"), [(1, 8), (6, 8), (16, 64), (2, 128), (64, 4)])
def test_tiles_fit(rows: int, routers: int, groups: int) -> None:
    for parts, size in ((3, 2), (1, 4)):
        tile = router_kernel.tile_for(rows, routers, groups, parts, size, torch.device("cpu"))
        columns = tile.routers * router_kernel.power_of_2(groups)
        assert 16 <= columns <= 128 and tile.routers <= 2 * routers
        assert tile.stages * tile.depth * (tile.tokens + parts * columns) * size < 232448


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("tokens", [1, 100, 2048, 8192, 20_001])
@pytest.mark.parametrize("sizes", [(576, 3, {}), (4096, 8, {}), (4096, 1, {"shared_router": True})], ids=str)
@torch.no_grad()
def test_sizes_of_models(sizes: tuple[int, int, dict[str, bool]], tokens: int) -> None:
    width, routers, config = sizes
    router, hidden = make_router(routers, width, **config), make_hidden(1, tokens, width, dtype=torch.bfloat16)
    # A score is a sum of `width` products, rounded in another order on either side.
    assert_same(router(hidden), by_operators(router, hidden), tolerance=1e-5 * max(1.0, width / 576))


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@torch.no_grad()
def test_a_cuda_graph_follows_the_parameters(launches: list[Tensor]) -> None:
    router, hidden = make_router(), make_hidden(dtype=torch.bfloat16)
    router(hidden)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        routing = router(hidden)
    assert len(launches) == 2
    for change in (lambda: router.projection.mul_(-1), lambda: hidden.copy_(make_hidden(dtype=torch.bfloat16))):
        change()
        graph.replay()
        assert_same(routing, by_operators(router, hidden))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@torch.no_grad()
def test_the_layers_of_a_model_may_be_on_another_device(launches: list[Tensor]) -> None:
    router, hidden = make_router().to("cuda:1"), make_hidden().to("cuda:1")
    assert_same(router(hidden), by_operators(router, hidden))
    assert len(launches) == 1
