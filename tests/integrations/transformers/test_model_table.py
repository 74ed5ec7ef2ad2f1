"""docs/models.md says of every family what its tiny model does."""

import pytest

pytest.importorskip("transformers")

from tests.integrations.transformers import model_table
from tests.integrations.transformers.test_families import FAMILIES, model_class

ROWS = model_table.rows_of(model_table.DOCUMENT.read_text())


def test_every_family_has_a_row():
    assert list(ROWS) == sorted(FAMILIES)


@pytest.mark.sweep
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_are_what_models_do(family):
    model_class(family)  # skips those that this version of transformers lacks
    assert ROWS[family] == f"| {' | '.join(model_table.row(family))} |"
