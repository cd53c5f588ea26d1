"""What a worker prints, and how it starts and ends."""

from __future__ import annotations

from kgen.catalogue import profile_named
from kgen.worker import Setup
from kgen.worker.child import Child

SETUP = Setup("rmsnorm", (), profile_named("host"), 0, 0)


def test_a_child_waits_for_permission_and_ends_when_told() -> None:
    child = Child(SETUP)
    assert not child.poll(0.2)  # it opens no device by itself
    child.pipe.send("go")
    assert child.poll(60.0)
    assert child.pipe.recv() == "ready"
    child.dismiss()
    assert child._process.exitcode == 0


def test_a_child_that_is_dismissed_unused_ends_too() -> None:
    child = Child(SETUP)
    child.dismiss()
    assert not child._process.is_alive()


def test_how_a_child_ended_is_told_with_its_last_words() -> None:
    child = Child(Setup("no_such_operator", (), profile_named("host"), 0, 0))
    child.pipe.send("go")
    assert child.poll(60.0)
    failure = child.pipe.recv()
    assert "no_such_operator" in failure.message
    assert "exit code 0" in child.reap()
