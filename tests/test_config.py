import dataclasses
import json
from typing import Any

import pytest

from focus_attn import FocusConfig


def test_defaults_are_the_documented_ones() -> None:
    config = FocusConfig()
    assert (config.num_groups, config.query_top_k, config.key_top_k) == (8, 1, 1)
    assert (config.window, config.num_sinks, config.router_dim) == (128, 4, 16)
    assert (config.router_scope, config.shared_router, config.normalization) == ("auto", False, "sinkhorn")
    assert (config.gate, config.routing, config.sliding_layers, config.backend) == ("hard", "causal", "keep", "auto")
    assert (config.sinkhorn_iters, config.dense_layers) == (10, ())


def test_paper_is_the_published_setting() -> None:
    config = FocusConfig.paper()
    assert (config.num_groups, config.query_top_k, config.key_top_k, config.window) == (8, 2, 2, 128)
    assert (config.temperature, config.sinkhorn_iters, config.num_sinks) == (0.1, 10, 0)
    assert config.shared_router and config.router_scope == "layer" and config.gate == "multiplicative"
    assert FocusConfig.paper(num_groups=4).num_groups == 4


def test_json_round_trip() -> None:
    config = FocusConfig.paper(dense_layers=[0, -1], window=64)
    again = FocusConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again == config and again.dense_layers == (0, -1)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_groups", 0),
        ("num_groups", -3),
        ("query_top_k", 0),
        ("query_top_k", 9),
        ("key_top_k", 9),
        ("window", -1),
        ("num_sinks", -1),
        ("router_dim", 0),
        ("sinkhorn_iters", 0),
        ("temperature", 0.0),
        ("temperature", float("nan")),
        ("gate_sharpness", -1.0),
        ("router_scope", "head"),
        ("normalization", "none"),
        ("gate", "soft"),
        ("routing", "leaky"),
        ("sliding_layers", "drop"),
        ("backend", "cuda"),
    ],
)
def test_a_wrong_value_is_named(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"`{field}`.*got {value!r}"):
        FocusConfig(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_groups", 8.0),
        ("num_groups", True),
        ("window", "128"),
        ("temperature", "hot"),
        ("shared_router", 1),
        ("dense_layers", 3),
        ("dense_layers", ("a",)),
        ("dense_layers", None),
    ],
)
def test_a_wrong_type_is_named(field: str, value: Any) -> None:
    with pytest.raises(TypeError, match=rf"`{field}`"):
        FocusConfig(**{field: value})


def test_unknown_fields_are_named_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'group_count'.*num_groups"):
        FocusConfig.from_dict({"group_count": 4})
    with pytest.raises(TypeError, match="dict"):
        FocusConfig.from_dict([1])  # type: ignore[arg-type]


def test_every_field_has_help_and_the_config_is_frozen() -> None:
    assert all(spec.metadata["help"] for spec in dataclasses.fields(FocusConfig))
    with pytest.raises(dataclasses.FrozenInstanceError):
        FocusConfig().window = 3  # type: ignore[misc]


def test_routers_per_layer() -> None:
    assert FocusConfig().num_routers(8) == 8
    assert FocusConfig().num_routers(9) == 1
    assert FocusConfig(router_scope="kv_head").num_routers(32) == 32
    assert FocusConfig(router_scope="layer").num_routers(2) == 1


def test_what_leaks_says_so() -> None:
    assert not FocusConfig().leaks_future(training=True)
    assert not FocusConfig.paper().leaks_future()
    assert FocusConfig.paper().leaks_future(training=True)  # the Sinkhorn gate looks across the sequence
    assert not FocusConfig.paper(normalization="softmax").leaks_future(training=True)
    assert FocusConfig.paper(routing="paper_leaky").leaks_future()


def test_settings_that_hide_nothing_are_known() -> None:
    assert FocusConfig(num_groups=4, query_top_k=3, key_top_k=2).always_dense
    assert not FocusConfig(num_groups=4, query_top_k=2, key_top_k=2).always_dense


def test_a_choice_that_is_not_a_string_is_named() -> None:
    with pytest.raises(ValueError, match="`backend`"):
        FocusConfig(backend=["stock"])  # type: ignore[arg-type]
