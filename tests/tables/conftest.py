"""The tables that tuning writes are those that are looked up here."""

from tests.tuning.conftest import table  # noqa: F401  (a fixture)
