"""The watchdog beside flags that somebody else sets."""

import threading
import time

from collectives.symmetric.watchdog import Watchdog, below


class Flags:
    def __init__(self):
        self.values, self.late, self.called = [0] * 4, [], threading.Event()

    def watch(self, timeout):
        def late(peer, about):
            self.late.append((peer, about))
            self.called.set()

        return Watchdog(below(lambda: list(self.values)), timeout, late)


def test_a_wait_in_vain_is_reported_once_with_what_it_was_for():
    flags = Flags()
    dog = flags.watch(0.2)
    dog.expect((1, 5), peer=3, about="layer 1")
    dog.expect((2, 5), peer=4, about="layer 2")
    assert flags.called.wait(5)
    time.sleep(0.3)
    assert flags.late == [(3, "layer 1")]
    dog.close()


def test_what_arrives_is_forgotten_and_begins_the_time_anew():
    flags = Flags()
    dog = flags.watch(0.5)
    for flag in range(4):
        dog.expect((flag, 1), peer=flag, about="")
    for flag in (2, 0, 3):  # never longer than the timeout apart, but longer together
        time.sleep(0.3)
        flags.values[flag] = 1
    assert not flags.late
    assert flags.called.wait(5)
    assert flags.late == [(1, "")]
    dog.close()


def test_nobody_is_late_where_nothing_is_expected():
    flags = Flags()
    dog = flags.watch(0.1)
    dog.expect((0, 1), peer=1, about="")
    flags.values[0] = 7
    time.sleep(0.4)
    assert not flags.late
    dog.close()
    dog.expect((0, 9), peer=1, about="")
    time.sleep(0.3)
    assert not flags.late
