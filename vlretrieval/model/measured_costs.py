"""What a built model costs, by running a pair through it: for pretrained towers, of which a config says little."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from vlretrieval.model.costs import FLOAT32, Cost
from vlretrieval.model.modes import modes_kept
from vlretrieval.model.retrieval_model import RetrievalModel


def measured_costs(model: RetrievalModel, image_size: int, text_length: int) -> dict[str, Cost]:
    """The cost of each part, by name, as :func:`vlretrieval.model.costs.costs` counts them.

    Args:
        model: on any device but "meta"; comes back in the mode it was in.
        image_size: side of the picture in pixels.
        text_length: tokens of the caption.
    """
    device = model.log_logit_scale.device
    pixels = torch.zeros(1, 3, image_size, image_size, dtype=torch.uint8, device=device)
    token_ids = torch.ones(1, text_length, dtype=torch.long, device=device)
    mask = torch.ones_like(token_ids, dtype=torch.bool)
    with modes_kept(model):
        text_cost, text = _of(model, model.text_encoder, lambda: model.text_encoder(token_ids, mask))
        image_cost, image = _of(model, model.image_encoder, lambda: model.image_encoder(pixels))
        projections = nn.ModuleList([model.image_projection, model.text_projection])
        both: Callable[[], Any] = lambda: (model.project_image(*image), model.project_text(*text))  # noqa: E731
        projection_cost, (image, text) = _of(model, projections, both, (*image, *text))
        scale = Cost(parameters=1 + (model.logit_bias is not None))
        parts = {"text encoder": text_cost, "image encoder": image_cost, "projections": projection_cost + scale}
        if model.crossmodal is not None:
            own = (image.tokens, text.tokens, text.mask)
            heads, _ = _of(model, model.crossmodal, lambda: model.match(image, text), own)
            keeping, kept = _of(model, model.crossmodal, lambda: model.keep_image(image), own)
            parts["cross-modal heads"] = Cost(
                heads.parameters, heads.flops, keeping.flops, heads.activations, kept.nbytes // FLOAT32
            )
        return parts


def _of(
    model: nn.Module, part: nn.Module, run: Callable[[], Any], given: Iterable[Tensor | None] = ()
) -> tuple[Cost, Any]:
    """The cost of ``run``, and what it gives in evaluation; what it is ``given`` is no activation of its own."""
    inputs = [t for t in given if t is not None]
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers(), *inputs)}
    kept: dict[int, int] = {}

    def remember(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        held.append(tensor)  # or its memory is given to the next one
        return tensor

    held: list[Tensor] = []
    model.train()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()  # one picture gives no variance, and its statistics are not to be counted in
    with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
        shown = run()
    del shown
    model.eval()
    # the fused kernels of a CPU are not counted; written out, attention is two products
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        shown = run()
    parameters = sum(p.numel() for p in part.parameters())
    return Cost(parameters, counter.get_total_flops(), activations=sum(kept.values()) // FLOAT32), shown
