"""Second derivatives of what computes its own gradient are right or an error, where autograd would return zero."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from helpers.objective_cases import ONE, POSITIVES, VARIANTS, build, features, spec
from helpers.ranks import Ranks
from torch import Tensor

import clipx
from clipx.config.duration import Length
from clipx.distributed.batchnorm import _Sum
from clipx.distributed.spec import DistributedSpec
from clipx.model.varlen import varlen_attention
from clipx.objective.base import StepInputs

B = 6


def assert_a_second_derivative_raises(loss: Tensor, at: Tensor) -> None:
    """Differentiates a product with `at`, whose own second derivative is not zero, as in a penalty of the gradient."""
    with pytest.raises(RuntimeError, match="second derivative of the loss, which clipx's objectives do not have"):
        torch.autograd.grad(loss * at.square().sum(), at, create_graph=True)
    assert torch.autograd.grad(loss, at)[0].any()


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_second_derivative_of_an_objective_is_an_error(variant: str) -> None:
    module, (x, y) = build(variant, batch=B), features(B)
    module.before_step(0)
    loss, _ = module(StepInputs(x, y, torch.arange(B)))
    assert_a_second_derivative_raises(loss, x)


@pytest.mark.parametrize("variant", POSITIVES)
def test_a_second_derivative_of_a_loss_of_several_captions_is_an_error(variant: str) -> None:
    (k, options), (x, y) = POSITIVES[variant], features(B)
    module = build(variant.split()[0], *options, batch=B)
    digests = torch.arange(B * k).view(B, k) // 2
    loss, _ = module(StepInputs(x, y.repeat_interleave(k, 0), torch.arange(B), captions=digests))
    assert_a_second_derivative_raises(loss, x)


def test_a_second_derivative_of_distillation_is_an_error() -> None:
    module, (x, y) = spec("distillation").build(ONE, Length(30, B, 180)).to(torch.float64), features(B)
    taught = tuple(t.detach() for t in features(B, 9, seed=5))
    loss, _ = module(StepInputs(x, y, torch.arange(B), targets=taught))
    assert_a_second_derivative_raises(loss, x)


def test_a_second_derivative_of_packed_attention_is_an_error() -> None:
    qkv_T3HK = torch.randn(7, 3, 2, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    out_THK = varlen_attention(qkv_T3HK, torch.tensor([0, 3, 7], dtype=torch.int32), 4)
    (first,) = torch.autograd.grad(out_THK.square().sum(), qkv_T3HK, create_graph=True)
    with pytest.raises(RuntimeError, match="autograd"):
        torch.autograd.grad(first.square().sum(), qkv_T3HK)


def sum_derivatives() -> tuple[float, float]:
    """Returns both derivatives of L = 2 S² at S = 1 + 2, of the losses of both ranks together, on this rank."""
    comm = DistributedSpec(device="cpu").build()
    x = torch.tensor(1.0 + comm.rank, requires_grad=True)
    (first,) = torch.autograd.grad(_Sum.apply(x).square(), x, create_graph=True)
    (second,) = torch.autograd.grad(first, x)
    comm.close()
    return first.item(), second.item()


def test_a_second_derivative_through_the_sum_over_ranks_is_summed_over_ranks(two_ranks: Ranks) -> None:
    """dL/dx = 4 S, and the sum of both ranks' derivatives of it is 8 S' = 8."""
    assert two_ranks.call(sum_derivatives) == [(12.0, 8.0)] * 2


def test_these_tests_cover_each_autograd_function_of_clipx() -> None:
    found = set()
    for path in Path(clipx.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and any("autograd.Function" in ast.unparse(base) for base in node.bases):
                found.add(node.name)
    assert found == {"ScalarLoss", "_Sum"}
