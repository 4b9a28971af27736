"""FocusModel: a pretrained causal LM with Focus on it. Attach, train, save, load, disable, unload."""

from __future__ import annotations

import copy
import inspect
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, pipelines
from transformers.utils import PushToHubMixin

from focus_attn.adapters import (
    Adapter,
    check_own_base,
    describe_base,
    digest_of_tensors,
    read_adapter,
    served_with,
    tensor_name,
    write_adapter,
)
from focus_attn.cache import IdsTag
from focus_attn.config import FocusConfig
from focus_attn.hf import (
    NO_ATTENTIONS,
    Seam,
    checkpoint_in_eval_mode,
    execution_device,
    is_checkpointed,
    text_config,
    warn_if_untested,
)
from focus_attn.layer import AttentionInputs, FocusLayer, FocusState, Probing, check_layers
from focus_attn.router import Routing
from focus_attn.stats import Stats
from focus_attn.tied import name_again, name_once

# `pipeline()` knows the wrappers of language models by the names of their classes, and complains of others.
getattr(pipelines.base, "SUPPORTED_PEFT_TASKS", {}).get("text-generation", []).append("FocusModel")


def get_focus_model(model: nn.Module, config: FocusConfig | None = None, adapter_name: str = "default") -> FocusModel:
    """Put Focus on a transformers causal LM: its weights are frozen, every routed layer gets a router.

    A peft model keeps its trainable adapters. `unload()` takes everything off again.
    """
    return FocusModel(model, config or FocusConfig(), adapter_name)


class FocusModel(nn.Module, PushToHubMixin):
    """A causal LM whose attention is Focus. Whatever is not found here is looked up on the base model."""

    def __init__(self, model: nn.Module, config: FocusConfig, adapter_name: str = "default") -> None:
        super().__init__()
        seam = Seam(model)  # refuses what Focus cannot serve, before anything is touched
        layers = text_config(model).num_hidden_layers
        _check_adapter(adapter_name, config, seam, layers)
        warn_if_untested(model)
        self.base_model = model
        self.register_state_dict_post_hook(name_once)
        self.register_load_state_dict_pre_hook(name_again)
        self._seam: Seam | None = seam
        self._state = FocusState(num_layers=layers)
        # peft has frozen what it wants frozen; the rest of its model is its own to train.
        is_peft = bool(getattr(model, "peft_config", None))
        self._base_was_training = model.training
        self._checkpoint_hooks: list[Any] = []
        self._frozen = {} if is_peft else {name: p for name, p in model.named_parameters() if p.requires_grad}
        for parameter in self._frozen.values():
            parameter.requires_grad_(False)
        seam.attach(self._state)
        seam.switch_on()
        try:
            self.add_adapter(adapter_name, config)
            self.set_adapter(adapter_name)
            self.train(False)
        except BaseException:  # out of memory, say: the base model must not stay half dressed
            self.unload()
            raise

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "base_model":  # not there yet, or a copy in the making
                raise
            return getattr(self.base_model, name)

    @property
    def generation_config(self) -> Any:
        """The base model's, which is the one that generates."""
        return self.base_model.generation_config

    @generation_config.setter
    def generation_config(self, settings: Any) -> None:
        self.base_model.generation_config = settings

    # Running

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """The base model's forward. Arguments that data can hold are named, for trainers read the signature."""
        self._refuse_attentions(kwargs.get("output_attentions"))
        tokens = input_ids if input_ids is not None else inputs_embeds
        if tokens is not None and past_key_values is None:
            self._hint(tokens.shape[1])
        named = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "past_key_values": past_key_values,
            "inputs_embeds": inputs_embeds,
            "labels": labels,
        }
        return self.base_model(**{name: value for name, value in named.items() if value is not None}, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        settings = kwargs.get("generation_config")
        self._refuse_attentions(kwargs.get("output_attentions", getattr(settings, "output_attentions", False)))
        return self.base_model.generate(*args, **kwargs)  # type: ignore[operator]

    def _refuse_attentions(self, output_attentions: bool | None) -> None:
        """Some models keep the argument from their attention modules, where Focus would meet it."""
        if output_attentions and self._seam is not None and self._state.enabled:
            raise ValueError(NO_ATTENTIONS)

    def _hint(self, length: int) -> None:
        """Say once what a user would otherwise find out late."""
        if self._seam is None or torch.compiler.is_compiling():
            return
        state = self._state
        if self.training and torch.is_grad_enabled() and not any(p.requires_grad for p in self._router_parameters()):
            state.say_once(
                "frozen",
                "every Focus router is frozen in this training forward. If `get_peft_model` froze them: call "
                '`model.unfreeze_routers()`, or give it `LoraConfig(modules_to_save=["focus"])`',
            )
        if state.enabled and length <= state.config.window + 1:
            state.say_once(
                "short",
                f"this input of {length} tokens does not reach beyond the window ({state.config.window}): Focus then "
                "computes plain attention. It starts to matter at several times the window",
            )

    @contextmanager
    def disable_focus(self) -> Iterator[None]:
        """Inside, the base model as it was, bit for bit."""
        seam, was_enabled = self._attached(), self._state.enabled
        if was_enabled:
            seam.switch_off()
            self._state.enabled = False
        try:
            yield
        finally:
            if was_enabled and self._seam is seam:  # it may have been unloaded meanwhile
                seam.switch_on()
                self._state.enabled = True

    @contextmanager
    def record_stats(self) -> Iterator[Stats]:
        """Count what the forwards inside do."""
        with self._set_for_now(recorder=Stats()):
            yield self._state.recorder  # type: ignore[misc]

    @contextmanager
    def observe_attention(
        self, callback: Callable[[AttentionInputs], None], outputs: Callable[[int, Tensor], None] | None = None
    ) -> Iterator[None]:
        """Inside, the model computes the base model's function, and `callback` sees each routed layer's inputs.
        `outputs` sees what comes of them: the layer's number, [B, H, T, Dv]."""
        with self._set_for_now(observer=callback, output_observer=outputs):
            yield

    @contextmanager
    def override_routing(self, choose: Callable[[int, Routing], Routing]) -> Iterator[None]:
        """Inside, `choose(layer_idx, routing)` says what is used instead of the router's answer."""
        with self._set_for_now(override=choose):
            yield

    @contextmanager
    def probe_attention(self, probe: Probing | None) -> Iterator[None]:
        """Inside, `probe` adds gradients to the attention of hard routing in training; what is computed stays."""
        with self._set_for_now(probe=probe):
            yield

    @contextmanager
    def _set_for_now(self, **changes: Any) -> Iterator[None]:
        self._attached()
        before = {name: getattr(self._state, name) for name in changes}
        vars(self._state).update(changes)
        try:
            yield
        finally:
            vars(self._state).update(before)

    # Training

    def train(self, mode: bool = True) -> FocusModel:
        """Routers and peft's layers go to `mode`; the base model stays in eval mode, for it is not what is trained."""
        self.training = mode
        self.base_model.eval()
        if self._seam is None:
            return self
        for layer in self._all_layers():
            layer.train(mode)
        for hook in self._checkpoint_hooks:
            hook.remove()
        self._checkpoint_hooks.clear()
        tuners = sys.modules.get("peft.tuners.tuners_utils")
        for module in self.base_model.modules():
            if tuners is not None and isinstance(module, tuners.BaseTunerLayer):
                module.train(mode)
            if mode and is_checkpointed(module):
                self._checkpoint_hooks += checkpoint_in_eval_mode(module)
        return self

    def gradient_checkpointing_enable(self, *args: Any, **kwargs: Any) -> None:
        self.base_model.gradient_checkpointing_enable(*args, **kwargs)  # type: ignore[operator]
        self.train(self.training)

    def unfreeze_routers(self) -> None:
        """Make the active adapter's routers trainable again, after `get_peft_model` froze them."""
        for parameter in self._router_parameters():
            parameter.requires_grad_(True)

    def get_nb_trainable_parameters(self) -> tuple[int, int]:
        """(trainable, all) numbers of parameters."""
        sizes = [(p.numel(), p.requires_grad) for p in self.parameters()]
        return sum(n for n, trainable in sizes if trainable), sum(n for n, _ in sizes)

    def print_trainable_parameters(self) -> None:
        trainable, total = self.get_nb_trainable_parameters()
        print(f"trainable params: {trainable:,} || all params: {total:,} || trainable%: {100 * trainable / total:.4f}")

    # Adapters

    @property
    def active_adapter(self) -> str:
        return self._state.active

    @property
    def focus_config(self) -> FocusConfig:
        """The active adapter's config."""
        return self._state.config

    @property
    def adapters(self) -> dict[str, FocusConfig]:
        """The configs of all adapters by name."""
        return dict(self._state.configs)

    def add_adapter(self, adapter_name: str, config: FocusConfig) -> None:
        """New routers beside the others; `set_adapter` makes them the ones that are used."""
        seam, state = self._attached(), self._state
        _check_adapter(adapter_name, config, seam, state.num_layers)
        if adapter_name in state.configs:
            raise ValueError(
                f"there is an adapter {adapter_name!r} already: `delete_adapter` it or choose another name"
            )
        tags: dict[int, IdsTag] = {}
        new = secrets.token_hex(8)
        for module, spec in zip(seam.modules, seam.specs, strict=True):
            if spec.is_routed(config, state.num_layers):
                router = spec.new_router(config, state.num_layers, execution_device(module)).requires_grad_(False)
                index, routers = spec.layer_idx, router.num_routers
                tags[index] = IdsTag(adapter_name, new, index, len(tags), routers, config.key_top_k)
                for layer in _layers_of(module):
                    layer.routers[adapter_name] = copy.deepcopy(router).train(layer.training)
        state.configs[adapter_name], state.tags[adapter_name] = config, tags

    def set_adapter(self, adapter_name: str) -> None:
        """Use this adapter; its routers are trainable, those of the others are not."""
        self._check_known(adapter_name)
        self._state.active = adapter_name
        for layer in self._all_layers():
            layer.active = adapter_name
            for name, router in layer.routers.by_name().items():
                router.requires_grad_(name == adapter_name)

    def delete_adapter(self, adapter_name: str) -> None:
        self._check_known(adapter_name)
        if adapter_name == self._state.active:
            raise ValueError(f"adapter {adapter_name!r} is the active one: `set_adapter` another before deleting it")
        for layer in self._all_layers():
            if adapter_name in layer.routers:
                del layer.routers[adapter_name]
        del self._state.configs[adapter_name], self._state.tags[adapter_name]

    def load_adapter(
        self,
        source: str | os.PathLike[str],
        adapter_name: str,
        changes: Mapping[str, Any] | None = None,
        **hub_options: Any,
    ) -> None:
        """Read an adapter beside those there are. A bad file changes nothing.

        source, changes: as in `from_pretrained`.
        """
        found = read_adapter(source, **hub_options)
        check_own_base(source, self.base_model)
        adapter = served_with(found, changes, describe_base(self.base_model), self._attached().specs)
        self.add_adapter(adapter_name, adapter.config)
        self._fill(adapter, adapter_name)

    def _fill(self, adapter: Adapter, adapter_name: str) -> None:
        """Routers that were read: a cache they have filled is known by what they are, in another process too."""
        self._copy_tensors(adapter, adapter_name)
        tags, routers = self._state.tags, digest_of_tensors(adapter)
        tags[adapter_name] = {index: tag._replace(routers=routers) for index, tag in tags[adapter_name].items()}

    def _copy_tensors(self, adapter: Adapter, adapter_name: str) -> None:
        for layer in self._all_layers():
            if adapter_name in layer.routers:
                for key, tensor in layer.routers[adapter_name].state_dict().items():
                    tensor.copy_(adapter.tensors[tensor_name(layer.spec.layer_idx, key)])

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        adapter_name: str | None = None,
        push_to_hub: bool = False,
        is_main_process: bool = True,
        state_dict: Mapping[str, Tensor] | None = None,
        **hub_options: Any,
    ) -> None:
        """Write the active (or the named) adapter: its routers and its config, nothing of the base model.

        is_main_process: of several processes one writes.
        state_dict: this model's, where it was gathered from several devices (`accelerator.get_state_dict(model)`).
        """
        name = self.active_adapter if adapter_name is None else adapter_name
        self._check_known(name)
        if unknown := sorted(hub_options.keys() - _SAVING_OPTIONS):
            raise TypeError(
                f"`save_pretrained` has no option {unknown[0]!r} (which adapter is saved, `adapter_name` says)"
            )
        if push_to_hub and name != self.active_adapter:
            raise ValueError(
                f"what is pushed is the active adapter {self.active_adapter!r}: `set_adapter({name!r})` first"
            )
        if hub_options.pop("safe_serialization", True) is False:
            raise ValueError("adapters are saved as safetensors alone: leave `safe_serialization` out")
        if push_to_hub and state_dict is not None:
            raise ValueError("what is pushed is saved once more, without `state_dict`: save it, and upload the folder")
        if not is_main_process:
            return
        tensors = self._router_tensors(name, state_dict)
        write_adapter(Adapter(self._state.configs[name], describe_base(self.base_model), tensors), save_directory)
        if push_to_hub:
            repository = hub_options.pop("repo_id", Path(save_directory).name)
            try:
                self.push_to_hub(repository, **hub_options)
            except Exception as error:  # one of many: offline, no access, no such owner
                raise RuntimeError(
                    f"the adapter is saved in {str(save_directory)!r}, but was not pushed to {repository!r}: {error}"
                ) from error

    def _router_tensors(self, adapter_name: str, state_dict: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
        """The adapter's tensors by their names in a file."""
        paths = {id(module): path for path, module in self.named_modules()}
        tensors = {}
        for layer in self.focus_layers():
            if adapter_name not in layer.routers:
                continue
            router = layer.routers[adapter_name]
            for key, tensor in router.state_dict().items():
                path = f"{paths[id(router)]}.{key}"
                if state_dict is not None and path not in state_dict:
                    raise ValueError(f"`state_dict` holds no {path!r}: give all of this model's, or leave it out")
                tensors[tensor_name(layer.spec.layer_idx, key)] = tensor if state_dict is None else state_dict[path]
        return tensors

    @classmethod
    def from_pretrained(
        cls,
        model: nn.Module,
        source: str | os.PathLike[str],
        adapter_name: str = "default",
        changes: Mapping[str, Any] | None = None,
        **hub_options: Any,
    ) -> FocusModel:
        """Put a saved adapter on a base model. With a bad file the base model stays untouched.

        source: a folder, the name of a shipped adapter ("k8") where no folder has it, or `owner/name` on the Hub.
        changes: fields of its config to serve it with instead, such as `window`, `num_sinks`, `dense_heads`, `backend`:
            the same routers, more pairs or fewer. A list takes the place of the adapter's own.
        """
        found = read_adapter(source, **hub_options)
        check_own_base(source, model)
        adapter = served_with(found, changes, describe_base(model), Seam(model).specs)
        focus = cls(model, adapter.config, adapter_name)
        focus._fill(adapter, adapter_name)
        return focus

    def unload(self) -> nn.Module:
        """Take Focus off and return the base model as it was. The FocusModel is then only a shell around it."""
        seam = self._attached()
        if self._state.enabled:
            seam.switch_off()
        for hook in self._checkpoint_hooks:
            hook.remove()
        seam.remove()
        now = dict(self.base_model.named_parameters())
        for name, parameter in self._frozen.items():
            parameter.requires_grad_(True)
            if name in now:  # another one by now, where embeddings were resized, say
                now[name].requires_grad_(True)
        self.base_model.train(self._base_was_training)
        self._seam = None
        return self.base_model

    def focus_layers(self) -> list[FocusLayer]:
        """What Focus has put on each attention layer, in order; `layer.router` is None where it is left alone."""
        return [module.focus.itself() for module in self._attached().modules]  # type: ignore[operator,union-attr]

    def _all_layers(self) -> list[FocusLayer]:
        return [layer for module in self._attached().modules for layer in _layers_of(module)]

    def _router_parameters(self) -> Iterator[nn.Parameter]:
        for layer in self.focus_layers():
            if layer.router is not None:
                yield from layer.router.parameters()

    def _attached(self) -> Seam:
        if self._seam is None:
            raise ValueError("Focus was unloaded from this model: put it on again with `get_focus_model`")
        return self._seam

    def _check_known(self, adapter_name: str) -> None:
        self._attached()
        if adapter_name not in self._state.configs:
            raise ValueError(f"no adapter {adapter_name!r}; there are {', '.join(map(repr, self._state.configs))}")


# What any model's `save_pretrained` may be handed, and what the Hub takes.
_SAVING_OPTIONS = {
    "safe_serialization",
    *inspect.signature(PreTrainedModel.save_pretrained).parameters,
    *inspect.signature(PushToHubMixin.push_to_hub).parameters,
}


def _layers_of(module: nn.Module) -> list[FocusLayer]:
    """The module's FocusLayer, and the copies that peft makes of a module to save."""
    return [part for part in module.focus.modules() if isinstance(part, FocusLayer)]  # type: ignore[operator,union-attr]


def _check_adapter(adapter_name: str, config: FocusConfig, seam: Seam, num_layers: int) -> None:
    if not isinstance(config, FocusConfig):
        raise TypeError(f"`config` must be a FocusConfig, got {type(config).__name__}")
    if not isinstance(adapter_name, str) or not adapter_name or "." in adapter_name:
        raise ValueError(f"an adapter name is a non-empty string without dots, got {adapter_name!r}")
    check_layers(config, seam.specs, num_layers)
