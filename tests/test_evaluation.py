"""evaluate(): the two stages, the hard negatives and the protocol, on a tiny model whose scores can be written out."""

import json

import numpy as np
import pytest
import torch

from tests.tiny_retrieval import TRANSFORM, FakeModel, tiny_split, tiny_tokenizer
from vlretrieval.evaluation.compare import load_run
from vlretrieval.evaluation.encode import encode_images, encode_texts, evaluating
from vlretrieval.evaluation.evaluate import Settings, choose_weight, evaluate, reranked
from vlretrieval.evaluation.hard_negatives import NegativePairs, accuracies
from vlretrieval.evaluation.inputs import Inputs
from vlretrieval.evaluation.matching import match_shortlists
from vlretrieval.evaluation.outcome import Gallery
from vlretrieval.evaluation.rerank import even_groups, score_pairs
from vlretrieval.evaluation.shortlist import shortlist
from vlretrieval.evaluation.table import print_figures
from vlretrieval.metrics import Fold, both_directions, rank_both


@pytest.fixture(scope="module")
def split():
    return tiny_split()


@pytest.fixture(scope="module")
def tokenizer(split):
    return tiny_tokenizer(split)


@pytest.fixture(scope="module")
def encoded(split, tokenizer):
    model, inputs = FakeModel(), Inputs(split, tokenizer, TRANSFORM)
    with evaluating(model) as device:
        images = encode_images(model, inputs, device, batch_size=7, tokens=True)
        texts = encode_texts(model, inputs, inputs.captions, device, batch_size=5, tokens=True)
    return model, inputs, images, texts


def all_pairs_one_by_one(model, inputs):
    """(M, N) matching logits, each pair encoded and scored alone."""
    split = inputs.split
    logits = np.empty((len(split.captions), len(split.image_ids)))
    with torch.inference_mode():
        for i in range(logits.shape[1]):
            image = model.encode_image(inputs.pixels(np.array([i])))
            for c in range(logits.shape[0]):
                text = model.encode_text(*inputs.token_rows(inputs.captions, np.array([c])))
                logits[c, i] = model.match(image, text)
    return logits


@pytest.fixture(scope="module")
def all_logits(encoded):
    return all_pairs_one_by_one(encoded[0], encoded[1])


def test_embeddings_and_tokens_come_back_in_the_order_of_the_split(encoded):
    model, inputs, images, texts = encoded
    with torch.inference_mode():
        for c in range(len(inputs.split.captions)):
            alone = model.encode_text(*inputs.token_rows(inputs.captions, np.array([c])))
            np.testing.assert_allclose(texts.embedding[c], alone.embedding[0].numpy(), atol=1e-6)
            row = texts.rows(np.array([c]))
            assert row.mask.all() and row.mask.shape[1] == len(inputs.captions[c])
            torch.testing.assert_close(row.tokens[0], alone.tokens[0, : row.mask.shape[1]])
        whole = model.encode_image(inputs.pixels(np.arange(len(inputs.split.image_ids))))
    np.testing.assert_allclose(images.embedding, whole.embedding.numpy(), atol=1e-6)


def test_texts_of_different_length_are_padded_with_masked_zeros(encoded):
    *_, texts = encoded
    rows = texts.rows(np.argsort(texts.length)[[0, -1]])
    assert not rows.mask[0].all() and rows.mask[1].all()
    assert (rows.tokens[0][~rows.mask[0]] == 0).all()


def test_re_ranking_everything_equals_scoring_every_pair(encoded, all_logits):
    model, inputs, images, texts = encoded
    split, logits = inputs.split, all_logits
    with evaluating(model) as device:
        lists = match_shortlists(model, Gallery(images, texts, split), 10_000, device)
    first = rank_both(texts.embedding, images.embedding, split.positives)
    t2i, i2t = reranked(first, lists, split.positives, 10.0, None)
    true = np.zeros(logits.shape, bool)
    true[tuple(split.positives.T)] = True
    for ranks, scores, good in ((t2i, logits, true), (i2t, logits.T, true.T)):
        best = np.where(good, scores, -np.inf).max(1)
        want = 1 + (~good & (scores > best[:, None] - 2e-5)).sum(1)  # ties against, within float32's noise
        assert ranks.rank().tolist() == want[ranks.query].tolist()
    assert (t2i.left_out, i2t.left_out) == (0, 6)


def test_top_k_zero_equals_stage_one(split, tokenizer):
    outcome = evaluate(FakeModel(), split, tokenizer, TRANSFORM, Settings(top_k=0, bootstrap=0))
    assert "reranked" not in outcome.figures and outcome.figures["protocol"]["rerank"]["done"] == "no: top_k is 0"
    without = evaluate(FakeModel(heads=False), split, tokenizer, TRANSFORM, Settings(top_k=9, bootstrap=0))
    assert without.figures["first_stage"] == outcome.figures["first_stage"]
    assert without.figures["protocol"]["rerank"]["done"] == "no: the model has no cross-modal heads"


@pytest.mark.parametrize("weight", [None, 0.0, 0.7])
@pytest.mark.parametrize("top_k", [1, 3, 8, 40])
def test_re_ranking_moves_the_shortlist_and_nothing_else(encoded, all_logits, top_k, weight):
    model, inputs, images, texts = encoded
    split, logits = inputs.split, all_logits
    cosine = texts.embedding.astype(np.float64) @ images.embedding.astype(np.float64).T
    with evaluating(model) as device:
        lists = match_shortlists(model, Gallery(images, texts, split), top_k, device)
    first = rank_both(texts.embedding, images.embedding, split.positives)
    ways = reranked(first, lists, split.positives, 10.0, weight)
    true = {tuple(pair) for pair in split.positives.tolist()}
    for ranks, scores, match, flip in ((ways[0], cosine, logits, False), (ways[1], cosine.T, logits.T, True)):
        for row, query in enumerate(ranks.query.tolist()):
            good = [((c, query) if flip else (query, c)) in true for c in range(scores.shape[1])]
            order = sorted(range(scores.shape[1]), key=lambda c: (-scores[query, c], good[c]))  # noqa: B023
            fused = match[query] if weight is None else 10.0 * scores[query] + weight * match[query]
            best = max((fused[c] for c in order[:top_k] if good[c]), default=np.inf)
            noise = 0 if weight == 0 else 2e-5
            head = sorted(order[:top_k], key=lambda c: (fused[c] < best - noise, good[c]))  # noqa: B023
            place = next(p for p, c in enumerate(head + order[top_k:]) if good[c])
            assert ranks.rank()[row] == place + 1
            if best == np.inf:  # no tie rule brings what is outside the shortlist into it
                assert ranks.rank("optimistic")[row] > min(top_k, scores.shape[1])


def test_weight_zero_changes_no_rank(encoded):
    model, inputs, images, texts = encoded
    first = rank_both(texts.embedding, images.embedding, inputs.split.positives)
    with evaluating(model) as device:
        lists = match_shortlists(model, Gallery(images, texts, inputs.split), 6, device)
    again = reranked(first, lists, inputs.split.positives, 10.0, 0.0)
    assert [r.rank().tolist() for r in again] == [r.rank().tolist() for r in first]


def test_a_shortlist_longer_than_the_gallery_is_the_gallery_and_said_so(split, tokenizer, capsys):
    outcome = evaluate(FakeModel(), split, tokenizer, TRANSFORM, Settings(top_k=10_000, bootstrap=20))
    used = outcome.figures["protocol"]["rerank"]
    assert used["top_k"] == {"t2i": len(split.image_ids), "i2t": len(split.captions)} and used["asked_top_k"] == 10_000
    print_figures(outcome.figures)
    said = capsys.readouterr().out
    assert "the first 23 (the whole gallery) are re-ranked" in said
    assert "6 images without captions are left out" in said


def test_k_beyond_the_gallery_is_stated(split, tokenizer):
    outcome = evaluate(FakeModel(), split, tokenizer, TRANSFORM, Settings(ks=(1, 30, 100), bootstrap=0))
    assert outcome.figures["protocol"]["k_beyond_gallery"] == {"t2i": [30, 100], "i2t": [100]}
    assert outcome.figures["first_stage"]["t2i"]["R@30"] == 100


def test_hard_negatives_are_scored_by_both_scores_and_equal_scores_count_against(split, tokenizer):
    outcome = evaluate(FakeModel(), split, tokenizer, TRANSFORM, Settings(bootstrap=50))
    found = outcome.figures["hard_negatives"]
    assert set(found) == {"other", "same", "all"}
    assert found["same"]["cosine"]["accuracy"] == 0 and found["same"]["match"]["accuracy"] == 0
    assert found["other"]["pairs"] == len(split.captions)
    assert found["all"]["match"]["accuracy"] == pytest.approx(found["other"]["match"]["accuracy"] / 2)
    difference = found["other"]["difference"]
    assert difference["points"] == pytest.approx(
        found["other"]["match"]["accuracy"] - found["other"]["cosine"]["accuracy"]
    )
    assert difference["interval"][0] <= difference["points"] <= difference["interval"][1]


def test_hard_negatives_by_a_loop_over_pairs(encoded):
    model, inputs, *_ = encoded
    split = inputs.split
    outcome = evaluate(model, split, inputs.tokenizer, TRANSFORM, Settings(bootstrap=0), inputs=inputs)
    right = {"cosine": 0, "match": 0}
    with torch.inference_mode():
        for text, kind, caption in zip(
            split.negatives.texts, split.negatives.kinds, split.negatives.caption, strict=True
        ):
            if kind != "other":
                continue
            image = model.encode_image(inputs.pixels(np.array([split.caption_image[caption]])))
            true = model.encode_text(*inputs.token_rows(inputs.captions, np.array([caption])))
            false = model.encode_text(*inputs.token_rows(inputs.tokens([text]), np.array([0])))
            right["cosine"] += float((image.embedding * (true.embedding - false.embedding)).sum()) > 0
            right["match"] += bool(model.match(image, true) > model.match(image, false))
    for name, count in right.items():
        assert outcome.figures["hard_negatives"]["other"][name]["accuracy"] == pytest.approx(
            100 * count / len(split.captions)
        )


def test_so_many_negatives_of_each_kind_are_drawn_by_the_seed(split, tokenizer):
    settings = Settings(bootstrap=0, negatives_per_kind=10)
    found = [evaluate(FakeModel(), split, tokenizer, TRANSFORM, settings).figures for _ in range(2)]
    assert found[0]["hard_negatives"]["other"]["pairs"] == 10 and found[0] == found[1]
    assert found[0]["protocol"]["hard_negatives_per_kind"] == 10


def test_truth_wider_than_own_pairs_is_used_and_own_pairs_stand_beside(tokenizer):
    pairs = np.array([(c, i) for c in range(0, 30, 3) for i in (1, 7, 20)])
    wide = tiny_split(positives=pairs)
    outcome = evaluate(FakeModel(), wide, tokenizer, TRANSFORM, Settings(top_k=5, bootstrap=0))
    figures = outcome.figures
    assert "beyond the own pairs" in figures["protocol"]["positives"]
    assert figures["first_stage"]["t2i"]["mean_rank"] < figures["by_image_id"]["first_stage"]["t2i"]["mean_rank"]
    own = evaluate(FakeModel(), tiny_split(), tokenizer, TRANSFORM, Settings(top_k=5, bootstrap=0)).figures
    assert own["first_stage"] == figures["by_image_id"]["first_stage"] and "by_image_id" not in own
    assert figures["protocol"]["split"]["hash"] != own["protocol"]["split"]["hash"]


def test_a_non_finite_embedding_ends_evaluation_naming_its_row(split, tokenizer):
    class Broken(FakeModel):
        def encode_image(self, pixels):
            encoded = super().encode_image(pixels)
            encoded.embedding[-1] = float("nan")
            return encoded

    with pytest.raises(ValueError, match="image embedding 15 of 23 is not finite"):
        evaluate(Broken(), split, tokenizer, TRANSFORM, Settings(batch_size=16))


def test_a_non_finite_logit_ends_evaluation_naming_the_pair(split, tokenizer):
    class Broken(FakeModel):
        def match_kept(self, kept, text):
            return super().match_kept(kept, text) * float("nan")

    with pytest.raises(ValueError, match=r"matching logit of image 0 with text \d+ is not finite"):
        evaluate(Broken(), split, tokenizer, TRANSFORM, Settings(top_k=3))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ks": (1, 5, 5)}, "each once"),
        ({"ks": (1.5,)}, "whole numbers"),
        ({"ks": (0,)}, "each 1 or more"),
        ({"top_k": -1}, "top_k=-1"),
        ({"bootstrap": -5}, "bootstrap=-5"),
    ],
)
def test_settings_that_mean_nothing_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        Settings(**given)


def test_the_model_comes_back_as_it_was_and_no_random_number_is_drawn(split, tokenizer):
    model = FakeModel().train()
    before = torch.get_rng_state()
    evaluate(model, split, tokenizer, TRANSFORM, Settings(top_k=3))
    assert model.training and torch.equal(before, torch.get_rng_state())


def test_flat_names_for_training_and_a_split_read_once(split, tokenizer, monkeypatch):
    settings, inputs = Settings(top_k=4, bootstrap=0), Inputs(split, tokenizer, TRANSFORM)
    figures = evaluate(FakeModel(), split, tokenizer, TRANSFORM, settings, inputs=inputs).scalars("val/")
    assert {"val/t2i/R@1", "val/i2t/R@10", "val/rsum", "val/reranked/rsum", "val/negatives/other/match"} <= set(figures)
    monkeypatch.setattr(split, "picture", lambda *a: pytest.fail("pictures are decoded once"))
    assert evaluate(FakeModel(), split, tokenizer, TRANSFORM, settings, inputs=inputs).scalars("val/") == figures


def test_training_autocast_does_not_reach_the_scores(split, tokenizer):
    settings = Settings(top_k=4, bootstrap=0)
    plain = evaluate(FakeModel(), split, tokenizer, TRANSFORM, settings).figures
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert evaluate(FakeModel(), split, tokenizer, TRANSFORM, settings).figures == plain


def test_metrics_json_holds_the_protocol_and_is_written_whole(split, tokenizer, tmp_path):
    outcome = evaluate(FakeModel(), split, tokenizer, TRANSFORM, Settings(top_k=5, bootstrap=20))
    written = json.loads(outcome.write(tmp_path).read_text())
    protocol = written["protocol"]
    assert protocol["split"] == {"name": "test", "hash": split.hash, "images": 23, "captions": 51, "notes": {}}
    assert protocol["captions_per_image"] == {"least": 0, "mean": pytest.approx(51 / 23), "most": 5}
    for key in (
        "ties",
        "directions",
        "dtype",
        "batch_size",
        "hard_negatives_hash",
        "captions_per_image",
        "scores",
        "precision",
        "preprocessing",
        "tokenizer_hash",
        "rerank",
        "world_size",
        "versions",
        "recall",
    ):
        assert protocol[key], key
    queries = np.load(tmp_path / "queries.npz")
    assert queries["reranked/t2i/above"].shape == (51,) and len(queries["first_stage/i2t/query"]) == 17
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.json", "queries.npz"]


def test_every_recall_and_interval_can_be_made_again_from_the_two_files(split, tokenizer, tmp_path):
    """Without a model or data: the ranks are in queries.npz, ks, draws and seed in metrics.json."""
    outcome = evaluate(FakeModel(), split, tokenizer, TRANSFORM, Settings(top_k=5, bootstrap=40, seed=3, ks=(1, 4)))
    outcome.write(tmp_path)
    run = load_run(tmp_path)
    protocol = run.figures["protocol"]
    drawn = protocol["intervals"]
    for stage in run.stages:
        ways = (run.ranks(stage, way) for way in ("t2i", "i2t"))
        fold = Fold(*ways, run.queries["caption_image"])
        again = both_directions([fold], protocol["ks"], replicates=drawn["replicates"], seed=drawn["seed"])
        again["i2t"]["left_out"] = protocol["images_without_captions"]
        assert again == run.figures[stage]
    pairs = NegativePairs(
        run.queries["negatives/kind"],
        run.queries["negatives/image"],
        {name: run.queries[f"negatives/{name}"] for name in ("cosine", "match")},
    )
    assert accuracies(pairs, replicates=drawn["replicates"], seed=drawn["seed"]) == run.figures["hard_negatives"]


@pytest.mark.parametrize("block", [8, 64, 1024])
@pytest.mark.parametrize("top_k", [1, 5, 33, 90, 500])
def test_a_shortlist_is_the_head_of_the_sorted_list_with_ties_against(top_k, block):
    rng = np.random.default_rng(top_k)
    queries = rng.integers(-1, 2, (40, 3)).astype(np.float32)
    gallery = rng.integers(-1, 2, (90, 3)).astype(np.float32)
    positives = np.unique(np.stack([rng.integers(0, 40, 60), rng.integers(0, 90, 60)], 1), axis=0)
    candidates, scores = shortlist(queries, gallery, top_k, positives, block)
    true = set(map(tuple, positives.tolist()))
    for q, row in enumerate((queries @ gallery.T).tolist()):
        order = sorted(range(90), key=lambda c: (-row[c], (q, c) in true, c))[:top_k]  # noqa: B023
        assert candidates[q].tolist() == order
        assert scores[q].tolist() == [row[c] for c in order]


@pytest.mark.parametrize("top_k", [1, 4, 37])
def test_no_shortlist_depends_on_the_block_or_on_the_order_of_the_queries(top_k):
    """Every picture twice: which twin is last in a list by float32 products is the luck of the block."""
    rng = np.random.default_rng(0)
    one = rng.standard_normal((301, 48)).astype(np.float32)
    gallery = np.concatenate([one, one])
    queries = (one + 0.5 * rng.standard_normal(one.shape)).astype(np.float32)
    positives = np.stack([np.arange(301)] * 2, axis=1)
    candidates, scores = shortlist(queries, gallery, top_k, positives)
    exact = queries.astype(np.float64) @ gallery.astype(np.float64).T
    for q in range(0, 301, 10):
        slow = np.lexsort((np.arange(602), np.arange(602) == q, -exact[q].round(9)))
        assert candidates[q].tolist() == slow[:top_k].tolist()
    order = rng.permutation(301)
    turned = np.stack([np.arange(301), order], axis=1)
    for block in (8, 9, 97, 300, 602):
        found = shortlist(queries, gallery, top_k, positives, block)
        assert np.array_equal(found[0], candidates) and np.array_equal(found[1], scores)
        moved = shortlist(queries[order], gallery, top_k, turned, block)
        assert np.array_equal(moved[0], candidates[order]) and np.array_equal(moved[1], scores[order])


def test_a_collapsed_model_s_shortlists_are_wrong_ones_and_streamed():
    same = np.ones((90, 4), np.float32)
    positives = np.stack([np.arange(90)] * 2, axis=1)
    candidates, _ = shortlist(same, same, 5, positives, block=16)
    assert candidates[50].tolist() == [0, 1, 2, 3, 4] and candidates[2].tolist() == [0, 1, 3, 4, 5]


def test_pairs_are_scored_in_few_batches_where_each_picture_serves_many_texts():
    rng = np.random.default_rng(0)
    picture = np.sort(rng.integers(0, 30, 2000))
    lengths = rng.integers(5, 20, 2000)
    groups = list(even_groups(picture, lengths))
    assert sorted(np.concatenate([pairs for _, pairs in groups]).tolist()) == list(range(2000))
    for which, pairs in groups:
        assert (picture[pairs] == np.repeat(which, len(pairs) // len(which))).all()
    assert len(groups) <= 12, "few batches"
    assert sum(len(which) for which, _ in groups) < 2000 / 12, "K/V rows gathered far less often than pairs"


def test_no_pairs_give_no_logits(encoded):
    model, _, images, texts = encoded
    none = np.empty(0, dtype=np.int64)
    with evaluating(model) as device:
        assert score_pairs(model, images, texts, none, none, device).shape == (0,)


def test_the_fusion_weight_is_the_one_with_the_best_rsum_on_the_split_it_is_chosen_on(encoded):
    model, inputs, *_ = encoded
    split = inputs.split
    chosen = choose_weight(model, split, inputs.tokenizer, TRANSFORM, 8, inputs=inputs, grid=(None, 0.0, 0.5, 3.0))

    def rsum(weight):
        settings = Settings(top_k=8, weight=weight, bootstrap=0, hard_negatives=False)
        outcome = evaluate(model, split, inputs.tokenizer, TRANSFORM, settings, inputs=inputs)
        return outcome.figures["reranked"]["rsum"]

    assert rsum(chosen) == max(rsum(weight) for weight in (None, 0.0, 0.5, 3.0))
