"""The seam with transformers: which modules are attention, how Focus gets in, and the attention function "focus".

A forward pre-hook on each attention module routes its input and hands the groups to the attention function as one
keyword. Nothing is left on the module between the two, so gradient checkpointing and torch.compile see a pure function.
"""

from __future__ import annotations

import functools
import inspect
import warnings
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_layers import GradientCheckpointingLayer

from focus_attn import falcon
from focus_attn.attend import attend
from focus_attn.cache import append_group_ids
from focus_attn.layer import AttentionInputs, FocusCall, FocusLayer, FocusState, LayerSpec
from focus_attn.mask import focus_mask, read_mask
from focus_attn.router import Routing

FOCUS = "focus"

# Architectures that the tests run through; others that use the attention interface get a warning.
TESTED_MODEL_TYPES = frozenset(
    "cohere2 deepseek_v3 falcon gemma2 gemma3_text gpt2 gpt_neox gpt_oss granite llama mistral mixtral olmo2 opt phi3 "
    "qwen2 qwen3 smollm3 stablelm".split()
)

NO_ATTENTIONS = (
    "`output_attentions=True` is not available: Focus never forms the attention matrix. Look at `record_stats()`, or "
    'use `disable_focus()` on a model loaded with `attn_implementation="eager"`'
)
_CACHE_ARGUMENTS = ("past_key_values", "layer_past", "past_key_value")


def find_attention_modules(model: nn.Module) -> list[nn.Module]:
    """The causal self-attention modules of a model, in order of their layers; ValueError where Focus cannot work."""
    config = text_config(model)
    kind = f"{type(model).__name__} (model type {config.model_type!r})"
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"Focus is for decoder-only causal LMs: {kind} is an encoder-decoder model")
    if uses_alibi(config):
        raise ValueError(f"Focus does not support ALiBi position biases, which {kind} adds to its attention scores")
    if getattr(config, "add_cross_attention", False):
        raise ValueError(f"Focus is for decoder-only causal LMs: {kind} has cross-attention")
    if getattr(config, "num_kv_shared_layers", 0):
        raise ValueError(f"Focus needs keys of its own in every layer: in {kind} layers share them")
    named = [
        module
        for module in model.modules()
        if "Attention" in type(module).__name__ and getattr(module, "layer_idx", None) is not None
    ]
    if not named:
        raise ValueError(
            f"{kind} has no attention modules that Focus recognises (classes named *Attention* with a `layer_idx`)"
        )
    able = [module for module in named if falcon.is_attention(module) or uses_attention_interface(type(module))]
    if not able:
        raise ValueError(
            f"{type(named[0]).__name__} of {kind} does not use transformers' attention interface "
            "(ALL_ATTENTION_FUNCTIONS), the only way Focus has into a model"
        )
    causal = [module for module in able if getattr(module, "is_causal", True)]
    if not causal:
        raise ValueError(f"Focus is for causal LMs: {kind} is an encoder, its attention looks both ways")
    if any(getattr(module, "indexer", None) is not None for module in causal):
        raise ValueError(f"{kind} chooses by itself which keys a query sees (`indexer`): Focus would undo that")
    if len({module.layer_idx for module in causal}) != len(causal):
        raise ValueError(f"{kind} has several attention modules of one `layer_idx`, which Focus cannot tell apart")
    return sorted(causal, key=lambda module: module.layer_idx)  # type: ignore[arg-type,return-value]


def warn_if_untested(model: nn.Module) -> None:
    model_type = text_config(model).model_type
    if model_type not in TESTED_MODEL_TYPES:
        warnings.warn(
            f"Focus has not been tested on {type(model).__name__} (type {model_type!r}): check it as docs/using.md "
            "does. With every token in one group its logits must be those inside `disable_focus()`",
            UserWarning,
            stacklevel=4,
        )


def text_config(model: nn.Module) -> PreTrainedConfig:
    """The config of the language model."""
    config = getattr(model, "config", None)
    if not isinstance(model, nn.Module) or not isinstance(config, PreTrainedConfig):
        raise TypeError(f"expected a transformers causal LM, got {type(model).__name__}")
    return config.get_text_config(decoder=True)


def uses_alibi(config: PreTrainedConfig) -> bool:
    attn_config = getattr(config, "attn_config", None)  # mpt keeps it there
    return (
        bool(getattr(config, "alibi", False))
        or bool(getattr(attn_config, "alibi", False))
        or config.model_type == "bloom"
    )


def uses_attention_interface(attention_class: type) -> bool:
    """Whether the class looks its attention function up by name."""
    return _source_mentions(attention_class, "ALL_ATTENTION_FUNCTIONS")


def _reads(attention_class: type, name: str) -> bool:
    """Whether the model's files make anything of a field of its config, which may hold more than that."""
    return _source_mentions(attention_class, name, whole_file=True)


@functools.cache
def _source_mentions(attention_class: type, name: str, whole_file: bool = False) -> bool:
    """The source is the only place that says so."""
    classes: list[Any] = [cls for cls in attention_class.__mro__ if issubclass(cls, nn.Module)]
    try:
        sources: list[Any] = [inspect.getmodule(cls) if whole_file else cls for cls in classes]
        return any(name in inspect.getsource(source) for source in sources)
    except (OSError, TypeError):
        return False


def layer_spec(module: nn.Module) -> LayerSpec:
    config: Any = module.config
    heads = config.num_attention_heads
    if falcon.is_attention(module):
        kv_heads = module.num_kv_heads
    elif hasattr(module, "num_key_value_groups"):
        kv_heads = heads // module.num_key_value_groups  # type: ignore[operator]
    elif _reads(type(module), "num_key_value_heads"):
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
    else:
        kv_heads = heads
    slides = _reads(type(module), "sliding_window")
    forward = inspect.signature(type(module).forward)
    return LayerSpec(
        layer_idx=int(module.layer_idx),  # type: ignore[arg-type]
        hidden_size=config.hidden_size,
        num_kv_heads=int(kv_heads),  # type: ignore[arg-type]
        sliding_window=sliding_window_of(config, int(module.layer_idx)) if slides else None,  # type: ignore[arg-type]
        arguments=tuple(forward.parameters)[1:],
    )


def sliding_window_of(config: PreTrainedConfig, layer_idx: int) -> int | None:
    """The sliding window of a layer, None where it sees everything before it."""
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if types is not None and types[layer_idx] != "sliding_attention":
        return None
    return window


def execution_device(module: nn.Module) -> torch.device:
    """Where a module computes: its weights may be elsewhere when accelerate offloads them."""
    for part in module.modules():
        device = getattr(getattr(part, "_hf_hook", None), "execution_device", None)
        if device is not None:
            return torch.device(device)
    tensors = [*module.parameters(), *module.buffers()]
    return next((x.device for x in tensors if x.device.type != "meta"), torch.device("cpu"))


def is_checkpointed(module: nn.Module) -> bool:
    return isinstance(module, GradientCheckpointingLayer) and bool(module.gradient_checkpointing)


def checkpoint_in_eval_mode(layer: nn.Module) -> list[Any]:
    """transformers checkpoints a layer only in training mode, where dropout would come to life. So the layer is in
    training mode when it is called and in eval mode while it computes."""
    layer.training = True
    return [layer.register_forward_pre_hook(_to_eval), layer.register_forward_hook(_to_train, always_call=True)]


def _to_eval(layer: nn.Module, *_: Any) -> None:
    layer.training = False


def _to_train(layer: nn.Module, *_: Any) -> None:
    layer.training = True


_SWITCHED_ON: weakref.WeakSet[Seam] = weakref.WeakSet()


class Seam:
    """The hold Focus has on a model: hooks, submodules, the attention implementation. All of it can be taken off."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = find_attention_modules(model)
        if any(hasattr(module, "focus") for module in self.modules):
            raise ValueError("this model already has Focus on it: use `add_adapter`, or `unload()` it first")
        self.specs = [layer_spec(module) for module in self.modules]
        decoders = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
        configs = [part.config.get_text_config(decoder=True) for part in decoders if self._holds_attention(part)]
        configs += [module.config for module in self.modules]  # type: ignore[misc]
        self.configs = list({id(config): config for config in configs}.values())
        mine = set(map(id, self.configs))
        if any(id(config) in mine for seam in _SWITCHED_ON for config in seam.configs):
            raise ValueError(
                "another model with Focus on it shares this model's config object, and would lose its own attention: "
                "give each a config of its own, as `from_pretrained` and `copy.deepcopy(config)` do"
            )
        self.usual = "sdpa" if all(getattr(part, "_supports_sdpa", False) for part in decoders) else "eager"
        self.implementations: list[str | None] = []
        self.hooks: list[Any] = []

    def _holds_attention(self, part: nn.Module) -> bool:
        ours = set(map(id, self.modules))
        return any(id(module) in ours for module in part.modules())

    def attach(self, state: FocusState) -> None:
        for module, spec in zip(self.modules, self.specs, strict=True):
            module.focus = FocusLayer(spec)
            module.focus_state = state  # type: ignore[assignment]
            self.hooks.append(module.register_forward_pre_hook(route, with_kwargs=True))

    def remove(self) -> None:
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()
        for module in self.modules:
            del module.focus
            del module.focus_state

    def switch_on(self) -> None:
        """Make "focus" the attention implementation; remembers the model's own."""
        # A config may have come from a model with Focus on it, and say so.
        own = (config._attn_implementation for config in self.configs)
        self.implementations = [self.usual if name == FOCUS else name for name in own]
        for config in self.configs:
            config._attn_implementation_internal = FOCUS
        _SWITCHED_ON.add(self)
        for module in filter(falcon.is_attention, self.modules):
            falcon.put_on(module)

    def switch_off(self) -> None:
        _SWITCHED_ON.discard(self)
        for config, implementation in zip(self.configs, self.implementations, strict=True):
            config._attn_implementation_internal = implementation
        for module in filter(falcon.is_attention, self.modules):
            falcon.take_off(module)


def route(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Forward pre-hook of an attention module: route its input and pass the groups on."""
    state: FocusState = module.focus_state
    if not state.enabled:
        return None
    if module.config._attn_implementation != FOCUS:
        raise ValueError(
            f"the attention implementation was changed to {module.config._attn_implementation!r} under Focus: "
            "set it inside `disable_focus()`, or `unload()` first"
        )
    layer: FocusLayer = module.focus.itself()  # peft may have wrapped it
    spec = layer.spec
    given = {**dict(zip(spec.arguments, args, strict=False)), **kwargs}
    if given.get("output_attentions") or getattr(module.config, "output_attentions", False):
        raise ValueError(NO_ATTENTIONS)
    return args, {**kwargs, "focus_routing": _route(state, layer, spec, given)}


def _route(state: FocusState, layer: FocusLayer, spec: LayerSpec, given: dict[str, Any]) -> FocusCall:
    hidden: Tensor = given[spec.arguments[0]]
    if layer.router is None:
        return FocusCall()
    if state.observer is not None:
        return FocusCall(hidden=hidden)
    cache = next((given[name] for name in _CACHE_ARGUMENTS if given.get(name) is not None), None)
    token_mask = None
    if state.config.routing == "paper_leaky":
        if cache is not None and cache.get_seq_length(spec.layer_idx) > 0:
            raise ValueError(
                "`paper_leaky` routing looks at the whole sequence, so it cannot go on from a cache: "
                'pass `use_cache=False`, or use `routing="causal"`'
            )
        length = hidden.shape[1]
        token_mask = read_mask(given["attention_mask"], length, given["attention_mask"].shape[-1]).query_positions >= 0
    routing: Routing = layer(hidden, token_mask)
    if state.override is not None:
        routing = state.override(spec.layer_idx, routing)
    key_groups = routing.key_groups
    if cache is not None:
        tags = state.tags[state.active]
        key_groups = append_group_ids(cache, tags, spec.layer_idx, state.num_layers, key_groups)
    return FocusCall(routing, key_groups)


# A bias on the scores, or keys that the model has chosen itself: without them it would be another model.
_CHANGING = ("position_bias", "indices", "block_indices")


def focus_attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    focus_routing: FocusCall | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls. query [B, H, Tq, D], key and value [B, Hkv, Tk, D or Dv] ->
    [B, Tq, H, Dv]."""
    if focus_routing is None:
        raise ValueError(
            f'{type(module).__name__} runs with `attn_implementation="focus"` but without routers: '
            "put Focus on a model with `get_focus_model` rather than by setting its implementation. If another model "
            "has Focus on it and shares this one's config object, give each a config of its own"
        )
    if changing := [name for name in _CHANGING if unused.get(name) is not None]:
        raise ValueError(
            f"{type(module).__name__} gives its attention `{changing[0]}`, which changes what it computes and which "
            "Focus does not know: it cannot stand in for this model's attention"
        )
    if dropout:
        raise ValueError(
            f"attention dropout of {dropout} reached Focus, which does not support it: keep the base model in eval "
            "mode (FocusModel.train() does), or set the dropout of its config to 0"
        )
    if torch.is_autocast_enabled(query.device.type):
        # Rotary positions and norms leave queries and keys in fp32; autocast would cast PyTorch's own attention.
        half = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(half), key.to(half), value.to(half)
    state: FocusState = module.focus_state
    layer: FocusLayer = module.focus.itself()
    inputs = AttentionInputs(
        layer_idx=layer.spec.layer_idx,
        hidden=focus_routing.hidden,
        q=query,
        k=key,
        v=value,
        scale=scaling if scaling is not None else query.shape[-1] ** -0.5,
        softcap=softcap,
        tokens=read_mask(attention_mask, query.shape[2], key.shape[2]),
        sliding_window=sliding_window if sliding_window is not None else layer.spec.sliding_window,
        sink_logits=s_aux,
    )
    return attend(state, layer, focus_routing, inputs).transpose(1, 2).contiguous(), None


# As soon as this module is there, which a model that comes out of a file or another process brings with it.
AttentionInterface.register(FOCUS, focus_attention_forward)
AttentionMaskInterface.register(FOCUS, focus_mask)
