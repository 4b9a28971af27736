"""Tokens and the groups they were sent to: what is said of the groups, and the page's browser, come from it."""

from __future__ import annotations

import base64
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from focus_attn.evaluation.groups import observe_routing
from focus_attn.training.balance import routed_layers

if TYPE_CHECKING:
    from focus_attn.model import FocusModel


BROKEN = "\ufffd"  # what a part of a character's bytes is decoded to
MOST_TOKENS_A_CHARACTER = 4  # UTF-8 has up to four bytes


@dataclass(frozen=True)
class SampledLayer:
    """Group ids of all N tokens of the sample, blocks one after the other."""

    query: np.ndarray  # [R, N, query_k]
    key: np.ndarray  # [R, N, key_k]
    dense_heads: tuple[int, ...] = ()  # routers whose groups say nothing


@dataclass(frozen=True)
class RoutingSample:
    length: int  # of a block
    num_groups: int
    pieces: list[str]  # [N] the text of each token
    layers: dict[int, SampledLayer]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; ids are small integers, compressed."""
        return {
            "length": self.length,
            "num_groups": self.num_groups,
            "pieces": self.pieces,
            "layers": {
                str(layer_idx): {
                    **{side: _pack(getattr(layer, side)) for side in ("query", "key")},
                    "dense_heads": list(layer.dense_heads),
                }
                for layer_idx, layer in self.layers.items()
            },
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> RoutingSample:
        layers = {
            int(index): SampledLayer(_unpack(one["query"]), _unpack(one["key"]), tuple(one.get("dense_heads", ())))
            for index, one in values["layers"].items()
        }
        return cls(values["length"], values["num_groups"], values["pieces"], layers)


def take_sample(model: FocusModel, tokenizer: PreTrainedTokenizerBase, blocks: Tensor) -> RoutingSample:
    """What the model as it is served decides on blocks [n, T]."""
    num_groups = model.focus_config.num_groups
    dense = {layer_idx: router.dense_heads for layer_idx, router in routed_layers(model)}
    layers = {
        layer_idx: SampledLayer(
            _joined(routing.query_groups, num_groups), _joined(routing.key_groups, num_groups), dense[layer_idx]
        )
        for layer_idx, routing in sorted(observe_routing(model, blocks).items())
    }
    return RoutingSample(blocks.shape[1], num_groups, token_pieces(tokenizer, blocks.flatten().tolist()), layers)


def token_pieces(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[str]:
    """The text of each token by itself, with the space that it begins with."""
    pieces = {}
    for token in set(ids):
        text = str(tokenizer.decode([token]))
        # SentencePiece marks the space and takes it off what it decodes first.
        marked = str(tokenizer.convert_ids_to_tokens(token)).startswith("▁")
        pieces[token] = f" {text}" if marked and not text.startswith(" ") else text
    return _joined_characters(tokenizer, ids, [pieces[token] for token in ids])


def _joined_characters(tokenizer: PreTrainedTokenizerBase, ids: list[int], pieces: list[str]) -> list[str]:
    """A character whose bytes stand in several tokens goes to the first of them, and the others are empty."""
    whole, start = list(pieces), 0
    while start < len(ids):
        stop = start + 1
        if BROKEN in pieces[start]:
            for end in range(start + 1, min(start + MOST_TOKENS_A_CHARACTER, len(ids)) + 1):
                text = str(tokenizer.decode(ids[start:end]))
                if BROKEN not in text:
                    whole[start:end] = [text, *[""] * (end - start - 1)]
                    stop = end
                    break
        start = stop
    return whole


def id_dtype(num_groups: int) -> np.dtype:
    return np.dtype("<u1" if num_groups <= 256 else "<u2")


def _joined(groups: Tensor, num_groups: int) -> np.ndarray:
    """[B, R, T, k] -> [R, B * T, k]."""
    return groups.transpose(0, 1).flatten(1, 2).numpy().astype(id_dtype(num_groups))


def _pack(ids: np.ndarray) -> dict[str, Any]:
    data = base64.b64encode(zlib.compress(ids.tobytes(), 9)).decode("ascii")
    return {"shape": list(ids.shape), "dtype": ids.dtype.str, "zlib_base64": data}


def _unpack(packed: dict[str, Any]) -> np.ndarray:
    data = zlib.decompress(base64.b64decode(packed["zlib_base64"]))
    return np.frombuffer(data, np.dtype(packed["dtype"])).reshape(packed["shape"])
