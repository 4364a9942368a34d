"""Cross-modal heads: one modality's tokens query the other's, and a matching logit says whether they belong together.

Text-to-image heads find the region that a word means, image-to-text heads the words that a region means; ``joint`` is
one stream over both (the ViLT way), for comparison. The first two attend to kept keys and values, so that re-ranking
projects a gallery picture once, however many captions it meets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vlretrieval.model.attention import KeyValue, MultiHeadAttention, full_precision
from vlretrieval.model.encoded import Encoded, Kept
from vlretrieval.model.positions import Positions
from vlretrieval.model.transformer import Block, Transformer, per_block, pool_tokens, width_of_heads


class CrossModalHead(nn.Module):
    """A stack of cross-attention blocks from one modality to the other, pooled to one matching logit a pair.

    Args:
        dim: width of the querying tokens.
        context_dim: width of the tokens that are queried.
        num_heads: cross-modal heads in each block, or one number a block (then with a ``head_dim``).
        depth: blocks. With ``pool="first"`` the last block computes the first token alone.
        num_kv_heads: key/value heads (None = MHA, 1 = MQA), which sets what is kept of a gallery item; or one a block.
        head_dim: width of a cross-modal head; None = dim / num_heads.
        self_heads: heads of the self-attention among the querying tokens in each block, or one number a block; 0
            leaves it out.
        self_head_dim: width of these; None = dim / self_heads.
        self_position: "rotary" turns that self-attention by the tokens' places in their sequence, "none" does not.
        mlp_ratio: of the blocks' MLPs.
        pool: "first" (class or start token) or "mean" over real querying tokens.
    """

    def __init__(
        self,
        dim: int,
        context_dim: int,
        num_heads: int | Sequence[int],
        depth: int,
        *,
        num_kv_heads: int | Sequence[int] | None = None,
        head_dim: int | None = None,
        self_heads: int | Sequence[int] = 0,
        self_head_dim: int | None = None,
        self_position: str = "none",
        mlp_ratio: float = 4.0,
        pool: str = "first",
        qk_norm: bool = False,
        dropout: float = 0.0,
        activation_checkpointing: bool = False,
    ):
        super().__init__()
        if depth < 1:
            raise ValueError(
                f"depth={depth}: a cross-modal head needs at least one block; set its head count to 0 to leave it out"
            )
        if pool not in ("first", "mean"):
            raise ValueError(f"pool={pool!r} is not known for cross-modal heads; choose first or mean")
        if self_position not in ("rotary", "none"):
            raise ValueError(f"self_position={self_position!r} is not known; choose rotary or none")
        self.pool, self.activation_checkpointing = pool, activation_checkpointing
        width_of_heads(dim, num_heads, head_dim)
        self.blocks = nn.ModuleList(
            Block(
                dim,
                among or 0,
                head_dim=self_head_dim,
                mlp_ratio=mlp_ratio,
                dropout=dropout,
                qk_norm=qk_norm,
                cross=MultiHeadAttention(
                    dim,
                    heads or 0,
                    num_kv_heads=shared,
                    head_dim=head_dim,
                    context_dim=context_dim,
                    qk_norm=qk_norm,
                ),
            )
            for heads, shared, among in zip(
                per_block(num_heads, depth, "num_heads"),
                per_block(num_kv_heads, depth, "num_kv_heads"),
                per_block(self_heads, depth, "self_heads"),
                strict=True,
            )
        )
        self.positions = Positions(
            self_position, dim, width_of_heads(dim, self_heads, self_head_dim, "self_heads"), (1,)
        )
        self.context_norm = nn.LayerNorm(context_dim)
        self.norm = nn.LayerNorm(dim)
        self.logit = nn.Linear(dim, 1)

    def keep(self, context: Tensor) -> tuple[KeyValue, ...]:
        """(C, Lc, context_dim) -> the keys and values of every block."""
        context = self.context_norm(context)
        crossings = (block.cross for block in self.blocks if isinstance(block, Block))
        return tuple(cross.project_context(context) for cross in crossings if cross is not None)

    def forward(
        self,
        queries: Tensor,
        query_mask: Tensor | None,
        context: tuple[KeyValue, ...],
        context_mask: Tensor | None = None,
    ) -> Tensor:
        """
        Args:
            queries: (B, L, dim) tokens, mask (B, L) bool or None.
            context: what :meth:`keep` gave for C contexts. Each serves B / C consecutive rows of ``queries``, or each
                of those meets C / B consecutive contexts.
            context_mask: (C, Lc) bool or None.

        Returns:
            (B,) or, if there are more contexts, (C,) float32 matching logits.
        """
        x = queries
        rotate = self.positions.rotate((x.shape[1],), x.device)
        for number, (block, kept) in enumerate(zip(self.blocks, context, strict=True)):
            last = number == len(self.blocks) - 1 and self.pool == "first"
            arguments: dict[str, Any] = dict(
                key_mask=query_mask,
                rotate=rotate,
                context=kept,
                context_mask=context_mask,
                first=1 if last else None,
            )
            if self.activation_checkpointing and self.training:
                x = checkpoint(block, x, use_reentrant=False, **arguments)
            else:
                x = block(x, **arguments)
            if query_mask is not None and len(query_mask) < len(x):
                query_mask = query_mask.repeat_interleave(len(x) // len(query_mask), dim=0)
        pooled = pool_tokens(x, None if self.pool == "first" else query_mask, self.pool)
        return _logit(self.logit, self.norm(pooled))


class JointHead(nn.Module):
    """One self-attention stream over text and patches with type embeddings (ViLT, arXiv:2102.03334), for comparison.

    It mixes both from its first block on, so nothing of a gallery item can be kept but its tokens.
    """

    def __init__(
        self,
        text_dim: int,
        image_dim: int,
        num_heads: int | Sequence[int],
        depth: int,
        *,
        dim: int | None = None,
        **block,
    ):
        super().__init__()
        dim = dim or text_dim
        self.from_text, self.from_image = nn.Linear(text_dim, dim), nn.Linear(image_dim, dim)
        self.type_embedding = nn.Parameter(torch.zeros(2, dim))
        nn.init.trunc_normal_(self.type_embedding, std=0.02)
        self.transformer = Transformer(dim, depth, num_heads, **block)
        self.logit = nn.Linear(dim, 1)

    def forward(self, image: Tensor, image_mask: Tensor | None, text: Tensor, text_mask: Tensor | None) -> Tensor:
        """(C, P, image_dim), (B, L, text_dim) and masks, B / C texts to a picture -> (B,) float32 matching logits."""
        texts = len(text) // len(image)
        words = self.from_text(text) + self.type_embedding[0]
        patches = self.from_image(image) + self.type_embedding[1]  # once a picture
        stream = torch.cat([words, patches.repeat_interleave(texts, dim=0)], dim=1)
        mask = torch.cat([_full(text, text_mask), _full(image, image_mask).repeat_interleave(texts, dim=0)], dim=1)
        return _logit(self.logit, self.transformer(stream, key_mask=mask)[:, 0])


def _logit(linear: nn.Linear, pooled: Tensor) -> Tensor:
    """(B, dim) -> (B,) float32 under autocast too: logits rank a shortlist, and in bfloat16 they would tie."""
    with full_precision(pooled.device):
        return F.linear(pooled.float(), linear.weight.float(), linear.bias.float()).squeeze(-1)


def _full(tokens: Tensor, mask: Tensor | None) -> Tensor:
    return torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device) if mask is None else mask


CROSSED = ("text_to_image", "image_to_text")  # kinds that one number for all cross-modal heads is about


def of_kind(value: Any, kind: str) -> Any:
    """What is set for one kind of heads: its own entry of a mapping, or one number for those of CROSSED."""
    if isinstance(value, Mapping):
        return value.get(kind)
    return value if kind in CROSSED else None


def check_kinds(name: str, value: Any, kinds: Sequence[str]) -> None:
    """Refuse a mapping with a kind that there is not."""
    unknown = [kind for kind in value if kind not in kinds] if isinstance(value, Mapping) else []
    if unknown:
        raise ValueError(f"{name} has no kind {unknown[0]!r}; the kinds are {', '.join(kinds)}")


class CrossModal(nn.Module):
    """The cross-modal heads of a model and their matching logit, the sum of the kinds present.

    Args:
        text_dim, image_dim: widths of the two token streams.
        text_to_image: heads with which text tokens query patches; 0 leaves them out.
        image_to_text: heads with which patches query text tokens; 0 leaves them out.
        joint: heads of a joint stream over both; 0 leaves it out.
        text_to_image_depth, image_to_text_depth, joint_depth: blocks of each. All head counts may be one a block.
        num_kv_heads: key/value heads of the first two kinds; None = MHA, 1 = MQA; or by kind, where they differ:
            ``{text_to_image: 1, image_to_text: 2}``.
        head_dim: width of a cross-modal head; None = token width / heads; or by kind, where they differ, those of
            ``joint`` and ``text_self`` among them.
        text_self_heads: heads of the self-attention among text tokens between text-to-image blocks; 0 leaves it out.
        text_self_position: "rotary" lets it know word order (which a relation between two things hangs on), or "none".
        mlp_ratio, qk_norm, dropout, activation_checkpointing: of all blocks.
    """

    def __init__(
        self,
        text_dim: int,
        image_dim: int,
        text_to_image: int | Sequence[int],
        image_to_text: int | Sequence[int],
        joint: int | Sequence[int] = 0,
        *,
        text_to_image_depth: int = 2,
        image_to_text_depth: int = 1,
        joint_depth: int = 2,
        num_kv_heads: int | Mapping[str, Any] | None = None,
        head_dim: int | Mapping[str, int] | None = None,
        text_self_heads: int | Sequence[int] = 0,
        text_self_position: str = "none",
        mlp_ratio: float = 4.0,
        qk_norm: bool = False,
        dropout: float = 0.0,
        activation_checkpointing: bool = False,
    ):
        super().__init__()
        shared: dict[str, Any] = dict(
            mlp_ratio=mlp_ratio, qk_norm=qk_norm, dropout=dropout, activation_checkpointing=activation_checkpointing
        )
        check_kinds("num_kv_heads", num_kv_heads, CROSSED)
        check_kinds("head_dim", head_dim, (*CROSSED, "joint", "text_self"))

        def crossed(kind: str) -> dict[str, Any]:
            return dict(num_kv_heads=of_kind(num_kv_heads, kind), head_dim=of_kind(head_dim, kind), **shared)

        self.text_to_image = (
            CrossModalHead(
                text_dim,
                image_dim,
                text_to_image,
                text_to_image_depth,
                self_heads=text_self_heads,
                self_head_dim=of_kind(head_dim, "text_self"),
                self_position=text_self_position,
                pool="first",
                **crossed("text_to_image"),
            )
            if text_to_image
            else None
        )
        # patches are averaged: one that no word explains is the evidence that something is left out
        self.image_to_text = (
            CrossModalHead(
                image_dim, text_dim, image_to_text, image_to_text_depth, pool="mean", **crossed("image_to_text")
            )
            if image_to_text
            else None
        )
        self.joint = (
            JointHead(text_dim, image_dim, joint, joint_depth, head_dim=of_kind(head_dim, "joint"), **shared)
            if joint
            else None
        )

    def __bool__(self) -> bool:
        """Whether any kind is present."""
        return any(kind is not None for kind in (self.text_to_image, self.image_to_text, self.joint))

    def keep_image(self, image: Encoded) -> Kept:
        """What serves every caption that N pictures will meet, projected once."""
        return Kept(
            self.text_to_image.keep(image.tokens) if self.text_to_image is not None else (),
            image.tokens if self.image_to_text is not None or self.joint is not None else None,
            image.mask,
        )

    def forward(self, image: Kept, text: Encoded) -> Tensor:
        """(C pictures, B texts), each picture with its B / C consecutive texts -> (B,) float32 matching logits.

        With more pictures than texts each text meets its C / B consecutive pictures, and (C,) logits come out: what the
        text alone decides (its first self-attention, its keys and values) is computed once, not once a picture.
        """
        if len(text) % len(image) and len(image) % len(text):
            raise ValueError(f"{len(text)} texts cannot be shared out evenly to {len(image)} pictures")
        logits = []
        if self.text_to_image is not None:
            logits.append(self.text_to_image(text.tokens, text.mask, image.text_to_image, image.mask))
        if self.image_to_text is not None and image.tokens is not None:
            kept_text = self.image_to_text.keep(text.tokens)
            logits.append(self.image_to_text(image.tokens, image.mask, kept_text, text.mask))
        if self.joint is not None and image.tokens is not None:
            if len(text) < len(image):  # one stream over both: nothing of a text is its own
                rows = torch.arange(len(text), device=text.tokens.device)
                text = text.index(rows.repeat_interleave(len(image) // len(text)))
            logits.append(self.joint(image.tokens, image.mask, text.tokens, text.mask))
        return torch.stack(logits).sum(0)
