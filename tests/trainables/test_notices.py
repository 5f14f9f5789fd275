"""Notices reach who listens, once each."""

from trainables.notices import notice, notices_to


def test_a_notice_is_passed_on_once_and_only_while_somebody_listens() -> None:
    outer: list[str] = []
    inner: list[str] = []
    notice("before")
    with notices_to(outer.append):
        notice("1 image of 100 % is left out")
        with notices_to(inner.append):
            notice("1 image of 100 % is left out")
            notice("2 images")
    notice("after")
    assert outer == ["1 image of 100 % is left out", "2 images"]
    assert inner == ["1 image of 100 % is left out", "2 images"]
