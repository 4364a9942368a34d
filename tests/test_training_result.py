"""A run's result as figures, and as the number that a sweeper compares."""

import json
import pickle

import pytest

from vlretrieval.training.result import Result


def test_a_result_is_its_figures_and_as_a_number_the_monitored_one():
    result = Result({"step": 4, "val/rsum": 312.5}, "val/rsum")
    assert float(result) == 312.5 and json.loads(json.dumps(result)) == {"step": 4, "val/rsum": 312.5}
    again = pickle.loads(pickle.dumps(result))  # a launcher brings it from another process
    assert float(again) == 312.5 and again == result


def test_without_a_finite_figure_there_is_no_number():
    with pytest.raises(ValueError, match="val/rsum was never finite in this run"):
        float(Result({"val/rsum": None}, "val/rsum"))
