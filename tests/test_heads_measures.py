"""Measures of maps against hand-made maps whose answer is known, and the rule that names heads."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.tiny_heads import copy_head, heads_model, scene_inputs, scene_split
from vlretrieval.data.splits import Region, Split
from vlretrieval.data.tokenizers import BpeTokenizer, ClipTokenizer
from vlretrieval.data.transforms import EvalTransform
from vlretrieval.heads import measures
from vlretrieval.heads.diversity import OutputSums, clusters, copies, diversity, warnings, weight_likeness
from vlretrieval.heads.layers import layers_of
from vlretrieval.heads.passes import Shown, draw_captions, from_the_end, patch_distance, view_of
from vlretrieval.heads.places import locate, named_things, patches_of, seen_box, tokens_between, words_of
from vlretrieval.heads.roles import Rule
from vlretrieval.heads.statistics import Sums, head_statistics


def left_neighbour(length: int) -> torch.Tensor:
    """(L, L): each token looks at the one before it, the first at itself."""
    return torch.eye(length)[[0, *range(length - 1)]]


def all_real(batch: int, length: int) -> torch.Tensor:
    return torch.ones(batch, length, dtype=torch.bool)


def test_entropy_is_0_for_one_key_and_1_for_an_even_spread_over_the_real_ones() -> None:
    keys = torch.tensor([[True] * 4, [True, True, False, False]])
    even = keys / keys.sum(1, keepdim=True)
    weights = torch.stack([torch.eye(4).expand(2, 4, 4), even[:, None].expand(2, 4, 4)], dim=1)
    found = measures.entropy(weights, all_real(2, 4), keys)
    assert torch.allclose(found, torch.tensor([[0.0, 1.0], [0.0, 1.0]]), atol=1e-6)


def test_distance_and_neighbours_leave_out_what_has_no_place() -> None:
    distance = patch_distance(10, torch.device("cpu"))
    assert torch.isnan(distance[0]).all() and distance[1, 9] == pytest.approx(math.sqrt(8))
    corner = torch.zeros(1, 1, 10, 10)
    corner[..., 0], corner[..., 9] = 0.5, 0.5  # half on the class token, half on the last patch
    rows = all_real(1, 10)
    mean = distance[1:, 9].mean()
    assert measures.mean_distance(corner, rows, distance).item() == pytest.approx(mean.item())
    # of nine patches four are within a diagonal step of the corner, itself among them
    assert measures.share_near(corner, rows, distance, 1.5).item() == pytest.approx(0.5 * 4 / 9)


def test_a_query_that_looks_at_the_class_token_alone_has_no_distance() -> None:
    weights = torch.zeros(1, 1, 10, 10)
    weights[..., 0] = 1
    assert measures.mean_distance(weights, all_real(1, 10), patch_distance(10, torch.device("cpu"))).isnan().all()


def test_position_explains_a_fixed_map_wholly_and_a_wandering_one_not_at_all() -> None:
    generator = torch.Generator().manual_seed(0)
    fixed = left_neighbour(6).expand(400, 6, 6)
    wandering = torch.eye(6)[torch.randint(0, 6, (400, 6), generator=generator)]
    weights = torch.stack([fixed, wandering, torch.full((400, 6, 6), 1 / 6)], dim=1)
    entropies = measures.row_entropy(weights)
    found = measures.explained_by_position(
        weights.mean(0), torch.full((6,), 400.0), entropies.sum((0, 2)), torch.tensor(400 * 6 * math.log(6))
    )
    assert found[0] == pytest.approx(1.0) and found[1] < 0.02 and torch.isnan(found[2])


def test_the_parts_of_the_explained_share_add_up() -> None:
    """KL to even = KL to the mean map + KL of the mean map to even, by hand."""
    weights = torch.softmax(torch.randn(50, 1, 4, 5, generator=torch.Generator().manual_seed(3)) * 2, -1)
    mean = weights.mean(0)
    whole = torch.xlogy(weights, weights * 5).sum(-1).mean()
    of_mean = torch.xlogy(mean, mean * 5).sum(-1).mean()
    found = measures.explained_by_position(
        mean, torch.full((4,), 50.0), measures.row_entropy(weights).sum((0, 2)), torch.tensor(200 * math.log(5))
    )
    assert found.item() == pytest.approx((of_mean / whole).item(), abs=1e-5)


def test_one_key_that_everything_looks_at_is_the_largest_column() -> None:
    weights = torch.zeros(1, 2, 3, 3)
    weights[0, 0, :, 2] = 1
    weights[0, 1] = torch.eye(3)
    assert measures.largest_column(weights, all_real(1, 3))[0].tolist() == pytest.approx([1.0, 1 / 3])
    assert measures.largest_column(weights[:, :, :1], all_real(1, 1)).isnan().all()


def test_a_head_on_the_named_patches_grounds_1_and_points_and_a_flat_one_does_so_by_chance() -> None:
    inside = torch.tensor([[False, True, True, False]])
    maps = torch.tensor([[[0.0, 0.3, 0.7, 0.0], [0.25] * 4, [1.0, 0.0, 0.0, 0.0]]])
    allowed = torch.tensor([[False, True, True, True]])
    assert measures.mass_on(maps, inside)[0].tolist() == [1.0, 0.5, 0.0]
    assert measures.points_at(maps, inside, allowed)[0].tolist() == pytest.approx([1.0, 2 / 3, 2 / 3])


@given(st.lists(st.floats(0, 1), min_size=3, max_size=3), st.lists(st.floats(0, 1), min_size=3, max_size=3))
def test_js_is_symmetric_between_0_and_1_and_0_only_for_the_same(first: list[float], second: list[float]) -> None:
    p, q = (torch.tensor(values).double() + 1e-3 for values in (first, second))
    p, q = p / p.sum(), q / q.sum()
    found = measures.js_divergence(p, q)
    assert found == pytest.approx(measures.js_divergence(q, p)) and 0 <= found <= 1
    assert measures.js_divergence(p, p) == pytest.approx(0, abs=1e-9)
    assert found > 0 or torch.allclose(p, q, atol=1e-3)


def test_js_of_maps_without_anything_in_common_is_1_bit() -> None:
    assert measures.js_divergence(torch.tensor([1.0, 0]), torch.tensor([0, 1.0])) == pytest.approx(1)


# ------------------------------------------------------------------------------------------------------------- places


def test_a_box_inside_one_patch_is_that_patch_and_a_large_one_all_it_covers() -> None:
    grid = patches_of([(18, 2, 30, 14)], (3, 3), (48, 48)).reshape(3, 3)
    assert grid.tolist() == [[False, True, False], [False] * 3, [False] * 3]
    assert patches_of([(0, 0, 48, 33)], (3, 3), (48, 48)).reshape(3, 3).tolist() == [
        [True] * 3,
        [True] * 3,
        [False] * 3,
    ]
    # a thing on a corner of four patches has its quarter in each
    assert patches_of([(12, 12, 20, 20)], (3, 3), (48, 48)).sum() == 4
    assert not patches_of([], (3, 3), (48, 48)).any()


def test_boxes_move_with_the_transform() -> None:
    for mode, expected in (
        ("squash", (0, 0, 5, 10)),
        ("crop", (-5, 0, 5, 10)),
        ("pad", (0, 2.5, 5, 7.5)),
    ):
        box, side = seen_box((0, 0, 20, 20), (40, 20), EvalTransform(10, mode))  # type: ignore[arg-type]
        assert box == pytest.approx(expected) and side == 10


def test_scenes_say_exactly_which_patch_a_phrase_is_about() -> None:
    split = scene_split(30)
    inputs = scene_inputs(split)
    captions = np.arange(60)
    places = locate(split, captions.tolist(), inputs.tokenizer, inputs.transform, 40, (3, 3), 1)
    assert len(places) > 60
    row = 0
    for pair, caption in enumerate(captions.tolist()):
        text, scene = split.captions[caption], split.scenes[int(split.caption_image[caption])]
        for mention, things in zip(split.mentions(caption), named_things(split, caption), strict=True):
            cells = {scene[number].cell for number in mention.objects}  # the 3 x 3 patches are the scene's own cells
            assert places.pair[row] == pair
            assert set(np.flatnonzero(places.patches[row].numpy()[1:])) == cells
            shown = [text[a:b] for a, b in inputs.tokenizer.offsets(text)]
            said = "".join(word for word, on in zip(shown, places.tokens[row].tolist(), strict=False) if on)
            assert said.replace(" ", "") == text[things.start : things.end].replace(" ", "")
            row += 1
    assert row == len(places)


def test_a_label_that_stands_in_the_caption_names_its_regions() -> None:
    regions = (Region("dog", (0, 0, 5, 5)), Region("Dog", (5, 5, 9, 9)), Region("cat", (1, 1, 2, 2)))
    split = Split(
        "x",
        ["a"],
        ["A Dog and a dogged man"],
        [0],
        lambda index: None,
        regions=lambda index: regions,  # type: ignore
    )
    things = named_things(split, 0)
    assert [(t.start, t.end, t.boxes) for t in things] == [(2, 5, ((0, 0, 5, 5), (5, 5, 9, 9)))]


@pytest.mark.parametrize("text", ["A red circle, and a star.", "红色的圆在上面。", "Größe café  twice", "a🙂b"])
def test_offsets_give_each_token_its_letters(text: str) -> None:
    bpe = BpeTokenizer(vocab_size=300, context_length=64).fit(["a red circle and a star"])
    for tokenizer in (bpe, ClipTokenizer()):
        offsets = tokenizer.offsets(text)
        assert len(offsets) == len(tokenizer([text])[0])
        assert offsets[0] == (0, 0) and offsets[-1] == (len(text), len(text))
        covered = {at for start, end in offsets for at in range(start, end)}
        assert covered == {at for at, letter in enumerate(text) if not letter.isspace()}


def test_words_put_pieces_together_and_chinese_letters_stand_alone() -> None:
    bpe = BpeTokenizer(vocab_size=300, context_length=64).fit(["xyz"])
    text = "A red circle, 红圆"
    words = words_of(bpe.offsets(text), text)
    assert [word for word, _ in words] == ["[start]", "A", "red", "circle", ",", "红", "圆", "[end]"]
    assert sorted(n for _, numbers in words for n in numbers) == list(range(len(bpe.offsets(text))))
    assert tokens_between(bpe.offsets(text), 2, 5).sum() == 3


# -------------------------------------------------------------------------------------------------- heads set by hand


def statistics_of(kind: str, maps: torch.Tensor, count: int = 24, length: int | None = None) -> object:
    """The statistics of a layer of this kind that always has these maps (H, Lq, Lk), on drawn scenes."""
    inputs = scene_inputs()
    captions = draw_captions(inputs.split, count)
    layer = next(layer for layer in layers_of(heads_model()) if layer.kind == kind)
    sums = Sums(inputs, captions)
    ids, mask = inputs.token_rows(inputs.captions, captions)
    shown = Shown(captions, ids, mask, image_tokens=10)
    sums.begin(shown)
    sums.see(layer, maps.expand(count, *maps.shape) if maps.ndim == 3 else maps)
    return sums.layers[layer.name].statistics(layer, sums.words)


def text_length(count: int = 24) -> tuple[int, torch.Tensor]:
    inputs = scene_inputs()
    _, mask = inputs.token_rows(inputs.captions, draw_captions(inputs.split, count))
    return mask.shape[1], mask


def test_a_head_on_its_left_neighbour_is_local_and_others_are_what_they_are() -> None:
    length, mask = text_length()
    even = mask[:, None] / mask.sum(1)[:, None, None]
    local = left_neighbour(length).expand(24, length, length)
    first = torch.zeros(24, length, length)
    first[..., 0] = 1
    # a word looks at one word of its own drawing: content, not place
    generator = torch.Generator().manual_seed(5)
    drawn = torch.rand(24, length, length, generator=generator) * mask[:, None]
    semantic = torch.nn.functional.one_hot(drawn.argmax(-1), length).float()
    # the third word, whoever asks and whatever it is: half of the weight there, half on the fifth
    placed = torch.zeros(24, length, length)
    placed[:, :, 3], placed[:, :, 5] = 0.49, 0.51
    placed[:, 3:6] = even.expand(24, length, length)[:, 3:6]
    maps = torch.stack([local, even.expand(24, length, length), first, semantic], dim=1)
    layer = statistics_of("text", maps)
    roles = [Rule().role(layer, head) for head in range(4)]  # type: ignore[arg-type]
    assert roles == ["local", "global", "sink", "semantic"]
    # reaching two places to the left: not a neighbour, but wholly explained by position
    two_left = left_neighbour(length)[[0, *range(length - 1)]]
    layer = statistics_of("text", torch.stack([two_left] * 4))
    assert Rule().role(layer, 0) == "positional"  # type: ignore[arg-type]
    assert Rule(local=1.0, sink=1.0, spread=1.0).role(layer, 0) == "positional"  # type: ignore[arg-type]


def test_a_head_that_keeps_to_the_end_of_texts_of_any_length_is_positional_for_it() -> None:
    _, mask = text_length()
    maps = torch.zeros(24, 4, mask.shape[1], mask.shape[1])
    maps.scatter_(3, (mask.sum(1) - 3)[:, None, None, None].expand(24, 4, mask.shape[1], 1), 1.0)
    layer = statistics_of("text", maps)
    assert layer.of("position", 0) == pytest.approx(1.0)  # type: ignore[attr-defined]
    turned = from_the_end(maps, mask, True, True)
    assert (turned[:, :, :, 2].sum(-1) == mask.shape[1]).all()


def hand_set_cross(kind: str) -> object:
    """Head 1 looks at the named thing alone, head 2 evenly, head 3 at the class (or start) token."""
    inputs = scene_inputs()
    captions = draw_captions(inputs.split, 24)
    ids, mask = inputs.token_rows(inputs.captions, captions)
    length = ids.shape[1]
    places = locate(inputs.split, captions.tolist(), inputs.tokenizer, inputs.transform, length, (3, 3), 1)
    queries, keys = (length, 10) if kind == "text_to_image" else (10, length)
    layer = next(layer for layer in layers_of(heads_model()) if layer.kind == kind)
    maps = torch.zeros(24, layer.heads, queries, keys)
    real = torch.ones(24, 10) if kind == "text_to_image" else mask.float()
    maps[:, 1] = (real / real.sum(1, keepdim=True))[:, None]
    maps[:, 0, :, 0] = 1
    for pair, tokens, patches in zip(places.pair, places.tokens, places.patches, strict=True):
        asks, told = (tokens, patches) if kind == "text_to_image" else (patches, tokens)
        maps[pair, 0, asks] = (told / told.sum()).float()
    if layer.heads > 2:
        maps[:, 2, :, 0] = 1
        maps[:, 3, :, 0] = 1
    return statistics_of(kind, maps)


@pytest.mark.parametrize("kind", ["text_to_image", "image_to_text"])
def test_a_head_that_looks_at_the_named_object_grounds_1_and_is_aligning(kind: str) -> None:
    layer = hand_set_cross(kind)
    if kind == "text_to_image":
        assert layer.of("grounding", 0) == pytest.approx(1.0)  # type: ignore[attr-defined]
        assert layer.of("pointing", 0) == pytest.approx(1.0)  # type: ignore[attr-defined]
        assert layer.of("others", 0) == pytest.approx(0.0, abs=1e-6)  # type: ignore[attr-defined]
    else:  # a caption may name a patch twice over ("two stars"); a patch that has one name grounds 1
        assert layer.of("grounding", 0) > 0.95  # type: ignore[attr-defined]
    assert layer.of("grounding", 1) == pytest.approx(layer.chance["grounding"], rel=1e-5)  # type: ignore[attr-defined]
    assert layer.of("pointing", 1) == pytest.approx(layer.chance["pointing"], rel=1e-5)  # type: ignore[attr-defined]
    roles = [Rule().role(layer, head) for head in range(2)]  # type: ignore[arg-type]
    assert roles == ["aligning", "global"]
    assert layer.scope == "words"  # type: ignore[attr-defined]


def test_a_threshold_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="sink=1.5 must be a share"):
        Rule(sink=1.5)
    with pytest.raises(ValueError, match="factors of at least 1"):
        Rule(aligning=0.5)


def test_figures_over_batches_are_those_of_all_pairs_at_once() -> None:
    model, inputs = heads_model(), scene_inputs()
    captions = draw_captions(inputs.split, 20)
    one, many = (head_statistics(model, inputs, captions, batch_size=size) for size in (32, 3))
    assert list(one) == [layer.name for layer in layers_of(model)]
    for name, layer in one.items():
        for measure, figure in layer.figures.items():
            assert np.allclose(figure.mean, many[name].figures[measure].mean, atol=1e-4, equal_nan=True), measure
            assert np.allclose(figure.low, many[name].figures[measure].low, atol=1e-4, equal_nan=True), measure
        assert layer.words == many[name].words or all(
            abs(a[1] - b[1]) < 1e-4
            for x, y in zip(layer.words, many[name].words, strict=True)
            for a, b in zip(x, y, strict=True)
        )
    last = one["crossmodal.text_to_image.blocks.1.cross"]
    assert last.scope == "caption" and 0 < last.chance["grounding"] < 1
    assert one["image_encoder.transformer.blocks.0.attention"].chance["neighbours"] == pytest.approx(4.9 / 9, abs=0.1)


def test_an_untrained_models_heads_ground_by_chance_and_the_interval_covers_it() -> None:
    layer = head_statistics(heads_model(), scene_inputs(), np.arange(24))["crossmodal.text_to_image.blocks.0.cross"]
    for head in range(4):
        assert layer.of("grounding", head) < 3 * layer.chance["grounding"]
        low, high = layer.interval("grounding", head)
        assert low < layer.of("grounding", head) < high


def test_the_joint_stream_is_measured_too() -> None:
    model = heads_model(crossmodal__joint=2, crossmodal__joint_depth=1)
    found = head_statistics(model, scene_inputs(), np.arange(12))
    layer = found["crossmodal.joint.transformer.blocks.0.attention"]
    assert layer.scope == "words" and 0 < layer.of("grounding", 0) < 1 and layer.of("entropy", 0) > 0
    assert "joint" in {made.kind for made in found.values()}


# ----------------------------------------------------------------------------------------------------------- diversity


def test_a_copied_pair_of_heads_is_found_and_only_it() -> None:
    model, inputs = heads_model(), scene_inputs()
    layer = next(layer for layer in layers_of(model) if layer.name == "text_encoder.transformer.blocks.0.attention")
    copy_head(layer.module, 1, 3)
    found = diversity(model, inputs, np.arange(16))
    pair = found[layer.name]
    assert copies(pair) == [(1, 3)] and clusters(copies(pair), 4) == [[1, 3]]
    assert pair.maps[1, 3] == pytest.approx(0, abs=1e-6)
    assert pair.outputs[1, 3] == pytest.approx(1) and pair.weights[1, 3] == pytest.approx(1)
    lines = warnings(found.values())
    assert [line for line in lines if line.startswith("text, layer 1")] == lines[:1] or len(lines) >= 1
    said = next(line for line in lines if line.startswith("text, layer 1"))
    assert "heads 2 and 4 are near copies" in said and "head_seed=1" in said


def test_clusters_join_what_pairs_join() -> None:
    assert clusters([(0, 2), (2, 5), (1, 4)], 6) == [[0, 2, 5], [1, 4]]
    assert clusters([], 3) == []


def test_streamed_cka_is_that_of_all_rows_at_once() -> None:
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(50, 3, 4, generator=generator) + 2
    outputs[:, 2] = outputs[:, 0] @ torch.linalg.qr(torch.randn(4, 4, generator=generator))[0] * 3  # turned and scaled
    sums = OutputSums(3)
    for rows in outputs.split(7):
        sums.add(rows)
    found = sums.cka()

    def by_the_paper(x: torch.Tensor, y: torch.Tensor) -> float:
        x, y = (z - z.mean(0) for z in (x.double(), y.double()))
        return float((y.T @ x).norm() ** 2 / ((x.T @ x).norm() * (y.T @ y).norm()))

    for i in range(3):
        for j in range(3):
            assert found[i, j] == pytest.approx(by_the_paper(outputs[:, i], outputs[:, j]), abs=1e-8)
    assert found[0, 2] == pytest.approx(1) and found[0, 1] < 0.5


def test_likeness_of_weights_does_not_see_a_turn_of_a_heads_own_axes() -> None:
    layer = heads_model().text_encoder.transformer.blocks[0].attention
    before = weight_likeness(layer)
    turn = torch.linalg.qr(torch.randn(4, 4, generator=torch.Generator().manual_seed(2)))[0]
    with torch.no_grad():
        for start in (0, 16):  # queries and keys of head 1 alike
            rows = layer.qkv.weight[start : start + 4]
            rows.copy_(turn @ rows)
    assert torch.allclose(before, weight_likeness(layer), atol=1e-5)
    assert torch.allclose(before.diagonal(), torch.ones(4).double(), atol=1e-5)


def test_maps_of_a_view_are_never_padding() -> None:
    inputs = scene_inputs()
    ids, mask = inputs.token_rows(inputs.captions, np.arange(6))
    layer = next(layer for layer in layers_of(heads_model()) if layer.kind == "image_to_text")
    view = view_of(layer, torch.rand(6, 2, 10, ids.shape[1]), Shown(np.arange(6), ids, mask, 10))
    assert torch.equal(view.keys, mask) and view.rows.all() and view.distance is None
