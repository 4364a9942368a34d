"""The built-in data set, drawn from a seed. Reading order: vocabulary, layout, draw, query, truth, captions,
english and chinese, negatives, source."""

from vlretrieval.data.scenes.source import Scenes, SceneSplit

__all__ = ["SceneSplit", "Scenes"]
