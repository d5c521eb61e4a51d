"""Heartbeats: where each process is, by what it says and by what it no longer says."""

from __future__ import annotations

import socket
import time

import pytest

from control_support import wait_until
from unidist.control import Beat, Control, ControlServer, Heart

pytest_plugins = ["control_support"]
pytestmark = pytest.mark.usefixtures("no_thread_stays")


def test_beats(server: ControlServer, control: Control) -> None:
    def at(operation: str, step: int, moves: int = 0, paused: bool = False) -> Beat:
        control.beat("worker", 1, step, operation, moves, paused)
        return server.beats()["worker 1"]

    first = at("step", 4)
    assert (first.role, first.rank, first.step, first.operation, first.paused) == ("worker", 1, 4, "step", False)
    time.sleep(0.01)
    still = at("step", 4)
    assert still.stuck > still.silent  # heard again, but no further
    moved = at("step", 5)
    assert moved.stuck == moved.silent
    time.sleep(0.01)
    again = at("step", 5, moves=1)
    assert again.stuck == again.silent
    assert at("save", 5, paused=True).stuck == 0
    control.beat("server", 1, 0, "serve", 0, False)
    assert set(server.beats()) == {"worker 1", "server 1"}
    control.leave("worker", 1)
    left = server.beats()["worker 1"]
    assert (left.operation, left.paused, left.stuck) == ("left", True, 0.0)


def test_heart(server: ControlServer, control: Control) -> None:
    def said(operation: str, step: int, paused: bool = False) -> bool:
        beat = server.beats().get("worker 2")
        return beat is not None and (beat.operation, beat.step, beat.paused) == (operation, step, paused)

    with Heart(control, 2, interval=0.005) as heart:
        wait_until(lambda: said("start-up", 0))
        heart.at("step", 1)
        wait_until(lambda: said("step", 1))
        with heart.pause(), heart.pause():
            wait_until(lambda: said("step", 1, paused=True))
        wait_until(lambda: said("step", 1))
        heart.at("all_reduce", 1)
        wait_until(lambda: said("all_reduce", 1))
    assert said("left", 1, paused=True)


def test_a_step_that_was_broken_off_is_not_counted_once_the_script_goes_on(control: Control) -> None:
    heart = Heart(control, 0)
    heart.stepped()  # the engine is up
    heart.at("step", 0, training=True)
    heart.at("all_gather", 0)  # the loss may call others
    assert heart.place == (3, True)
    heart.left_step()
    assert heart.place == (3, True)  # others are in it
    heart.at("step", 0, training=True)
    assert heart.place == (3, True)
    heart.stepped()
    heart.left_step()  # of a step that needs nobody
    heart.at("leave", 0)
    assert heart.place == (4, False)


def test_being_twice_at_the_same_place_is_progress(server: ControlServer, control: Control) -> None:
    def moves() -> int:
        beat = server.beats().get("worker 0")
        return -1 if beat is None else beat.moves

    with Heart(control, 0, interval=0.005) as heart:
        for count in range(3):
            wait_until(lambda count=count: moves() == count)
            heart.at("step", 1)


def test_a_heart_outlives_its_server_in_silence(capfd: pytest.CaptureFixture[str]) -> None:
    server = ControlServer().start()
    control = Control(server.url, server.token)
    heart = Heart(control, 0, interval=0.005).start()
    wait_until(lambda: "worker 0" in server.beats())
    server.close()
    time.sleep(0.05)  # several more beats
    heart.at("step", 1)
    with heart.pause():
        pass
    heart.stop()
    control.close()
    assert capfd.readouterr() == ("", "")


def test_a_heart_without_a_server_is_silent(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with Heart(Control(f"tcp://127.0.0.1:{unused.getsockname()[1]}", "x"), 0, interval=0.005):
            time.sleep(0.05)
    assert capfd.readouterr() == ("", "")
