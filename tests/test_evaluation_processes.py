"""1, 2 and 3 processes: the same figures to the last digit, though neither pictures nor captions divide."""

import multiprocessing
import os
from datetime import timedelta

import numpy as np
import pytest
import torch.distributed as dist

from tests.tiny_retrieval import TRANSFORM, FakeModel, tiny_split, tiny_tokenizer
from vlretrieval.evaluation.embed import embed
from vlretrieval.evaluation.evaluate import Settings, evaluate
from vlretrieval.evaluation.inputs import Inputs
from vlretrieval.evaluation.sharing import Processes


class NamedModel(FakeModel):
    embed_dim = 12


def run_rank(rank, count, folder, results, images):
    """One process of the group; its figures go into the queue."""
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=count, timeout=timedelta(seconds=120)
    )
    split = tiny_split(images=images, captions=(5, 1, 0, 3))
    tokenizer = tiny_tokenizer(split)
    settings = Settings(top_k=5, bootstrap=50, batch_size=4, further=True)
    processes = Processes.all()
    figures = evaluate(NamedModel(), split, tokenizer, TRANSFORM, settings, processes=processes).figures
    embed(NamedModel(), Inputs(split, tokenizer, TRANSFORM), f"{folder}/embeddings", batch_size=4, processes=processes)
    results.put((rank, figures))
    dist.destroy_process_group()


def figures_of(count, folder, images=23):
    folder.mkdir()
    context = multiprocessing.get_context("fork")  # torch is imported already; one thread, so a fork is safe
    results = context.Queue()
    ranks = [context.Process(target=run_rank, args=(rank, count, folder, results, images)) for rank in range(count)]
    for process in ranks:
        process.start()
    found = dict(results.get(timeout=180) for _ in ranks)
    for process in ranks:
        process.join(timeout=60)
        assert process.exitcode == 0
    return [found[rank] for rank in range(count)]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_one_two_and_three_processes_give_identical_figures(tmp_path):
    one = figures_of(1, tmp_path / "1")[0]
    assert one["protocol"].pop("world_size") == 1
    for count in (2, 3):
        for figures in figures_of(count, tmp_path / str(count)):
            assert figures["protocol"].pop("world_size") == count
            assert figures == one, "every rank has the same figures, to the last digit"
        for name in ("image_embeddings", "text_embeddings"):
            stored = [np.load(tmp_path / str(n) / "embeddings" / f"{name}.npy") for n in (1, count)]
            assert np.array_equal(*stored)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_more_processes_than_pictures_give_the_same_figures(tmp_path):
    one = figures_of(1, tmp_path / "1", images=2)[0]
    one["protocol"]["world_size"] = 3
    assert figures_of(3, tmp_path / "3", images=2) == [one] * 3


def test_a_validation_on_one_rank_alone_waits_for_nobody(tmp_path):
    """Training validates on rank 0 while the others wait: no collective may be met unless processes are given."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        split = tiny_split()
        settings = Settings(top_k=3, bootstrap=0)
        before = dist.all_gather_object
        dist.all_gather_object = lambda *a, **k: pytest.fail("a collective")
        try:
            evaluate(FakeModel(), split, tiny_tokenizer(split), TRANSFORM, settings)
        finally:
            dist.all_gather_object = before
    finally:
        dist.destroy_process_group()
