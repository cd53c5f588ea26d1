"""The digest of the verifier's code: it depends on code, not on comments and docstrings."""

from __future__ import annotations

import pytest

from kgen.trial.proof_rules import _AS_STRICT, are_current, proof_rules, rules_digest

TEXT = '''"""What it does."""

LAUNCHES = 5
"""On the values of each input set."""


def bound(x: float) -> float:
    """Twice the loss."""
    said = """a text
    that is a value"""
    return 2 * x  # and no more
'''


def digest(text: str) -> str:
    return rules_digest([("check/check.py", text)])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("# and no more", "# as it should be"),
        ("Twice the loss", "2 x"),
        ('"""What it does."""', '"""What\n\nit does."""'),
        ("\n\n\n", "\n"),
        ('"""On the values of each input set."""\n', ""),
    ],
)
def test_words_do_not_count(old: str, new: str) -> None:
    assert old in TEXT
    assert digest(TEXT.replace(old, new)) == digest(TEXT)


@pytest.mark.parametrize(
    ("old", "new"),
    [("5", "4"), ("2 * x", "3 * x"), ("that is a value", "that is another"), ("bound", "limit")],
)
def test_code_counts(old: str, new: str) -> None:
    assert old in TEXT
    assert digest(TEXT.replace(old, new)) != digest(TEXT)


def test_a_text_beside_code_takes_no_code_away() -> None:
    assert digest('def f(): """one"""; return 1\n') != digest('def f(): """one"""; return 2\n')


def test_the_modules_of_a_proof_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from kgen.trial import proof_rules as module

    names: list[str] = []

    def noted(sources: object) -> str:
        names.extend(name for name, _ in sources)  # type: ignore[attr-defined]
        return "digest"

    monkeypatch.setattr(module, "rules_digest", noted)
    proof_rules.cache_clear()
    assert proof_rules() == "digest"
    proof_rules.cache_clear()
    assert {"check/schedule.py", "check/extents.py", "check/set_limits.py", "check/oracle.py",
            "check/steps.py", "worker/proof.py", "worker/runner.py", "worker/binding.py",
            "trial/host_runs.py", "trial/kept_state.py"} <= set(names)


def test_an_older_verifier_is_named_for_the_current_one_alone() -> None:
    assert set(_AS_STRICT) <= {proof_rules()}, "the verifier has changed: empty _AS_STRICT"
    assert are_current(proof_rules())
    assert not are_current("")
    for older in _AS_STRICT.get(proof_rules(), ()):
        assert are_current(older)


def test_a_change_makes_older_certificates_invalid(monkeypatch: pytest.MonkeyPatch) -> None:
    from kgen.trial import proof_rules as module

    monkeypatch.setattr(module, "_AS_STRICT", {"today": ("older",)})
    monkeypatch.setattr(module, "proof_rules", lambda: "today")
    assert module.are_current("older")
    monkeypatch.setattr(module, "proof_rules", lambda: "tomorrow")
    assert not module.are_current("older")
