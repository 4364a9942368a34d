"""Fully sharded training (FSDP2): each process holds a piece of weights, gradients and moments; checkpoints are whole.

What is written has the names, shapes and order of a run on one process: any command opens it, and a run may go on from
it under another strategy.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from vlretrieval.model.crossmodal import CrossModalHead
from vlretrieval.model.retrieval_model import RetrievalModel
from vlretrieval.model.transformer import Block


def shard(model: RetrievalModel, mesh: DeviceMesh) -> None:
    """Shards a model in place over a one-dimensional mesh, block by block.

    The units are what is always called whole: encoder blocks, the encoders around them, projections, and each kind of
    cross-modal heads with the keys and values that it keeps. The scale and bias of the logits are scalars, which
    FSDP2 does not shard: each process has them, and their gradients are averaged here.
    """
    # views are returned here and there, and written to nowhere
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    for parameter in model.parameters():  # FSDP2 takes none in another memory format, as depthwise convolutions have
        parameter.data = parameter.data.contiguous()
    kinds = () if model.crossmodal is None else model.crossmodal.children()
    for part in (model.image_encoder, model.text_encoder, model.image_projection, model.text_projection, *kinds):
        if not isinstance(part, CrossModalHead):  # that one keeps K/V of its blocks' layers without calling the blocks
            for block in part.modules():
                if isinstance(block, Block) and block is not part:
                    fully_shard(block, mesh=mesh, reshard_after_forward=True)
        # True even where nothing is around: in validation no backward pass would come to let go of the whole weights
        fully_shard(part, mesh=mesh, reshard_after_forward=True)
        if isinstance(part, CrossModalHead):
            register_fsdp_forward_method(part, "keep")
        if hasattr(part, "on"):  # what stored features go through, in place of forward
            register_fsdp_forward_method(part, "on")
    group = mesh.get_group()
    for parameter in model.parameters():
        if parameter.requires_grad and not isinstance(parameter, DTensor):
            parameter.register_post_accumulate_grad_hook(lambda p: _average(p, group))


def _average(parameter: Tensor, group: dist.ProcessGroup) -> None:
    # gradients of earlier batches of an accumulation are averages already, and stay what they are
    assert parameter.grad is not None
    dist.all_reduce(parameter.grad, group=group)
    parameter.grad /= dist.get_world_size(group)


def whole(tensor: Tensor) -> Tensor:
    """The whole of a sharded tensor, on every process (all must ask); any other tensor as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def like(tensor: Tensor, own: Tensor) -> Tensor:
    """A whole tensor, the same on every process, sharded as ``own`` is; any other ``own`` leaves it as it is."""
    if not isinstance(own, DTensor) or isinstance(tensor, DTensor):
        return tensor
    return distribute_tensor(tensor.to(own.device), own.device_mesh, own.placements, src_data_rank=None)


def here(tensor: Tensor) -> Tensor:
    """This process's piece of a tensor, as a view; the tensor itself where it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def total_norm(tensors: Iterable[Tensor]) -> Tensor:
    """Euclidean norm of all tensors together, sharded or not; 0 of none. The same on every process."""
    tensors = list(tensors)
    plain = [t for t in tensors if not isinstance(t, DTensor)]
    sharded = [t for t in tensors if isinstance(t, DTensor)]
    norm = torch.nn.utils.get_total_norm(plain)
    return torch.hypot(norm, whole(torch.nn.utils.get_total_norm(sharded)).to(norm.device)) if sharded else norm


def clip_gradients(parameters: Iterable[Tensor], most: float, algorithm: str = "norm") -> None:
    """As :func:`torch.nn.utils.clip_grad_norm_` (or ``clip_grad_value_``), which takes no mixture of sharded and other
    gradients."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if algorithm == "value":
        for gradient in gradients:
            here(gradient).clamp_(-most, most)
        return
    factor = (most / (total_norm(gradients) + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        here(gradient).mul_(factor)


class Sharded(ModelParallelStrategy):
    """FSDP2 over all processes, with whole checkpoints through Lightning's CheckpointIO.

    Args:
        timeout: a lost or hanging process ends the others after so long.
    """

    def __init__(self, timeout: timedelta = timedelta(minutes=30)):
        if tuple(int(n) for n in torch.__version__.split(".")[:2]) < (2, 14):
            # the hooks that gather weights again for the backward pass saw no tensors inside dataclasses
            raise ValueError(
                f"fully sharded training needs torch 2.14 or newer, and this is {torch.__version__}; take trainer=ddp"
            )
        super().__init__(1, 1, save_distributed_checkpoint=False, timeout=timeout)

    def setup_environment(self) -> None:
        # left to itself, Lightning would split single tensors over the devices of a machine
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()

    @property
    def lightning_restore_optimizer(self) -> bool:
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Whole tensors on rank 0; nothing on the others, which take part in putting them together."""
        assert self.lightning_module is not None
        return self._kept(self.lightning_module.state_dict())

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """As ``optimizer.state_dict()`` on one process, on rank 0; without moments on the others."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer._optimizer
        state = optimizer.state_dict()
        return {**state, "state": {number: self._kept(entries) for number, entries in state["state"].items()}}

    def _kept(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Whole and on the CPU, one after another: no device holds more than one of them whole."""
        kept = {}
        for name, value in tensors.items():
            if isinstance(value, Tensor):
                value = whole(value.detach())
                value = value.cpu() if self.is_global_zero else None
            if self.is_global_zero:
                kept[name] = value
        return kept

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        return self.checkpoint_io.load_checkpoint(checkpoint_path, weights_only=weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        own = self.lightning_module.state_dict()
        weights = checkpoint["state_dict"].items()
        pieces = {name: like(value, own[name]) if name in own else value for name, value in weights}
        self.lightning_module.load_state_dict(pieces, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            pieces = {
                number: {
                    name: like(value, parameters[number]) if getattr(value, "ndim", 0) else value
                    for name, value in entries.items()
                }
                for number, entries in state["state"].items()
            }
            optimizer.load_state_dict({**state, "state": pieces})
