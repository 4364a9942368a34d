"""Text towers of Hugging Face behind the encoders' contract."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from vlretrieval.model.encoders import Hidden
from vlretrieval.model.transformer import POOLS, pool_tokens


class HuggingFaceTower(nn.Module):
    """A text encoder of ``transformers``: BERT, RoBERTa, MiniLM, MPNet and the like.

    Args:
        pretrained: a folder with config.json and weights, or a hub id; None: random weights, of ``config``.
        config: the architecture, as in config.json; None: from ``pretrained``.
        vocab_size: of the tokenizer, which must not go beyond the embedding table.
        context_length: longest text in tokens.
        pool: "mean" over the tokens (sentence encoders), "first" or "last".

    Raises:
        ValueError: neither or no readable ``pretrained`` / ``config``, weights missing in it, too large a tokenizer.

    Attributes:
        dim, token_dim: width of pooled and of tokens.
    """

    aligned = False

    def __init__(
        self,
        pretrained: str | None = None,
        *,
        config: dict[str, Any] | None = None,
        vocab_size: int,
        context_length: int = 64,
        pool: str = "mean",
    ):
        super().__init__()
        if pool not in POOLS:
            raise ValueError(f"pool={pool!r} is not known; choose one of {', '.join(POOLS)}")
        if (pretrained is None) == (config is None):
            raise ValueError("give pretrained (a folder or hub id), or config (the architecture, for random weights)")
        self.model = _from_config(config) if config is not None else _from_weights(str(pretrained))
        if hasattr(self.model, "pooler"):  # trained for another task, and not used here
            self.model.pooler = None
        settings = self.model.config
        if vocab_size > settings.vocab_size:
            raise ValueError(
                f"vocab_size={vocab_size}, but the tower has {settings.vocab_size} words; take its own tokenizer "
                "(tokenizer=huggingface tokenizer.path=FOLDER)"
            )
        longest = getattr(settings, "max_position_embeddings", None)
        if longest is not None and context_length > longest:
            raise ValueError(f"context_length={context_length}, but the tower takes {longest} tokens at most")
        self.pool, self.context_length, self.vocab_size = pool, context_length, vocab_size
        self.dim = self.token_dim = int(settings.hidden_size)

    def forward(self, token_ids: Tensor, token_mask: Tensor | None = None) -> Hidden:
        """(B, L) ids and (B, L) bool, True on real tokens -> :class:`Hidden` with T = L."""
        attention_mask = None if token_mask is None else token_mask.long()
        tokens = self.model(input_ids=token_ids, attention_mask=attention_mask).last_hidden_state
        return Hidden(pool_tokens(tokens, token_mask, self.pool), tokens, token_mask)

    def stored(self) -> dict[str, Any]:
        """The arguments that build this tower without its files; a checkpoint brings the weights."""
        config = {k: v for k, v in self.model.config.to_dict().items() if _plain(v) and not k.startswith("_")}
        for key in ("auto_map", "dtype", "torch_dtype"):  # auto_map names code; no weights are stored in half precision
            config.pop(key, None)
        return {"pretrained": None, "config": config}


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise ValueError(
            "a Hugging Face text tower needs transformers: pip install 'vlretrieval[huggingface]'"
        ) from None
    return transformers


def _from_config(config: dict[str, Any]) -> Any:
    transformers, given = _transformers(), dict(config)
    kind = given.pop("model_type", None)
    if kind not in transformers.CONFIG_MAPPING:
        raise ValueError(f"config.model_type={kind!r} is no architecture that transformers knows")
    settings = transformers.CONFIG_MAPPING[kind](**given)
    return transformers.AutoModel.from_config(settings, trust_remote_code=False)


def _from_weights(path: str) -> Any:
    try:
        model, found = _transformers().AutoModel.from_pretrained(
            path, output_loading_info=True, trust_remote_code=False, dtype="float32"
        )
    except (OSError, ValueError, RuntimeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"pretrained={path}: transformers cannot read it: {reason}") from None
    missing = sorted(name for name in found["missing_keys"] if not name.startswith("pooler."))
    if missing:  # transformers fills them with random numbers
        raise ValueError(f"pretrained={path} lacks {len(missing)} weights of its architecture ({missing[0]}, ...)")
    return model.float()


def _plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(k, str | int) and _plain(v) for k, v in value.items())
    if isinstance(value, list | tuple):
        return all(map(_plain, value))
    return value is None or isinstance(value, bool | int | float | str)
