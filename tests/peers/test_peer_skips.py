"""The list of other projects' tests that do not apply holds nothing else."""

from __future__ import annotations

import fnmatch
import unittest
from collections.abc import Callable
from typing import Any

import peer_skips
import pytest
import test_peft
import test_transformers
from peer_students import EVERY


def _passes(case: unittest.TestCase) -> None:
    pass


def _fails(case: unittest.TestCase) -> None:
    case.assertEqual(1, 2)


def _fails_in_a_subtest(case: unittest.TestCase) -> None:
    with case.subTest("part"):
        case.assertEqual(1, 2)


def _is_skipped(case: unittest.TestCase) -> None:
    case.skipTest("its own reason")


def _outcome(test: Callable[..., None]) -> type[BaseException] | None:
    """Run a test under the list, in a case of its own; return what it ends with."""
    try:
        peer_skips.checked(test, lambda case: "kind::test_listed")(unittest.TestCase())
    except BaseException as error:  # pytest's outcomes are not exceptions
        return type(error)
    return None


@pytest.mark.parametrize(
    "test, listed, not_listed",
    [
        (_passes, pytest.fail.Exception, None),
        (_is_skipped, pytest.fail.Exception, pytest.skip.Exception),
        (_fails, pytest.skip.Exception, AssertionError),
        (_fails_in_a_subtest, pytest.skip.Exception, AssertionError),
    ],
)
def test_a_listed_test_must_fail(
    test: Callable[..., None], listed: Any, not_listed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_skips, "ALL", False)
    monkeypatch.setattr(peer_skips, "SKIPS", {"*::test_listed": "a reason"})
    assert _outcome(test) is listed
    monkeypatch.setattr(peer_skips, "SKIPS", {"*::test_other": "a reason"})
    assert _outcome(test) is not_listed


def test_every_line_names_a_test() -> None:
    tests = [name for name in dir(test_transformers.HybridTests) if name.startswith("test_")]
    adapters = {test_peft.adapter_name(*adapter) for adapter in test_peft.ALL_ADAPTERS}
    for name in dir(test_peft.TestAdapters):
        if name.startswith("test_"):
            tests += [f"{name}[{adapter}]" for adapter in adapters]
    names = []
    for kind in EVERY:
        names += [f"{kind.name}::{test}" for test in tests]
    for pattern in peer_skips.SKIPS:
        assert fnmatch.filter(names, peer_skips.as_fnmatch(pattern)), pattern
