"""focus_attention called wrongly: a sentence that names what was wrong, never a crash or a silent answer."""

from typing import Any

import pytest
import torch

from focus_attn import focus_attention


def good() -> dict[str, Any]:
    q, k, v = torch.randn(2, 4, 12, 8), torch.randn(2, 2, 12, 8), torch.randn(2, 2, 12, 6)
    ids = torch.randint(0, 4, (2, 2, 12, 1))
    return {"q": q, "k": k, "v": v, "query_groups": ids, "key_groups": ids, "num_groups": 4, "window": 3}


WRONG: list[tuple[str, type[Exception], str, dict[str, Any]]] = [
    ("q of three dimensions", ValueError, "`q` must be", {"q": torch.randn(4, 12, 8)}),
    ("q not a tensor", TypeError, "`q` must be a tensor", {"q": [1.0]}),
    ("integer q", TypeError, "`q` must be floating", {"q": torch.zeros(2, 4, 12, 8, dtype=torch.int64)}),
    ("mixed dtypes", TypeError, "one dtype", {"k": torch.randn(2, 2, 12, 8).bfloat16()}),
    ("another device", ValueError, "one device", {"k": torch.randn(2, 2, 12, 8, device="meta")}),
    ("empty heads", ValueError, "empty", {"q": torch.randn(2, 0, 12, 8)}),
    ("batch sizes", ValueError, "batch sizes differ", {"k": torch.randn(1, 2, 12, 8), "v": torch.randn(1, 2, 12, 6)}),
    ("k and v lengths", ValueError, "agree in heads and tokens", {"v": torch.randn(2, 2, 11, 6)}),
    ("widths of q and k", ValueError, "one width", {"k": torch.randn(2, 2, 12, 9)}),
    ("heads do not divide", ValueError, "not a multiple", {"q": torch.randn(2, 3, 12, 8)}),
    ("float ids", TypeError, "`query_groups` must hold integer", {"query_groups": torch.rand(2, 2, 12, 1)}),
    ("ids not a tensor", TypeError, "`key_groups` must be a tensor", {"key_groups": None}),
    ("ids of three dimensions", ValueError, "`key_groups` must be", {"key_groups": torch.zeros(2, 12, 1).long()}),
    ("ids too large", ValueError, "0..3", {"key_groups": torch.full((2, 2, 12, 1), 4)}),
    ("negative ids", ValueError, "0..3", {"query_groups": torch.full((2, 2, 12, 1), -1)}),
    ("ids of another length", ValueError, "12 tokens", {"key_groups": torch.zeros(2, 2, 10, 1).long()}),
    ("three routers", ValueError, "1 router or one for each", {"key_groups": torch.zeros(2, 3, 12, 1).long()}),
    ("routers that differ", ValueError, "same routers", {"key_groups": torch.zeros(2, 1, 12, 1).long()}),
    ("more ids than groups", ValueError, "between 1 and", {"key_groups": torch.zeros(2, 2, 12, 5).long()}),
    ("no ids", ValueError, "between 1 and", {"key_groups": torch.zeros(2, 2, 12, 0).long()}),
    ("K = 0", ValueError, "`num_groups` must be at least 1, got 0", {"num_groups": 0}),
    ("K not an integer", TypeError, "`num_groups`", {"num_groups": 4.0}),
    ("negative window", ValueError, "`window` must be at least 0, got -1", {"window": -1}),
    ("negative sinks", ValueError, "`num_sinks`", {"num_sinks": -2}),
    ("sliding window 0", ValueError, "`sliding_window`", {"sliding_window": 0}),
    ("scale NaN", ValueError, "`scale` must be finite", {"scale": float("nan")}),
    ("scale a string", TypeError, "`scale`", {"scale": "big"}),
    ("softcap 0", ValueError, "`softcap` must be positive", {"softcap": 0.0}),
    ("sink logits shape", ValueError, r"`sink_logits` must have shape \[4\]", {"sink_logits": torch.zeros(2)}),
    ("padding mask shape", ValueError, "`key_padding_mask`", {"key_padding_mask": torch.ones(2, 11).bool()}),
    ("padding mask dtype", TypeError, "must be bool", {"key_padding_mask": torch.ones(2, 12)}),
    ("float positions", TypeError, "`key_positions`", {"key_positions": torch.ones(2, 12)}),
    ("one gate", ValueError, "go together", {"query_gate": torch.zeros(2, 2, 12, 4)}),
    (
        "integer gates",
        TypeError,
        "`query_gate` must be floating",
        {"query_gate": torch.zeros(2, 2, 12, 4).long(), "key_gate": torch.zeros(2, 2, 12, 4)},
    ),
    ("query segments alone", ValueError, "needs `key_segments`", {"query_segments": torch.zeros(2, 12).long()}),
    ("dropout", ValueError, "dropout is not supported", {"dropout": 0.1}),
    ("unknown backend", ValueError, "unknown `backend` 'cuda'", {"backend": "cuda"}),
    (
        "more queries than keys",
        ValueError,
        "pass `query_positions`",
        {"q": torch.randn(2, 4, 15, 8), "query_groups": torch.zeros(2, 2, 15, 1).long()},
    ),
    (
        "padding said twice",
        ValueError,
        "pass one",
        {"key_padding_mask": torch.ones(2, 12).bool(), "key_positions": torch.ones(2, 12).long()},
    ),
    (
        "gates on pairs that share several groups",
        ValueError,
        "backend='reference'",
        {
            "backend": "stock",
            "query_groups": torch.zeros(2, 2, 12, 2).long(),
            "key_groups": torch.zeros(2, 2, 12, 2).long(),
            "query_gate": torch.zeros(2, 2, 12, 4),
            "key_gate": torch.zeros(2, 2, 12, 4),
        },
    ),
]


@pytest.mark.parametrize(("error", "message", "change"), [w[1:] for w in WRONG], ids=[w[0] for w in WRONG])
def test_is_refused_with_a_sentence(error: type[Exception], message: str, change: dict[str, Any]) -> None:
    with pytest.raises(error, match=message):
        focus_attention(**{**good(), **change})


def test_the_good_call_is_good() -> None:
    assert focus_attention(**good()).shape == (2, 4, 12, 6)
