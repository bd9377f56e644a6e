"""The list of mutations fits the package as it is."""

from __future__ import annotations

import ast
from dataclasses import replace

import pytest
from mutate import ROOT, Mutation, chosen, read_mutations

MUTATIONS = read_mutations()


def test_all_can_be_made_and_leave_python() -> None:
    problems = []
    for mutation in MUTATIONS:
        try:
            ast.parse(mutation.applied())
        except (ValueError, SyntaxError) as error:
            problems.append(f"{mutation.group}.yaml, {mutation.title}: {error}")
    assert problems == []


def test_each_has_a_title_of_its_own_and_tests() -> None:
    assert len({mutation.title for mutation in MUTATIONS}) == len(MUTATIONS) >= 150
    assert all(mutation.tests for mutation in MUTATIONS)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"old": "no such text"}, "0 times"),
        ({"old": "\n"}, "times"),
        ({"file": "no/such/file.py"}, "0 times"),
        ({"new": MUTATIONS[0].old}, "once"),
        ({"tests": ("unit/no_such_test.py",)}, "there is no tests/unit/no_such_test.py"),
    ],
)
def test_one_that_cannot_be_made_is_an_error(change: dict[str, str], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        replace(MUTATIONS[0], **change).applied()  # type: ignore[arg-type]


def test_the_text_changes_in_one_place() -> None:
    mutation: Mutation = MUTATIONS[0]
    before = (ROOT / "hetexp" / mutation.file).read_text(encoding="utf-8")
    start, end = before.split(mutation.old)
    assert mutation.applied() == start + mutation.new + end


def test_words_choose_by_list_title_and_file() -> None:
    assert chosen(MUTATIONS, ()) == MUTATIONS
    (one,) = chosen(MUTATIONS, [MUTATIONS[3].title])
    assert one == MUTATIONS[3]
    assert {mutation.group for mutation in chosen(MUTATIONS, ["security "])} == {"security"}
