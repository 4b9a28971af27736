"""A router's projection and centroids as one weight, made once and kept while they do not change."""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

if TYPE_CHECKING:
    from focus_attn.router import Router


class Kept(NamedTuple):
    weight: Tensor  # [parts, sides * R * K, d]
    key: tuple[Any, ...]
    sources: tuple[Tensor, Tensor]  # as long as they are held, no other tensor can have their addresses


# Beside the routers rather than on them: copies, pickles and state dicts know nothing of it.
_kept: weakref.WeakKeyDictionary[Router, Kept] = weakref.WeakKeyDictionary()


def kept_weight(router: Router, projection: Tensor, centroids: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight for hidden states of this dtype, as `weight_parts` makes it. projection, centroids: the router's.

    A change shows in the tensors' addresses or versions, or is a step of an optimiser, as fused ones count none. Only
    one made through `.data` in place, or by the replay of a CUDA graph, would not show. On another stream the weight is
    made again, for nothing says when this one is done; a CUDA graph makes its own, which follows the parameters.
    """
    stream = 0
    if projection.is_cuda:
        if torch.cuda.is_current_stream_capturing():
            return weight_parts(router, dtype)
        stream = torch._C._cuda_getCurrentRawStream(projection.get_device())
    key = (projection.data_ptr(), projection._version, centroids.data_ptr(), centroids._version, dtype, stream)
    kept = _kept.get(router)
    if kept is None or kept.key != key:
        sources = projection.detach(), centroids.detach()
        kept = _kept[router] = Kept(weight_parts(router, dtype), key, sources)
    return kept.weight


register_optimizer_step_post_hook(lambda *_: _kept.clear())


def forget_weight(router: Router) -> None:
    """Before parameters change behind their versions' back, or leave the device."""
    _kept.pop(router, None)


@torch.no_grad()
def weight_parts(router: Router, dtype: torch.dtype) -> Tensor:
    """[parts, sides * R * K, d] whose sum is the combined weight: three in bf16 for bf16, else one in fp32."""
    with torch.autocast(device_type=router.projection.device.type, enabled=False):
        return split(router.combined_weight(), dtype)


def split(weight: Tensor, dtype: torch.dtype, count: int = 3) -> Tensor:
    """The same of a combined weight [sides, R, K, d]; of the bf16 parts the first `count`."""
    rest = weight.flatten(0, 2)
    if dtype != torch.bfloat16:
        return rest.contiguous()[None]
    parts = torch.empty(count, *rest.shape, dtype=dtype, device=rest.device)
    parts[0].copy_(rest)
    for last, part in itertools.pairwise(parts):
        rest = rest - last
        part.copy_(rest)
    return parts
