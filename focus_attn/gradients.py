"""Gradients written by hand are those of first order."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """For the `backward` of an autograd Function. torch's own `once_differentiable` notices a second derivative only
    where the incoming gradient has one; a loss that is a plain sum would get a wrong one without a word."""
    once = once_differentiable(backward)

    @functools.wraps(backward)
    def checked(*args: Any) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # so it is with create_graph alone
            raise RuntimeError(
                "Focus has no second derivatives of its routers, attention and losses: leave `create_graph` out"
            )
        return once(*args)

    return checked
