"""Compiled parts: where they are compiled, and that evaluation compiles nothing."""

import torch
from tiny_training import tiny_model
from torch import nn

from vlretrieval.training.compiled import as_written, compile_parts


def test_as_written_nothing_is_compiled():
    seen = []

    def backend(graph, inputs):
        seen.append(graph)
        return graph.forward

    layer, x = nn.Linear(3, 3), torch.randn(2, 3)
    layer.compile(backend=backend)
    with as_written():
        eager = layer(x)
    assert not seen
    assert torch.equal(layer(x), eager) and len(seen) == 1


def test_parts_are_compiled_in_place(monkeypatch):
    compiled = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, **how: compiled.append((self, how)))
    model = tiny_model()
    names = list(model.state_dict())
    compile_parts(model)
    heads = model.crossmodal
    assert [part for part, _ in compiled] == [
        model.image_encoder,
        model.text_encoder,
        heads.text_to_image,
        heads.image_to_text,
    ]
    assert dict(compiled)[model.text_encoder] == {"dynamic": True}
    assert list(model.state_dict()) == names
