import pytest
import torch

from trainer.watch.clock import PHASES, Clock, HostMarks, StreamMarks, make_clock


class Ticks:
    """A clock that goes on by one with each mark, and remembers what became of the marks."""

    def __init__(self):
        self.ticks, self.reached, self.given_back = 0.0, [], []

    def now(self):
        self.ticks += 1
        return self.ticks

    def reach(self, last):
        self.reached.append(last)

    def seconds(self, begin, end):
        assert end <= self.reached[-1]
        return end - begin

    def give_back(self, marks):
        self.given_back += marks


def test_parts_do_not_overlap():
    clock = Clock(Ticks())
    # 1, 2, and 3: a wait inside a wait
    with clock("forward"), clock.communication(), clock.communication():
        pass  # 4, 5, 6
    with clock("backward"):  # 7
        pass  # 8
    with clock.communication():  # in no part of the step
        pass
    assert clock.read() == {
        "data": 0, "forward": 2, "communication": 3, "backward": 1, "optimizer": 0,
    }  # fmt: skip
    assert clock.read() == dict.fromkeys(PHASES, 0)


def test_nothing_waits_before_the_report():
    marks = Ticks()
    clock = Clock(marks)
    for _ in range(3):
        with clock("optimizer"):
            pass
    assert marks.reached == []
    clock.read()
    assert marks.reached == [6]
    assert marks.given_back == [1, 2, 3, 4, 5, 6]


def test_an_exception_ends_its_part():
    clock = Clock(Ticks())
    with pytest.raises(ZeroDivisionError), clock("forward"), clock.communication():
        raise ZeroDivisionError
    with clock("data"):
        pass
    assert clock.read() == {
        "data": 1, "forward": 2, "communication": 1, "backward": 0, "optimizer": 0,
    }  # fmt: skip


def test_each_item_is_waited_for():
    clock = Clock(Ticks())
    items = []
    for item in clock.each("data", "ab"):
        items.append(item)
        with clock("forward"):
            pass
    assert items == ["a", "b"]
    assert clock.read()["data"] == 3  # the end has been waited for, too


def test_the_hosts_moments_are_seconds():
    marks = HostMarks()
    begin = marks.now()
    end = marks.now()
    assert 0 <= marks.seconds(begin, end) < 1
    assert isinstance(make_clock(torch.device("cpu"))._clock, HostMarks)


class Event:
    """As much of a CUDA event as a mark needs."""

    made = 0

    def __init__(self, enable_timing):
        assert enable_timing
        Event.made += 1
        self.synchronized = False

    def record(self):
        self.at = Event.clock = getattr(Event, "clock", 0) + 1

    def synchronize(self):
        self.synchronized = True

    def elapsed_time(self, other):
        return 1000.0 * (other.at - self.at)


def test_events_are_used_again(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    clock = Clock(StreamMarks())
    for _ in range(3):
        for _ in range(2):
            with clock("forward"):
                pass
        assert clock.read()["forward"] == 2
    assert Event.made == 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpus_parts_are_measured_on_the_gpu():
    clock = make_clock(torch.device("cuda"))
    x = torch.randn(4096, 4096, device="cuda")
    with clock("forward"):
        for _ in range(50):
            x = x @ x / 64
    with clock("backward"):
        x = x @ x / 64
    read = clock.read()
    assert read["forward"] > 10 * read["backward"] > 0
