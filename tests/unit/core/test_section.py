from __future__ import annotations

from hetexp.core.section import flatten


def test_nested_mappings_get_dotted_keys_and_lists_stay() -> None:
    nested = {"trainer": {"seed": 0, "early": {"metric": None}}, "hosts": [{"name": "a"}], "empty": {}, 5: 1}
    assert flatten(nested) == {
        "trainer.seed": 0,
        "trainer.early.metric": None,
        "hosts": [{"name": "a"}],
        "5": 1,
    }
