"""RetrievalModel: two encoders, a joint space with its scale, and cross-modal heads on top."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlretrieval.model.crossmodal import CrossModal
from vlretrieval.model.encoded import Encoded, Kept

MAX_LOGIT_SCALE = 100.0


class RetrievalModel(nn.Module):
    """A dual encoder that finds a shortlist, and cross-modal heads that re-rank it.

    Args:
        image_encoder, text_encoder: give pooled (B, dim), tokens (B, T, dim) and a mask; have a ``dim``, or for pooled
            vectors of another width a ``pooled_dim``.
        crossmodal: the cross-modal heads; None, or one with no heads, makes a plain dual encoder.
        embed_dim: width E of the joint space. Two pretrained towers that share one already (``aligned``) keep it: they
            need its width, and their projections start as the identity.
        init_logit_scale: what multiplies cosines at the start (CLIP: 1 / 0.07).
        init_logit_bias: added to scaled cosines by the sigmoid loss (SigLIP: -10); None leaves it out.
    """

    def __init__(
        self,
        image_encoder: nn.Module,
        text_encoder: nn.Module,
        crossmodal: CrossModal | None = None,
        *,
        embed_dim: int,
        init_logit_scale: float = 1 / 0.07,
        init_logit_bias: float | None = None,
    ):
        super().__init__()
        if not 0 < init_logit_scale <= MAX_LOGIT_SCALE:
            raise ValueError(f"init_logit_scale={init_logit_scale} is outside (0, {MAX_LOGIT_SCALE:g}]")
        self.image_encoder, self.text_encoder = image_encoder, text_encoder
        self.crossmodal = crossmodal if crossmodal else None
        if self.crossmodal is None:
            for encoder in (image_encoder, text_encoder):
                leave_out = getattr(encoder, "leave_out_tokens", None)
                if leave_out is not None:
                    leave_out()
        self.embed_dim = embed_dim
        widths = [int(getattr(e, "pooled_dim", e.dim)) for e in (image_encoder, text_encoder)]  # type: ignore[arg-type]
        self.image_projection, self.text_projection = (nn.Linear(width, embed_dim, bias=False) for width in widths)
        aligned = all(getattr(encoder, "aligned", False) for encoder in (image_encoder, text_encoder))
        if aligned and widths != [embed_dim, embed_dim]:
            raise ValueError(f"embed_dim={embed_dim}, but the towers share a space of {widths[0]}; set it to that")
        for projection in (self.image_projection, self.text_projection):
            if aligned:
                nn.init.eye_(projection.weight)
            else:
                nn.init.normal_(projection.weight, std=projection.in_features**-0.5)
        self.log_logit_scale = nn.Parameter(torch.tensor(math.log(init_logit_scale)))
        self.logit_bias = None if init_logit_bias is None else nn.Parameter(torch.tensor(float(init_logit_bias)))

    @property
    def logit_scale(self) -> Tensor:
        """Scalar float32 that multiplies cosines: exp of the learnt log, at most 100 (arXiv:2103.00020, sec. 2.5)."""
        return self.log_logit_scale.float().clamp(max=math.log(MAX_LOGIT_SCALE)).exp()

    def encode_image(self, pixels: Tensor) -> Encoded:
        """(B, 3, H, W) uint8 (or normalised float) pixels -> embedding (B, E), tokens (B, P, dim)."""
        return self.project_image(*self.image_encoder(pixels))

    def encode_text(self, token_ids: Tensor, token_mask: Tensor | None = None) -> Encoded:
        """(B, L) ids, (B, L) bool mask -> embedding (B, E), tokens (B, L, dim). Padding changes nothing."""
        return self.project_text(*self.text_encoder(token_ids, token_mask))

    def project_image(self, pooled: Tensor, tokens: Tensor, mask: Tensor | None = None) -> Encoded:
        """What the image encoder gave: pooled (B, dim) goes into the joint space."""
        return Encoded(_unit(self.image_projection(pooled)), tokens, mask)

    def project_text(self, pooled: Tensor, tokens: Tensor, mask: Tensor | None = None) -> Encoded:
        """As :meth:`project_image`, of the text encoder."""
        return Encoded(_unit(self.text_projection(pooled)), tokens, mask)

    def image_from(self, pooled: Tensor, tokens: Tensor, mask: Tensor | None = None) -> Encoded:
        """What a frozen image tower gave, whenever it did, through all that stands on the tower."""
        on = getattr(self.image_encoder, "on", None)
        return self.project_image(*(on(pooled, tokens, mask) if on else (pooled, tokens, mask)))

    def text_from(self, pooled: Tensor, tokens: Tensor, mask: Tensor | None = None) -> Encoded:
        """As :meth:`image_from`, of the text tower."""
        on = getattr(self.text_encoder, "on", None)
        return self.project_text(*(on(pooled, tokens, mask) if on else (pooled, tokens, mask)))

    @staticmethod
    def similarity(image: Encoded, text: Encoded) -> Tensor:
        """(N, M) float32 cosines of N pictures and M texts."""
        return image.embedding.float() @ text.embedding.float().T

    def match(self, image: Encoded, text: Encoded) -> Tensor:
        """(B,) float32 matching logits. C images, B texts: each image goes with its B / C consecutive texts."""
        return self.match_kept(self.keep_image(image), text)

    def keep_image(self, image: Encoded) -> Kept:
        """What re-ranking keeps of N gallery pictures: K/V projected once, for all captions they will meet."""
        return self._heads().keep_image(image)

    def match_kept(self, kept: Kept, text: Encoded) -> Tensor:
        """As :meth:`match`, for kept pictures."""
        return self._heads()(kept, text)

    def _heads(self) -> CrossModal:
        if self.crossmodal is None:
            raise ValueError(
                "this model is a plain dual encoder and cannot match; give it cross-modal heads (heads=cross)"
            )
        return self.crossmodal


def _unit(embedding: Tensor) -> Tensor:
    # float32: in bfloat16 thousands of gallery scores collide
    return F.normalize(embedding.float(), dim=-1)
