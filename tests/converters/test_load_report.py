"""Long lists of names become short ones."""

import pytest

from jaxllm.converters.load_report import LoadReport, merge_numbers


@pytest.mark.parametrize(
    ("names", "merged"),
    [
        ([], []),
        (["norm", "h.3.a"], ["norm", "h.3.a"]),
        ([f"h.{i}.a" for i in (2, 0, 1)], ["h.{0..2}.a"]),
        ([f"h.{i}.a" for i in (0, 1, 5, 7, 8)], ["h.{0..1,5,7..8}.a"]),
        (["h.0.a", "h.0.b", "h.1.a"], ["h.{0..1}.a", "h.0.b"]),
        (
            [f"h.{i}.expert.{j}.up" for i in range(3) for j in range(16)] + ["norm"],
            ["h.{0..2}.expert.{0..15}.up", "norm"],
        ),
        ([f"h.4.expert.{j}.up" for j in range(3)], ["h.4.expert.{0..2}.up"]),
        (["h.0.x.1.a", "h.1.x.0.a"], ["h.0.x.1.a", "h.1.x.0.a"]),
    ],
)
def test_names_that_differ_in_a_number_are_merged(names: list[str], merged: list[str]) -> None:
    assert merge_numbers([(name, "[2]") for name in names]) == [(name, "[2]") for name in merged]


def test_unlike_details_stay_apart() -> None:
    entries = [("h.0.a", "[1]"), ("h.1.a", "[2]"), ("h.2.a", "[1]")]
    assert merge_numbers(entries) == [("h.{0,2}.a", "[1]"), ("h.1.a", "[2]")]


def test_an_empty_report_is_false() -> None:
    assert not LoadReport(hints=["a hint alone is no misfit"])
    assert LoadReport(unmapped=[("a", "[1]")])
