"""Second derivative through the sum over two ranks, at S = 1 + 2: of L = 2 S², the losses of both ranks together."""

import torch
import torch.distributed as dist

from clipx.distributed.batchnorm import _Sum

dist.init_process_group("gloo")
x = torch.tensor(1.0 + dist.get_rank(), requires_grad=True)
(first,) = torch.autograd.grad(_Sum.apply(x).square(), x, create_graph=True)
(second,) = torch.autograd.grad(first, x)
assert first.item() == 12.0, first  # dL/dx = 4 S
assert second.item() == 8.0, second  # of the sum of both ranks' first derivatives, 8 S
dist.destroy_process_group()
