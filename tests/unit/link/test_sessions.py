"""Who may be connected as a node, which tokens its trunks may show, and when its silence is a loss."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.core.node import NodeId
from llmgw.link.sessions import TOKENS, Attention, Claim, Entry, Free, Held, Session, Sessions, Turned

NODE = NodeId("gpu-01")
LEASE = 15.0


class FakeEnd:
    def __init__(self, heard_at: float = 0.0) -> None:
        self.heard_at = heard_at

    def cut(self, code: str | None, reason: str) -> None: ...

    async def is_alive(self, seconds: float) -> bool:
        return True


def make_sessions() -> Sessions:
    numbers = itertools.count(1)
    return Sessions(lease_seconds=LEASE, make_token=lambda: f"token-{next(numbers)}")


def claim(run: str = "a", dial: int = 1, node: NodeId = NODE, peer: str = "10.0.0.1:5000") -> Claim:
    return Claim(node=node, run=run, dial=dial, protocol=2, version="1.0", peer=peer, serial=7)


def enter(sessions: Sessions, wants: Claim, now: float = 0.0) -> Entry:
    return sessions.enter(wants, FakeEnd(now), now)


def test_a_node_that_was_never_here_may_enter() -> None:
    assert make_sessions().consider(claim()) == Free()


def test_of_the_same_run_the_higher_dial_replaces_the_lower() -> None:
    sessions = make_sessions()
    first = enter(sessions, claim(dial=1))
    assert sessions.consider(claim(dial=2)) == Free()
    second = enter(sessions, claim(dial=2))
    assert second.replaced is first.session
    assert not second.new_run
    assert not sessions.is_current(first.session)
    assert sessions.is_current(second.session)


def test_of_the_same_run_a_lower_or_equal_dial_is_turned_away() -> None:
    sessions = make_sessions()
    enter(sessions, claim(dial=5))
    for dial in (4, 5):
        verdict = sessions.consider(claim(dial=dial))
        assert isinstance(verdict, Turned)
        assert verdict.code == "replaced"
        assert "dial 5" in verdict.reason


def test_a_lower_dial_is_turned_away_also_when_the_higher_is_gone() -> None:
    sessions = make_sessions()
    sessions.leave(enter(sessions, claim(dial=5)).session)
    assert isinstance(sessions.consider(claim(dial=4)), Turned)
    assert sessions.consider(claim(dial=6)) == Free()


def test_another_run_meets_the_one_that_is_connected() -> None:
    sessions = make_sessions()
    first = enter(sessions, claim(run="a"))
    assert sessions.consider(claim(run="b")) == Held(session=first.session)


def test_another_run_may_enter_when_the_link_of_the_first_is_gone() -> None:
    sessions = make_sessions()
    sessions.leave(enter(sessions, claim(run="a")).session)
    assert sessions.consider(claim(run="b")) == Free()
    entry = enter(sessions, claim(run="b"))
    assert entry.replaced is None
    assert entry.new_run


def test_another_run_that_replaces_one_makes_its_tokens_void() -> None:
    sessions = make_sessions()
    first = enter(sessions, claim(run="a"))
    second = enter(sessions, claim(run="b"))
    assert second.replaced is first.session
    assert second.new_run
    assert "not one of the agent" in str(sessions.refuse_token(NODE, first.session.token))
    assert sessions.refuse_token(NODE, second.session.token) is None


def test_tokens_of_the_same_run_stay_good_and_are_bounded() -> None:
    sessions = make_sessions()
    tokens = [enter(sessions, claim(dial=dial)).session.token for dial in range(1, TOKENS + 3)]
    assert [sessions.refuse_token(NODE, token) is None for token in tokens] == [False] * 2 + [True] * TOKENS


def test_a_node_without_a_session_has_no_trunks() -> None:
    sessions = make_sessions()
    token = enter(sessions, claim()).session.token
    assert sessions.refuse_token(NodeId("other"), token) == "node other has no session"


def test_a_token_of_one_node_is_no_good_for_another() -> None:
    sessions = make_sessions()
    token = enter(sessions, claim()).session.token
    enter(sessions, claim(node=NodeId("other")))
    assert sessions.refuse_token(NodeId("other"), token) is not None


def test_each_registration_has_a_token_of_its_own() -> None:
    sessions = Sessions(lease_seconds=LEASE)
    one, two = enter(sessions, claim(dial=1)), enter(sessions, claim(dial=2))
    assert one.session.token != two.session.token
    assert len(one.session.token) >= 32


def test_a_replaced_link_that_ends_takes_nothing_with_it() -> None:
    sessions = make_sessions()
    first = enter(sessions, claim(dial=1))
    second = enter(sessions, claim(dial=2))
    sessions.leave(first.session)
    assert sessions.is_current(second.session)


def test_a_silent_node_is_lost_once_after_its_lease() -> None:
    sessions = make_sessions()
    session = enter(sessions, claim(), now=100.0).session
    sessions.register(session)
    assert sessions.find_silent(100.0 + LEASE) == ()
    assert sessions.find_silent(100.1 + LEASE) == (NODE,)
    assert sessions.lose(NODE, 100.1 + LEASE) == (True, session)
    assert not sessions.is_current(session)
    assert sessions.find_silent(1_000.0) == ()


def test_a_node_that_speaks_keeps_its_lease() -> None:
    sessions = make_sessions()
    end = FakeEnd(0.0)
    sessions.register(sessions.enter(claim(), end, 0.0).session)
    end.heard_at = 10.0
    assert sessions.find_silent(20.0) == ()
    assert sessions.lose(NODE, 20.0) == (False, None)
    assert sessions.find_silent(25.1) == (NODE,)


def test_the_lease_runs_on_when_the_link_is_gone() -> None:
    sessions = make_sessions()
    end = FakeEnd(8.0)
    session = sessions.enter(claim(), end, 0.0).session
    sessions.register(session)
    sessions.leave(session)
    assert sessions.find_silent(8.0 + LEASE) == ()
    assert sessions.refuse_token(NODE, session.token) is None
    assert sessions.lose(NODE, 8.1 + LEASE) == (True, None)
    assert sessions.refuse_token(NODE, session.token) == "node gpu-01 has no session"


def test_who_comes_back_in_time_was_never_lost() -> None:
    sessions = make_sessions()
    first = enter(sessions, claim(dial=1), now=0.0).session
    sessions.register(first)
    sessions.leave(first)
    enter(sessions, claim(dial=2), now=14.0)
    assert sessions.find_silent(28.0) == ()
    # the fleet counts on it still, though it has not registered anew
    assert sessions.lose(NODE, 30.0)[0]


def test_a_node_that_never_registered_is_ended_but_no_loss() -> None:
    sessions = make_sessions()
    session = enter(sessions, claim(), now=0.0).session
    assert sessions.find_silent(20.0) == (NODE,)
    assert sessions.lose(NODE, 20.0) == (False, session)
    assert sessions.find_silent(40.0) == ()


def test_a_registration_that_got_through_counts_though_its_link_was_replaced() -> None:
    sessions = make_sessions()
    first = enter(sessions, claim(dial=1)).session
    enter(sessions, claim(dial=2))
    sessions.register(first)
    assert sessions.lose(NODE, 20.0)[0]


def test_views_tell_who_is_connected_and_when_it_was_heard() -> None:
    sessions = make_sessions()
    end = FakeEnd(0.0)
    here = sessions.enter(claim(), end, 1.0).session
    gone = sessions.enter(claim(node=NodeId("other")), FakeEnd(3.0), 2.0).session
    sessions.leave(gone)
    end.heard_at = 5.0
    assert list(sessions.views()) == [(here, True, 5.0), (gone, False, 3.0)]
    assert sessions.list_connected() == (here,)


def test_a_link_that_ends_is_told_of_once_if_its_node_had_registered() -> None:
    stirred: list[int] = []
    sessions = Sessions(lease_seconds=LEASE, on_gone=lambda: stirred.append(1))
    session = enter(sessions, claim()).session
    sessions.leave(session)
    assert (stirred, sessions.take_gone()) == ([1], None)
    session = enter(sessions, claim(dial=2)).session
    sessions.register(session)
    assert sessions.take_gone() is None
    sessions.leave(session)
    assert len(stirred) == 2
    assert [sessions.take_gone(), sessions.take_gone()] == [NODE, None]
    sessions.leave(session)
    assert sessions.take_gone() is None


def test_a_link_that_another_has_replaced_is_gone_until_that_one_registers() -> None:
    sessions = make_sessions()
    old = enter(sessions, claim(dial=1)).session
    sessions.register(old)
    new = enter(sessions, claim(dial=2)).session
    assert sessions.take_gone() == NODE
    sessions.register(new)
    sessions.leave(old)
    assert sessions.take_gone() is None


def test_nothing_is_told_of_a_link_whose_successor_has_registered() -> None:
    sessions = make_sessions()
    old = enter(sessions, claim(dial=1)).session
    sessions.register(old)
    sessions.leave(old)
    sessions.register(enter(sessions, claim(dial=2)).session)
    # whoever tells the fleet was late
    assert sessions.take_gone() is None


def test_a_node_that_is_lost_is_not_told_of_as_silent() -> None:
    sessions = make_sessions()
    sessions.register(enter(sessions, claim()).session)
    told, session = sessions.lose(NODE, LEASE + 1)
    assert told
    assert session is not None
    assert sessions.take_gone() is None


def test_nodes_that_go_together_are_each_told_of() -> None:
    sessions = make_sessions()
    names = [NodeId(f"n{number}") for number in range(5)]
    for name in names:
        session = enter(sessions, claim(node=name)).session
        sessions.register(session)
        sessions.leave(session)
    assert [sessions.take_gone() for _ in range(6)] == [*names, None]


def test_silence_is_judged_while_we_listen() -> None:
    attention = Attention(lease_seconds=LEASE, now=0.0)
    assert attention.look_seconds == 1.0
    assert Attention(lease_seconds=0.4, now=0.0).look_seconds == 0.1
    assert all(attention.look(float(now)) for now in range(1, 100))
    # a loaded machine looks a little late
    assert attention.look(103.0)


def test_after_a_pause_of_our_own_silence_proves_nothing_for_a_lease() -> None:
    attention = Attention(lease_seconds=LEASE, now=0.0)
    assert attention.look(1.0)
    looks = {now: attention.look(float(now)) for now in range(60, 80)}
    assert [now for now, judged in looks.items() if judged] == list(range(75, 80))


steps = st.tuples(
    st.sampled_from(["dial", "register", "leave", "wait", "hear", "tell"]), st.sampled_from("ab"), st.integers(1, 20)
)


@pytest.mark.slow
@given(st.lists(steps, max_size=60))
def test_whatever_happens_one_link_counts_and_a_loss_is_told_once(story: list[tuple[str, str, int]]) -> None:
    sessions = make_sessions()
    now, dials, counts_on_it, links = 0.0, itertools.count(1), False, list[tuple[Session, FakeEnd]]()
    # what the fleet was told last: the link that it counts on, if any
    told_of: Session | None = None
    for step, run, number in story:
        if step == "dial":
            wants = claim(run=run, dial=next(dials))
            if isinstance(sessions.consider(wants), Free):
                end = FakeEnd(now)
                links.append((sessions.enter(wants, end, now).session, end))
        elif step == "register" and links and sessions.is_current(links[-1][0]):
            sessions.register(links[-1][0])
            counts_on_it, told_of = True, links[-1][0]
        elif step == "tell":
            is_gone = told_of is not None and not sessions.is_current(told_of)
            assert sessions.take_gone() == (NODE if is_gone else None)
            told_of = None if is_gone else told_of
        elif step == "leave" and links:
            sessions.leave(links[-1][0])
        elif step == "hear" and links and sessions.is_current(links[-1][0]):
            links[-1][1].heard_at = now
        elif step == "wait":
            now += number
        for node in sessions.find_silent(now):
            told, _ = sessions.lose(node, now)
            assert told == counts_on_it
            counts_on_it, told_of = False, None
        current = [session for session, _ in links if sessions.is_current(session)]
        assert len(current) <= 1
        assert current == [*sessions.list_connected()]
        for session in current:
            assert sessions.refuse_token(NODE, session.token) is None
