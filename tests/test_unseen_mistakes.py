"""`verify` finds mistakes whose author had not seen how it compares (`unseen_mistakes`)."""

import pytest
import unseen_mistakes

from lit_cifar.modes import variants
from lit_cifar.verify.planting import bugs_of
from lit_cifar.verify.self_test import OF_ALL, OF_PARTS_ALONE, self_test


def test_no_mode_is_left_out_and_none_is_a_planted_one() -> None:
    unseen = unseen_mistakes.BUGS
    assert {bug.mode for bug in unseen.values()} == set(variants(4))
    assert len(unseen) >= 40
    planted = (bugs_of(OF_ALL) | bugs_of(OF_PARTS_ALONE)).values()
    assert not {bug.imitates for bug in planted} & {bug.imitates for bug in unseen.values()}


@pytest.mark.exhaustive
@pytest.mark.timeout(7200)
def test_unseen_mistakes_are_found() -> None:
    findings = self_test(bugs=[*bugs_of(unseen_mistakes.__name__)])
    assert [(f.mode, f.bug and f.bug.name, f.problems[:1]) for f in findings if not f.right] == []
    assert {finding.bug.name for finding in findings if finding.bug is not None} == set(unseen_mistakes.BUGS)
