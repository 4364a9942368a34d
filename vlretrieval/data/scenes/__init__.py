"""The built-in data set, drawn from a seed. Reading order: vocabulary, layout, draw, query, truth, captions,
wording, english and chinese, negatives, writing, scene_split, source."""

from vlretrieval.data.scenes.scene_split import SceneSplit
from vlretrieval.data.scenes.source import Scenes

__all__ = ["SceneSplit", "Scenes"]
