"""Next steps in the messages of mistakes that new users make."""

from pathlib import Path

import pytest

from kgen.emit.loaded_library import require_operator
from kgen.errors import ProblemError, StorageError, suggest
from kgen.search.storage import open_storage, parse_storage


def test_a_name_in_other_case_is_suggested() -> None:
    assert suggest("RMSNorm", ["rmsnorm", "wkv6"]).startswith("did you mean 'rmsnorm'? known:")
    assert suggest("nosuch", ["rmsnorm", "wkv6"]) == "known: rmsnorm, wkv6"


def test_an_operator_that_a_library_lacks_names_the_next_command(tmp_path: Path) -> None:
    (tmp_path / "kgen_ops/rmsnorm/tables").mkdir(parents=True)
    (tmp_path / "kgen_ops/__init__.py").touch()
    with pytest.raises(ProblemError, match="known: rmsnorm\n  next: kgen tune or kgen emit --add"):
        require_operator(tmp_path, "wkv6")


def test_advice_for_a_sqlite_file_speaks_of_no_host(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="next: name a file that you may write, in a folder"):
        open_storage(parse_storage(f"sqlite:///{tmp_path}/missing/x.db"))
