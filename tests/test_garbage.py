"""The garbage collector: away while libraries load, and from a process that ends."""

from __future__ import annotations

import gc
from contextlib import suppress

import pytest

from redraft.cli import main
from redraft.garbage import libraries_kept


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_away_while_libraries_load_and_as_before_after(enabled: bool) -> None:
    gc.unfreeze()
    if not enabled:
        gc.disable()
    try:
        with suppress(ImportError), libraries_kept():
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled() == enabled
        assert gc.get_freeze_count() > 0
    finally:
        gc.enable()


def test_a_command_that_ends_is_not_collected_and_has_its_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "run", lambda arguments: 3)
    gc.unfreeze()
    with pytest.raises(SystemExit) as left:
        main.main()
    assert left.value.code == 3
    assert gc.get_freeze_count() > 0
