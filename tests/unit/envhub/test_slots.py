"""The hub's decisions, event by event and under any interleaving."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from broker.contract.streams import MAX_DELIVERIES
from envhub.scheduling.line import GroupJob
from envhub.scheduling.slots import (
    AbandonTicket,
    AbortEpisode,
    CloseTicket,
    EpisodeSlots,
    FinishGroup,
    HandBack,
    HurryEpisode,
    StartEpisode,
)


def job(key: str = "a", size: int = 2, least: int | None = None, **kwargs: object) -> GroupJob:
    values = {
        "key": key,
        "group_size": size,
        "min_group_size": size if least is None else least,
        "deadline_s": 10.0,
        **kwargs,
    }
    return GroupJob(**values)  # type: ignore[arg-type]


def test_a_group_starts_at_once_and_finishes_with_its_last_episode() -> None:
    slots = EpisodeSlots(4, max_retries=1)
    assert slots.offer(job(), 0.0) == [StartEpisode("a", 0, 0), StartEpisode("a", 1, 0)]
    assert slots.finished("a", 1) == []
    assert slots.finished("a", 0) == [FinishGroup("a", (0, 1))]
    assert (slots.running, slots.waiting, slots.jobs) == (0, 0, [])


def test_a_group_larger_than_the_hub_runs_in_waves() -> None:
    slots = EpisodeSlots(2, max_retries=0)
    assert slots.offer(job(size=3), 0.0) == [StartEpisode("a", 0, 0), StartEpisode("a", 1, 0)]
    assert slots.finished("a", 0) == [StartEpisode("a", 2, 0)]
    assert slots.finished("a", 2) == []
    assert slots.finished("a", 1) == [FinishGroup("a", (0, 1, 2))]


def test_room_is_what_is_neither_running_nor_waiting_nor_reserved() -> None:
    slots = EpisodeSlots(8, max_retries=0)
    assert slots.reserve(3, limit=9) == 2
    assert slots.reserve(3, limit=9) == 0
    assert slots.reserve(2, limit=9) == 1
    slots.release(3, 2)
    slots.offer(job(size=5), 0.0)
    assert slots.reserve(1, limit=9) == 1  # 8 - 5 running - 2 reserved
    assert EpisodeSlots(4, 0).reserve(100, limit=3) == 1  # larger than the hub: all of it, once
    slots.drain()
    assert slots.reserve(1, limit=1) == 0


def test_a_failed_episode_starts_again_and_then_closes_its_ticket() -> None:
    slots = EpisodeSlots(4, max_retries=1)
    slots.offer(job(), 0.0)
    assert slots.failed("a", 1, "env", "boom") == [StartEpisode("a", 1, 1)]
    assert slots.failed("a", 1, "env", "boom") == [
        AbortEpisode("a", 0),
        CloseTicket("a", "env_error", "episode 1, attempt 2: boom"),
    ]
    assert slots.failed("a", 0, "env", "boom") == []
    assert slots.running == 0


def test_the_kind_of_failure_decides_how_the_ticket_ends() -> None:
    def end(kind: str) -> object:
        slots = EpisodeSlots(1, max_retries=0)
        slots.offer(job(size=1), 0.0)
        return slots.failed("a", 0, kind, "x")[-1]  # type: ignore[arg-type]

    assert end("timeout") == CloseTicket("a", "timeout", "episode 0, attempt 1: x")
    assert end("generate") == HandBack("a", 1.0, "episode 0, attempt 1: x")
    assert end("fatal") == CloseTicket("a", "env_error", "episode 0, attempt 1: x")


def test_the_log_says_what_a_failure_leads_to() -> None:
    def after(kind: str, times: int, min_size: int = 2) -> list[str]:
        slots, said = EpisodeSlots(1, max_retries=1), []
        slots.offer(job(size=2, least=min_size), 0.0)
        for _ in range(times):
            actions = slots.failed("a", 0, kind, "x")  # type: ignore[arg-type]
            said.append(slots.describe_retry("a", 0, actions))
        return said

    assert after("generate", 2) == [
        "the episode starts again",
        "its ticket goes back to the queue and will be played again",
    ]
    assert after("env", 2) == ["the episode starts again", ""]  # its closing is logged
    # the group does without it
    assert after("env", 2, min_size=1) == ["the episode starts again", ""]


def test_fatal_is_not_tried_again() -> None:
    slots = EpisodeSlots(1, max_retries=5)
    slots.offer(job(size=1), 0.0)
    assert slots.failed("a", 0, "fatal", "too long") == [
        CloseTicket("a", "env_error", "episode 0, attempt 1: too long")
    ]


def test_a_lost_episode_leaves_a_smaller_group_where_that_is_allowed() -> None:
    slots = EpisodeSlots(4, max_retries=0)
    slots.offer(job(size=3, least=2), 0.0)
    assert slots.failed("a", 0, "env", "boom") == []
    assert slots.finished("a", 1) == []
    assert slots.finished("a", 2) == [FinishGroup("a", (1, 2))]


def test_the_last_quarter_of_a_group_is_hurried_once() -> None:
    slots = EpisodeSlots(8, max_retries=1)
    slots.offer(job(size=8), 0.0)
    for episode in range(5):
        assert slots.finished("a", episode) == []
    assert slots.finished("a", 5) == [HurryEpisode("a", 6), HurryEpisode("a", 7)]
    assert slots.failed("a", 7, "env", "x") == [StartEpisode("a", 7, 1), HurryEpisode("a", 7)]
    assert slots.finished("a", 6) == []


def test_a_lost_episode_may_leave_the_last_quarter() -> None:
    slots = EpisodeSlots(8, max_retries=0)
    slots.offer(job(size=8, least=2), 0.0)
    for episode in range(5):
        assert slots.finished("a", episode) == []
    assert slots.failed("a", 5, "env", "x") == [HurryEpisode("a", 6), HurryEpisode("a", 7)]


def test_the_last_episodes_that_wait_for_a_slot_start_before_those_of_other_groups() -> None:
    slots = EpisodeSlots(3, max_retries=1)
    slots.offer(job("a", size=4), 0.0)
    slots.offer(job("b", size=4), 0.0)
    assert slots.finished("a", 0) == [StartEpisode("a", 3, 0)]
    assert slots.finished("a", 1) == [StartEpisode("b", 0, 0)]
    assert slots.failed("b", 0, "env", "x") == [StartEpisode("b", 0, 1)]
    assert slots.finished("a", 2) == [HurryEpisode("a", 3), StartEpisode("b", 1, 0)]
    assert slots.failed("a", 3, "env", "x") == [StartEpisode("a", 3, 1), HurryEpisode("a", 3)]


def test_a_group_does_not_wait_for_what_is_expected_to_take_far_longer() -> None:
    def ends(
        at: float, factor: float | None = 2.0, least: int = 2, **left_s: float
    ) -> list[object]:
        slots = EpisodeSlots(4, max_retries=0)
        slots.offer(job(size=4, least=least, deadline_s=1000.0, straggler_factor=factor), 100.0)
        slots.finished("a", 0)
        slots.finished("a", 1)
        return list(slots.tick(at, left_s=lambda key, episode: {"a": left_s}[key][f"e{episode}"]))

    closed = [AbortEpisode("a", 2), AbortEpisode("a", 3), FinishGroup("a", (0, 1))]
    assert ends(110.0, e2=20.1, e3=50.0) == closed
    assert ends(110.0, e2=20.0, e3=50.0) == []  # the sooner of them is worth the wait
    assert ends(120.0, e2=30.1, e3=50.0) == []  # measured by the time that the group has taken
    assert ends(110.0, e2=0.0, e3=50.0) == []  # unknown
    assert ends(110.0, least=3, e2=50.0, e3=50.0) == []
    assert ends(110.0, factor=None, e2=50.0, e3=50.0) == []


def test_redundant_episodes_are_aborted_once_enough_have_finished() -> None:
    slots = EpisodeSlots(4, max_retries=0)
    slots.offer(job(size=4, least=2, num_redundant=1), 0.0)
    assert slots.finished("a", 3) == []
    assert slots.finished("a", 1) == []
    assert slots.finished("a", 2) == [AbortEpisode("a", 0), FinishGroup("a", (1, 2, 3))]
    assert (slots.running, slots.waiting, slots.jobs) == (0, 0, [])


def test_redundant_episodes_that_have_not_begun_never_do() -> None:
    slots = EpisodeSlots(2, max_retries=0)
    slots.offer(job(size=4, least=2, num_redundant=2), 0.0)
    assert slots.finished("a", 0) == [StartEpisode("a", 2, 0)]
    assert slots.finished("a", 2) == [AbortEpisode("a", 1), FinishGroup("a", (0, 2))]
    assert (slots.running, slots.waiting) == (0, 0)


def test_a_redundant_episode_stands_in_for_a_lost_one() -> None:
    slots = EpisodeSlots(4, max_retries=0)
    slots.offer(job(size=3, least=2, num_redundant=1), 0.0)
    assert slots.failed("a", 0, "env", "boom") == []
    assert slots.finished("a", 1) == []
    assert slots.finished("a", 2) == [FinishGroup("a", (1, 2))]


def test_the_deadline_closes_with_enough_episodes_or_without_a_group() -> None:
    slots = EpisodeSlots(4, max_retries=0)
    slots.offer(job("a", size=2, least=1), 0.0)
    slots.offer(job("b", size=2), 0.0)
    slots.finished("a", 0)
    slots.finished("b", 0)
    assert slots.tick(9.9) == []
    assert slots.tick(10.0) == [
        AbortEpisode("a", 1),
        FinishGroup("a", (0,)),
        AbortEpisode("b", 1),
        CloseTicket("b", "deadline", "1 of at least 2 episodes after 10 s"),
    ]
    assert slots.running == 0


def test_late_groups_are_given_up_as_soon_as_they_cannot_be_trained() -> None:
    slots = EpisodeSlots(4, max_retries=0)
    slots.offer(job("drop", size=1, max_staleness=1), 0.0)
    slots.offer(job("wait", size=1), 0.0)
    assert slots.advanced(3) == []
    assert slots.sampled("drop", 3) == []
    assert slots.sampled("wait", 3) == []
    assert slots.advanced(4) == []
    assert slots.advanced(5) == [
        AbortEpisode("drop", 0),
        CloseTicket(
            "drop", "late", "oldest token of version 3, learner at version 5, max_staleness 1"
        ),
    ]
    assert slots.jobs == ["wait"]
    slots.offer(job("again", size=1, max_staleness=1), 0.0)
    assert slots.sampled("again", 3)[-1] == CloseTicket(
        "again", "late", "oldest token of version 3, learner at version 5, max_staleness 1"
    )


def test_a_ticket_that_comes_too_often_is_closed_unread() -> None:
    slots = EpisodeSlots(4, max_retries=0)
    assert isinstance(slots.offer(job(num_delivered=MAX_DELIVERIES - 1), 0.0)[0], StartEpisode)
    closed = slots.offer(job("b", num_delivered=MAX_DELIVERIES), 0.0)
    assert closed == [
        CloseTicket("b", "too_many_deliveries", "delivered 20 times and never finished")
    ]


def test_a_redelivery_of_a_ticket_in_hand_changes_nothing() -> None:
    slots = EpisodeSlots(4, max_retries=0)
    slots.offer(job(), 0.0)
    assert slots.offer(job(num_delivered=2), 1.0) == []
    assert slots.running == 2


def test_a_suspect_group_is_played_alone() -> None:
    slots = EpisodeSlots(4, max_retries=0)
    assert slots.offer(job("a", size=1), 0.0) == [StartEpisode("a", 0, 0)]
    assert slots.hold(job("s", size=1)) == []
    assert slots.reserve(1, limit=1) == 0, "takes tickets while one is judged"
    assert slots.offer(job("b", size=1), 0.0) == [], (
        "it was fetched with the others and must wait its turn"
    )
    assert slots.free == 1
    assert slots.admit("s", 0.0, alone=True) == []
    assert slots.finished("a", 0) == [FinishGroup("a", (0,))]
    assert slots.tick(1.0, idle=False) == [], "the last group is still being stored"
    assert slots.tick(2.0) == [StartEpisode("s", 0, 0)]
    assert slots.tick(3.0) == []
    assert slots.jobs == ["s", "b"]
    assert slots.tick(12.0)[0] == AbortEpisode("s", 0), "its deadline does not run from its turn on"
    assert slots.jobs == ["b"]
    assert slots.running == 1
    assert slots.reserve(1, limit=1) == 1


def test_what_is_judged_harmless_begins_at_once() -> None:
    slots = EpisodeSlots(4, max_retries=0)
    slots.hold(job("a"))
    assert slots.hold(job("a")) == []
    assert slots.admit("a", 0.0, alone=False) == [StartEpisode("a", 0, 0), StartEpisode("a", 1, 0)]
    assert slots.admit("gone", 0.0, alone=True) == []


def test_a_poisonous_ticket_closes_unplayed_and_those_behind_it_begin() -> None:
    slots = EpisodeSlots(4, max_retries=0)
    slots.hold(job("a"))
    slots.offer(job("b", size=1), 0.0)
    assert slots.close_poisonous("a", "deadly") == [CloseTicket("a", "poisonous", "deadly")]
    assert slots.close_poisonous("a", "deadly") == []
    assert slots.tick(0.0) == [StartEpisode("b", 0, 0)]


def test_a_held_ticket_is_handed_back_with_the_others() -> None:
    slots = EpisodeSlots(4, max_retries=0)
    slots.offer(job("a", size=1), 0.0)
    slots.hold(job("b"))
    assert slots.expire() == [
        AbortEpisode("a", 0),
        HandBack("a", 0.0, "draining"),
        HandBack("b", 0.0, "draining"),
    ]
    assert slots.admit("b", 0.0, alone=False) == []
    assert slots.free == 4


def test_draining_finishes_what_it_has_then_hands_back() -> None:
    slots = EpisodeSlots(1, max_retries=0)
    slots.offer(job("a", size=2), 0.0)
    slots.drain()
    assert slots.offer(job("b"), 0.0) == [HandBack("b", 0.0, "draining")]
    assert slots.finished("a", 0) == [StartEpisode("a", 1, 0)]
    assert slots.expire() == [AbortEpisode("a", 1), HandBack("a", 0.0, "draining")]
    assert (slots.running, slots.waiting, slots.jobs) == (0, 0, [])


def test_abandoned_tickets_leave_without_a_word_and_others_begin() -> None:
    slots = EpisodeSlots(2, max_retries=1)
    slots.offer(job("a"), 0.0)
    slots.offer(job("b"), 0.0)
    assert slots.abandon(["a"]) == [
        *(AbortEpisode("a", 0), AbortEpisode("a", 1), AbandonTicket("a")),
        *(StartEpisode("b", 0, 0), StartEpisode("b", 1, 0)),
    ]
    assert (slots.jobs, slots.begun) == (["b"], ["b"])
    assert slots.tick(9.0) == []
    assert slots.offer(job("a"), 9.0) == []  # it may come again


class SlotsMachine(RuleBasedStateMachine):
    """Any order of tickets, endings, failures, versions, clock and drain."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = EpisodeSlots(5, max_retries=1)
        self.now = 0.0
        self.next_key = 0
        self.open: dict[str, GroupJob] = {}
        self.running: dict[tuple[str, int], int] = {}
        self.done: dict[str, set[int]] = {}
        self.oldest: dict[str, int] = {}
        self.ended: list[str] = []
        self.held: list[str] = []  # not judged
        self.suspects: set[str] = set()
        self.lapsed: set[str] = set()

    def perform(self, actions: list[object]) -> None:
        for action in actions:
            match action:
                case StartEpisode(key, episode, attempt):
                    assert key in self.open
                    assert (key, episode) not in self.running
                    assert attempt <= 1
                    self.running[key, episode] = attempt
                case HurryEpisode(key, episode):
                    assert (key, episode) in self.running
                case AbortEpisode(key, episode):
                    del self.running[key, episode]
                case FinishGroup(key, episodes):
                    assert set(episodes) == self.done[key]
                    asked = self.open[key]
                    assert (
                        asked.min_group_size
                        <= len(episodes)
                        <= asked.group_size - asked.num_redundant
                    )
                    self.end(key)
                case CloseTicket(key, _, _):
                    assert key not in self.lapsed, "closed what another hub may play"
                    self.end(key)
                case HandBack(key, _, _) | AbandonTicket(key):
                    self.end(key)

    def end(self, key: str) -> None:
        del self.open[key]
        assert not [entry for entry in self.running if entry[0] == key], (
            "ended with episodes still running"
        )
        self.ended.append(key)

    @rule(
        size=st.integers(1, 8),
        least=st.integers(1, 8),
        staleness=st.sampled_from([None, 0, 1]),
        redundant=st.integers(0, 3),
        factor=st.sampled_from([None, 0.5]),
    )
    def ticket(
        self, size: int, least: int, staleness: int | None, redundant: int, factor: float | None
    ) -> None:
        if self.slots.reserve(size, 1):
            self.slots.release(size, 1)
            self.next_key += 1
            key = str(self.next_key)
            spare = min(redundant, size - min(size, least))
            self.open[key] = GroupJob(
                key,
                size,
                min(size, least),
                10.0,
                staleness,
                num_redundant=spare,
                straggler_factor=factor,
            )
            self.done[key] = set()
            self.perform(self.slots.offer(self.open[key], self.now))

    @rule(size=st.integers(1, 8))
    def ticket_again(self, size: int) -> None:
        if self.slots.reserve(size, 1):
            self.slots.release(size, 1)
            self.next_key += 1
            key = str(self.next_key)
            self.open[key], self.done[key] = GroupJob(key, size, size, 10.0), set()
            self.held.append(key)
            self.perform(self.slots.hold(self.open[key]))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), verdict=st.sampled_from(["harmless", "suspect", "poisonous"]))
    def judge(self, data: st.DataObject, verdict: str) -> None:
        key = data.draw(st.sampled_from(self.held))
        self.held.remove(key)
        if verdict == "poisonous":
            self.perform(self.slots.close_poisonous(key, "x"))
            return
        # a verdict on a ticket that was lost and came again is too late once its group has begun
        if verdict == "suspect" and key in self.open and key not in self.slots.begun:
            self.suspects.add(key)
        self.perform(self.slots.admit(key, self.now, alone=verdict == "suspect"))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        key, episode = data.draw(st.sampled_from(sorted(self.running)))
        del self.running[key, episode]
        self.done[key].add(episode)
        self.perform(self.slots.finished(key, episode))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), kind=st.sampled_from(["env", "timeout", "generate", "fatal"]))
    def fail(self, data: st.DataObject, kind: str) -> None:
        key, episode = data.draw(st.sampled_from(sorted(self.running)))
        del self.running[key, episode]
        self.perform(self.slots.failed(key, episode, kind, "x"))  # type: ignore[arg-type]

    @precondition(lambda self: self.running)
    @rule(data=st.data(), lag=st.integers(0, 2))
    def sample(self, data: st.DataObject, lag: int) -> None:
        key, _ = data.draw(st.sampled_from(sorted(self.running)))
        version = self.slots.version - lag
        self.oldest[key] = min(version, self.oldest.get(key, version))
        self.perform(self.slots.sampled(key, version))

    @rule()
    def advance(self) -> None:
        self.perform(self.slots.advanced(self.slots.version + 1))

    @rule(seconds=st.floats(0, 12))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.perform(self.slots.tick(self.now, left_s=lambda _key, episode: float(episode)))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), seconds=st.floats(0, 1000))
    def freeze(self, data: st.DataObject, seconds: float) -> None:
        """The hub does not run for some time, in which it loses tickets; they may come to it again."""
        self.lapsed = data.draw(st.sets(st.sampled_from(sorted(self.open))))
        self.perform(self.slots.abandon(sorted(self.lapsed)))
        assert not self.lapsed & self.open.keys()
        self.perform(self.slots.tick(self.now, left_s=lambda _key, episode: float(episode)))
        for key in sorted(self.lapsed):
            if self.slots.reserve(1, 1):
                self.slots.release(1, 1)
                self.open[key], self.done[key] = GroupJob(key, 1, 1, 10.0), set()
                self.oldest.pop(key, None)
                self.suspects.discard(key)
                self.lapsed.discard(key)
                self.ended.remove(key)
                self.perform(self.slots.offer(self.open[key], self.now))

    @rule(key=st.integers(0, 5), episode=st.integers(0, 8))
    def stray_event(self, key: int, episode: int) -> None:
        if (str(key), episode) not in self.running:
            before = self.slots.running
            self.perform(self.slots.finished(str(key), episode))
            assert self.slots.running == before

    @rule()
    def hand_everything_back(self) -> None:
        self.perform(self.slots.expire())
        assert not self.open
        self.slots.draining = False  # the same machine goes on, for more interleavings

    @invariant()
    def slots_are_counted(self) -> None:
        assert self.slots.running == len(self.running) <= self.slots.n
        assert self.slots.jobs == list(self.open)
        assert self.slots.waiting == 0 or self.slots.running == self.slots.n, (
            "an episode waits beside a free slot"
        )
        assert self.slots.waiting <= 8 - 1, "took a ticket without having room for it"
        assert len(self.ended) == len(set(self.ended))

    @invariant()
    def suspects_are_alone(self) -> None:
        playing = {key for key, _ in self.running}
        assert len(playing) <= 1 or not playing & self.suspects

    @invariant()
    def nothing_late_is_kept(self) -> None:
        for key, job_ in self.open.items():
            if job_.max_staleness is not None and key in self.oldest:
                assert self.slots.version - self.oldest[key] <= job_.max_staleness


TestSlotsMachine = SlotsMachine.TestCase
TestSlotsMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
