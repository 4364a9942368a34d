"""A model whose graphs another runtime runs, behind the same contract as RetrievalModel: encode, keep, match.

So whatever works on a model (LoadedModel, evaluation, an index) works on an ONNX export as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vlretrieval.model.attention import KeyValue
from vlretrieval.model.encoded import Encoded, Kept

Run = Callable[[Sequence[Tensor]], list[Tensor]]  # inputs of a graph in order -> its outputs in order


class GraphModel(nn.Module):
    """The contract of :class:`RetrievalModel` over graphs. It computes on the CPU and cannot be trained.

    Args:
        graphs: "image", "text", and with cross-modal heads "scorer" and, where they keep K/V, "keep".
        interface: what ``interface_of`` wrote of the model: embed_dim, logit_scale, keeps_tokens, ...
    """

    def __init__(self, graphs: Mapping[str, Run], interface: dict[str, Any]):
        super().__init__()
        self._graphs, self._keeps_tokens = dict(graphs), bool(interface["keeps_tokens"])
        self.embed_dim = int(interface["embed_dim"])
        self.crossmodal = nn.Identity() if "scorer" in graphs else None  # there, for those who ask whether it is
        self.log_logit_scale = nn.Parameter(torch.tensor(math.log(interface["logit_scale"])), requires_grad=False)

    @property
    def logit_scale(self) -> Tensor:
        """Scalar float32 that multiplies cosines."""
        return self.log_logit_scale.float().exp()

    def encode_image(self, pixels: Tensor) -> Encoded:
        """(B, 3, S, S) uint8 -> embedding (B, E), tokens (B, P, dim)."""
        if pixels.dtype != torch.uint8:
            raise ValueError(f"pixels are {pixels.dtype}; an exported graph takes uint8 and normalises by itself")
        return Encoded(*self._run("image", pixels))

    def encode_text(self, token_ids: Tensor, token_mask: Tensor | None = None) -> Encoded:
        """(B, L) ids, (B, L) bool mask -> embedding (B, E), tokens (B, L, dim)."""
        mask = torch.ones_like(token_ids, dtype=torch.bool) if token_mask is None else token_mask
        embedding, tokens, *new_mask = self._run("text", token_ids, mask)
        return Encoded(embedding, tokens, new_mask[0] if new_mask else mask)

    def keep_image(self, image: Encoded) -> Kept:
        """What re-ranking keeps of N pictures."""
        self._check_heads()
        parts = self._run("keep", image.tokens) if "keep" in self._graphs else []
        pairs = zip(parts[::2], parts[1::2], strict=True)
        return Kept(tuple(KeyValue(*pair) for pair in pairs), image.tokens if self._keeps_tokens else None)

    def match_kept(self, kept: Kept, text: Encoded) -> Tensor:
        """(B,) matching logits: C pictures, B texts, each picture with its B / C consecutive texts.

        With more pictures than texts, each text meets C / B consecutive pictures, and C logits come out.
        """
        self._check_heads()
        texts, pictures = len(text), len(kept)
        if texts % pictures and pictures % texts:
            raise ValueError(f"{texts} texts cannot be shared out evenly to {pictures} pictures")
        parts = [part for kv in kept.text_to_image for part in (kv.key, kv.value)]
        parts += [] if kept.tokens is None else [kept.tokens]
        if texts > pictures:
            rows = torch.arange(pictures).repeat_interleave(texts // pictures)
            parts = [part.index_select(0, rows.to(part.device)) for part in parts]
        shortlists = [part.unflatten(0, (texts, -1)) for part in parts]
        mask = torch.ones(text.tokens.shape[:2], dtype=torch.bool) if text.mask is None else text.mask
        return self._run("scorer", text.tokens, mask, *shortlists)[0].flatten()

    def match(self, image: Encoded, text: Encoded) -> Tensor:
        """As :meth:`match_kept`, for pictures just encoded."""
        return self.match_kept(self.keep_image(image), text)

    @staticmethod
    def similarity(image: Encoded, text: Encoded) -> Tensor:
        """(N, M) float32 cosines."""
        return image.embedding.float() @ text.embedding.float().T

    def _run(self, name: str, *inputs: Tensor) -> list[Tensor]:
        return [output.to(inputs[0].device) for output in self._graphs[name]([i.cpu() for i in inputs])]

    def _check_heads(self) -> None:
        if self.crossmodal is None:
            raise ValueError("this export is a plain dual encoder and cannot match")


def interface_of(model: nn.Module) -> dict[str, Any]:
    """What a GraphModel has to know beside the graphs, as plain data for config.json."""
    heads: Any = model.crossmodal
    return {
        "embed_dim": model.embed_dim,
        "logit_scale": float(model.logit_scale.detach()),  # type: ignore[operator]
        "keeps_tokens": heads is not None and (heads.image_to_text is not None or heads.joint is not None),
    }


def onnx_graphs(folder: Path) -> dict[str, Run]:
    """Every .onnx of a folder in an onnxruntime session, with as many threads as torch uses."""
    from vlretrieval.deploy.export_onnx import check_installed

    check_installed(("onnxruntime",))
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    return {path.stem: _session(path, options) for path in sorted(folder.glob("*.onnx"))}


def _session(path: Path, options: Any) -> Run:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [given.name for given in session.get_inputs()]

    def run(inputs: Sequence[Tensor]) -> list[Tensor]:
        given = {name: tensor.numpy() for name, tensor in zip(names, inputs, strict=True)}
        return [torch.from_numpy(output) for output in session.run(None, given)]

    return run


def torch_graphs(folder: Path) -> dict[str, Run]:
    """Every .pt2 of a folder. Reading one can run code that lies in it: only for a folder whose maker is trusted."""
    return {path.stem: _program(path) for path in sorted(folder.glob("*.pt2"))}


def _program(path: Path) -> Run:
    module = torch.export.load(path).module()

    def run(inputs: Sequence[Tensor]) -> list[Tensor]:
        found = module(*inputs)
        return [found] if isinstance(found, Tensor) else list(found)

    return run
